"""Object stores through obstore (Rust): S3, GCS, Azure and plain HTTP."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple

import obstore.exceptions
import obstore.store

from streammega.config import StorageConfig
from streammega.errors import (
    AccessDeniedError,
    ConfigError,
    EndpointError,
    ObjectNotFoundError,
    StorageError,
    StreammegaError,
)
from streammega.storage import retry
from streammega.storage.backends.remote import MAX_PARTS, RemoteStore, note_client
from streammega.storage.backends.s3_options import client_options, cloud_arguments, s3_arguments
from streammega.storage.etags import check_version, version_like, version_of
from streammega.storage.fd_limit import explain_fd_limit_of_connection
from streammega.storage.http_errors import (
    CLOCK_DIFFERS,
    NO_RENEWAL,
    REFUSED,
    denied,
    failure_of_status,
    failure_without_status,
    missing,
    no_renewal,
    no_size,
    wrong_range,
)
from streammega.storage.retry import FIRST_PAUSE, MAX_PAUSE, TRY_ONCE, RetryPolicy
from streammega.storage.store import (
    Buffer,
    ObjectInfo,
    ObjectWriter,
    Span,
    check_key_length,
    check_length,
    check_object_key,
    listed_etag,
)

_STATUS = re.compile(r"status code: (\d{3})|redirect without LOCATION")
"""The status of an answer, in an error. obstore names none for a 301."""
_XML = re.compile(r"<(Code|Message)>([^<]+)")
"""What S3 says in the body of an answer."""
_NO_BYTE = (405, 416, 501)
"""Statuses of answers to a GET of one byte: there is none, or no such request."""
_DEBUG_DUMP = "\n\nDebug source"
"""Begins the part of obstore's messages that is not for users."""
_CAUSE = re.compile(
    r"""(?<=message:\ ")[^"\\]+ | (?<=error:\ ")[^"\\]+   # "Connection refused", "dns error"
      | InvalidContentType | InvalidCertificate\(\s*\w+     # of TLS""",
    re.X,
)
"""Why the network failed, in the debug dump. The message itself does not say it."""
_NETWORK = "HTTP error: "
"""Begins the part of a message about a request without an answer, for which obstore has no class."""
_RANGES_REFUSED = (
    "non-partial response",
    "Range request not supported",
    "CONTENT_RANGE header",
    "Content-Range header",
)
"""Texts of errors for answers to range requests that obstore does not accept."""
_DENIED = (obstore.exceptions.PermissionDeniedError, obstore.exceptions.UnauthenticatedError)
S3_SCHEMES = ("s3", "oss")
"""Schemes whose servers speak S3."""
_OTHER_RANGE = re.compile(r"Requested (\d+)\.\.(\d+), got (\d+)\.\.(\d+)")
_NO_SIZE = "Content-Length Header missing"
BACKOFF_BASE = 4
"""obstore draws a pause between the first one and so many times the last: with 2 they hardly grow."""
MAX_RETRIES = 1_000_000
"""More than fit any deadline. obstore counts tries too, and its pauses may be short."""

MAX_SECONDS = 1e8
"""Three years: obstore knows no endless time."""
LAST_RANGE_TIMEOUT = 3.0
"""Seconds for which the last of several ranges is retried after the others were answered."""
ABORT_TIMEOUT = 5.0
"""Seconds that an abort waits for the server. Lifecycle rules of the bucket remove parts that are left."""
MAX_WAITING_PARTS = 2
"""Parts that wait while others are sent: writing and sending overlap."""
MAX_CONCURRENT_PARTS = 3
"""Parts of one upload that are sent at once."""
POLL_SECONDS = 0.2
"""Seconds between two checks whether the thread that takes parts still lives."""


class _Runtime:
    """What this process may do with obstore, whose threads no fork copies: calls would never return."""

    is_used = False
    """Whether a client was opened, here or in a parent."""
    is_lost = False
    """Whether this process was forked from one that had used it."""


def obstore_is_lost() -> bool:
    """Whether this process was forked from one that had used obstore, and must never call it."""
    return _Runtime.is_lost


def _after_fork() -> None:
    _Runtime.is_lost = _Runtime.is_used


os.register_at_fork(after_in_child=_after_fork)


class ObstoreStore(RemoteStore):
    """One bucket, container or host, through obstore; in no process where `obstore_is_lost`."""

    def __init__(self, scheme: str, root: str, config: StorageConfig) -> None:
        super().__init__(scheme, root, config)
        self._bucket_seen = scheme in ("http", "https")  # they have none
        deadline = min(LAST_RANGE_TIMEOUT, self._policy.deadline)
        self._last_policy = replace(self._policy, deadline=deadline)

    @property
    def transport(self) -> str:
        """The client's name."""
        return "obstore"

    def _check_key(self, key: str) -> None:
        check_object_key(self.url(key), key)

    def info(self, key: str) -> ObjectInfo:
        """One HEAD request; a GET until an answer shows that the bucket exists.

        An answer to HEAD has no body. So it cannot say that the bucket is missing.
        """
        self._check_key(key)

        def head(client: Any) -> ObjectInfo:
            info = None if self._bucket_seen else self._info_by_get(client, key)
            if info is not None:
                return info
            try:
                return self._info_of(key, client.head(key))
            except Exception as error:
                if _answer_in(error).status in REFUSED:  # the answer to GET says why
                    self._info_by_get(client, key)
                raise

        return self._call(key, head)

    def get(self, key: str, max_bytes: int) -> tuple[ObjectInfo, Buffer]:
        """One GET request."""
        self._check_key(key)

        def attempt(client: Any) -> tuple[ObjectInfo, Buffer]:
            answer = client.get(key)
            info = self._info_of(key, answer.meta)
            if info.size > max_bytes:
                return info, memoryview(b"")
            body = memoryview(answer.bytes())
            return info, check_length(self.url(key), (0, info.size), body)

        return self._call(key, attempt)

    def read_start(self, key: str, size: int) -> tuple[ObjectInfo, Buffer]:
        """One GET request."""
        self._check_key(key)

        def attempt(client: Any) -> tuple[ObjectInfo, Buffer]:
            try:
                answer = client.get(key, options={"range": (0, size)})
            except Exception as error:
                if _answer_in(error).status in _NO_BYTE:  # an empty object has no first byte
                    return self._info_of(key, client.head(key)), memoryview(b"")
                raise
            info = self._info_of(key, answer.meta)
            body = memoryview(answer.bytes())
            return info, check_length(self.url(key), (0, min(size, info.size)), body)

        return self._policy.call(lambda: self._once(key, attempt))

    def _info_of(self, key: str, meta: Any) -> ObjectInfo:
        """The object that an answer describes: so the bucket exists."""
        self._bucket_seen = True
        modified = meta["last_modified"]
        return ObjectInfo(
            key=key,
            size=int(meta["size"]),
            etag=version_of(meta.get("e_tag"), modified),
            modified=modified.timestamp(),
        )

    def _info_by_get(self, client: Any, key: str) -> ObjectInfo | None:
        """As the answer to a GET of one byte says. None for empty objects and servers without ranges."""
        try:
            answer = client.get(key, options={"range": (0, 1)})
            answer.bytes()
        except Exception as error:
            answer = _answer_in(error)
            if answer.status in _NO_BYTE or any(sign in answer.text for sign in _RANGES_REFUSED):
                return None
            if answer.status == 404 and answer.code != "NoSuchBucket":
                self._bucket_seen = True
            raise
        return self._info_of(key, answer.meta)

    def _get(self, client: Any, key: str, spans: Sequence[Span], etag: str) -> Sequence[Any]:
        """All but the last by one call, whose requests are concurrent.

        The answer to the last one has the ETag. It is requested after the others, so it vouches for
        them. If it fails it is retried alone for a while, since the others would be lost with it.
        """
        *before, last = spans
        bodies: list[Any] = []
        if before:
            starts = [start for start, _ in before]
            stops = [stop for _, stop in before]
            # Without joining ranges that are near each other: the caller has planned them.
            bodies += client.get_ranges(key, starts=starts, ends=stops, coalesce=0)

        def get_last() -> Any:
            try:
                return client.get(key, options={"range": last})
            except BaseException as error:
                raise self._error(key, error) from None

        answer = self._last_policy.call(get_last) if before else get_last()
        version = version_like(etag, answer.meta.get("e_tag"), answer.meta["last_modified"])
        check_version(self.url(key), etag, version)
        bodies.append(answer.bytes())
        return bodies

    def list(self, prefix: str, recursive: bool = True) -> list[ObjectInfo]:
        """Objects under a prefix, 1,000 a request. The prefix may end inside a name."""
        check_key_length(self.url(prefix), prefix)
        # obstore lists by whole path segments. Other objects are left out below.
        folder = prefix.rpartition("/")[0] or None

        def list_folder(client: Any) -> Any:
            if not recursive:
                return client.list_with_delimiter(folder)["objects"]
            listed: list[Any] = []
            after = None
            while True:
                entries = chain.from_iterable(client.list(folder, offset=after))
                more = list(self._refuse_repetition(entries, itemgetter("path")))
                if after is not None:  # some servers ignore it
                    more = [entry for entry in more if entry["path"] > after]
                listed += more
                # Pages hold 100 or 1,000 objects. obstore takes any answer that is no listing for the
                # end. After a full page, the server is asked whether more follows.
                if not more or len(listed) % 100 or self.scheme not in S3_SCHEMES:
                    return listed
                after = max(entry["path"] for entry in listed)

        infos = _listed_infos(self._call(prefix, list_folder))
        listed = [info for info in infos if info.key.startswith(prefix)]
        stored = self._without_markers(listed) if recursive else listed
        return sorted(stored, key=lambda info: info.key)

    def _without_markers(self, listed: Sequence[ObjectInfo]) -> Sequence[ObjectInfo]:
        """Without markers of folders.

        obstore removes slashes at the ends of keys, also from markers of folders. So an empty object
        may be a marker, and of two with one key one is. These are looked up.
        """
        objects = {info.key: info for info in listed}
        times_listed = Counter(info.key for info in listed)
        doubtful = []
        for info in objects.values():
            if info.size == 0 or times_listed[info.key] > 1:
                doubtful.append(info.key)

        def look_up(key: str) -> None:
            try:
                objects[key] = self.info(key)
            except ObjectNotFoundError:
                del objects[key]

        self._pool().map(look_up, doubtful)
        return list(objects.values())

    def open_writer(self, key: str) -> ObjectWriter:
        """A multipart upload that is completed by `commit`, aborted by `abort`."""
        self._check_key(key)
        # Settings that cannot work are refused before anything is written.
        self._policy.call(self._client, is_answer=False)
        return ObstoreWriter(self, key)

    def open_upload_client(self, key: str) -> Any:
        """A client of its own for an upload: its parts are tried again by obstore itself."""
        if not self._policy.has_answered:
            # It keeps one deadline: that of a server that has answered.
            try:
                self.info(key)
            except StorageError as error:
                if error.silent:
                    raise
        return self._policy.call(
            lambda: note_client(self._open_client(self._policy)), is_answer=False
        )

    def await_answer(self, key: str) -> None:
        """Return when the server answers at all. Warns and raises as all requests do."""
        try:
            self.read(key, [(0, 1)])
        except StorageError as error:
            if error.transient:
                raise

    def put(
        self, key: str, data: bytes | memoryview, *, if_absent: bool = False, if_match: str = ""
    ) -> bool:
        """The conditions are If-None-Match and If-Match, or what the cloud has in their place."""
        if not if_absent and not if_match:
            return super().put(key, data)
        self._check_key(key)
        condition = "create" if if_absent else {"e_tag": if_match}

        def attempt(client: Any) -> bool:
            refused: Any = obstore.exceptions.AlreadyExistsError
            if if_match:
                refused = (obstore.exceptions.PreconditionError, FileNotFoundError)
            try:
                client.put(key, bytes(data), mode=condition, use_multipart=False)
            except refused:
                return False
            return True

        return self._call(key, attempt)

    def delete(self, key: str) -> None:
        """Delete an object if it is there."""
        self._check_key(key)

        def attempt(client: Any) -> None:
            with contextlib.suppress(FileNotFoundError):
                client.delete(key)

        self._call(key, attempt)

    def _open(self) -> Any:
        return self._open_client(TRY_ONCE)

    def _open_client(self, policy: RetryPolicy) -> Any:
        assert not obstore_is_lost()
        _Runtime.is_used = True
        retry_config: Any = _retry_config(policy)
        stores: Any = obstore.store
        try:
            if self.scheme in S3_SCHEMES:
                return stores.S3Store(self.root, retry_config=retry_config, **self._s3_arguments())
            url = f"{self.scheme}://{self.root}"
            if self.scheme in ("http", "https"):
                client_kwargs = self._config.storage_options.get("client_kwargs") or {}
                client: Any = client_options(self._config, url, client_kwargs)
                return stores.HTTPStore.from_url(
                    url, client_options=client, retry_config=retry_config
                )
            return stores.from_url(
                url, retry_config=retry_config, **cloud_arguments(self.scheme, self._config)
            )
        except StreammegaError:
            raise
        except Exception as error:
            # The error does not mention the limit of open files.
            limit = explain_fd_limit_of_connection(error)
            if limit:
                raise EndpointError(f"{self.url('')}: {limit}") from None
            reason = str(error).splitlines()[0]
            raise ConfigError(f"{self.url('')}: storage_options do not fit: {reason}") from None

    def _s3_arguments(self) -> dict[str, Any]:
        return s3_arguments(self.root, self._config)

    def _error(self, key: str, error: BaseException) -> BaseException:
        """Our error for one of obstore's, with its first line (the rest is a debug dump)."""
        if isinstance(error, StreammegaError) or not isinstance(error, Exception):
            return error
        url = self.url(key)
        status, code, text = _answer_in(error)
        if any(sign in text for sign in _RANGES_REFUSED):
            return StorageError(
                f"{url}: the server answers range requests with 200 in place of 206, or with no sound "
                f"Content-Range, which obstore refuses; set transport='fsspec', which takes such answers "
                f"where they name the bytes ({text})"
            )
        if NO_RENEWAL in text:
            return no_renewal(text)
        if status:
            return failure_of_status(url, status, code, text)
        if isinstance(error, FileNotFoundError):
            return missing(url)
        if isinstance(error, obstore.exceptions.InvalidPathError):
            return StorageError(
                f"{url}: obstore cannot list this; set transport='fsspec', or name the objects "
                f"otherwise ({text})"
            )
        if isinstance(error, _DENIED):
            return denied(url, text)
        other_range = _OTHER_RANGE.search(text)
        if other_range:
            start, stop, first, end = map(int, other_range.groups())
            return wrong_range(url, (start, stop), f"bytes [{first}, {end})")
        if _NO_SIZE in text:
            return no_size(url)
        of_network = _NETWORK in text
        if of_network and (causes := _CAUSE.findall(str(error))):
            text += f": {causes[-1]}"
        return failure_without_status(url, error, text, of_network=of_network)


class Answer(NamedTuple):
    """What an error tells of an answer. code: S3's. text: all of it in one line."""

    status: int
    code: str
    text: str


def _answer_in(error: Exception) -> Answer:
    """The answer in one of obstore's errors; 0 and "" where there was none."""
    message = str(error).partition(_DEBUG_DUMP)[0] or type(error).__name__
    text = message.splitlines()[0]
    status = _STATUS.search(text)
    fields = dict(_XML.findall(message))  # it may be in later lines
    if fields:
        text = "; ".join([text.partition("<")[0].rstrip(": "), *fields.values()])
    return Answer(int(status[1] or 301) if status else 0, fields.get("Code", ""), text)


def _listed_infos(page: Sequence[Any]) -> list[ObjectInfo]:
    """The entries of one of obstore's listings."""
    return [
        ObjectInfo(
            key=item["path"],
            size=item["size"],
            etag=listed_etag(item["e_tag"]),
            modified=item["last_modified"].timestamp(),
        )
        for item in page
    ]


def _retry_config(policy: RetryPolicy) -> Any:
    """A policy in the form of obstore."""
    return {
        "max_retries": MAX_RETRIES if policy.retries is None else policy.retries,
        "retry_timeout": timedelta(seconds=min(policy.deadline, MAX_SECONDS)),
        "backoff": {
            "init_backoff": timedelta(seconds=FIRST_PAUSE),
            "max_backoff": timedelta(seconds=MAX_PAUSE),
            "base": BACKOFF_BASE,
        },
    }


class ObstoreWriter(ObjectWriter):
    """Sends parts from a thread. Small objects are one PUT."""

    def __init__(self, store: ObstoreStore, key: str) -> None:
        self._store = store
        self._key = key
        self._part_bytes = store._config.tuning.multipart_part_bytes
        self._buffer = bytearray()
        self._sent = 0
        self._parts: queue.Queue[bytes | None] = queue.Queue(maxsize=MAX_WAITING_PARTS)
        self._aborted = threading.Event()
        self._taken_at = 0.0
        """When obstore took a part, or the server was seen to answer."""
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
        key = self._key
        if self._thread is None:
            data = bytes(self._buffer)
            self._store._call(key, lambda client: client.put(key, data, use_multipart=False))
            return
        if self._buffer:
            self._send(bytes(self._buffer))
        self._send(None)
        while self._thread.is_alive():
            self._thread.join(POLL_SECONDS)
            self._look()
        self._raise_failure()

    def abort(self) -> None:
        """Abort the upload. Its parts are removed from the server, if that answers."""
        self._buffer.clear()
        self._aborted.set()
        thread = self._thread
        if thread is not None and thread.is_alive():
            # If the queue is full, the thread takes a part and then sees that it was aborted.
            with contextlib.suppress(queue.Full):
                self._parts.put_nowait(None)
            thread.join(ABORT_TIMEOUT)

    def _send(self, part: bytes | None) -> None:
        """Give a part to the thread that uploads; None: that was the last one."""
        if part is not None:
            self._sent += 1
            if self._sent > MAX_PARTS:
                most_gib = MAX_PARTS * self._part_bytes >> 30
                raise StorageError(
                    f"{self._store.url(self._key)}: an upload holds {most_gib} GiB ({MAX_PARTS:,} parts), and this "
                    f"object is larger; write several shards, with --shard-size"
                )
        if self._thread is None:
            client = self._store.open_upload_client(self._key)
            self._taken_at = time.monotonic()
            self._thread = threading.Thread(
                target=self._upload, args=(client,), name="streammega-upload", daemon=True
            )
            self._thread.start()
        while True:
            try:
                self._parts.put(part, timeout=POLL_SECONDS)
                return
            except queue.Full:
                if self._thread.is_alive():
                    self._look()
                    continue
            self._raise_failure()
            raise StorageError(
                f"{self._store.url(self._key)}: the upload ended before all of its parts were sent"
            )

    def _look(self) -> None:
        """Where the upload has not gone on for a while, see why: obstore says nothing of its retries."""
        if time.monotonic() - self._taken_at >= retry.WARN_AFTER_S:
            self._store.await_answer(self._key)
            self._taken_at = time.monotonic()

    def _upload(self, client: Any) -> None:
        try:
            client.put(
                self._key,
                self._taken_parts(),
                use_multipart=True,
                chunk_size=self._part_bytes,
                max_concurrency=MAX_CONCURRENT_PARTS,
            )
        except BaseException as error:
            self._failure = error

    def _taken_parts(self) -> Iterator[bytes]:
        while True:
            part = self._parts.get()
            # An error makes obstore remove the parts that it has sent.
            if self._aborted.is_set():
                raise InterruptedError("upload aborted")
            if part is None:
                return
            self._taken_at = time.monotonic()
            yield part

    def _raise_failure(self) -> None:
        if self._failure is not None:
            error: Any = self._store._error(self._key, self._failure)
            has_expired = isinstance(error, AccessDeniedError) and error.has_expired
            error.upload_refused = CLOCK_DIFFERS in str(error) or (
                has_expired and self._store._renewal() is not None
            )
            raise error from None
