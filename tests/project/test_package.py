"""What is built from a checkout: a wheel and an sdist of the package alone, that work without extras."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from numba.core.caching import _CacheLocator

import streammega

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text())
HIDE = """\
from importlib.machinery import PathFinder

find = PathFinder.find_spec
PathFinder.find_spec = lambda name, *rest: None if name in {hidden} else find(name, *rest)
"""
"""A sitecustomize module by which packages are as if they were not installed."""


class Built(NamedTuple):
    wheel: Path
    sdist: Path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The wheel and the sdist of a copy of the checkout's files."""
    folder = tmp_path_factory.mktemp("package")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    code = "from setuptools import build_meta as b; b.build_wheel('dist'); b.build_sdist('dist')"
    (folder / "dist").mkdir()
    subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, check=True)
    ((wheel,), (sdist,)) = ((folder / "dist").glob(end) for end in ("*.whl", "*.tar.gz"))
    return Built(wheel, sdist)


def sources() -> set[str]:
    """The package's files."""
    return {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "streammega").rglob("*")
        if path.suffix in (".py", ".html", ".css") or path.name == "py.typed"
    }


@pytest.mark.guarantee("wheel-alone")
def test_the_wheel_has_the_package_and_nothing_else(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as wheel:
        names = set(wheel.namelist())
        info = f"streammega-{streammega.__version__}.dist-info"
        metadata = wheel.read(f"{info}/METADATA").decode()
    described = {name for name in names if name.startswith(f"{info}/")}
    assert names - described == sources()
    assert f"{info}/licenses/LICENSE" in described
    assert "License-Expression: Apache-2.0" in metadata
    assert f"Version: {streammega.__version__}\n" in metadata


def test_the_sdist_has_what_the_wheel_is_built_from(built: Built) -> None:
    with tarfile.open(built.sdist) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    files = {"pyproject.toml", "README.md", "LICENSE"}
    assert names >= sources() | files
    assert not [name for name in names if name.startswith(("tests", "tools", "docs"))]


def core_packages() -> set[str]:
    """The distributions that an installation without extras has, by their normalized names."""
    found: set[str] = set()
    wanted = list(PROJECT["dependencies"])
    while wanted:
        requirement = wanted.pop()
        name = normalized(re.split(r"[\s<>=!~;\[(]", requirement, maxsplit=1)[0])
        if name in found or "extra ==" in requirement:
            continue
        found.add(name)
        try:
            wanted += importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:  # of another platform
            continue
    return found


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def share_kernels(package: Path) -> None:
    """Kernels that this checkout has compiled are also those of a copy of it: compiling takes half a
    minute. numba finds them by the path of their file, and believes them while its time stays.
    """
    for source in (ROOT / "streammega" / "kernels").glob("*.py"):
        copy = package / "kernels" / source.name
        assert copy.read_bytes() == source.read_bytes()
        shutil.copystat(source, copy)
        own, other = map(_CacheLocator.get_suitable_cache_subpath, map(str, (source, copy)))
        for folder in source.parent.glob(f"__pycache__/kernels/{source.stem}-*/{own}"):
            shutil.copytree(folder, copy.parent / folder.relative_to(source.parent).parent / other)


@pytest.mark.guarantee("wheel-alone", "extras-named")
def test_the_wheel_alone_passes_the_smoke_test_and_names_missing_extras(
    built: Built, tmp_path: Path
) -> None:
    """Packages that other extras bring are hidden; `make wheel` tries it where they are missing."""
    site = tmp_path / "site"
    zipfile.ZipFile(built.wheel).extractall(site)
    share_kernels(site / "streammega")
    core = core_packages()
    hidden = {
        module
        for module, names in importlib.metadata.packages_distributions().items()
        if not {normalized(name) for name in names} & (core | {"streammega", "pip"})
    }
    assert {"pyarrow", "tokenizers", "sentencepiece", "tiktoken"} <= hidden
    (site / "sitecustomize.py").write_text(HIDE.format(hidden=sorted(hidden)))
    ended = subprocess.run(
        [sys.executable, "-P", ROOT / "tools" / "smoke.py"],
        env=os.environ | {"PYTHONPATH": str(site), "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    uses = re.search(r"(\d+) uses name the extra", ended.stdout)
    assert uses is not None
    assert int(uses[1]) >= 9


def test_the_package_imports_what_it_depends_on() -> None:
    """What no module imports belongs into an extra."""
    code = "\n".join(path.read_text() for path in (ROOT / "streammega").rglob("*.py"))
    imported = set(re.findall(r"^\s*(?:import|from) (\w+)", code, re.M))
    named = {re.split("[>=]", line)[0] for line in PROJECT["dependencies"]}
    by_others = {"s3fs", "cffi", "webdataset"}
    assert named - imported == by_others, "fsspec, zstandard, and pipelines of users"


def test_the_version_has_one_place_and_heads_the_changelog() -> None:
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert headings[0] == streammega.__version__
    assert "version" in PROJECT["dynamic"]
    assert "version" not in CITATION, "it would be a second place"


def test_addresses_of_the_project_have_one_place() -> None:
    """There are none until the owner writes [project.urls]; then CITATION.cff repeats one."""
    addresses = PROJECT.get("urls", {})
    for name, address in addresses.items():
        assert re.fullmatch(r"https://[\w.-]+\.\w+(/\S*)?", address), f"{name} of [project.urls]"
        assert "example" not in address
    assert CITATION.get("repository-code") == addresses.get("Repository")


def test_the_citation_has_what_its_format_asks_for() -> None:
    assert {"cff-version", "message", "title", "authors"} <= set(CITATION)
    assert CITATION["license"] == PROJECT["license"]


@pytest.mark.guarantee("workflows-are-targets")
def test_workflows_of_the_forge_run_targets_of_the_makefile_alone() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    runs = []
    for path in sorted((ROOT / ".github" / "workflows").iterdir()):
        workflow = yaml.safe_load(path.read_text())
        assert workflow["permissions"] == {"contents": "read"}
        for job in workflow["jobs"].values():
            assert "timeout-minutes" in job
            runs += [step["run"] for step in job["steps"] if "run" in step]
    assert "make check" in runs
    for run in runs:
        words = re.fullmatch(r"make ([a-z-]+)( [A-Z]+=\$\{\{ matrix\.\w+ \}\})?", run)
        assert words, f"{run}: a step of a workflow is `make TARGET`"
        assert words[1] in targets


def test_forms_of_issues_are_whole() -> None:
    for path in (ROOT / ".github" / "ISSUE_TEMPLATE").iterdir():
        form = yaml.safe_load(path.read_text())
        if path.name == "config.yml":
            continue
        assert form["name"], path.name
        assert form["description"], path.name
        for item in form["body"]:
            assert item["type"] in ("markdown", "textarea", "input", "dropdown", "checkboxes")
            assert "value" in item["attributes"] or item["attributes"]["label"]
