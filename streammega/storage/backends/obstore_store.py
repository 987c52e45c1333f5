"""Object stores through obstore (Rust): S3, GCS, Azure and plain HTTP."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import numpy as np
import obstore
import obstore.exceptions
import obstore.store

from streammega.config import StorageConfig
from streammega.errors import (
    ConfigError,
    EndpointError,
    ObjectNotFoundError,
    StorageError,
    StreammegaError,
)
from streammega.errors.redaction import redact
from streammega.storage.backends.clouds import cloud_arguments
from streammega.storage.backends.fsspec_store import FsspecStore
from streammega.storage.backends.options import client_options, s3_arguments
from streammega.storage.backends.ranges import read_side_by_side
from streammega.storage.descriptors import blame_limit, blame_limit_of_connection
from streammega.storage.endpoints import endpoint_of
from streammega.storage.failures import denied, failure_of_status, missing, no_answer
from streammega.storage.fetch.threads import Pool
from streammega.storage.parts import MOST_PARTS
from streammega.storage.retry import FIRST_PAUSE, LONGEST_PAUSE, TRY_ONCE, RetryPolicy
from streammega.storage.store import (
    Buffer,
    Bytes,
    ObjectInfo,
    ObjectWriter,
    Span,
    check_object_key,
    fill,
    listed_etag,
    wrong_length,
)
from streammega.storage.versions import check_version, version_like, version_of

log = logging.getLogger(__name__)

_STATUS = re.compile(r"status code: (\d{3})")
_NETWORK = ("error sending request", "timed out", "error decoding response body", "request or response body error",
            "connection", "operation timed out", "HTTP error")  # fmt: skip
STREAMED_READ = 2 << 20
"""Bodies above this size are copied as they come."""
ABORT_WITHIN = 5.0
"""Seconds that an abort waits for the server; parts that it leaves there are for the bucket's
lifecycle rules.
"""
MOST_RETRIES = 1_000_000
"""More than any deadline has room for: obstore counts tries as well, and may pause shortly each
time.
"""
FORKED = "this process was forked after obstore had been used, which obstore does not survive"


_used = threading.Event()
_lost = threading.Event()


def _note_fork() -> None:
    if _used.is_set():
        _lost.set()


# obstore's own threads do not survive a fork, and cannot be started again in the child.
os.register_at_fork(after_in_child=_note_fork)


class ObstoreStore:
    """One bucket, container or host. Implements `storage.store.Store`; opens its client lazily, per
    process.

    A process that was forked after obstore had been used is served by another transport, where
    there is one: by one client for all calls, and with one warning.
    """

    fallback_name = "s3fs"

    def __init__(self, scheme: str, root: str, config: StorageConfig) -> None:
        self.scheme = scheme
        self.root = root
        self._config = config
        self._lock = threading.Lock()
        self._opened: tuple[int, Any, Pool] | None = None
        self._policy = RetryPolicy.of(config, endpoint_of(scheme, root, config.storage_options))
        self._urls: dict[str, str] = {}
        self._fallback: FsspecStore | None = None
        self._bucket_seen = False

    def __repr__(self) -> str:
        return f"ObstoreStore({self.url('')})"

    def __getstate__(self) -> dict[str, Any]:
        answered = self._policy.has_answered
        return {
            "scheme": self.scheme,
            "root": self.root,
            "config": self._config,
            "answered": answered,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["scheme"], state["root"], state["config"])  # type: ignore[misc]
        self._policy.inherit(state["answered"])

    def url(self, key: str) -> str:
        """The full URL of a key, without credentials."""
        if key not in self._urls:
            self._urls[key] = redact(
                f"{self.scheme}://{self.root}/{key}", self._config.storage_options
            )
        return self._urls[key]

    def info(self, key: str) -> ObjectInfo:
        """One HEAD request."""
        check_object_key(self.url(key), key)
        if (instead := self._after_fork()) is not None:
            return replace(instead.info(self._full(key)), key=key)
        client, pool = self._client()

        def head() -> ObjectInfo:
            try:
                meta = obstore.head(client, key)
            except BaseException as error:
                if isinstance(error, FileNotFoundError):
                    self._look_for_bucket(client, key)
                raise self._error(key, error) from None
            self._bucket_seen = True
            return ObjectInfo(
                key=key,
                size=int(meta["size"]),
                etag=version_of(meta.get("e_tag"), meta["last_modified"]),
            )

        return pool.call(lambda: self._policy.call(head))

    def _look_for_bucket(self, client: Any, key: str) -> None:
        """Once: raise if it is the bucket that does not exist.

        The answer to a HEAD has no body that could say so.
        """
        if self._bucket_seen:
            return
        try:
            obstore.get_range(client, key, start=0, end=1)
        except BaseException as error:
            if "NoSuchBucket" in str(error):
                raise self._error(key, error) from None
        self._bucket_seen = True

    def read_ranges(
        self, key: str, starts: Sequence[int], stops: Sequence[int], etag: str = ""
    ) -> list[Buffer]:
        """Concurrent range requests; each body's length is checked, failures are tried again."""
        instead = self._after_fork() or self._fallback
        if instead is not None:
            return instead.read_ranges(self._full(key), starts, stops, etag)
        _, pool = self._client()
        return read_side_by_side(self, key, starts, stops, etag, self._policy, pool)

    def read_into(
        self, key: str, spans: Sequence[Span], outs: Sequence[Bytes], etag: str = ""
    ) -> None:
        """One GET each: all but the last by one concurrent call; the last one's answer then tells
        the ETag, after the others.
        """
        check_object_key(self.url(key), key)
        instead = self._after_fork() or self._fallback
        if instead is not None:
            return instead.read_into(self._full(key), spans, outs, etag)
        client = self._client()[0]
        url = self.url(key)
        try:
            before, (start, stop) = spans[:-1], spans[-1]
            bodies: list[Any] = []
            if before:
                bodies += obstore.get_ranges(
                    client,
                    key,
                    starts=[a for a, _ in before],
                    ends=[b for _, b in before],
                    coalesce=0,
                )
            answer = obstore.get(client, key, options={"range": (start, stop)})
            check_version(
                url,
                etag,
                version_like(etag, answer.meta.get("e_tag"), answer.meta["last_modified"]),
            )
            if before or stop - start <= STREAMED_READ:
                bodies.append(answer.bytes())
                fill(url, spans, [memoryview(body) for body in bodies], outs)
            else:
                _drain(url, start, stop, answer, outs[-1])
        except BaseException as error:
            if _ranges_refused(error) and self.scheme == "s3":
                self._fall_back(
                    "the server answers range requests with 200 instead of 206, which obstore refuses"
                )
                return self.read_into(key, spans, outs, etag)
            raise self._error(key, error) from None
        return None

    def _after_fork(self) -> FsspecStore | None:
        """What serves this process if it was forked after obstore had been used.

        Raises ConfigError where nothing can.
        """
        return self._fall_back(FORKED) if _lost.is_set() else None

    def _fall_back(self, reason: str) -> FsspecStore:
        """From now on ranges, and after a fork everything, are served by another transport."""
        with self._lock:
            if self._fallback is None:
                self._fallback = self._make_fallback()
                self._tell_once(reason)
            return self._fallback

    def _tell_once(self, reason: str) -> None:
        """Warn of a server, once."""
        told = endpoint_of(self.scheme, self.root, self._config.storage_options).told
        if reason in told:
            return
        told.add(reason)
        log.warning(
            "%s: %s; reading by %s, which is slower (transport='fsspec' does so at once)",
            self.url(""), reason, self.fallback_name,
        )  # fmt: skip

    def _make_fallback(self) -> FsspecStore:
        if self.scheme != "s3":
            raise ConfigError(
                f"{self.url('')}: obstore was used before this process was forked, and cannot be used after it; start workers by "
                f"multiprocessing_context='spawn' or 'forkserver', set transport='fsspec', or use StreamLoader, which needs none"
            )
        return FsspecStore(self.scheme, self._config)

    def _full(self, key: str) -> str:
        """A key as the other transport has it."""
        return f"{self.root}/{key}"

    def list(self, prefix: str, recursive: bool = True) -> list[ObjectInfo]:
        """Objects under a prefix, 1,000 a request; the prefix may end inside a name."""
        if (instead := self._after_fork()) is not None:
            listed = instead.list(self._full(prefix), recursive)
            return [
                replace(item, key=item.key.lstrip("/").removeprefix(self._full("")))
                for item in listed
            ]
        client, pool = self._client()
        folder = prefix.rpartition("/")[0]  # object stores list by whole path segments

        def pages_of() -> Any:
            try:
                if recursive:
                    return [item for page in obstore.list(client, folder or None) for item in page]
                return obstore.list_with_delimiter(client, folder or None)["objects"]
            except BaseException as error:
                raise self._error(prefix, error) from None

        pages = pool.call(lambda: self._policy.call(pages_of))
        found = [
            ObjectInfo(
                key=item["path"], size=int(item["size"]), etag=listed_etag(item.get("e_tag"))
            )
            for item in pages
            if item["path"].startswith(prefix)
        ]
        return sorted(self._as_stored(found) if recursive else found, key=lambda item: item.key)

    def _as_stored(self, listed: Sequence[ObjectInfo]) -> Sequence[ObjectInfo]:
        """Without what only looks like an object: obstore takes slashes off the ends of keys, those
        of folders' markers too.

        What is empty may be a marker, and what is there twice is one of both: these are asked for.
        """
        found = {item.key: item for item in listed}
        seen = Counter(item.key for item in listed)
        doubtful = [item.key for item in found.values() if not item.size or seen[item.key] > 1]
        for key, there in zip(
            doubtful, self._client()[1].map(self._info_or_none, doubtful), strict=True
        ):
            if there is None:
                del found[key]
            else:
                found[key] = there
        return [*found.values()]

    def _info_or_none(self, key: str) -> ObjectInfo | None:
        try:
            return self.info(key)
        except ObjectNotFoundError:
            return None

    def open_writer(self, key: str) -> ObjectWriter:
        """A multipart upload that is completed by `commit`, aborted by `abort`."""
        check_object_key(self.url(key), key)
        if (instead := self._after_fork()) is not None:
            return instead.open_writer(self._full(key))
        if not self._policy.has_answered:
            self._knock(key)
        _, pool = self._client()
        client = self._open(self._policy)  # parts of an upload are tried again by obstore itself
        wrap = lambda error: self._error(key, error)  # noqa: E731
        return ObstoreWriter(client, key, self.url(key), wrap, pool, self._config.upload_part_bytes)

    def _knock(self, key: str) -> None:
        """Raise if no server is there.

        A client that writes has one deadline for good, which is that of a server that answers.
        """
        try:
            self.info(key)
        except StorageError as error:
            if error.silent:
                raise

    def create(self, key: str, data: bytes) -> bool:
        """One PUT under the condition that nothing is there (If-None-Match, or what the cloud has
        for it).
        """
        check_object_key(self.url(key), key)
        if (instead := self._after_fork()) is not None:
            return instead.create(self._full(key), data)
        client, pool = self._client()

        def attempt() -> bool:
            try:
                obstore.put(client, key, data, mode="create", use_multipart=False)
            except obstore.exceptions.AlreadyExistsError:
                return False
            except BaseException as error:
                raise self._error(key, error) from None
            return True

        return pool.call(lambda: self._policy.call(attempt))

    def delete(self, key: str) -> None:
        """Delete an object if it is there."""
        check_object_key(self.url(key), key)
        if (instead := self._after_fork()) is not None:
            return instead.delete(self._full(key))
        client, pool = self._client()

        def attempt() -> None:
            try:
                obstore.delete(client, key)
            except FileNotFoundError:
                pass
            except BaseException as error:
                raise self._error(key, error) from None

        return pool.call(lambda: self._policy.call(attempt))

    def _client(self) -> tuple[Any, Pool]:
        _used.set()
        with self._lock:
            # a client does not survive a fork
            if self._opened is None or self._opened[0] != os.getpid():
                pool = Pool(min(32, self._config.max_requests))
                self._opened = (os.getpid(), self._open(TRY_ONCE), pool)
            return self._opened[1], self._opened[2]

    def _open(self, policy: RetryPolicy) -> Any:
        retry = _retry_config(policy)
        try:
            if self.scheme in ("s3", "oss"):
                return obstore.store.S3Store(self.root, retry_config=retry, **self._s3_arguments())
            url = f"{self.scheme}://{self.root}"
            if self.scheme in ("http", "https"):
                client_kwargs = self._config.storage_options.get("client_kwargs") or {}
                client: Any = client_options(self._config, url, client_kwargs)
                return obstore.store.HTTPStore.from_url(
                    url, client_options=client, retry_config=retry
                )
            from_url: Any = obstore.store.from_url  # its overloads differ by scheme
            return from_url(url, retry_config=retry, **cloud_arguments(self.scheme, self._config))
        except StreammegaError:
            raise
        except Exception as error:
            # of which a client that cannot be built says nothing
            limit = blame_limit_of_connection(error)
            if limit:
                raise EndpointError(f"{self.url('')}: {limit}") from None
            reason = redact(str(error).splitlines()[0], self._config.storage_options)
            raise ConfigError(f"{self.url('')}: storage_options do not fit: {reason}") from None

    def _s3_arguments(self) -> dict[str, Any]:
        return s3_arguments(self.root, self._config)

    def _error(self, key: str, error: BaseException) -> BaseException:
        """The streammega error for one of obstore's, first line only (the rest is a debug dump)."""
        if isinstance(error, StreammegaError) or not isinstance(error, Exception):
            return error
        lines = str(error).splitlines() or [type(error).__name__]
        text = redact(lines[0], self._config.storage_options)
        url = self.url(key)
        status = _STATUS.search(text)
        if status:
            return failure_of_status(
                url,
                int(status[1]),
                redact(str(error).partition("\n\nDebug source")[0], self._config.storage_options),
            )
        if isinstance(error, FileNotFoundError):
            return missing(url)
        if "invalid path" in text:
            return StorageError(
                f"{url}: obstore cannot list this; set transport='fsspec', or name the objects otherwise ({text})"
            )
        if isinstance(
            error,
            (obstore.exceptions.PermissionDeniedError, obstore.exceptions.UnauthenticatedError),
        ):
            return denied(url, text)
        network = any(sign in str(error) for sign in _NETWORK)
        limit = blame_limit_of_connection(error) if network else blame_limit(error)
        if limit:
            return EndpointError(f"{url}: {limit}")  # may be tried again: other connections end
        return no_answer(url, text) if network else StorageError(f"{url}: {text}")


def _retry_config(policy: RetryPolicy) -> Any:
    """A policy as obstore takes it."""
    return {
        "max_retries": MOST_RETRIES if policy.retries is None else policy.retries,
        "retry_timeout": timedelta(seconds=policy.deadline),
        "backoff": {
            "init_backoff": timedelta(seconds=FIRST_PAUSE),
            "max_backoff": timedelta(seconds=LONGEST_PAUSE),
            # a pause is drawn from the first one to so many times the last: by 2 they would hardly
            # grow
            "base": 4,
        },
    }


def _drain(url: str, start: int, stop: int, answer: Any, out: Bytes) -> None:
    """Copy a large body as it comes, so that it is never in memory twice."""
    filled = 0
    for chunk in answer.stream(min_chunk_size=1):
        part = np.frombuffer(chunk, np.uint8)
        if filled + len(part) <= len(out):
            out[filled : filled + len(part)] = part
        filled += len(part)
    if filled != len(out):
        raise wrong_length(url, start, stop, filled)


def _ranges_refused(error: BaseException) -> bool:
    """Whether obstore refused an answer because it was not a partial one."""
    return isinstance(error, Exception) and "non-partial response" in str(error)


class ObstoreWriter:
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
        self._parts: queue.Queue[bytes | None] = queue.Queue(maxsize=2)
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
                body = bytes(self._buffer)
                self._pool.call(
                    lambda: obstore.put(self._client, self._key, body, use_multipart=False)
                )
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
        if self._thread is not None and self._thread.is_alive():
            # then a part is there to be taken, whose taker looks whether it is wanted
            with contextlib.suppress(queue.Full):
                self._parts.put_nowait(None)
            self._thread.join(ABORT_WITHIN)

    def _send(self, part: bytes | None) -> None:
        if part is not None:
            self._count_part()
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._upload, name="streammega-upload", daemon=True
            )
            self._thread.start()
        while True:
            try:
                return self._parts.put(part, timeout=0.2)
            except queue.Full:
                if not self._thread.is_alive():
                    self._raise_failure()
                    raise StorageError(
                        f"{self._url}: the upload ended before all of its parts were sent"
                    ) from None

    def _count_part(self) -> None:
        self._sent += 1
        if self._sent > MOST_PARTS:
            most = MOST_PARTS * self._part_bytes
            raise StorageError(
                f"{self._url}: an upload holds {most >> 30} GiB ({MOST_PARTS:,} parts), and this object is larger; write "
                f"several shards, with --shard-size, or raise upload_part_bytes of StorageConfig from {self._part_bytes:,}"
            )

    def _upload(self) -> None:
        try:
            obstore.put(
                self._client,
                self._key,
                self._drain(),
                use_multipart=True,
                chunk_size=self._part_bytes,
                max_concurrency=3,
            )
        except BaseException as error:
            self._failure = error

    def _drain(self) -> Iterator[bytes]:
        while (part := self._parts.get()) is not None and not self._aborted.is_set():
            yield part
        if self._aborted.is_set():
            raise InterruptedError("upload aborted")

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._wrap(self._failure) from None
