"""What all stores behind a network share: one client in each process, retries, checks of lengths."""

from __future__ import annotations

import ctypes
import math
import os
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit

from streammega.config import MiB, StorageConfig
from streammega.errors import AccessDeniedError, StorageError
from streammega.errors.redaction import redact_urls, remember_secrets
from streammega.storage.backends.s3_options import ENDPOINT_VARIABLES, s3_endpoint
from streammega.storage.fork_lock import process_lock
from streammega.storage.progress import note_part
from streammega.storage.retry import RetryPolicy, endpoint_of
from streammega.storage.store import Buffer, Span, Store, check_length
from streammega.storage.thread_pool import Pool

Result = TypeVar("Result")
CLOUDS = (".amazonaws.com", ".amazonaws.com.cn", ".aliyuncs.com")
"""Ends of the hosts of clouds in which no two buckets have the same name."""
Entry = TypeVar("Entry")
MAX_SPANS_TOGETHER = 8
MAX_BYTES_TOGETHER = 64 << 10
"""Up to so many ranges of so many bytes together are read by one call: a thread for each costs more
than reading all again after a failure.
"""
MAX_THREADS = 32
"""Concurrent requests of one store for listings, opening and tools, without those of the fetcher."""

PART_BYTES = 32 << 20
MAX_PARTS = 10_000
PARTS_OF_A_SIZE = 2000
"""The part size doubles after so many parts.

So an object may have 1.9 TiB, while most uploads hold little in memory.
"""
MAX_TIMES_LISTED = 4
"""Times that no sound listing has an entry."""
_clients: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""Open clients of this process by their ids, for some have no hash."""


class RemoteStore(Store):
    """A store whose client is opened at the first use, once per process.

    Subclasses open the client, send one request at a time, and turn its errors into ours.

    root: the bucket or host, which keys lack; empty where the client serves all of them.
    """

    def __init__(self, scheme: str, root: str, config: StorageConfig) -> None:
        self.scheme = scheme
        self.root = root
        self._config = config
        self._urls: dict[str, str] = {}  # kept, since each request needs one
        self._lock = process_lock()  # guards `_opened`: one client for all threads
        self._opened: tuple[int, Any] | None = None  # (process, client)
        self._threads: tuple[int, Pool] | None = None  # (process, threads)
        self.endpoint = endpoint_of(scheme, root, config.storage_options)
        """An identifier of its server."""
        self._policy = RetryPolicy.of(config, self.endpoint)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url('')})"

    @property
    def arguments(self) -> tuple[str, str, StorageConfig]:
        """What it was made with."""
        return self.scheme, self.root, self._config

    def __getstate__(self) -> dict[str, Any]:
        return {"arguments": self.arguments, "answered": self._policy.has_answered}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(*state["arguments"])  # type: ignore[misc]
        if state["answered"]:
            self._policy.note_answer()

    def url(self, key: str) -> str:
        """The full URL of a key, without credentials."""
        if key not in self._urls:
            self._urls[key] = redact_urls(self._full_url(key))
        return self._urls[key]

    def _full_url(self, key: str) -> str:
        return f"{self.scheme}://{self.root}/{key}"

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
        """Raise ConfigError for a key that the client would change."""

    def _refuse_repetition(
        self, entries: Iterable[Entry], path_of: Callable[[Entry], str]
    ) -> Iterator[Entry]:
        """The entries of a listing. Raises StorageError where a server gives the same ones again and again,
        because it ignores where to go on.

        By Brent's algorithm: one entry is remembered, a later one whenever twice as many have come. An entry
        may come twice: an object and a marker of a folder can have one name.
        """
        remembered = ""
        times = 0
        for count, entry in enumerate(entries, 1):
            path = path_of(entry)
            if path == remembered:
                times += 1
                if times == MAX_TIMES_LISTED:
                    raise repeats_itself(self.url(path))
            if not count & (count - 1):
                remembered = path
                times = 1
            note_part("objects listed", 1, unit="")
            yield entry

    def _renewal(self) -> Callable[[], bool] | None:
        """A function to call if credentials are refused. It returns whether there are others now.

        This is called before each request, to note which credentials it uses.
        """
        options = self._config.storage_options
        has_fixed = any(options.get(name) for name in ("anon", "key", "username"))
        if self.scheme != "s3" or has_fixed:
            return None
        used = self._opened

        def renew() -> bool:
            with self._lock:
                # Otherwise another thread has opened a new client, which asks for credentials.
                if self._opened is used:
                    self._opened = None
            return True

        return renew

    def place(self, prefix: str) -> str:
        """The URL, and the host that serves it where that is not the cloud of its scheme: in another
        one, a bucket of the same name is another bucket.
        """
        endpoint = self._configured_endpoint() or ""
        # Those of OSS need no scheme.
        host = urlsplit(endpoint if "://" in endpoint else f"//{endpoint}").netloc
        host = host.rpartition("@")[2]
        is_own = not host or host.endswith(CLOUDS) or self.scheme in ("http", "https")
        return self.url(prefix) if is_own else f"{self.url(prefix)} at {host}"

    def _configured_endpoint(self) -> str | None:
        """The endpoint that options or the environment name, if they do."""
        options = self._config.storage_options
        if self.scheme == "s3":
            return s3_endpoint(self.root, options)
        candidates = [
            options.get("endpoint_url"),
            options.get("endpoint"),
            (options.get("client_kwargs") or {}).get("endpoint_url"),
            *(os.environ.get(name) for name in ENDPOINT_VARIABLES.get(self.scheme, ())),
        ]
        return next((str(one) for one in candidates if one), None)

    def fetch(self, key: str, spans: Sequence[Span], etag: str = "") -> list[Buffer]:
        """One request each. Bodies are in new memory."""
        self._check_key(key)
        bodies = self._once(key, lambda client: self._get(client, key, spans, etag))
        url = self.url(key)
        return [
            check_length(url, span, memoryview(body))
            for span, body in zip(spans, bodies, strict=True)
        ]

    def read(self, key: str, spans: Sequence[Span], etag: str = "") -> list[Buffer]:
        """By concurrent requests, each with retries; a few small ones together."""

        def read_together(together: Sequence[Span]) -> list[Buffer]:
            return self._policy.call(lambda: self.fetch(key, together, etag))

        def read_one(span: Span) -> Buffer:
            start, stop = span
            if start < stop:
                return read_together([span])[0]
            # HTTP has no range of no bytes.
            return check_length(self.url(key), span, memoryview(b""))

        spans = [(int(start), int(stop)) for start, stop in spans]
        # A single one needs no other thread.
        if len(spans) == 1:
            return [read_one(spans[0])]
        sizes = [stop - start for start, stop in spans]
        if (
            0 < len(spans) <= MAX_SPANS_TOGETHER
            and sum(sizes) <= MAX_BYTES_TOGETHER
            and min(sizes) > 0
        ):
            return read_together(spans)
        return self._pool().map(read_one, spans)

    def _call(self, key: str, request: Callable[[Any], Result]) -> Result:
        """`request(client)`, with retries. In another thread than the main one, which notices Ctrl-C."""
        return self._pool().call(lambda: self._policy.call(lambda: self._once(key, request)))

    def _once(self, key: str, request: Callable[[Any], Result]) -> Result:
        """`request(client)`, repeated once if credentials were refused and there are others now.

        Raises StorageError. It is transient if they have expired, and may still be renewed.
        """
        renew = self._renewal()
        try:
            return self._send(key, request)
        except AccessDeniedError as error:
            if renew is None:
                raise
            refused = error
        try:
            if renew():
                return self._send(key, request)
        except AccessDeniedError as error:
            refused = error
        # Where they come from, new ones may be late.
        refused.transient = refused.has_expired
        raise refused

    def _send(self, key: str, request: Callable[[Any], Result]) -> Result:
        client = self._client()
        try:
            return request(client)
        except BaseException as error:
            remember_secrets(self._config.storage_options)  # for what it says
            raise self._error(key, error) from None

    def _client(self) -> Any:
        """The client of this process. Opening it may fail as a request does: call it within a policy."""
        with self._lock:
            # Neither a client nor its threads survive a fork.
            if self._opened is None or self._opened[0] != os.getpid():
                self._opened = (os.getpid(), note_client(self._open()))
            return self._opened[1]

    def _pool(self) -> Pool:
        """The threads of this process."""
        with self._lock:
            if self._threads is None or self._threads[0] != os.getpid():
                threads = min(MAX_THREADS, self._config.max_concurrent_requests)
                self._threads = (os.getpid(), Pool(threads))
            return self._threads[1]


def note_client(client: Any) -> Any:
    """Return a client that was opened. No forked child will ever free it."""
    _clients[id(client)] = client
    return client


def _keep_clients() -> None:
    """In a forked child, keep what it inherited to the end of the process and beyond.

    Freeing a client of obstore wakes its runtime, whose locks may be held by threads that the child
    does not have; a driver of s3fs would try to close connections that are the parent's.
    """
    for client in list(_clients.values()):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(client))
    _clients.clear()


os.register_at_fork(after_in_child=_keep_clients)


def repeats_itself(url: str) -> StorageError:
    """The error for a server that gives the same entries of a listing again and again."""
    return StorageError(
        f"{url}: the server lists this again and again, and ignores where to go on "
        f"(continuation-token); name the objects one by one"
    )


def part_bytes(sent: int) -> int:
    """The size of the next part after `sent` others, of an upload of unknown size."""
    doublings = sent // PARTS_OF_A_SIZE
    return int(PART_BYTES << doublings)


def with_part_bytes_for(storage: StorageConfig, size: int) -> StorageConfig:
    """`storage` with `multipart_part_bytes` large enough for an object of about `size` bytes.

    obstore cuts an upload into equal parts, so their size must be known beforehand. A tenth of the
    parts is left for a size that was too low.
    """
    parts_to_fill = MAX_PARTS * 9 // 10
    needed = math.ceil(size / parts_to_fill)
    if needed <= storage.tuning.multipart_part_bytes:
        return storage
    return storage.tuned(multipart_part_bytes=math.ceil(needed / MiB) * MiB)
