"""The cached pages of one object: read, fetched where they are missing, and kept.

A page's checksum is written after its bytes, and looked at before they are believed, once in each
process. A page is fetched under a claim (claims.py): one process of the node fetches it, the others
wait, but not for ever.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import numpy as np

from streammega.errors import StorageError
from streammega.storage.cache import layout
from streammega.storage.cache.chunk import Chunk, mapped, open_chunk
from streammega.storage.cache.claims import Claims
from streammega.storage.cache.folder import CacheFolder
from streammega.storage.cache.layout import PAGE_BYTES
from streammega.storage.cache.presence import Presence
from streammega.storage.store import Bytes

log = logging.getLogger(__name__)

FIRST_LOOK = 0.005
LONGEST_LOOK = 0.05
"""Seconds between two looks at a page that another process fetches.

Soon at first, for most take milliseconds.
"""
LOOKS_GROW = 1.5
"""So many times as long as the last is the pause until the next look."""
Fetch = Callable[[int, int, Bytes], None]
"""Reads bytes [start, stop) of the object itself into an array."""
GivenUp = Callable[[], bool]
"""Whether nobody wants the bytes any more."""


def never() -> bool:
    """Nobody gives up."""
    return False


class CachedObject:
    """The cached pages of one object, in this process.

    `verified` uint8 [pages]: pages that are there and were checked, or written, by this process.
    `address` int64 [chunks]: where chunks are mapped, 0 where they are not. Both are read without a
    lock: a page is verified after its chunk was mapped, and a chunk stays mapped as long as this
    object lives.
    """

    def __init__(
        self, cache: CacheFolder, presence: Presence, name: str, url: str, etag: str, size: int
    ) -> None:
        self.cache = cache
        self.url = url
        self.size = size
        self.name = name
        self.folder = cache.folder / name
        self._about = {
            "url": url,
            "etag": etag,
            "size": size,
            "chunk_bytes": cache.chunk_bytes,
            "layout": layout.LAYOUT,
        }
        chunks = -(-size // cache.chunk_bytes)
        self.verified = np.zeros(layout.pages_of(size), np.uint8)
        self.address = np.zeros(chunks, np.int64)
        note = presence.use(name)
        # Not at exit: the note ends with the process, and threads may still read.
        weakref.finalize(self, presence.leave, note).atexit = False
        try:
            os.utime(self.folder / "used")
        except FileNotFoundError:
            pass  # nothing of it is cached
        self._chunks: dict[int, Chunk] = {}
        self._opening = threading.Lock()
        self._claims = Claims(presence, name, cache.failed)

    def read(
        self, start: int, stop: int, out: Bytes, fetch: Fetch, given_up: GivenUp = never
    ) -> int:
        """Fill `out` with bytes [start, stop): from pages that are there, else by `fetch`, whose
        pages are kept.

        fetch(start, stop, out) reads from the object itself. Returns the bytes that came from the
        cache. Raises what `fetch` raises, and StorageError when others are waited for and
        `given_up()` says that nobody wants the bytes any more.
        """
        hits = 0
        begin = start
        while begin < stop:
            page = begin // PAGE_BYTES
            last = min(layout.pages_of(stop), self._chunk_end(page))
            end = min(stop, last * PAGE_BYTES)
            part = out[begin - start : end - start]
            hits += self._read_within_chunk(page, last, begin, end, part, fetch, given_up)
            begin = end
        return hits

    def has(self, start: int, stop: int) -> bool:
        """Whether all pages of bytes [start, stop) are known to be there."""
        first = start // PAGE_BYTES
        last = layout.pages_of(stop)
        return bool(self.verified[first:last].all())

    def finds(self, start: int, stop: int) -> bool:
        """Whether all pages of bytes [start, stop) are there.

        Also those that another process or a former one has written.
        """
        if self.has(start, stop):
            return True
        page = start // PAGE_BYTES
        end = layout.pages_of(stop)
        while page < end:
            last = min(end, self._chunk_end(page))
            chunk = self._chunk(page, make=False)
            if chunk is None:
                return False
            if self._present(chunk, page, last) < last - page:
                return False
            page = last
        return True

    def ensure(self, start: int, stop: int, fetch: Fetch, given_up: GivenUp = never) -> None:
        """Have the pages of bytes [start, stop) on disk and verified, as far as there is room."""
        page = start // PAGE_BYTES
        end = layout.pages_of(stop)
        while page < end:
            last = min(end, self._chunk_end(page))
            chunk = self._chunk(page)
            if chunk is not None:
                self._fill_missing(chunk, page, last, fetch, given_up)
            page = last

    def is_fetched_elsewhere(self, start: int, stop: int) -> bool:
        """Whether somebody else is fetching pages of bytes [start, stop) just now."""
        first = start // PAGE_BYTES
        last = layout.pages_of(stop)
        if self.has(start, stop):
            return False
        claimed = self._claims.take(first, last)
        if claimed:
            self._claims.release(first, last)
        return not claimed

    @property
    def chunk_bytes(self) -> int:
        """Bytes of the object in one file."""
        return self.cache.chunk_bytes

    def _chunk_end(self, page: int) -> int:
        """The first page after the chunk of a page."""
        pages_of_chunk = self.cache.chunk_bytes // PAGE_BYTES
        chunk = page // pages_of_chunk
        return (chunk + 1) * pages_of_chunk

    def _read_within_chunk(
        self,
        first: int,
        last: int,
        start: int,
        stop: int,
        out: Bytes,
        fetch: Fetch,
        given_up: GivenUp,
    ) -> int:
        """Bytes [start, stop), of pages [first, last); returns those that came from the cache."""
        chunk = self._chunk(first)
        if chunk is None:
            fetch(start, stop, out)
            return 0
        present = self._present(chunk, first, last)
        complete = present == last - first
        if not complete and not self._fill_missing(chunk, first, last, fetch, given_up):
            # They cannot be kept: exactly what is wanted, without the rest of its pages.
            fetch(start, stop, out)
            return 0
        out[:] = chunk.part(start, stop)
        return present * PAGE_BYTES

    def _present(self, chunk: Chunk, first: int, last: int) -> int:
        """How many of some pages are there."""
        if chunk.holds(first, last):
            return last - first
        return sum(self._check(chunk, page) for page in range(first, last))

    def _fill_missing(
        self, chunk: Chunk, first: int, last: int, fetch: Fetch, given_up: GivenUp
    ) -> bool:
        """Have all of some pages; False if they cannot be kept."""
        for page, end in self._missing(chunk, first, last):
            if chunk.gone or not self.cache.usable:
                return False
            if not self._disk_has((end - page) * PAGE_BYTES):
                return False
            self._fill(chunk, page, end, fetch, given_up)
        return chunk.holds(first, last)

    def _disk_has(self, size: int) -> bool:
        try:
            return self.cache.room.disk_has(size)
        except OSError as error:
            self.cache.failed(error)
            return False

    def _missing(self, chunk: Chunk, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Runs of pages [first, last) that are not there.

        One at a time: what others fetch meanwhile is not asked for again.
        """
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

    def _fill(self, chunk: Chunk, first: int, last: int, fetch: Fetch, given_up: GivenUp) -> None:
        """Fetch pages [first, last) under a claim; or wait until whoever holds the claim has.

        One that is held for too long is done without: two writers of a page write the same bytes
        and the same checksum.
        """
        claimed = self._wait_for_claim(chunk, first, last, given_up)
        try:
            # Whoever held the claim before has fetched some of them, or all.
            missing = [page for page in range(first, last) if not self._check(chunk, page)]
            if missing:
                # In one request, though some in between may be there.
                first_missing = missing[0]
                start = first_missing * PAGE_BYTES
                stop = min((missing[-1] + 1) * PAGE_BYTES, self.size)
                data = np.empty(stop - start, np.uint8)
                fetch(start, stop, data)
                self._keep(chunk, first_missing, data)
        finally:
            if claimed:
                self._claims.release(first, last)

    def _wait_for_claim(self, chunk: Chunk, first: int, last: int, given_up: GivenUp) -> bool:
        """True: it is had. False: the pages are there now, or their holder takes too long."""
        deadline = time.monotonic() + self.cache.patience
        pause = FIRST_LOOK
        while not self._claims.take(first, last):
            if given_up():
                raise StorageError(f"{self.url}: was closed while another process was waited for")
            self._claims.wait(pause)
            pause = min(LOOKS_GROW * pause, LONGEST_LOOK)
            if all(self._check(chunk, page) for page in range(first, last)):
                return False
            if time.monotonic() > deadline:
                self.cache.late(self.url)
                return False
        return True

    def _keep(self, chunk: Chunk, page: int, data: Bytes) -> None:
        try:
            chunk.write(page, data)
        except OSError as error:
            self.cache.failed(error)

    def _check(self, chunk: Chunk, page: int) -> bool:
        """Whether a page is there, and sound."""
        sound = chunk.matches(page)
        if sound is False:
            log.warning("%s: page %d is damaged; it is fetched again", self.folder, page)
            try:
                chunk.forget(page)
            except OSError as error:
                self.cache.failed(error)
        return bool(sound)

    def _chunk(self, page: int, *, make: bool = True) -> Chunk | None:
        """The chunk of a page, mapped.

        None: it is not there and is not to be made, there is no room, or the disk failed.
        """
        if not self.cache.usable:
            return None
        number = page * PAGE_BYTES // self.cache.chunk_bytes
        # Without the lock, as nearly always: what is mapped stays.
        chunk = self._chunks.get(number)
        if chunk is not None:
            return chunk
        # One thread maps it; the others would map and show it again.
        with self._opening:
            chunk = self._chunks.get(number)
            if chunk is not None:
                return chunk
            try:
                return self._open_chunk(number, make=make)
            except OSError as error:
                self.cache.failed(error)
                return None

    def _open_chunk(self, number: int, *, make: bool) -> Chunk | None:
        start = number * self.cache.chunk_bytes
        size = min(self.cache.chunk_bytes, self.size - start)
        path = self.folder / f"{number}.data"
        # Once as it is, and once after it was made.
        for _ in range(2):
            chunk = open_chunk(path, start // PAGE_BYTES, size)
            if chunk is not None:
                self._show(number, chunk)
                return chunk
            if not make or not self.cache.room.reserve(path, layout.file_bytes(size), self._about):
                return None
        return None  # removed again by others

    def _show(self, number: int, chunk: Chunk) -> None:
        """Let kernels read a chunk where it is mapped, as long as this object lives.

        Unless too many are mapped already.
        """
        if not mapped.take(self):
            return
        # Its part of the whole: what is verified in the one is so in the other.
        end = chunk.first + len(chunk.verified)
        chunk.verified = self.verified[chunk.first : end]
        self.address[number] = chunk.address
        self._chunks[number] = chunk
