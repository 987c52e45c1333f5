"""What was fetched, kept on a local disk for all processes and runs of a node.

`chunk_file`: one file, mapped, with checksums. `cache_folder`: how much of the disk is
taken, what is evicted, and what the command line shows. `page_cache`: reading through the pages of
an object, and a store that does so.
"""

from streammega.storage.cache.cache_folder import (
    Entry,
    PageCache,
    clear,
    damaged_pages,
    entries,
)
from streammega.storage.cache.chunk_file import PAGE_BYTES
from streammega.storage.cache.page_cache import CachedObject, CachedStore, open_cached

__all__ = [
    "PAGE_BYTES",
    "CachedObject",
    "CachedStore",
    "Entry",
    "PageCache",
    "clear",
    "damaged_pages",
    "entries",
    "open_cached",
]
