"""The store interface: objects by key, whatever serves them."""

# ruff: noqa: D102  (methods that override others need no docstrings)
from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from streammega.errors import (
    AccessDeniedError,
    ConfigError,
    ObjectNotFoundError,
    StorageError,
    UnsupportedOperation,
)
from streammega.kernels.plan import copy_bytes
from streammega.storage.etags import is_etag
from streammega.storage.http_errors import short_read
from streammega.storage.thread_pool import parallel_map

Buffer = memoryview
_NOTHING = np.empty(0, np.uint8)
"""What `copy_bytes` may take bytes from beside addresses: here all have addresses."""
Bytes = NDArray[np.uint8]
Span = tuple[int, int]
"""Bytes [start, stop) of an object."""


# Of thousands, each would take two to three times as long if it were frozen.
@dataclass(kw_only=True, slots=True)
class ObjectInfo:
    """One stored object: its key within the store, its size in bytes, and its ETag.

    The ETag is whatever changes when the bytes do; local files use size and modification time.
    """

    key: str
    size: int
    etag: str


Part = tuple[ObjectInfo, int, int]
"""Bytes [start, stop) of an object."""
PARTS_TOGETHER = 16
"""Small objects that a thread reads one after the other before it looks for more."""


class ObjectWriter(ABC):
    """A file being written. Nothing shows under the final name before `commit` returns."""

    can_write_at = False
    """Whether several threads may put bytes in their places, by the last three methods."""

    @abstractmethod
    def write(self, data: bytes | memoryview) -> None:
        """Append bytes. Raises StorageError."""

    @abstractmethod
    def commit(self) -> None:
        """Publish everything written under the final name, at once. Raises StorageError."""

    @abstractmethod
    def abort(self) -> None:
        """Throw away what was written; the final name keeps what it had. Never raises."""

    def reserve(self, size: int) -> int:
        """Room for `size` bytes after those that were written. Returns where it begins.

        All of it must be written before `commit`.
        """
        raise UnsupportedOperation("this writer only appends")

    def write_at(self, offset: int, data: Bytes) -> None:
        """Put bytes into reserved room. Raises StorageError."""
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

    owns_bodies = False
    """Whether `fetch` returns memory of its own, which the caller may keep."""

    @property
    def is_local(self) -> bool:
        """Whether reads cost no network: they are of mapped files."""
        return False

    @abstractmethod
    def url(self, key: str) -> str:
        """The full URL of a key, for messages and cache keys; never with credentials."""

    @abstractmethod
    def info(self, key: str) -> ObjectInfo:
        """Size and ETag. Raises ObjectNotFoundError, AccessDeniedError, EndpointError."""

    @abstractmethod
    def fetch(self, key: str, spans: Sequence[Span], etag: str = "") -> list[Buffer]:
        """The bytes [start, stop) of each span: one request each, and one try.

        Raises ObjectChangedError if `etag` is given and the object has another one now,
        ShortReadError for any other number of bytes than asked, EndpointError and so on. Errors
        that are `transient` may be tried again. Several spans fail together.
        """

    def fetch_into(
        self, key: str, spans: Sequence[Span], outs: Sequence[Bytes], etag: str = ""
    ) -> None:
        """As `fetch`, into `outs`: uint8 [stop - start] each."""
        copy_into(self.url(key), spans, self.fetch(key, spans, etag), outs)

    def read(self, key: str, spans: Sequence[Span], etag: str = "") -> list[Buffer]:
        """As `fetch`, and tries failed requests again where that may help.

        `etag`: of the object that was opened; empty: reads whatever is there.
        """
        return self.fetch(key, spans, etag)

    @abstractmethod
    def list(self, prefix: str, recursive: bool = True) -> list[ObjectInfo]:
        """All objects whose key starts with `prefix`, sorted by key.

        Not `recursive`: only those with no slash after it. Where the store's listings tell no ETag,
        theirs is empty.
        """

    def list_between(self, after: str, until: str, max_objects: int) -> Sequence[ObjectInfo] | None:
        """Objects with after < key < until, sorted by key, at most `max_objects`.

        None where the store lists whole folders only, or its answer is not all of these objects.
        Raises StorageError where another try may help.
        """
        return None

    def open_writer(self, key: str) -> ObjectWriter:
        """A writer that streams (multipart where the backend has it)."""
        raise UnsupportedOperation(f"{self.url(key)}: this storage cannot be written to")

    def put(
        self, key: str, data: bytes | memoryview, *, if_absent: bool = False, if_match: str = ""
    ) -> bool:
        """Write a small object at once, on at most one condition. False: it does not hold.

        if_absent: no such object exists. if_match: the object has this ETag. Raises StorageError,
        and UnsupportedOperation where the store has no such condition.
        """
        if if_absent or if_match:
            raise UnsupportedOperation(f"{self.url(key)}: its driver has no conditional writes")
        with atomic_writer(self, key) as writer:
            writer.write(data)
        return True

    def delete(self, key: str) -> None:
        """Remove an object; one that is not there is no error."""
        raise UnsupportedOperation(f"{self.url(key)}: this storage cannot be written to")

    def local_path(self, key: str) -> str | None:
        """The path of the file that is this object; None where no file may be read in its place."""
        return None

    def view(self, key: str, etag: str = "") -> Buffer:
        """All bytes of an object that has a `local_path`, mapped. Raises as `fetch`."""
        raise UnsupportedOperation(f"{self.url(key)}: is not a local file")

    def unmap(self) -> None:
        """Let go of mapped files. They are mapped again when they are read."""
        return None


class WrapperStore(Store):
    """A store that forwards to another. Subclasses override what they change.

    Not forwarded: `local_path` and `view`, for the file may hold other bytes than are shown.
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

    def url(self, key: str) -> str:
        return self.inner.url(key)

    def info(self, key: str) -> ObjectInfo:
        return self.inner.info(key)

    def fetch(self, key: str, spans: Sequence[Span], etag: str = "") -> list[Buffer]:
        return self.inner.fetch(key, spans, etag)

    def fetch_into(
        self, key: str, spans: Sequence[Span], outs: Sequence[Bytes], etag: str = ""
    ) -> None:
        self.inner.fetch_into(key, spans, outs, etag)

    def read(self, key: str, spans: Sequence[Span], etag: str = "") -> list[Buffer]:
        return self.inner.read(key, spans, etag)

    def list(self, prefix: str, recursive: bool = True) -> list[ObjectInfo]:
        return self.inner.list(prefix, recursive)

    def list_between(self, after: str, until: str, max_objects: int) -> Sequence[ObjectInfo] | None:
        return self.inner.list_between(after, until, max_objects)

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


def read_many(store: Store, parts: Sequence[Part], max_requests: int) -> list[Buffer]:
    """Parts of several objects, each of the version of its `ObjectInfo`. Raises as `Store.read`."""

    def read_group(group: Sequence[Part]) -> list[Buffer]:
        return [store.read(info.key, [(start, stop)], info.etag)[0] for info, start, stop in group]

    # Several to a thread at a time: to hand one over costs as much as a small answer does.
    size = max(1, min(PARTS_TOGETHER, len(parts) // (4 * max_requests)))
    groups = [parts[first : first + size] for first in range(0, len(parts), size)]
    return [body for bodies in parallel_map(read_group, groups, max_requests) for body in bodies]


@contextmanager
def atomic_writer(store: Store, key: str) -> Iterator[ObjectWriter]:
    """A writer of an object, which appears when the block ends, with all that was written.

    After an error in the block, nothing does.
    """
    writer = store.open_writer(key)
    try:
        yield writer
        writer.commit()
    except BaseException:
        writer.abort()
        raise


def create_on_condition(store: Store, key: str, data: bytes) -> bool:
    """Write a small object on the condition that none is there.

    False if one is, which may be this very one after a lost answer. Raises UnsupportedOperation
    where store or server know no conditional writes, StorageError.
    """
    return _put_if(store, key, data, if_absent=True)


def _put_if(
    store: Store, key: str, data: bytes, *, if_absent: bool = False, if_match: str = ""
) -> bool:
    """A conditional write. Raises UnsupportedOperation for an error that says there is no such."""
    try:
        return store.put(key, data, if_absent=if_absent, if_match=if_match)
    except (AccessDeniedError, ObjectNotFoundError, UnsupportedOperation):
        raise
    except StorageError as error:
        if error.transient:
            raise
        # Anything else that lasts: the server knows no conditions.
        raise UnsupportedOperation(str(error)) from None


def create_object(store: Store, key: str, data: bytes) -> bool:
    """Write a small object where none is.

    False if one is there, which may be this very one after a lost answer. Of several that do so at
    once one succeeds, where store and server know conditional writes. Else it is a look and a
    write: between both others may write as well, and the last of them stays. Raises StorageError.
    """
    with suppress(UnsupportedOperation):
        return create_on_condition(store, key, data)
    try:
        store.info(key)
    except ObjectNotFoundError:
        return store.put(key, data)
    return False


def replace_object(store: Store, key: str, data: bytes, etag: str) -> bool:
    """Write a small object in place of that with this ETag.

    False if another one, or none, is there by now, which may be this very one after a lost answer.
    Where store or server know no such condition, or told a time instead of an ETag, it is written
    whatever is there. Raises StorageError.
    """
    if is_etag(etag):
        with suppress(UnsupportedOperation):
            return _put_if(store, key, data, if_match=etag)
    return store.put(key, data)


def check_object_key(url: str, key: str) -> None:
    """Raise ConfigError for a key that ends in a slash.

    Clients leave the slash out of some requests and send it with others.
    """
    if key.endswith("/"):
        raise ConfigError(
            f"{url}: what ends in a slash is a folder and no object; leave the slash out if it is "
            f"one"
        )


def check_length(url: str, span: Span, body: Buffer) -> Buffer:
    """`body` if it has as many bytes as its span; else ShortReadError that names the object."""
    start, stop = span
    if len(body) != stop - start:
        raise short_read(url, start, stop, len(body))
    return body


def copy_into(
    url: str, spans: Sequence[Span], bodies: Sequence[Buffer], outs: Sequence[Bytes]
) -> None:
    """Copy bodies that came whole, in one call without the GIL.

    Raises ShortReadError for a body of another length than its span, and ValueError for a place in
    `outs` of another one.
    """
    sources = []
    for span, body in zip(spans, bodies, strict=True):
        sources.append(np.frombuffer(check_length(url, span, body), np.uint8))
    for (start, stop), out in zip(spans, outs, strict=True):
        check_room(out, stop - start)
    sizes = np.array([len(source) for source in sources], np.int64)
    copy_bytes(_NOTHING, _addresses(sources), sizes, _addresses(outs))


def _addresses(arrays: Sequence[Bytes]) -> NDArray[np.int64]:
    return np.array([address_of(array) for array in arrays], np.int64)


def check_room(out: Bytes, size: int) -> None:
    """Raise ValueError if `out` is not the place for `size` bytes.

    Kernels write to its address, without a look at its end.
    """
    if out.nbytes != size or not out.flags.c_contiguous or not out.flags.writeable:
        raise ValueError(
            f"{size} bytes are to be written to an array of {out.nbytes} (contiguous and "
            f"writeable, it must be)"
        )


def address_of(array: Bytes) -> int:
    """The memory address of an array's first byte."""
    return int(array.__array_interface__["data"][0])


def listed_etag(etag: str | None) -> str:
    """The ETag of a listing as other answers spell it: some servers leave its quotes out there.

    Empty where there is none.
    """
    if not etag or etag.endswith('"'):
        return etag or ""
    return f'"{etag}"'
