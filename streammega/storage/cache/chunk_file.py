"""One file of the page cache: the bytes of a chunk of an object, then a checksum of each page.

A checksum is written after its page, and 0 means that the page is not there. So a writer that is
killed leaves no page that counts. Readers lock nothing: two that miss a page both fetch it, and write
the same bytes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import struct
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from streammega.kernels.addresses import address_of
from streammega.storage.backends.local import map_file
from streammega.storage.store import Bytes

PAGE_BYTES = 16 << 10
"""Pages are small, for a block of the stream order begins and ends within pages, and fetches them
whole. With its neighbours on other nodes it fetches a page more than itself: 6 % of 256 KiB.
"""
ENTRY_BYTES = 8
"""Bytes of a page's checksum."""
MAX_MAPPED = 32_000
"""Chunks that a process keeps mapped: half of what Linux allows by default (vm.max_map_count)."""
# A link or a pipe in place of a file is not ours: it is neither followed nor waited for.
OPEN_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_FLOCK = struct.Struct("@hhqqi4x")  # struct flock: type, whence, start, length, pid
mapped: weakref.WeakSet[ChunkFile] = weakref.WeakSet()
"""Chunks that stay mapped in this process."""


class ChunkFile:
    """The pages of a chunk, mapped. Numbers of pages are those within the object.

    `view` uint8 [size]: its bytes. `verified` uint8 [pages]: pages that are there and were checked,
    or written, by this process. `gone`: the file was removed or replaced. What is mapped stays
    valid, and no more pages are written.
    """

    def __init__(self, path: Path, descriptor: int, first: int, size: int) -> None:
        file = map_file(descriptor, file_bytes(size), path)
        self.first = first
        self.view: Bytes = file[:size]
        self.verified = np.zeros(pages_of(size), np.uint8)
        self.gone = False
        self._path = path
        self._identity = _identity(descriptor)
        self._table_at = table_at(size)
        self._table = file[self._table_at :].view("<u8")

    @property
    def address(self) -> int:
        """Where its bytes are mapped."""
        return address_of(self.view)

    def has(self, first: int, last: int) -> bool:
        """Whether all of pages [first, last) are known to be there."""
        return bool(self.verified[first - self.first : last - self.first].all())

    def part(self, start: int, stop: int) -> Bytes:
        """Bytes [start, stop) of the object."""
        chunk_start = self.first * PAGE_BYTES
        return self.view[start - chunk_start : stop - chunk_start]

    def is_sound(self, page: int) -> bool | None:
        """Whether a page's bytes have its checksum; None: the page is not there.

        A page is compared once in each process.
        """
        number = page - self.first
        if self.verified[number]:
            return True
        expected = int(self._table[number])
        if not expected:
            return None
        begin = number * PAGE_BYTES
        if checksum(self.view.data[begin : begin + PAGE_BYTES]) != expected:
            return False
        self.verified[number] = 1
        return True

    def open(self) -> int | None:
        """A descriptor to write to the file; None if the file is gone. Raises OSError."""
        try:
            descriptor = os.open(self._path, os.O_RDWR | OPEN_FLAGS)
        except FileNotFoundError:
            self.gone = True
            return None
        if _identity(descriptor) != self._identity:
            self.gone = True
            os.close(descriptor)
            return None
        return descriptor

    def write(self, descriptor: int, page: int, data: Bytes) -> None:
        """Write pages from `page` on, then their checksums. Raises OSError.

        data: whole pages; only the last one of the object may be short.
        """
        number = page - self.first
        view = memoryview(data)  # type: ignore[arg-type]
        _write_all(descriptor, view, number * PAGE_BYTES)
        checksums = []
        for begin in range(0, len(view), PAGE_BYTES):
            checksums.append(checksum(view[begin : begin + PAGE_BYTES]))
        entries = memoryview(np.array(checksums, "<u8").tobytes())
        _write_all(descriptor, entries, self._table_at + ENTRY_BYTES * number)
        self.verified[number : number + len(checksums)] = 1

    def forget(self, page: int) -> None:
        """Remove a checksum, so that the page is fetched again. Raises OSError."""
        descriptor = self.open()
        if descriptor is None:
            return
        entry_at = self._table_at + ENTRY_BYTES * (page - self.first)
        try:
            os.pwrite(descriptor, bytes(ENTRY_BYTES), entry_at)
        finally:
            os.close(descriptor)


def open_chunk(path: Path, first: int, size: int) -> ChunkFile | None:
    """The chunk of `size` bytes from page `first` on; None if there is no file of that size.

    Raises OSError.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | OPEN_FLAGS)
    except FileNotFoundError:
        return None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size != file_bytes(size):
            return None
        return ChunkFile(path, descriptor, first, size)
    finally:
        os.close(descriptor)


def make_chunk(path: Path, size: int) -> None:
    """Make the file of a chunk of `size` bytes, without any page. Raises OSError.

    Its pages are sparse. Its checksums are written: on a full tmpfs, reading a mapped hole would end
    the process (SIGBUS). They come last, so that a file of the right size has all of them.
    """
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | OPEN_FLAGS, 0o666)
    try:
        table = bytes(file_bytes(size) - table_at(size))
        _write_all(descriptor, memoryview(table), table_at(size))
    finally:
        os.close(descriptor)


def pages_of(size: int) -> int:
    """The number of pages of so many bytes."""
    return -(-size // PAGE_BYTES)


def whole_pages(chunk_bytes: int) -> int:
    """The size of chunks in whole pages, for a configured size."""
    return max(PAGE_BYTES, chunk_bytes // PAGE_BYTES * PAGE_BYTES)


def table_at(size: int) -> int:
    """Where the checksums of a chunk of `size` bytes begin. They are aligned, for they are mapped."""
    return -(-size // ENTRY_BYTES) * ENTRY_BYTES


def file_bytes(size: int) -> int:
    """The size of the file of a chunk of `size` bytes."""
    return table_at(size) + ENTRY_BYTES * pages_of(size)


def checksum(data: Any) -> int:
    """xxh3 of a page, never 0."""
    return xxhash.xxh3_64_intdigest(data) or 1


def try_lock(descriptor: int, start: int = 0, length: int = 0) -> bool:
    """Lock bytes of an open file, by default all; False if another opening of it has locked one of
    them. Raises OSError where the file system has no locks.

    The lock belongs to the open file (an open file description lock of Linux), so it excludes other
    threads as well as processes. It ends with `unlock`, or with the process.
    """
    request = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, length, 0)
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, request)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        raise
    return True


def unlock(descriptor: int) -> None:
    """Release all locks of a descriptor and close it. Its copy in a forked child holds none then."""
    with contextlib.suppress(OSError):  # a file system without locks
        request = _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, 0, 0, 0)
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, request)
    os.close(descriptor)


def _identity(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def _write_all(descriptor: int, view: memoryview, offset: int) -> None:
    # A call may write less: on a disk that is nearly full, or after a signal.
    written = 0
    while written < len(view):
        written += os.pwrite(descriptor, view[written:], offset + written)
