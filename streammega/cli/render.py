"""Reports for people: the values that `--json` prints, as text."""

from __future__ import annotations

import codecs
import io
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from streammega.config.validate import finite
from streammega.errors.redaction import redact
from streammega.errors.words import in_one_line

Report = dict[str, Any]

SHOWN = 200
"""Characters of a text that are shown; JSON has all of it."""
UNLIMITED = 100_000
"""Columns of an output that is not a terminal: nothing is wrapped."""


class Sentence(str):
    """A text that is shown whole, however long it is."""


class Table(NamedTuple):
    """Rows of cells below their names; without names, each row is a name and its value."""

    level: int
    names: Sequence[str]
    rows: Sequence[Sequence[Any]]


class Heading(NamedTuple):
    """What the blocks after it are about. level: from 1 on."""

    level: int
    text: str


def show_report(report: Report, *, summary: str = "", as_json: bool = False) -> None:
    """Print a report as text or JSON.

    summary: a sentence that stands first. Numbers that are not finite are left out: JSON has none.
    """
    report = finite(report)
    text = as_text(report, summary)
    if as_json:
        # with another encoding a letter could be replaced
        is_utf8 = codecs.lookup(sys.stdout.encoding or "utf-8").name == "utf-8"
        text = json.dumps(report, indent=1, ensure_ascii=not is_utf8)
    print_text(text)


def print_text(text: str, *, to_stderr: bool = False) -> None:
    """Print a text at once, without secrets, and end its line."""
    print_data(redact(text), to_stderr=to_stderr)


def print_data(text: str, *, to_stderr: bool = False) -> None:
    """Print as it is what holds no secret, or is to be used: what a dataset holds. Not by click, which
    writes UTF-8 where the encoding is ASCII.
    """
    stream = sys.stderr if to_stderr else sys.stdout
    # names of files may hold bytes that are no text
    stream.write(text.encode("utf-8", "backslashreplace").decode() + "\n")
    stream.flush()


def write_output(path: str, data: bytes) -> None:
    """Write a plot, which appears whole or not at all. Raises OSError that names it."""
    from streammega.storage.atomic_file import write_file

    target = os.path.realpath(path)
    is_file = os.path.isfile(target) or not os.path.exists(target)
    try:
        if is_file and os.access(os.path.dirname(target), os.W_OK):
            write_file(target, [data])
        else:  # a device, or a file in a folder where none can be made
            Path(target).write_bytes(data)
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from None


def as_text(report: Report, summary: str = "") -> str:
    """A report as `name: value` lines and tables."""
    lines = [summary] if summary else []
    for block in _blocks(report, 1):
        if isinstance(block, Heading):
            lines.append("  " * (block.level - 1) + block.text)
        elif block.names:
            lines += _aligned(block)
        else:
            indent = "  " * (block.level - 1)
            lines += [f"{indent}{name}: {_short(_cell(value))}" for name, value in block.rows]
    return "\n".join(lines)


def _aligned(table: Table) -> list[str]:
    """The lines of a table, its columns aligned: numbers to the right."""
    import rich.console
    import rich.table
    import rich.text

    shown = rich.table.Table(box=None, padding=(0, 2, 0, 0), header_style="")
    for name, values in zip(table.names, zip(*table.rows, strict=True), strict=True):
        is_number = all(isinstance(value, int | float | None) for value in values)
        shown.add_column(name, justify="right" if is_number else "left", overflow="fold")
    for row in table.rows:
        shown.add_row(*(rich.text.Text(_short(_cell(value))) for value in row))
    indent = "  " * (table.level - 1)
    out = io.StringIO()
    width = None if sys.stdout.isatty() else UNLIMITED
    console = rich.console.Console(file=out, width=width, no_color=True)
    console.width -= len(indent)
    console.print(shown)
    # Not by splitlines: cells may hold characters at which it cuts, such as U+2028.
    return [indent + line.rstrip() for line in out.getvalue().removesuffix("\n").split("\n")]


def _short(text: str) -> str:
    """A text on one line, without its middle where it is long, and without secrets: one that is cut
    would not be known.
    """
    shown = redact(text)
    if len(shown) > SHOWN and not isinstance(text, Sentence):
        shown = f"{shown[: SHOWN // 2]} … {shown[-SHOWN // 2 :]}"
    return in_one_line(shown)


def _blocks(values: Mapping[str, Any], level: int) -> Iterator[Heading | Table]:
    """Plain values first, then below a heading each what holds other values. Empty ones are left
    out.
    """
    present = {name: value for name, value in values.items() if value not in (None, [], {}, (), "")}
    plain = {name: value for name, value in present.items() if not _is_group(value)}
    if plain:
        rows = []
        for name, value in plain.items():
            if isinstance(value, list) and all(isinstance(item, str) for item in value):
                rows += [(name, Sentence(item)) for item in value]
            else:
                rows.append((name, _with_bounds(name, value)))
        yield Table(level, (), rows)
    for name, group in present.items():
        if name not in plain:
            # of a thing that holds one list and nothing else, the list needs no name
            if len(present) > 1:
                yield Heading(level, name)
            yield from _group(group, level + (len(present) > 1))


def _group(group: Any, level: int) -> Iterator[Heading | Table]:
    """A list of alike things, or things by name: a table; a section each where they hold lists."""
    if isinstance(group, Mapping):
        if not all(isinstance(value, Mapping) for value in group.values()):
            yield from _blocks(group, level)
            return
        # things may have a name that is not their key
        key_name = "key" if any("name" in values for values in group.values()) else "name"
        group = [{key_name: key, **values} for key, values in group.items()]
    else:
        key_name = "name"
    if any(_is_group(value) for item in group for value in item.values()):
        for item in group:
            titles = {
                name: value
                for name, value in item.items()
                if name in ("name", key_name) or type(value) is int
            }
            words = [f"{name} {_cell(value)}" for name, value in titles.items()]
            yield Heading(level, ", ".join(words))
            others = {name: value for name, value in item.items() if name not in titles}
            yield from _blocks(others, level + 1)
        return
    names = list(dict.fromkeys(name for item in group for name in item))
    if not names:
        return
    rows = [[_with_bounds(name, item.get(name)) for name in names] for item in group]
    yield Table(level, names, rows)


def _with_bounds(name: str, value: Any) -> Any:
    """A value as it is; two bounds of tokens as [START, STOP)."""
    if name == "tokens" and isinstance(value, list) and len(value) == 2:
        return f"[{value[0]}, {value[1]})"
    return value


def _is_group(value: Any) -> bool:
    """Whether a value holds others with names."""
    if isinstance(value, Mapping):
        return True
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    return is_list and bool(value) and all(isinstance(item, Mapping) for item in value)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.5g}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, Sequence):
        return ", ".join(map(_cell, value))
    return str(value)
