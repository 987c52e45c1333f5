"""The report of sizes counts what its docstring says, and its gate refuses splinters."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools.style_report import complaints, count_code_lines, private_words, read_modules

REPORT = Path(__file__).parents[2] / "tools" / "style_report.py"
SOURCE = '''"""A module."""

# ---- reading ----

LIMIT = 3
"""Lines of a page:
what a reader holds."""


def first(values):
    """The first of `values`."""
    # Sorted, since the caller promises nothing.
    a = 1

    return sorted(values)[0] + a  # noqa: S301


def outer(values):
    def inner(value):
        return value.x

    return [inner(value) for value in values]
'''


def write_package(folder: Path, files: dict[str, str]) -> Path:
    for name, source in files.items():
        path = folder / "package" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return folder / "package"


def refused(folder: Path, files: dict[str, str], *exceptions: str) -> list[str]:
    modules = read_modules(write_package(folder, files))
    return list(complaints(modules, exceptions))


def report(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(REPORT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_docstrings_comments_and_blank_lines_are_no_code() -> None:
    assert count_code_lines(SOURCE) == 8
    assert count_code_lines("") == 0
    assert count_code_lines("x = (\n    1,\n)\n") == 3


def test_rooms_and_files_have_a_line_each(tmp_path: Path) -> None:
    package = write_package(
        tmp_path,
        {
            "room/a.py": SOURCE,
            "room/b.py": "from package.room.a import first, outer\nfrom package import c\n",
            "c.py": "from package.room.a import first\n",
            "room/__init__.py": "",
        },
    )
    rows = {row[0]: row[1:] for row in map(str.split, report(str(package)).stdout.splitlines())}
    # files, code, statements, median, p90, taken
    assert rows["room"] == ["2", "10", "13", "5", "6", "2"]
    assert rows["."] == ["1", "1", "1", "0", "0", "0"]
    assert rows["total"] == ["3", "11", "14", "5", "6", "2"]
    by_file = report("--files", str(package)).stdout
    assert "room/a.py" in by_file


def test_a_small_module_with_one_importer_is_refused(tmp_path: Path) -> None:
    files = {"a.py": "x = 1\n", "b.py": "from package.a import x\n"}
    (complaint,) = refused(tmp_path, files)
    assert complaint == "a.py: 1 code lines, imported by b.py alone"
    assert not refused(tmp_path, files, "a.py", "# a comment")


@pytest.mark.parametrize(
    "files",
    [
        {"a.py": "x = 1\n", "b.py": "from package import a\n", "c.py": "import package.a\n"},
        {"a.py": "x = 1\n" * 60, "b.py": "from package.a import x\n"},
        {"a.py": "x = 1\n"},
        {"a/__init__.py": "x = 1\n", "b.py": "from package.a import x\n"},
    ],
    ids=["two importers", "large", "none", "a face"],
)
def test_other_modules_are_left_alone(tmp_path: Path, files: dict[str, str]) -> None:
    assert not refused(tmp_path, files)


PROTOCOL = """
from typing import Protocol

class Base:
    size: int

class Reader(Protocol):
    size: int
    def read(self): ...

class One(Base):
    def read(self): ...
"""


def test_a_protocol_of_one_class_is_refused(tmp_path: Path) -> None:
    assert refused(tmp_path, {"a.py": PROTOCOL}) == ["a.py:Reader: a Protocol of 1 classes"]
    other = (
        "\nclass Other:\n    def __init__(self):\n        self.size = 1\n    def read(self): ...\n"
    )
    assert not refused(tmp_path, {"a.py": PROTOCOL + other})


def test_the_list_of_exceptions_only_gets_shorter(tmp_path: Path) -> None:
    (complaint,) = refused(tmp_path, {"a.py": "x = 1\n"}, "a.py")
    assert "is in order by now; remove it from style_exceptions.txt" in complaint


def test_words_that_a_reader_has_to_learn_are_listed_by_place(tmp_path: Path) -> None:
    source = """
# whoever calls it
def read(most, path):
    '''Of a file, the lines.'''
    lines = f"{path} lies there"
    own = [name for name in lines if name.most]  # a use of a name is no new name
    return own, "None if there is none; told apart"
"""
    found = private_words(read_modules(write_package(tmp_path, {"read.py": source})))
    listed = sorted(place.partition(":")[2] for place in found)
    assert listed == ["2: whoever", "3: most", "4: Of ...", "5: lies", "6: own"]


@pytest.mark.parametrize(
    ("name", "words"),
    [("nothing", "cannot be read"), ("broken", "cannot be read"), ("", "no Python files")],
)
def test_what_cannot_be_read_is_an_error_without_a_traceback(
    tmp_path: Path, name: str, words: str
) -> None:
    if name == "broken":
        write_package(tmp_path / name, {"a.py": "def f(:\n"})
    done = report(str(tmp_path / name))
    assert done.returncode == 1
    assert words in done.stderr
    assert "Traceback" not in done.stderr
