"""The shape of the package: imports go down only, and the public names are what is promised."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import streammega
from streammega import errors

ROOT = Path(streammega.__file__).parent
# Lower may not import higher. Units on one level do not import each other.
LEVELS = [
    {"redaction"},
    {"errors"},
    {"config", "conversations"},
    {"kernels"},
    {"storage"},
    {"index"},
    {"order"},
    {"samples"},
    {"stream"},
    {"ranks"},
    {"train"},
    {"convert", "plotting"},
    {"describe", "report", "verify"},
    {"repair"},
    {"commands"},
    {"cli"},
]
LEVEL = {unit: number for number, units in enumerate(LEVELS) for unit in units}
CONVERT_MAY_IMPORT = {"index", "storage", "config", "conversations", "errors", "kernels", "redaction"}


def unit_of(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    return parts[0].removesuffix(".py")


def imported_units(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module] if node.module != "streammega" else [f"streammega.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("streammega.")}
    return found


SOURCES = [path for path in ROOT.rglob("*.py") if path.name not in ("__init__.py", "__main__.py") or path.parent != ROOT]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_down_only(path: Path) -> None:
    unit = unit_of(path)
    for other in imported_units(path) - {unit}:
        assert LEVEL[other] < LEVEL[unit], f"{path.relative_to(ROOT)} ({unit}) imports {other}, which lies above it"
        if unit == "convert":
            assert other in CONVERT_MAY_IMPORT


def test_every_source_has_a_level() -> None:
    assert {unit_of(path) for path in SOURCES} == set(LEVEL)


@pytest.mark.parametrize("path", [p for p in SOURCES if unit_of(p) == "order"], ids=lambda path: path.name)
def test_order_is_pure(path: Path) -> None:
    forbidden = {"torch", "time", "datetime", "os", "pathlib", "random", "io"}
    for node in ast.walk(ast.parse(path.read_text())):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
        assert not {name.split(".")[0] for name in names} & forbidden


def test_all_public_names_are_importable() -> None:
    for name in streammega.__all__:
        assert getattr(streammega, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = streammega.nothing  # type: ignore[attr-defined]


def test_errors_are_one_documented_tree() -> None:
    classes = [value for value in vars(errors).values() if inspect.isclass(value)]
    assert sorted(errors.__all__) == sorted(item.__name__ for item in classes)
    for item in classes:
        assert issubclass(item, errors.StreammegaError)
        assert item.__name__ in (errors.__doc__ or "")


def test_command_line_starts_without_torch() -> None:
    code = "import sys, streammega.cli; sys.exit(any(name in sys.modules for name in ('torch', 'numba')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
