"""Small objects of a store, read as one. Imports no torch: `streammega plot` reads records by it."""

from __future__ import annotations

from streammega.errors import ObjectChangedError
from streammega.storage import Store

READ_AGAIN = 3
"""Times that an object is read that changes between the look at its version and the read."""


def read_small(store: Store, key: str) -> bytes:
    """All of an object that fits into memory. Raises ObjectNotFoundError and other StorageErrors."""
    data, _ = read_version(store, key)
    return data


def read_version(store: Store, key: str) -> tuple[bytes, str]:
    """All of an object that fits into memory, and its ETag. Raises as `read_small` does."""
    for _ in range(READ_AGAIN):
        info = store.info(key)
        if info.size == 0:  # stores have no empty ranges
            return b"", info.etag
        try:
            (data,) = store.read(key, [(0, info.size)], info.etag)
            return bytes(data), info.etag
        except ObjectChangedError as error:
            changed = error
    raise changed
