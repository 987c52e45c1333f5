"""What the stream order needs of a shard, without reading its index: sizes, counts, and the
pointers at a split's bounds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
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
from streammega.dataset.find import open_shards, pair_told
from streammega.dataset.idx import IndexHeader, check_end, index_bytes
from streammega.dataset.index_file import READ_WHOLE
from streammega.dataset.kept_headers import adopt_kept, are_kept, rows_of_headers
from streammega.dataset.listing import NOTHING, Told
from streammega.dataset.shards import KnownShard, split_name
from streammega.dataset.small_indices import (
    MOST_KEPT_BYTES,
    READ_TOGETHER,
    SMALL_READERS,
    are_small,
    read_bodies,
    rows_of,
)
from streammega.dataset.token_file import ShardFiles, files_of
from streammega.errors import FormatError, ObjectChangedError, ObjectNotFoundError
from streammega.storage import ObjectInfo, Store
from streammega.storage.thread_pool import parallel_map

OPENERS = 32
"""Shards of a dataset that are opened at once."""
READERS = 128
"""Shards of all datasets together whose headers are read at once, where none gets fewer than
`OPENERS`: each is one answer from far away, of a few bytes.
"""


# Of thousands, each would take two to three times as long if it were frozen.
@dataclass(kw_only=True, slots=True)
class PairBounds:
    """A shard of which its sizes and counts are known; `token_at` reads a pointer.

    `bin_info`: of its tokens, decompressed.
    """

    files: ShardFiles
    store: Store
    bin_info: ObjectInfo
    dtype: np.dtype[Any]
    num_sequences: int
    num_documents: int

    @property
    def multimodal(self) -> bool:
        """Whether its sequences have modes: told by sizes alone, where a manifest
        tells the counts.
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
    shard: KnownShard | str, storage: StorageConfig, cache_dir: str | Path | None = None
) -> PairBounds:
    """Open a shard by what a manifest says, or by its header.

    What the manifest says, the sizes of both objects must bear out. Without one, the last sequence
    of the `.idx` must end where the tokens do. Raises ObjectNotFoundError, FormatError,
    StorageError.
    """
    if isinstance(shard, str):
        shard = KnownShard(name=shard)
    return _bounds(ShardFiles(shard, storage, cache_dir))


def _bounds(files: ShardFiles) -> PairBounds:
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
    return PairBounds(
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


def _checked_header(files: ShardFiles, token_bytes: int) -> IndexHeader:
    """The header of an `.idx`, which ends where its tokens do."""
    index = files.index
    if not index.is_checked:
        index.read_ahead()
        check_end(index.read_end(), token_bytes, index.url, files.url)
    return index.header


def known_pairs(
    names: Sequence[str], told: Told, storage: StorageConfig, cache_dir: str | Path | None = None
) -> dict[str, ShardFiles]:
    """The files of those datasets of a blend of which listings told all and that are plain pairs,
    with their headers, read together or kept; of few, or where one of them is not as it should be:
    none, for who opens it says what is wrong.

    Raises StorageError for what may pass when it is tried again, CacheError for a damaged file.
    """
    shards = {}
    for name in names:
        shard = pair_told(name, told)
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
    told: Told = NOTHING,
    beside: int = 1,
    known: ShardFiles | None = None,
) -> list[PairBounds]:
    """Open all shards of a dataset by their sizes and headers, and by what listings told of it. What
    `content_of` needs of its tokens is read too.

    `beside`: how many datasets are opened at the same time. known: its files, of `known_pairs`.
    Raises as read_bounds does.
    """

    def open_all(shards: Sequence[KnownShard]) -> list[PairBounds]:
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

    return open_shards(name, storage, open_all, told=told)


def content_of(pairs: Sequence[PairBounds]) -> str:
    """A digest of what a dataset holds, of its pairs as `read_dataset` opened them."""
    return content_digest(
        dtypes=[pair.dtype for pair in pairs],
        tokens=[pair.num_tokens for pair in pairs],
        ends=[pair.files.ends for pair in _at_ends(pairs)],
        sequences=sum(pair.num_sequences for pair in pairs),
        documents=sum(pair.num_documents for pair in pairs),
    )


def _at_ends(pairs: Sequence[PairBounds]) -> list[PairBounds]:
    """The first and the last pair that hold tokens."""
    return [pairs[number] for number in end_shards([pair.bin_info.size for pair in pairs])]


def _open_pairs(files: Sequence[ShardFiles], storage: StorageConfig) -> list[PairBounds]:
    """The bounds of shards. The tokens at the ends of remote `.bin` shards are read meanwhile."""
    # Where nothing is asked, threads would only take turns.
    if all(_is_told(shard) for shard in files):
        return [_bounds(shard) for shard in files]
    ends = [files[number] for number in sorted({0, len(files) - 1})]
    jobs: list[Callable[[], Any]] = [functools.partial(_bounds, shard) for shard in files]
    if all(shard.kind == "bin" and shard.shard.stored is not None for shard in ends):
        jobs.append(functools.partial(_read_ends_of, ends))
    opened = parallel_map(lambda job: job(), jobs, min(OPENERS, storage.max_requests))
    return opened[: len(files)]


def _read_ends_of(files: Sequence[ShardFiles]) -> None:
    read_ends([(shard, *shard.tokens()) for shard in files])


def _readers(most: int, beside: int, storage: StorageConfig) -> int:
    """Requests at once for a dataset, of `most` for all that are opened at the same time."""
    return min(max(OPENERS, most // beside), storage.max_requests)


def _read(
    files: Sequence[ShardFiles],
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
    files: Sequence[ShardFiles],
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

    def read_one(shard: ShardFiles) -> IndexHeader:
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
    files: Sequence[ShardFiles],
    at_ends: Sequence[ShardFiles],
    readers: int,
    read_one: Callable[[ShardFiles], IndexHeader],
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


def _is_told(files: ShardFiles) -> bool:
    """Whether all that is needed of a shard is known without a request."""
    shard = files.shard
    is_listed = shard.stored is not None and shard.index is not None
    return is_listed and (shard.entry is not None or files.index.is_checked)
