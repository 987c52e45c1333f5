"""How much of a cache is taken, and what makes way.

The same work for each new chunk, whatever the number of objects. The bytes of all chunk files stand
in the file `lock`. They are noted before a chunk is made and after others were removed, so that
whoever is killed in between leaves a number that is too high, never one too low; it is counted anew
when it is missing, when the cache has been full and the last count is old, and by `streammega cache
verify`.
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
"""Bytes of its disk that a cache leaves free: for checkpoints, logs and other programs."""
DISK_SHARE = 0.01
"""The share of a large disk that it leaves free, where that is more."""
SMALL_DISK_SHARE = 0.1
"""Of a small disk it leaves free no more than this share."""
ALLOWED = 64 << 20
ALLOWED_SHARE = 256
ALLOWED_FOR = 1.0
"""After a look at the disk, a process writes without another one: at most so many bytes, or one in
so many of those that may be taken, for so many seconds.
"""
PATIENCE = 1.0
"""Seconds that one waits for somebody else who makes or removes a chunk.

Reading without the cache is right, too.
"""
FIRST_PAUSE = 0.001
"""Seconds: others hold the lock for as long as a few bytes take to write."""
LONGEST_PAUSE = 0.02
BUSY_FOR = 5.0
"""Seconds without new chunks after such a wait: whoever holds the lock may have been stopped."""
FULL_FOR = 30.0
"""Seconds without new chunks after nothing could make way, at least; and so many times as long as
finding that took:
"""
FULL_FACTOR = 100.0
COUNT_AGE = 3600.0
"""Seconds that a count is believed for when the cache is full."""
_RECORD = struct.Struct("<8sQd")
"""Of the file `lock`: the magic, the bytes of all chunk files, and when they were counted last."""
_CHECK = struct.Struct("<Q")
"""After it: the xxh3 of the record."""
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
                "somebody else has been making room there for a while; new data is read without "
                "the cache meanwhile"
            )
            self._full_until = time.monotonic() + BUSY_FOR
            return False
        now = time.monotonic()
        # Looking takes a hundredth of the time at most, however many objects there are.
        pause = FULL_FACTOR * (now - began)
        self._full_until = now + max(FULL_FOR, pause)
        return False

    def disk_has(self, size: int) -> bool:
        """Whether the disk takes so many bytes more and keeps its reserve.

        Looked at again after a while if it does not. Not asked for every page: a small part of what
        there is may be taken without another look. Threads may take a page more.
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
            # Full, and nothing left to make way: the number may be too high, after a kill.
            full = not self._fits(total, size) and not self._oldest
            if full and _counted_at(lock) < time.time() - COUNT_AGE:
                total = _count(self.folder, lock)
            total -= self._make_way(total, size)
            if not self._fits(total, size):
                _note(lock, max(0, total))
                return False
            # Before the chunk is made: who is killed in between leaves a number that is too high.
            _note(lock, max(0, total + size - there))
            layout.describe(path.parent, about)
            layout.make_chunk(path, size)
            return True

    def _fits(self, total: int, size: int) -> bool:
        return total + size <= self.budget and _spare(self.folder) >= size

    def _make_way(self, total: int, size: int) -> int:
        """Remove objects until a chunk of `size` bytes fits beside `total`; the bytes freed."""
        freed = 0
        while self._oldest and not self._fits(total - freed, size):
            when, folder = self._oldest.popleft()
            # Else it was used since it was listed, or is gone.
            if layout.last_use(folder) == when:
                freed += layout.remove_object(folder)
        return freed

    def _list_oldest(self) -> None:
        """Objects that nobody uses, the longest unused first.

        Without the lock: this takes long where there are many, and each is looked at again.
        """
        uses = [(layout.last_use(folder), folder) for folder in layout.object_folders(self.folder)]
        # Afterwards: whoever comes between changes the time of last use.
        used = names_in_use(self.folder)
        unused = [(when, folder) for when, folder in uses if folder.name not in used]
        self._oldest = deque(sorted(unused))

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            log.warning("%s: %s", self.folder, text)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[int]:
    """Hold the lock of a cache folder: a descriptor of its file. Raises Busy, OSError."""
    deadline = time.monotonic() + PATIENCE
    # Records of the kernel do not tell threads of one process apart.
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
    """Take a lock of the kernel, by looking again and again.

    A call that waits for it could not end at a deadline.
    """
    pause = FIRST_PAUSE
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
        pause = min(2 * pause, LONGEST_PAUSE)


def _total(folder: Path, lock: int) -> int:
    record = _read(lock)
    if record is None:
        return _count(folder, lock)
    total, _ = record
    return total


def _counted_at(lock: int) -> float:
    record = _read(lock)
    if record is None:
        return 0.0
    _, counted_at = record
    return counted_at


def _read(lock: int) -> tuple[int, float] | None:
    """(bytes of all chunk files, when they were counted last); None: not noted, or damaged."""
    data = os.pread(lock, _RECORD.size + _CHECK.size, 0)
    if len(data) != _RECORD.size + _CHECK.size:
        return None
    record = data[: _RECORD.size]
    (check,) = _CHECK.unpack(data[_RECORD.size :])
    magic, total, counted_at = _RECORD.unpack(record)
    if magic != _MAGIC or check != xxhash.xxh3_64_intdigest(record):
        return None
    return total, counted_at


def _note(lock: int, total: int, counted_at: float | None = None) -> None:
    """Write the record; `counted_at` None: as it was."""
    if counted_at is None:
        counted_at = _counted_at(lock)
    record = _RECORD.pack(_MAGIC, total, counted_at)
    check = _CHECK.pack(xxhash.xxh3_64_intdigest(record))
    os.pwrite(lock, record + check, 0)


def _count(folder: Path, lock: int) -> int:
    total = sum(layout.chunk_bytes_in(objects) for objects in layout.object_folders(folder))
    _note(lock, total, time.time())
    return total


def _size_of(path: Path) -> int:
    """0 where there is no file."""
    try:
        return os.stat(path, follow_symlinks=False).st_size
    except FileNotFoundError:
        return 0


def _spare(folder: Path) -> int:
    """Bytes that may still be taken of the disk of a folder.

    Negative where less than the reserve is free.
    """
    disk = os.statvfs(folder)
    disk_bytes = disk.f_blocks * disk.f_frsize
    free_bytes = disk.f_bavail * disk.f_frsize
    reserve = max(DISK_RESERVE, int(DISK_SHARE * disk_bytes))
    most_reserve = int(SMALL_DISK_SHARE * disk_bytes)
    return free_bytes - min(reserve, most_reserve)


def _after_fork() -> None:
    global _mutex
    _mutex = threading.Lock()  # another thread of the parent may have held it


os.register_at_fork(after_in_child=_after_fork)
