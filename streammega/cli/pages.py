"""Reports as one HTML file, which needs nothing from elsewhere: no scripts, fonts or styles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

STYLE = """
body { font: 14px/1.4 system-ui, sans-serif; margin: 2em; }
table { border-collapse: collapse; margin: 0.5em 0 1.5em; }
th, td { border: 1px solid #ccc; padding: 0.2em 0.6em; text-align: left; vertical-align: top; }
th { background: #eee; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
"""


def page_of(report: Mapping[str, Any], title: str = "streammega") -> str:
    """A page of any report: values as a list, lists of alike things as tables."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n"
        f"<body><h1>{escape(title)}</h1>\n{_shown(report)}</body></html>\n"
    )


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return _rows(value)
    if _is_table(value):
        return _table(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return escape(", ".join(str(item) for item in value))
    return escape("-" if value is None else str(value))


def _is_table(value: Any) -> bool:
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    return is_list and bool(value) and all(isinstance(item, Mapping) for item in value)


def _rows(values: Mapping[str, Any]) -> str:
    """A table of two columns."""
    rows = [
        f"<tr><th>{escape(name.replace('_', ' '))}</th>{_cell(value)}</tr>"
        for name, value in values.items()
    ]
    return f"<table>{''.join(rows)}</table>\n"


def _table(items: Sequence[Mapping[str, Any]]) -> str:
    """A row for each of some things, a column for each of their names."""
    names = list(dict.fromkeys(name for item in items for name in item))
    heads = "".join(f"<th>{escape(name.replace('_', ' '))}</th>" for name in names)
    rows = []
    for item in items:
        cells = "".join(_cell(item.get(name)) for name in names)
        rows.append(f"<tr>{cells}</tr>\n")
    return f"<table><tr>{heads}</tr>\n{''.join(rows)}</table>\n"


def _cell(value: Any) -> str:
    kind = ' class="number"' if isinstance(value, int) else ""
    return f"<td{kind}>{_shown(value)}</td>"
