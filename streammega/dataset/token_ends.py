"""A digest of the first and the last tokens of a shard. It is part of the identity of a dataset.
Manifests have it, so that opening a dataset reads no tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import xxhash

from streammega.storage.backends.local import FileRange, copy_buffer, read_files

END_BYTES = 1 << 10
"""Bytes of tokens that are hashed at each end of a shard. Another value changes the identity of every
dataset, which states of runs hold: never change it.
"""


def digest_of_ends(first: bytes | memoryview, last: bytes | memoryview) -> str:
    """The digest, 16 hex digits. first, last: END_BYTES each, or all tokens of a shard that has
    fewer.
    """
    return xxhash.xxh3_64_digest(bytes(first) + bytes(last)).hex()


class TokenEnds:
    """Keeps the first and the last tokens of those that are written."""

    def __init__(self) -> None:
        self._first = b""
        self._last = b""

    def add(self, data: memoryview) -> None:
        """Note bytes of tokens that follow those before."""
        if len(self._first) < END_BYTES:
            self._first += bytes(data[: END_BYTES - len(self._first)])
        last = bytes(data[-END_BYTES:])
        self._last = (self._last + last)[-END_BYTES:]

    def add_files(self, ranges: Sequence[FileRange]) -> None:
        """Note the bytes of ranges of files. Raises as `read_files` does."""
        size = sum(wanted.size for wanted in ranges)
        # Bytes in the middle are at no end, whatever comes before and after.
        for part in (
            _cut(ranges, 0, END_BYTES),
            _cut(ranges, max(END_BYTES, size - END_BYTES), size),
        ):
            for piece in read_files(part, copy_buffer()):
                self.add(piece.data)

    @property
    def digest(self) -> str:
        """The digest of what was noted, 16 hex digits."""
        return digest_of_ends(self._first, self._last)


def _cut(ranges: Iterable[FileRange], start: int, stop: int) -> list[FileRange]:
    """Bytes [start, stop) of ranges that are end to end."""
    parts = []
    before = 0
    for wanted in ranges:
        low = max(start - before, 0)
        high = min(stop - before, wanted.size)
        if low < high:
            parts.append(wanted.part(low, high))
        before += wanted.size
    return parts
