"""The store protocol: what every backend can do, and nothing more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from streammega.errors import ShortReadError

Buffer = memoryview


@dataclass(frozen=True, kw_only=True)
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

    def read_ranges(self, key: str, starts: Sequence[int], stops: Sequence[int]) -> list[Buffer]:
        """Bytes [starts[i], stops[i]) for each i, fetched concurrently, in the order asked.

        Each buffer has exactly the bytes asked for, or ShortReadError is raised.
        """

    def list(self, prefix: str) -> list[ObjectInfo]:
        """All objects whose key starts with `prefix`, sorted by key."""

    def open_writer(self, key: str) -> ObjectWriter:
        """A writer that streams (multipart where the backend has it)."""

    def delete(self, key: str) -> None:
        """Remove an object; one that is not there is no error."""


def checked(url: str, start: int, stop: int, data: Buffer) -> Buffer:
    """`data` if it holds stop - start bytes; else ShortReadError that names the object."""
    if len(data) != stop - start:
        raise ShortReadError(
            f"{url}: wanted bytes [{start}, {stop}), got {len(data)} bytes; the object is shorter than its "
            f"index says, or changed while it was read: compare its size with the .idx, or convert it again"
        )
    return data
