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
from streammega.dataset.find import open_shards, pair_told
from streammega.dataset.idx import IndexHeader, check_end, index_bytes
from streammega.dataset.index_file import READ_WHOLE
from streammega.dataset.kept_headers import are_kept, kept_headers, rows_of_headers
from streammega.dataset.listing import NOTHING, Told
from streammega.dataset.node_cache import cache_folder
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
from streammega.kernels.collector import take_as_old
from streammega.storage import ObjectInfo, Store
from streammega.storage.fetch.threads import each

MANY = 1000
"""Shards of which the objects that describe them are taken as old: they live as long as what is
opened, and for 10,000 of them Python's collector would look through all there is twice or more, for
0.1 s each.
"""
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
    else:
        header = _checked_header(files, bin_info.size)
        dtype = header.dtype
        num_sequences = header.sequence_count
    return PairBounds(
        files=files,
        store=store,
        bin_info=bin_info,
        dtype=_little_endian(dtype),
        num_sequences=num_sequences,
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
    try:
        headers = kept_headers(folder, shards, files, lambda: _read(files, storage, keep=True))
    except (FormatError, ObjectChangedError, ObjectNotFoundError):
        return {}
    for shard_files, header in zip(files, headers, strict=True):
        shard_files.index.adopt(header)
    return dict(zip(shards, files, strict=True))


def read_dataset(
    name: str,
    storage: StorageConfig,
    cache_dir: str | Path | None = None,
    told: Told = NOTHING,
    beside: int = 1,
    known: ShardFiles | None = None,
) -> list[PairBounds]:
    """Open all shards of a dataset by their sizes and headers, and by what listings told of it.
    `beside`: how many datasets are opened at the same time. known: its files, of `known_pairs`.
    Raises as read_bounds does.
    """

    def open_all(shards: Sequence[KnownShard]) -> list[PairBounds]:
        """The bounds of shards, of kept headers where their sums are known, otherwise by requests."""
        # Looked up again, it may be another pair.
        if known is not None and list(shards) == [known.shard]:
            return [_bounds(known)]
        if len(shards) >= MANY:
            take_as_old()  # what was listed
        files = files_of(shards, storage, cache_dir)
        if len(shards) >= MANY:
            take_as_old()
        if are_kept(files):
            folder = files[0].index.cache_dir / "idx"
            read = functools.partial(_read, files, storage, beside)
            headers = kept_headers(folder, [name], files, read)
            for shard, header in zip(files, headers, strict=True):
                shard.index.adopt(header)
        # Where nothing is asked, threads would only take turns.
        if all(_is_told(shard) for shard in files):
            return [_bounds(shard) for shard in files]
        return each(_bounds, files, min(OPENERS, storage.max_requests))

    return open_shards(name, storage, open_all, told=told, cache_dir=cache_folder(cache_dir))


def _readers(most: int, beside: int, storage: StorageConfig) -> int:
    """Requests at once for a dataset, of `most` for all that are opened at the same time."""
    return min(max(OPENERS, most // beside), storage.max_requests)


def _read(
    files: Sequence[ShardFiles], storage: StorageConfig, beside: int = 1, *, keep: bool = False
) -> NDArray[np.int64]:
    """The headers of shards, which end where their tokens do, as they are kept. `keep`: pointers
    will be read of them, if what was read of all is not too much to be held.
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
        return rows_of_headers(each(read_one, files, _readers(READERS, beside, storage)))
    readers = _readers(SMALL_READERS, beside, storage)
    rows = []
    for first in range(0, len(files), READ_TOGETHER):
        group = files[first : first + READ_TOGETHER]
        rows.append(_read_small(group, readers, read_one, keep=keep))
    return np.concatenate(rows)


def _read_small(
    files: Sequence[ShardFiles],
    readers: int,
    read_one: Callable[[ShardFiles], IndexHeader],
    *,
    keep: bool,
) -> NDArray[np.int64]:
    """As `_read`, of small ones; what is not as it should be is for `read_one`."""
    bodies = read_bodies(files, readers)
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
