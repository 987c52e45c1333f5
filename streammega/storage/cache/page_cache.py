"""The cached pages of objects: read, fetched where they are missing, and kept.

Each process compares the checksum of a page before the first use. Processes do not wait for each
other: a page that two of them miss at the same moment is fetched by both, and they write the same
bytes. Ranks own lanes, so that is rare (docs/reliability.md has figures).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from streammega.errors.logs import get_logger
from streammega.storage.cache import chunk_file
from streammega.storage.cache.cache_folder import PageCache, object_name, touch
from streammega.storage.cache.chunk_file import (
    PAGE_BYTES,
    ChunkFile,
    open_chunk,
    pages_of,
    try_lock,
    unlock,
)
from streammega.storage.fork_lock import process_lock
from streammega.storage.store import Bytes, Span, Store, WrapperStore

log = get_logger(__name__)

TOUCH_SECONDS = 60.0
"""Seconds between two touches of the objects that a process has open."""
MIN_PAGED_BYTES = 2 * PAGE_BYTES
"""Smaller reads do not fetch whole pages: only their own bytes are fetched, and not kept."""
Fetch = Callable[[int, int, Bytes], None]
"""Reads bytes [start, stop) of the object itself into an array."""
_open_objects: weakref.WeakValueDictionary[str, CachedObject] = weakref.WeakValueDictionary()
_lock = process_lock()
_toucher_pid = 0


class CachedObject:
    """The cached pages of one object, in this process.

    `verified` uint8 [pages]: pages that are there and were checked, or written, by this process.
    `address` int64 [chunks]: where chunks are mapped, 0 where they are not. Kernels read both
    without a lock: a page is verified after its chunk was mapped, and a chunk stays mapped as long
    as this object lives.
    """

    def __init__(self, cache: PageCache, name: str, url: str, etag: str, size: int) -> None:
        self.cache = cache
        self.size = size
        self.chunk_bytes = cache.chunk_bytes
        self.folder = cache.folder / name
        self.verified = np.zeros(pages_of(size), np.uint8)
        self.address = np.zeros(-(-size // cache.chunk_bytes), np.int64)
        chunk_bytes = cache.chunk_bytes
        self._description = {"url": url, "etag": etag, "size": size, "chunk_bytes": chunk_bytes}
        self._chunks: dict[int, ChunkFile] = {}
        self._opening = process_lock()
        touch(self.folder)

    def read(self, start: int, stop: int, out: Bytes, fetch: Fetch) -> int:
        """Fill `out` with bytes [start, stop) from pages. Missing pages are read by `fetch` and kept.
        Returns the bytes that came from the cache.

        Raises what `fetch` raises.
        """
        cached_bytes = 0
        for first, last in self._by_chunk(start, stop):
            low = max(start, first * PAGE_BYTES)
            high = min(stop, last * PAGE_BYTES)
            part = out[low - start : high - start]
            chunk = self._chunk(first)
            if chunk is not None:
                present = self._count_present(chunk, first, last)
                if present == last - first or self._fill(chunk, first, last, fetch):
                    part[:] = chunk.part(low, high)
                    cached_bytes += present * PAGE_BYTES
                    continue
            # Pages cannot be kept: fetch only the bytes that are wanted.
            fetch(low, high, part)
        return cached_bytes

    def has(self, start: int, stop: int) -> bool:
        """Whether all pages of bytes [start, stop) are known to be there."""
        return bool(self.verified[start // PAGE_BYTES : pages_of(stop)].all())

    def contains(self, start: int, stop: int) -> bool:
        """Whether all pages of bytes [start, stop) are on the disk, whichever process wrote them."""
        if self.has(start, stop):
            return True
        for first, last in self._by_chunk(start, stop):
            chunk = self._chunk(first, make=False)
            if chunk is None or self._count_present(chunk, first, last) < last - first:
                return False
        return True

    def prefetch(self, start: int, stop: int, fetch: Fetch) -> bool:
        """Fetch and verify the missing pages of bytes [start, stop) of one chunk, if there is room.

        False: another process or thread prefetches some of them at this moment.
        """
        chunk = self._chunk(start // PAGE_BYTES)
        if chunk is None or self.has(start, stop):
            return True
        descriptor = self._open(chunk)
        if descriptor is None:
            return True
        try:
            try:
                if not try_lock(descriptor, start - chunk.first * PAGE_BYTES, stop - start):
                    return False
            except OSError as error:  # a file system without locks
                self.cache.on_error(error)
            self._fill(chunk, start // PAGE_BYTES, pages_of(stop), fetch)
        finally:
            unlock(descriptor)
        return True

    def _by_chunk(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """The pages [first, last) of bytes [start, stop), chunk by chunk."""
        pages_of_chunk = self.chunk_bytes // PAGE_BYTES
        first = start // PAGE_BYTES
        while first < pages_of(stop):
            last = min(pages_of(stop), (first // pages_of_chunk + 1) * pages_of_chunk)
            yield first, last
            first = last

    def _chunk(self, page: int, *, make: bool = True) -> ChunkFile | None:
        """The chunk of a page, mapped.

        None: it does not exist and `make` is False, there is no room, or the disk failed.
        """
        if not self.cache.usable:
            return None
        number = page * PAGE_BYTES // self.chunk_bytes
        # Without the lock: mapped chunks stay mapped.
        chunk = self._chunks.get(number)
        if chunk is not None:
            return chunk
        path = self.folder / f"{number}.data"
        start = number * self.chunk_bytes
        size = min(self.chunk_bytes, self.size - start)
        first = start // PAGE_BYTES
        with self._opening:
            chunk = self._chunks.get(number)
            try:
                chunk = chunk or open_chunk(path, first, size)
                if chunk is None and make and self.cache.reserve(path, size, self._description):
                    chunk = open_chunk(path, first, size)
            except OSError as error:
                self.cache.on_error(error)
                return None
            if chunk is not None and len(chunk_file.mapped) < chunk_file.MAX_MAPPED:
                # Kernels read it as long as this object lives. Its `verified` becomes a view of the
                # object's.
                chunk_file.mapped.add(chunk)
                chunk.verified = self.verified[first : first + len(chunk.verified)]
                self.address[number] = chunk.address
                self._chunks[number] = chunk
            return chunk

    def _count_present(self, chunk: ChunkFile, first: int, last: int) -> int:
        if chunk.has(first, last):
            return last - first
        return sum(self._is_present(chunk, page) for page in range(first, last))

    def _is_present(self, chunk: ChunkFile, page: int) -> bool:
        """Whether a page is there and sound."""
        is_sound = chunk.is_sound(page)
        if is_sound is False:
            log.warning("%s: page %d is damaged; it is fetched again", self.folder, page)
            try:
                chunk.forget(page)
            except OSError as error:
                self.cache.on_error(error)
        return bool(is_sound)

    def _fill(self, chunk: ChunkFile, first: int, last: int, fetch: Fetch) -> bool:
        """Have all of pages [first, last) of a chunk; False if they cannot be kept."""
        page = first
        while page < last:
            end = page + 1
            if not self._is_present(chunk, page):
                while end < last and not self._is_present(chunk, end):
                    end += 1
                if not self._fetch_pages(chunk, page, end, fetch):
                    return False
            page = end
        return chunk.has(first, last)

    def _fetch_pages(self, chunk: ChunkFile, first: int, last: int, fetch: Fetch) -> bool:
        """Fetch pages [first, last) and keep them; False, and no fetch, if they cannot be kept."""
        descriptor = self._open(chunk, (last - first) * PAGE_BYTES)
        if descriptor is None:
            return False
        try:
            start = first * PAGE_BYTES
            stop = min(last * PAGE_BYTES, self.size)
            data = np.empty(stop - start, np.uint8)
            fetch(start, stop, data)
            try:
                chunk.write(descriptor, first, data)
            except OSError as error:
                self.cache.on_error(error)
        finally:
            os.close(descriptor)
        return True

    def _open(self, chunk: ChunkFile, new_bytes: int = 0) -> int | None:
        """A descriptor to write so many bytes to a chunk; None if nothing can be kept there."""
        try:
            if not chunk.gone and self.cache.usable and self.cache.has_disk_space(new_bytes):
                return chunk.open()
        except OSError as error:
            self.cache.on_error(error)
        return None


def open_cached(cache: PageCache, url: str, etag: str, size: int) -> CachedObject | None:
    """The cached pages of an object, which all openings in this process share.

    None: the disk cannot be used.
    """
    global _toucher_pid
    name = object_name(url, etag, size, cache.chunk_bytes)
    key = str(cache.folder / name)
    with _lock:
        cached = _open_objects.get(key)
        if cached is None and cache.usable:
            try:
                cached = CachedObject(cache, name, url, etag, size)
            except OSError as error:
                cache.on_error(error)
                return None
            _open_objects[key] = cached
        # Once in each process: no thread survives a fork. A daemon, so that a disk that hangs does
        # not delay the end of the process.
        if _toucher_pid != os.getpid():
            _toucher_pid = os.getpid()
            threading.Thread(target=_touch_objects, name="streammega-cache", daemon=True).start()
        return cached


def _touch_objects() -> None:
    """Touch the open objects as long as the process lives: kernels read them without a call."""
    while True:
        time.sleep(TOUCH_SECONDS)
        with _lock:
            # Only folders, since references to the objects would keep them open until the next round.
            folders = [cached.folder for cached in _open_objects.values()]
        for folder in folders:
            with contextlib.suppress(OSError):
                touch(folder)


class CachedStore(WrapperStore):
    """One object of a store behind its cached pages: `fetch_into` reads through them."""

    def __init__(self, store: Store, cached: CachedObject) -> None:
        super().__init__(store)
        self.cached = cached
        self.hit_bytes = 0
        self.fetched_bytes = 0
        self._lock = process_lock()  # of both counts: threads of the fetcher add to them

    def fetch_into(
        self, key: str, spans: Sequence[Span], outs: Iterable[Bytes], etag: str = ""
    ) -> None:
        """From pages. Large reads fetch and keep the pages that are missing."""

        def fetch(start: int, stop: int, out: Bytes) -> None:
            self.inner.fetch_into(key, [(start, stop)], [out], etag)
            self._count(0, stop - start)

        missing_spans = []
        missing_outs = []
        for (start, stop), out in zip(spans, outs, strict=True):
            if stop - start >= MIN_PAGED_BYTES or self.cached.contains(start, stop):
                hits = self.cached.read(start, stop, out, fetch)
                self._count(hits, 0)
            else:
                missing_spans.append((start, stop))
                missing_outs.append(out)
        # Several small reads are one call of the transport.
        if missing_spans:
            self.inner.fetch_into(key, missing_spans, missing_outs, etag)
            self._count(0, sum(stop - start for start, stop in missing_spans))

    def _count(self, hits: int, fetched: int) -> None:
        with self._lock:
            self.hit_bytes += hits
            self.fetched_bytes += fetched
