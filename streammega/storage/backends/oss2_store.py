"""`oss://` in OSS's native dialect, by Alibaba's oss2.

For transport='fsspec', and in forked processes that can load no copy of obstore.
"""

from __future__ import annotations

import base64
import hashlib
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from streammega.config import StorageConfig
from streammega.errors import (
    AccessDeniedError,
    ConfigError,
    StorageError,
    StreammegaError,
)
from streammega.errors.redaction import redact
from streammega.storage.backends.fsspec import CONNECT_WITHIN, FsspecStore
from streammega.storage.backends.oss import INSTALL, check_options, oss_endpoint
from streammega.storage.backends.oss_credentials import OssCredentials
from streammega.storage.backends.ranges import check_range
from streammega.storage.backends.s3_writer import part_bytes
from streammega.storage.etags import check_version
from streammega.storage.http_errors import failure_of_status, no_answer
from streammega.storage.retry import RetryPolicy
from streammega.storage.store import Bytes, ObjectInfo, Span, wrong_length

log = logging.getLogger(__name__)

Result = TypeVar("Result")
CHUNK_BYTES = 1 << 20
"""Bodies are copied in pieces of this size; oss2's own reading takes 8 KiB at a time."""
STANDARD_RANGES = {"x-oss-range-behavior": "standard"}
"""Without it a range that reaches past the end is answered with the whole object."""
NO_ANSWER = -2
"""oss2's own status, of requests that got no answer."""
LONGEST_SUMMARY = 300
"""Characters of what a server said: some say a page of HTML."""


class OssNativeStore(FsspecStore):
    """All buckets of an endpoint; keys are bucket/name.

    Implements `storage.store.Store`; lazily opened, per process.
    """

    def __init__(self, scheme: str, config: StorageConfig) -> None:
        super().__init__(scheme, config)
        self._credentials: OssCredentials | None = None
        self._buckets: dict[tuple[int, str], Any] = {}

    def __repr__(self) -> str:
        return "OssNativeStore(oss://)"

    def info(self, key: str) -> ObjectInfo:
        """One HEAD request."""

        def head() -> ObjectInfo:
            answer = self._call(key, lambda bucket, name: bucket.head_object(name))
            return ObjectInfo(key=key, size=int(answer.content_length), etag=_quoted(answer.etag))

        return self._policy.call(head)

    def read_into(
        self, key: str, spans: Sequence[Span], outs: Sequence[Bytes], etag: str = ""
    ) -> None:
        """One GET each, at the same time; every answer's ETag is compared."""

        def get(span: Span, out: Bytes) -> None:
            self._call(key, lambda bucket, name: self._read(bucket, name, key, span, out, etag))

        if len(spans) == 1:
            get(spans[0], outs[0])
            return
        _, pool = self._filesystem()
        pool.map(lambda pair: get(*pair), zip(spans, outs, strict=True))

    def _read(self, bucket: Any, name: str, key: str, span: Span, out: Bytes, etag: str) -> None:
        start, stop = span
        url = self.url(key)
        last = stop - 1  # a range of HTTP holds its end
        answer = bucket.get_object(name, byte_range=(start, last), headers=STANDARD_RANGES)
        try:
            check_version(url, etag, str(answer.etag))
            content_range = answer.headers.get("Content-Range", "")
            check_range(url, span, answer.status, content_range, answer.content_length)
            filled = 0
            while True:
                chunk = answer.read(CHUNK_BYTES)
                if not chunk:
                    break
                end = filled + len(chunk)
                # A body that is too long is counted to its end, for the error, and not kept.
                if end <= len(out):
                    out[filled:end] = memoryview(chunk)
                filled = end
            if filled != len(out):
                raise wrong_length(url, start, stop, filled)
        finally:
            # Of a body that was read whole the connection stays in the pool.
            answer.resp.response.close()

    def list(self, prefix: str, recursive: bool = True) -> list[ObjectInfo]:
        """Objects under a prefix, 1,000 a request; the prefix may end inside a name."""
        import oss2

        def find(bucket: Any, name: str) -> list[ObjectInfo]:
            """Objects of one bucket under a name."""
            delimiter = "" if recursive else "/"
            entries = oss2.ObjectIteratorV2(bucket, prefix=name, delimiter=delimiter, max_keys=1000)
            objects = []
            for entry in entries:
                if not entry.is_prefix():
                    key = f"{bucket.bucket_name}/{entry.key}"
                    etag = _quoted(entry.etag)
                    objects.append(ObjectInfo(key=key, size=int(entry.size), etag=etag))
            return objects

        listed = self._policy.call(lambda: self._call(prefix, find))
        return sorted(listed, key=lambda item: item.key)

    def open_writer(self, key: str) -> OssWriter:  # type: ignore[override]
        """A multipart upload that is completed by `commit`, aborted by `abort`."""
        return OssWriter(lambda call: self._call(key, call), self._policy, key)

    def delete(self, key: str) -> None:
        """Delete an object; one that is not there is no error, nor for OSS."""

        def remove(bucket: Any, name: str) -> None:
            bucket.delete_object(name)

        self._policy.call(lambda: self._call(key, remove))

    def _call(self, key: str, call: Callable[[Any, str], Result]) -> Result:
        """`call(bucket, name)` once, or twice with another key if the first was refused.

        Raises our errors.
        """
        root, _, name = key.lstrip("/").partition("/")

        def attempt() -> Result:
            """One call, in this store's errors."""
            try:
                return call(self._bucket(root), name)
            except BaseException as error:
                raise self._error(key, error) from None

        credentials = self._open_credentials(root)
        if credentials is None:
            return attempt()
        used = credentials.current()
        try:
            return attempt()
        except AccessDeniedError:
            if not credentials.renew(used):
                raise
        return attempt()  # oss2 asks for the key with every request

    def _bucket(self, root: str) -> Any:
        oss2, _ = self._filesystem()  # a message if it is not installed
        # Connections do not survive a fork.
        identity = (os.getpid(), root)
        with self._lock:
            if identity not in self._buckets:
                self._buckets[identity] = self._make_bucket(oss2, root)
            return self._buckets[identity]

    def _open_credentials(self, root: str) -> OssCredentials | None:
        with self._lock:
            if self._credentials is None:
                self._credentials = OssCredentials.of(root, self._config.storage_options)
            return self._credentials

    def _make_bucket(self, oss2: Any, root: str) -> Any:
        options = self._config.storage_options
        check_options(root, options)
        endpoint = oss_endpoint(root, options, os.environ)
        auth: Any = oss2.AnonymousAuth()
        if self._credentials is not None:
            self._credentials.current()
            provider = _Provider(self._credentials)
            # The newer signature names the region; OSS gives up the older one, which is left for
            # endpoints that tell none.
            auth = oss2.ProviderAuthV4(provider) if endpoint.region else oss2.ProviderAuth(provider)
        connect_timeout = min(CONNECT_WITHIN, self._config.timeout)
        return oss2.Bucket(
            auth,
            endpoint.native_url,
            root,
            session=oss2.Session(pool_size=max(10, self._config.max_requests)),
            # To connect, and between two pieces of an answer.
            connect_timeout=(connect_timeout, self._config.stall_timeout),
            # Computed in Python; lengths, ETags and Content-MD5 are checked instead.
            enable_crc=False,
            region=endpoint.region or None,
        )

    def _open(self) -> Any:
        try:
            import oss2
        except ImportError as error:
            raise ConfigError(
                f"oss://: transport='fsspec' and forked workers need oss2: {INSTALL} ({error})"
            ) from None
        return oss2

    def _error(self, key: str, error: BaseException) -> BaseException:
        """The streammega error for one of oss2's, or of requests beneath it."""
        if isinstance(error, StreammegaError) or not isinstance(error, Exception):
            return error
        url = self.url(key)
        status = int(getattr(error, "status", 0) or 0)
        text = redact(_summary(error), self._config.storage_options)
        if status > 0:
            return failure_of_status(url, status, text)
        # OSError: requests' errors in the middle of a body.
        if status == NO_ANSWER or isinstance(error, OSError):
            return no_answer(url, text)
        return StorageError(f"{url}: {text}")


class _Provider:
    """What oss2 asks for a key before each request."""

    def __init__(self, credentials: OssCredentials) -> None:
        self._credentials = credentials

    def get_credentials(self) -> Any:
        import oss2.credentials

        key = self._credentials.current()
        return oss2.credentials.Credentials(key.access_key_id, key.access_key_secret, key.token)


def _summary(error: Exception) -> str:
    """Status, code and message, without the request's headers, which an oss2 error holds too."""
    code = getattr(error, "code", "")
    message = getattr(error, "message", "") or getattr(error, "body", "") or str(error)
    lines = str(message).splitlines() or [""]
    summary = f"{type(error).__name__}: {code} {lines[0]}".strip()
    return summary[:LONGEST_SUMMARY]


class OssWriter:
    """Sends a part whenever one is full; small objects are one plain PUT.

    Each body goes with its MD5, which OSS checks.
    """

    def __init__(
        self, call: Callable[[Callable[[Any, str], Any]], Any], policy: RetryPolicy, key: str
    ) -> None:
        self._call = call
        self._policy = policy
        self._key = key
        self._buffer = bytearray()
        self._upload_id = ""
        self._parts: list[Any] = []

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes."""
        self._buffer += data
        while True:
            size = part_bytes(len(self._parts))
            if len(self._buffer) < size:
                return
            self._send(bytes(self._buffer[:size]))
            del self._buffer[:size]

    def commit(self) -> None:
        """Complete the upload; the object appears whole."""
        if not self._upload_id:
            body = bytes(self._buffer)
            self._try(lambda bucket, name: bucket.put_object(name, body, headers=_md5(body)))
            return
        if self._buffer:
            self._send(bytes(self._buffer))
        # Once only: a second completion of an upload that is complete would be told as a missing
        # upload.
        self._call(
            lambda bucket, name: bucket.complete_multipart_upload(
                name, self._upload_id, self._parts
            )
        )
        self._upload_id = ""

    def abort(self) -> None:
        """Abort the upload: its parts are removed from the server."""
        self._buffer.clear()
        if not self._upload_id:
            return
        try:
            self._call(lambda bucket, name: bucket.abort_multipart_upload(name, self._upload_id))
        except StreammegaError as error:
            log.debug("the upload of %s could not be aborted: %s", self._key, type(error).__name__)
        self._upload_id = ""

    def _send(self, body: bytes) -> None:
        import oss2.models

        if not self._upload_id:
            self._upload_id = self._try(
                lambda bucket, name: bucket.init_multipart_upload(name).upload_id
            )
        number = len(self._parts) + 1
        headers = _md5(body)
        sent = self._try(
            lambda bucket, name: bucket.upload_part(
                name, self._upload_id, number, body, headers=headers
            )
        )
        self._parts.append(oss2.models.PartInfo(number, sent.etag))

    def _try(self, call: Callable[[Any, str], Any]) -> Any:
        return self._policy.call(lambda: self._call(call))


def _md5(body: bytes) -> dict[str, str]:
    digest = hashlib.md5(body, usedforsecurity=False).digest()
    return {"Content-MD5": base64.b64encode(digest).decode()}


def _quoted(etag: str) -> str:
    """As the answers hold it and obstore tells it; oss2 takes the quotes off."""
    return f'"{etag}"'
