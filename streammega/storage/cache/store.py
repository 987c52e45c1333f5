"""A store whose reads go through the page cache."""

from __future__ import annotations

from collections.abc import Sequence

from streammega.storage.cache import PAGE_BYTES, CachedObject
from streammega.storage.fork_lock import process_lock
from streammega.storage.store import Bytes, Span, Store, WrapperStore

SMALL = PAGE_BYTES // 4
"""Reads below this size are not worth their pages: what is missing of them is fetched as it is."""


class CachedStore(WrapperStore):
    """One object of a store behind its cached pages: `fetch_into` reads through them."""

    def __init__(self, store: Store, cached: CachedObject) -> None:
        super().__init__(store)
        self.cached = cached
        self.hit_bytes = 0
        self.fetched_bytes = 0
        self._lock = process_lock()  # of both counts: threads of the fetcher add to them
        self._closed = False

    def fetch_into(
        self, key: str, spans: Sequence[Span], outs: Sequence[Bytes], etag: str = ""
    ) -> None:
        """From pages where they are there; large reads bring their pages to the cache."""

        def fetch(start: int, stop: int, out: Bytes) -> None:
            self.inner.fetch_into(key, [(start, stop)], [out], etag)
            self._count(0, stop - start)

        missing_spans = []
        missing_outs = []
        for (start, stop), out in zip(spans, outs, strict=True):
            if stop - start >= SMALL or self.cached.contains(start, stop):
                hits = self.cached.read(start, stop, out, fetch, self._is_closed)
                self._count(hits, 0)
            else:
                missing_spans.append((start, stop))
                missing_outs.append(out)
        # Together: several small reads are one call of the transport.
        if missing_spans:
            self.read_past_cache(key, missing_spans, missing_outs, etag)

    def read_past_cache(
        self, key: str, spans: Sequence[Span], outs: Sequence[Bytes], etag: str = ""
    ) -> None:
        """From the object itself, and counted: for reads that must not wait for those of others."""
        self.inner.fetch_into(key, spans, outs, etag)
        fetched = sum(stop - start for start, stop in spans)
        self._count(0, fetched)

    def close(self) -> None:
        """End all waiting for pages that others fetch: nobody wants them any more."""
        self._closed = True

    def _is_closed(self) -> bool:
        return self._closed

    def _count(self, hits: int, fetched: int) -> None:
        with self._lock:
            self.hit_bytes += hits
            self.fetched_bytes += fetched
