"""The two objects of a shard, its tokens and its `.idx`: looked up once, compared with each other
and with the manifest.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from streammega.config import StorageConfig
from streammega.dataset.index_file import IndexFile
from streammega.dataset.shards import SUFFIXES, KnownShard, check_told, keyed, split_name
from streammega.dataset.tar import layout, stored_bytes
from streammega.errors import FormatError
from streammega.storage import ObjectInfo, Store, open_store
from streammega.storage.backends.local import LocalStore
from streammega.storage.derived_stores import DerivedStore, LateView, Members
from streammega.storage.seekable_zstd import Frames, read_frames

Shown = TypeVar("Shown", Frames, Members)


class ShardFiles:
    """Both objects of one shard: `index`, its `.idx`, and the tokens. Nothing is asked of the
    storage before it is needed, and nothing that is known already.

    Args:
        shard: its name, and what a listing and a manifest told of it.
        cache_dir: where copies of `.idx` files go; None: `default_cache_dir()`.
        opened: the store that serves the tokens, and their key there, where they are known.

    What is looked up is compared with the manifest at once: FormatError where they differ.
    """

    def __init__(
        self,
        shard: KnownShard,
        storage: StorageConfig,
        cache_dir: str | Path | None = None,
        opened: tuple[Store, str] | None = None,
    ) -> None:
        self.shard = shard
        self.storage = storage
        self.prefix, self.kind = split_name(shard.name)
        self.store, self.key = opened or open_store(self.prefix + SUFFIXES[self.kind], storage)
        suffix = SUFFIXES[self.kind]
        index_key = f"{self.key.removesuffix(suffix)}.idx"
        self.index = IndexFile(shard, storage, cache_dir, (self.store, index_key))
        # Not cached_property: before Python 3.12 it holds one lock for all shards, and they would
        # be looked up one by one.
        self._stored: ObjectInfo | None = None
        self.ends: int | None = None
        """A digest of its first and last tokens, where `read_ends` took it."""

    @property
    def url(self) -> str:
        """Of the tokens, for messages."""
        return self.store.url(self.key)

    @property
    def stored(self) -> ObjectInfo:
        """The object that holds the tokens, as it is stored.

        Raises ObjectNotFoundError, FormatError, StorageError.
        """
        if self._stored is None:
            listed = self.shard.stored
            entry = self.shard.entry
            info = self.store.info(self.key) if listed is None else keyed(listed, self.key)
            # Compared first: the URL of each of thousands of shards would be made for nothing.
            if entry is not None and info.size != entry.bytes:
                check_told(self.url, "bytes", info.size, entry.bytes)
            self._stored = info
        return self._stored

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
        is_local = isinstance(self.store, LocalStore)
        # Reading the table costs requests: put off where the size is known without it.
        view = make() if entry is None or is_local else LateView(entry.token_bytes, make)
        store = DerivedStore(self.store, self.stored, view)
        return store, store.info(self.key)

    def _frames(self) -> Frames:
        return self._sized(read_frames(self.store, self.stored))

    def _members(self) -> Members:
        arrays = self.index.arrays()
        lengths = arrays.sequence_lengths
        # Where members lie is computed from the lengths, and a negative one would lead anywhere.
        if len(lengths) and int(lengths.min()) < 0:
            bad = int(np.argmax(lengths < 0))
            raise FormatError(
                f"{self.index.url}: sequence {bad} has the negative length {lengths[bad]}; "
                "rebuild the .idx"
            )
        itemsize = arrays.dtype.itemsize
        multimodal = arrays.sequence_modes is not None
        expected = stored_bytes(lengths, itemsize, multimodal)
        if self.stored.size != expected:
            raise FormatError(
                f"{self.url}: has {self.stored.size} bytes, its .idx speaks of {expected}; it is "
                "cut short, or was not written by this library (convert reads tars of any kind)"
            )
        return self._sized(layout(lengths, itemsize, multimodal))

    def _sized(self, view: Shown) -> Shown:
        """The view itself, whose size is what the manifest says."""
        entry = self.shard.entry
        if entry is not None:
            check_told(self.url, "bytes of tokens", view.size, entry.token_bytes)
        return view


def files_of(
    shards: Sequence[KnownShard], storage: StorageConfig, cache_dir: str | Path | None = None
) -> list[ShardFiles]:
    """Both objects of each shard of a dataset.

    The store of those that a listing told of is looked up once: it takes as long as all else of a
    shard, of which there may be thousands.
    """
    files: list[ShardFiles] = []
    for shard in shards:
        opened = _opened_with(files[0], shard) if files else None
        files.append(ShardFiles(shard, storage, cache_dir, opened))
    return files


def _opened_with(first: ShardFiles, shard: KnownShard) -> tuple[Store, str] | None:
    """The store of a shard and its key there, if they are those of the first one's store and of
    what a listing told; None: to be looked up.
    """
    listed = shard.stored
    if listed is None:
        return None
    first_url = first.prefix + SUFFIXES[first.kind]
    root = first_url.removesuffix(first.key)
    prefix, kind = split_name(shard.name)
    # A name may be spelt in other ways than its key, and then means what looking it up says.
    is_spelt_so = root != first_url and prefix + SUFFIXES[kind] == root + listed.key
    return (first.store, listed.key) if is_spelt_so else None


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
    view, _ = files.tokens()
    return view, files.key
