"""Reports as one HTML file. It loads nothing from elsewhere: no scripts, fonts or styles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from typing import Any

import streammega

STYLE = """
body { font: 14px/1.4 system-ui, sans-serif; margin: 1.5em; max-width: 90em; }
div.table { overflow-x: auto; margin: 0.5em 0 1.5em; }
table { border-collapse: collapse; }
th, td { border: 1px solid #ccc; padding: 0.2em 0.6em; text-align: left; vertical-align: top; }
th { background: #eee; white-space: nowrap; }
td { white-space: pre-wrap; overflow-wrap: anywhere; min-width: 3em; }
td.number { white-space: nowrap; text-align: right; font-variant-numeric: tabular-nums; }
td.long { min-width: 24em; }
p.about { color: #555; }
"""
LONG = 60
"""Characters from which on a cell is kept wide enough to be read."""


def page_of(report: Mapping[str, Any], title: str, summary: str = "") -> str:
    """A page of a report: its values first, then a section for each list or group in it."""
    written = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    about = f"streammega {streammega.__version__}, {written}"
    lead = f"<p>{escape(summary)}</p>\n" if summary else ""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n"
        f'<body><h1>{escape(title)}</h1>\n<p class="about">{escape(about)}</p>\n'
        f"{lead}{_section(report, 2)}</body></html>\n"
    )


def _section(values: Mapping[str, Any], level: int) -> str:
    """Values in a table of two columns, and below it what holds other values. Empty ones are left
    out.
    """
    present = {name: value for name, value in values.items() if value not in (None, [], {}, "")}
    plain = {name: value for name, value in present.items() if not _is_group(value)}
    rows = [
        f"<tr><th>{_label(name)}</th>{_cell(name, value)}</tr>" for name, value in plain.items()
    ]
    parts = [_table(rows)] if rows else []
    for name, group in present.items():
        if name not in plain:
            heading = f"<h{level}>{_label(name)}</h{level}>\n"
            parts.append(heading + _group(group, min(level + 1, 6)))
    return "".join(parts)


def _group(group: Any, level: int) -> str:
    """A list of alike things, or things by name: a table, or a section each if they have lists of
    their own.
    """
    if isinstance(group, Mapping):
        if not all(isinstance(value, Mapping) for value in group.values()):
            return _section(group, level)
        group = [{"name": name, **values} for name, values in group.items()]
    if any(_is_group(value) for item in group for value in item.values()):
        return "".join(_item(item, level) for item in group)
    names = list(dict.fromkeys(name for item in group for name in item))
    rows = ["<tr>" + "".join(f"<th>{_label(name)}</th>" for name in names) + "</tr>"]
    for item in group:
        rows.append(f"<tr>{''.join(_cell(name, item.get(name)) for name in names)}</tr>")
    return _table(rows)


def _item(item: Mapping[str, Any], level: int) -> str:
    """A section of one thing, named by its numbers or its name."""
    named = {
        name: value
        for name, value in item.items()
        if name == "name" or (isinstance(value, int) and not isinstance(value, bool))
    }
    words = [
        str(value) if name == "name" else f"{name.replace('_', ' ')} {value}"
        for name, value in named.items()
    ]
    others = {name: value for name, value in item.items() if name not in named}
    return f"<h{level}>{escape(', '.join(words))}</h{level}>\n{_section(others, level + 1)}"


def _is_group(value: Any) -> bool:
    """Whether a value holds others with names."""
    if isinstance(value, Mapping):
        return True
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    return is_list and bool(value) and all(isinstance(item, Mapping) for item in value)


def _table(rows: Sequence[str]) -> str:
    inner = "\n".join(rows)
    return f'<div class="table"><table>{inner}</table></div>\n'


def _cell(name: str, value: Any) -> str:
    text = _text(name, value)
    is_number = (not isinstance(value, bool) and isinstance(value, int)) or name == "tokens"
    kind = ' class="number"' if is_number else ' class="long"' if len(text) > LONG else ""
    return f"<td{kind}>{escape(text)}</td>"


def _text(name: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Sequence) and not isinstance(value, str):
        if name == "tokens" and len(value) == 2:
            return f"[{value[0]}, {value[1]})"
        return ", ".join(str(item) for item in value)
    return str(value)


def _label(name: str) -> str:
    return escape(name.replace("_", " "))
