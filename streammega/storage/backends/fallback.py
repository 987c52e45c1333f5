"""A bucket or host by obstore, and by a second client where obstore cannot serve it."""

# ruff: noqa: D102  (methods that override others need no docstrings)
from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from streammega.storage.backends import obstore_after_fork
from streammega.storage.backends.obstore import RangesRefused
from streammega.storage.fork_lock import process_lock
from streammega.storage.store import Buffer, ObjectInfo, Span, Store, WrapperStore
from streammega.storage.warn_once import warn_once

log = logging.getLogger(__name__)
Result = TypeVar("Result")

FORKED = (
    "this process was forked after obstore had been used, which obstore does not survive, and it "
    "cannot load a copy of obstore"
)
RANGES_REFUSED = (
    "the server answers range requests with 200 instead of 206, or with a Content-Range without a "
    "size, which obstore refuses"
)


class FallbackStore(WrapperStore):
    """One bucket or host, by one of two stores.

    Reads use the second store after the first one raised RangesRefused. With `after_fork`, all calls
    use it in a forked process that cannot load a copy of obstore.
    """

    def __init__(
        self, first: Store, make_second: Callable[[], Store], *, after_fork: bool = True
    ) -> None:
        super().__init__(first)
        self._make_second = make_second
        self._after_fork = after_fork
        self._second: Store | None = None
        self._ranges_refused = False
        self._lock = process_lock()  # guards the second store: one client for all threads

    def __repr__(self) -> str:
        return f"FallbackStore({self._inner!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {
            "first": self._inner,
            "make_second": self._make_second,
            "after_fork": self._after_fork,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    @property
    def inner(self) -> Store:
        """The store that serves this process."""
        if self._after_fork and obstore_after_fork.library() is None:
            return self._fall_back(FORKED)
        return self._inner

    @property
    def transport(self) -> str:
        second = self._second
        return second.transport if self._ranges_refused and second else self.inner.transport

    def fetch(self, key: str, spans: Sequence[Span], etag: str = "") -> list[Buffer]:
        return self._read(lambda store: store.fetch(key, spans, etag))

    def read(self, key: str, spans: Sequence[Span], etag: str = "") -> list[Buffer]:
        return self._read(lambda store: store.read(key, spans, etag))

    def read_start(self, key: str, size: int) -> tuple[ObjectInfo, Buffer]:
        return self._read(lambda store: store.read_start(key, size))

    fetch_into = Store.fetch_into  # by `fetch` above

    def _read(self, read: Callable[[Store], Result]) -> Result:
        if not self._ranges_refused:
            try:
                return read(self.inner)
            except RangesRefused:
                self._ranges_refused = True
        return read(self._fall_back(RANGES_REFUSED))

    def _fall_back(self, reason: str) -> Store:
        with self._lock:
            if self._second is None:
                self._second = self._make_second()
                url = self._inner.url("")
                warn_once(
                    log,
                    f"{url} {reason}",
                    "%s: %s; reading by transport='fsspec', which is slower (set it to begin so)",
                    url,
                    reason,
                )
            return self._second
