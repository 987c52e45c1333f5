"""What all stores behind a network share: one client a process, retries, checks of lengths."""

from __future__ import annotations

import math
import os
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from streammega.config import StorageConfig
from streammega.errors import AccessDeniedError
from streammega.storage.fork_lock import process_lock
from streammega.storage.retry import RetryPolicy, endpoint_of
from streammega.storage.store import Buffer, Span, Store, check_length
from streammega.storage.thread_pool import Pool

Result = TypeVar("Result")
FEW = 8
SMALL = 64 << 10
"""Up to so many ranges of so many bytes together go out by one call: what a thread for each would
cost is more than trying all again when one fails.
"""
MAX_THREADS = 32
"""Requests that one store has under way beside the fetcher's: of listings, opening and tools."""
CONNECT_TIMEOUT = 10.0
"""Seconds, or `timeout` where that is less: a server that is there takes connections at once."""

PART_BYTES = 32 << 20
MAX_PARTS = 10_000
PARTS_OF_A_SIZE = 2000
"""Parts are doubled after so many.

Objects may then have 1.9 TiB, while what most uploads hold in memory stays small.
"""
MiB = 1 << 20


class RemoteStore(Store):
    """A store whose client is opened at the first use, once per process.

    Subclasses open the client, send one request at a time, and turn its errors into ours.

    root: the bucket or host, which keys lack; empty where the client serves all of them.
    """

    owns_bodies = True

    def __init__(self, scheme: str, root: str, config: StorageConfig) -> None:
        self.scheme = scheme
        self.root = root
        self._config = config
        self._lock = process_lock()  # of what is opened at the first use: once for all threads
        self._opened: tuple[int, Any, Pool] | None = None  # (process, client, threads)
        self._policy = RetryPolicy.of(config, endpoint_of(scheme, root, config.storage_options))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url('')})"

    def __getstate__(self) -> dict[str, Any]:
        answered = self._policy.has_answered
        return {"arguments": (self.scheme, self.root, self._config), "answered": answered}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(*state["arguments"])  # type: ignore[misc]
        if state["answered"]:
            self._policy.note_answer()

    @abstractmethod
    def _open(self) -> Any:
        """A client that tries each request once. Raises ConfigError, AccessDeniedError."""

    @abstractmethod
    def _get(self, client: Any, key: str, spans: Sequence[Span], etag: str) -> Sequence[Any]:
        """The body of each span, by concurrent requests, of the version `etag` if that is given.

        Lengths are checked by the caller. Raises whatever the client raises.
        """

    @abstractmethod
    def _error(self, key: str, error: BaseException) -> BaseException:
        """Our error for one of the client's."""

    def _check_key(self, key: str) -> None:
        """Raise ConfigError for a key that the client would take for another."""

    def _renewal(self) -> Callable[[], bool] | None:
        """What reads credentials again when they are refused: True if there are others now.

        Called before each request, so that it knows which credentials that one used.
        """
        return None

    def fetch(self, key: str, spans: Sequence[Span], etag: str = "") -> list[Buffer]:
        """One request each; bodies come in memory of their own."""
        self._check_key(key)
        bodies = self._once(key, lambda client: self._get(client, key, spans, etag))
        url = self.url(key)
        return [
            check_length(url, span, memoryview(body))
            for span, body in zip(spans, bodies, strict=True)
        ]

    def read(self, key: str, spans: Sequence[Span], etag: str = "") -> list[Buffer]:
        """By concurrent requests, each tried again by itself; a few small ones together."""

        def read_together(together: Sequence[Span]) -> list[Buffer]:
            return self._policy.call(lambda: self.fetch(key, together, etag))

        def read_one(span: Span) -> Buffer:
            start, stop = span
            if start < stop:
                return read_together([span])[0]
            # There is no range request for no bytes.
            return check_length(self.url(key), span, memoryview(b""))

        spans = [(int(start), int(stop)) for start, stop in spans]
        # Nothing goes on beside a single one: the thread that asks may do it.
        if len(spans) == 1:
            return [read_one(spans[0])]
        sizes = [stop - start for start, stop in spans]
        if 0 < len(spans) <= FEW and sum(sizes) <= SMALL and min(sizes) > 0:
            return read_together(spans)
        _, pool = self._client()
        return pool.map(read_one, spans)

    def _call(self, key: str, request: Callable[[Any], Result]) -> Result:
        """`request(client)`, tried again as the policy says.

        The main thread has another one do it, so that it hears of Ctrl-C meanwhile.
        """
        _, pool = self._client()
        return pool.call(lambda: self._policy.call(lambda: self._once(key, request)))

    def _once(self, key: str, request: Callable[[Any], Result]) -> Result:
        """`request(client)`, once more if credentials were refused and there are others now.

        Raises our errors.
        """
        renew = self._renewal()
        try:
            return self._send(key, request)
        except AccessDeniedError:
            if renew is None or not renew():
                raise
        return self._send(key, request)

    def _send(self, key: str, request: Callable[[Any], Result]) -> Result:
        client, _ = self._client()
        try:
            return request(client)
        except BaseException as error:
            raise self._error(key, error) from None

    def _client(self) -> tuple[Any, Pool]:
        this_process = os.getpid()
        with self._lock:
            if self._opened is not None:
                process, client, pool = self._opened
                # Neither a client nor its threads survive a fork.
                if process == this_process:
                    return client, pool
            client = self._open()
            pool = Pool(min(MAX_THREADS, self._config.max_requests))
            self._opened = (this_process, client, pool)
            return client, pool


def part_bytes(sent: int) -> int:
    """The size of a part after so many others, of an upload whose end is not known."""
    doublings = sent // PARTS_OF_A_SIZE
    return int(PART_BYTES << doublings)


def sized_for(storage: StorageConfig, size: int) -> StorageConfig:
    """`storage` with `upload_part_bytes` large enough for an object of about `size` bytes.

    obstore cuts an upload into equal parts, so it has to know beforehand. A tenth of them is left
    for a size that was too low.
    """
    parts_to_fill = MAX_PARTS * 9 // 10
    needed = math.ceil(size / parts_to_fill)
    if needed <= storage.upload_part_bytes:
        return storage
    return replace(storage, upload_part_bytes=math.ceil(needed / MiB) * MiB)
