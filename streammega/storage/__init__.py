"""URLs to bytes: one protocol, four backends (local mmap, obstore, fsspec, oss2)."""

from streammega.storage.base import Buffer, ObjectInfo, ObjectWriter, Store
from streammega.storage.urls import join_url, open_store, parent_url

__all__ = ["Buffer", "ObjectInfo", "ObjectWriter", "Store", "join_url", "open_store", "parent_url"]
