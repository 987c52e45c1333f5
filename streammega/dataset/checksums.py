"""Checksums of stored objects: xxh3-128 of every 64 MiB. So many threads can check one file, and
damage has a place.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from typing import Any

import xxhash

from streammega.storage.backends.local import FileRange, copy_buffer, read_files
from streammega.storage.store import ObjectWriter, as_bytes
from streammega.storage.thread_pool import thread_state

CHECK_BYTES = 64 << 20
"""Bytes of one stored checksum. This is part of the manifest's format."""
WRITE_BACK_BYTES = 8 << 20
"""After so many bytes of a part, the disk begins to write them; see `LocalWriter`."""


@dataclass(frozen=True, kw_only=True)
class _Part:
    """Bytes [start, stop) of what is written, which have one checksum.

    ranges: where they come from. hash: the checksum so far.
    """

    start: int
    stop: int
    ranges: list[FileRange]
    hash: Any


def checksums_of(data: memoryview | bytes) -> list[str]:
    """A checksum for each CHECK_BYTES of an object, the last for the rest. An empty object has one."""
    view = as_bytes(data)
    starts = range(0, max(len(view), 1), CHECK_BYTES)
    return [xxhash.xxh3_128_hexdigest(view[start : start + CHECK_BYTES]) for start in starts]


class ChecksummedWriter(ObjectWriter):
    """Passes bytes on to a writer, counts them and keeps their checksums."""

    def __init__(self, inner: ObjectWriter) -> None:
        self._inner = inner
        self._hash: Any = xxhash.xxh3_128()
        self._checksums: list[str] = []
        self.size = 0

    @property
    def checksums(self) -> list[str]:
        """`checksums_of` everything that was written."""
        ends_whole = self.size > 0 and self.size % CHECK_BYTES == 0
        if ends_whole:
            return list(self._checksums)
        return [*self._checksums, self._hash.hexdigest()]

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes."""
        view = as_bytes(data)
        self._inner.write(view)
        start = 0
        while start < len(view):
            missing = CHECK_BYTES - self.size % CHECK_BYTES
            stop = min(start + missing, len(view))
            self._hash.update(view[start:stop])
            self.size += stop - start
            start = stop
            if self.size % CHECK_BYTES == 0:
                self._end_check()

    def write_files(self, ranges: Sequence[FileRange], threads: int) -> Iterator[int]:
        """Append ranges of local files, by several threads where the writer takes bytes in any
        order. Yields bytes as they are written.

        Nothing else may be written meanwhile. If it is not exhausted, everything is discarded.
        """
        parts = self._parts_of(ranges) if threads > 1 and self._inner.can_write_at else []
        try:
            if len(parts) < 2:
                for piece in read_files(ranges, copy_buffer()):
                    self.write(piece.data)
                    yield len(piece)
                return
            yield from _copied_by_threads(parts, self._inner, threads)
        except BaseException:
            self.abort()  # what was written may have holes
            raise
        for part in parts:
            self._hash = part.hash
            self.size = part.stop
            if self.size % CHECK_BYTES == 0:
                self._end_check()

    def _parts_of(self, ranges: Sequence[FileRange]) -> list[_Part]:
        """The parts of ranges that follow what was written, cut where checksums end."""
        parts: list[_Part] = []
        end = self.size
        hash_of_part = self._hash
        for wanted in ranges:
            taken = 0
            while taken < wanted.size:
                if not parts or end % CHECK_BYTES == 0:
                    parts.append(_Part(start=end, stop=end, ranges=[], hash=hash_of_part))
                    hash_of_part = xxhash.xxh3_128()
                part = parts[-1]
                size = min(CHECK_BYTES - end % CHECK_BYTES, wanted.size - taken)
                part.ranges.append(wanted.part(taken, taken + size))
                taken += size
                end += size
                parts[-1] = replace(part, stop=end)
        return parts

    def _end_check(self) -> None:
        self._checksums.append(self._hash.hexdigest())
        self._hash = xxhash.xxh3_128()

    def commit(self) -> None:
        """Publish."""
        self._inner.commit()

    def abort(self) -> None:
        """Discard everything."""
        self._inner.abort()


def _copied_by_threads(parts: Sequence[_Part], writer: ObjectWriter, threads: int) -> Iterator[int]:
    """Copy parts into one writer, each by one thread. A thread reads, hashes and writes a little at a
    time, so that the bytes stay in the processor's cache. Yields bytes as parts are done.

    Raises the error of one of them, when all have ended.
    """
    first = parts[0].start
    room = writer.reserve(parts[-1].stop - first)
    stopped = threading.Event()

    def copy(part: _Part) -> int:
        """Copy one part to its place; returns its bytes, or 0 where it was stopped."""
        thread_state.stop = stopped  # also while it waits for storage or space
        buffer = copy_buffer()
        at = room + part.start - first
        written = at
        for piece in read_files(part.ranges, buffer):
            # A thread cannot be ended from outside, so it checks by itself.
            if stopped.is_set():
                return 0
            part.hash.update(piece)
            writer.write_at(at, piece)
            at += len(piece)
            if at - written >= WRITE_BACK_BYTES:
                writer.write_back(written, at)
                written = at
        return part.stop - part.start

    with ThreadPoolExecutor(min(threads, len(parts)), "streammega-copy") as pool:
        try:
            running: list[Future[int]] = [pool.submit(copy, part) for part in parts]
            for copied in as_completed(running):
                yield copied.result()
        finally:
            stopped.set()
            pool.shutdown(wait=True, cancel_futures=True)
