"""What was fetched, kept on a local disk for all processes and runs of a node.

`chunk_file`: one file, mapped, with checksums and locks. `cache_folder`: how much of the disk is
taken, and what is evicted. `page_cache`: reading through the pages of an object. `store`: a store
that does so. `inspect`: what the command line shows.
"""

from streammega.storage.cache.chunk_file import PAGE_BYTES
from streammega.storage.cache.inspect import Entry, clear, damaged_pages, entries, recount
from streammega.storage.cache.page_cache import CachedObject, PageCache

__all__ = [
    "PAGE_BYTES",
    "CachedObject",
    "Entry",
    "PageCache",
    "clear",
    "damaged_pages",
    "entries",
    "recount",
]
