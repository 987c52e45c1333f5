"""What the stream order needs of a pair, without reading its index: the header, and the pointers at a split's bounds."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from streammega.config import StorageConfig
from streammega.errors import FormatError
from streammega.index.find import open_shards
from streammega.index.format import HEADER_BYTES, IndexHeader, check_end, parse_header
from streammega.index.shards import open_tokens, strip_suffix
from streammega.storage import ObjectInfo, Store, open_store

OPENERS = 32
"""Shards of a dataset that are opened at once."""


@dataclass(frozen=True, kw_only=True)
class PairBounds:
    """A pair of which only the header was read; `token_at` reads one pointer more."""

    prefix: str
    store: Store
    bin_info: ObjectInfo
    index_store: Store
    index_key: str
    index_etag: str
    header: IndexHeader

    @property
    def dtype(self) -> np.dtype[Any]:
        """The stored token dtype, little-endian."""
        return self.header.dtype.newbyteorder("<")

    @property
    def num_tokens(self) -> int:
        """Tokens in the whole `.bin`."""
        return self.bin_info.size // self.header.dtype.itemsize

    def read_end(self) -> int:
        """One past the last byte of the last sequence, as the `.idx` has it: one read of 12 bytes. Raises FormatError."""
        last = self.header.sequence_count - 1
        if last < 0:
            return 0
        starts = [self.header.lengths_at + 4 * last, self.header.offsets_at + 8 * last]
        found = self.index_store.read_ranges(self.index_key, starts, [starts[0] + 4, starts[1] + 8], self.index_etag)
        length, offset = (int.from_bytes(raw, "little", signed=True) for raw in found)
        if length < 0 or offset < 0:
            raise FormatError(
                f"{self.index_store.url(self.index_key)}: its last sequence lies at byte {offset} and has {length} tokens; "
                f"rebuild the .idx"
            )
        return offset + length * self.header.dtype.itemsize

    def token_at(self, sequence: int) -> int:
        """The token of the `.bin` at which a sequence starts; past the last sequence, all of them."""
        if sequence >= self.header.sequence_count:
            return self.num_tokens
        at = self.header.offsets_at + 8 * sequence
        raw = self.index_store.read_ranges(self.index_key, [at], [at + 8], self.index_etag)[0] if sequence else b"\0" * 8
        offset = int.from_bytes(raw, "little", signed=True)
        size = self.header.dtype.itemsize
        if not 0 <= offset <= self.bin_info.size or offset % size:
            raise FormatError(
                f"{self.index_store.url(self.index_key)}: sequence {sequence} starts at byte {offset} of {self.bin_info.size}; "
                f"rebuild the .idx"
            )
        return offset // size


def read_bounds(name: str, storage: StorageConfig) -> PairBounds:
    """Open a shard by the header of its `.idx` and where its last sequence ends, which must be the end of the tokens.

    Raises ObjectNotFoundError, FormatError, StorageError.
    """
    store, bin_key = open_tokens(name, storage)
    prefix = strip_suffix(name)
    index_store, index_key = open_store(f"{prefix}.idx", storage)
    info = index_store.info(index_key)
    url = index_store.url(index_key)
    head = index_store.read_ranges(index_key, [0], [min(HEADER_BYTES, info.size)], info.etag)[0]
    bounds = PairBounds(
        prefix=prefix,
        store=store,
        bin_info=store.info(bin_key),
        index_store=index_store,
        index_key=index_key,
        index_etag=info.etag,
        header=parse_header(head, info.size, url),
    )
    check_end(bounds.read_end(), bounds.bin_info.size, url, store.url(bin_key))
    return bounds


def read_dataset(name: str, storage: StorageConfig) -> list[PairBounds]:
    """Open all shards of a dataset by their headers. Raises as read_bounds does."""

    def open_all(names: list[str]) -> list[PairBounds]:
        """Several at once: a few requests each."""
        with ThreadPoolExecutor(min(OPENERS, len(names))) as pool:
            return list(pool.map(lambda shard: read_bounds(shard, storage), names))

    return open_shards(name, storage, open_all)
