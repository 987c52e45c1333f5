"""Object stores through obstore (Rust): S3, GCS, Azure and plain HTTP."""

from __future__ import annotations

import logging
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any
from urllib.parse import quote

import numpy as np

from streammega.config import StorageConfig
from streammega.errors import (
    ConfigError,
    EndpointError,
    ObjectNotFoundError,
    StorageError,
    StreammegaError,
)
from streammega.errors.redaction import redact, redaction_of
from streammega.storage.backends import obstore_after_fork
from streammega.storage.backends.fsspec import FsspecStore
from streammega.storage.backends.ranges import read_side_by_side, wrong_range
from streammega.storage.backends.s3_options import client_options, cloud_arguments, s3_arguments
from streammega.storage.backends.s3_writer import ObstoreWriter
from streammega.storage.endpoints import endpoint_of
from streammega.storage.etags import check_version, version_like, version_of
from streammega.storage.fd_limit import blame_limit, blame_limit_of_connection
from streammega.storage.fork_lock import process_lock
from streammega.storage.http_errors import denied, failure_of_status, missing, no_answer, no_size
from streammega.storage.retry import FIRST_PAUSE, LONGEST_PAUSE, TRY_ONCE, RetryPolicy
from streammega.storage.store import (
    Buffer,
    Bytes,
    NotListedBetween,
    ObjectInfo,
    ObjectWriter,
    Part,
    Span,
    check_object_key,
    checked,
    fill,
    listed_etag,
    wrong_length,
)
from streammega.storage.thread_pool import Pool, parallel_map

log = logging.getLogger(__name__)

_STATUS = re.compile(r"status code: (\d{3})")
_DEBUG_DUMP = "\n\nDebug source"
"""What follows the message in the text of obstore's errors, and says nothing to a user."""
_NETWORK = (
    "error sending request",
    "timed out",
    "error decoding response body",
    "request or response body error",
    "connection",
    "operation timed out",
    "- HTTP error",
)
"""In the texts of errors without an answer: obstore has no class for them."""
_RANGES_REFUSED = (
    "non-partial response",
    "Range request not supported",
    "CONTENT_RANGE header",
    "Content-Range header",
)
"""In the texts of errors for answers to range requests that the other transport may understand."""
_OTHER_RANGE = re.compile(r"Requested (\d+)\.\.(\d+), got (\d+)\.\.(\d+)")
_NO_SIZE = "Content-Length Header missing"
STREAMED_READ = 2 << 20
"""Bodies above this size are copied as they come, so that they are never in memory twice."""
PARTS_TOGETHER = 16
"""Small objects that a thread reads one after the other before it looks for more."""
PAGE = 1000
"""Objects of a listing that are handed to Python at once: those of one answer. Of fewer, each hand-over
would wait for the threads that take in other listings.
"""
MOST_THREADS = 32
"""Requests that one store has under way beside the fetcher's: of listings, opening and tools."""
BACKOFF_BASE = 4
"""A pause is drawn from the first one to so many times the last: by 2 they would hardly grow."""
MOST_RETRIES = 1_000_000
"""More than any deadline has room for: obstore counts tries too, and its pauses may be short."""
FORKED = (
    "this process was forked after obstore had been used, which obstore does not survive, and it "
    "cannot load a copy of obstore"
)


class ObstoreStore:
    """One bucket, container or host.

    Implements `storage.store.Store`; opens its client lazily, per process. A forked process uses a
    copy of obstore of its own. One that can load none, forked after obstore had been used, is
    served by another transport, where there is one: by one client for all calls, and with one
    warning.
    """

    def __init__(self, scheme: str, root: str, config: StorageConfig) -> None:
        self.scheme = scheme
        self.root = root
        self._config = config
        self._lock = process_lock()  # of what is opened at the first use: once for all threads
        self._opened: tuple[int, Any, Pool] | None = None  # (process, client, threads)
        self._policy = RetryPolicy.of(config, endpoint_of(scheme, root, config.storage_options))
        self._urls: dict[str, str] = {}  # kept, for each request asks for its own
        self._redacted = redaction_of(config.storage_options)
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
            whole = f"{self.scheme}://{self.root}/{key}"
            self._urls[key] = self._redacted(whole)
        return self._urls[key]

    def info(self, key: str) -> ObjectInfo:
        """One HEAD request."""
        check_object_key(self.url(key), key)
        instead = self._after_fork()
        if instead is not None:
            return replace(instead.info(self._full(key)), key=key)
        client, pool = self._client()

        def head() -> ObjectInfo:
            """One request, in this store's errors."""
            try:
                meta = client.head(key)
            except BaseException as error:
                if isinstance(error, FileNotFoundError):
                    self._look_for_bucket(client, key)
                raise self._error(key, error) from None
            # Whatever is missing later, it is not the bucket.
            self._bucket_seen = True
            etag = version_of(meta.get("e_tag"), meta["last_modified"])
            return ObjectInfo(key=key, size=int(meta["size"]), etag=etag)

        return pool.call(lambda: self._policy.call(head))

    def _look_for_bucket(self, client: Any, key: str) -> None:
        """Once: raise if it is the bucket that does not exist.

        The answer to a HEAD has no body that could say so.
        """
        if self._bucket_seen:
            return
        try:
            client.get_range(key, start=0, end=1)
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
        """One GET each, all but the last by one concurrent call.

        The last one's answer tells the ETag: after the others, so that it is not older than they.
        """
        check_object_key(self.url(key), key)
        instead = self._after_fork() or self._fallback
        if instead is not None:
            return instead.read_into(self._full(key), spans, outs, etag)
        client, _ = self._client()
        try:
            if len(spans) == 1 and len(outs[0]) > STREAMED_READ:
                self._stream_once(client, key, spans[0], outs[0], etag)
            else:
                bodies = self._read_once(client, key, spans, etag)
                fill(self.url(key), spans, bodies, outs)
        except BaseException as error:
            self._fall_back_from_ranges(key, error)
            return self.read_into(key, spans, outs, etag)
        return None

    def read_bodies(self, key: str, spans: Sequence[Span], etag: str = "") -> list[Bytes]:
        """One GET each, as `read_into` sends them; their bodies are not copied."""
        check_object_key(self.url(key), key)
        instead = self._after_fork() or self._fallback
        if instead is not None:
            outs = [np.empty(stop - start, np.uint8) for start, stop in spans]
            instead.read_into(self._full(key), spans, outs, etag)
            return outs
        client, _ = self._client()
        url = self.url(key)
        try:
            bodies = self._read_once(client, key, spans, etag)
            return [
                np.frombuffer(checked(url, start, stop, body), np.uint8)
                for (start, stop), body in zip(spans, bodies, strict=True)
            ]
        except BaseException as error:
            self._fall_back_from_ranges(key, error)
            return self.read_bodies(key, spans, etag)

    def read_parts(self, parts: Sequence[Part], at_once: int) -> list[Buffer]:
        """One GET each, as `store.ReadsParts` says."""
        instead = self._after_fork() or self._fallback
        if instead is not None:

            def read_instead(part: Part) -> Buffer:
                info, start, stop = part
                return instead.read_ranges(self._full(info.key), [start], [stop], info.etag)[0]

            return parallel_map(read_instead, parts, at_once)
        client, _ = self._client()

        def read_some(some: Sequence[Part]) -> list[Buffer]:
            return [self._policy.call(partial(self._read_part, client, part)) for part in some]

        # Several to a thread at a time: handing one over costs as much as a small answer does.
        few = max(1, min(PARTS_TOGETHER, len(parts) // (4 * at_once)))
        groups = [parts[first : first + few] for first in range(0, len(parts), few)]
        return [body for bodies in parallel_map(read_some, groups, at_once) for body in bodies]

    def _read_part(self, client: Any, part: Part) -> Buffer:
        """Part of an object, by one try."""
        info, start, stop = part
        key = info.key
        if start == stop:
            return memoryview(b"")  # there is no range request for no bytes
        try:
            answer = self._get(client, key, start, stop, info.etag)
            body = memoryview(answer.bytes())
        except BaseException as error:
            self._fall_back_from_ranges(key, error)
            return self.read_parts([part], at_once=1)[0]
        if len(body) != stop - start:
            raise wrong_length(self.url(key), start, stop, len(body))
        return body

    def _fall_back_from_ranges(self, key: str, error: BaseException) -> None:
        """Have another transport read, if obstore refused how the server answers ranges; raises
        every other error.
        """
        text = str(error).partition(_DEBUG_DUMP)[0]
        is_refused = any(sign in text for sign in _RANGES_REFUSED)
        if not is_refused or self.scheme not in ("s3", "http", "https"):
            raise self._error(key, error) from None
        self._fall_back(
            "the server answers range requests with 200 instead of 206, or with a Content-Range "
            "without a size, which obstore refuses"
        )

    def _read_once(
        self, client: Any, key: str, spans: Sequence[Span], etag: str
    ) -> list[memoryview]:
        """Bodies of whatever length, of the version that is wanted."""
        *before, (start, stop) = spans
        bodies: list[Any] = []
        if before:
            starts = [span_start for span_start, _ in before]
            ends = [span_stop for _, span_stop in before]
            # Not joined where they are near each other: what they are to be was planned.
            bodies += client.get_ranges(key, starts=starts, ends=ends, coalesce=0)
        answer = self._get(client, key, start, stop, etag)
        bodies.append(answer.bytes())
        return [memoryview(body) for body in bodies]

    def _stream_once(self, client: Any, key: str, span: Span, out: Bytes, etag: str) -> None:
        start, stop = span
        answer = self._get(client, key, start, stop, etag)
        _drain(self.url(key), start, stop, answer, out)

    def _get(self, client: Any, key: str, start: int, stop: int, etag: str) -> Any:
        """An answer of the version that is wanted, its body still to come."""
        answer = client.get(key, options={"range": (start, stop)})
        version = version_like(etag, answer.meta.get("e_tag"), answer.meta["last_modified"])
        check_version(self.url(key), etag, version)
        return answer

    def _after_fork(self) -> FsspecStore | None:
        """What serves this process if it was forked, and has no obstore of its own.

        Raises ConfigError where nothing can.
        """
        if obstore_after_fork.library() is not None:
            return None
        if self.scheme not in ("s3", "oss"):
            raise ConfigError(
                f"{self.url('')}: obstore was used before this process was forked, and cannot be "
                f"used after it; start workers by multiprocessing_context='spawn' or 'forkserver', "
                f"set transport='fsspec', or use StreamLoader, which needs none"
            )
        return self._fall_back(FORKED)

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
            "%s: %s; reading by transport='fsspec', which is slower (set it to begin so)",
            self.url(""), reason,
        )  # fmt: skip

    def _make_fallback(self) -> FsspecStore:
        return FsspecStore(self.scheme, self._config)

    def _full(self, key: str) -> str:
        """A key as the other transport has it."""
        if self.scheme in ("http", "https"):
            return f"{self.scheme}://{self.root}/{quote(key)}"
        return f"{self.root}/{key}"

    def list_between(self, after: str, until: str, most: int) -> list[ObjectInfo] | None:
        """By listings that begin after a key, which S3 knows; see `store.ListsBetween`."""
        if self.scheme not in ("s3", "oss") or self._after_fork() is not None:
            return None
        client, pool = self._client()
        # Of keys in different folders, what these have in common; of one folder, that.
        folders = [os.path.dirname(f"/{key}") for key in (after, until)]
        folder = os.path.commonpath(folders)[1:] or None

        def list_part() -> list[ObjectInfo] | None:
            """One listing between two keys; None where what it has does not serve."""
            listed: list[ObjectInfo] = []
            try:
                for page in client.list(folder, offset=after, chunk_size=PAGE):
                    listed += [info for info in _listed_infos(page) if info.key < until]
                    if len(listed) > most:
                        return None
                    if page and page[-1]["path"] >= until:
                        break
            except BaseException as error:
                raise self._error(after, error) from None
            return listed if _are_objects(listed, after) else None

        try:
            found = pool.call(lambda: self._policy.call(list_part))
        except StorageError as error:
            if error.transient:
                raise
            return None
        if found is None:
            raise NotListedBetween(f"{self.url(after)}: what follows is not told by a part of it")
        return found

    def list(self, prefix: str, recursive: bool = True) -> list[ObjectInfo]:
        """Objects under a prefix, 1,000 a request; the prefix may end inside a name."""
        instead = self._after_fork()
        if instead is not None:
            listed = instead.list(self._full(prefix), recursive)
            return [
                replace(item, key=item.key.lstrip("/").removeprefix(self._full("")))
                for item in listed
            ]
        client, pool = self._client()
        # Object stores list by whole path segments: more than asked for, which is left out below.
        folder = prefix.rpartition("/")[0] or None

        def list_folder() -> Any:
            """One listing, page by page or of the folder alone."""
            try:
                if not recursive:
                    return client.list_with_delimiter(folder)["objects"]
                objects: list[Any] = []
                for page in client.list(folder):
                    objects += page
                return objects
            except BaseException as error:
                raise self._error(prefix, error) from None

        infos = _listed_infos(pool.call(lambda: self._policy.call(list_folder)))
        listed = [info for info in infos if info.key.startswith(prefix)]
        stored = self._as_stored(listed) if recursive else listed
        return sorted(stored, key=lambda info: info.key)

    def _as_stored(self, listed: Sequence[ObjectInfo]) -> Sequence[ObjectInfo]:
        """Without what only looks like an object.

        obstore takes slashes off the ends of keys, those of folders' markers too. What is empty may
        be a marker, and what is there twice is one of both: these are asked for.
        """
        objects = {info.key: info for info in listed}
        times_listed = Counter(info.key for info in listed)
        doubtful = []
        for info in objects.values():
            if info.size == 0 or times_listed[info.key] > 1:
                doubtful.append(info.key)
        _, pool = self._client()
        stored = pool.map(self._info_or_none, doubtful)
        for key, info_or_none in zip(doubtful, stored, strict=True):
            if info_or_none is None:
                del objects[key]
            else:
                objects[key] = info_or_none
        return list(objects.values())

    def _info_or_none(self, key: str) -> ObjectInfo | None:
        try:
            return self.info(key)
        except ObjectNotFoundError:
            return None

    def open_writer(self, key: str) -> ObjectWriter:
        """A multipart upload that is completed by `commit`, aborted by `abort`."""
        check_object_key(self.url(key), key)
        instead = self._after_fork()
        if instead is not None:
            return instead.open_writer(self._full(key))
        if not self._policy.has_answered:
            self._knock(key)
        _, pool = self._client()
        # A client of its own: parts of an upload are tried again by obstore itself.
        client = obstore_after_fork.opened(self._open(self._policy))

        def wrap(error: BaseException) -> BaseException:
            return self._error(key, error)

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
        """One PUT under the condition that nothing is there.

        By If-None-Match, or what the cloud has for it.
        """
        check_object_key(self.url(key), key)
        instead = self._after_fork()
        if instead is not None:
            return instead.create(self._full(key), data)
        return self._put_if(key, data, "create", _exceptions().AlreadyExistsError)

    def replace(self, key: str, data: bytes, etag: str) -> bool:
        """One PUT under the condition that the object has this ETag: by If-Match, or what the cloud
        has for it. Raises StorageError in a forked process, whose transport has no such.
        """
        check_object_key(self.url(key), key)
        if self._after_fork() is not None:
            raise StorageError(f"{self.url(key)}: not replaced on a condition after a fork")
        wrong_version = (_exceptions().PreconditionError, FileNotFoundError)
        return self._put_if(key, data, {"e_tag": etag}, wrong_version)

    def _put_if(self, key: str, data: bytes, condition: Any, refusals: Any) -> bool:
        """One PUT; False for an error that says that the condition does not hold."""
        client, pool = self._client()

        def attempt() -> bool:
            try:
                client.put(key, data, mode=condition, use_multipart=False)
            except refusals:
                return False
            except BaseException as error:
                raise self._error(key, error) from None
            return True

        return pool.call(lambda: self._policy.call(attempt))

    def delete(self, key: str) -> None:
        """Delete an object if it is there."""
        check_object_key(self.url(key), key)
        instead = self._after_fork()
        if instead is not None:
            return instead.delete(self._full(key))
        client, pool = self._client()

        def attempt() -> None:
            try:
                client.delete(key)
            except FileNotFoundError:
                pass
            except BaseException as error:
                raise self._error(key, error) from None

        return pool.call(lambda: self._policy.call(attempt))

    def _client(self) -> tuple[Any, Pool]:
        this_process = os.getpid()
        with self._lock:
            if self._opened is not None:
                process, client, pool = self._opened
                # Neither a client nor its threads survive a fork.
                if process == this_process:
                    return client, pool
            client = obstore_after_fork.opened(self._open(TRY_ONCE))
            pool = Pool(min(MOST_THREADS, self._config.max_requests))
            self._opened = (this_process, client, pool)
            return client, pool

    def _open(self, policy: RetryPolicy) -> Any:
        retry = _retry_config(policy)
        stores = obstore_after_fork.library().store
        try:
            if self.scheme in ("s3", "oss"):
                return stores.S3Store(self.root, retry_config=retry, **self._s3_arguments())
            url = f"{self.scheme}://{self.root}"
            if self.scheme in ("http", "https"):
                client_kwargs = self._config.storage_options.get("client_kwargs") or {}
                client: Any = client_options(self._config, url, client_kwargs)
                return stores.HTTPStore.from_url(url, client_options=client, retry_config=retry)
            return stores.from_url(
                url, retry_config=retry, **cloud_arguments(self.scheme, self._config)
            )
        except StreammegaError:
            raise
        except Exception as error:
            # A client that cannot be built says nothing of the limit of open files.
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
        whole = str(error)
        lines = whole.splitlines() or [type(error).__name__]
        text = redact(lines[0], self._config.storage_options)
        url = self.url(key)
        status = _STATUS.search(text)
        if status:
            # With all that the server said: codes that decide may stand in later lines.
            said = redact(whole.partition(_DEBUG_DUMP)[0], self._config.storage_options)
            return failure_of_status(url, int(status[1]), said)
        if isinstance(error, FileNotFoundError):
            return missing(url)
        if "invalid path" in text:
            return StorageError(
                f"{url}: obstore cannot list this; set transport='fsspec', or name the objects "
                f"otherwise ({text})"
            )
        if isinstance(error, _refusals()):
            return denied(url, text)
        other_range = _OTHER_RANGE.search(text)
        if other_range:
            start, stop, first, end = map(int, other_range.groups())
            return wrong_range(url, (start, stop), f"bytes [{first}, {end})")
        if _NO_SIZE in text:
            return no_size(url)
        network = any(sign in whole for sign in _NETWORK)
        limit = blame_limit_of_connection(error) if network else blame_limit(error)
        if limit:
            return EndpointError(f"{url}: {limit}")  # may be tried again: other connections end
        if network:
            return no_answer(url, text)
        return StorageError(f"{url}: {text}")


def _listed_infos(page: Sequence[Any]) -> list[ObjectInfo]:
    """The entries of one of obstore's listings."""
    return [
        ObjectInfo(key=item["path"], size=item["size"], etag=listed_etag(item["e_tag"]))
        for item in page
    ]


def _are_objects(listed: Sequence[ObjectInfo], after: str) -> bool:
    """Whether a listing is of objects alone, and begins after a key: see `_as_stored`, and some
    servers do not know where to begin.
    """
    if not listed:
        return True
    keys = {info.key for info in listed}
    least_size = min([info.size for info in listed])
    return len(keys) == len(listed) and least_size > 0 and min(keys) > after


def _exceptions() -> Any:
    """Those that the clients of this process raise: another process's are other classes."""
    return obstore_after_fork.library().exceptions


def _refusals() -> tuple[type[Exception], ...]:
    exceptions = _exceptions()
    return (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError)


def _retry_config(policy: RetryPolicy) -> Any:
    """A policy as obstore takes it."""
    return {
        "max_retries": MOST_RETRIES if policy.retries is None else policy.retries,
        "retry_timeout": timedelta(seconds=policy.deadline),
        "backoff": {
            "init_backoff": timedelta(seconds=FIRST_PAUSE),
            "max_backoff": timedelta(seconds=LONGEST_PAUSE),
            "base": BACKOFF_BASE,
        },
    }


def _drain(url: str, start: int, stop: int, answer: Any, out: Bytes) -> None:
    """Copy a large body as it comes, so that it is never in memory twice."""
    filled = 0
    for chunk in answer.stream(min_chunk_size=1):
        part = np.frombuffer(chunk, np.uint8)
        end = filled + len(part)
        # A body that is too long is counted to its end, for the error, and not kept.
        if end <= len(out):
            out[filled:end] = part
        filled = end
    if filled != len(out):
        raise wrong_length(url, start, stop, filled)
