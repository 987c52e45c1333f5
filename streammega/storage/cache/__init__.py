"""What was fetched, kept on a local disk for all processes and runs of a node.

`layout`: the files of a cache folder. `room`: how much is taken, and what makes way. `presence`:
which objects a process uses, and which pages it fetches; `claims`: the right to do so. `chunk`: one
file, mapped. `cached_object`: reading through the pages of an object. `folder`: what all of them
share. `pages`: opening them. `inspect`: what the command line shows.
"""

from streammega.storage.cache.cached_object import CachedObject
from streammega.storage.cache.inspect import Entry, clear, damaged_pages, entries, recount
from streammega.storage.cache.layout import PAGE_BYTES
from streammega.storage.cache.pages import PageCache

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
