"""Bringing whole files to the page cache in the background, for orders that read small scattered ranges of them."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from streammega.config import StorageConfig
from streammega.errors import StorageError
from streammega.samples.fetch import TokenFile
from streammega.storage.base import Bytes
from streammega.storage.cached_store import CachedStore
from streammega.storage.retry import RetryPolicy

log = logging.getLogger(__name__)

THREADS = 4


@dataclass(frozen=True)
class _Part:
    """Bytes [low, high) of a file, within a chunk of the cache."""

    file: TokenFile
    store: CachedStore
    low: int
    high: int


class Stager:
    """Threads that read files into the cache, part by part, beginning to end, while range reads serve what is needed now.

    Readers on one node share the work: a part that another is fetching is passed over and looked at again afterwards.
    """

    def __init__(self, files: Sequence[TokenFile], storage: StorageConfig) -> None:
        self.staged_bytes = 0
        self._storage, self._closed = storage, False
        self._parts = _parts_of(files, storage.part_bytes)
        self._passed_over: deque[_Part] = deque()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run, name="streammega-stage", daemon=True) for _ in range(THREADS)]
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        policy = RetryPolicy.of(self._storage)
        while not self._closed:
            part = self._next()
            if part is None:
                return
            try:
                policy.call(lambda: self._stage(part))  # noqa: B023 - called at once
            except StorageError as error:
                log.info("staging stopped, what is needed is read directly: %s", error)
                return

    def _next(self) -> _Part | None:
        """The next part that nobody fetches; in the end those that were passed over, which are waited for."""
        with self._lock:
            for part in self._parts:
                if self._closed:
                    return None
                if not part.store.cached.is_fetched_elsewhere(part.low, part.high):
                    return part
                self._passed_over.append(part)
            return self._passed_over.popleft() if self._passed_over else None

    def _stage(self, part: _Part) -> None:
        if not self._closed:
            part.store.cached.ensure(part.low, part.high, lambda a, b, out: self._fetch(part, a, b, out), self._given_up)

    def _given_up(self) -> bool:
        return self._closed

    def _fetch(self, part: _Part, start: int, stop: int, out: Bytes) -> None:
        part.store.store.read_into(part.file.key, [(start, stop)], [out], part.file.etag)
        with self._lock:
            self.staged_bytes += stop - start

    def close(self) -> None:
        """Stop after the parts under way."""
        self._closed = True
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(self._storage.stall_timeout)


def _parts_of(files: Sequence[TokenFile], part_bytes: int) -> Iterator[_Part]:
    for file in files:
        if not isinstance(file.store, CachedStore):
            continue
        size, chunk_bytes = file.store.cached.size, file.store.cached.chunk_bytes
        for chunk in range(0, size, chunk_bytes):
            end = min(chunk + chunk_bytes, size)
            for low in range(chunk, end, part_bytes):
                yield _Part(file, file.store, low, min(low + part_bytes, end))
