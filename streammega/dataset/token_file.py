"""The two objects of a shard, its tokens and its `.idx`: looked up once, compared with each other
and with the manifest.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from streammega.config import StorageConfig, local_folder
from streammega.dataset.idx import (
    HEADER_BYTES,
    IndexArrays,
    IndexHeader,
    check_index,
    check_whole_end,
    parse_header,
    parse_index,
)
from streammega.dataset.node_cache import cached_copy, default_cache_dir, local_view
from streammega.dataset.shards import SUFFIXES, KnownShard, split_name
from streammega.dataset.tar import layout, stored_bytes
from streammega.errors import FormatError, ObjectNotFoundError
from streammega.storage import ObjectInfo, Store, open_store
from streammega.storage.backends.local import LocalStore
from streammega.storage.views import DerivedStore, Frames, LateView, Members, read_frames

Shown = TypeVar("Shown", Frames, Members)


class ShardFiles:
    """Both objects of one shard. Nothing is asked of the storage before it is needed, and nothing
    that is known already.

    Args:
        shard: its name, and what a listing and a manifest told of it.
        cache_dir: where copies of `.idx` files go; None: `default_cache_dir()`.

    What is looked up is compared with the manifest at once: FormatError where they differ.
    """

    def __init__(
        self, shard: KnownShard, storage: StorageConfig, cache_dir: str | Path | None = None
    ) -> None:
        self.shard = shard
        self.storage = storage
        self.cache_dir = local_folder(cache_dir) if cache_dir else default_cache_dir()
        self.prefix, self.kind = split_name(shard.name)
        self.store, self.key = open_store(self.prefix + SUFFIXES[self.kind], storage)
        self.index_store, self.index_key = open_store(f"{self.prefix}.idx", storage)
        # Not cached_property: before Python 3.12 it holds one lock for all shards, and they would
        # be looked up one by one.
        self._stored: ObjectInfo | None = None
        self._index: ObjectInfo | None = None
        self._header: IndexHeader | None = None

    @property
    def url(self) -> str:
        """Of the tokens, for messages."""
        return self.store.url(self.key)

    @property
    def index_url(self) -> str:
        """Of the `.idx`, for messages."""
        return self.index_store.url(self.index_key)

    @property
    def stored(self) -> ObjectInfo:
        """The object that holds the tokens, as it is stored.

        Raises ObjectNotFoundError, FormatError, StorageError.
        """
        if self._stored is None:
            known = self.shard.stored
            found = self.store.info(self.key) if known is None else replace(known, key=self.key)
            if self.shard.entry is not None:
                self._compare(self.url, "bytes", found.size, self.shard.entry.bytes)
            self._stored = found
        return self._stored

    @property
    def index(self) -> ObjectInfo:
        """The `.idx`. Raises ObjectNotFoundError, FormatError, StorageError."""
        if self._index is None:
            known = self.shard.index
            found = self._find_index() if known is None else replace(known, key=self.index_key)
            if self.shard.entry is not None:
                self._compare(self.index_url, "bytes", found.size, self.shard.entry.index_bytes)
            self._index = found
        return self._index

    def _find_index(self) -> ObjectInfo:
        try:
            return self.index_store.info(self.index_key)
        except ObjectNotFoundError:
            raise ObjectNotFoundError(
                f"{self.index_url}: no such .idx beside {self.url}; was its conversion interrupted? convert again"
            ) from None

    @property
    def header(self) -> IndexHeader:
        """What the `.idx` begins with: one small read. Raises FormatError, StorageError."""
        if self._header is None:
            info = self.index
            head = self.index_store.read_ranges(
                self.index_key, [0], [min(HEADER_BYTES, info.size)], info.etag
            )[0]
            header = parse_header(head, info.size, self.index_url)
            self._compare_counts(header.dtype, header.sequence_count, header.document_count - 1)
            self._header = header
        return self._header

    def arrays(self) -> IndexArrays:
        """The whole `.idx`, mapped: of a remote one, this node's copy.

        Raises CacheError, FormatError, StorageError.
        """
        store = self.index_store
        if isinstance(store, LocalStore):
            data = store.view(self.index_key, self.index.etag)
        else:
            listed = self.shard.index is not None
            if not (listed and cached_copy(store, self.index, self.cache_dir).exists()):
                _ = self.header  # before a large foreign file is downloaded
            data = local_view(store, self.index, self.cache_dir, self.storage.part_bytes)
        arrays = parse_index(data, self.index_url)
        self._compare_counts(
            arrays.dtype, len(arrays.sequence_lengths), len(arrays.document_indices) - 1
        )
        return arrays

    def checked_arrays(self, token_bytes: int) -> IndexArrays:
        """The whole `.idx`, every sequence of which lies within `token_bytes`, and the last one
        ends there.
        """
        arrays = self.arrays()
        end = check_index(arrays, token_bytes, self.index_url, self.url)
        check_whole_end(arrays, end, token_bytes, self.index_url, self.url)
        return arrays

    def read_end(self) -> int:
        """One past the last byte of the last sequence, as the `.idx` has it: two reads, of 4 and 8
        bytes. Raises FormatError.
        """
        last = self.header.sequence_count - 1
        if last < 0:
            return 0
        length_at = self.header.lengths_at + 4 * last
        offset_at = self.header.offsets_at + 8 * last
        found = self.index_store.read_ranges(
            self.index_key, [length_at, offset_at], [length_at + 4, offset_at + 8], self.index.etag
        )
        length, offset = (int.from_bytes(raw, "little", signed=True) for raw in found)
        if length < 0 or offset < 0:
            raise FormatError(
                f"{self.index_url}: its last sequence lies at byte {offset} and has {length} tokens; rebuild the .idx"
            )
        return offset + length * self.header.dtype.itemsize

    def tokens(self) -> tuple[Store, ObjectInfo]:
        """The store that shows the tokens as one little-endian array, whatever the kind, and how
        large that is.

        Where a manifest tells the size of a remote shard, tables of frames and members are read
        with the first tokens. Raises FormatError, StorageError.
        """
        if self.kind == "bin":
            return self.store, self.stored
        make = self._frames if self.kind == "zst" else self._members
        entry = self.shard.entry
        local = isinstance(self.store, LocalStore)
        view = make() if entry is None or local else LateView(entry.token_bytes, make)
        store = DerivedStore(self.store, self.stored, view)
        return store, store.info(self.key)

    def _frames(self) -> Frames:
        return self._sized(read_frames(self.store, self.stored))

    def _members(self) -> Members:
        arrays = self.arrays()
        # where members lie follows from them
        if len(arrays.sequence_lengths) and int(arrays.sequence_lengths.min()) < 0:
            bad = int(np.argmax(arrays.sequence_lengths < 0))
            raise FormatError(
                f"{self.index_url}: sequence {bad} has the negative length {arrays.sequence_lengths[bad]}; rebuild the .idx"
            )
        lengths = arrays.sequence_lengths
        width = arrays.dtype.itemsize
        multimodal = arrays.sequence_modes is not None
        expected = stored_bytes(lengths, width, multimodal)
        if self.stored.size != expected:
            raise FormatError(
                f"{self.url}: has {self.stored.size} bytes, its .idx speaks of {expected}; it is cut short, or was not written "
                f"by this library (convert reads tars of any kind)"
            )
        return self._sized(layout(lengths, width, multimodal))

    def _sized(self, view: Shown) -> Shown:
        if self.shard.entry is not None:
            self._compare(self.url, "bytes of tokens", view.size, self.shard.entry.token_bytes)
        return view

    def _compare_counts(self, dtype: np.dtype[Any], sequences: int, documents: int) -> None:
        if entry := self.shard.entry:
            self._compare(self.index_url, "as dtype", dtype, entry.dtype)
            self._compare(self.index_url, "sequences", sequences, entry.sequences)
            self._compare(self.index_url, "documents", documents, entry.documents)

    def _compare(self, url: str, what: str, found: object, expected: object) -> None:
        if found != expected:
            raise FormatError(
                f"{url}: has {found} {what}, its manifest says {expected}; it is cut short, or another dataset's: copy or "
                f"convert it again (where the manifest is the stale one, remove that)"
            )


def open_tokens(
    name: str, storage: StorageConfig, index_cache_dir: Path | None = None
) -> tuple[Store, str]:
    """The store and key from which a shard's tokens are read as one little-endian array, whatever
    its kind.

    Raises FormatError, StorageError.
    """
    files = ShardFiles(KnownShard(name=name), storage, index_cache_dir)
    if files.kind == "bin":
        return files.store, files.key
    return files.tokens()[0], files.key
