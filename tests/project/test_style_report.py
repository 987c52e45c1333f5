"""The report of density counts what its docstring says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools.style_report import count, median, p90, table, total

REPORT = Path(__file__).parents[2] / "tools" / "style_report.py"
SOURCE = '''"""A module."""

# ---- reading ----

LIMIT = 3
"""Lines of a page:
what a reader holds."""


def first(values):
    """The first of `values`."""
    # Sorted, since the caller promises nothing.
    a, b = 1, 2

    return sorted(values)[0] + a  # noqa: S301


def outer(values):
    def inner(value):
        return value.x

    left, right = divmod(len(values), 2)  # a pair that belongs together
    return [inner(value) for value in values]
'''


def test_figures_of_a_known_source() -> None:
    figures = count(SOURCE)
    assert figures.lines == 23
    assert figures.function_lines == (6, 6, 2)
    assert figures.code_lines == 9, "no docstrings, blank lines or comments"
    assert figures.body_lines == 6, "what an inner function has is counted once"
    assert figures.expressions == 3 + 1 + 2 + 2
    assert figures.tuple_assignments == 1, "what a call returns may be taken apart"
    assert figures.why_lines == 2 + 2, (
        "an attribute's docstring of two lines and two comments, no heading, no noqa"
    )
    assert figures.long_lines == 0


@pytest.mark.parametrize(("columns", "long"), [(100, 0), (101, 1)])
def test_a_line_is_long_from_101_columns_on(columns: int, long: int) -> None:
    assert count("x = 1  # " + "y" * (columns - 9) + "\n").long_lines == long


@pytest.mark.parametrize(
    "comment",
    [
        "# type: ignore[no-untyped-def]  # pragma: no cover - compiled", "# noqa: E501", "# fmt: skip", "#!/usr/bin/env python3",
        "# ----------", "# === writing ===", "#",
    ],
)  # fmt: skip
def test_headings_and_words_to_tools_tell_no_reader_why(comment: str) -> None:
    assert count(comment + "\n").why_lines == 0
    assert count("# since the clock may jump\n" + comment + "\n").why_lines == 1


def test_docstrings_of_functions_are_no_comments_of_why() -> None:
    assert count('def f():\n    x = 1\n    """Not of an attribute."""\n').why_lines == 0


def test_an_empty_file_has_no_figures() -> None:
    figures = count("")
    assert (figures.lines, median(figures), p90(figures)) == (0, 0, 0)
    assert all("nan" not in line for line in table({"empty.py": figures}))


def test_the_total_is_of_all_functions_not_of_the_files_figures() -> None:
    short = count("def f():\n    pass\n" * 9)
    long = count("def f():\n" + "    pass\n" * 20)
    both = total([short, long])
    assert median(both) == 2
    assert p90(both) == 21
    assert both.lines == short.lines + long.lines


def test_the_command_prints_every_file_and_the_total(tmp_path: Path) -> None:
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "a.py").write_text(SOURCE)
    (tmp_path / "b.py").write_text("x, y = 1, 2\n")
    done = subprocess.run(
        [sys.executable, str(REPORT), str(tmp_path)], capture_output=True, text=True, check=True
    )
    rows = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines()}
    assert list(rows) == ["file", "b.py", "room/a.py", "total"]
    assert rows["room/a.py"] == ["23", "3", "6", "6", "1.33", "111.1", "0.0", "173.9"]
    assert rows["total"] == ["24", "3", "6", "6", "1.33", "200.0", "0.0", "166.7"]


@pytest.mark.parametrize(
    ("name", "told"),
    [("nothing", "cannot be read"), ("broken.py", "cannot be read"), ("", "no Python files")],
)
def test_what_cannot_be_read_is_told_without_a_traceback(
    tmp_path: Path, name: str, told: str
) -> None:
    target = tmp_path / name
    if name.endswith(".py"):
        target.write_text("def f(:\n")
    done = subprocess.run(
        [sys.executable, str(REPORT), str(target)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert told in done.stderr
    assert "Traceback" not in done.stderr
