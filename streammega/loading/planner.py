"""The planner: from the samples ahead to requests. Pure: extents in, holdings and rows out; nothing
is read here.

A *span* is a stretch of micro-batches planned together; a *slab* is the few of them that are
gathered by one kernel call. Rows of local files need no request. Samples of the stream order are
served from their pieces, fetched whole, where memory allows that; everything else is coalesced
within its span.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from streammega.errors import ShortReadError
from streammega.kernels.plan import cached_rows, coalesce_rows
from streammega.order import Extents
from streammega.order.extents import cut_extents
from streammega.order.lane_pieces import OpenPieces

Integers = NDArray[np.int64]
Bounds = Sequence[tuple[int, int]]
MOST_WASTE = 0.2
"""Share of the used bytes that coalescing may fetch in vain."""
ENDLESS = 1 << 60
_NO_BYTES = np.empty(0, np.uint8)
_NO_ADDRESS = np.empty(0, np.int64)


@dataclass(frozen=True, kw_only=True)
class FileTable:
    """What the planner knows of the files, all datasets end to end: arrays [files], and the number
    of each dataset's first.

    verified_at, mapped_at: where the states of cached pages and the addresses of cached chunks lie
    in memory; 0: not cached.
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


class Request(NamedTuple):
    """One request: bytes [start, stop) of a file, to byte `at` of the holding."""

    file: int
    start: int
    stop: int
    at: int


@dataclass(frozen=True, kw_only=True)
class PlannedHolding:
    """Bytes that are fetched, held and freed together.

    `row`: the first row of the span that needs them.
    """

    slot: int
    size: int
    row: int
    parts: Sequence[Request]


@dataclass(frozen=True, kw_only=True)
class Span:
    """Rows of consecutive samples, in their order, and the holdings that they are the first to
    need, in order of need.

    row_splits [samples + 1]; slot, offset (bytes), size (tokens), file, start (token of the file),
    column (token of the sample) [rows].
    """

    row_splits: Integers
    slot: Integers
    offset: Integers
    size: Integers
    file: Integers
    start: Integers
    column: Integers
    holdings: Sequence[PlannedHolding]
    useful_bytes: int
    cached_bytes: int


class Slots:
    """Numbers of holdings in use, and how many rows each has still to serve.

    The first `reserved` are never freed.
    """

    def __init__(self, reserved: int) -> None:
        self.uses = np.full(reserved, ENDLESS, np.int64)
        self.address = np.zeros(reserved, np.int64)
        self._free: list[int] = []

    def take(self, count: int) -> Integers:
        """That many unused slots. Those not needed are put back by `put_back`."""
        if len(self._free) < count:
            first = len(self.uses)
            more = max(count, first)
            self.uses = np.concatenate([self.uses, np.zeros(more, np.int64)])
            self.address = np.concatenate([self.address, np.zeros(more, np.int64)])
            self._free += range(first + more - 1, first - 1, -1)
        taken = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        return np.array(taken, np.int64)

    def put_back(self, slots: Sequence[int]) -> None:
        """These slots hold nothing any more."""
        self._free += slots


class Planner:
    """Plans spans, one after the other.

    Args: files: sizes and places of the files. coalesce_bytes, part_bytes: as in StorageConfig.
        pieces: the open pieces of a reader of whole lanes; None: everything is fetched span by
        span. bounds: tokens [start, stop) of every sample that are read, each a row of its own;
        none: the whole sample.
    """

    def __init__(
        self,
        files: FileTable,
        coalesce_bytes: int,
        part_bytes: int,
        pieces: OpenPieces | None,
        bounds: Bounds = (),
    ) -> None:
        self.files = files
        self.pieces = pieces
        self.bounds = bounds
        self.coalesce_bytes = coalesce_bytes
        self.part_bytes = part_bytes
        self.slots = Slots(len(files.itemsize) + 1)
        self.zero_slot = len(files.itemsize)
        """Stands for the address 0: rows of cached pages have their address as offset."""

    def plan(self, sample_ids: Integers, extents: Extents, slab_samples: int) -> Span:
        """The span of some samples (or of parts of them), of which every `slab_samples` are
        gathered together.
        """
        files = self.files
        if self.bounds:
            extents = cut_extents(extents, self.bounds)
            slab_samples = slab_samples * len(self.bounds)
        file = files.firsts[extents.dataset].astype(np.int64) + extents.file
        self._check(file, extents)
        size = extents.stop - extents.start
        start = extents.start * files.itemsize[file]
        stop = extents.stop * files.itemsize[file]
        splits = extents.row_splits
        before = np.cumsum(size) - size
        sample = np.repeat(np.arange(len(splits) - 1), np.diff(splits))
        column = before - (before[splits[:-1][sample]] if len(before) else before)
        slot = np.where(files.local[file], file, -1)
        offset = np.where(files.local[file], start, 0)
        holdings: list[PlannedHolding] = []
        if self.pieces is not None:
            holdings += self._pieces(sample_ids, slot, offset)
        cached = 0
        if files.verified_at.any():
            cached = cached_rows(
                _NO_BYTES, _NO_ADDRESS, files.verified_at, files.mapped_at, file, start, stop, files.page_bytes,
                files.chunk_bytes, self.zero_slot, slot, offset,
            )  # fmt: skip
        rest = np.flatnonzero((slot < 0) & (size > 0))
        if len(rest):
            holdings += self._window(rest, file, start, stop, sample // slab_samples, slot, offset)
        holdings.sort(key=lambda holding: holding.row)
        slot[slot < 0] = 0  # rows without tokens
        useful = int((stop - start)[~files.local[file]].sum())
        return Span(
            row_splits=splits,
            slot=slot,
            offset=offset,
            size=size,
            file=file,
            start=extents.start,
            column=column,
            holdings=holdings,
            useful_bytes=useful,
            cached_bytes=cached,
        )

    def jump(self, lanes: Integers) -> list[int]:
        """The samples ahead do not follow those planned, and lie in these lanes: forget the pieces
        that are open.

        Returns slots that nothing planned uses any more.
        """
        if self.pieces is None:
            return []
        slots, left = self.pieces.close_all(lanes)
        self.slots.uses[slots] -= left * max(len(self.bounds), 1)
        return [int(slot) for slot in slots if self.slots.uses[slot] == 0]

    def _check(self, file: Integers, extents: Extents) -> None:
        bad = np.flatnonzero((extents.stop > self.files.num_tokens[file]) | (extents.start < 0))
        if len(bad):
            at = int(file[bad[0]])
            raise ShortReadError(
                f"{self.files.names[at]}: tokens up to {int(extents.stop[bad[0]])} were asked for, the file has "
                f"{int(self.files.num_tokens[at])}; does its .idx belong to it?"
            )

    def _pieces(
        self, sample_ids: Integers, slot: Integers, offset: Integers
    ) -> Iterator[PlannedHolding]:
        """Holdings of pieces that open; rows of all open pieces learn their places."""
        assert self.pieces is not None
        free = self.slots.take(len(sample_ids))
        of_piece, within, new = self.pieces.follow(sample_ids, free)
        parts = max(len(self.bounds), 1)
        if self.bounds:  # samples of the stream order are whole: each has a row for every part
            begin = np.array([low for low, _ in self.bounds], np.int64)
            itemsize = self.pieces.itemsizes[self.pieces.order.locate(sample_ids).dataset]
            of_piece = np.repeat(of_piece, parts)
            within = (within[:, None] + begin * itemsize[:, None]).reshape(-1)
        served = of_piece >= 0
        slot[served], offset[served] = of_piece[served], within[served]
        self.slots.put_back(free[len(new.slot) :].tolist()[::-1])
        self.slots.uses[new.slot] = new.uses * parts
        file = self.files.firsts[new.dataset] + new.file
        itemsize = self.files.itemsize[file]
        start = new.start * itemsize
        stop = new.stop * itemsize
        size = stop - start
        ends = np.cumsum(size)
        bounds = np.searchsorted(new.piece, np.arange(len(new.slot) + 1))
        base = (ends - size)[bounds[:-1]] if len(new.slot) else ends
        runs = list(
            zip(file.tolist(), start.tolist(), stop.tolist(), (ends - size).tolist(), strict=True)
        )
        for number, (own, row) in enumerate(
            zip(new.slot.tolist(), (new.row * parts).tolist(), strict=True)
        ):
            first = int(base[number])
            own_runs = runs[bounds[number] : bounds[number + 1]]
            reads = [part for f, a, b, at in own_runs for part in self._split(f, a, b, at - first)]
            yield PlannedHolding(
                slot=own, size=sum(part.stop - part.start for part in reads), row=row, parts=reads
            )

    def _window(
        self,
        rest: Integers,
        file: Integers,
        start: Integers,
        stop: Integers,
        slab: Integers,
        slot: Integers,
        offset: Integers,
    ) -> list[PlannedHolding]:
        """Holdings of coalesced requests, grouped by the slab that first needs them."""
        f = file[rest]
        a = start[rest]
        b = stop[rest]
        order = np.lexsort((a, f))
        count = len(rest)
        request = np.empty(count, np.int64)
        low, high, of_file = (np.empty(count, np.int64) for _ in range(3))
        gap = largest_gap(f[order], a[order], b[order], self.coalesce_bytes)
        made = coalesce_rows(f, a, b, order, gap, self.part_bytes, request, low, high, of_file)
        first = np.full(made, count, np.int64)
        np.minimum.at(first, request, np.arange(count))
        by_need = np.argsort(first, kind="stable")
        holdings: list[PlannedHolding] = []
        slot_of = np.empty(made, np.int64)
        base_of = np.empty(made, np.int64)
        for members in self._groups(by_need, slab[rest[first]], high - low):
            own = int(self.slots.take(1)[0])
            at = 0
            parts = []
            for number in members:
                size = int(high[number] - low[number])
                width = int(self.files.itemsize[of_file[number]])
                at = -(-at // width) * width
                slot_of[number], base_of[number] = own, at - low[number]
                parts += self._split(int(of_file[number]), int(low[number]), int(high[number]), at)
                at += size
            holdings.append(
                PlannedHolding(slot=own, size=at, row=int(rest[first[members[0]]]), parts=parts)
            )
        slot[rest], offset[rest] = slot_of[request], base_of[request] + a
        slots, uses = np.unique(slot_of[request], return_counts=True)
        self.slots.uses[slots] = uses
        return holdings

    def _groups(self, by_need: Integers, slab: Integers, size: Integers) -> Iterator[list[int]]:
        """Requests that share a holding: needed first by the same slab, not more than a part
        together.
        """
        members: list[int] = []
        total = 0
        for number in by_need.tolist():
            if members and (
                slab[number] != slab[members[0]] or total + size[number] > self.part_bytes
            ):
                yield members
                members = []
                total = 0
            members.append(number)
            total += int(size[number])
        if members:
            yield members

    def _split(self, file: int, start: int, stop: int, at: int) -> list[Request]:
        """A request in parts of `part_bytes`."""
        step = self.part_bytes
        if stop - start <= step:
            return [Request(file, start, stop, at)]
        return [
            Request(file, low, min(low + step, stop), at + low - start)
            for low in range(start, stop, step)
        ]


def largest_gap(file: Integers, start: Integers, stop: Integers, limit: int) -> int:
    """The largest gap, up to `limit`, at which coalescing sorted rows fetches at most a fifth more
    than the rows have.
    """
    ends = np.maximum.accumulate(stop + file * (1 << 48)) - file * (1 << 48)
    gaps = start[1:] - ends[:-1]
    gaps = np.sort(gaps[(file[1:] == file[:-1]) & (gaps > 0) & (gaps <= limit)])
    fits = np.cumsum(gaps) <= MOST_WASTE * int((stop - start).sum())
    return int(gaps[fits][-1]) if fits.any() else 0
