"""The stager fetches whole files into the page cache in the background.

It serves orders that read small scattered ranges of the files.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

from streammega.config import StorageConfig
from streammega.errors import StorageError
from streammega.errors.logs import get_logger
from streammega.samples.token_file import TokenFile
from streammega.storage.cache.page_cache import CachedStore
from streammega.storage.fetch.fetcher import CLOSE_TIMEOUT
from streammega.storage.fork_lock import process_lock
from streammega.storage.retry import RetryPolicy
from streammega.storage.store import Bytes
from streammega.storage.thread_pool import Cancelled

log = get_logger(__name__)

THREADS = 4
"""Background threads. Many more range reads at once serve the samples that are needed now."""
POSTPONE_SECONDS = 0.2
"""Seconds until a thread looks again at a part that another stager is fetching."""


class _Part(NamedTuple):
    """Bytes [low, high) of a file, within a chunk of the cache."""

    file: TokenFile
    store: CachedStore
    low: int
    high: int


class Stager:
    """Threads that read files into the cache from beginning to end, part by part.

    Stagers of one node share the work: each postpones a part that another one is fetching, and checks
    it again at the end.
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
            with self._lock:
                part = next(self._parts, None)
                is_new = part is not None
                if part is None and self._postponed:
                    part = self._postponed.popleft()
            if part is None:
                return
            try:
                is_done = self._policy.call(partial(self._stage, part), self._closed)
            except Cancelled:
                return
            except StorageError as error:
                log.info("staging stopped, what is needed is read directly: %s", error)
                return
            if not is_done:
                self._postponed.append(part)
                self._closed.wait(0 if is_new else POSTPONE_SECONDS)

    def _stage(self, part: _Part) -> bool:
        """Fetch and keep a part; False if another stager is fetching it."""

        def fetch(start: int, stop: int, out: Bytes) -> None:
            """Read a part from the object and count its bytes."""
            store = part.store.inner
            store.fetch_into(part.file.key, [(start, stop)], [out], part.file.etag)
            with self._lock:
                self.staged_bytes += stop - start

        return part.store.cached.prefetch(part.low, part.high, fetch)

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
