"""The `.bin/.idx` pair: format, reader, writer, and the local cache of indices."""

from streammega.dataset.idx import smallest_dtype
from streammega.dataset.indexed import IndexedDataset
from streammega.dataset.local_cache import cached_arrays, default_cache_dir
from streammega.dataset.writer import IndexedDatasetWriter

__all__ = [
    "IndexedDataset",
    "IndexedDatasetWriter",
    "cached_arrays",
    "default_cache_dir",
    "smallest_dtype",
]
