"""The shape of the package: imports go down only, and the public names are what is promised."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import get_args

import pytest

import streammega
from streammega import errors
from streammega.config import ORDERS, Order
from streammega.samples.open import OPENED_BY

ROOT = Path(streammega.__file__).parent
# From the bottom to the top it is the way of the data. Lower may not import higher.
LEVELS = [
    "errors",
    "config",
    "kernels",
    "order",
    "storage",
    "dataset",
    "samples",
    "loading",
    "parallel",
    "gradients",
    "integrations",
    "train",
    "convert",
    "cli",
    "apps",
]
LEVEL = {unit: number for number, unit in enumerate(LEVELS)}
NOT_FROM_CONVERT = {"order", "samples", "loading", "parallel", "gradients", "integrations", "train"}
"""A corpus is converted on machines that never train: nothing of the order, of loaders or of
gradients is needed there.
"""
FACES = {"__init__.py", "__main__.py"}
TABLE_OF_COMMANDS = Path("cli", "main.py")
"""The one file below `apps` that imports it."""
SIMULATED_READS = Path("apps", "simulated_reads.py")
"""It runs the code that reads over a network that is a model, which no public name can."""
PUBLIC_FOR_APPS = (
    "streammega",
    "streammega.storage",
    "streammega.dataset",
    "streammega.order",
    "streammega.errors",
    "streammega.config",
    "streammega.convert",
    "streammega.train.config",
)
"""Modules whose `__all__` `apps` may import."""
COMMAND_LINE_KIT = (
    "streammega.config.validate",
    "streammega.cli.options",
    "streammega.cli.render",
    "streammega.cli.progress",
    "streammega.errors.cached_property",
    "streammega.errors.extras",
    "streammega.errors.logs",
    "streammega.errors.process",
    "streammega.errors.redaction",
)
"""What every command uses: the checks of its settings, its options, its report, its progress,
packages of extras, messages of defects, and names without secrets.
"""


def unit_of(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    return parts[0].removesuffix(".py")


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imported_units(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree_of(path)):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = (
                [node.module]
                if node.module != "streammega"
                else [f"streammega.{alias.name}" for alias in node.names]
            )
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("streammega.")}
    return found


SOURCES = [path for path in ROOT.rglob("*.py") if path.name not in FACES or path.parent != ROOT]


@pytest.mark.guarantee("imports-go-down")
def test_imports_go_down_only() -> None:
    upward = []
    into_training = []
    for path in SOURCES:
        unit = unit_of(path)
        may_import = {"apps"} if path.relative_to(ROOT) == TABLE_OF_COMMANDS else set()
        may_import |= set(streammega.__all__) if unit == "apps" else set()
        for other in imported_units(path) - {unit} - may_import:
            if LEVEL[other] >= LEVEL[unit]:
                upward.append(f"{path.relative_to(ROOT)} ({unit}) imports {other}")
            if unit == "convert" and other in NOT_FROM_CONVERT:
                into_training.append(f"{path.relative_to(ROOT)} imports {other}")
    assert not upward, "what is imported lies above"
    assert not into_training


def test_no_property_has_a_lock_of_all_objects() -> None:
    """functools.cached_property has one on Python 3.11; tests/order/test_phases.py shows what it does."""
    with_lock = [
        str(path.relative_to(ROOT))
        for path in SOURCES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ImportFrom) and node.module == "functools"
        if "cached_property" in {alias.name for alias in node.names}
    ]
    assert with_lock == ["errors/cached_property.py"], "import it from streammega.errors"


@pytest.mark.guarantee("apps-public-api")
def test_commands_for_people_use_the_public_api_alone() -> None:
    private = []
    for path in set((ROOT / "apps").rglob("*.py")) - {ROOT / SIMULATED_READS}:
        for node in ast.walk(tree_of(path)):
            imports: list[tuple[str, str]] = []
            if isinstance(node, ast.ImportFrom):
                imports = [(str(node.module), alias.name) for alias in node.names]
            elif isinstance(node, ast.Import):
                imports = [(alias.name, "") for alias in node.names]
            for module, name in imports:
                if not module.startswith("streammega") or module.startswith("streammega.apps"):
                    continue
                is_public = module in PUBLIC_FOR_APPS and (
                    not name or name in importlib.import_module(module).__all__
                )
                if not is_public and module not in COMMAND_LINE_KIT:
                    private.append(f"{path.relative_to(ROOT)}: {name} of {module}")
    assert not private


@pytest.mark.guarantee("no-secret-shown")
def test_every_logger_takes_secrets_out_of_its_records() -> None:
    """By `get_logger`: filters of a logger do not hold for those below it."""
    by_another_way = [
        path.relative_to(ROOT).as_posix()
        for path in ROOT.rglob("*.py")
        if re.search(r"[gG]etLogger\((?!\")", path.read_text())
    ]
    assert by_another_way == ["errors/logs.py"]


def test_every_source_has_a_level() -> None:
    assert {unit_of(path) for path in SOURCES} == set(LEVEL)
    assert {path.name for path in ROOT.glob("*.py")} == FACES, "every other file has a room"


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(path: Path, modules: set[str]) -> set[str]:
    """The modules of this package that a file names in its imports, also in those that only type
    checkers read.
    """
    found = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (inner & modules) or {node.module}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & modules


def test_no_two_modules_need_each_other() -> None:
    paths = {module_of(path): path for path in SOURCES}
    todo = {name: imported_modules(path, set(paths)) - {name} for name, path in paths.items()}
    while free := {name for name, needs in todo.items() if not needs & set(todo)}:
        todo = {name: needs for name, needs in todo.items() if name not in free}
    inside = {name: sorted(needs & set(todo)) for name, needs in todo.items()}
    assert not inside, "these modules import each other in a circle, or what does"


@pytest.mark.guarantee("imports-go-down")
def test_order_is_pure() -> None:
    forbidden = {"torch", "time", "datetime", "os", "pathlib", "random", "io"}
    impure = []
    for path in SOURCES:
        if unit_of(path) != "order":
            continue
        for node in ast.walk(tree_of(path)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            if {name.split(".")[0] for name in names} & forbidden:
                impure.append(f"{path.relative_to(ROOT)} imports {names}")
    assert not impure


def test_every_order_has_a_row_and_is_opened() -> None:
    names = set(get_args(Order))
    assert set(ORDERS) == names, "config/orders.py: what it can do"
    assert set(OPENED_BY) == names, "samples/open.py: how it is opened"


def test_no_code_compares_an_order_with_a_name() -> None:
    found = []
    for path in SOURCES:
        for node in ast.walk(tree_of(path)):
            if not isinstance(node, ast.Compare):
                continue
            names = {
                ast.unparse(item).rpartition(".")[2] for item in (node.left, *node.comparators)
            }
            constants = {item.value for item in ast.walk(node) if isinstance(item, ast.Constant)}
            if "order" in names and constants & set(get_args(Order)):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}")
    assert not found, "ask ORDERS of config/orders.py, so that another order needs no change here"


@pytest.mark.guarantee("public-name-can")
def test_all_public_names_are_importable() -> None:
    for name in streammega.__all__:
        assert getattr(streammega, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = streammega.nothing


def test_type_checkers_find_all_public_names_where_they_are_loaded_from() -> None:
    found: dict[str, str] = {}
    for node in ast.walk(tree_of(ROOT / "__init__.py")):
        if isinstance(node, ast.ImportFrom) and node.module != "typing":
            found |= {alias.asname or alias.name: str(node.module) for alias in node.names}
    assert {"__version__", *found} - {"annotations"} == set(streammega.__all__)
    for name, module in found.items():
        if name != "annotations":
            assert getattr(importlib.import_module(module), name) is getattr(streammega, name)


@pytest.mark.guarantee("errors-say-how", "public-name-can")
def test_errors_are_one_documented_tree() -> None:
    classes = [value for value in vars(errors).values() if inspect.isclass(value)]
    assert sorted(errors.__all__) == sorted(item.__name__ for item in classes)
    for item in classes:
        assert issubclass(item, errors.StreammegaError)
        assert item.__name__ in (errors.__doc__ or "")


@pytest.mark.guarantee("converting-verifying-describing")
def test_command_line_starts_without_torch() -> None:
    code = "import sys, streammega.cli.main; sys.exit(any(name in sys.modules for name in ('torch', 'numba')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_mutants_that_are_listed_as_equivalent_are_of_todays_code() -> None:
    listed = Path(__file__).parent.parent / "support" / "data" / "mutants.toml"
    for mutant in tomllib.loads(listed.read_text())["mutant"]:
        assert mutant["result"] in ("killed", "survived", "equivalent")
        if mutant["result"] == "equivalent":
            lines = (ROOT.parent / mutant["file"]).read_text().split("\n")
            assert mutant["before"] in " ".join(line.strip() for line in lines)
            assert mutant["reason"].endswith(".")
