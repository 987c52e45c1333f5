"""The planner: from the samples ahead to requests. Pure: extents in, buffers and rows out; nothing is
read here.

A *window* is a stretch of micro-batches planned together; a *group* is the few of them that are
gathered by one kernel call. Rows of local files need no request. Samples of the stream order are
served from their blocks, fetched whole, where memory allows that; rows whose pages are cached are
read from there; everything else is coalesced within its window.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from streammega.errors import ShortReadError
from streammega.kernels.plan import cached_rows
from streammega.loading.buffers import BufferTable
from streammega.order import Extents
from streammega.order.extents import cut_extents
from streammega.order.open_blocks import OpenBlocks, OpenedBlocks
from streammega.order.sharding import zigzag_bounds
from streammega.samples.fetch import SharedRequests, coalesce, rows_of
from streammega.storage.fetch.requests import FetchGroup

Integers = NDArray[np.int64]

MAX_WASTE = 1 / 7
"""Share of the used bytes that coalescing may fetch without use.

A fifth saves no more CPU time: the saved requests cost what the bytes do.
"""
NO_SLOT = -1
"""Of a row whose bytes have no known place yet."""
_LIKE_BYTES = np.empty(0, np.uint8)
_LIKE_ADDRESSES = np.empty(0, np.int64)


@dataclass(frozen=True, kw_only=True)
class KeptColumns:
    """Tokens [start, stop) of every sample, for each of `bounds`: equally long, and each a row of a
    batch. Without bounds a sample is kept whole, as one row.
    """

    bounds: Sequence[tuple[int, int]] = ()

    @property
    def rows_of_sample(self) -> int:
        """Rows of a batch that one sample makes."""
        return max(len(self.bounds), 1)

    def width(self, sample_width: int) -> int:
        """Tokens of a row, of samples of `sample_width` tokens."""
        if not self.bounds:
            return sample_width
        start, stop = self.bounds[0]
        return stop - start

    @property
    def starts(self) -> NDArray[np.int64]:
        """The first token of each part, int64 [rows of a sample]."""
        if not self.bounds:
            return np.zeros(1, np.int64)
        return np.array([start for start, _ in self.bounds], np.int64)

    def cut(self, extents: Extents) -> Extents:
        """The extents of what is kept, each part as a sample of its own."""
        return cut_extents(extents, self.bounds) if self.bounds else extents


WHOLE = KeptColumns()
"""Samples as they are."""


def kept_columns_of(sequence_length: int, cp_rank: int, cp_size: int) -> KeptColumns:
    """What a context-parallel rank keeps of each sample, with the token after each part: its last
    label. Raises ConfigError for a rank that does not exist: it would read others' tokens.
    """
    parts = zigzag_bounds(sequence_length, cp_rank, cp_size)
    if cp_size == 1:
        return WHOLE
    return KeptColumns(bounds=[(start, stop + 1) for start, stop in parts])


@dataclass(frozen=True, kw_only=True)
class FileTable:
    """What the planner knows of the files, all datasets end to end.

    firsts [datasets + 1]: the number of each dataset's first file. All others are [files].
    itemsize: bytes of a token. verified_at, mapped_at: where the states of cached pages and the
    addresses of cached chunks lie in memory; 0: not cached. page_bytes, chunk_bytes: of the cache.
    """

    firsts: Integers
    itemsize: Integers
    num_tokens: Integers
    local: NDArray[np.bool_]
    names: Sequence[str]
    verified_at: Integers
    mapped_at: Integers
    page_bytes: int
    chunk_bytes: int

    def files_of(self, dataset: int) -> slice:
        """The numbers of a dataset's files."""
        return slice(self.firsts[dataset], self.firsts[dataset + 1])


class Request(NamedTuple):
    """One request: bytes [start, stop) of a file, to byte `at` of the buffer."""

    file: int
    start: int
    stop: int
    at: int


@dataclass(frozen=True, kw_only=True)
class PlannedBuffer:
    """`size` bytes that are fetched, held and freed together.

    `row`: the first row of the window that needs them.
    """

    slot: int
    size: int
    row: int
    requests: Sequence[Request]


@dataclass(frozen=True, kw_only=True)
class PlanWindow:
    """Rows of consecutive samples, in their order, and the buffers that they are the first to need,
    in order of need.

    sample_ids [samples]: their numbers in the global stream; a kept part has that of its sample.
    row_splits [samples + 1]: sample i owns rows [row_splits[i], row_splits[i + 1]). Of each row,
    [rows]: its bytes begin at byte `offset` of what lies in `slot`, are `size` tokens from token
    `start` of `file` on, and go to token `column` of the sample and on.
    """

    sample_ids: Integers
    row_splits: Integers
    slot: Integers
    offset: Integers
    size: Integers
    file: Integers
    start: Integers
    column: Integers
    buffers: Sequence[PlannedBuffer]
    useful_bytes: int
    cached_bytes: int


@dataclass(frozen=True, kw_only=True)
class GatherGroup:
    """Micro-batches that are to be gathered together: the micro-steps at `consumed`, which are
    samples [first, last) of a window.

    buffers: those that no group before it needs.
    """

    window: PlanWindow
    consumed: list[int]
    first: int
    last: int
    buffers: Sequence[FetchGroup]

    @property
    def row_splits(self) -> Integers:
        """The rows of each of its samples, [samples + 1], as rows of the window."""
        return self.window.row_splits[self.first : self.last + 1]

    @property
    def rows(self) -> slice:
        """The rows of all of its samples."""
        return slice(self.window.row_splits[self.first], self.window.row_splits[self.last])

    def single_batches(self) -> Iterator[GatherGroup]:
        """Its micro-batches as groups of one, each with the buffers that no other before needs."""
        window = self.window
        first_row_of_slot: dict[int, int] = {}
        for row in range(self.rows.start, self.rows.stop):
            first_row_of_slot.setdefault(int(window.slot[row]), row)
        samples = (self.last - self.first) // len(self.consumed)
        for number, consumed in enumerate(self.consumed):
            first = self.first + number * samples
            last = first + samples
            rows = range(window.row_splits[first], window.row_splits[last])
            buffers = [
                buffer for buffer in self.buffers if first_row_of_slot.get(buffer.slot, -1) in rows
            ]
            yield GatherGroup(
                window=window, consumed=[consumed], first=first, last=last, buffers=buffers
            )


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """The rows of a window while it is planned, int64 [rows].

    start, stop: bytes of `file`. slot, offset: where those bytes will be, written as it becomes
    known. group: which of the window's groups a row belongs to.
    """

    file: Integers
    start: Integers
    stop: Integers
    slot: Integers
    offset: Integers
    group: Integers


class Planner:
    """Plans windows, one after the other.

    Args:
        files: sizes and places of the files.
        coalesce_gap_bytes, max_request_bytes: as in StorageConfig.
        blocks: the open blocks of a reader of whole lanes; None: everything is fetched window by
            window.
        kept: which tokens of every sample are read.
    """

    def __init__(
        self,
        files: FileTable,
        coalesce_gap_bytes: int,
        max_request_bytes: int,
        blocks: OpenBlocks | None,
        kept: KeptColumns = WHOLE,
    ) -> None:
        self.files = files
        self.blocks = blocks
        self.kept = kept
        self.coalesce_gap_bytes = coalesce_gap_bytes
        self.max_request_bytes = max_request_bytes
        self.table = BufferTable(len(files.itemsize))

    def plan(self, sample_ids: Integers, extents: Extents, group_samples: int) -> PlanWindow:
        """The window of some samples (or of the kept parts of them), of which every `group_samples`
        are gathered together.
        """
        files = self.files
        extents = self.kept.cut(extents)
        file = files.firsts[extents.dataset].astype(np.int64) + extents.file
        self._check(file, extents)
        in_sample = rows_of(extents)
        itemsize = files.itemsize[file]
        start_byte = extents.start * itemsize
        is_local = files.local[file]
        rows = _Rows(
            file=file,
            start=start_byte,
            stop=extents.stop * itemsize,
            slot=np.where(is_local, file, NO_SLOT),
            offset=np.where(is_local, start_byte, 0),
            group=in_sample.sample // (group_samples * self.kept.rows_of_sample),
        )
        buffers: list[PlannedBuffer] = []
        if self.blocks is not None:
            buffers += self._open_blocks(self.blocks, sample_ids, rows, extents, in_sample.sample)
        cached_bytes = self._serve_from_cache(rows)
        buffers += self._coalesce(rows)
        # memory is given to buffers in this order, so that what is needed first never waits for
        # what is needed later
        buffers.sort(key=lambda buffer: buffer.row)
        # rows without tokens were given no slot: any will do, as nothing is copied
        rows.slot[rows.slot == NO_SLOT] = 0
        remote_bytes = (rows.stop - rows.start)[~is_local]
        return PlanWindow(
            sample_ids=np.repeat(sample_ids, self.kept.rows_of_sample),
            row_splits=extents.row_splits,
            slot=rows.slot,
            offset=rows.offset,
            size=in_sample.size,
            file=file,
            start=extents.start,
            column=in_sample.column,
            buffers=buffers,
            useful_bytes=int(remote_bytes.sum()),
            cached_bytes=cached_bytes,
        )

    def jump(self, lanes: Integers) -> list[FetchGroup]:
        """The samples ahead do not follow those planned, and lie in these lanes: forget the blocks
        that are open.

        Returns the buffers that nothing planned uses any more.
        """
        if self.blocks is None:
            return []
        slots, samples_left = self.blocks.release_all(lanes)
        return self.table.cancel(slots, samples_left * self.kept.rows_of_sample)

    def _check(self, file: Integers, extents: Extents) -> None:
        """Raise ShortReadError for a row that its file does not hold: kernels look no further."""
        num_tokens = self.files.num_tokens
        outside = np.flatnonzero((extents.stop > num_tokens[file]) | (extents.start < 0))
        if not len(outside):
            return
        row = outside[0]
        number = int(file[row])
        raise ShortReadError(
            f"{self.files.names[number]}: tokens up to {int(extents.stop[row])} were asked for, "
            f"the file has {int(num_tokens[number])}; does its .idx belong to it?"
        )

    # --- samples of blocks that are fetched whole ---

    def _open_blocks(
        self,
        blocks: OpenBlocks,
        sample_ids: Integers,
        rows: _Rows,
        extents: Extents,
        sample_of_row: Integers,
    ) -> Iterator[PlannedBuffer]:
        """Buffers of blocks that open; the rows of all open blocks learn their places.

        extents, sample_of_row: of the kept parts, each as a sample.
        """
        # every sample may open a block
        free = self.table.acquire(len(sample_ids))
        slot_of_sample, offset_of_sample, opened = blocks.assign(sample_ids, free)
        self.table.return_unused(free[len(opened.slot) :])
        # such a sample is one run of tokens, and each of its kept parts one row
        rows_of_sample = self.kept.rows_of_sample
        sample, part = np.divmod(sample_of_row, rows_of_sample)
        slot = slot_of_sample[sample]
        offset = offset_of_sample[sample]
        if self.kept.bounds:
            offset = offset + self.kept.starts[part] * self.files.itemsize[rows.file]
        in_block = slot != NO_SLOT
        rows.slot[in_block] = slot[in_block]
        rows.offset[in_block] = offset[in_block]
        self.table.expect(opened.slot, opened.uses * rows_of_sample)
        runs_of_block = self._runs_of_blocks(opened)
        first_rows = extents.row_splits[opened.row * rows_of_sample].tolist()
        for number, (slot_of_block, first_row) in enumerate(
            zip(opened.slot.tolist(), first_rows, strict=True)
        ):
            size = 0
            requests: list[Request] = []
            for file, start, stop in runs_of_block[number]:
                requests += self._in_parts(file, start, stop, at=size)
                size += stop - start
            yield PlannedBuffer(slot=slot_of_block, size=size, row=first_row, requests=requests)

    def _runs_of_blocks(self, opened: OpenedBlocks) -> list[list[tuple[int, int, int]]]:
        """(file, first byte, byte after the last) of the runs of each block, in their order."""
        file = self.files.firsts[opened.dataset] + opened.file
        itemsize = self.files.itemsize[file]
        runs = zip(
            opened.block.tolist(),
            file.tolist(),
            (opened.start * itemsize).tolist(),
            (opened.stop * itemsize).tolist(),
            strict=True,
        )
        runs_of_block: list[list[tuple[int, int, int]]] = [[] for _ in opened.slot]
        for block, number, start, stop in runs:
            runs_of_block[block].append((number, start, stop))
        return runs_of_block

    # --- rows whose pages are cached ---

    def _serve_from_cache(self, rows: _Rows) -> int:
        """Rows whose pages are all there are read from the mapped chunk; returns their bytes."""
        files = self.files
        if not files.verified_at.any():
            return 0
        served: int = cached_rows(
            _LIKE_BYTES, _LIKE_ADDRESSES, files.verified_at, files.mapped_at,
            rows.file, rows.start, rows.stop, files.page_bytes, files.chunk_bytes,
            self.table.zero, rows.slot, rows.offset,
        )  # fmt: skip
        return served

    # --- everything else ---

    def _coalesce(self, rows: _Rows) -> list[PlannedBuffer]:
        """Buffers for the rows that have no place yet."""
        unplaced = np.flatnonzero((rows.slot == NO_SLOT) & (rows.stop > rows.start))
        if not len(unplaced):
            return []
        file = rows.file[unplaced]
        start = rows.start[unplaced]
        stop = rows.stop[unplaced]
        by_place = np.lexsort((start, file))
        gap = largest_gap(file[by_place], start[by_place], stop[by_place], self.coalesce_gap_bytes)
        requests = coalesce(file, start, stop, by_place, gap=gap, largest=self.max_request_bytes)
        first_row = unplaced[_first_of_each(requests.of_row, len(requests))]
        slot_of_request = np.empty(len(requests), np.int64)
        shift_of_request = np.empty(len(requests), np.int64)  # from byte of file to that of buffer
        buffers: list[PlannedBuffer] = []
        for together in self._share_buffers(requests, first_row, rows.group):
            slot = int(self.table.acquire(1)[0])
            parts, size, begins = self._end_to_end(requests, together)
            slot_of_request[together] = slot
            shift_of_request[together] = begins - requests.start[together]
            needed_by = int(first_row[together[0]])
            buffers.append(PlannedBuffer(slot=slot, size=size, row=needed_by, requests=parts))
        slot_of_row = slot_of_request[requests.of_row]
        rows.slot[unplaced] = slot_of_row
        rows.offset[unplaced] = start + shift_of_request[requests.of_row]
        slots, rows_of_slot = np.unique(slot_of_row, return_counts=True)
        self.table.expect(slots, rows_of_slot)
        return buffers

    def _share_buffers(
        self, requests: SharedRequests, first_row: Integers, group_of_row: Integers
    ) -> Iterator[list[int]]:
        """Requests that share a buffer: needed first by the same group, so that they are waited for
        together, and not more than a part, so that memory is freed in small steps.

        first_row [requests]: the row that needs it first.
        """
        first_group = group_of_row[first_row]
        size = requests.stop - requests.start
        together: list[int] = []
        bytes_together = 0
        for number in np.argsort(first_row, kind="stable").tolist():
            fits = bytes_together + size[number] <= self.max_request_bytes
            if together and not (fits and first_group[number] == first_group[together[0]]):
                yield together
                together = []
                bytes_together = 0
            together.append(number)
            bytes_together += int(size[number])
        if together:
            yield together

    def _end_to_end(
        self, requests: SharedRequests, together: list[int]
    ) -> tuple[list[Request], int, list[int]]:
        """Requests as parts of one buffer: those, its bytes, and where each request begins in it."""
        files = requests.file[together].tolist()
        starts = requests.start[together].tolist()
        stops = requests.stop[together].tolist()
        itemsizes = self.files.itemsize[files].tolist()
        parts: list[Request] = []
        begins = []
        size = 0
        for file, start, stop, itemsize in zip(files, starts, stops, itemsizes, strict=True):
            # a multiple of a token's bytes: kernels read whole tokens in place
            begin = -(-size // itemsize) * itemsize
            parts += self._in_parts(file, start, stop, begin)
            begins.append(begin)
            size = begin + stop - start
        return parts, size, begins

    def _in_parts(self, file: int, start: int, stop: int, at: int) -> list[Request]:
        """Bytes [start, stop) of a file as requests of `max_request_bytes`, to byte `at` of a buffer and
        on.
        """
        step = self.max_request_bytes
        if stop - start <= step:
            return [Request(file, start, stop, at)]
        return [
            Request(file, low, min(low + step, stop), at + low - start)
            for low in range(start, stop, step)
        ]


def _first_of_each(numbers: Integers, count: int) -> Integers:
    """The first place of each number below `count`, all of which occur."""
    first = np.full(count, len(numbers), np.int64)
    np.minimum.at(first, numbers, np.arange(len(numbers)))
    return first


def largest_gap(file: Integers, start: Integers, stop: Integers, limit: int) -> int:
    """The largest gap in bytes, up to `limit`, at which coalescing fetches at most a seventh more
    than the rows have.

    file, start, stop (bytes) [rows]: sorted by file and start.
    """
    # A row may end after the next one does: what counts is the furthest end so far within the file.
    # Files are laid end to end for it, those of these rows alone: of all there may be too many.
    number = np.cumsum(np.diff(file, prepend=file[:1]) != 0)
    file_begins = number * int(stop.max())
    furthest_end = np.maximum.accumulate(stop + file_begins) - file_begins
    gap_before = start[1:] - furthest_end[:-1]
    in_one_file = file[1:] == file[:-1]
    is_gap = in_one_file & (gap_before > 0) & (gap_before <= limit)
    # bridging the small ones first, as many as the waste allows
    gaps = np.sort(gap_before[is_gap])
    waste = np.cumsum(gaps)
    used_bytes = int((stop - start).sum())
    bridged = int(np.searchsorted(waste, MAX_WASTE * used_bytes, side="right"))
    return int(gaps[bridged - 1]) if bridged else 0
