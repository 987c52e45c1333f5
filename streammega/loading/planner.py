"""The planner turns the samples ahead into requests. It takes extents, returns rows and buffers, and
reads nothing itself.

A *window* is a stretch of micro-batches that are planned together. A *group* is a few micro-batches
of a window that one kernel call gathers. A *row* is one run of tokens of one sample. A *slot* is the
number under which kernels find the address of a row's bytes.

A row of a local file needs no request. If memory allows it, the planner fetches whole blocks of the
stream order and serves their samples from them. A row whose pages are cached is read from the cache.
All other rows of a window are coalesced into requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from streammega.kernels.plan import cached_rows
from streammega.loading.buffers import BufferTable
from streammega.order import Extents
from streammega.order.open_blocks import OpenBlocks, OpenedBlocks
from streammega.samples.rows import (
    WHOLE,
    FileTable,
    KeptParts,
    PlacedRows,
    SharedRequests,
    coalesce,
    rows_of,
)
from streammega.storage.fetch.buffer_pool import rounded
from streammega.storage.fetch.requests import FetchGroup

Integers = NDArray[np.int64]

MAX_WASTE = 1 / 7
"""Bytes that coalescing may fetch without use, as a share of the used bytes.

A share of 1/5 saves no more CPU time: the additional bytes cost as much as the saved requests.
"""
PIECE_BYTES = 7 << 20
"""Bytes of a resident file that are fetched together: with a sample behind them, one request."""
NO_SLOT = -1
"""The slot of a row whose bytes have no place yet."""
_LIKE_BYTES = np.empty(0, np.uint8)
_LIKE_ADDRESSES = np.empty(0, np.int64)


class Request(NamedTuple):
    """Fetches bytes [start, stop) of a file to byte `at` of a buffer."""

    file: int
    start: int
    stop: int
    at: int


@dataclass(frozen=True, kw_only=True)
class PlannedBuffer:
    """`size` bytes that are held and freed together, and the requests that fill them.

    row: the number of the first row of the window that needs the buffer.
    """

    slot: int
    size: int
    row: int
    requests: Sequence[Request]

    @property
    def fetched_bytes(self) -> int:
        """Bytes of all requests."""
        return sum(request.stop - request.start for request in self.requests)


@dataclass(kw_only=True, slots=True)
class PlanWindow(PlacedRows):
    """The rows of consecutive samples, and the buffers to fetch for them.

    Buffers are in the order of the first row that needs them. Buffers of earlier windows may serve rows
    of this window too. useful_bytes: bytes of all remote rows. cached_bytes: those that the page cache
    serves.
    """

    buffers: Sequence[PlannedBuffer]
    useful_bytes: int
    cached_bytes: int

    @property
    def first_samples(self) -> Integers:
        """The sample that needs each buffer first, int64 [buffers]."""
        first_row = np.array([planned.row for planned in self.buffers], np.int64)
        part = np.searchsorted(self.row_splits, first_row, side="right") - 1
        return part // self.rows_of_sample

    def rows_of(self, first: int, last: int) -> slice:
        """The rows of samples [first, last)."""
        parts = self.rows_of_sample
        return slice(self.row_splits[first * parts], self.row_splits[last * parts])

    @property
    def rows_of_sample(self) -> int:
        """Kept parts of a sample."""
        return len(self.sample_ids) // max(len(self.dataset), 1)


@dataclass(frozen=True, kw_only=True)
class GatherGroup:
    """Micro-batches to gather together: samples [first, last) of a stretch that was planned at once.

    consumed: the position of each micro-batch. windows: of ids and of each stored column; buffers: of
    each window, those that no earlier group needs.
    """

    windows: Sequence[PlanWindow]
    consumed: list[int]
    first: int
    last: int
    buffers: Sequence[Sequence[FetchGroup]]

    @property
    def all_buffers(self) -> list[FetchGroup]:
        """The buffers of all windows, one window after the other."""
        return [buffer for of_window in self.buffers for buffer in of_window]

    def single_batches(self) -> Iterator[GatherGroup]:
        """Cut the group into groups of one micro-batch.

        The engine does this after a group has failed, to hand out the micro-batches before the one
        that fails. Each of them has the buffers that no earlier one needs.
        """
        samples = (self.last - self.first) // len(self.consumed)
        first_rows = []
        for window in self.windows:
            rows = window.rows_of(self.first, self.last)
            first_row_of_slot: dict[int, int] = {}
            for row in range(rows.start, rows.stop):
                first_row_of_slot.setdefault(int(window.slot[row]), row)
            first_rows.append(first_row_of_slot)
        for number, consumed in enumerate(self.consumed):
            first = self.first + number * samples
            last = first + samples
            buffers = []
            for window, of_window, first_row in zip(
                self.windows, self.buffers, first_rows, strict=True
            ):
                rows = window.rows_of(first, last)
                here = range(rows.start, rows.stop)
                buffers.append([one for one in of_window if first_row.get(one.slot, -1) in here])
            yield replace(self, consumed=[consumed], first=first, last=last, buffers=buffers)


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """The rows of a window while it is planned, int64 [rows].

    file, start, stop: a row is bytes [start, stop) of a file. slot, offset: where these bytes will
    be; the stages of `Planner.plan` write both in place. group: the number of the row's group within
    the window.
    """

    file: Integers
    start: Integers
    stop: Integers
    slot: Integers
    offset: Integers
    group: Integers


@dataclass(frozen=True, kw_only=True)
class Resident:
    """Files of small datasets, whose bytes stay in memory once a row has asked for them.

    start, stop: int64 [files], the bytes that may be read; equal in files that are not resident.
    row_bytes: int64 [files], the most bytes of a row. They are fetched in pieces of PIECE_BYTES, each
    with the bytes behind it that its last row may have.
    """

    start: Integers
    stop: Integers
    row_bytes: Integers

    def pieces(self) -> Integers:
        """How many pieces each file has, int64 [files]."""
        return -(-(self.stop - self.start) // PIECE_BYTES)

    def piece(self, file: int, number: int) -> tuple[int, int]:
        """Bytes [start, stop) of a piece of a file."""
        start = int(self.start[file]) + number * PIECE_BYTES
        stop = start + PIECE_BYTES + int(self.row_bytes[file])
        return start, min(stop, int(self.stop[file]))

    def bytes_in_memory(self, file: int) -> int:
        """Bytes of the buffers of all pieces of a file."""
        pieces = [self.piece(file, number) for number in range(int(self.pieces()[file]))]
        return sum(rounded(stop - start) for start, stop in pieces)


class Planner:
    """Plans windows, one after the other, of ids or of one stored column.

    Windows have to follow each other in the order of samples, because a block that one window opens
    serves later windows too. Call `follow_lanes` before a window that does not follow the last one.

    Args:
        files: sizes and places of the files.
        coalesce_gap_bytes, max_request_bytes: as in StorageConfig.
        blocks: the open blocks, for a reader that takes every sample of some lanes. None: each window
            fetches its own bytes.
        kept: which tokens of every sample are read.
        resident: the files whose bytes stay in memory; None: there are none.
    """

    def __init__(
        self,
        files: FileTable,
        coalesce_gap_bytes: int,
        max_request_bytes: int,
        blocks: OpenBlocks | None,
        kept: KeptParts = WHOLE,
        resident: Resident | None = None,
    ) -> None:
        self.files = files
        self.blocks = blocks
        self.kept = kept
        self.coalesce_gap_bytes = coalesce_gap_bytes
        self.max_request_bytes = max_request_bytes
        # The slot of a file is its number; buffers have the slots after these.
        self.table = BufferTable(len(files.itemsize))
        self._resident = resident
        if resident is not None:
            pieces = resident.pieces()
            self._is_resident = pieces > 0
            self._first_piece = np.cumsum(pieces) - pieces
            self._slot_of_piece = np.full(int(pieces.sum()), NO_SLOT)

    def plan(self, sample_ids: Integers, extents: Extents, group_samples: int) -> PlanWindow:
        """Plan the window of some samples. `group_samples` of them form a group.

        sample_ids is int64 [samples]; extents has the same samples, before they are cut into parts.

        Each stage places some rows, which means that it writes their slot and offset. A stage must
        leave rows alone that have a slot. Local rows come first, then blocks, cache, resident files and
        coalescing. Blocks need no check of this, because `read_plan` only follows datasets without
        local files.
        At the end every row that has tokens is placed.

        The table counts the uses of each fetched slot: the rows with tokens that the slot serves, in
        this window and in later ones. The engine frees the buffer after as many rows are gathered.
        """
        files = self.files
        dataset = extents.dataset_of_sample
        extents = self.kept.cut(extents)
        file = files.checked_file_of_rows(extents)
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
        if self._resident is not None:
            buffers += self._pieces_of_resident(self._resident, rows)
        buffers += self._coalesce(rows)
        # The fetcher allocates memory in this order. So a buffer never waits for memory that a buffer
        # of later rows holds, and `Lookahead` can cut the list into groups.
        buffers.sort(key=lambda buffer: buffer.row)
        # rows without tokens still have no slot: any slot serves, since nothing is copied
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
            sample_start=in_sample.sample_start,
            dataset=dataset,
            buffers=buffers,
            useful_bytes=int(remote_bytes.sum()),
            cached_bytes=cached_bytes,
        )

    def follow_lanes(self, lanes: Integers) -> list[FetchGroup]:
        """Close all open blocks, and take samples from these lanes from now on.

        Returns the buffers that no planned row uses. Buffers that planned rows use are freed later,
        after these rows are gathered.
        """
        if self.blocks is None:
            return []
        slots, samples_left = self.blocks.release_all(lanes)
        return self.table.cancel(slots, samples_left * self.kept.rows_of_sample)

    # --- rows in blocks that are fetched whole ---

    def _open_blocks(
        self,
        blocks: OpenBlocks,
        sample_ids: Integers,
        rows: _Rows,
        extents: Extents,
        sample_of_row: Integers,
    ) -> Iterator[PlannedBuffer]:
        """Place the rows of all open blocks. Yield the buffers of the blocks that open in this window.

        extents and sample_of_row count each kept part as a sample; sample_ids does not.
        """
        # each sample may open a block
        free = self.table.acquire(len(sample_ids))
        slot_of_sample, offset_of_sample, opened = blocks.assign(sample_ids, free)
        self.table.return_unused(free[len(opened.slot) :])
        # A sample in a block is one run of tokens, so each of its kept parts is one row.
        rows_of_sample = self.kept.rows_of_sample
        sample, part = np.divmod(sample_of_row, rows_of_sample)
        slot = slot_of_sample[sample]
        offset = offset_of_sample[sample]
        if self.kept.bounds:
            offset = offset + self.kept.starts[part] * self.files.itemsize[rows.file]
        in_block = slot != NO_SLOT
        rows.slot[in_block] = slot[in_block]
        rows.offset[in_block] = offset[in_block]
        self.table.expect_rows(opened.slot, opened.uses * rows_of_sample)
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
        """(file, start, stop) in bytes of each run, listed by block, in the order of the runs."""
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
        """Place the rows whose pages are all cached in the mapped chunk. Returns their bytes."""
        files = self.files
        if not files.verified_at.any():
            return 0
        served: int = cached_rows(
            _LIKE_BYTES, _LIKE_ADDRESSES, files.verified_at, files.mapped_at,
            rows.file, rows.start, rows.stop, files.num_tokens * files.itemsize, files.page_bytes, files.chunk_bytes,
            self.table.zero, rows.slot, rows.offset,
        )  # fmt: skip
        return served

    # --- rows of files that stay in memory ---

    def _pieces_of_resident(self, resident: Resident, rows: _Rows) -> list[PlannedBuffer]:
        """Place the rows of resident files. Returns the pieces that no window has asked for before."""
        has_tokens = rows.stop > rows.start
        places = np.flatnonzero((rows.slot == NO_SLOT) & has_tokens & self._is_resident[rows.file])
        if not len(places):
            return []
        file = rows.file[places]
        number, offset = np.divmod(rows.start[places] - resident.start[file], PIECE_BYTES)
        piece = self._first_piece[file] + number
        fetched, first = np.unique(piece, return_index=True)
        is_new = self._slot_of_piece[fetched] == NO_SLOT
        buffers = []
        for where in first[is_new].tolist():
            slot = int(self.table.acquire(1)[0])
            self.table.keep(slot)
            self._slot_of_piece[piece[where]] = slot
            of_file = int(file[where])
            begin, end = resident.piece(of_file, int(number[where]))
            requests = self._in_parts(of_file, begin, end, 0)
            row = int(places[where])
            buffers.append(PlannedBuffer(slot=slot, size=end - begin, row=row, requests=requests))
        rows.slot[places] = self._slot_of_piece[piece]
        rows.offset[places] = offset
        return buffers

    # --- everything else ---

    def _coalesce(self, rows: _Rows) -> list[PlannedBuffer]:
        """Place all other rows that have tokens. Returns the buffers to fetch for them."""
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
        shift_of_request = np.empty(len(requests), np.int64)  # byte in buffer minus byte in file
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
        self.table.expect_rows(slots, rows_of_slot)
        return buffers

    def _share_buffers(
        self, requests: SharedRequests, first_row: Integers, group_of_row: Integers
    ) -> Iterator[list[int]]:
        """Yield the numbers of the requests that share a buffer.

        The same group needs them first, so that it waits for all of them together. They have at most
        `max_request_bytes` together, so that memory is freed in small steps.

        first_row [requests]: the first row that needs a request. group_of_row [rows].
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
        """Lay requests end to end in one buffer.

        Returns the parts to fetch, the bytes of the buffer, and the byte at which each request begins.
        """
        files = requests.file[together].tolist()
        starts = requests.start[together].tolist()
        stops = requests.stop[together].tolist()
        itemsizes = self.files.itemsize[files].tolist()
        parts: list[Request] = []
        begins = []
        size = 0
        for file, start, stop, itemsize in zip(files, starts, stops, itemsizes, strict=True):
            # a multiple of a token's bytes, because kernels read aligned tokens
            begin = -(-size // itemsize) * itemsize
            parts += self._in_parts(file, start, stop, begin)
            begins.append(begin)
            size = begin + stop - start
        return parts, size, begins

    def _in_parts(self, file: int, start: int, stop: int, at: int) -> list[Request]:
        """Cut bytes [start, stop) of a file into requests of at most `max_request_bytes`.

        They are written one after the other, from byte `at` of the buffer on.
        """
        step = self.max_request_bytes
        return [
            Request(file, low, min(low + step, stop), at + low - start)
            for low in range(start, stop, step)
        ]


def _first_of_each(numbers: Integers, count: int) -> Integers:
    """The index at which each number below `count` first occurs. Each of them must occur."""
    first = np.full(count, len(numbers), np.int64)
    np.minimum.at(first, numbers, np.arange(len(numbers)))
    return first


def largest_gap(file: Integers, start: Integers, stop: Integers, limit: int) -> int:
    """The largest gap in bytes, up to `limit`, that coalescing may bridge.

    Bridging all gaps up to it fetches at most MAX_WASTE more bytes than the rows have.

    file, start, stop (bytes) [rows]: sorted by file and start.
    """
    # A row may end after the next row does, so a gap is measured from the furthest end so far in its
    # file. To scan all files at once, the files of these rows get offsets as if laid end to end.
    number = np.cumsum(np.diff(file, prepend=file[:1]) != 0)
    file_begins = number * int(stop.max())
    furthest_end = np.maximum.accumulate(stop + file_begins) - file_begins
    gap_before = start[1:] - furthest_end[:-1]
    in_one_file = file[1:] == file[:-1]
    is_gap = in_one_file & (gap_before > 0) & (gap_before <= limit)
    # bridge the smallest gaps first, as many as the waste allows
    gaps = np.sort(gap_before[is_gap])
    waste = np.cumsum(gaps)
    used_bytes = int((stop - start).sum())
    bridged = int(np.searchsorted(waste, MAX_WASTE * used_bytes, side="right"))
    return int(gaps[bridged - 1]) if bridged else 0
