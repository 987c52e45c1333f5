"""What the stream order needs of a pair, without reading its index: the header, and the pointers at a split's bounds."""

from __future__ import annotations

import glob
import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from streammega.config import StorageConfig
from streammega.errors import FormatError, ObjectNotFoundError
from streammega.index.format import HEADER_BYTES, IndexHeader, parse_header
from streammega.index.reader import strip_suffix
from streammega.storage import ObjectInfo, Store, join_url, open_store, parent_url
from streammega.storage.urls import is_remote


@dataclass(frozen=True, kw_only=True)
class PairBounds:
    """A pair of which only the header was read; `token_at` reads one pointer more."""

    prefix: str
    store: Store
    bin_info: ObjectInfo
    index_store: Store
    index_key: str
    header: IndexHeader

    @property
    def dtype(self) -> np.dtype[Any]:
        """The stored token dtype, little-endian."""
        return self.header.dtype.newbyteorder("<")

    @property
    def num_tokens(self) -> int:
        """Tokens in the whole `.bin`."""
        return self.bin_info.size // self.header.dtype.itemsize

    def token_at(self, sequence: int) -> int:
        """The token of the `.bin` at which a sequence starts; past the last sequence, all of them."""
        if sequence >= self.header.sequence_count:
            return self.num_tokens
        at = self.header.offsets_at + 8 * sequence
        raw = self.index_store.read_ranges(self.index_key, [at], [at + 8])[0] if sequence else b"\0" * 8
        offset = int.from_bytes(raw, "little", signed=True)
        size = self.header.dtype.itemsize
        if not 0 <= offset <= self.bin_info.size or offset % size:
            raise FormatError(
                f"{self.prefix}.idx: sequence {sequence} starts at byte {offset} of {self.bin_info.size}; rebuild the .idx"
            )
        return offset // size


def read_bounds(prefix: str, storage: StorageConfig) -> PairBounds:
    """Open a pair by its header alone: three requests. Raises ObjectNotFoundError, FormatError, StorageError."""
    prefix = strip_suffix(prefix)
    store, bin_key = open_store(f"{prefix}.bin", storage)
    index_store, index_key = open_store(f"{prefix}.idx", storage)
    info = index_store.info(index_key)
    if info.size < HEADER_BYTES:
        raise FormatError(f"{prefix}.idx: {info.size} bytes are fewer than an .idx header has; convert again")
    header = parse_header(index_store.read_ranges(index_key, [0], [HEADER_BYTES])[0], info.size, f"{prefix}.idx")
    return PairBounds(
        prefix=prefix,
        store=store,
        bin_info=store.info(bin_key),
        index_store=index_store,
        index_key=index_key,
        header=header,
    )


def find_pairs(name: str, storage: StorageConfig) -> list[str]:
    """The prefixes a dataset's name stands for: itself, or all pairs of a folder (a name ending in /) or glob, in name order.

    Raises ObjectNotFoundError for a folder or glob without pairs.
    """
    if not is_remote(name) and (os.path.isdir(name) or any(sign in name for sign in "*?[")):
        pattern = os.path.join(name, "*") if os.path.isdir(name) else name
        found = sorted({strip_suffix(path) for path in glob.glob(pattern) if path.endswith(".idx")})
        found = found or sorted(strip_suffix(path) for path in glob.glob(f"{pattern}.idx"))
    elif name.endswith("/") or "*" in name.rpartition("/")[2]:
        found = _remote_pairs(name, storage)
    else:
        return [strip_suffix(name)]
    if not found:
        raise ObjectNotFoundError(f"{name}: holds no pair of .bin and .idx; check the path")
    return found


def _remote_pairs(name: str, storage: StorageConfig) -> list[str]:
    import fnmatch

    folder, pattern = (name.rstrip("/"), "*") if name.endswith("/") else (parent_url(name), name.rpartition("/")[2])
    store, key = open_store(f"{folder}/", storage)
    names = [item.key.rpartition("/")[2] for item in store.list(key) if "/" not in item.key.lstrip("/")[len(key.lstrip("/")) :]]
    stems = sorted(strip_suffix(item) for item in names if item.endswith(".idx"))
    return [join_url(folder, stem) for stem in stems if fnmatch.fnmatch(stem, pattern) or fnmatch.fnmatch(f"{stem}.idx", pattern)]
