"""Fill in docs/guarantees.md: behind each promise, the tests that are marked with its key.

python tools/guarantees.py [--check]

A promise stands on the page, with a key; a test of it has `@pytest.mark.guarantee("the-key")`.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "guarantees.md"
MARKER = "pytest.mark.guarantee"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing; fail where the page is not what would be written",
    )
    page, problems = guarantees_page()
    if not parser.parse_args().check:
        PAGE.write_text(page)
    elif PAGE.read_text() != page:
        problems.append("docs/guarantees.md is out of date: run python tools/guarantees.py")
    print("\n".join(problems), file=sys.stderr)
    return 1 if problems else 0


def guarantees_page() -> tuple[str, list[str]]:
    """The page as it should be, and what is wrong: promises without a test, keys without a promise."""
    tests: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for name, keys in marked_tests(ast.parse(path.read_text())):
            for key in keys:
                tests.setdefault(key, []).append(f"`{path.name}::{name}`")
    lines = []
    problems = []
    for line in PAGE.read_text().splitlines():
        cells = line.split(" | ")
        if line.startswith("|") and len(cells) >= 3 and cells[1].startswith("`"):
            key = cells[1].strip("`")
            found = tests.pop(key, [])
            if not found:
                problems.append(f"{key}: no test is marked with it")
            line = f"{cells[0]} | `{key}` | {', '.join(found)} |"
        lines.append(line)
    problems += [f"{key}: no promise of the page has it ({tests[key][0]})" for key in tests]
    return "\n".join(lines) + "\n", problems


def marked_tests(tree: ast.Module) -> Iterator[tuple[str, list[str]]]:
    """(name, keys) of each test of a file that proves a promise."""
    for node in tree.body:
        inner = node.body if isinstance(node, ast.ClassDef) else [node]
        owner = f"{node.name}::" if isinstance(node, ast.ClassDef) else ""
        for test in inner:
            if not isinstance(test, ast.FunctionDef):
                continue
            for mark in test.decorator_list:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == MARKER:
                    yield f"{owner}{test.name}", [ast.literal_eval(key) for key in mark.args]


if __name__ == "__main__":
    sys.exit(main())
