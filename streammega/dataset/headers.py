"""What the stream order needs of shards, without reading their indices: sizes, counts, and the
pointers at a split's bounds. Headers of many small `.idx` are read together, and kept on local disk.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streammega.config import StorageConfig
from streammega.dataset.content import (
    content_digest,
    end_parts,
    end_shards,
    read_ends,
    set_ends,
)
from streammega.dataset.idx import (
    CODE_OF_DTYPE,
    DOCUMENT_BOUND,
    DTYPE_OF_CODE,
    HEADER,
    HEADER_BYTES,
    LENGTH,
    MAGIC,
    MODE,
    OFFSET,
    VERSION,
    IndexHeader,
    check_end,
    dtype_code,
    index_bytes,
)
from streammega.dataset.local_cache import (
    ArrayKind,
    cached_arrays,
    damaged_array,
    note_use,
    remove_former,
    remove_unused,
)
from streammega.dataset.resolve import EMPTY_LISTING, Listing, listed_pair, open_shards
from streammega.dataset.shard import READ_WHOLE, Shard, ShardInfo, files_of, split_name
from streammega.errors import CacheError, FormatError, ObjectChangedError, ObjectNotFoundError
from streammega.storage import Buffer, ObjectInfo, Store
from streammega.storage.store import Part
from streammega.storage.thread_pool import parallel_map

OPENERS = 32
"""Shards of a dataset that are opened at once."""
READERS = 128
"""Shards of all datasets together whose headers are read at once, where none gets fewer than
`OPENERS`: each is one answer from far away, of a few bytes.
"""


# Of thousands, each would take two to three times as long if it were frozen.
@dataclass(kw_only=True, slots=True)
class ShardBounds:
    """A shard of which its sizes and counts are known; `token_at` reads a pointer.

    `bin_info`: of its tokens, decompressed.
    """

    files: Shard
    store: Store
    bin_info: ObjectInfo
    dtype: np.dtype[Any]
    num_sequences: int
    num_documents: int

    @property
    def multimodal(self) -> bool:
        """Whether its sequences have modes: by sizes alone, where a manifest
        has the counts.
        """
        index = self.files.index
        entry = self.files.shard.entry
        if entry is None:
            return index.header.multimodal
        if entry.sequences == 0:  # of no sequences, both sizes are the same
            return False
        with_modes = index_bytes(entry.sequences, entry.documents + 1, multimodal=True)
        return entry.index_bytes == with_modes

    @property
    def bin_tokens(self) -> int | None:
        """Tokens of its bins, as its manifest says; None where documents lie end to end."""
        entry = self.files.shard.entry
        return None if entry is None else entry.bin_tokens

    @property
    def num_tokens(self) -> int:
        """Tokens in the whole `.bin`."""
        return self.bin_info.size // self.dtype.itemsize

    def token_at(self, sequence: int) -> int:
        """The token of the `.bin` at which a sequence starts; past the last sequence, how many
        there are.
        """
        # Both ends are known without a read: most splits begin or end there.
        if sequence >= self.num_sequences:
            return self.num_tokens
        if sequence == 0:
            return 0
        index = self.files.index
        offset = index.read_offset(sequence)
        if not 0 <= offset <= self.bin_info.size or offset % self.dtype.itemsize:
            raise FormatError(
                f"{index.url}: sequence {sequence} starts at byte {offset} of "
                f"{self.bin_info.size}; rebuild the .idx"
            )
        return offset // self.dtype.itemsize


def read_bounds(
    shard: ShardInfo | str, storage: StorageConfig, cache_dir: str | Path | None = None
) -> ShardBounds:
    """Open a shard by what a manifest says, or by its header.

    What the manifest says, the sizes of both objects must bear out. Without one, the last sequence
    of the `.idx` must end where the tokens do. Raises ObjectNotFoundError, FormatError,
    StorageError.
    """
    if isinstance(shard, str):
        shard = ShardInfo(name=shard)
    return _bounds(Shard(shard, storage, cache_dir))


def _bounds(files: Shard) -> ShardBounds:
    """The bounds of a shard, by its manifest or its header."""
    store, bin_info = files.tokens()
    index = files.index
    entry = files.shard.entry
    # A remote header costs a request for each shard, and a manifest tells what it holds; a local
    # one costs none.
    is_packed = entry is not None and entry.bin_tokens is not None
    if entry is not None and (is_packed or not index.is_local):
        _ = index.info  # its size is compared
        dtype = entry.dtype
        num_sequences = entry.sequences
        num_documents = entry.documents
    else:
        header = _checked_header(files, bin_info.size)
        dtype = header.dtype
        num_sequences = header.sequence_count
        num_documents = header.document_count - 1
    return ShardBounds(
        files=files,
        store=store,
        bin_info=bin_info,
        dtype=_little_endian(dtype),
        num_sequences=num_sequences,
        num_documents=num_documents,
    )


@functools.cache
def _little_endian(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """One object for all shards, and not one for each."""
    return dtype.newbyteorder("<")


def _checked_header(files: Shard, token_bytes: int) -> IndexHeader:
    """The header of an `.idx`, which ends where its tokens do."""
    index = files.index
    if not index.is_checked:
        index.read_ahead()
        check_end(index.read_end(), token_bytes, index.url, files.url)
    return index.header


def known_pairs(
    names: Sequence[str],
    listing: Listing,
    storage: StorageConfig,
    cache_dir: str | Path | None = None,
) -> dict[str, Shard]:
    """The files of those datasets of a blend that a listing has all of and that are plain pairs,
    with their headers, read together or kept; of few, or where one of them is not as it should be:
    none, for who opens it says what is wrong.

    Raises StorageError for what may pass when it is tried again, CacheError for a damaged file.
    """
    shards = {}
    for name in names:
        shard = listed_pair(name, listing)
        if shard is not None and split_name(shard.name)[1] == "bin":
            shards[name] = shard
    files = files_of(list(shards.values()), storage, cache_dir)
    if not are_kept(files):
        return {}
    folder = files[0].index.cache_dir / "idx"
    all_files = range(len(files))  # each is a dataset
    try:
        adopt_kept(
            folder, shards, files, all_files, lambda: _read(files, all_files, storage, keep=True)
        )
    except (FormatError, ObjectChangedError, ObjectNotFoundError):
        return {}
    return dict(zip(shards, files, strict=True))


def read_dataset(
    name: str,
    storage: StorageConfig,
    cache_dir: str | Path | None = None,
    listing: Listing = EMPTY_LISTING,
    beside: int = 1,
    known: Shard | None = None,
) -> list[ShardBounds]:
    """Open all shards of a dataset by their sizes and headers, and by a listing of it. What
    `content_of` needs of its tokens is read too.

    `beside`: how many datasets are opened at the same time. known: its files, of `known_pairs`.
    Raises as read_bounds does.
    """

    def open_all(shards: Sequence[ShardInfo]) -> list[ShardBounds]:
        """The bounds of shards, of kept headers where their sums are known, otherwise by requests."""
        # Looked up again, it may be another pair.
        if known is not None and list(shards) == [known.shard]:
            return [_bounds(known)]
        files = files_of(shards, storage, cache_dir)
        if are_kept(files):
            folder = files[0].index.cache_dir / "idx"
            ends_of = end_shards([shard.stored.size for shard in files])
            read = functools.partial(_read, files, ends_of, storage, beside)
            adopt_kept(folder, [name], files, ends_of, read)
        pairs = _open_pairs(files, storage)
        read_ends([(pair.files, pair.store, pair.bin_info) for pair in _at_ends(pairs)])
        return pairs

    return open_shards(name, storage, open_all, listing=listing)


def content_of(pairs: Sequence[ShardBounds]) -> str:
    """A digest of what a dataset holds, of its pairs as `read_dataset` opened them."""
    return content_digest(
        dtypes=[pair.dtype for pair in pairs],
        tokens=[pair.num_tokens for pair in pairs],
        ends=[pair.files.ends for pair in _at_ends(pairs)],
        sequences=sum(pair.num_sequences for pair in pairs),
        documents=sum(pair.num_documents for pair in pairs),
    )


def _at_ends(pairs: Sequence[ShardBounds]) -> list[ShardBounds]:
    """The first and the last pair that hold tokens."""
    return [pairs[number] for number in end_shards([pair.bin_info.size for pair in pairs])]


def _open_pairs(files: Sequence[Shard], storage: StorageConfig) -> list[ShardBounds]:
    """The bounds of shards. The tokens at the ends of remote `.bin` shards are read meanwhile."""
    # Where nothing is asked, threads would only take turns.
    if all(_is_known(shard) for shard in files):
        return [_bounds(shard) for shard in files]
    ends = [files[number] for number in sorted({0, len(files) - 1})]
    jobs: list[Callable[[], Any]] = [functools.partial(_bounds, shard) for shard in files]
    if all(shard.kind == "bin" and shard.shard.stored is not None for shard in ends):
        jobs.append(functools.partial(_read_ends_of, ends))
    opened = parallel_map(lambda job: job(), jobs, min(OPENERS, storage.max_requests))
    return opened[: len(files)]


def _read_ends_of(files: Sequence[Shard]) -> None:
    read_ends([(shard, *shard.tokens()) for shard in files])


def _readers(most: int, beside: int, storage: StorageConfig) -> int:
    """Requests at once for a dataset, of `most` for all that are opened at the same time."""
    return min(max(OPENERS, most // beside), storage.max_requests)


def _read(
    files: Sequence[Shard],
    ends_of: Sequence[int],
    storage: StorageConfig,
    beside: int = 1,
    *,
    keep: bool = False,
) -> NDArray[np.int64]:
    """What is kept of shards. `ends_of`: the numbers of those whose tokens are looked at. `keep`: see
    `_read_headers`.
    """
    rows = _read_headers(files, ends_of, storage, beside, keep=keep)
    ends = [shard.ends or 0 for shard in files]
    return np.column_stack([rows, np.array(ends, np.int64)])


def _read_headers(
    files: Sequence[Shard],
    ends_of: Sequence[int],
    storage: StorageConfig,
    beside: int,
    *,
    keep: bool,
) -> NDArray[np.int64]:
    """The headers of shards, which end where their tokens do: int64 [shards, FIELDS]. The ends of
    the tokens of those numbered `ends_of` are read meanwhile. `keep`: pointers will be read of the
    headers, if what was read of all is not too much to be held.
    """
    keep = (
        keep and sum(min(shard.index.info.size, READ_WHOLE) for shard in files) <= MOST_KEPT_BYTES
    )

    def read_one(shard: Shard) -> IndexHeader:
        _, bin_info = shard.tokens()
        header = _checked_header(shard, bin_info.size)
        if not keep:
            shard.index.forget()  # of thousands it would be much
        return header

    if not are_small(files):
        jobs: list[Callable[[], Any]] = [functools.partial(read_one, shard) for shard in files]
        jobs += [functools.partial(_read_ends_of, [files[number]]) for number in ends_of]
        read = parallel_map(lambda job: job(), jobs, _readers(READERS, beside, storage))
        return rows_of_headers(read[: len(files)])
    readers = _readers(SMALL_READERS, beside, storage)
    rows = []
    for first in range(0, len(files), READ_TOGETHER):
        stop = first + READ_TOGETHER
        at_ends = [files[number] for number in ends_of if first <= number < stop]
        rows.append(_read_small(files[first:stop], at_ends, readers, read_one, keep=keep))
    return np.concatenate(rows)


def _read_small(
    files: Sequence[Shard],
    at_ends: Sequence[Shard],
    readers: int,
    read_one: Callable[[Shard], IndexHeader],
    *,
    keep: bool,
) -> NDArray[np.int64]:
    """As `_read_headers`, of small ones; what is not as it should be is for `read_one`."""
    parts = [part for shard in at_ends for part in end_parts(shard.stored)]
    all_bodies = read_bodies(files, readers, parts)
    set_ends([(shard, shard.stored) for shard in at_ends], all_bodies[len(files) :])
    bodies = all_bodies[: len(files)]
    rows, is_sound = rows_of(bodies, [shard.stored.size for shard in files])
    if keep:
        for shard, body in zip(files, bodies, strict=True):
            shard.index.keep(body)
    for number in np.flatnonzero(~is_sound).tolist():
        # This says what is wrong.
        rows[number : number + 1] = rows_of_headers([read_one(files[number])])
    return rows


def _is_known(files: Shard) -> bool:
    """Whether all that is needed of a shard is known without a request."""
    shard = files.shard
    is_listed = shard.stored is not None and shard.index is not None
    return is_listed and (shard.entry is not None or files.index.is_checked)


log = logging.getLogger(__name__)

KEEP_SHARDS = 64
"""So many shards are read at once: of fewer, a file costs more than it saves."""
FIELDS = 4
"""Of a header: the code of its dtype, its sequences, its document bounds, and whether there are
modes.
"""
_PREFIX = "headers-"
"""What names of kept files begin with."""
UNUSED_DAYS = 60
"""After so many without use what is kept is removed: of a blend that changed, for instance."""
_KINDS: dict[str, ArrayKind] = {"headers": ((np.dtype("<i8"),), (None, FIELDS + 1))}
"""The last column is the digest of a shard's first and last tokens: 0 where it is not needed."""


def are_kept(files: Sequence[Shard]) -> bool:
    """Whether headers of shards are kept: those of many `.bin`, of which no manifest tells what
    they hold, and a listing has the versions. Without, nothing would distinguish them from former shards.
    """
    if len(files) < KEEP_SHARDS or files[0].shard.entry is not None:
        return False
    return all(
        shard.kind == "bin" and shard.shard.index is not None and shard.shard.stored is not None
        for shard in files
    )


def adopt_kept(
    folder: Path,
    names: Iterable[str],
    files: Sequence[Shard],
    ends_of: Sequence[int],
    read: Callable[[], NDArray[np.int64]],
) -> None:
    """Give each shard the header of its `.idx`, and those numbered `ends_of` the digest of their
    tokens: as `read` found them when the shards were the same, by their ETags and sizes, or as
    `read` finds them now.

    names: of the datasets of which they are all. What was kept of the same ones before is removed,
    and of others what nobody used for long. Where headers cannot be kept, they are read every time.
    Raises what `read` does, and CacheError for a damaged file.
    """
    found: list[NDArray[np.int64]] = []

    def build() -> dict[str, NDArray[Any]]:
        found.append(read())
        return {"headers": found[0]}

    key_of_datasets = f"{_PREFIX}{_digest(names)}-"
    key = key_of_datasets + _digest(_versions(files))
    try:
        arrays: dict[str, NDArray[Any]] = cached_arrays(folder, key, _KINDS, build)
    except CacheError as error:
        if (folder / f"{key}-headers.npy").exists():
            raise  # what is there is damaged: to be named, not passed over
        log.info("%s; until then the headers of %d shards are read each time", error, len(files))
        arrays = {"headers": found[0] if found else read()}
    if found:
        remove_former(folder, key_of_datasets, key)
        remove_unused(folder, _PREFIX, UNUSED_DAYS)
    else:
        note_use(folder / f"{key}-headers.npy")
    rows = np.asarray(arrays["headers"])
    headers = _from_array(rows[:, :FIELDS], files, folder / f"{key}-headers.npy")
    for shard, header in zip(files, headers, strict=True):
        shard.index.adopt(header)
    for number in ends_of:
        files[number].ends = int(rows[number, FIELDS])


def _versions(files: Iterable[Shard]) -> Iterable[str]:
    """The shards, and what tells the two objects of each from all others of their names."""
    for shard in files:
        yield shard.prefix
        for info in (shard.shard.stored, shard.shard.index):
            assert info is not None
            yield f"{info.size} {info.etag}"


def rows_of_headers(headers: Sequence[IndexHeader]) -> NDArray[np.int64]:
    """What is kept of headers, int64 [headers, FIELDS]."""
    rows = []
    for header in headers:
        code = dtype_code(header.dtype)
        rows.append((code, header.sequence_count, header.document_count, int(header.multimodal)))
    return np.array(rows, np.int64).reshape(-1, FIELDS)


def _from_array(rows: NDArray[np.int64], files: Sequence[Shard], path: Path) -> list[IndexHeader]:
    """Raises CacheError for rows that cannot be those of the shards."""
    if len(rows) != len(files):
        raise damaged_array(f"{path}: holds {len(rows)} headers, of {len(files)} shards")
    headers = []
    for (code, sequences, documents, modes), shard in zip(rows.tolist(), files, strict=True):
        expected_bytes = index_bytes(sequences, documents, multimodal=bool(modes))
        assert shard.shard.index is not None
        if code not in DTYPE_OF_CODE or sequences < 0 or expected_bytes != shard.shard.index.size:
            raise damaged_array(f"{path}: does not hold the header of {shard.index.url}")
        header = IndexHeader(
            dtype=DTYPE_OF_CODE[code],
            sequence_count=sequences,
            document_count=documents,
            multimodal=bool(modes),
        )
        headers.append(header)
    return headers


def _digest(texts: Iterable[str]) -> str:
    # A zero byte is in no URL and no ETag.
    return hashlib.blake2b("\0".join(texts).encode(), digest_size=12).hexdigest()


Integers = NDArray[np.int64]
NEAR = 0.004
"""Seconds. Where an answer takes less, more than a few threads only take turns."""
NEAR_READERS = 32
SMALL_READERS = 256
"""Requests at once, of all datasets together: of 10,000 with 20 ms each, all are answered within a
second.
"""
READ_TOGETHER = 1 << 12
"""Shards of which what is read is in memory at once: 96 MiB at most, and a third of that twice while
it is checked.
"""
MOST_KEPT_BYTES = 64 << 20
"""Of all bodies together, if pointers are to be read of them: what is opened at once holds them."""
_STORED = np.dtype([("magic", "S9"), ("version", "<u8"), ("code", "u1"), ("counts", "<u8", 2)])
"""A header as it is stored."""
assert _STORED.itemsize == HEADER_BYTES == HEADER.size


def are_small(files: Sequence[Shard]) -> bool:
    """Whether all `.idx` are small ones of one store that reads many of them at once."""
    store = files[0].index.store
    if store.is_local:
        return False
    roots = {id(file.index.store) for file in files}
    return len(roots) == 1 and all(file.index.info.size <= READ_WHOLE for file in files)


def read_bodies(
    files: Sequence[Shard], most_readers: int, more: Sequence[Part] = ()
) -> list[Buffer]:
    """Each `.idx`, whole, and behind them more parts of objects of the same store. Raises
    StorageError.
    """
    store: Store = files[0].index.store
    infos = [file.index.info for file in files]
    parts = [*((info, 0, info.size) for info in infos), *more]
    began = time.monotonic()
    first = store.read_many(parts[:1], 1)
    is_near = time.monotonic() - began < NEAR
    readers = min(NEAR_READERS, most_readers) if is_near else most_readers
    return first + store.read_many(parts[1:], readers)


def rows_of(
    bodies: Sequence[Buffer], token_bytes: Sequence[int]
) -> tuple[Integers, NDArray[np.bool_]]:
    """What `kept_headers` keeps of each `.idx`, [files, FIELDS], and which of them are sound: of the
    format, of the size that their counts tell, and ending where their tokens do.

    One that is not sound is for `parse_header` and `check_end`, which say what is wrong.
    """
    sizes = np.array([len(body) for body in bodies], np.int64)
    # Room behind the last one, so that no place that is read lies outside, wrong as it may be.
    stored = np.frombuffer(b"".join([*bodies, bytes(READ_WHOLE)]), np.uint8)
    first_byte = np.cumsum(sizes) - sizes
    heads = _read_at(stored, first_byte, HEADER_BYTES).view(_STORED)[:, 0]
    known = heads["magic"] == MAGIC
    known &= heads["version"] == VERSION
    itemsize = _ITEMSIZE_OF_CODE[heads["code"]]
    known &= itemsize > 0
    # More than there are bytes would not fit into what is computed of them.
    known &= (heads["counts"] <= sizes[:, None].astype(np.uint64)).all(axis=1)
    counts = np.where(known[:, None], heads["counts"], 0).astype(np.int64)
    sequences, documents = counts.T
    pairs = LENGTH.itemsize + OFFSET.itemsize
    plain = HEADER_BYTES + pairs * sequences + DOCUMENT_BOUND.itemsize * documents
    with_modes = plain + MODE.itemsize * sequences
    has_modes = sizes != plain
    known &= (sizes == plain) | (sizes == with_modes)
    known &= _ends(stored, first_byte, np.where(known, sequences, 0), itemsize) == token_bytes
    rows = np.stack([heads["code"], sequences, documents, has_modes], axis=1)
    assert rows.shape[1] == FIELDS
    return rows.astype(np.int64), known


def _ends(
    stored: NDArray[np.uint8], first_byte: Integers, sequences: Integers, itemsize: Integers
) -> Integers:
    """Where the last sequence of each ends, in bytes; -1 where that is nowhere."""
    last = np.maximum(sequences - 1, 0)
    lengths_at = first_byte + HEADER_BYTES
    offsets_at = lengths_at + LENGTH.itemsize * sequences
    lengths = _read_at(stored, lengths_at + LENGTH.itemsize * last, LENGTH.itemsize).view(LENGTH)
    offsets = _read_at(stored, offsets_at + OFFSET.itemsize * last, OFFSET.itemsize).view(OFFSET)
    ends = offsets[:, 0] + lengths[:, 0].astype(np.int64) * itemsize
    ends[(lengths[:, 0] < 0) | (offsets[:, 0] < 0)] = -1
    ends[sequences == 0] = 0
    return ends


def _read_at(stored: NDArray[np.uint8], places: Integers, size: int) -> NDArray[np.uint8]:
    """So many bytes at each place, [places, size], in memory of their own."""
    read: NDArray[np.uint8] = stored[places[:, None] + np.arange(size)]
    return read


def _itemsizes() -> Integers:
    """Bytes of a token of each dtype code; 0: no such code."""
    itemsizes = np.zeros(256, np.int64)
    for dtype, code in CODE_OF_DTYPE.items():
        itemsizes[code] = dtype.itemsize
    return itemsizes


_ITEMSIZE_OF_CODE = _itemsizes()
