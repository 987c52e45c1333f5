"""What was fetched, kept on a local disk for all processes and runs of a node.

    <cache_dir>/chunks/<object>/        one folder for each object and ETag
        object.json                     url, etag, size: what `streammega cache ls` shows
        used                            held locked (shared) by whoever reads the object; its time is that of the last use
        3.data  3.pages                 chunk 3: a sparse file, and a checksum for each page that is there (0: it is not)

A page's checksum is written after its bytes, and looked at before they are believed, once in each process. A page is
fetched under a lock on its entry, which dies with its holder: one process of the node fetches it, the others wait. Nothing is
evicted while somebody uses it; objects that nobody uses make room, the longest unused first. A disk that fails
turns the cache off, with one warning.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import mmap
import os
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock
import numpy as np
import xxhash
from numpy.typing import NDArray

from streammega.storage.base import Bytes

log = logging.getLogger(__name__)

PAGE_BYTES = 128 << 10
"""Pages are small, so that a piece of the stream order fetches little more than itself."""
POLL = 0.005
"""Seconds between two looks at a page that another process fetches."""
Fetch = Callable[[int, int, Bytes], None]
_open_objects: weakref.WeakValueDictionary[tuple[int, str], CachedObject] = weakref.WeakValueDictionary()
_lock = threading.Lock()


class PageCache:
    """The cache of one folder. Its methods never raise for a disk that fails: `usable` turns false, and nothing is kept."""

    def __init__(self, folder: str | Path, budget: int, chunk_bytes: int) -> None:
        self.folder, self.budget = Path(folder) / "chunks", budget
        self.chunk_bytes = max(PAGE_BYTES, chunk_bytes // PAGE_BYTES * PAGE_BYTES)
        self.usable = True

    def open(self, url: str, etag: str, size: int) -> CachedObject | None:
        """The pages of an object; shared by all that is open in this process. None: the disk cannot be used."""
        name = f"{_digest(url)}-{_digest(f'{etag}:{size}:{self.chunk_bytes}')}"
        with _lock:
            found = _open_objects.get((os.getpid(), str(self.folder / name)))
            if found is None and self.usable:
                try:
                    found = CachedObject(self, self.folder / name, url, etag, size)
                    _open_objects[os.getpid(), str(self.folder / name)] = found
                except OSError as error:
                    self.give_up(error)
            return found

    def give_up(self, error: OSError) -> None:
        """Go on without a cache."""
        if self.usable:
            self.usable = False
            reason = error.strerror or str(error)
            log.warning("%s: %s; going on without a cache (free some space, or name another cache_dir)", self.folder, reason)

    def reserve(self, path: Path, size: int) -> bool:
        """Create a chunk's file if the budget allows, making room by objects that nobody uses. Raises OSError."""
        if path.exists():
            return True
        with filelock.FileLock(self.folder / "lock"):
            if path.exists():
                return True
            if used_bytes(self.folder) + size > self.budget and not self._make_room(size):
                return False
            with open(path.with_suffix(".pages"), "wb") as file:
                file.truncate(-(-size // PAGE_BYTES) * 8)
            temporary = path.with_suffix(".partial")
            with open(temporary, "wb") as file:
                file.truncate(size)
            os.replace(temporary, path)
        return True

    def _make_room(self, size: int) -> bool:
        for entry in sorted(entries(self.folder), key=lambda entry: entry.used):
            if used_bytes(self.folder) + size <= self.budget:
                break
            remove(entry.folder)
        return used_bytes(self.folder) + size <= self.budget


class CachedObject:
    """The cached pages of one object, in this process.

    `verified` uint8 [pages]: pages that are there and were checked, or written, by this process. `address` int64 [chunks]:
    where chunks are mapped, 0 where they are not. Both are read without a lock.
    """

    def __init__(self, cache: PageCache, folder: Path, url: str, etag: str, size: int) -> None:
        self.cache, self.folder, self.size = cache, folder, size
        folder.mkdir(parents=True, exist_ok=True)
        self._used = os.open(folder / "used", os.O_RDWR | os.O_CREAT, 0o666)
        weakref.finalize(self, os.close, self._used)
        fcntl.flock(self._used, fcntl.LOCK_SH)
        os.utime(folder / "used")
        about = folder / "object.json"
        if not about.exists():
            temporary = folder / f".object.{os.getpid()}.{threading.get_ident()}"
            temporary.write_text(json.dumps({"url": url, "etag": etag, "size": size, "chunk_bytes": cache.chunk_bytes}))
            os.replace(temporary, about)
        chunks = -(-size // cache.chunk_bytes)
        self.verified = np.zeros(-(-size // PAGE_BYTES), np.uint8)
        self.address = np.zeros(chunks, np.int64)
        self._chunks: dict[int, _Chunk | None] = {}
        self._claimed: set[int] = set()
        self._lock = threading.Condition()

    def read(self, start: int, stop: int, out: Bytes, fetch: Fetch) -> int:
        """Fill `out` with bytes [start, stop): from pages that are there, else by `fetch`, whose pages are kept.

        fetch(start, stop, out) reads from the object itself. Returns the bytes that came from the cache.
        """
        hits, at = 0, start
        while at < stop:
            page = at // PAGE_BYTES
            last = min(-(-stop // PAGE_BYTES), self._chunk_end(page))
            end = min(stop, last * PAGE_BYTES)
            hits += self._read_within_chunk(page, last, at, end, out[at - start : end - start], fetch)
            at = end
        return hits

    def has(self, start: int, stop: int) -> bool:
        """Whether all pages of bytes [start, stop) are known to be there."""
        return bool(self.verified[start // PAGE_BYTES : -(-stop // PAGE_BYTES)].all())

    def ensure(self, start: int, stop: int, fetch: Fetch) -> None:
        """Have the pages of bytes [start, stop), which lie in one chunk, on disk and verified."""
        first, last = start // PAGE_BYTES, -(-stop // PAGE_BYTES)
        chunk = self._chunk(first)
        if chunk is not None:
            for page, end in self._missing(chunk, first, last):
                self._fill(chunk, page, end, fetch)

    def _chunk_end(self, page: int) -> int:
        pages = self.cache.chunk_bytes // PAGE_BYTES
        return (page // pages + 1) * pages

    def _read_within_chunk(self, first: int, last: int, start: int, stop: int, out: Bytes, fetch: Fetch) -> int:
        chunk = self._chunk(first)
        if chunk is None:
            fetch(start, stop, out)
            return 0
        present = [self._check(chunk, page) for page in range(first, last)]
        if not all(present):
            for page, end in self._missing(chunk, first, last):
                self._fill(chunk, page, end, fetch)
        low = start - chunk.start
        if not self.has(start, stop):  # the disk failed in between
            fetch(start, stop, out)
            return 0
        out[:] = chunk.view[low : low + stop - start]
        return sum(PAGE_BYTES for there in present if there)

    def _missing(self, chunk: _Chunk, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Runs of pages that are not there, one at a time: what others fetch meanwhile is not asked for again."""
        page = first
        while page < last:
            if self._check(chunk, page):
                page += 1
                continue
            end = page + 1
            while end < last and not self._check(chunk, end):
                end += 1
            yield page, end
            page = end

    def _fill(self, chunk: _Chunk, first: int, last: int, fetch: Fetch) -> None:
        """Fetch pages [first, last) under a claim; or wait until whoever holds the claim has."""
        while not self._claim(chunk, first, last):
            time.sleep(POLL)
            if all(self._check(chunk, page) for page in range(first, last)):
                return
        try:
            todo = [page for page in range(first, last) if not self._check(chunk, page)]
            if todo:
                low, high = todo[0] * PAGE_BYTES, min((todo[-1] + 1) * PAGE_BYTES, self.size)
                data = np.empty(high - low, np.uint8)
                fetch(low, high, data)
                self._write(chunk, low, data)
        finally:
            self._unclaim(chunk, first, last)

    def _write(self, chunk: _Chunk, start: int, data: Bytes) -> None:
        try:
            view = memoryview(data)  # type: ignore[arg-type]
            written = 0
            while written < len(view):
                written += os.pwrite(chunk.data, view[written:], start - chunk.start + written)
            for at in range(0, len(view), PAGE_BYTES):
                entry = checksum(view[at : at + PAGE_BYTES]).to_bytes(8, "little")
                page = (start + at) // PAGE_BYTES
                os.pwrite(chunk.pages, entry, 8 * (page - chunk.first))
                self.verified[page] = 1
        except OSError as error:
            self.cache.give_up(error)

    def _check(self, chunk: _Chunk, page: int) -> bool:
        """Whether a page is there; its bytes are compared with its checksum once."""
        if self.verified[page]:
            return True
        expected = int.from_bytes(os.pread(chunk.pages, 8, 8 * (page - chunk.first)), "little")
        if not expected:
            return False
        low = page * PAGE_BYTES - chunk.start
        if checksum(chunk.view.data[low : min(low + PAGE_BYTES, len(chunk.view))]) != expected:
            log.warning("%s: page %d is damaged; it is fetched again", self.folder, page)
            os.pwrite(chunk.pages, bytes(8), 8 * (page - chunk.first))
            return False
        self.verified[page] = 1
        return True

    def _claim(self, chunk: _Chunk, first: int, last: int) -> bool:
        """Take the right to fetch pages: among this process's threads by a set, among processes by a lock on their entries."""
        with self._lock:
            if any(page in self._claimed for page in range(first, last)):
                return False
            try:
                fcntl.lockf(chunk.pages, fcntl.LOCK_EX | fcntl.LOCK_NB, 8 * (last - first), 8 * (first - chunk.first))
            except OSError as error:
                if error.errno in (errno.EACCES, errno.EAGAIN):
                    return False
                self.cache.give_up(error)  # a file system without locks
                return True
            self._claimed.update(range(first, last))
            return True

    def _unclaim(self, chunk: _Chunk, first: int, last: int) -> None:
        with self._lock:
            self._claimed.difference_update(range(first, last))
            with contextlib.suppress(OSError):
                fcntl.lockf(chunk.pages, fcntl.LOCK_UN, 8 * (last - first), 8 * (first - chunk.first))

    def _chunk(self, page: int) -> _Chunk | None:
        """The chunk of a page, opened and mapped; None: there is no room for it, or the disk failed."""
        if not self.cache.usable:
            return None
        number = page * PAGE_BYTES // self.cache.chunk_bytes
        with self._lock:
            if number not in self._chunks:
                try:
                    self._chunks[number] = self._open_chunk(number)
                except OSError as error:
                    self.cache.give_up(error)
                    return None
            return self._chunks[number]

    def _open_chunk(self, number: int) -> _Chunk | None:
        start = number * self.cache.chunk_bytes
        size = min(self.cache.chunk_bytes, self.size - start)
        path = self.folder / f"{number}.data"
        if not self.cache.reserve(path, size):
            return None
        data = os.open(path, os.O_RDWR)
        weakref.finalize(self, os.close, data)
        pages = os.open(path.with_suffix(".pages"), os.O_RDWR)
        weakref.finalize(self, os.close, pages)
        view = np.frombuffer(mmap.mmap(data, size, access=mmap.ACCESS_READ), np.uint8)
        self.address[number] = view.__array_interface__["data"][0]
        return _Chunk(start=start, first=start // PAGE_BYTES, data=data, pages=pages, view=view)


@dataclass(frozen=True, kw_only=True)
class _Chunk:
    """An open chunk: its first byte and page, descriptors of its two files, and the mapped data."""

    start: int
    first: int
    data: int
    pages: int
    view: Bytes


def checksum(data: Any) -> int:
    """xxh3 of a page, never 0."""
    return xxhash.xxh3_64_intdigest(data) or 1


# --- what the command line shows ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A cached object: pages and bytes that are there, of how many; when it was last used; whether somebody uses it now."""

    folder: Path
    url: str
    size: int
    cached_bytes: int
    used: float
    in_use: bool


def entries(folder: Path) -> list[Entry]:
    """All objects of a cache's `chunks` folder."""
    found = []
    for about in sorted(folder.glob("*/object.json")):
        with contextlib.suppress(OSError, ValueError, KeyError):
            described = json.loads(about.read_text())
            pages = sum(int((_table(path) != 0).sum()) for path in about.parent.glob("*.pages"))
            found.append(
                Entry(
                    folder=about.parent,
                    url=str(described["url"]),
                    size=int(described["size"]),
                    cached_bytes=min(pages * PAGE_BYTES, int(described["size"])),
                    used=(about.parent / "used").stat().st_mtime,
                    in_use=not _exclusively(about.parent, lambda: None),
                )
            )
    return found


def used_bytes(folder: Path) -> int:
    """Bytes that chunk files of a cache may grow to."""
    total = 0
    for path in folder.glob("*/*.data"):
        with contextlib.suppress(OSError):
            total += path.stat().st_size
    return total


def damaged_pages(entry: Entry) -> list[tuple[Path, int]]:
    """Pages whose bytes are not those of their checksums: (data file, page of the chunk)."""
    bad = []
    for path in sorted(entry.folder.glob("*.pages")):
        table, data = _table(path), path.with_suffix(".data")
        stored = np.flatnonzero(table).tolist()
        if not data.exists():  # a process was killed before it made the second of the two
            bad += [(data, page) for page in stored]
            continue
        with open(data, "rb") as file:
            for page in stored:
                file.seek(page * PAGE_BYTES)
                if checksum(file.read(PAGE_BYTES)) != int(table[page]):
                    bad.append((data, page))
    return bad


def remove(folder: Path) -> bool:
    """Remove a cached object, unless somebody uses it."""
    return _exclusively(folder, lambda: shutil.rmtree(folder, ignore_errors=True))


def _exclusively(folder: Path, action: Callable[[], None]) -> bool:
    """Do something while nobody uses an object; whether that was so."""
    try:
        with open(folder / "used", "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            action()
    except FileNotFoundError:
        action()
    except OSError:
        return False
    return True


def _table(path: Path) -> NDArray[np.uint64]:
    return np.fromfile(path, "<u8")


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
