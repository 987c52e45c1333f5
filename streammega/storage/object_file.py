"""A stored object as a file to read: one version of it, which is read ahead.

Reads use the store that serves the object, with its credentials, retries and ETag checks.
"""

from __future__ import annotations

import io
from collections import deque
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from streammega.storage.store import ObjectInfo, Store
from streammega.storage.thread_pool import Batch, Pool

MIN_READ_BYTES = 256 << 10
"""Bytes of the smallest request. The footer of most Parquet files is shorter, and a smaller request
would hardly be faster.
"""
MAX_READ_BYTES = 2 << 20
"""Bytes of the largest request. It takes several times as long as its first byte, and larger bodies
cost more CPU time.
"""
IN_FLIGHT = 6
"""Requests of one file at once. Where an answer begins after 30 ms and a connection gives 80 MB/s,
reading is twice as fast as by one request at a time; more of them brought nothing.
"""
MAX_READ_AHEAD_BYTES = IN_FLIGHT * MAX_READ_BYTES
"""Most bytes that are read ahead, without those of the request that is being used."""
BUFFER_BYTES = 64 << 10
"""Bytes of the buffer for lines and headers: small reads then take no lock."""


class _Part(NamedTuple):
    """Bytes [start, stop) of the object, as one request that was begun."""

    start: int
    stop: int
    request: Batch


class ObjectReader(io.RawIOBase):
    """An object as an unbuffered file. Not for several threads at once.

    Sequential reads request the next parts of the object. With each part that is used up these
    become larger and one more, so that reading a header requests little else. A jump drops what was
    read ahead.

    Raises ObjectChangedError if the object was replaced after it was opened, and other errors as
    `Store.read`.
    """

    def __init__(self, store: Store, info: ObjectInfo) -> None:
        super().__init__()
        self._store = store
        self._info = info
        self._position = 0
        self._read_to = 0
        """Where the last read ended."""
        self._used = 0
        """Parts that were used up since the last jump."""
        self.expected_end = info.size
        """Nothing after this byte is read ahead."""
        self._parts: deque[_Part] = deque()
        """Adjacent parts, in order. The first one holds the position, if any does."""
        # Threads end at once: a conversion of many small files opens hundreds in a second.
        self._pool = Pool(IN_FLIGHT, "streammega-file", idle_timeout=0.0)

    @property
    def size(self) -> int:
        """Bytes of the object. A property, since fsspec's files have it, and readers ask for it."""
        return self._info.size

    def readable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """True."""
        return True

    def tell(self) -> int:
        """The byte that is read next."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a byte; nothing is requested yet. Raises ValueError for one before the first."""
        self._check_open()
        starts = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size}
        if whence not in starts:
            raise ValueError(f"{self._url()}: cannot seek with whence {whence}; it is 0, 1 or 2")
        offset += starts[whence]
        if offset < 0:
            raise ValueError(f"{self._url()}: cannot seek to byte {offset}")
        self._position = offset
        return offset

    def readinto(self, buffer: Any) -> int:
        """Fill the beginning of `buffer`, with at least a byte; 0 at the end of the object."""
        self._check_open()
        view = memoryview(buffer).cast("B")
        wanted = min(len(view), self.size - self._position)
        if wanted <= 0:
            return 0
        self._request(self._position + wanted)
        part = self._parts[0]
        try:
            ((body,),) = part.request.wait()
        except BaseException:  # also Ctrl-C: a cancelled part never arrives
            self._drop_parts(len(self._parts))
            raise
        offset = self._position - part.start
        count = min(wanted, part.stop - self._position)
        view[:count] = body[offset : offset + count]
        self._position += count
        self._read_to = self._position
        return count

    def readall(self) -> bytes:
        """From the position to the end. Without this one, `io` would ask for 8 KiB at a time."""
        rest = np.empty(max(0, self.size - self._position), np.uint8)
        filled = 0
        while filled < len(rest):
            filled += self.readinto(rest[filled:])
        return rest.tobytes()

    def close(self) -> None:
        """Let go of what was read ahead, and of requests that have not been sent."""
        self._drop_parts(len(self._parts))
        super().close()

    def _request(self, until: int) -> None:
        """Send for parts from the position on: those up to `until`, and what is to be read ahead."""
        position = self._position
        self._used += self._drop_parts(sum(part.stop <= position for part in self._parts))
        # a short jump ahead counts as reading on, as over an unwanted column of Parquet
        if not 0 <= position - self._read_to <= MIN_READ_BYTES:
            self._used = 0
        if self._parts and position < self._parts[0].start:
            self._drop_parts(len(self._parts))
        # `readall` asks for gigabytes, which are requested as there is room for them
        until = min(until, position + MAX_READ_AHEAD_BYTES)
        end = min(max(until, self.expected_end), self.size)
        start = self._parts[-1].stop if self._parts else position
        part_bytes = min(MIN_READ_BYTES << min(self._used, IN_FLIGHT), MAX_READ_BYTES)
        # only whole parts are read ahead: otherwise each read would send a small request
        while start < end and (start < until or len(self._parts) <= min(self._used, IN_FLIGHT)):
            stop = min(start + max(part_bytes, min(until - start, MAX_READ_BYTES)), end)
            read = partial(self._store.read, self._info.key, etag=self._info.etag)
            self._parts.append(_Part(start, stop, self._pool.begin(read, [[(start, stop)]])))
            start = stop

    def _drop_parts(self, count: int) -> int:
        """Forget the first parts. What has not been sent is not sent, and no pause is waited for."""
        for _ in range(count):
            self._parts.popleft().request.stop.set()
        return count

    def _check_open(self) -> None:
        if self.closed:
            raise ValueError(f"{self._url()}: was closed, and cannot be read any more")

    def _url(self) -> str:
        return self._store.url(self._info.key)


def open_object(store: Store, info: ObjectInfo) -> io.BufferedReader:
    """An object as a file, for a `with` block: the version that was looked up."""
    return io.BufferedReader(ObjectReader(store, info), BUFFER_BYTES)
