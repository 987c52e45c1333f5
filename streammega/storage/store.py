"""The store interface: objects by key."""

# ruff: noqa: D102  (methods that override others need no docstrings)
from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from streammega.errors import (
    AccessDeniedError,
    ConfigError,
    ObjectNotFoundError,
    StorageError,
    UnsupportedOperation,
)
from streammega.kernels.addresses import copy_arrays
from streammega.storage.etags import is_etag
from streammega.storage.http_errors import short_read

Result = TypeVar("Result")
Buffer = memoryview
Bytes = NDArray[np.uint8]
Span = tuple[int, int]
"""Bytes [start, stop) of an object."""


# Not frozen: making one would take two to three times as long, and there are thousands.
@dataclass(kw_only=True, slots=True)
class ObjectInfo:
    """One stored object: its key within the store, its size in bytes, and its ETag.

    The ETag changes when the bytes do. For local files it is made of size and modification time.
    modified: when it was written, in seconds since 1970 by the server's clock; 0: not known.
    """

    key: str
    size: int
    etag: str
    modified: float = 0.0


MAX_KEY_BYTES = 1024
"""The limit of S3. Other object stores have the same, or one byte less."""
MAX_HTTP_KEY_BYTES = 16 << 10
"""For servers of http, whose own limits differ. obstore takes 64 KiB, with signs that are quoted."""
MAX_UPLOADS = 3
"""Times that an object is written, each after its upload was refused."""


class ObjectWriter(ABC):
    """A file being written. Nothing shows under the final name before `commit` returns."""

    can_write_at = False
    """Whether several threads may write at offsets, by the last three methods."""

    @abstractmethod
    def write(self, data: bytes | memoryview) -> None:
        """Append bytes; items of a memoryview may have several. Raises StorageError."""

    @abstractmethod
    def commit(self) -> None:
        """Publish all that was written under the final name, at once. Raises StorageError."""

    @abstractmethod
    def abort(self) -> None:
        """Discard what was written. An object of the final name stays. Never raises."""

    def reserve(self, size: int) -> int:
        """Reserve `size` bytes after those that were written. Returns their offset.

        All of them must be written before `commit`.
        """
        raise UnsupportedOperation("this writer only appends")

    def write_at(self, offset: int, data: Bytes) -> None:
        """Write reserved bytes. Raises StorageError."""
        raise UnsupportedOperation("this writer only appends")

    def write_back(self, start: int, stop: int) -> None:
        """Ask the system to begin writing bytes [start, stop) to the disk."""
        return None


class Store(ABC):
    """Objects by key under one root (a bucket, a host, the local disk).

    Stores open their clients lazily and once per process, so they may cross a fork or be pickled.
    All methods may be called from several threads. Keys never start with a slash, except
    those of the local store, which are file paths. What a store cannot do raises
    UnsupportedOperation.
    """

    @property
    def is_local(self) -> bool:
        """Whether objects are mapped local files, whose reads need no network."""
        return False

    @property
    def transport(self) -> str:
        """The client that reads in this process: "obstore", "fsspec", or "local"."""
        return "local"

    @abstractmethod
    def url(self, key: str) -> str:
        """The full URL of a key, for messages and cache keys, without credentials."""

    @abstractmethod
    def info(self, key: str) -> ObjectInfo:
        """Size and ETag. Raises ObjectNotFoundError, AccessDeniedError, EndpointError."""

    @abstractmethod
    def fetch(self, key: str, spans: Sequence[Span], etag: str = "") -> list[Buffer]:
        """The bytes [start, stop) of each span, by one request each, without retries.

        Raises ObjectChangedError if `etag` is given and the object has another one now,
        ShortReadError for a body of another length, EndpointError and so on. The caller may retry
        errors that are `transient`. If one span fails, all fail.
        """

    def fetch_into(
        self, key: str, spans: Sequence[Span], outs: Iterable[Bytes], etag: str = ""
    ) -> None:
        """As `fetch`, into `outs`: uint8 [stop - start] each.

        `outs` may be an iterator that allocates. It is used when the bytes are there.
        """
        copy_into(self.url(key), spans, self.fetch(key, spans, etag), outs)

    def read(self, key: str, spans: Sequence[Span], etag: str = "") -> list[Buffer]:
        """As `fetch`, with retries of transient errors.

        etag: of the object that was opened; empty: of any version.
        """
        return self.fetch(key, spans, etag)

    def get(self, key: str, max_bytes: int) -> tuple[ObjectInfo, Buffer]:
        """A whole object and what `info` says of it, by one request where the client can.

        Of an object with more than `max_bytes` no bytes are read. Raises as `info` and `read` do.
        """
        info = self.info(key)
        if info.size > max_bytes:
            return info, memoryview(b"")
        return info, self.read(key, [(0, info.size)], info.etag)[0]

    def read_start(self, key: str, size: int) -> tuple[ObjectInfo, Buffer]:
        """What `info` says of an object, and its first `size` bytes, or all of a shorter one; by one
        request where the client can. Raises as `info` and `read` do.
        """
        info = self.info(key)
        return info, self.read(key, [(0, min(size, info.size))], info.etag)[0]

    def place(self, prefix: str) -> str:
        """A prefix of keys with its endpoint: where it is the same, the same ETags are seen. Empty where
        that is not known.
        """
        return ""

    @abstractmethod
    def list(self, prefix: str, recursive: bool = True) -> list[ObjectInfo]:
        """All objects whose key starts with `prefix`, sorted by key.

        Not `recursive`: only those without a slash after the prefix. ETags are empty where the
        store's listings have none.
        """

    def open_writer(self, key: str) -> ObjectWriter:
        """A writer that streams (multipart where the backend has it)."""
        raise UnsupportedOperation(f"{self.url(key)}: this storage cannot be written to")

    def put(
        self, key: str, data: bytes | memoryview, *, if_absent: bool = False, if_match: str = ""
    ) -> bool:
        """Write a small object at once. False if a condition is given and does not hold.

        if_absent: no such object exists. if_match: the object has this ETag. At most one of both.
        Raises StorageError, and UnsupportedOperation where the store has no such condition.
        """
        if if_absent or if_match:
            raise UnsupportedOperation(f"{self.url(key)}: its driver has no conditional writes")
        with atomic_writer(self, key) as writer:
            writer.write(data)
        return True

    def delete(self, key: str) -> None:
        """Remove an object. It is no error if it does not exist."""
        raise UnsupportedOperation(f"{self.url(key)}: this storage cannot be written to")

    def local_path(self, key: str) -> str | None:
        """The path of the file that is this object; None if it cannot be read as a file."""
        return None

    def view(self, key: str, etag: str = "") -> Buffer:
        """All bytes of an object with a `local_path`, mapped. Raises as `fetch`."""
        raise UnsupportedOperation(f"{self.url(key)}: is not a local file")

    def unmap(self) -> None:
        """Unmap files. They are mapped again when they are read."""
        return None


class WrapperStore(Store):
    """A store that forwards to another. Subclasses override what they change.

    `local_path` and `view` are not forwarded: the file may hold other bytes than the wrapper shows.
    """

    def __init__(self, inner: Store) -> None:
        self._inner = inner

    @property
    def inner(self) -> Store:
        """The wrapped store."""
        return self._inner

    @property
    def is_local(self) -> bool:
        return self.inner.is_local

    @property
    def transport(self) -> str:
        return self.inner.transport

    def url(self, key: str) -> str:
        return self.inner.url(key)

    def info(self, key: str) -> ObjectInfo:
        return self.inner.info(key)

    def fetch(self, key: str, spans: Sequence[Span], etag: str = "") -> list[Buffer]:
        return self.inner.fetch(key, spans, etag)

    def fetch_into(
        self, key: str, spans: Sequence[Span], outs: Iterable[Bytes], etag: str = ""
    ) -> None:
        self.inner.fetch_into(key, spans, outs, etag)

    def read(self, key: str, spans: Sequence[Span], etag: str = "") -> list[Buffer]:
        return self.inner.read(key, spans, etag)

    def get(self, key: str, max_bytes: int) -> tuple[ObjectInfo, Buffer]:
        return self.inner.get(key, max_bytes)

    def read_start(self, key: str, size: int) -> tuple[ObjectInfo, Buffer]:
        return self.inner.read_start(key, size)

    def place(self, prefix: str) -> str:
        return self.inner.place(prefix)

    def list(self, prefix: str, recursive: bool = True) -> list[ObjectInfo]:
        return self.inner.list(prefix, recursive)

    def open_writer(self, key: str) -> ObjectWriter:
        return self.inner.open_writer(key)

    def put(
        self, key: str, data: bytes | memoryview, *, if_absent: bool = False, if_match: str = ""
    ) -> bool:
        return self.inner.put(key, data, if_absent=if_absent, if_match=if_match)

    def delete(self, key: str) -> None:
        self.inner.delete(key)

    def unmap(self) -> None:
        self.inner.unmap()


@contextmanager
def atomic_writer(store: Store, key: str) -> Iterator[ObjectWriter]:
    """A writer of an object, which is published when the block ends, and discarded after an error."""
    writer = store.open_writer(key)
    try:
        yield writer
        writer.commit()
    except BaseException:
        writer.abort()
        raise


def write_again(store: Store, key: str, write: Callable[[], Result]) -> Result:
    """`write()` an object; again where its upload was refused, and the server accepts requests now."""
    for _ in range(MAX_UPLOADS - 1):
        try:
            return write()
        except StorageError as error:
            if not error.upload_refused:
                raise
        # A read waits until the server accepts requests, and raises as all requests do.
        with suppress(ObjectNotFoundError):
            store.read(key, [(0, 1)])
    return write()


def put_if(
    store: Store, key: str, data: bytes, *, if_absent: bool = False, if_match: str = ""
) -> bool:
    """A conditional write. Raises UnsupportedOperation where the server has none."""
    try:
        return store.put(key, data, if_absent=if_absent, if_match=if_match)
    except (AccessDeniedError, ObjectNotFoundError, UnsupportedOperation):
        raise
    except StorageError as error:
        if error.transient:
            raise
        # Any other permanent error: the server has no conditional writes.
        raise UnsupportedOperation(str(error)) from None


def create_object(store: Store, key: str, data: bytes) -> bool:
    """Write a small object that does not exist yet.

    False if it exists, which may be this one, after a lost answer. Of several concurrent calls one
    succeeds. Where the store or the server has no conditional writes, it is looked up and then
    written: of several concurrent writes the last one stays. Raises StorageError.
    """
    with suppress(UnsupportedOperation):
        return put_if(store, key, data, if_absent=True)
    try:
        store.info(key)
    except ObjectNotFoundError:
        return store.put(key, data)
    return False


def replace_object(store: Store, key: str, data: bytes, etag: str) -> bool:
    """Replace the small object that has this ETag.

    False if it is gone or another one now, which may be this one, after a lost answer. It is
    written without a condition where the store or the server has no conditional writes, or sent a
    time instead of an ETag. Raises StorageError.
    """
    if is_etag(etag):
        with suppress(UnsupportedOperation):
            return put_if(store, key, data, if_match=etag)
    return store.put(key, data)


def check_object_key(url: str, key: str) -> None:
    """Raise ConfigError for a key that is too long, or ends in a slash: clients send it with some requests
    only.
    """
    check_key_length(url, key)
    if key.endswith("/"):
        raise ConfigError(
            f"{url}: a name that ends in a slash is a folder, not an object; leave the slash out if "
            f"it is an object"
        )


def check_key_length(url: str, key: str) -> None:
    """Raise ConfigError for a key, or a beginning of keys, that is too long: obstore would panic."""
    num_bytes = len(key.encode(errors="surrogateescape"))
    max_bytes = MAX_KEY_BYTES
    if url.startswith(("http://", "https://")):
        max_bytes = MAX_HTTP_KEY_BYTES
    if num_bytes > max_bytes:
        raise ConfigError(
            f"{url[:100]}…: the name has {num_bytes} bytes, and may have at most {max_bytes}; give a "
            f"shorter one"
        )


def as_bytes(data: bytes | memoryview) -> memoryview:
    """A view of single bytes, whatever the items of `data` are."""
    view = memoryview(data)
    # A view without items cannot be cast.
    return view.cast("B") if view.nbytes else memoryview(b"")


def check_length(url: str, span: Span, body: Buffer) -> Buffer:
    """`body`, if it has as many bytes as its span. Raises ShortReadError that names the object."""
    start, stop = span
    if len(body) != stop - start:
        raise short_read(url, start, stop, len(body))
    return body


def copy_into(
    url: str, spans: Sequence[Span], bodies: Sequence[Buffer], outs: Iterable[Bytes]
) -> None:
    """Copy bodies into `outs`, by one call without the GIL.

    Raises ShortReadError for a body of another length than its span, and ValueError for an array of
    another length.
    """
    sources = []
    for span, body in zip(spans, bodies, strict=True):
        sources.append(np.frombuffer(check_length(url, span, body), np.uint8))
    copy_arrays(sources, list(outs))


def listed_etag(etag: str | None) -> str:
    """The ETag of a listing, with the quotes that other answers have; empty for None.

    Some servers leave the quotes out in listings.
    """
    if not etag or etag.endswith('"'):
        return etag or ""
    return f'"{etag}"'
