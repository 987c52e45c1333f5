"""The page cache on local disk: what the rest of the library, and others, use of `storage.cache`."""

from streammega.storage.cache.inspect import Entry, clear, damaged_pages, entries, recount
from streammega.storage.cache.layout import PAGE_BYTES
from streammega.storage.cache.pages import CachedObject, PageCache

__all__ = ["PAGE_BYTES", "CachedObject", "Entry", "PageCache", "clear", "damaged_pages", "entries", "recount"]
