"""One file of the cache: a chunk of an object, mapped, without a descriptor."""

from __future__ import annotations

import os
import threading
import weakref
from pathlib import Path

import numpy as np

from streammega.storage.backends.mapping import map_file
from streammega.storage.cache import layout
from streammega.storage.cache.layout import ENTRY_BYTES, PAGE_BYTES
from streammega.storage.store import Bytes

MOST_MAPPED = 32_000
"""Chunks that a process keeps mapped: half of what Linux allows by default (vm.max_map_count).

More are mapped for each read.
"""


class Chunk:
    """The pages of a chunk. Numbers of pages are those within the object; `first` is the chunk's
    first one.

    `view` uint8 [size]: its bytes. `verified` uint8 [pages]: pages that are there and were checked,
    or written, by this process. `gone`: another file has taken the place of this one. What is
    mapped stays right; nothing is added to it.
    """

    def __init__(self, path: Path, descriptor: int, first: int, size: int) -> None:
        mapped = map_file(descriptor, layout.file_bytes(size), path)
        self.first = first
        self.view: Bytes = mapped[:size]
        self.verified = np.zeros(layout.pages_of(size), np.uint8)
        self.gone = False
        self._path = str(path)
        self._identity = _identity(descriptor)
        self._table_offset = layout.table_at(size)
        self._table = mapped[self._table_offset :].view("<u8")

    @property
    def address(self) -> int:
        """Where its bytes are mapped."""
        return int(self.view.__array_interface__["data"][0])

    def holds(self, first: int, last: int) -> bool:
        """Whether all of pages [first, last) are known to be there."""
        begin = first - self.first
        end = last - self.first
        return bool(self.verified[begin:end].all())

    def part(self, start: int, stop: int) -> Bytes:
        """Bytes [start, stop) of the object."""
        chunk_begin = self.first * PAGE_BYTES
        return self.view[start - chunk_begin : stop - chunk_begin]

    def matches(self, page: int) -> bool | None:
        """Whether a page's bytes are those of its checksum; None: it is not there.

        Once they were, this is not looked at again.
        """
        number = page - self.first
        if self.verified[number]:
            return True
        expected = int(self._table[number])
        if not expected:
            return None
        begin = number * PAGE_BYTES
        data = self.view.data[begin : begin + PAGE_BYTES]
        if layout.checksum(data) != expected:
            return False
        self.verified[number] = 1
        return True

    def write(self, page: int, data: Bytes) -> None:
        """Write pages from one on, then their checksums. Raises OSError."""
        first = page - self.first
        view = memoryview(data)  # type: ignore[arg-type]
        try:
            with layout.Opened(self._path, os.O_RDWR) as descriptor:
                if _identity(descriptor) != self._identity:
                    self.gone = True  # evicted, and made anew
                    return
                # The bytes first: whoever finds a checksum believes that they are there.
                _write_all(descriptor, view, first * PAGE_BYTES)
                checksums = []
                for begin in range(0, len(view), PAGE_BYTES):
                    checksums.append(layout.checksum(view[begin : begin + PAGE_BYTES]))
                entries = np.array(checksums, "<u8").tobytes()
                _write_all(descriptor, memoryview(entries), self._entry_offset(first))
        except FileNotFoundError:
            self.gone = True
            return
        self.verified[first : first + len(checksums)] = 1

    def forget(self, page: int) -> None:
        """Take back a checksum, so that the page is fetched again. Raises OSError."""
        with layout.Opened(self._path, os.O_RDWR) as descriptor:
            if _identity(descriptor) == self._identity:
                offset = self._entry_offset(page - self.first)
                os.pwrite(descriptor, bytes(ENTRY_BYTES), offset)

    def _entry_offset(self, number: int) -> int:
        """Where in the file the checksum of the chunk's page `number` lies."""
        return self._table_offset + ENTRY_BYTES * number


def open_chunk(path: Path, first: int, size: int) -> Chunk | None:
    """The chunk of `size` bytes from page `first` on; None: there is no file, or none of that size.

    Raises OSError.
    """
    try:
        with layout.Opened(path, os.O_RDONLY) as descriptor:
            if layout.regular_size(descriptor) == layout.file_bytes(size):
                return Chunk(path, descriptor, first, size)
    except FileNotFoundError:
        pass
    return None


class Mapped:
    """How many chunks this process keeps mapped."""

    def __init__(self) -> None:
        self.count = 0
        self._lock = threading.RLock()  # the collector may let go of one while another is taken

    def take(self, owner: object) -> bool:
        """One more, as long as its owner lives; False: that would be too many."""
        with self._lock:
            if self.count >= MOST_MAPPED:
                return False
            self.count += 1
        weakref.finalize(owner, self._let_go).atexit = False
        return True

    def _let_go(self) -> None:
        with self._lock:
            self.count -= 1


mapped = Mapped()


def _identity(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def _write_all(descriptor: int, view: memoryview, offset: int) -> None:
    # A call may write less: on a disk that is nearly full, or where a signal comes.
    written = 0
    while written < len(view):
        written += os.pwrite(descriptor, view[written:], offset + written)
