"""URLs to bytes: one interface, four backends (local mmap, obstore, fsspec, oss2)."""

from streammega.storage.open import join_url, open_store, parent_url, save_bytes
from streammega.storage.store import Buffer, ObjectInfo, ObjectWriter, Store

__all__ = [
    "Buffer",
    "ObjectInfo",
    "ObjectWriter",
    "Store",
    "join_url",
    "open_store",
    "parent_url",
    "save_bytes",
]
