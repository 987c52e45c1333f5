"""How much of a cache is taken, and what makes way: the same work for each new chunk, whatever the
number of objects.

The bytes of all chunk files stand in the file `lock`. They are noted before a chunk is made and
after others were removed, so that whoever is killed in between leaves a number that is too high,
never one too low; it is counted anew when it is missing, when the cache has been full and the last
count is old, and by `streammega cache verify`.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import xxhash

from streammega.storage.cache import layout
from streammega.storage.cache.presence import BUSY, names_in_use

log = logging.getLogger(__name__)

GiB = 1 << 30
DISK_RESERVE = 1 * GiB
"""Bytes of its disk that a cache leaves free, and `DISK_SHARE` of large disks: for checkpoints,
logs and other programs.
"""
DISK_SHARE = 0.01
SMALL_DISK_SHARE = 0.1
"""The share of a disk that is left free where that is more; of small disks, no more than the second
is.
"""
ALLOWED = 64 << 20
ALLOWED_SHARE = 256
ALLOWED_FOR = 1.0
"""After a look at the disk, a process writes at most so many bytes, or this part of what may be
taken, for so many seconds.
"""
PATIENCE = 1.0
"""Seconds that one waits for somebody else who makes or removes a chunk: reading without the cache
is right, too.
"""
BUSY_FOR = 5.0
"""Seconds without new chunks after such a wait: whoever holds the lock may have been stopped."""
FULL_FOR = 30.0
"""Seconds without new chunks after nothing could make way, at least; and so many times as long as
finding that took:
"""
FULL_FACTOR = 100.0
COUNT_AGE = 3600.0
"""Seconds that a count is believed for when the cache is full."""
_RECORD = struct.Struct("<8sQdQ")
_MAGIC = b"SMROOM2\n"
_mutex = threading.Lock()
"""Record locks are those of a process: among its threads, this one counts.

So does it for the descriptor, see `presence`.
"""


class Busy(OSError):
    """The lock of a cache folder is held by somebody else for too long."""


class Room:
    """The room in a cache folder, as one process sees it. Safe for threads and processes."""

    def __init__(self, folder: Path, budget: int) -> None:
        self.folder = folder
        self.budget = budget
        self._full_until = 0.0
        self._short_until = 0.0
        self._allowed = 0
        self._allowed_until = 0.0
        self._oldest: deque[tuple[float, Path]] = deque()
        self._said: set[str] = set()

    def reserve(self, path: Path, size: int, about: dict[str, Any]) -> bool:
        """Have a chunk's file of `size` bytes; False: there is no room now. Raises OSError for a
        disk that fails.

        Objects that nobody uses make way, the longest unused first. Cost: a few calls of the
        system, but for a list of all objects when the last one is used up.
        """
        if time.monotonic() < self._full_until:
            return False
        try:
            if self._try(path, size, about):
                return True
            began = time.monotonic()
            self._list_oldest()
            if self._try(path, size, about):
                return True
        except Busy:
            self._say(
                "somebody else has been making room there for a while; new data is read without the cache meanwhile"
            )
            self._full_until = time.monotonic() + BUSY_FOR
            return False
        taken = time.monotonic() - began
        self._full_until = time.monotonic() + max(FULL_FOR, FULL_FACTOR * taken)
        return False

    def disk_has(self, size: int) -> bool:
        """Whether the disk takes so many bytes more and keeps its reserve; looked at again after a
        while if it does not.

        Not asked for every page: a small part of what there is may be taken without another look.
        Threads may take a page more.
        """
        now = time.monotonic()
        if self._allowed >= size and now < self._allowed_until:
            self._allowed -= size
            return True
        if now < self._short_until:
            return False
        spare = _spare(self.folder) - size
        if spare >= 0:
            self._allowed = min(ALLOWED, spare // ALLOWED_SHARE)
            self._allowed_until = now + ALLOWED_FOR
            return True
        self._short_until = now + FULL_FOR
        self._say("the disk is nearly full; what is not cached yet is read without the cache")
        return False

    def recount(self) -> int:
        """Count what is there anew. Raises OSError."""
        with locked(self.folder) as lock:
            return _count(self.folder, lock)

    def remove(self, folder: Path, when: float) -> bool:
        """Remove an object that was last used at `when`; False if somebody has used it since.

        Raises OSError.
        """
        with locked(self.folder) as lock:
            if layout.last_use(folder) != when:
                return False
            total = _total(self.folder, lock)
            _note(lock, max(0, total - layout.remove_object(folder)))
        return True

    def _try(self, path: Path, size: int, about: dict[str, Any]) -> bool:
        with locked(self.folder) as lock:
            there = _size_of(path)
            if there == size:
                return True  # another process was quicker
            total = _total(self.folder, lock)
            if (
                not self._fits(total, size)
                and not self._oldest
                and _counted_at(lock) < time.time() - COUNT_AGE
            ):
                total = _count(self.folder, lock)
            freed = self._make_way(total, size)
            fits = self._fits(total - freed, size)
            _note(lock, max(0, total - freed + size - there if fits else total - freed))
            if fits:
                layout.describe(path.parent, about)
                layout.make_chunk(path, size)
            return fits

    def _fits(self, total: int, size: int) -> bool:
        return total + size <= self.budget and _spare(self.folder) >= size

    def _make_way(self, total: int, size: int) -> int:
        freed = 0
        while self._oldest and not self._fits(total - freed, size):
            when, folder = self._oldest.popleft()
            if layout.last_use(folder) == when:  # else it was used since, or is gone
                freed += layout.remove_object(folder)
        return freed

    def _list_oldest(self) -> None:
        """Objects that nobody uses.

        Without the lock: this takes long where there are many, and each is looked at again.
        """
        found = [(layout.last_use(folder), folder) for folder in layout.object_folders(self.folder)]
        # afterwards: whoever comes between changes the time of last use
        used = names_in_use(self.folder)
        self._oldest = deque(sorted(item for item in found if item[1].name not in used))

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            log.warning("%s: %s", self.folder, text)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[int]:
    """Hold the lock of a cache folder: a descriptor of its file. Raises Busy, OSError."""
    deadline = time.monotonic() + PATIENCE
    if not _mutex.acquire(timeout=PATIENCE):
        raise Busy(f"{folder}: another thread holds its lock")
    try:
        descriptor = layout.open_or_make(folder / "lock")
        try:
            _acquire(descriptor, deadline, folder)
            yield descriptor
        finally:
            os.close(descriptor)
    finally:
        _mutex.release()


def _acquire(descriptor: int, deadline: float, folder: Path) -> None:
    """Take a lock of the kernel's, by looking again and again: one that waits for it could not end
    at a deadline.
    """
    pause = 0.001  # others hold it for as long as a few bytes take to write
    while True:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if error.errno not in BUSY:
                raise
        if time.monotonic() > deadline:
            raise Busy(f"{folder}: another process holds its lock")
        time.sleep(pause)
        pause = min(2 * pause, 0.02)


def _total(folder: Path, lock: int) -> int:
    found = _read(lock)
    return _count(folder, lock) if found is None else found[0]


def _counted_at(lock: int) -> float:
    found = _read(lock)
    return 0.0 if found is None else found[1]


def _read(lock: int) -> tuple[int, float] | None:
    data = os.pread(lock, _RECORD.size, 0)
    if len(data) != _RECORD.size:
        return None
    magic, total, counted_at, check = _RECORD.unpack(data)
    if magic != _MAGIC or check != xxhash.xxh3_64_intdigest(data[:-8]):
        return None
    return total, counted_at


def _note(lock: int, total: int, counted_at: float | None = None) -> None:
    data = _RECORD.pack(_MAGIC, total, _counted_at(lock) if counted_at is None else counted_at, 0)[
        :-8
    ]
    os.pwrite(lock, data + xxhash.xxh3_64_intdigest(data).to_bytes(8, "little"), 0)


def _count(folder: Path, lock: int) -> int:
    total = sum(layout.chunk_bytes_in(own) for own in layout.object_folders(folder))
    _note(lock, total, time.time())
    return total


def _size_of(path: Path) -> int:
    """0 where there is no file."""
    try:
        return os.stat(path, follow_symlinks=False).st_size
    except FileNotFoundError:
        return 0


def _spare(folder: Path) -> int:
    """Bytes that may still be taken of the disk of a folder; negative where less than the reserve
    is free.
    """
    disk = os.statvfs(folder)
    whole = disk.f_blocks * disk.f_frsize
    reserve = min(max(DISK_RESERVE, int(DISK_SHARE * whole)), int(SMALL_DISK_SHARE * whole))
    return disk.f_bavail * disk.f_frsize - reserve


def _after_fork() -> None:
    global _mutex
    _mutex = threading.Lock()  # another thread of the parent may have held it


os.register_at_fork(after_in_child=_after_fork)
