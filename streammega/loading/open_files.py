"""The files of one reader, opened: behind the page cache, as a table for the planner and its kernels,
and local ones where they are mapped.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streammega.config import StorageConfig
from streammega.loading.spans import FileTable
from streammega.loading.steps import MicroSteps
from streammega.samples.token_file import TokenFile
from streammega.storage.cache import PAGE_BYTES, PageCache
from streammega.storage.cache.chunk_file import whole_pages
from streammega.storage.cache.store import CachedStore
from streammega.storage.etags import tell_unversioned
from streammega.storage.store import address_of


def table_of(files: list[TokenFile], steps: MicroSteps) -> FileTable:
    """What the planner and its kernels have to know of the files."""
    of_cache = [_addresses_of_cache(file) for file in files]
    verified_at = [verified for verified, _ in of_cache]
    mapped_at = [mapped for _, mapped in of_cache]
    itemsizes = [file.dtype.itemsize for file in files]
    num_tokens = [file.num_tokens for file in files]
    is_local = [file.store.local_path(file.key) is not None for file in files]
    files_of_dataset = [len(files) for files in steps.samples.files]
    return FileTable(
        firsts=np.cumsum([0, *files_of_dataset]),
        itemsize=np.array(itemsizes, np.int64),
        num_tokens=np.array(num_tokens, np.int64),
        local=np.array(is_local, np.bool_),
        names=[file.url for file in files],
        verified_at=np.array(verified_at, np.int64),
        mapped_at=np.array(mapped_at, np.int64),
        page_bytes=PAGE_BYTES,
        chunk_bytes=whole_pages(steps.config.storage.chunk_bytes),
    )


def _addresses_of_cache(file: TokenFile) -> tuple[int, int]:
    """Where the states of a file's cached pages and the addresses of its chunks lie; (0, 0) for one
    that is not cached.
    """
    if not isinstance(file.store, CachedStore):
        return 0, 0
    cached = file.store.cached
    return address_of(cached.verified), address_of(cached.address.view(np.uint8))


def through_cache(files: list[TokenFile], storage: StorageConfig) -> list[TokenFile]:
    """Remote files behind the page cache, where the config has one."""
    if storage.cache_dir is None:
        return files
    cache = PageCache(storage.cache_dir, storage.cache_bytes, storage.chunk_bytes, storage.timeout)
    return [_cached(file, cache) for file in files]


def _cached(file: TokenFile, cache: PageCache) -> TokenFile:
    """A file behind the cache; as it is where it is local, empty, or finds no room."""
    size = file.num_tokens * file.dtype.itemsize
    if size == 0 or file.store.is_local:
        return file
    if not file.etag:  # old pages could not be told from new ones
        tell_unversioned(file.url)
        return file
    cached = cache.open(file.url, file.etag, size)
    return replace(file, store=CachedStore(file.store, cached)) if cached else file


def local_addresses(files: list[TokenFile], local: NDArray[np.bool_]) -> list[tuple[int, Any]]:
    """(address, what keeps it mapped) of each local file; (0, None) for the others.

    Kernels believe addresses, so what is mapped is what was opened, or ObjectChangedError.
    """
    mapped = []
    for file, is_mapped in zip(files, local.tolist(), strict=True):
        content = _map(file) if is_mapped else None
        mapped.append((0, None) if content is None else (address_of(content), content))
    return mapped


def _map(file: TokenFile) -> NDArray[np.uint8] | None:
    """The bytes of a local file; None of one that is empty, which cannot be mapped."""
    view = file.store.view(file.key, file.etag)
    if len(view) == 0 and file.num_tokens == 0:
        return None
    content = np.frombuffer(view, np.uint8)
    file.check_bytes(len(content))
    return content
