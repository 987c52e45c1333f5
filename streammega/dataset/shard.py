"""A shard of a dataset: its name, `ShardInfo`, what is known before it is opened, and `Shard`, its open
tokens and `.idx`. A shard is `.bin`, `.bin.zst` or `.tar` with an `.idx`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeVar

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
from streammega.dataset.local_cache import cache_folder, cached_copy, local_view
from streammega.dataset.tar import layout, stored_bytes
from streammega.errors import FormatError, ObjectNotFoundError
from streammega.storage import Buffer, ObjectInfo, Store, open_store
from streammega.storage.derived_stores import DerivedStore, LazyView, Members
from streammega.storage.seekable_zstd import Frames, read_frames

MANIFEST = ".manifest.json"
"""What a dataset's manifest has behind its prefix."""
Kind = Literal["bin", "zst", "tar"]
SUFFIXES: dict[Kind, str] = {"bin": ".bin", "zst": ".bin.zst", "tar": ".tar"}
_KIND_OF_SUFFIX: dict[str, Kind] = {".bin.zst": "zst", ".tar": "tar", ".bin": "bin", ".idx": "bin"}
_ANY_SUFFIX = tuple(_KIND_OF_SUFFIX)
_OF = "-of-"
_NUMBERED = re.compile(rf"^(?P<stem>.*)-(?P<number>\d{{5,}}){_OF}(?P<count>\d{{5,}})$")
"""A shard of several: `shard_name` pads to five digits, and more are needed from 100,000 on."""
_MARK = "-gen"
_MARKED = re.compile(rf"^(?P<stem>.+){_MARK}[0-9a-f]{{12}}(-\d{{5,}}-of-\d{{5,}})?$")
"""A shard that replaces one of a dataset which is there: its mark is of the conversion."""
MOST_MISSING = 3
"""Missing shards of a set that a message names."""


# Of thousands, each would take two to three times as long if it were frozen.
@dataclass(kw_only=True, slots=True)
class ManifestEntry:
    """What a manifest says of a shard. `bytes`, `index_bytes`: of both objects, as stored.

    loss_modes: the modes to be learned. tokenizer: its name and digest. bin_tokens: of bins that
    documents are packed into; None: they lie end to end.
    """

    dtype: np.dtype[Any]
    documents: int
    sequences: int
    tokens: int
    bytes: int
    index_bytes: int
    loss_modes: tuple[int, ...] | None = None
    tokenizer: tuple[str, str] | None = None
    bin_tokens: int | None = None

    @property
    def token_bytes(self) -> int:
        """Of all tokens, decompressed."""
        return self.tokens * self.dtype.itemsize


# Of thousands, each would take two to three times as long if it were frozen.
@dataclass(kw_only=True, slots=True)
class ShardInfo:
    """What is known of a shard before it is opened: its name, its objects from a listing (`stored`: its
    tokens, `index`: its `.idx`), and what a manifest says. `is_alone`: they are from requests for
    the two objects, not from a listing of many.
    """

    name: str
    stored: ObjectInfo | None = None
    index: ObjectInfo | None = None
    entry: ManifestEntry | None = None
    is_alone: bool = False

    @property
    def is_listed(self) -> bool:
        """Whether a listing has its `.idx`."""
        return self.index is not None and not self.is_alone


def keyed(info: ObjectInfo, key: str) -> ObjectInfo:
    """An object under the key that its store has for it."""
    return info if info.key == key else replace(info, key=key)


def check_expected(url: str, what: str, found: object, expected: object) -> None:
    """Raise FormatError unless something of a shard is what its manifest says."""
    if found != expected:
        raise FormatError(
            f"{url}: has {found} {what}, its manifest says {expected}; it is cut short, or another "
            "dataset's: copy or convert it again (where the manifest is the stale one, remove that)"
        )


def split_name(name: str) -> tuple[str, Kind]:
    """(prefix, kind) of a shard: a prefix alone is a `.bin`; users paste names with any of the
    suffixes.
    """
    # Asked first, which is quick: names are split several times for each shard.
    if not name.endswith(_ANY_SUFFIX):
        return name, "bin"
    for suffix, kind in _KIND_OF_SUFFIX.items():
        if name.endswith(suffix):
            return name.removesuffix(suffix), kind
    return name, "bin"


def named(prefix: str, kind: Kind) -> str:
    """The name of a shard: a `.bin`'s is its prefix."""
    return prefix if kind == "bin" else prefix + SUFFIXES[kind]


def strip_suffix(name: str) -> str:
    """A prefix without `.idx`, `.bin`, `.bin.zst` or `.tar`: users paste any of them."""
    prefix, _ = split_name(name)
    return prefix


def set_name(prefix: str) -> str:
    """The prefix of the dataset that a shard is one of: without its number, where it has one."""
    numbered = _NUMBERED.match(prefix)
    return numbered["stem"] if numbered else prefix


def shard_name(prefix: str, number: int, count: int) -> str:
    """The prefix of one of several shards.

    The count is part of it, so that a missing one is noticed.
    """
    return f"{prefix}-{number:05d}-of-{count:05d}"


def marked(name: str, stem: str, mark: str) -> str:
    """The name of a shard of the dataset `stem` with a mark after that, by which it lies beside the
    shards it is to replace.
    """
    return f"{stem}-{mark}{name.removeprefix(stem)}" if mark else name


def owner_of(name: str) -> str | None:
    """The prefix of the dataset to which a shard with a mark belongs; None for all others."""
    if _MARK not in name:  # as nearly all: thousands of names are asked
        return None
    prefix, _ = split_name(name)
    marked_name = _MARKED.match(prefix)
    return marked_name["stem"] if marked_name else None


def may_belong(name: str, prefix: str) -> bool:
    """Whether a shard's name is one that shards of the dataset `prefix` have: itself, numbered, or
    with a mark.
    """
    own_prefix, _ = split_name(name)
    return prefix in (own_prefix, set_name(own_prefix), owner_of(own_prefix))


def missing_shards(names: Iterable[str]) -> list[str]:
    """Of numbered shards, the prefixes that should be there too and are not, at most a few of each
    set.
    """
    numbers_of_set: dict[tuple[str, int], set[int]] = {}
    for name in names:
        if _OF not in name:  # a search of each of thousands takes longer
            continue
        prefix, _ = split_name(name)
        numbered = _NUMBERED.match(prefix)
        if numbered is None:
            continue
        of_set = (numbered["stem"], int(numbered["count"]))
        numbers_of_set.setdefault(of_set, set()).add(int(numbered["number"]))
    missing = []
    for (stem, count), numbers in numbers_of_set.items():
        # Not all of them: a name may tell of any count, and it is somebody else's.
        absent = (number for number in range(count) if number not in numbers)
        for number in islice(absent, MOST_MISSING):
            missing.append(shard_name(stem, number, count))
    return missing


Shown = TypeVar("Shown", Frames, Members)


class Shard:
    """Both objects of one shard: `index`, its `.idx`, and the tokens. Nothing is asked of the
    storage before it is needed, and nothing that is known already.

    Args:
        shard: its name, and what a listing and a manifest say of it.
        cache_dir: where copies of `.idx` files go; None: `default_cache_dir()`.
        opened: the store that serves the tokens, and their key there, where they are known.

    What is looked up is compared with the manifest at once: FormatError where they differ.
    """

    def __init__(
        self,
        shard: ShardInfo,
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
        self.index = ShardIndex(shard, storage, cache_dir, (self.store, index_key))
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
                check_expected(self.url, "bytes", info.size, entry.bytes)
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
        is_local = self.store.is_local
        # Reading the table costs requests: put off where the size is known without it.
        view = make() if entry is None or is_local else LazyView(entry.token_bytes, make)
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
            check_expected(self.url, "bytes of tokens", view.size, entry.token_bytes)
        return view


def files_of(
    shards: Sequence[ShardInfo], storage: StorageConfig, cache_dir: str | Path | None = None
) -> list[Shard]:
    """Both objects of each shard of a dataset.

    The store of those in a listing is looked up once: it takes as long as all else of a
    shard, of which there may be thousands.
    """
    files: list[Shard] = []
    for shard in shards:
        opened = _opened_with(files[0], shard) if files else None
        files.append(Shard(shard, storage, cache_dir, opened))
    return files


def _opened_with(first: Shard, shard: ShardInfo) -> tuple[Store, str] | None:
    """The store of a shard and its key there, if they are those of the first one's store and of
    a listing; None: to be looked up.
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
    files = Shard(ShardInfo(name=name), storage, index_cache_dir)
    if files.kind == "bin":
        return files.store, files.key
    view, _ = files.tokens()
    return view, files.key


READ_WHOLE = 8 << 10
"""Bytes of an `.idx` that is read whole when it is opened, if it is one of many, which a listing
has: they cost no more than its header, and the requests of thousands add up.
"""


class ShardIndex:
    """The `.idx` of one shard. Nothing is asked of the storage before it is needed, and nothing
    that is known already.

    Args:
        shard: its name, and what a listing and a manifest say of it.
        cache_dir: where copies of remote `.idx` files go; None: `default_cache_dir()`.
        opened: the store that serves it, and its key there, where they are known.

    What is looked up is compared with the manifest at once: FormatError where they differ.
    """

    def __init__(
        self,
        shard: ShardInfo,
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
        return self.store.is_local

    @property
    def info(self) -> ObjectInfo:
        """Its size and ETag. Raises ObjectNotFoundError, FormatError, StorageError."""
        if self._info is None:
            listed = self.shard.index
            entry = self.shard.entry
            info = self._look_up() if listed is None else keyed(listed, self.key)
            # Compared first: the URL of each of thousands of shards would be made for nothing.
            if entry is not None and info.size != entry.index_bytes:
                check_expected(self.url, "bytes", info.size, entry.index_bytes)
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
        if self.store.is_local:
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
        for first, stored in self._read_before.items():
            if first <= start and stop <= first + len(stored):
                return stored[start - first : stop - first]
        return None

    def _check_counts(self, dtype: np.dtype[Any], sequences: int, documents: int) -> None:
        entry = self.shard.entry
        if entry is None:
            return
        check_expected(self.url, "as dtype", dtype, entry.dtype)
        check_expected(self.url, "sequences", sequences, entry.sequences)
        check_expected(self.url, "documents", documents, entry.documents)


def _integer(stored: Buffer) -> int:
    return int.from_bytes(stored, "little", signed=True)
