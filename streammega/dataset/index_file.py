"""The `.idx` of a shard where it lies: looked up once, compared with the manifest, and only so much
of it read as is asked for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from streammega.config import StorageConfig
from streammega.dataset.idx import (
    HEADER_BYTES,
    LENGTH,
    OFFSET,
    IndexArrays,
    IndexHeader,
    check_index,
    check_whole_end,
    likely_ends,
    parse_header,
    parse_index,
)
from streammega.dataset.node_cache import cache_folder, cached_copy, local_view
from streammega.dataset.shards import SUFFIXES, KnownShard, check_told, keyed, split_name
from streammega.errors import FormatError, ObjectNotFoundError
from streammega.storage import Buffer, ObjectInfo, Store, open_store
from streammega.storage.backends.local import LocalStore

READ_WHOLE = 8 << 10
"""Bytes of an `.idx` that is read whole when it is opened, if it is one of many, which a listing
told of: they cost no more than its header, and the requests of thousands add up.
"""


class IndexFile:
    """The `.idx` of one shard. Nothing is asked of the storage before it is needed, and nothing
    that is known already.

    Args:
        shard: its name, and what a listing and a manifest told of it.
        cache_dir: where copies of remote `.idx` files go; None: `default_cache_dir()`.
        opened: the store that serves it, and its key there, where they are known.

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
        self.prefix, kind = split_name(shard.name)
        self._cache_dir = cache_dir
        self.store, self.key = opened or open_store(f"{self.prefix}.idx", storage)
        self._tokens_suffix = SUFFIXES[kind]
        self._part_bytes = storage.part_bytes
        # Not cached_property: before Python 3.12 it holds one lock for all shards, and they would
        # be looked up one by one.
        self._info: ObjectInfo | None = None
        self._header: IndexHeader | None = None
        self.is_checked = False
        """Whether it is known to end where its tokens do."""
        self._read_before: dict[int, Buffer] = {}  # what `read_ahead` read, by its first byte

    @property
    def cache_dir(self) -> Path:
        """Where copies go."""
        return cache_folder(self._cache_dir)

    @property
    def url(self) -> str:
        """For messages."""
        return self.store.url(self.key)

    @property
    def tokens_url(self) -> str:
        """Of the tokens beside it, for messages."""
        return self.url.removesuffix(".idx") + self._tokens_suffix

    @property
    def is_local(self) -> bool:
        """Whether it is a local file, of which small reads cost no request."""
        return isinstance(self.store, LocalStore)

    @property
    def info(self) -> ObjectInfo:
        """Its size and ETag. Raises ObjectNotFoundError, FormatError, StorageError."""
        if self._info is None:
            listed = self.shard.index
            entry = self.shard.entry
            info = self._look_up() if listed is None else keyed(listed, self.key)
            # Compared first: the URL of each of thousands of shards would be made for nothing.
            if entry is not None and info.size != entry.index_bytes:
                check_told(self.url, "bytes", info.size, entry.index_bytes)
            self._info = info
        return self._info

    @property
    def header(self) -> IndexHeader:
        """What it begins with: one small read. Raises FormatError, StorageError."""
        if self._header is None:
            header = parse_header(self.head(), self.info.size, self.url)
            self._check_counts(header.dtype, header.sequence_count, header.document_count - 1)
            self._header = header
        return self._header

    def read_ahead(self) -> None:
        """Read of a remote one what opening will ask for, by requests that go out together: its
        header, and its end where that most likely is; all of a small one of many.

        It is kept until `forget`. Raises ObjectNotFoundError, FormatError, StorageError.
        """
        if self.is_local or self._read_before:
            return
        size = self.info.size
        is_small = size <= READ_WHOLE
        spans = [(0, size)] if is_small and self.shard.is_listed else likely_ends(size)
        for (start, _), stored in zip(spans, self._read(spans), strict=True):
            self._read_before[start] = stored

    def keep(self, body: Buffer) -> None:
        """Take all of it, which was read before, until `forget`."""
        self._read_before[0] = body

    def adopt(self, header: IndexHeader) -> None:
        """Take a header that was read and checked before, of this very version."""
        self._header = header
        self.is_checked = True

    def forget(self) -> None:
        """Free what was read ahead."""
        self._read_before = {}

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
        if isinstance(self.store, LocalStore):
            return self.store.view(self.key, self.info.etag)
        return local_view(self.store, self.info, self.cache_dir, self._part_bytes)

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
        entry = self.shard.entry
        if entry is None or entry.bin_tokens is None:
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

    def _look_up(self) -> ObjectInfo:
        try:
            return self.store.info(self.key)
        except ObjectNotFoundError:
            raise ObjectNotFoundError(
                f"{self.url}: no such .idx beside {self.tokens_url}; was its conversion "
                "interrupted? convert again"
            ) from None

    def _is_known_copy(self) -> bool:
        """Whether a listing told of it, and this node has a copy of what it told of: what was
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
        return self.store.read_ranges(self.key, starts, stops, self.info.etag)

    def _known(self, start: int, stop: int) -> Buffer | None:
        """Bytes [start, stop), if they were read ahead."""
        for first, stored in self._read_before.items():
            if first <= start and stop <= first + len(stored):
                return stored[start - first : stop - first]
        return None

    def _check_counts(self, dtype: np.dtype[Any], sequences: int, documents: int) -> None:
        entry = self.shard.entry
        if entry is None:
            return
        check_told(self.url, "as dtype", dtype, entry.dtype)
        check_told(self.url, "sequences", sequences, entry.sequences)
        check_told(self.url, "documents", documents, entry.documents)


def _integer(stored: Buffer) -> int:
    return int.from_bytes(stored, "little", signed=True)
