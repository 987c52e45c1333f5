"""What users of Megatron's IndexedDataset find here under the names they know."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streammega.config import MiB, StorageConfig
from streammega.dataset.idx import IndexArrays
from streammega.dataset.shard import SUFFIXES, split_name
from streammega.errors import ConfigError, ObjectNotFoundError
from streammega.storage import open_store


@dataclass(frozen=True, kw_only=True)
class Opening:
    """How a dataset is opened. multimodal: None where the file decides."""

    storage: StorageConfig
    index_cache_dir: str | Path | None
    multimodal: bool | None


def opening_of(
    multimodal: bool | StorageConfig | None,
    mmap: bool | str | Path | None,
    object_storage_config: Any,
    storage: StorageConfig | None,
    index_cache_dir: str | Path | None,
) -> Opening:
    """What the arguments of Megatron's constructor and of ours mean together.

    Raises ConfigError for what cannot work.
    """
    if isinstance(multimodal, StorageConfig):  # IndexedDataset(prefix, storage, index_cache_dir)
        storage = multimodal
        multimodal = None
    if isinstance(mmap, (str, Path)):
        index_cache_dir = mmap
        mmap = None
    storage = storage or StorageConfig()
    if mmap is not None:
        storage = replace(storage, local="mmap" if mmap else "pread")
    if object_storage_config is not None:
        folder = getattr(object_storage_config, "path_to_idx_cache", None)
        chunk_bytes = getattr(object_storage_config, "bin_chunk_nbytes", MiB)
        if not folder or not chunk_bytes > 0:
            raise ConfigError(
                "object_storage_config needs path_to_idx_cache, a folder, and a bin_chunk_nbytes "
                "above zero"
            )
        # Megatron reads the tokens in blocks of that size; here just what is asked for is read, and
        # only a cache has blocks.
        storage = replace(storage, chunk_bytes=max(MiB, int(chunk_bytes)))
        index_cache_dir = index_cache_dir or folder
    return Opening(storage=storage, index_cache_dir=index_cache_dir, multimodal=multimodal)


class IndexView:
    """The arrays of an `.idx` under Megatron's names; `view[i]` is (byte of the `.bin`, length,
    mode or None) of sequence i.
    """

    def __init__(self, arrays: IndexArrays, modes: NDArray[np.int8] | None) -> None:
        self.sequence_lengths = arrays.sequence_lengths
        self.sequence_pointers = arrays.sequence_offsets
        self.document_indices = arrays.document_indices
        self.sequence_modes = modes
        self.dtype = arrays.dtype.type
        self.dtype_size = arrays.dtype.itemsize
        self.sequence_count = len(arrays.sequence_lengths)
        self.document_count = len(arrays.document_indices)

    def __len__(self) -> int:
        return self.sequence_count

    def __getitem__(self, index: int) -> tuple[np.int64, np.int32, np.int8 | None]:
        mode = self.sequence_modes[index] if self.sequence_modes is not None else None
        return self.sequence_pointers[index], self.sequence_lengths[index], mode


def pair_exists(path_prefix: str, storage: StorageConfig | None = None) -> bool:
    """Whether a shard's tokens and its `.idx` are there.

    Raises AccessDeniedError, EndpointError where that cannot be told.
    """
    prefix, kind = split_name(str(path_prefix))
    try:
        for url in (f"{prefix}.idx", prefix + SUFFIXES[kind]):
            store, key = open_store(url, storage or StorageConfig())
            store.info(key)
    except ObjectNotFoundError:
        return False
    return True
