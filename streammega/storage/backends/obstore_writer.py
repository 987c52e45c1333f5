"""An upload through obstore, from a thread of its own."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from streammega.config import StorageConfig
from streammega.errors import StorageError
from streammega.storage.store import ObjectWriter
from streammega.storage.thread_pool import Pool

ABORT_WITHIN = 5.0
"""Seconds that an abort waits for the server.

Parts that it leaves there are for the bucket's lifecycle rules.
"""
WAITING_PARTS = 2
"""Parts that are held beside those under way: writing and sending go on at once."""
PARTS_AT_ONCE = 3
"""Parts of one upload that are under way."""
LOOK_AGAIN = 0.2
"""Seconds between two looks whether the thread that takes parts still lives."""


class ObstoreWriter(ObjectWriter):
    """Streams parts from a thread; small objects are one plain PUT."""

    def __init__(
        self,
        client: Any,
        key: str,
        url: str,
        wrap: Callable[[BaseException], BaseException],
        pool: Pool,
        part_bytes: int,
    ) -> None:
        self._client = client
        self._key = key
        self._url = url
        self._wrap = wrap
        self._pool = pool
        self._part_bytes = part_bytes
        self._buffer = bytearray()
        self._sent = 0
        self._parts: queue.Queue[bytes | None] = queue.Queue(maxsize=WAITING_PARTS)
        self._aborted = threading.Event()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes; a failed upload is raised at the next write or at commit."""
        self._buffer += data
        while len(self._buffer) >= self._part_bytes:
            self._send(bytes(self._buffer[: self._part_bytes]))
            del self._buffer[: self._part_bytes]

    def commit(self) -> None:
        """Complete the upload; the object appears whole."""
        try:
            if self._thread is None:
                self._pool.call(self._put_whole)
                return
            if self._buffer:
                self._send(bytes(self._buffer))
            self._send(None)
            self._thread.join()
        except Exception as error:
            raise self._wrap(error) from None
        self._raise_failure()

    def abort(self) -> None:
        """Abort the upload: its parts are removed from the server, unless that does not answer."""
        self._buffer.clear()
        self._aborted.set()
        thread = self._thread
        if thread is not None and thread.is_alive():
            # Where the queue is full there is a part to be taken, whose taker looks whether it is
            # wanted.
            with contextlib.suppress(queue.Full):
                self._parts.put_nowait(None)
            thread.join(ABORT_WITHIN)

    def _put_whole(self) -> None:
        self._client.put(self._key, bytes(self._buffer), use_multipart=False)

    def _send(self, part: bytes | None) -> None:
        """Hand a part to the thread that uploads; None: that was the last one."""
        if part is not None:
            self._count_part()
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._upload, name="streammega-upload", daemon=True
            )
            self._thread.start()
        while True:
            try:
                self._parts.put(part, timeout=LOOK_AGAIN)
                return
            except queue.Full:
                if self._thread.is_alive():
                    continue
            self._raise_failure()
            raise StorageError(f"{self._url}: the upload ended before all of its parts were sent")

    def _count_part(self) -> None:
        self._sent += 1
        if self._sent > MOST_PARTS:
            most_gib = MOST_PARTS * self._part_bytes >> 30
            raise StorageError(
                f"{self._url}: an upload holds {most_gib} GiB ({MOST_PARTS:,} parts), and this "
                f"object is larger; write several shards, with --shard-size, or raise "
                f"upload_part_bytes of StorageConfig from {self._part_bytes:,}"
            )

    def _upload(self) -> None:
        try:
            self._client.put(
                self._key,
                self._taken_parts(),
                use_multipart=True,
                chunk_size=self._part_bytes,
                max_concurrency=PARTS_AT_ONCE,
            )
        except BaseException as error:
            self._failure = error

    def _taken_parts(self) -> Iterator[bytes]:
        while True:
            part = self._parts.get()
            # An error is what makes obstore remove the parts that it has sent.
            if self._aborted.is_set():
                raise InterruptedError("upload aborted")
            if part is None:
                return
            yield part

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._wrap(self._failure) from None


PART_BYTES = 32 << 20
MOST_PARTS = 10_000
PARTS_OF_A_SIZE = 2000
"""Parts are doubled after so many.

Objects may then have 1.9 TiB, while what most uploads hold in memory stays small.
"""
MiB = 1 << 20


def part_bytes(sent: int) -> int:
    """The size of a part after so many others, of an upload whose end is not known."""
    doublings = sent // PARTS_OF_A_SIZE
    return int(PART_BYTES << doublings)


def sized_for(storage: StorageConfig, size: int) -> StorageConfig:
    """`storage` with `upload_part_bytes` large enough for an object of about `size` bytes.

    obstore cuts an upload into equal parts, so it has to know beforehand. A tenth of them is left
    for a size that was too low.
    """
    parts_to_fill = MOST_PARTS * 9 // 10
    needed = _divide_up(size, parts_to_fill)
    if needed <= storage.upload_part_bytes:
        return storage
    whole_mib = _divide_up(needed, MiB) * MiB
    return replace(storage, upload_part_bytes=whole_mib)


def _divide_up(size: int, by: int) -> int:
    return -(-size // by)
