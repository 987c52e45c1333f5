"""The folder of a page cache: its objects, how much of the disk they may take, and what is evicted.

    <cache_dir>/chunks/
        lock                 locked while chunks are made or removed; has the bytes of all chunks
        <object>/            one folder for each object, ETag and chunk size
            object.json      url, etag, size: what `streammega cache ls` shows
            used             its time is that of the last use
            3.data           chunk 3, see chunk_file.py

Files have the mode that the umask gives them. A process touches `used` once a minute while it has
the object open. An object is in use until `GRACE` after that, and is not evicted before.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import stat
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from streammega.config.validate import parse_json
from streammega.errors import CacheError
from streammega.errors.logs import get_logger
from streammega.storage.atomic_file import write_file
from streammega.storage.cache.chunk_file import (
    OPEN_FLAGS,
    PAGE_BYTES,
    checksum,
    file_bytes,
    make_chunk,
    pages_of,
    table_at,
    try_lock,
    unlock,
    whole_pages,
)
from streammega.storage.fd_limit import TOO_MANY_ERRNOS, fd_limit_message
from streammega.storage.progress import ProgressObserver
from streammega.storage.warn_once import warn_once

log = get_logger(__name__)

LAYOUT = 4
"""Part of the name of each object. Objects of another layout are ignored and evicted later."""
NAME = re.compile(r"[0-9a-f]{24}-[0-9a-f]{24}")
GRACE = 600.0
"""Seconds after the last touch within which an object is in use."""
DISK_RESERVE = 1 << 30
"""Bytes of its disk that a cache leaves free for checkpoints, logs and other programs."""
DISK_SHARE = 0.01
"""The share of a large disk that it leaves free, if that is more."""
SMALL_DISK_SHARE = 0.1
"""On a small disk it leaves at most this share free."""
LOCK_TIMEOUT = 1.0
"""Seconds to wait for another process that makes or removes a chunk: it may have been stopped."""
LOCK_PAUSE = 0.005
NOTE_BYTES = 8
"""Bytes of the number in `lock`; its checksum has as many."""
FULL_SECONDS = 30.0
"""Seconds without new chunks after nothing could be evicted, or the lock was not got."""
_DISK_FULL = "the disk is nearly full; what is not cached yet is read without the cache"
_trusted: set[Path] = set()
"""Folders that `check_owner` of this process found to be there and trusted."""


def check_owner(folder: Path) -> None:
    """Raise CacheError for a cache that a stranger may have made: a folder of another user within one
    where everybody may make folders, as in /tmp. Its files could hold other tokens.

    Folders of root are trusted, and those that a group of this process may write. Root, which
    reads the volumes of containers, trusts every folder.
    """
    user = os.geteuid()
    if user == 0 or folder in _trusted:
        return
    is_whole = True
    for path in (folder, *folder.parents):
        try:
            status = path.lstat()
            is_open = path.parent.stat().st_mode & stat.S_IWOTH
        except OSError:
            is_whole = False
            continue  # is made later, or refused where it is read
        groups = {os.getegid(), *os.getgroups()}
        is_shared = status.st_mode & stat.S_IWGRP and status.st_gid in groups
        if is_open and status.st_uid not in (0, user) and not is_shared:
            raise CacheError(
                f"{path}: belongs to another user (id {status.st_uid}), in a folder where everybody "
                f"may make one, so its files may be forged; name another cache folder, or share "
                f"this one by a group of both users and mode 775"
            )
    if is_whole:
        _trusted.add(folder)


class PageCache:
    """The page cache in a folder, as this process uses it. Safe for threads and processes.

    A disk that fails turns the cache off with one warning: `usable` is False then.

    Args:
        folder: `cache_dir`; made when it is not there.
        max_bytes: bytes that all chunks may take.
        chunk_bytes: bytes of an object in one file.

    Raises CacheError as `check_owner` does.
    """

    def __init__(self, folder: str | Path, max_bytes: int, chunk_bytes: int) -> None:
        self.folder = Path(folder) / "chunks"
        check_owner(self.folder.absolute())
        self.max_bytes = max_bytes
        self.chunk_bytes = whole_pages(chunk_bytes)
        self.usable = True
        self._full_until = 0.0
        self._disk_full_until = 0.0
        self._evictable: deque[UnusedObject] = deque()  # by the time of last use

    def on_error(self, error: OSError) -> None:
        """Go on after an error of the disk, without the cache unless the error passes."""
        if error.errno in (errno.ENOENT, errno.ESTALE):
            log.debug("%s: %s: was removed meanwhile", self.folder, error.filename)
        elif isinstance(error, TimeoutError):
            self._full_until = time.monotonic() + FULL_SECONDS
            self._warn(f"{error.strerror}; new data is read without the cache meanwhile")
        elif error.errno in TOO_MANY_ERRNOS:
            self._warn(f"{fd_limit_message()}; what needs a file of the cache is read without it")
        elif error.errno == errno.ENOMEM:
            self._warn(
                "no more files can be mapped (vm.max_map_count); further ones are read without the "
                "cache"
            )
        elif error.errno in (errno.ENOSPC, errno.EDQUOT):
            # A quota is not seen by `has_disk_space`.
            self._disk_full_until = time.monotonic() + FULL_SECONDS
            self._warn(_DISK_FULL)
        elif self.usable:
            self.usable = False
            reason = error.strerror or str(error)
            remedy = "free some space, or name another cache_dir"
            if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
                remedy = (
                    "let this user write there, by a common group and umask 002 for instance, or "
                    "name another cache_dir"
                )
            elif error.errno in (errno.ENOTDIR, errno.EEXIST):
                reason = "cache_dir is no folder"
                remedy = "name a folder"
            self._warn(f"{reason}; going on without a cache ({remedy})")

    def has_disk_space(self, size: int) -> bool:
        """Whether the disk takes so many bytes more and keeps its reserve. Raises OSError."""
        if time.monotonic() < self._disk_full_until:
            return False
        if _spare_bytes(self.folder) >= size:
            return True
        self._warn(_DISK_FULL)
        return False

    def reserve(self, path: Path, size: int, description: dict[str, Any]) -> bool:
        """Make the file of a chunk of `size` bytes; False if there is no room. Raises OSError.

        Evicts objects that are not in use, the longest unused first. Lists all objects when the
        last list is used up; other calls do not depend on the number of objects.
        """
        if time.monotonic() < self._full_until:
            return False
        new_bytes = file_bytes(size)
        with _locked(self.folder) as lock:
            with contextlib.suppress(FileNotFoundError):
                if os.stat(path, follow_symlinks=False).st_size == new_bytes:
                    return True  # another process made it
            total = _read_total(self.folder, lock)
            has_listed = has_counted = False
            while not (fits := self._fits(total + new_bytes, new_bytes)):
                if self._evictable:
                    total -= _evict(self._evictable.popleft())
                elif not has_listed:
                    self._evictable.extend(unused_objects(self.folder))
                    has_listed = True
                elif not has_counted:
                    total = _count(self.folder)
                    has_counted = True
                else:
                    break
            # Written after others were removed and before the chunk is made: a process that is killed
            # between leaves a number that is too high, never one that is too low.
            _write_total(lock, total + new_bytes if fits else total)
            if fits:
                _describe(path.parent, description)
                make_chunk(path, size)
            else:
                self._full_until = time.monotonic() + FULL_SECONDS
            return fits

    def _fits(self, total: int, new_bytes: int) -> bool:
        return total <= self.max_bytes and _spare_bytes(self.folder) >= new_bytes

    def _warn(self, text: str) -> None:
        warn_once(log, f"{self.folder}: {text}", "%s: %s", self.folder, text)


def object_name(url: str, etag: str, size: int, chunk_bytes: int) -> str:
    """The folder of an object, one for each of its versions."""
    texts = (url, f"{LAYOUT}:{etag}:{size}:{chunk_bytes}")
    return "-".join(hashlib.blake2b(text.encode(), digest_size=12).hexdigest() for text in texts)


def object_folders(folder: Path) -> list[str]:
    """The folders of all objects, of this layout and of others.

    As strings: of 100,000 objects, making paths takes longer than to look at their files.
    """
    folders = []
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            if NAME.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                folders.append(entry.path)
    return folders


def last_use(folder: str | Path) -> float:
    """When an object was used last; 0 if it is gone. Without a `used` file, the age of its folder."""
    for path in (f"{folder}/used", folder):
        with contextlib.suppress(OSError):
            return os.stat(path).st_mtime
    return 0.0


def touch(folder: Path) -> None:
    """Note that an object is in use, if anything of it is cached. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        os.utime(folder / "used")


def is_in_use(last_used: float) -> bool:
    """Whether an object that was used last at this time is in use."""
    return abs(time.time() - last_used) < GRACE


class UnusedObject(NamedTuple):
    """An object that is not in use, and when it was used last."""

    used: float
    folder: str


def unused_objects(folder: Path) -> list[UnusedObject]:
    """The objects that are not in use, of other layouts too, the longest unused first."""
    objects = [UnusedObject(last_use(path), path) for path in object_folders(folder)]
    return sorted(unused for unused in objects if not is_in_use(unused.used))


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A cached object: how many of its bytes are there, and when it was last used.

    `used`: seconds since 1970. `in_use`: whether that was less than `GRACE` ago.
    """

    folder: Path
    url: str
    size: int
    chunk_bytes: int
    cached_bytes: int
    used: float
    in_use: bool


def entries(folder: Path) -> list[Entry]:
    """All objects of a cache's `chunks` folder. Those of another layout have no bytes."""
    readable = []
    for object_folder in sorted(object_folders(folder)):
        # It is incomplete, being removed, or not ours.
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            readable.append(_entry(Path(object_folder)))
    return readable


def _entry(folder: Path) -> Entry:
    """Describe the object of a folder. Raises OSError, ValueError, KeyError, TypeError."""
    about = parse_json((folder / "object.json").read_bytes())
    size = int(about["size"])
    chunk_bytes = int(about["chunk_bytes"])
    if size < 0 or chunk_bytes < PAGE_BYTES or chunk_bytes % PAGE_BYTES:
        raise ValueError("is no description of a cached object")
    pages = sum(np.count_nonzero(table) for _, _, table in _tables(folder, size, chunk_bytes))
    used = last_use(folder)
    return Entry(
        folder=folder,
        url=str(about["url"]),
        size=size,
        chunk_bytes=chunk_bytes,
        cached_bytes=min(int(pages) * PAGE_BYTES, size),  # the last page may be shorter
        used=used,
        in_use=is_in_use(used),
    )


def damaged_pages(entry: Entry, progress: ProgressObserver | None = None) -> list[tuple[Path, int]]:
    """Pages whose bytes do not have their checksums: (file of the chunk, page of the chunk).

    progress: receives bytes that were compared.
    """
    progress = progress or ProgressObserver()
    damaged = []
    for path, data_bytes, table in _tables(entry.folder, entry.size, entry.chunk_bytes):
        with open(path, "rb") as file:
            for page in np.flatnonzero(table).tolist():
                begin = page * PAGE_BYTES
                file.seek(begin)
                data = file.read(min(PAGE_BYTES, data_bytes - begin))
                if checksum(data) != int(table[page]):
                    damaged.append((path, page))
                progress.advance(len(data))
    return damaged


def clear(folder: Path, progress: ProgressObserver | None = None) -> tuple[int, int]:
    """Remove all objects that are not in use, of other layouts too.

    Returns (removed, kept). progress: receives objects that were removed. Raises OSError.
    """
    progress = progress or ProgressObserver()
    before = len(object_folders(folder))
    unused = unused_objects(folder)
    progress.begin("removing", len(unused), " objects")
    for entry in unused:
        with _locked(folder) as lock:
            _write_total(lock, _read_total(folder, lock) - _evict(entry))
        progress.advance(1)
    kept = len(object_folders(folder))
    return before - kept, kept


def _tables(
    folder: Path, size: int, chunk_bytes: int
) -> Iterator[tuple[Path, int, NDArray[np.uint64]]]:
    """(file, bytes of data, checksums of its pages) of each chunk file of the right size.

    A checksum of 0: the page is not there.
    """
    for path in sorted(folder.glob("*.data")):
        if path.stem.isdecimal():
            data_bytes = min(chunk_bytes, size - int(path.stem) * chunk_bytes)
            if data_bytes > 0 and path.stat().st_size == file_bytes(data_bytes):
                count = pages_of(data_bytes)
                yield path, data_bytes, np.fromfile(path, "<u8", count, offset=table_at(data_bytes))


def _describe(folder: Path, description: dict[str, Any]) -> None:
    """Make the folder of an object with its description. Raises OSError."""
    folder.mkdir(exist_ok=True)
    file = folder / "object.json"
    if not file.exists():
        write_file(file, [json.dumps(description).encode()], sync=False)
    if not (folder / "used").exists():
        (folder / "used").touch()


def _evict(entry: UnusedObject) -> int:
    """Remove an object unless it was used meanwhile; returns the bytes of chunks that were removed.

    Processes that have mapped them go on reading what is mapped.
    """
    freed = 0
    if last_use(entry.folder) != entry.used:
        return freed
    with contextlib.suppress(OSError):
        # The description last: after a kill, chunks that are left still have one.
        for name in sorted(os.listdir(entry.folder), key=lambda name: not name.endswith(".data")):
            path = f"{entry.folder}/{name}"
            size = os.lstat(path).st_size if name.endswith(".data") else 0
            os.unlink(path)
            freed += size
        os.rmdir(entry.folder)
    return freed


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[int]:
    """Hold the lock of a cache folder. Yields the descriptor of its file. Raises OSError.

    The lock belongs to this opening of the file, so it keeps out other threads as well as processes.
    """
    deadline = time.monotonic() + LOCK_TIMEOUT
    path = folder / "lock"
    try:
        descriptor = os.open(path, os.O_RDWR | OPEN_FLAGS)
    except FileNotFoundError:
        # Not with O_CREAT at first: in a sticky folder it refuses a file of another user.
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | OPEN_FLAGS, 0o666)
    try:
        # A call that waits in the kernel could not end at the deadline.
        while not try_lock(descriptor):
            if time.monotonic() > deadline:
                text = "another process has locked the cache for a while"
                raise TimeoutError(errno.ETIMEDOUT, text, str(path))
            time.sleep(LOCK_PAUSE)
        yield descriptor
    finally:
        unlock(descriptor)  # closes the descriptor too, also if the lock was not got


def _read_total(folder: Path, lock: int) -> int:
    """The bytes of all chunk files, as noted; counted if the note is damaged."""
    record = os.pread(lock, 2 * NOTE_BYTES + 1, 0)
    if record[NOTE_BYTES:] == xxhash.xxh3_64_digest(record[:NOTE_BYTES]):
        return int.from_bytes(record[:NOTE_BYTES], "little")
    return _count(folder)


def _count(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.glob("*-*/*.data"))


def _write_total(lock: int, total: int) -> None:
    note = max(0, total).to_bytes(NOTE_BYTES, "little")
    os.pwrite(lock, note + xxhash.xxh3_64_digest(note), 0)


def _spare_bytes(folder: Path) -> int:
    """Bytes of its disk that the cache may still use; negative if less than the reserve is free."""
    disk = os.statvfs(folder)
    disk_bytes = disk.f_blocks * disk.f_frsize
    reserve = max(DISK_RESERVE, int(DISK_SHARE * disk_bytes))
    return disk.f_bavail * disk.f_frsize - min(reserve, int(SMALL_DISK_SHARE * disk_bytes))
