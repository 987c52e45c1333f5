"""The rows that samples consist of: tokens of files, and where in memory their bytes are.

A *row* is one run of tokens of one file, within one sample. A *slot* is the number under which kernels
find the address of a row's bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from streammega.errors import ShortReadError
from streammega.errors.cached_property import cached_property
from streammega.kernels.addresses import check_rows
from streammega.kernels.plan import coalesce_rows
from streammega.order import Extents
from streammega.order.extents import cut_extents
from streammega.order.sharding import zigzag_bounds
from streammega.samples.token_file import Runs, TokenFile

Integers = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class KeptParts:
    """The parts of every sample that a reader keeps.

    bounds: tokens [start, stop) of each part. All parts have one length, and each becomes a row of a
    batch. Without bounds the whole sample becomes one row.
    """

    bounds: Sequence[tuple[int, int]] = ()

    @property
    def rows_of_sample(self) -> int:
        """Rows of a batch that one sample makes."""
        return max(len(self.bounds), 1)

    def width(self, sample_width: int) -> int:
        """Tokens of one row of a batch if a sample has `sample_width` tokens."""
        if not self.bounds:
            return sample_width
        start, stop = self.bounds[0]
        return stop - start

    @property
    def starts(self) -> Integers:
        """The first token of each part, int64 [rows of a sample]."""
        if not self.bounds:
            return np.zeros(1, np.int64)
        return np.array([start for start, _ in self.bounds], np.int64)

    def cut(self, extents: Extents) -> Extents:
        """The extents of the kept parts, with each part as a sample."""
        return cut_extents(extents, self.bounds) if self.bounds else extents

    def cut_rows(self, array: Tensor) -> Tensor:
        """The kept parts of values of whole samples, [samples, tokens] -> [samples * parts, tokens]."""
        if not self.bounds:
            return array
        parts = [array[:, start:stop] for start, stop in self.bounds]
        return torch.stack(parts, 1).flatten(0, 1)


WHOLE = KeptParts()
"""Every sample is kept whole."""


def kept_parts_of(sequence_length: int, cp_rank: int, cp_size: int) -> KeptParts:
    """The parts of a sample that a context-parallel rank keeps.

    Each part includes the token after it, which is the part's last label. Raises ConfigError for a
    rank that does not exist.
    """
    parts = zigzag_bounds(sequence_length, cp_rank, cp_size)
    if cp_size == 1:
        return WHOLE
    return KeptParts(bounds=[(start, stop + 1) for start, stop in parts])


@dataclass(frozen=True, kw_only=True)
class FileTable:
    """What plans and kernels know of files, which are numbered through all datasets, in their order.

    firsts [datasets + 1]: the number of each dataset's first file. All other arrays are [files].
    itemsize: bytes of a token. local: whether the file is mapped into memory. verified_at, mapped_at:
    memory addresses of the states of a file's cached pages and of the addresses of its cached chunks;
    0: not cached. page_bytes, chunk_bytes: sizes of a page and a chunk of the cache.
    """

    files: Sequence[TokenFile]
    firsts: Integers
    itemsize: Integers
    num_tokens: Integers
    local: NDArray[np.bool_]
    verified_at: Integers
    mapped_at: Integers
    page_bytes: int = 1
    chunk_bytes: int = 1

    @classmethod
    def of(cls, files: Sequence[Sequence[TokenFile]]) -> FileTable:
        """The table of the files of datasets, without a cache."""
        every = [file for of_dataset in files for file in of_dataset]
        uncached = np.zeros(len(every), np.int64)
        return cls(
            files=every,
            firsts=np.cumsum([0, *map(len, files)]),
            itemsize=np.array([file.dtype.itemsize for file in every], np.int64),
            num_tokens=np.array([file.num_tokens for file in every], np.int64),
            local=np.array(
                [file.store.local_path(file.key) is not None for file in every], np.bool_
            ),
            verified_at=uncached,
            mapped_at=uncached,
        )

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """The widest dtype of the files."""
        return np.result_type(*self.dtype_numbers)

    @cached_property
    def dtype_numbers(self) -> dict[np.dtype[Any], int]:
        """A number for each dtype of the files."""
        return {dtype: number for number, dtype in enumerate({file.dtype for file in self.files})}

    @cached_property
    def dtype_of_file(self) -> Integers:
        """The number of each file's dtype, int64 [files]."""
        return np.array([self.dtype_numbers[file.dtype] for file in self.files], np.int64)

    def file_of_rows(self, extents: Extents) -> Integers:
        """The number of the file of each row."""
        return self.firsts[extents.dataset].astype(np.int64) + extents.file

    def checked_file_of_rows(self, extents: Extents) -> Integers:
        """The same. Raises ShortReadError for a row that is not within its file: kernels do not check
        this.
        """
        file = self.file_of_rows(extents)
        outside = np.flatnonzero((extents.stop > self.num_tokens[file]) | (extents.start < 0))
        if len(outside):
            row = outside[0]
            number = int(file[row])
            raise ShortReadError(
                f"{self.files[number].url}: has {int(self.num_tokens[number])} tokens, and its .idx "
                f"names tokens from {int(extents.start[row])} to {int(extents.stop[row])}; compare "
                "both by 'streammega verify', and write the dataset again"
            )
        return file


class Memory(NamedTuple):
    """Where bytes are that kernels read: addresses, room int64 [slots], the memory address of each
    slot and its bytes. zero: the slot with address 0, whose rows have their own address as offset.
    """

    addresses: Integers
    room: Integers
    zero: int


# Not frozen, nor is `PlanWindow`: a frozen one takes several times as long to make.
@dataclass(kw_only=True, slots=True)
class PlacedRows:
    """The rows of consecutive samples in their order, and where their bytes are or will be.

    Each kept part counts as a sample here. sample_ids [samples]: numbers in the global stream; a kept
    part has the number of its sample. row_splits [samples + 1]: sample i owns rows [row_splits[i],
    row_splits[i + 1]). slot, offset [rows]: a row's bytes begin at byte `offset` after the address of
    `slot`. file, start, size [rows]: a row is `size` tokens of `file`, from token `start` on.
    sample_start [rows]: the token of its sample at which it begins. dataset: of each whole sample.
    """

    sample_ids: Integers
    row_splits: Integers
    slot: Integers
    offset: Integers
    size: Integers
    file: Integers
    start: Integers
    sample_start: Integers
    dataset: Integers

    def runs(self, first: int, last: int) -> Runs:
        """The runs of tokens that samples [first, last) consist of."""
        splits = self.row_splits[first : last + 1]
        rows = slice(splits[0], splits[-1])
        return Runs(
            file=self.file[rows],
            start=self.start[rows],
            size=self.size[rows],
            sample=np.repeat(np.arange(last - first), np.diff(splits)),
            sample_start=self.sample_start[rows],
        )


class PlacedFiles(NamedTuple):
    """Rows whose bytes are in `memory`, and the files that they are of."""

    rows: PlacedRows
    memory: Memory
    table: FileTable

    def check(self, first: int, last: int) -> None:
        """Raise AssertionError unless the bytes of samples [first, last) are there, for kernels do not
        look. Each kept part counts as a sample.
        """
        rows, memory, table = self
        check_rows(
            rows.row_splits[first : last + 1],
            (rows.slot, rows.offset, rows.size, rows.file, rows.start),
            (memory.room, memory.zero),
            (table.itemsize, table.num_tokens, table.mapped_at),
            table.chunk_bytes,
            f"samples {rows.sample_ids[first]:,} and later",
        )


class SampleRows(NamedTuple):
    """size, sample, sample_start [rows]: the tokens of a row, its sample, and the token of the sample
    at which it begins; int64.
    """

    size: Integers
    sample: Integers
    sample_start: Integers


def rows_of(extents: Extents) -> SampleRows:
    """The rows of samples, end to end in each. Cost: a few numpy operations on the rows."""
    size = extents.stop - extents.start
    splits = extents.row_splits
    sample = np.repeat(np.arange(len(splits) - 1), splits[1:] - splits[:-1])
    # one entry more than rows: the last sample may have no row
    tokens_before_row = np.zeros(len(size) + 1, np.int64)
    np.cumsum(size, out=tokens_before_row[1:])
    tokens_before_sample = tokens_before_row[splits[:-1]]
    return SampleRows(
        size=size,
        sample=sample,
        sample_start=tokens_before_row[:-1] - tokens_before_sample[sample],
    )


@dataclass(frozen=True, kw_only=True)
class SharedRequests:
    """file, start, stop [requests], in the unit of the rows; of_row [rows]: the request that holds
    a row.
    """

    file: Integers
    start: Integers
    stop: Integers
    of_row: Integers

    def __len__(self) -> int:
        return len(self.file)


def coalesce(
    file: Integers,
    start: Integers,
    stop: Integers,
    by_place: Integers,
    *,
    gap: int,
    largest: int,
) -> SharedRequests:
    """Requests that cover the rows [start, stop) of files, which `by_place` sorts by file and
    start; in tokens, or all in bytes.

    Rows with at most `gap` between them share a request until it would pass `largest` (a single row
    may be larger). A row is in one request. Cost: one scan of the rows.
    """
    rows = len(file)
    of_row = np.empty(rows, np.int64)
    # as many requests as rows at most
    request_start = np.empty(rows, np.int64)
    request_stop = np.empty(rows, np.int64)
    request_file = np.empty(rows, np.int64)
    count = coalesce_rows(
        file, start, stop, by_place, gap, largest, of_row, request_start, request_stop, request_file
    )
    return SharedRequests(
        file=request_file[:count],
        start=request_start[:count],
        stop=request_stop[:count],
        of_row=of_row,
    )
