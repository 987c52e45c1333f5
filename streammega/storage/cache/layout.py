"""The files of a cache folder.

    <cache_dir>/chunks/
        lock                 locked while chunks are made or removed; holds the bytes of all
                             chunk files
        claims               byte ranges of it are locked by whoever fetches pages
        users/<process>      the objects that a process uses; locked while it lives
        <object>/            one folder for each object, ETag and chunk size
            object.json      url, etag, size: what `streammega cache ls` shows
            used             its time is that of the last use
            3.data           chunk 3: a sparse file of its bytes, then the checksum of each page,
                             0 if it is not there

Bytes and checksums of a chunk are one file, so that they cannot be of two generations. Everything
has the mode that the umask gives it. Nothing is believed but what fits a size that is known
beforehand, and its checksum.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import stat
from pathlib import Path
from typing import Any

import xxhash

PAGE_BYTES = 128 << 10
"""Pages are small, so that a piece of the stream order fetches little more than itself."""
ENTRY_BYTES = 8
"""Bytes of a page's checksum."""
LAYOUT = 2
"""Part of the name of each object.

Those of another layout are not found, but removed in their turn, or by `cache clear`.
"""
NAME = re.compile(r"[0-9a-f]{24}-[0-9a-f]{24}")
# A link or a pipe in place of a file that is expected was put there by somebody else; neither is
# followed nor waited for.
_OPEN = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


def whole_pages(chunk_bytes: int) -> int:
    """The size of chunks that is used for one that was asked for."""
    whole = chunk_bytes // PAGE_BYTES * PAGE_BYTES
    return max(PAGE_BYTES, whole)


def object_name(url: str, etag: str, size: int, chunk_bytes: int) -> str:
    """The folder of an object, one for each of its versions."""
    version = f"{LAYOUT}:{etag}:{size}:{chunk_bytes}"
    return f"{_digest(url)}-{_digest(version)}"


def pages_of(size: int) -> int:
    """How many pages so many bytes are."""
    return -(-size // PAGE_BYTES)


def table_at(size: int) -> int:
    """Where in a chunk's file of `size` data bytes the checksums begin.

    Aligned, for they are read as numbers where they are mapped.
    """
    entries = -(-size // ENTRY_BYTES)
    return entries * ENTRY_BYTES


def file_bytes(size: int) -> int:
    """The size of the file of a chunk of `size` data bytes."""
    return table_at(size) + ENTRY_BYTES * pages_of(size)


def checksum(data: Any) -> int:
    """xxh3 of a page, never 0: that says that a page is not there."""
    return xxhash.xxh3_64_intdigest(data) or 1


class Opened:
    """`with Opened(path, flags) as descriptor`: of a file that is there. Raises OSError.

    A class, for it takes a third of the time of a `contextmanager`, once for each run of pages that
    is written.
    """

    __slots__ = ("_descriptor",)

    def __init__(self, path: str | Path, flags: int) -> None:
        self._descriptor = os.open(path, flags | _OPEN)

    def __enter__(self) -> int:
        return self._descriptor

    def __exit__(self, *error: object) -> None:
        os.close(self._descriptor)


def open_or_make(path: Path) -> int:
    """A descriptor to read and write a file that all users of a cache share. Raises OSError."""
    try:
        return os.open(path, os.O_RDWR | _OPEN)
    except FileNotFoundError:
        # Only then: in a sticky folder, O_CREAT refuses what somebody else has made.
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT | _OPEN, 0o666)


def make(path: Path) -> int:
    """A descriptor of a new file; what was left under its name is removed. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _OPEN, 0o666)


def regular_size(descriptor: int) -> int:
    """The size of an open file; -1 if it is none."""
    status = os.fstat(descriptor)
    return status.st_size if stat.S_ISREG(status.st_mode) else -1


def describe(folder: Path, about: dict[str, Any]) -> None:
    """Make the folder of an object, and say what it is of. Raises OSError."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder)
    description = folder / "object.json"
    if not description.exists():
        temporary = folder / ".object"
        _write(temporary, json.dumps(about).encode())
        os.replace(temporary, description)
    used = folder / "used"
    if not used.exists():
        os.close(open_or_make(used))


def make_chunk(path: Path, size: int) -> None:
    """A chunk's file of `size` bytes without any page, in place of what is there. Raises OSError.

    Its table is no hole: on a full tmpfs, whoever reads a hole that is mapped is killed (SIGBUS),
    as that takes a page.
    """
    temporary = path.with_suffix(".partial")
    descriptor = make(temporary)
    try:
        os.ftruncate(descriptor, size)
        # Of a table as if the file were all data: a little more than there is.
        table_bytes = min(size, ENTRY_BYTES * (pages_of(size) + 1))
        written = os.pwrite(descriptor, bytes(table_bytes), size - table_bytes)
        if written < table_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    finally:
        os.close(descriptor)
    os.replace(temporary, path)


def last_use(folder: Path) -> float:
    """When an object was used last; 0 if it is gone.

    An object that was made halfway is as old as its folder.
    """
    for path in (folder / "used", folder):
        with contextlib.suppress(OSError):
            return os.stat(path).st_mtime
    return 0.0


def object_folders(folder: Path) -> list[Path]:
    """The folders of all objects, of this layout and others: one look at a cache folder."""
    try:
        with os.scandir(folder) as entries:
            folders = []
            for entry in entries:
                if NAME.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                    folders.append(Path(entry.path))
            return folders
    except FileNotFoundError:
        return []


def chunk_bytes_in(folder: Path) -> int:
    """Bytes that the chunk files of an object may grow to."""
    total = 0
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(".data"):
                with contextlib.suppress(OSError):
                    total += entry.stat(follow_symlinks=False).st_size
    return total


def remove_object(folder: Path) -> int:
    """Remove an object's folder; the bytes of the chunks that are gone.

    Whoever has mapped them goes on with them.
    """
    freed = 0
    with contextlib.suppress(OSError):
        with os.scandir(folder) as scanned:
            entries = list(scanned)
        chunks = [entry for entry in entries if entry.name.endswith(".data")]
        others = [entry for entry in entries if not entry.name.endswith(".data")]
        for entry in chunks:
            with contextlib.suppress(OSError):
                size = entry.stat(follow_symlinks=False).st_size
                os.unlink(entry.path)
                freed += size
        # To the last what it is of: whoever is killed before leaves chunks that can be told.
        for entry in others:
            with contextlib.suppress(OSError):
                os.unlink(entry.path)
        os.rmdir(folder)
    return freed


def _write(path: Path, data: bytes) -> None:
    descriptor = make(path)
    try:
        os.write(descriptor, data)
    finally:
        os.close(descriptor)


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
