"""What versions are called, and which earlier one each builds on. Pure.

A version that is a power of two lists all of its shards. Any other one lists what came after the
version that is left when its lowest bit is cleared: 22 after 20, 20 after 16, and 16 lists all. So
version n is read from as many manifests as n has bits set, 13 at most of 10,000, whose names are
known from n; and a shard is written again once for each bit, not in every version that follows.
"""

from __future__ import annotations

import re

from streammega.dataset.shards import MANIFEST, strip_suffix

STORED = re.compile(rf"\.v(?P<number>\d{{8,}}){re.escape(MANIFEST)}$")
"""The end of a version's name."""


def version_url(prefix: str, number: int) -> str:
    """Where the manifest of a version lies."""
    prefix = strip_suffix(prefix)
    return f"{prefix}.v{number:08d}{MANIFEST}" if number else f"{prefix}{MANIFEST}"


def number_of(url: str) -> tuple[str, int] | None:
    """(prefix, number) of a version's manifest; None for any other name."""
    match = STORED.search(url)
    return None if match is None else (url[: match.start()], int(match["number"]))


def parent_of(number: int) -> int:
    """The version that another one builds on; 0: it lists everything."""
    return number & (number - 1)


def line_of(number: int) -> list[int]:
    """A version and those that it builds on, the newest first."""
    line = []
    while number:
        line.append(number)
        number = parent_of(number)
    return line
