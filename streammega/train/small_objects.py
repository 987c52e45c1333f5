"""Small objects of a store, read as one. Imports no torch: `streammega plot` reads records by it."""

from __future__ import annotations

from streammega.storage import Store


def read_small(store: Store, key: str) -> bytes:
    """All of an object that fits into memory. Raises ObjectNotFoundError and other StorageErrors."""
    size = store.info(key).size
    if size == 0:  # stores have no empty ranges
        return b""
    (data,) = store.read_ranges(key, [0], [size])
    return bytes(data)
