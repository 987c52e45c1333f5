"""The stager fetches whole files into the page cache in the background.

It serves orders that read small scattered ranges of the files.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from streammega.config import StorageConfig
from streammega.errors import StorageError
from streammega.samples.token_file import TokenFile
from streammega.storage.cache.page_cache import CachedStore
from streammega.storage.fetch.fetcher import CLOSE_TIMEOUT
from streammega.storage.fork_lock import process_lock
from streammega.storage.retry import RetryPolicy
from streammega.storage.store import Bytes
from streammega.storage.thread_pool import Cancelled

log = logging.getLogger(__name__)

THREADS = 4
"""Background threads. Many more range reads at once serve the samples that are needed now."""


@dataclass(frozen=True)
class _Part:
    """Bytes [low, high) of a file, within a chunk of the cache."""

    file: TokenFile
    store: CachedStore
    low: int
    high: int


class Stager:
    """Threads that read files into the cache from beginning to end, part by part.

    Readers on one node share the work. A stager postpones a part that another reader is fetching,
    and checks it again at the end.
    """

    def __init__(self, files: Sequence[TokenFile], storage: StorageConfig) -> None:
        self.staged_bytes = 0
        self._closed = threading.Event()
        self._close_timeout = min(CLOSE_TIMEOUT, storage.tuning.read_timeout)
        self._policy = RetryPolicy.of(storage)
        self._parts = _parts_of(files, storage.tuning.max_request_bytes)
        self._postponed: deque[_Part] = deque()
        self._lock = process_lock()
        self._threads = [
            threading.Thread(target=self._run, name="streammega-stage", daemon=True)
            for _ in range(THREADS)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        while not self._closed.is_set():
            part = self._next()
            if part is None:
                return
            try:
                self._policy.call(partial(self._stage, part), self._closed)
            except Cancelled:
                return
            except StorageError as error:
                log.info("staging stopped, what is needed is read directly: %s", error)
                return

    def _next(self) -> _Part | None:
        """The next part that no other reader is fetching; after the last, the postponed parts."""
        with self._lock:
            for part in self._parts:
                if self._closed.is_set():
                    return None
                if not part.store.cached.is_fetched_elsewhere(part.low, part.high):
                    return part
                self._postponed.append(part)
            return self._postponed.popleft() if self._postponed else None

    def _stage(self, part: _Part) -> None:
        if self._closed.is_set():
            return

        def fetch(start: int, stop: int, out: Bytes) -> None:
            """Read a part from the object and count its bytes."""
            store = part.store.inner
            store.fetch_into(part.file.key, [(start, stop)], [out], part.file.etag)
            with self._lock:
                self.staged_bytes += stop - start

        part.store.cached.prefetch(part.low, part.high, fetch, self._closed.is_set)

    def close(self) -> None:
        """Stop after the parts that are being fetched, but wait only briefly for them."""
        self._closed.set()
        deadline = time.monotonic() + self._close_timeout
        here = (
            threading.current_thread()
        )  # the garbage collector may call `close` in a stager thread
        for thread in self._threads:
            if thread is not here:
                thread.join(max(0.0, deadline - time.monotonic()))


def _parts_of(files: Sequence[TokenFile], part_bytes: int) -> Iterator[_Part]:
    """All bytes of the cached files, in parts of at most `part_bytes`."""
    for file in files:
        if not isinstance(file.store, CachedStore):
            continue
        cached = file.store.cached
        # no part crosses the end of a chunk, because each chunk is a file of the cache
        for chunk in range(0, cached.size, cached.chunk_bytes):
            end = min(chunk + cached.chunk_bytes, cached.size)
            for low in range(chunk, end, part_bytes):
                yield _Part(file, file.store, low, min(low + part_bytes, end))
