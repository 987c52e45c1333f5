"""Checksums of stored objects: xxh3-128 of every 64 MiB, so that many threads check one file, and
damage has a place.
"""

from __future__ import annotations

from typing import Any

import xxhash

from streammega.storage.store import ObjectWriter

CHECK_BYTES = 64 << 20
"""Part of the manifest's format: stored checksums are of so many bytes each."""


class HashingWriter:
    """Passes bytes on to a writer (None: nowhere), counts them and keeps their checksums.

    An ObjectWriter.
    """

    def __init__(self, inner: ObjectWriter | None) -> None:
        self._inner = inner
        self._hash: Any = xxhash.xxh3_128()
        self._checksums: list[str] = []
        self.size = 0

    @property
    def checksums(self) -> list[str]:
        """One for each CHECK_BYTES of what was written, the last for the rest."""
        ends_whole = self.size > 0 and self.size % CHECK_BYTES == 0
        if ends_whole:
            return list(self._checksums)
        # Of nothing, too, there is one.
        return [*self._checksums, self._hash.hexdigest()]

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes."""
        if self._inner is not None:
            self._inner.write(data)
        view = memoryview(data)
        start = 0
        while start < len(view):
            left = CHECK_BYTES - self.size % CHECK_BYTES
            stop = min(start + left, len(view))
            self._hash.update(view[start:stop])
            self.size += stop - start
            start = stop
            if self.size % CHECK_BYTES == 0:
                self._checksums.append(self._hash.hexdigest())
                self._hash = xxhash.xxh3_128()

    def commit(self) -> None:
        """Publish."""
        if self._inner is not None:
            self._inner.commit()

    def abort(self) -> None:
        """Throw everything away."""
        if self._inner is not None:
            self._inner.abort()
