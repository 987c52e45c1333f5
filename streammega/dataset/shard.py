"""A shard of a dataset: `.bin`, `.bin.zst` or `.tar` with an `.idx`. `Shard` is an open one."""

from __future__ import annotations

import functools
from collections.abc import Callable
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
from streammega.dataset.local_cache import cache_folder, cached_copy, map_local_copy
from streammega.dataset.manifest import Manifest, ShardEntry
from streammega.dataset.names import SUFFIXES, split_name
from streammega.dataset.tar import layout, stored_bytes
from streammega.dataset.token_ends import ends_of_hex
from streammega.errors import FormatError, ObjectNotFoundError
from streammega.storage import Buffer, ObjectInfo, Store, open_store
from streammega.storage.derived_stores import DerivedStore, LazyView, Members
from streammega.storage.seekable_zstd import Frames, read_frames
from streammega.storage.store import Span

MAX_WHOLE_INDEX_BYTES = 8 << 10
"""An `.idx` of so many bytes is read whole, if there are many shards: it takes one request, as its
header does.
"""
Version = tuple[int, str, float]
"""Bytes and ETag of an object, and when it was written. A plain tuple: the garbage collector does not
track thousands of them.
"""
Shown = TypeVar("Shown", Frames, Members)


class Shard:
    """One shard of a dataset.

    Nothing is requested before it is needed, or twice. What is looked up is compared with the
    manifest at once, which raises FormatError where they differ.

    Args:
        name: its prefix, or with the suffix of its kind.
        manifest: the manifest that lists it. Its own list of shards is not needed here.
        entry: what that manifest says of this shard.
        opened: the store that serves the tokens, and their key there, where they are known.
    """

    __slots__ = (
        "_view",
        "dtype",
        "ends",
        "entry",
        "header",
        "index_body",
        "index_version",
        "key",
        "kind",
        "manifest",
        "multimodal",
        "name",
        "num_documents",
        "num_sequences",
        "num_tokens",
        "prefix",
        "storage",
        "store",
        "version",
    )

    def __init__(
        self,
        name: str,
        storage: StorageConfig,
        *,
        manifest: Manifest | None = None,
        entry: ShardEntry | None = None,
        opened: tuple[Store, str] | None = None,
    ) -> None:
        self.name = name
        self.storage = storage
        self.manifest = manifest
        self.entry = entry
        self.prefix, self.kind = split_name(name)
        self.store, self.key = opened or open_store(self.prefix + SUFFIXES[self.kind], storage)
        self.version: Version | None = None
        self.index_version: Version | None = None
        """Both objects, once a listing or a request had them."""
        self.header: IndexHeader | None = None
        """That of the `.idx`, once it was compared with the tokens."""
        self.index_body: bytes | None = None
        """All of a small `.idx`, while its pointers may be needed."""
        self.ends: int | None = None
        """A digest of its first and last tokens, once they were read."""
        self._view: tuple[Store, ObjectInfo] | None = None
        # What `open` sets: the dtype is little-endian, and tokens are those of the whole shard.
        self.dtype: np.dtype[Any]
        self.multimodal: bool
        self.num_sequences: int
        self.num_documents: int
        self.num_tokens: int

    # --- its two objects

    @property
    def url(self) -> str:
        """The URL of the tokens, for messages."""
        return self.store.url(self.key)

    @property
    def index_key(self) -> str:
        """The key of the `.idx`."""
        return f"{self.key.removesuffix(SUFFIXES[self.kind])}.idx"

    @property
    def index_url(self) -> str:
        """The URL of the `.idx`, for messages."""
        return self.store.url(self.index_key)

    @property
    def stored(self) -> ObjectInfo:
        """The object that holds the tokens, as it is stored.

        Raises ObjectNotFoundError, FormatError, StorageError.
        """
        if self.version is None:
            try:
                info = self.store.info(self.key)
            except ObjectNotFoundError as error:
                if self.index_version is None:
                    raise
                raise ObjectNotFoundError(
                    f"{self.url}: no such object, but its .idx is there; copy both, or convert again"
                ) from error
            self.version = version_of(info)
        size, etag, modified = self.version
        # Compared here first: making the URLs of thousands of shards takes long.
        if self.entry is not None and size != self.entry.bytes:
            check_expected(self.url, "bytes", size, self.entry.bytes)
        return ObjectInfo(key=self.key, size=size, etag=etag, modified=modified)

    @property
    def index_info(self) -> ObjectInfo:
        """The `.idx` as it is stored. Raises ObjectNotFoundError, FormatError, StorageError."""
        if self.index_version is None:
            try:
                info = self.store.info(self.index_key)
            except ObjectNotFoundError:
                raise ObjectNotFoundError(
                    f"{self.index_url}: no such .idx, which {self.url} needs; was its conversion "
                    "interrupted? convert again"
                ) from None
            self.index_version = version_of(info)
        size, etag, _ = self.index_version
        if self.entry is not None and size != self.entry.index_bytes:
            check_expected(self.index_url, "bytes", size, self.entry.index_bytes)
        return ObjectInfo(key=self.index_key, size=size, etag=etag)

    def look_up(self) -> None:
        """Look up both objects where they are not known. Raises as `stored` and `index_info` do."""
        _ = self.stored, self.index_info

    # --- tokens

    def tokens(self) -> tuple[Store, ObjectInfo]:
        """The store that shows the tokens as one little-endian array, whatever the kind, and that
        array's name and size.

        Where a manifest has the size of a remote shard, the table of its frames or members is read
        with the first tokens. Raises FormatError, StorageError.
        """
        if self.kind == "bin":
            return self.store, self.stored
        if self._view is None:
            make: Callable[[], Frames | Members]
            make = self._frames if self.kind == "zst" else self._members
            size = self._token_bytes
            # Reading the table takes requests. It waits where the size is known without it.
            view = make() if size is None or self.store.is_local else LazyView(size, make)
            store = DerivedStore(self.store, self.stored, view)
            self._view = store, store.info(self.key)
        return self._view

    @property
    def bin_tokens(self) -> int | None:
        """Tokens of its bins, as its manifest says; None where documents are end to end."""
        return None if self.manifest is None else self.manifest.bin_tokens

    @property
    def _token_bytes(self) -> int | None:
        """Bytes of all tokens, decompressed, as the manifest says."""
        if self.entry is None or self.manifest is None:
            return None
        return self.entry.tokens * self.manifest.token_dtype.itemsize

    @property
    def ends_of_manifest(self) -> int | None:
        """`ends` as the manifest says; None where it does not, or the tokens may be newer than it."""
        if self.entry is None or not self.entry.ends or self.store.is_local:
            return None
        assert self.manifest is not None
        # Answers to GET have whole seconds, listings have parts of them.
        modified = int(self.stored.modified)
        if not 0 < modified <= self.manifest.written:
            return None
        return ends_of_hex(self.entry.ends)

    def _frames(self) -> Frames:
        return self._sized(read_frames(self.store, self.stored))

    def _members(self) -> Members:
        arrays = self.arrays()
        lengths = arrays.sequence_lengths
        # The places of members follow from the lengths: a negative one would lead anywhere.
        if len(lengths) and int(lengths.min()) < 0:
            bad = int(np.argmax(lengths < 0))
            raise FormatError(
                f"{self.index_url}: sequence {bad} has the negative length {lengths[bad]}; "
                "copy it again, or convert again"
            )
        itemsize = arrays.dtype.itemsize
        multimodal = arrays.sequence_modes is not None
        expected = stored_bytes(lengths, itemsize, multimodal)
        if self.stored.size != expected:
            raise FormatError(
                f"{self.url}: has {self.stored.size} bytes, and by its .idx {expected}; it is cut "
                "short, or was not written by this library (convert reads tars of any kind)"
            )
        return self._sized(layout(lengths, itemsize, multimodal))

    def _sized(self, view: Shown) -> Shown:
        """The view itself, whose size is what the manifest says."""
        if self._token_bytes is not None:
            check_expected(self.url, "bytes of tokens", view.size, self._token_bytes)
        return view

    # --- counts, of a shard that is open

    def open(self) -> None:
        """Set dtype and counts.

        A remote shard has those of its manifest, if the sizes of both objects agree. Any other has
        those of its `.idx`, whose last sequence must end where the tokens do. Raises
        ObjectNotFoundError, FormatError, StorageError.
        """
        # A remote header costs a request for each shard; a local one costs none.
        is_free = self.store.is_local and self.bin_tokens is None
        if self.entry is None or is_free:
            header = self.read_header()
            self.dtype = little_endian(header.dtype)
            self.num_sequences = header.sequence_count
            self.num_documents = header.document_count - 1
            self.multimodal = header.multimodal
        else:
            assert self.manifest is not None
            size = self.index_info.size
            self.dtype = self.manifest.token_dtype
            self.num_sequences = self.entry.sequences
            self.num_documents = self.entry.documents
            # Without sequences, both sizes are the same.
            bounds = self.num_documents + 1
            plain = index_bytes(self.num_sequences, bounds, multimodal=False)
            self.multimodal = self.num_sequences > 0 and size != plain
        _, info = self.tokens()
        self.num_tokens = info.size // self.dtype.itemsize

    def token_at(self, sequence: int) -> int:
        """The token at which a sequence starts; past the last sequence, how many there are."""
        # Both ends are known without a read: most splits begin or end there.
        if sequence >= self.num_sequences:
            return self.num_tokens
        if sequence == 0:
            return 0
        start = self.read_header().offsets_at + OFFSET.itemsize * sequence
        (stored,) = self._read_index([(start, start + OFFSET.itemsize)])
        offset = _integer(stored)
        _, info = self.tokens()
        if not 0 <= offset <= info.size or offset % self.dtype.itemsize:
            raise FormatError(
                f"{self.index_url}: sequence {sequence} starts at byte {offset} of {info.size}; "
                "copy it again, or convert again"
            )
        return offset // self.dtype.itemsize

    def read_header(self, *, is_one_of_many: bool = False) -> IndexHeader:
        """The header of the `.idx`, read once. Its last sequence ends where the tokens do.

        The header of a remote `.idx` and the likely places of its last sequence are read together;
        one of many that is small is read whole, by one request. Raises ObjectNotFoundError,
        FormatError, StorageError.
        """
        if self.header is not None:
            return self.header
        size = self.index_info.size
        bodies = {}
        if not self.store.is_local and self.index_body is None:
            if is_one_of_many and size <= MAX_WHOLE_INDEX_BYTES:
                self.index_body = bytes(self._read_index([(0, size)])[0])
            else:
                spans = likely_ends(size)
                bodies = dict(zip(spans, self._read_index(spans), strict=True))
        span = (0, min(HEADER_BYTES, size))
        header = self._parse_header(bodies.get(span) or self._read_index([span])[0])
        if self.bin_tokens is None:
            _, tokens = self.tokens()
            check_end(self._read_end(header, bodies), tokens.size, self.index_url, self.url)
        self.header = header
        return header

    def _read_end(self, header: IndexHeader, bodies: dict[Span, Buffer]) -> int:
        """The byte of the tokens at which the last sequence ends.

        bodies: spans of the `.idx` that were read ahead, as `likely_ends` guesses them.
        """
        last = header.sequence_count - 1
        if last < 0:
            return 0
        length_at = header.lengths_at + LENGTH.itemsize * last
        offset_at = header.offsets_at + OFFSET.itemsize * last
        spans = [(length_at, length_at + LENGTH.itemsize), (offset_at, offset_at + OFFSET.itemsize)]
        if all(span in bodies for span in spans):
            length, offset = [_integer(bodies[span]) for span in spans]
        else:
            length, offset = [_integer(body) for body in self._read_index(spans)]
        if length < 0 or offset < 0:
            raise FormatError(
                f"{self.index_url}: its last sequence is at byte {offset} and has {length} tokens; "
                "copy it again, or convert again"
            )
        return offset + length * header.dtype.itemsize

    # --- the `.idx`

    def index_data(self) -> memoryview:
        """All of the `.idx`, mapped and not checked. A remote one is copied to this node first.

        Raises ObjectNotFoundError, CacheError, FormatError, StorageError.
        """
        info = self.index_info
        if self.store.is_local:
            return self.store.view(info.key, info.etag)
        folder = cache_folder(self.storage)
        return map_local_copy(self.store, info, folder, self.storage.tuning.max_request_bytes)

    def arrays(self) -> IndexArrays:
        """The arrays of the `.idx`, as views of `index_data`. Raises as that does."""
        # The header first, so that a large file of another kind is not downloaded. A copy was checked.
        if not (self.store.is_local or self.header is not None or self._has_copy()):
            span = (0, min(HEADER_BYTES, self.index_info.size))
            self._parse_header(self._read_index([span])[0])
        arrays = parse_index(self.index_data(), self.index_url)
        self._check_counts(arrays.dtype, arrays.num_sequences, arrays.num_documents)
        return arrays

    def _has_copy(self) -> bool:
        folder = cache_folder(self.storage)
        return cached_copy(self.store, self.index_info, folder).exists()

    def checked_arrays(self, token_bytes: int) -> IndexArrays:
        """The arrays. Every sequence is within `token_bytes`; if all are end to end, they end there.

        Raises as `index_data` does.
        """
        arrays = self.arrays()
        # Not the header alone: bounds of a forged or cut file would lead past the tokens.
        end = check_index(arrays, token_bytes, self.index_url, self.url)
        if self.bin_tokens is None:
            check_whole_end(arrays, end, token_bytes, self.index_url, self.url)
        return arrays

    def _parse_header(self, head: Buffer) -> IndexHeader:
        header = parse_header(head, self.index_info.size, self.index_url)
        self._check_counts(header.dtype, header.sequence_count, header.document_count - 1)
        return header

    def _check_counts(self, dtype: np.dtype[Any], sequences: int, documents: int) -> None:
        if self.entry is None or self.manifest is None:
            return
        check_expected(self.index_url, "as dtype", dtype, self.manifest.token_dtype)
        check_expected(self.index_url, "sequences", sequences, self.entry.sequences)
        check_expected(self.index_url, "documents", documents, self.entry.documents)

    def _read_index(self, spans: list[Span]) -> list[Buffer]:
        if self.index_body is not None:
            body = memoryview(self.index_body)
            return [body[start:stop] for start, stop in spans]
        info = self.index_info
        return self.store.read(info.key, spans, info.etag)


def version_of(info: ObjectInfo) -> Version:
    """What is kept of an object that was looked up."""
    return info.size, info.etag, info.modified


def check_expected(url: str, what: str, actual: object, expected: object) -> None:
    """Raise FormatError unless a shard has what its manifest says."""
    if actual != expected:
        raise FormatError(
            f"{url}: has {actual} {what}, its manifest says {expected}; it is cut short, or another "
            "dataset's: copy or convert it again (where the manifest is the stale one, remove that)"
        )


@functools.cache
def little_endian(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """One object for all shards, and not one for each."""
    return dtype.newbyteorder("<")


def _integer(stored: Buffer) -> int:
    return int.from_bytes(stored, "little", signed=True)
