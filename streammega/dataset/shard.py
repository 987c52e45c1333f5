"""A shard of a dataset: `Shard`, its tokens and what is known of them, and `ShardIndex`, its `.idx`.

A shard is `.bin`, `.bin.zst` or `.tar` with an `.idx`.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from streammega.config import StorageConfig
from streammega.dataset.idx import (
    HEADER_BYTES,
    LENGTH,
    OFFSET,
    IndexArrays,
    IndexHeader,
    check_end,
    check_index,
    check_whole_end,
    index_bytes,
    likely_ends,
    parse_header,
    parse_index,
)
from streammega.dataset.local_cache import cache_folder, cached_copy, local_view
from streammega.dataset.manifest import Manifest, ShardEntry
from streammega.dataset.names import SUFFIXES, split_name
from streammega.dataset.tar import layout, stored_bytes
from streammega.errors import FormatError, ObjectNotFoundError
from streammega.storage import Buffer, ObjectInfo, Store, open_store
from streammega.storage.derived_stores import DerivedStore, LazyView, Members
from streammega.storage.seekable_zstd import Frames, read_frames


def check_expected(url: str, what: str, found: object, expected: object) -> None:
    """Raise FormatError unless something of a shard is what its manifest says."""
    if found != expected:
        raise FormatError(
            f"{url}: has {found} {what}, its manifest says {expected}; it is cut short, or another "
            "dataset's: copy or convert it again (where the manifest is the stale one, remove that)"
        )


Shown = TypeVar("Shown", Frames, Members)


class Shard:
    """One shard of a dataset: its tokens, and `index`, its `.idx`. Nothing is asked of the storage
    before it is needed, and nothing that is known already.

    Args:
        name: its prefix, or with the suffix of its kind.
        cache_dir: where copies of remote `.idx` files go; None: `default_cache_dir()`.
        manifest: the manifest that lists it, whose own list of shards is not needed here.
        entry: what that manifest says of this shard.
        opened: the store that serves the tokens, and their key there, where they are known.

    What is looked up is compared with the manifest at once: FormatError where they differ.
    """

    __slots__ = (
        "_index_info",
        "_stored",
        "_tokens",
        "cache_dir",
        "dtype",
        "ends",
        "entry",
        "header",
        "index_header",
        "is_listed",
        "key",
        "kind",
        "known_index",
        "known_tokens",
        "manifest",
        "name",
        "num_documents",
        "num_sequences",
        "num_tokens",
        "prefix",
        "read_before",
        "storage",
        "store",
    )

    def __init__(
        self,
        name: str,
        storage: StorageConfig,
        cache_dir: str | Path | None = None,
        *,
        manifest: Manifest | None = None,
        entry: ShardEntry | None = None,
        opened: tuple[Store, str] | None = None,
    ) -> None:
        self.name = name
        self.storage = storage
        self.cache_dir = cache_dir
        self.manifest = manifest
        self.entry = entry
        self.prefix, self.kind = split_name(name)
        self.store, self.key = opened or open_store(self.prefix + SUFFIXES[self.kind], storage)
        self.known_tokens: ObjectInfo | None = None
        self.known_index: ObjectInfo | None = None
        """Both objects, where a listing or an earlier request told them."""
        self.is_listed = False
        """Whether they are from a listing of many: then it is one of many shards."""
        self.header: IndexHeader | None = None
        """Its dtype and counts, once its `.idx` was checked against its tokens."""
        self.index_header: IndexHeader | None = None
        """The same, as it was read and not checked."""
        self.read_before: dict[int, Buffer] = {}
        """What was read ahead of the `.idx`, by its first byte."""
        self.ends: int | None = None
        """A digest of its first and last tokens, once they were read."""
        # What `open` sets: the dtype is little-endian, and tokens are those of the whole shard.
        self.dtype: np.dtype[Any]
        self.num_sequences: int
        self.num_documents: int
        self.num_tokens: int
        # Not cached_property: before Python 3.12 it holds one lock for all shards, and they would
        # be looked up one by one.
        self._stored: ObjectInfo | None = None
        self._index_info: ObjectInfo | None = None
        self._tokens: tuple[Store, ObjectInfo] | None = None

    @property
    def url(self) -> str:
        """Of the tokens, for messages."""
        return self.store.url(self.key)

    @property
    def index(self) -> ShardIndex:
        """Its `.idx`."""
        # Not kept: two objects that hold each other would be left to the collector.
        return ShardIndex(self)

    @property
    def stored(self) -> ObjectInfo:
        """The object that holds the tokens, as it is stored.

        Raises ObjectNotFoundError, FormatError, StorageError.
        """
        if self._stored is None:
            known = self.known_tokens
            entry = self.entry
            info = self.store.info(self.key) if known is None else _with_key(known, self.key)
            # Compared first: the URL of each of thousands of shards would be made for nothing.
            if entry is not None and info.size != entry.bytes:
                check_expected(self.url, "bytes", info.size, entry.bytes)
            self._stored = info
        return self._stored

    @property
    def index_info(self) -> ObjectInfo:
        """The `.idx` as it is stored. Raises ObjectNotFoundError, FormatError, StorageError."""
        if self._index_info is None:
            known = self.known_index
            entry = self.entry
            info = self.index.look_up() if known is None else _with_key(known, self.index_key)
            if entry is not None and info.size != entry.index_bytes:
                check_expected(self.index.url, "bytes", info.size, entry.index_bytes)
            self._index_info = info
        return self._index_info

    @property
    def index_key(self) -> str:
        """The key of the `.idx`."""
        return f"{self.key.removesuffix(SUFFIXES[self.kind])}.idx"

    def tokens(self) -> tuple[Store, ObjectInfo]:
        """The store that shows the tokens as one little-endian array, whatever the kind, and how
        large that is.

        Where a manifest tells the size of a remote shard, tables of frames and members are read
        with the first tokens. Raises FormatError, StorageError.
        """
        if self.kind == "bin":
            return self.store, self.stored
        if self._tokens is None:
            make = self._frames if self.kind == "zst" else self._members
            size = self._token_bytes
            # Reading the table costs requests: put off where the size is known without it.
            view = make() if size is None or self.store.is_local else LazyView(size, make)
            store = DerivedStore(self.store, self.stored, view)
            self._tokens = store, store.info(self.key)
        return self._tokens

    # --- counts: of a shard that is open

    def open(self) -> Shard:
        """Look up the sizes and counts. Returns itself.

        What a manifest says of a remote shard, the sizes of both objects must bear out. Otherwise
        the last sequence of the `.idx` must end where the tokens do. Raises ObjectNotFoundError,
        FormatError, StorageError.
        """
        _, info = self.tokens()
        # A remote header costs a request for each shard; a local one costs none.
        is_local = self.store.is_local
        if self.entry is not None and (self.bin_tokens is not None or not is_local):
            assert self.manifest is not None
            _ = self.index_info  # its size is compared
            self.dtype = self.manifest.token_dtype
            self.num_sequences = self.entry.sequences
            self.num_documents = self.entry.documents
        else:
            header = self.header or self.read_header(info.size)
            self.dtype = little_endian(header.dtype)
            self.num_sequences = header.sequence_count
            self.num_documents = header.document_count - 1
        self.num_tokens = info.size // self.dtype.itemsize
        return self

    def read_header(self, token_bytes: int) -> IndexHeader:
        """Set `header` to that of the `.idx`, which ends where its tokens do."""
        index = self.index
        index.read_ahead()
        check_end(index.read_end(), token_bytes, index.url, self.url)
        self.header = index.header
        return self.header

    @property
    def multimodal(self) -> bool:
        """Whether its sequences have modes: by sizes alone, where a manifest has the counts."""
        entry = self.entry
        if entry is None or self.header is not None:
            return (self.header or self.index.header).multimodal
        if entry.sequences == 0:  # of no sequences, both sizes are the same
            return False
        with_modes = index_bytes(entry.sequences, entry.documents + 1, multimodal=True)
        return entry.index_bytes == with_modes

    @property
    def bin_tokens(self) -> int | None:
        """Tokens of its bins, as its manifest says; None where documents lie end to end."""
        return None if self.manifest is None else self.manifest.bin_tokens

    def token_at(self, sequence: int) -> int:
        """The token at which a sequence starts; past the last sequence, how many there are."""
        # Both ends are known without a read: most splits begin or end there.
        if sequence >= self.num_sequences:
            return self.num_tokens
        if sequence == 0:
            return 0
        index = self.index
        offset = index.read_offset(sequence)
        _, info = self.tokens()
        if not 0 <= offset <= info.size or offset % self.dtype.itemsize:
            raise FormatError(
                f"{index.url}: sequence {sequence} starts at byte {offset} of {info.size}; "
                "rebuild the .idx"
            )
        return offset // self.dtype.itemsize

    def forget(self) -> None:
        """Free what was read ahead of the `.idx`."""
        self.read_before = {}

    @property
    def _token_bytes(self) -> int | None:
        """Bytes of all tokens, decompressed, as the manifest says."""
        if self.entry is None or self.manifest is None:
            return None
        return self.entry.tokens * self.manifest.token_dtype.itemsize

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
        if self._token_bytes is not None:
            check_expected(self.url, "bytes of tokens", view.size, self._token_bytes)
        return view


@functools.cache
def little_endian(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """One object for all shards, and not one for each."""
    return dtype.newbyteorder("<")


def _with_key(info: ObjectInfo, key: str) -> ObjectInfo:
    """An object under the key that its store has for it."""
    return info if info.key == key else replace(info, key=key)


READ_WHOLE = 8 << 10
"""Bytes of an `.idx` that is read whole when it is opened, if it is one of many, which a listing
has: they cost no more than its header, and the requests of thousands add up.
"""


class ShardIndex:
    """The `.idx` of one shard. Nothing is asked of the storage before it is needed, and nothing
    that is known already.

    What is looked up is compared with the manifest at once: FormatError where they differ.
    """

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self.prefix = shard.prefix
        self.store = shard.store
        self.key = shard.index_key

    @property
    def cache_dir(self) -> Path:
        """Where copies go."""
        return cache_folder(self.shard.cache_dir)

    @property
    def url(self) -> str:
        """For messages."""
        return self.store.url(self.key)

    @property
    def tokens_url(self) -> str:
        """Of the tokens beside it, for messages."""
        return self.url.removesuffix(".idx") + SUFFIXES[self.shard.kind]

    @property
    def is_local(self) -> bool:
        """Whether it is a local file, of which small reads cost no request."""
        return self.store.is_local

    @property
    def info(self) -> ObjectInfo:
        """Its size and ETag. Raises ObjectNotFoundError, FormatError, StorageError."""
        return self.shard.index_info

    @property
    def header(self) -> IndexHeader:
        """What it begins with: one small read. Raises FormatError, StorageError."""
        if self.shard.header is not None:
            return self.shard.header
        if self.shard.index_header is None:
            header = parse_header(self.head(), self.info.size, self.url)
            self._check_counts(header.dtype, header.sequence_count, header.document_count - 1)
            self.shard.index_header = header
        return self.shard.index_header

    def read_ahead(self) -> None:
        """Read of a remote one what opening will ask for, by requests that go out together: its
        header, and its end where that most likely is; all of a small one of many.

        It is kept until `forget`. Raises ObjectNotFoundError, FormatError, StorageError.
        """
        if self.is_local or self.shard.read_before:
            return
        size = self.info.size
        is_small = size <= READ_WHOLE
        spans = [(0, size)] if is_small and self.shard.is_listed else likely_ends(size)
        for (start, _), stored in zip(spans, self._read(spans), strict=True):
            self.shard.read_before[start] = stored

    def keep(self, body: Buffer) -> None:
        """Take all of it, which was read before, until `forget`."""
        self.shard.read_before[0] = body

    def head(self) -> Buffer:
        """The bytes of the header, fewer where the file is shorter; not looked at.

        Raises ObjectNotFoundError, FormatError, StorageError.
        """
        stop = min(HEADER_BYTES, self.info.size)
        return self._read([(0, stop)])[0]

    def data(self) -> memoryview:
        """All of it, mapped: of a remote one, this node's copy; not looked at.

        Raises ObjectNotFoundError, CacheError, FormatError, StorageError.
        """
        if self.store.is_local:
            return self.store.view(self.key, self.info.etag)
        return local_view(self.store, self.info, self.cache_dir, self.shard.storage.part_bytes)

    def arrays(self) -> IndexArrays:
        """Its arrays, as views of `data`. Raises as `data` does."""
        if not self.is_local and not self._is_known_copy():
            _ = self.header  # before a large foreign file is downloaded
        arrays = parse_index(self.data(), self.url)
        self._check_counts(arrays.dtype, arrays.num_sequences, arrays.num_documents)
        return arrays

    def checked_arrays(self, token_bytes: int) -> IndexArrays:
        """Its arrays, every sequence of which lies within `token_bytes`, and the last one ends
        there. Raises as `data` does.
        """
        arrays = self.arrays()
        # Not only the header: bounds that a forged or cut file holds would be read past the tokens.
        end = check_index(arrays, token_bytes, self.url, self.tokens_url)
        if self.shard.bin_tokens is None:
            check_whole_end(arrays, end, token_bytes, self.url, self.tokens_url)
        return arrays

    def read_offset(self, sequence: int) -> int:
        """The byte of the tokens at which a sequence starts, as it is stored: a read of 8 bytes."""
        start = self.header.offsets_at + OFFSET.itemsize * sequence
        stored = self._read([(start, start + OFFSET.itemsize)])[0]
        return _integer(stored)

    def read_end(self) -> int:
        """One past the last byte of the last sequence, as it is stored: two reads, of 4 and 8
        bytes. Raises FormatError.
        """
        header = self.header
        last = header.sequence_count - 1
        if last < 0:
            return 0
        length_at = header.lengths_at + LENGTH.itemsize * last
        offset_at = header.offsets_at + OFFSET.itemsize * last
        stored_length, stored_offset = self._read(
            [
                (length_at, length_at + LENGTH.itemsize),
                (offset_at, offset_at + OFFSET.itemsize),
            ]
        )
        length = _integer(stored_length)
        offset = _integer(stored_offset)
        if length < 0 or offset < 0:
            raise FormatError(
                f"{self.url}: its last sequence lies at byte {offset} and has {length} tokens; "
                "rebuild the .idx"
            )
        return offset + length * header.dtype.itemsize

    def look_up(self) -> ObjectInfo:
        """Its size and ETag, by a request. Raises as `info` does."""
        try:
            return self.store.info(self.key)
        except ObjectNotFoundError:
            raise ObjectNotFoundError(
                f"{self.url}: no such .idx beside {self.tokens_url}; was its conversion "
                "interrupted? convert again"
            ) from None

    def _is_known_copy(self) -> bool:
        """Whether a listing has it, and this node has a copy of that version: what was
        copied once was looked at then.
        """
        if not self.shard.is_listed:
            return False
        return cached_copy(self.store, self.info, self.cache_dir).exists()

    def _read(self, spans: list[tuple[int, int]]) -> list[Buffer]:
        known = [self._known(start, stop) for start, stop in spans]
        if None not in known:
            return [part for part in known if part is not None]
        starts = [start for start, _ in spans]
        stops = [stop for _, stop in spans]
        return self.store.read(self.key, list(zip(starts, stops, strict=True)), self.info.etag)

    def _known(self, start: int, stop: int) -> Buffer | None:
        """Bytes [start, stop), if they were read ahead."""
        for first, stored in self.shard.read_before.items():
            if first <= start and stop <= first + len(stored):
                return stored[start - first : stop - first]
        return None

    def _check_counts(self, dtype: np.dtype[Any], sequences: int, documents: int) -> None:
        entry = self.shard.entry
        manifest = self.shard.manifest
        if entry is None or manifest is None:
            return
        check_expected(self.url, "as dtype", dtype, manifest.token_dtype)
        check_expected(self.url, "sequences", sequences, entry.sequences)
        check_expected(self.url, "documents", documents, entry.documents)


def _integer(stored: Buffer) -> int:
    return int.from_bytes(stored, "little", signed=True)
