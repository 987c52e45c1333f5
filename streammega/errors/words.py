"""Numbers in messages and reports."""

from __future__ import annotations


def pluralize(count: int, noun: str, plural: str = "") -> str:
    """`1 shard`, `2,000 shards`; `plural` for nouns that take more than an s."""
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"
