"""`oss://` in OSS's native dialect, by Alibaba's oss2.

For transport='fsspec', and in forked processes that can load no copy of obstore.
"""

from __future__ import annotations

import base64
import hashlib
import logging
import os
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

from streammega.config import StorageConfig
from streammega.errors import StorageError, StreammegaError
from streammega.errors.extras import import_extra
from streammega.errors.redaction import redact, redact_answer
from streammega.storage.backends.oss import oss_endpoint
from streammega.storage.backends.oss_credentials import OssCredentials
from streammega.storage.backends.remote import CONNECT_TIMEOUT, RemoteStore, part_bytes
from streammega.storage.etags import check_version
from streammega.storage.http_errors import check_range, failure_of_status, no_answer, no_size
from streammega.storage.store import ObjectInfo, ObjectWriter, Span

log = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 20
"""Bodies are read in pieces of this size; oss2's own reading takes 8 KiB at a time."""
STANDARD_RANGES = {"x-oss-range-behavior": "standard"}
"""Without this header, a range past the end is answered with the whole object."""
NO_ANSWER = -2
"""The status in oss2 for requests without an answer."""
LONGEST_SUMMARY = 300
"""Most characters of a server's message: some send a page of HTML."""


class Oss2Store(RemoteStore):
    """One bucket, by oss2's client of it."""

    def __init__(self, scheme: str, root: str, config: StorageConfig) -> None:
        super().__init__(scheme, root, config)
        self._credentials = OssCredentials.from_options(root, config.storage_options)

    @property
    def transport(self) -> str:
        """The client's name."""
        return "oss2"

    def url(self, key: str) -> str:
        """The full URL of a key."""
        return redact(f"oss://{self.root}/{key}", self._config.storage_options)

    def info(self, key: str) -> ObjectInfo:
        """One HEAD request."""
        answer = self._call(key, lambda bucket: bucket.head_object(key))
        return self._info_of(key, answer.content_length, answer.etag)

    def _info_of(self, key: str, size: int | None, etag: str | None) -> ObjectInfo:
        if size is None or size < 0:
            raise no_size(self.url(key))
        # With its quotes, as in answers and in obstore. oss2 removes them.
        return ObjectInfo(key=key, size=size, etag=f'"{etag}"' if etag else "")

    def _get(self, client: Any, key: str, spans: Sequence[Span], etag: str) -> Sequence[Any]:
        """Every answer's ETag is compared."""

        def get(span: Span) -> bytes:
            start, stop = span
            last = stop - 1  # a range of HTTP holds its end
            answer = client.get_object(key, byte_range=(start, last), headers=STANDARD_RANGES)
            try:
                check_version(self.url(key), etag, answer.etag or "")
                content_range = answer.headers.get("Content-Range", "")
                length = answer.content_length
                check_range(self.url(key), span, answer.status, content_range, length)
                return b"".join(iter(lambda: answer.read(CHUNK_BYTES), b""))
            finally:
                # After a whole body, the connection stays in the pool.
                answer.resp.response.close()

        if len(spans) == 1:
            return [get(spans[0])]
        pool = self._pool()
        return pool.map(get, spans)

    def list(self, prefix: str, recursive: bool = True) -> list[ObjectInfo]:
        """Objects under a prefix, 1,000 a request; the prefix may end inside a name."""
        import oss2

        delimiter = "" if recursive else "/"

        def find(bucket: Any) -> list[Any]:
            entries = oss2.ObjectIteratorV2(
                bucket, prefix=prefix, delimiter=delimiter, max_keys=1000
            )
            listed = self._refuse_repetition(entries, attrgetter("key"))
            return [entry for entry in listed if not entry.is_prefix()]

        listed = [
            self._info_of(entry.key, entry.size, entry.etag)
            for entry in self._call(prefix, find)
            if entry.key.startswith(prefix)
        ]
        return sorted(listed, key=lambda item: item.key)

    def open_writer(self, key: str) -> ObjectWriter:
        """A multipart upload that is completed by `commit`, aborted by `abort`."""
        return Oss2Writer(self, key)

    def delete(self, key: str) -> None:
        """Delete an object. It is no error if it does not exist."""
        self._call(key, lambda bucket: bucket.delete_object(key))

    def _renewal(self) -> Callable[[], bool] | None:
        credentials = self._credentials
        if credentials is None:
            return None
        # oss2 asks for the key at every request.
        used = credentials.current()
        return lambda: credentials.renew(used)

    def _open(self) -> Any:
        oss2 = import_extra(
            "oss2", "oss", "oss://: transport='fsspec' and forked workers need oss2"
        )
        endpoint = oss_endpoint(self.root, self._config.storage_options, os.environ)
        auth: Any = oss2.AnonymousAuth()
        if self._credentials is not None:
            self._credentials.current()
            provider = _Provider(self._credentials)
            # The newer signature needs the region. OSS phases out the older one, which is used where
            # the region is unknown.
            auth = oss2.ProviderAuthV4(provider) if endpoint.region else oss2.ProviderAuth(provider)
        connect_timeout = min(CONNECT_TIMEOUT, self._config.request_timeout)
        return oss2.Bucket(
            auth,
            endpoint.native_url,
            self.root,
            session=oss2.Session(pool_size=max(10, self._config.max_concurrent_requests)),
            # Seconds to connect, and between two pieces of an answer.
            connect_timeout=(connect_timeout, self._config.tuning.read_timeout),
            # Slow, in Python. Lengths, ETags and Content-MD5 are checked instead.
            enable_crc=False,
            region=endpoint.region or None,
        )

    def _error(self, key: str, error: BaseException) -> BaseException:
        """Our error for one of oss2, or of `requests`, which it uses."""
        if isinstance(error, StreammegaError) or not isinstance(error, Exception):
            return error
        url = self.url(key)
        status = int(getattr(error, "status", 0) or 0)
        text = redact_answer(_summary(error), self._config.storage_options)
        if status > 0:
            return failure_of_status(url, status, text)
        # OSError: errors of `requests` in the middle of a body.
        if status == NO_ANSWER or isinstance(error, OSError):
            return no_answer(url, text)
        return StorageError(f"{url}: {text}")


class _Provider:
    """Gives oss2 the key of each request."""

    def __init__(self, credentials: OssCredentials) -> None:
        self._credentials = credentials

    def get_credentials(self) -> Any:
        import oss2.credentials

        key = self._credentials.current()
        return oss2.credentials.Credentials(key.access_key_id, key.access_key_secret, key.token)


def _summary(error: Exception) -> str:
    """Code and message, without the headers of the request, which are also in oss2's errors."""
    code = getattr(error, "code", "")
    message = getattr(error, "message", "") or getattr(error, "body", "") or str(error)
    lines = str(message).splitlines() or [""]
    summary = f"{type(error).__name__}: {code} {lines[0]}".strip()
    return summary[:LONGEST_SUMMARY]


class Oss2Writer(ObjectWriter):
    """Sends a part when it is full. Small objects are one PUT. OSS checks the MD5 of each body."""

    def __init__(self, store: Oss2Store, key: str) -> None:
        self._store = store
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
            self._send_part(bytes(self._buffer[:size]))
            del self._buffer[:size]

    def commit(self) -> None:
        """Complete the upload; the object appears whole."""
        key = self._key
        if not self._upload_id:
            body = bytes(self._buffer)
            self._store._call(key, lambda bucket: bucket.put_object(key, body, headers=_md5(body)))
            return
        if self._buffer:
            self._send_part(bytes(self._buffer))
        # Without retries: completing an upload twice fails as "no such upload".
        upload = (key, self._upload_id, self._parts)
        self._store._once(key, lambda bucket: bucket.complete_multipart_upload(*upload))
        self._upload_id = ""

    def abort(self) -> None:
        """Abort the upload: its parts are removed from the server."""
        self._buffer.clear()
        if not self._upload_id:
            return
        upload = (self._key, self._upload_id)
        try:
            self._store._once(self._key, lambda bucket: bucket.abort_multipart_upload(*upload))
        except StreammegaError as error:
            log.debug("the upload of %s could not be aborted: %s", self._key, type(error).__name__)
        self._upload_id = ""

    def _send_part(self, body: bytes) -> None:
        import oss2.models

        key = self._key
        if not self._upload_id:
            begun = self._store._call(key, lambda bucket: bucket.init_multipart_upload(key))
            self._upload_id = begun.upload_id
        part = (key, self._upload_id, len(self._parts) + 1, body)
        sent = self._store._call(key, lambda bucket: bucket.upload_part(*part, headers=_md5(body)))
        self._parts.append(oss2.models.PartInfo(len(self._parts) + 1, sent.etag))


def _md5(body: bytes) -> dict[str, str]:
    digest = hashlib.md5(body, usedforsecurity=False).digest()
    return {"Content-MD5": base64.b64encode(digest).decode()}
