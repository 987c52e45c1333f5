"""Bringing whole files to the page cache in the background, for orders that read small scattered ranges of them."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Sequence

from streammega.config import StorageConfig
from streammega.errors import StorageError
from streammega.samples.fetch import TokenFile
from streammega.storage.base import Bytes
from streammega.storage.cached_store import CachedStore
from streammega.storage.retry import RetryPolicy

log = logging.getLogger(__name__)

THREADS = 4


class Stager:
    """Threads that read files into the cache, part by part, beginning to end, while range reads serve what is needed now.

    Readers on one node share the work: a part that another is fetching is passed over and looked at again afterwards.
    """

    def __init__(self, files: Sequence[TokenFile], storage: StorageConfig) -> None:
        self.staged_bytes = 0
        self._storage, self._closed = storage, False
        step = min(storage.part_bytes, storage.chunk_bytes)
        parts = (
            (file, file.store, low, min(low + step, chunk + storage.chunk_bytes, file.store.cached.size))
            for file in files
            if isinstance(file.store, CachedStore)
            for chunk in range(0, file.store.cached.size, storage.chunk_bytes)
            for low in range(chunk, min(chunk + storage.chunk_bytes, file.store.cached.size), step)
        )
        self._parts = iter(parts)
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run, name="streammega-stage", daemon=True) for _ in range(THREADS)]
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        policy = RetryPolicy.of(self._storage)
        while not self._closed:
            with self._lock:
                part = next(itertools.islice(self._parts, 1), None)
            if part is None:
                return
            file, store, low, high = part
            try:
                policy.call(lambda: self._stage(file, store, low, high))  # noqa: B023 - called at once
            except StorageError as error:
                log.info("staging stopped, what is needed is read directly: %s", error)
                return

    def _stage(self, file: TokenFile, store: CachedStore, low: int, high: int) -> None:
        if not self._closed:
            store.cached.ensure(low, high, lambda a, b, out: self._fetch(file, store, a, b, out), self._given_up)

    def _given_up(self) -> bool:
        return self._closed

    def _fetch(self, file: TokenFile, store: CachedStore, start: int, stop: int, out: Bytes) -> None:
        store.store.read_into(file.key, [(start, stop)], [out], file.etag)
        with self._lock:
            self.staged_bytes += stop - start

    def close(self) -> None:
        """Stop after the parts under way."""
        self._closed = True
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(self._storage.stall_timeout)
