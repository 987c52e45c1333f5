"""The `.bin/.idx` pair: format, reader, writer, and the local cache of indices."""

from streammega.index.cache import cached_arrays, default_cache_dir
from streammega.index.format import smallest_dtype
from streammega.index.reader import IndexedDataset
from streammega.index.writer import IndexedDatasetWriter

__all__ = ["IndexedDataset", "IndexedDatasetWriter", "cached_arrays", "default_cache_dir", "smallest_dtype"]
