"""`oss://` by obstore's S3 client, at OSS's S3-compatible endpoint."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from streammega.config import StorageConfig
from streammega.errors import AccessDeniedError, StreammegaError
from streammega.storage.backends.oss import obstore_arguments
from streammega.storage.backends.oss2_store import OssNativeStore
from streammega.storage.backends.oss_credentials import OssCredentials, OssKey
from streammega.storage.backends.s3 import ObstoreStore
from streammega.storage.fork_lock import process_lock
from streammega.storage.store import (
    Buffer,
    Bytes,
    ObjectInfo,
    ObjectWriter,
    Part,
    Span,
    ended_early,
)

Result = TypeVar("Result")
_CODE = re.compile(r"<Code>(\w+)</Code>")


class OssStore(ObstoreStore):
    """One bucket. Implements `storage.store.Store`.

    After a fork, where no copy of obstore can be loaded, it is read by oss2.
    """

    def __init__(self, scheme: str, root: str, config: StorageConfig) -> None:
        super().__init__(scheme, root, config)
        self._read_credentials: OssCredentials | None = None
        # Not the store's: that is held while a client is opened, which asks for credentials.
        self._credentials_lock = process_lock()
        self._given: OssKey | None = None
        """The key that the client now open was given last."""

    def info(self, key: str) -> ObjectInfo:
        """One HEAD request."""
        return self._renewing(lambda: super(OssStore, self).info(key))

    def read_into(
        self, key: str, spans: Sequence[Span], outs: Sequence[Bytes], etag: str = ""
    ) -> None:
        """One GET each; a refused key is renewed once."""
        return self._renewing(lambda: super(OssStore, self).read_into(key, spans, outs, etag))

    def read_bodies(self, key: str, spans: Sequence[Span], etag: str = "") -> list[Bytes]:
        """The same, their bodies as they came."""
        return self._renewing(lambda: super(OssStore, self).read_bodies(key, spans, etag))

    def read_parts(self, parts: Sequence[Part], at_once: int) -> list[Buffer]:
        """One GET each; a refused key is renewed once."""
        return self._renewing(lambda: super(OssStore, self).read_parts(parts, at_once))

    def list(self, prefix: str, recursive: bool = True) -> list[ObjectInfo]:
        """Objects under a prefix, 1,000 a request; the prefix may end inside a name."""
        return self._renewing(lambda: super(OssStore, self).list(prefix, recursive))

    def open_writer(self, key: str) -> ObjectWriter:
        """A multipart upload that is completed by `commit`, aborted by `abort`."""
        # With a key that was read just now: parts cannot be sent again by another one.
        credentials = self._credentials()
        if credentials is not None:
            credentials.refresh()
        return super().open_writer(key)

    def delete(self, key: str) -> None:
        """Delete an object if it is there."""
        self._renewing(lambda: super(OssStore, self).delete(key))

    def _s3_arguments(self) -> dict[str, Any]:
        credentials = self._credentials()
        if credentials is None:
            return obstore_arguments(self.root, self._config, None)
        # So that missing ones are told by our error, not from within obstore.
        credentials.current()
        return obstore_arguments(self.root, self._config, self._give)

    def _credentials(self) -> OssCredentials | None:
        with self._credentials_lock:
            if self._read_credentials is None:
                options = self._config.storage_options
                self._read_credentials = OssCredentials.of(self.root, options)
            return self._read_credentials

    def _give(self) -> OssKey:
        credentials = self._credentials()
        assert credentials is not None
        self._given = credentials.current()
        return self._given

    def _renewing(self, call: Callable[[], Result]) -> Result:
        """`call()`, and once more by a new client if a key was refused and there is another now."""
        credentials = self._credentials()
        if credentials is None:
            return call()
        # Seen before the call: its client may have a newer key, which is then taken for renewed,
        # but never an older one.
        used = self._given or credentials.current()
        try:
            return call()
        except AccessDeniedError:
            if not credentials.renew(used):
                raise
        with self._lock:
            # Else another thread has renewed it meanwhile.
            if self._given is None or self._given == used:
                # A client holds the key it was given until that expires.
                self._opened = None
                self._given = None
        return call()

    def _make_fallback(self) -> OssNativeStore:
        return OssNativeStore("oss", self._config)

    def _error(self, key: str, error: BaseException) -> BaseException:
        text = str(error)
        of_obstore = isinstance(error, Exception) and not isinstance(error, StreammegaError)
        if of_obstore and "non-partial response" in text:
            return ended_early(
                self.url(key), "OSS answers a range that reaches past the end with the whole object"
            )
        ours = super()._error(key, error)
        code = _CODE.search(text)
        if isinstance(ours, AccessDeniedError) and ours is not error and code:
            return AccessDeniedError(f"{ours}; OSS says {code[1]}")
        return ours
