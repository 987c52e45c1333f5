"""The store protocol: what every backend can do, and nothing more."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Protocol, TypeGuard, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from streammega.errors import (
    AccessDeniedError,
    ConfigError,
    EndpointError,
    ObjectNotFoundError,
    ShortReadError,
    StorageError,
)
from streammega.kernels.plan import copy_bytes
from streammega.storage.etags import is_etag

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


class ObjectWriter(Protocol):
    """A file being written. Nothing shows under the final name before `commit` returns."""

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes. Raises StorageError."""

    def commit(self) -> None:
        """Publish everything written under the final name, at once. Raises StorageError."""

    def abort(self) -> None:
        """Throw away what was written; the final name keeps what it had. Never raises."""


class Store(Protocol):
    """Objects by key under one root (a bucket, a host, the local disk).

    Stores open their clients lazily and once per process, so they may cross a fork or be pickled.
    All methods may be called from several threads. Keys never start with a slash, except
    those of the local store, which are file paths.
    """

    def url(self, key: str) -> str:
        """The full URL of a key, for messages and cache keys; never with credentials."""

    def info(self, key: str) -> ObjectInfo:
        """Size and ETag. Raises ObjectNotFoundError, AccessDeniedError, EndpointError."""

    def read_ranges(
        self, key: str, starts: Sequence[int], stops: Sequence[int], etag: str = ""
    ) -> list[Buffer]:
        """Bytes [starts[i], stops[i]) for each i, fetched concurrently, in the order asked.

        Each buffer has exactly the bytes asked for, or ShortReadError is raised. `etag` is that of
        the object that was opened: ObjectChangedError if the object has another one now; empty:
        whatever is there is read.
        """

    def read_into(
        self, key: str, spans: Sequence[Span], outs: Sequence[Bytes], etag: str = ""
    ) -> None:
        """Fill each of `outs`, uint8 [stop - start], with the bytes [start, stop) of its span.

        One request each, and one try. Raises ObjectChangedError if `etag` is given and the object
        has another one now, ShortReadError for any other number of bytes than asked, EndpointError
        and so on; what `error.transient` says may be tried again. Several spans fail together.
        """

    def list(self, prefix: str, recursive: bool = True) -> list[ObjectInfo]:
        """All objects whose key starts with `prefix`, sorted by key.

        Not `recursive`: only those with no slash after it. Where the store's listings tell no ETag,
        theirs is empty.
        """

    def open_writer(self, key: str) -> ObjectWriter:
        """A writer that streams (multipart where the backend has it)."""

    def delete(self, key: str) -> None:
        """Remove an object; one that is not there is no error."""


class BodyStore(Protocol):
    """A store whose answers come in memory of their own, which may be kept as it is."""

    def read_bodies(self, key: str, spans: Sequence[Span], etag: str = "") -> list[Bytes]:
        """The bytes [start, stop) of each span, as `Store.read_into` reads them, in the memory that
        they came in: uint8 [stop - start], read-only perhaps, at any address.
        """


def gives_bodies(store: object) -> TypeGuard[BodyStore]:
    """Whether a store is a `BodyStore`, without the cost of `isinstance` with a protocol."""
    return hasattr(store, "read_bodies")


Part = tuple[ObjectInfo, int, int]
"""Bytes [start, stop) of an object."""


class ReadsParts(Protocol):
    """A store that reads small parts of many objects for little more than their requests."""

    def read_parts(self, parts: Sequence[Part], at_once: int) -> list[Buffer]:
        """Parts of objects of the version that is told, by at most so many requests at once, each
        tried again by itself. Raises as `Store.read_ranges` does.
        """


def reads_parts(store: object) -> TypeGuard[ReadsParts]:
    """Whether a store is a `ReadsParts`."""
    return hasattr(store, "read_parts")


class PlacedWriter(ObjectWriter, Protocol):
    """A writer whose bytes may also be put in their places by several threads."""

    def reserve(self, size: int) -> int:
        """Room for `size` bytes behind those that were written. Returns where it begins.

        All of it is to be written before `commit`.
        """

    def write_at(self, offset: int, data: Bytes) -> None:
        """Put bytes into room that was reserved. Raises StorageError."""

    def write_back(self, start: int, stop: int) -> None:
        """Have the disk begin with bytes [start, stop), which are written."""


def gives_places(writer: object) -> TypeGuard[PlacedWriter]:
    """Whether a writer is a `PlacedWriter`."""
    return hasattr(writer, "write_at")


@contextmanager
def written_whole(store: Store, key: str) -> Iterator[ObjectWriter]:
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


@runtime_checkable
class ExclusiveStore(Protocol):
    """A store that can write an object on the condition that none is there, in one request."""

    def create(self, key: str, data: bytes) -> bool:
        """Write a small object; False if one is there.

        Raises StorageError, also where the server knows no conditions.
        """


@runtime_checkable
class ReplacingStore(Protocol):
    """A store that can write an object on the condition that nobody wrote it meanwhile."""

    def replace(self, key: str, data: bytes, etag: str) -> bool:
        """Write a small object in place of that with this ETag; False if another is there, or none.

        Raises StorageError, also where the server knows no conditions.
        """


@runtime_checkable
class ListsBetween(Protocol):
    """A store that can list what lies between two keys, whatever else it holds."""

    def info(self, key: str) -> ObjectInfo:
        """As of `Store`."""

    def list_between(self, after: str, until: str, most: int) -> list[ObjectInfo] | None:
        """Objects with after < key < until, sorted by key; None where store or server tell none so,
        now or at all.

        Raises NotListedBetween for what is there, StorageError for what may pass when it is tried
        again.
        """


class NotListedBetween(Exception):
    """What lies between two keys is more than was asked for, or cannot be told from markers of
    folders, or the server began elsewhere: the same listing would end so again.
    """


class ConditionsUnknown(Exception):
    """Store or server know no conditional writes; the text says which, and how that was told."""


def create_on_condition(store: Store, key: str, data: bytes) -> bool:
    """Write a small object on the condition that none is there.

    False if one is, which may be this very one after a lost answer. Raises ConditionsUnknown,
    StorageError.
    """
    if not isinstance(store, ExclusiveStore):
        raise ConditionsUnknown("its driver has no conditional writes")
    with _conditions_known():
        return store.create(key, data)


@contextmanager
def _conditions_known() -> Iterator[None]:
    """Raises ConditionsUnknown for an error of a conditional write that says so."""
    try:
        yield
    except (AccessDeniedError, ObjectNotFoundError):
        raise
    except StorageError as error:
        if error.transient:
            raise
        # Anything else that lasts: the server knows no conditions.
        raise ConditionsUnknown(str(error)) from None


def create_object(store: Store, key: str, data: bytes) -> bool:
    """Write a small object where none is.

    False if one is there, which may be this very one after a lost answer. Of several that do so at
    once one succeeds, where store and server know conditional writes. Else it is a look and a
    write: between both others may write as well, and the last of them stays. Raises StorageError.
    """
    with suppress(ConditionsUnknown):
        return create_on_condition(store, key, data)
    try:
        store.info(key)
    except ObjectNotFoundError:
        pass
    else:
        return False
    with written_whole(store, key) as writer:
        writer.write(data)
    return True


def replace_object(store: Store, key: str, data: bytes, etag: str) -> bool:
    """Write a small object in place of that with this ETag.

    False if another one, or none, is there by now, which may be this very one after a lost answer.
    Where store or server know no such condition, or told a time instead of an ETag, it is written
    whatever is there. Raises StorageError.
    """
    if isinstance(store, ReplacingStore) and is_etag(etag):
        with suppress(ConditionsUnknown), _conditions_known():
            return store.replace(key, data, etag)
    with written_whole(store, key) as writer:
        writer.write(data)
    return True


def check_object_key(url: str, key: str) -> None:
    """Raise ConfigError for a key that ends in a slash.

    Clients leave the slash out of some requests and send it with others.
    """
    if key.endswith("/"):
        raise ConfigError(
            f"{url}: what ends in a slash is a folder and no object; leave the slash out if it is "
            f"one"
        )


def checked(url: str, start: int, stop: int, data: Buffer) -> Buffer:
    """`data` if it holds stop - start bytes; else ShortReadError that names the object."""
    if len(data) != stop - start:
        raise wrong_length(url, start, stop, len(data))
    return data


def wrong_length(url: str, start: int, stop: int, got: int) -> ShortReadError:
    """For a body of another length than was asked for."""
    return ShortReadError(
        f"{url}: wanted bytes [{start}, {stop}), got {got} bytes; the object is shorter than its "
        f"index says, or changed while it was read: compare its size with the .idx, or convert it "
        f"again"
    )


def ended_early(url: str, reason: str) -> ShortReadError:
    """For a range outside of the object: trying again does not help."""
    error = ShortReadError(
        f"{url}: the object ends before the bytes that were asked for; is it truncated? ({reason})"
    )
    error.transient = False
    return error


def throttled(url: str, reason: str) -> EndpointError:
    """For an endpoint that asks for fewer requests."""
    error = EndpointError(
        f"{url}: the endpoint is overloaded or limits requests; lower max_requests if this goes on "
        f"({reason})"
    )
    error.throttled = True
    return error


def fill(url: str, spans: Sequence[Span], bodies: Sequence[Buffer], outs: Sequence[Bytes]) -> None:
    """Copy bodies that came whole, in one call without the GIL.

    Raises ShortReadError for a body of another length than its span, and ValueError for a place in
    `outs` of another one.
    """
    sources = []
    for (start, stop), body in zip(spans, bodies, strict=True):
        sources.append(np.frombuffer(checked(url, start, stop, body), np.uint8))
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
    """Where an array lies."""
    return int(array.__array_interface__["data"][0])


def listed_etag(etag: str | None) -> str:
    """The ETag of a listing as other answers spell it: some servers leave its quotes out there.

    Empty where there is none.
    """
    if not etag or etag.endswith('"'):
        return etag or ""
    return f'"{etag}"'
