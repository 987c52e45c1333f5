"""Object stores through obstore (Rust): S3, GCS, Azure and plain HTTP."""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

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
from streammega.storage.backends.fallback import RangesRefused
from streammega.storage.backends.obstore_writer import ObstoreWriter
from streammega.storage.backends.remote import RemoteStore
from streammega.storage.backends.s3_options import client_options, cloud_arguments, s3_arguments
from streammega.storage.etags import check_version, version_like, version_of
from streammega.storage.fd_limit import blame_limit, blame_limit_of_connection
from streammega.storage.http_errors import (
    denied,
    failure_of_status,
    missing,
    no_answer,
    no_size,
    wrong_range,
)
from streammega.storage.retry import FIRST_PAUSE, LONGEST_PAUSE, TRY_ONCE, RetryPolicy
from streammega.storage.store import (
    NotListedBetween,
    ObjectInfo,
    ObjectWriter,
    Span,
    check_object_key,
    listed_etag,
)

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
_FALLBACK_SCHEMES = ("s3", "http", "https")
_OTHER_RANGE = re.compile(r"Requested (\d+)\.\.(\d+), got (\d+)\.\.(\d+)")
_NO_SIZE = "Content-Length Header missing"
PAGE = 1000
"""Objects of a listing that are handed to Python at once: those of one answer. Of fewer, each hand-over
would wait for the threads that take in other listings.
"""
BACKOFF_BASE = 4
"""A pause is drawn from the first one to so many times the last: by 2 they would hardly grow."""
MOST_RETRIES = 1_000_000
"""More than any deadline has room for: obstore counts tries too, and its pauses may be short."""


class ObstoreStore(RemoteStore):
    """One bucket, container or host, through obstore.

    A forked process uses a copy of obstore of its own, and can use none where that cannot be
    loaded: see `FallbackStore`.
    """

    def __init__(self, scheme: str, root: str, config: StorageConfig) -> None:
        super().__init__(scheme, root, config)
        self._urls: dict[str, str] = {}  # kept, for each request asks for its own
        self._redacted = redaction_of(config.storage_options)
        self._bucket_seen = False

    @property
    def can_list_between(self) -> bool:
        """S3 knows listings that begin after a key."""
        return self.scheme in ("s3", "oss")

    def url(self, key: str) -> str:
        """The full URL of a key, without credentials."""
        if key not in self._urls:
            whole = f"{self.scheme}://{self.root}/{key}"
            self._urls[key] = self._redacted(whole)
        return self._urls[key]

    def _check_key(self, key: str) -> None:
        check_object_key(self.url(key), key)

    def info(self, key: str) -> ObjectInfo:
        """One HEAD request."""
        self._check_key(key)

        def head(client: Any) -> ObjectInfo:
            try:
                meta = client.head(key)
            except FileNotFoundError:
                self._look_for_bucket(client, key)
                raise
            # Whatever is missing later, it is not the bucket.
            self._bucket_seen = True
            etag = version_of(meta.get("e_tag"), meta["last_modified"])
            return ObjectInfo(key=key, size=int(meta["size"]), etag=etag)

        return self._call(key, head)

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
                raise
        self._bucket_seen = True

    def _get(self, client: Any, key: str, spans: Sequence[Span], etag: str) -> Sequence[Any]:
        """All but the last by one concurrent call.

        The last one's answer tells the ETag: after the others, so that it is not older than they.
        """
        *before, last = spans
        bodies: list[Any] = []
        if before:
            starts = [start for start, _ in before]
            stops = [stop for _, stop in before]
            # Not joined where they are near each other: what they are to be was planned.
            bodies += client.get_ranges(key, starts=starts, ends=stops, coalesce=0)
        answer = client.get(key, options={"range": last})
        version = version_like(etag, answer.meta.get("e_tag"), answer.meta["last_modified"])
        check_version(self.url(key), etag, version)
        bodies.append(answer.bytes())
        return bodies

    def list_between(self, after: str, until: str, most: int) -> Sequence[ObjectInfo] | None:
        """By listings that begin after a key, which S3 knows."""
        if not self.can_list_between:
            return None
        # Of keys in different folders, what these have in common; of one folder, that.
        folders = [os.path.dirname(f"/{key}") for key in (after, until)]
        folder = os.path.commonpath(folders)[1:] or None

        def list_part(client: Any) -> list[ObjectInfo] | None:
            """None where what it has does not serve."""
            listed: list[ObjectInfo] = []
            for page in client.list(folder, offset=after, chunk_size=PAGE):
                listed += [info for info in _listed_infos(page) if info.key < until]
                if len(listed) > most:
                    return None
                if page and page[-1]["path"] >= until:
                    break
            return listed if _are_objects(listed, after) else None

        try:
            found = self._call(after, list_part)
        except StorageError as error:
            if error.transient:
                raise
            return None
        if found is None:
            raise NotListedBetween(f"{self.url(after)}: what follows is not told by a part of it")
        return found

    def list(self, prefix: str, recursive: bool = True) -> list[ObjectInfo]:
        """Objects under a prefix, 1,000 a request; the prefix may end inside a name."""
        # Object stores list by whole path segments: more than asked for, which is left out below.
        folder = prefix.rpartition("/")[0] or None

        def list_folder(client: Any) -> Any:
            if not recursive:
                return client.list_with_delimiter(folder)["objects"]
            objects: list[Any] = []
            for page in client.list(folder):
                objects += page
            return objects

        infos = _listed_infos(self._call(prefix, list_folder))
        listed = [info for info in infos if info.key.startswith(prefix)]
        stored = self._without_markers(listed) if recursive else listed
        return sorted(stored, key=lambda info: info.key)

    def _without_markers(self, listed: Sequence[ObjectInfo]) -> Sequence[ObjectInfo]:
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
        self._check_key(key)
        if not self._policy.has_answered:
            self._probe_endpoint(key)
        _, pool = self._client()
        # A client of its own: parts of an upload are tried again by obstore itself.
        client = obstore_after_fork.opened(self._open_client(self._policy))

        def wrap(error: BaseException) -> BaseException:
            return self._error(key, error)

        return ObstoreWriter(client, key, self.url(key), wrap, pool, self._config.upload_part_bytes)

    def _probe_endpoint(self, key: str) -> None:
        """Raise if no server is there.

        A client that writes has one deadline for good, which is that of a server that answers.
        """
        try:
            self.info(key)
        except StorageError as error:
            if error.silent:
                raise

    def put(
        self, key: str, data: bytes | memoryview, *, if_absent: bool = False, if_match: str = ""
    ) -> bool:
        """Conditions are If-None-Match and If-Match, or what the cloud has for them."""
        if not if_absent and not if_match:
            return super().put(key, data)
        self._check_key(key)
        condition = "create" if if_absent else {"e_tag": if_match}

        def attempt(client: Any) -> bool:
            exceptions = obstore_after_fork.library().exceptions
            refused = exceptions.AlreadyExistsError
            if if_match:
                refused = (exceptions.PreconditionError, FileNotFoundError)
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
        return obstore_after_fork.opened(self._open_client(TRY_ONCE))

    def _open_client(self, policy: RetryPolicy) -> Any:
        library = obstore_after_fork.library()
        if library is None:
            raise ConfigError(
                f"{self.url('')}: obstore was used before this process was forked, and cannot be "
                f"used after it; start workers by multiprocessing_context='spawn' or 'forkserver', "
                f"set transport='fsspec', or use StreamLoader, which needs none"
            )
        retry = _retry_config(policy)
        stores = library.store
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
        # All that the server said: codes that decide may stand in later lines.
        said = whole.partition(_DEBUG_DUMP)[0]
        if self.scheme in _FALLBACK_SCHEMES and any(sign in said for sign in _RANGES_REFUSED):
            return RangesRefused(f"{url}: {text}")
        status = _STATUS.search(text)
        if status:
            said = redact(said, self._config.storage_options)
            return failure_of_status(url, int(status[1]), said)
        if isinstance(error, FileNotFoundError):
            return missing(url)
        if "invalid path" in text:
            return StorageError(
                f"{url}: obstore cannot list this; set transport='fsspec', or name the objects "
                f"otherwise ({text})"
            )
        if isinstance(error, _denials()):
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


def _denials() -> tuple[type[Exception], ...]:
    """Of the library of this process: another process's are other classes."""
    exceptions = obstore_after_fork.library().exceptions
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
