"""Every promise has a test: docs/guarantees.md names it, and it is there."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
FILES = {path.name: path for path in TESTS.rglob("test_*.py")}
PAGE = (ROOT / "docs" / "guarantees.md").read_text()
NAMED = sorted(set(re.findall(r"`(test_\w+\.py::[\w:]+)`", PAGE)))


@cache
def named_in(name: str) -> frozenset[str]:
    """The tests of a file: functions, and methods with the classes that have or inherit them."""
    tree = ast.parse(FILES[name].read_text())
    found: dict[str, set[str]] = {
        "": {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    }
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            inherited = [
                found.get(base.id, set()) for base in node.bases if isinstance(base, ast.Name)
            ]
            own = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
            found[node.name] = own.union(*inherited)
    return frozenset(
        f"{owner}::{test}".lstrip(":") for owner, tests in found.items() for test in tests
    )


def test_every_named_test_exists() -> None:
    missing = []
    for named in NAMED:
        file, _, test = named.partition("::")
        if file not in FILES or test not in named_in(file):
            missing.append(named)
    assert not missing, "docs/guarantees.md names tests that do not exist"


def rows() -> list[list[str]]:
    lines = [
        line
        for line in PAGE.splitlines()
        if line.startswith("|") and not line.startswith(("|---", "| promise"))
    ]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_promise_names_a_test() -> None:
    without = [cells[0] for cells in rows() if not re.search(r"`test_\w+\.py::\w+", cells[-1])]
    assert not without
    assert len(NAMED) > 60


def test_every_guarantee_of_the_readme_is_on_the_page() -> None:
    readme = (ROOT / "README.md").read_text()
    section = readme.split("## What it guarantees")[1].split("\n## ")[0]
    promised = re.findall(r"^- \*\*(.+?)\*\*", section, re.M | re.S)
    assert len(promised) >= 12
    missing = [words for words in promised if f"**{' '.join(words.split())}**" not in PAGE]
    assert not missing
