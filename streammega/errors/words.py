"""Numbers and texts from outside in messages and reports."""

from __future__ import annotations

import re
from functools import lru_cache

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def pluralize(count: int, noun: str, plural: str = "") -> str:
    """`1 shard`, `2,000 shards`; `plural` for nouns that take more than an s."""
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"


def without_controls(text: str) -> str:
    """Text whose control characters, which a terminal would obey, are spelt; newlines and tabs
    stay.
    """
    return _CONTROLS.sub(lambda found: ascii(found[0])[1:-1], text)


@lru_cache(maxsize=64)
def in_one_line(name: str) -> str:
    """A name from outside as a message shows it: control characters are spelt, and newlines too.

    Kept, since the records of a file have all the same.
    """
    return without_controls(name).replace("\n", "\\n").replace("\t", "\\t")
