"""What the pages say of the code by name or by number: settings, options, layers, extras,
constants, links.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch

from streammega import StorageConfig
from streammega.cli.main import COMMANDS
from streammega.config.storage import load_storage
from streammega.config.validate import field_docs
from streammega.convert.read.formats import FORMATS
from streammega.integrations import frameworks
from streammega.loading import planner
from streammega.order import stream_order
from streammega.storage import retry
from streammega.storage.backends import fsspec, oss_credentials
from streammega.storage.backends.s3_options import OSS_OPTIONS, S3_OPTIONS, cloud_arguments
from streammega.storage.cache import PAGE_BYTES, cache_folder
from streammega.storage.fetch import flow_control
from streammega.storage.open import SCHEMES
from streammega.train import signals
from streammega.train.config import load_run
from tests.project.test_structure import LEVELS
from tools.settings import SECTIONS, settings_page

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "streammega"
PAGES = {
    path.stem: path.read_text() for path in [*(ROOT / "docs").glob("*.md"), *ROOT.glob("*.md")]
}


def blocks(page: str, language: str) -> list[str]:
    """The fenced blocks of a language, "" for those without one."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", PAGES[page], re.M | re.S)
    return [body for named, body in fenced if named == language]


@pytest.mark.guarantee("links-pages-lead")
@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_that_are_there(page: str) -> None:
    folder = ROOT if (ROOT / f"{page}.md").exists() else ROOT / "docs"
    links = re.findall(r"\]\((?!https?:)([^)#]+)", PAGES[page])
    assert not [link for link in links if not (folder / link).exists()]


GENERATED = ("settings", "guarantees")
WRITTEN = [
    page
    for page in [*sorted((ROOT / "docs").glob("*.md")), *ROOT.glob("*.md")]
    if page.stem not in GENERATED and page.stem != "CHANGELOG"
]
OUTPUT = ("console", "jsonl")
"""Languages of blocks that are what programs print and read."""


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.stem)
def test_lines_that_people_write_fit_a_hundred_columns(page: Path) -> None:
    """Rows of tables and outputs of programs are as long as they are."""
    language: str | None = None
    wide = []
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if line.startswith("```"):
            language = line[3:] if language is None else None
        elif len(line) > 100 and not line.startswith("|") and language not in OUTPUT:
            wide.append(f"{page.name}:{number}")
    assert not wide


# Settings.


@pytest.mark.guarantee("run-file-overrides")
def test_the_run_of_the_page_is_one(tmp_path: Path) -> None:
    """The file and the overrides of training.md, as they stand there."""
    (run_file,) = blocks("training", "toml")
    (tmp_path / "run.toml").write_text(run_file)
    (command,) = [block for block in blocks("training", "") if "-m streammega.train" in block]
    overrides = command.split("run.toml", 1)[1].split()
    assert overrides
    config = load_run(str(tmp_path / "run.toml"), overrides)
    assert config.num_samples()[0] == config.schedule.samples_after(10_000)
    assert set(config.validation) == {"books"}
    assert config.parallel.optimizer == "sharded", "what the narrow dtype of the page needs"


@pytest.mark.guarantee("run-file-overrides")
@pytest.mark.parametrize("settings", SECTIONS, ids=lambda settings: settings.__name__)
def test_every_setting_is_described_where_it_is_defined(settings: type) -> None:
    docs = field_docs(settings)
    assert set(docs) == {name for name in settings.__annotations__ if not name.startswith("_")}
    assert all(docs.values())


@pytest.mark.guarantee("run-file-overrides")
def test_the_page_of_settings_is_what_the_code_says() -> None:
    assert PAGES["settings"] == settings_page(), "run python tools/settings.py"


def test_every_class_of_settings_is_on_the_page() -> None:
    homes = [*PACKAGE.glob("config/*.py"), PACKAGE / "train" / "config.py"]
    homes.append(PACKAGE / "convert" / "options.py")
    trees = [ast.parse(home.read_text()) for home in homes]
    found = {
        node.name
        for tree in trees
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.decorator_list
    }
    # the fields of a run are the others; a flag is how the command line calls a field; nobody has to
    # tune
    assert found - {"RunConfig", "Flag", "Tuning"} == {settings.__name__ for settings in SECTIONS}


@pytest.mark.guarantee("anonymous-reads-environment")
def test_the_options_of_oss_are_those_of_the_page() -> None:
    table = PAGES["storage"].split("| option | meaning |")[1].split("\n\n")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| ")]
    assert {name for cell in cells for name in re.findall(r"`(\w+)`", cell)} == OSS_OPTIONS


@pytest.mark.guarantee("corpus-shards-stream")
def test_the_formats_of_the_page_are_those_of_the_code() -> None:
    suffixes = {suffix for name in FORMATS if name != "text" for suffix in FORMATS[name].suffixes}
    assert not [suffix for suffix in suffixes if f"`{suffix}`" not in PAGES["convert"]]


STORAGE_FILES = re.findall(
    r"^## ([^\n]+)$(?:(?!^## ).)*?^```toml\n(\[storage_options\].*?)^```$",
    PAGES["storage"],
    re.M | re.S,
)


@pytest.mark.guarantee("storage-files-page")
@pytest.mark.parametrize(("store", "text"), STORAGE_FILES)
def test_the_storage_file_of_each_store_has_options_that_it_knows(
    store: str, text: str, tmp_path: Path
) -> None:
    file = tmp_path / "storage.toml"
    file.write_text(text)
    config = load_storage(str(file))
    if store == "Alibaba OSS":
        assert set(config.storage_options) <= OSS_OPTIONS
    elif store in ("Google Cloud Storage", "Azure"):
        arguments = cloud_arguments("gs" if store.startswith("G") else "az", config)["config"]
        assert set(arguments) <= {"application_credentials", "account_name", "account_key"}
    else:
        assert set(config.storage_options) <= S3_OPTIONS


def test_each_cloud_has_a_storage_file() -> None:
    stores = " ".join(store for store, _ in STORAGE_FILES)
    assert all(name in stores for name in ("AWS", "MinIO", "Google", "Azure", "OSS"))


def test_every_command_is_on_a_page() -> None:
    pages = "".join(PAGES.values())
    missing = [name for name in COMMANDS if f"streammega {name}" not in pages]
    assert not missing, "README or docs: what the command does"


def test_the_schemes_of_the_page_are_those_of_the_code() -> None:
    table = PAGES["storage"].split("| URL |")[1].split("\n\n")[0]
    rows = re.findall(r"^\| (.*?`.*?) \|", table, re.M)
    named = {scheme for row in rows for scheme in re.findall(r"`(\w+)://", row)}
    assert named - {"file", "hdfs"} == set(SCHEMES), "a row of docs/storage.md"


@pytest.mark.parametrize("scheme", [name for name, known in SCHEMES.items() if known.is_bucket])
def test_every_scheme_of_buckets_has_a_store_under_the_contract(scheme: str) -> None:
    files = (ROOT / "tests" / "storage").glob("*.py")
    classes = [node for file in files for node in ast.parse(file.read_text()).body]
    contracts = [
        ast.unparse(node)
        for node in classes
        if isinstance(node, ast.ClassDef) and "Contract" in ast.unparse(node.bases)  # type: ignore[arg-type]
    ]
    tested = any(f"{scheme}://" in text or f"'{scheme}'" in text for text in contracts)
    assert tested, "a subclass of StoreContract in tests/storage"


# The code.


@pytest.mark.guarantee("imports-go-down")
def test_the_layers_of_the_page_are_those_that_are_checked() -> None:
    """Read from below, as imports go."""
    (diagram,) = [
        block for block in blocks("architecture", "") if "kernels/" in block and "──►" not in block
    ]
    drawn = [re.match(r" *(\w+)", line)[1] for line in reversed(diagram.splitlines())]  # type: ignore[index]
    assert sorted(drawn) == sorted(LEVELS)
    place = {unit: number for number, unit in enumerate(drawn)}
    level = {unit: number for number, unit in enumerate(LEVELS)}
    wrong = [(a, b) for a in level for b in level if level[a] < level[b] and place[a] > place[b]]
    assert not wrong, (
        "one lies above the other on the page, and below it in tests/project/test_structure.py"
    )


@pytest.mark.parametrize("page", ["docs/architecture.md", "CONTRIBUTING.md", "docs/glossary.md"])
def test_files_that_a_page_of_the_code_names_are_there(page: str) -> None:
    named = set(re.findall(r"`((?:[a-z_0-9]+/)*[a-z_0-9]+\.py)`", (ROOT / page).read_text()))
    there = [
        str(path)
        for folder in ("streammega", "tests", "tools")
        for path in (ROOT / folder).rglob("*.py")
    ]
    assert not [
        name for name in sorted(named) if not any(path.endswith(f"/{name}") for path in there)
    ]


def test_names_that_contributing_uses_are_defined() -> None:
    named = set(re.findall(r"`([A-Za-z]\w*[A-Za-z0-9])`", PAGES["CONTRIBUTING"]))
    files = [*PACKAGE.rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
    code = "\n".join(file.read_text() for file in files if file.parent != Path(__file__).parent)
    defined = re.findall(r"^ *(?:def|class) (\w+)|^(\w+)(?:: .+)? = ", code, re.M)
    assert named - {"assert", "python", "soak", "many_examples"} <= {
        name for pair in defined for name in pair
    }


@pytest.mark.guarantee("kernels-nogil-without")
def test_kernels_hold_neither_the_gil_nor_numbas_threads_nor_fast_math() -> None:
    jitted = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in (
                "numba.njit",
                "numba.jit",
                "njit",
            ):
                options = {item.arg: ast.unparse(item.value) for item in node.keywords}
                assert not {"parallel", "fastmath"} & set(options)
                if "inline" not in options:  # those become a part of who calls them
                    assert options.get("nogil") == "True"
                    jitted.append(path.name)
            assert not (
                isinstance(node, ast.Attribute)
                and node.attr in ("prange", "set_num_threads")
                and "numba" in ast.dump(node)
            )
    assert set(jitted) == {"jit.py"}, "one place decides how kernels are compiled"


@pytest.mark.guarantee("converting-verifying-describing")
def test_converting_verifying_and_describing_need_no_torch(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": "another"}\n')
    code = f"""
import os, sys
from streammega.cli.main import main
os.chdir({str(tmp_path)!r})
for words in ("convert a.jsonl out --tokenizer bytes --workers 1 --format zst", "verify out", "describe out"):
    assert main(words.split()) == 0
sys.exit(any(name in sys.modules for name in ("torch", "webdataset")))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FEATURES = {
    "flask": "view",
    "matplotlib": "plot",
    "prometheus_client": "metrics",
    "pyarrow": "convert",
    "ray": "ray",
    "safetensors": "export",
    "sentencepiece": "convert",
    "tiktoken": "convert",
    "tokenizers": "convert",
}
"""What only some features import, and the extra that brings it."""
BROUGHT_BY_OTHERS = {
    "botocore": "s3fs",
    "aiohttp": "s3fs",
    "llvmlite": "numba",
    "huggingface_hub": "tokenizers",
    "rich": "typer",
    "werkzeug": "flask",
}

FRAMEWORKS = {"megatron", "torchdata", "torchtitan", "transformers"}
"""What code for other trainers imports: within functions, which run in that trainer."""


def distributions(requirements: list[str]) -> set[str]:
    """The names of requirements, as metadata spells them."""
    return {re.match(r"[\w.-]+", line)[0].lower().replace("_", "-") for line in requirements}  # type: ignore[index]


def imported() -> dict[str, list[str]]:
    """Every module of others that the package imports anywhere, and the files that do.

    Also by a function that takes its name: `import_extra("tiktoken", ...)`.
    """
    own = {"streammega", *sys.stdlib_module_names}
    found: dict[str, list[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module]
            elif isinstance(node, ast.Call) and "import_" in ast.unparse(node.func):
                names = [str(arg.value) for arg in node.args[:1] if isinstance(arg, ast.Constant)]
            for name in {name.split(".")[0] for name in names} - own:
                found.setdefault(name, []).append(str(path.relative_to(PACKAGE)))
    return found


@pytest.mark.guarantee("imported-dependency-installed")
def test_every_import_is_a_dependency_or_what_an_extra_installs() -> None:
    always = distributions(PROJECT["dependencies"])
    extras: dict[str, list[str]] = PROJECT["optional-dependencies"]
    for module, files in imported().items():
        if module in FRAMEWORKS:
            assert all(file.startswith("integrations/") for file in files)
            continue
        package = BROUGHT_BY_OTHERS.get(module, module)
        wanted = distributions(extras[FEATURES[package]]) if package in FEATURES else always
        assert package.replace("_", "-") in wanted, f"{module}, imported by {files}"


@pytest.mark.parametrize(
    "path", sorted((PACKAGE / "integrations").glob("*.py")), ids=lambda path: path.name
)
def test_code_for_another_trainer_is_imported_without_it(path: Path) -> None:
    for node in ast.parse(path.read_text()).body:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
        assert not {name.split(".")[0] for name in names} & FRAMEWORKS


@pytest.mark.guarantee("imported-dependency-installed")
def test_messages_and_pages_name_the_extra_that_brings_what_is_missing() -> None:
    """A module that only a feature imports is asked for with its extra; no other extra is ever
    named.
    """
    extras = PROJECT["optional-dependencies"]
    for text in (*PAGES.values(), *(path.read_text() for path in PACKAGE.rglob("*.py"))):
        assert set(re.findall(r"streammega\[(\w+)\]", text)) <= set(extras)
    asked: dict[str, str] = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "import_extra":
                module, extra, _ = node.args
                if isinstance(module, ast.Constant) and isinstance(extra, ast.Constant):
                    asked[str(module.value).partition(".")[0]] = str(extra.value)
    assert asked == FEATURES


@pytest.mark.guarantee("framework-installed-named")
def test_every_framework_that_an_error_names_is_brought_by_its_extra() -> None:
    for extra, package in frameworks.PACKAGES.items():
        assert package in distributions(PROJECT["optional-dependencies"][extra])
        assert f"[{extra}]" in PAGES["trainers"], "docs/trainers.md: what to install"


@pytest.mark.guarantee("scheme-goes-transport")
def test_drivers_are_those_that_the_page_says_were_tested() -> None:
    said = re.search(r"with\s+obstore\s+([\d.]+)\s+and\s+s3fs\s+([\d.]+)\.\s", PAGES["storage"])
    assert said
    constraints = (ROOT / "constraints.txt").read_text()
    for name, version in (("obstore", said[1]), ("s3fs", said[2])):
        assert f"{name}=={version}" in constraints
        assert metadata.version(name) == version


@pytest.mark.guarantee("torchrun-waits-30")
def test_torchrun_waits_thirty_seconds_between_its_signals() -> None:
    from torch.distributed.elastic.multiprocessing.api import PContext
    from torch.distributed.run import get_args_parser

    assert signature(PContext.close).parameters["timeout"].default == 30
    options = [
        action
        for action in get_args_parser()._actions
        if "--shutdown-timeout" in action.option_strings
    ]
    assert options or torch.__version__.startswith("2.10."), "training.md names those without it"
    assert all(float(option.default or 30) == 30 for option in options)


STORAGE = StorageConfig()
NUMBERS: list[tuple[str, str, Any, Any]] = [
    ("architecture", "bodies have none are asked every 30 seconds", fsspec.RECHECK, 30),
    (
        "architecture",
        "block of the stream order (256 KiB by default, less with more than 512 lanes)",
        stream_order.MAX_BLOCK_BYTES,
        256 << 10,
    ),
    (
        "architecture",
        "while at most a seventh more is fetched than is used",
        planner.MAX_WASTE,
        1 / 7,
    ),
    ("architecture", "pass through 16 KiB pages", PAGE_BYTES, 16 << 10),
    (
        "performance",
        "after sixteen refusals in a row they go one by one",
        flow_control.REFUSED_IN_A_ROW,
        16,
    ),
    (
        "performance",
        "a second time (at most one in twenty), and then a third",
        (flow_control.HEDGE_SHARE, flow_control.MAX_COPIES),
        (1 / 20, 3),
    ),
    ("reliability", "until `retry_timeout` (ten minutes)", STORAGE.retry_timeout, 600),
    ("settings", "with pauses that grow to 10 seconds", retry.MAX_PAUSE, 10),
    (
        "settings",
        "The larger of 1 GiB and 1 % of its disk stays free",
        (cache_folder.DISK_RESERVE, cache_folder.DISK_SHARE),
        (1 << 30, 0.01),
    ),
    ("training", "a second Ctrl-C, more than a second after the first", signals.ONE_REQUEST, 1),
    (
        "orders",
        "take at least 128 MiB: 512 lanes of 256 KiB",
        stream_order.OPEN_BYTES,
        512 * 256 << 10,
    ),
    (
        "orders",
        "of whole samples (256 KiB by default)",
        stream_order.MAX_BLOCK_BYTES,
        256 << 10,
    ),
    ("README", "`convert` reads eleven formats", len(FORMATS), 11),
    (
        "storage",
        "is read again every five minutes",
        oss_credentials.READ_AGAIN_S,
        300,
    ),
    ("storage", "two minutes before it expires", oss_credentials.MARGIN_S, 120),
]


@pytest.mark.guarantee("numbers-page-others")
@pytest.mark.parametrize(
    ("page", "words", "number", "said"), NUMBERS, ids=[words for _, words, _, _ in NUMBERS]
)
def test_numbers_of_the_pages_are_those_of_the_code(
    page: str, words: str, number: Any, said: Any
) -> None:
    assert words in " ".join(PAGES[page].split())
    assert number == said
