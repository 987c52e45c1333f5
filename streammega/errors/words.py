"""Numbers, and texts of unknown origin, in messages and reports."""

from __future__ import annotations

import re
from functools import lru_cache

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def pluralize(count: int, noun: str, plural: str = "") -> str:
    """`1 shard`, `2,000 shards`; `plural` for nouns that take more than an s."""
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"


def without_controls(text: str) -> str:
    """Text with its control characters escaped, which a terminal would obey. Newlines and tabs stay."""
    return _CONTROLS.sub(lambda match: ascii(match[0])[1:-1], text)


def is_utf8(text: str) -> bool:
    """Whether a text can be stored as UTF-8. Half of a surrogate pair cannot, nor can bytes of a name
    that are no text.
    """
    return text.encode(errors="ignore").decode() == text


@lru_cache(maxsize=64)
def in_one_line(name: str) -> str:
    """A name for a message, with control characters and newlines escaped.

    Cached, since all records of a file have the same name.
    """
    return without_controls(name).replace("\n", "\\n").replace("\t", "\\t")
