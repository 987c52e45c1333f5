"""The planner: from the samples ahead to requests. Pure: extents in, holdings and rows out; nothing
is read here.

A *span* is a stretch of micro-batches planned together; a *slab* is the few of them that are
gathered by one kernel call. Rows of local files need no request. Samples of the stream order are
served from their pieces, fetched whole, where memory allows that; rows whose pages are cached are
read from there; everything else is coalesced within its span.

A *slot* is the number under which kernels find the bytes of a holding. It goes one way:

    | state    | by         | when                                                            |
    |----------|------------|-----------------------------------------------------------------|
    | free     |            | nothing refers to it                                            |
    | taken    | `take`     | the planner numbers a holding                                   |
    | expected | `expect`   | it is known how many rows the holding serves (`uses`)           |
    | held     | `hold`     | its reads go to the fetcher                                     |
    | filled   | `fill`     | its bytes are there: kernels may follow `addresses`             |
    | free     | `serve`    | the last of its rows was gathered                               |
    | free     | `cancel`   | its other rows will not come, and those planned were gathered   |
    | free     | `put_back` | it was taken, and not needed after all                          |

Everything here runs in the thread that plans and gathers, so there is no lock.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from streammega.errors import ShortReadError
from streammega.kernels.plan import cached_rows, count_down
from streammega.loading.rank_args import WHOLE, KeptParts
from streammega.loading.spans import FileTable, Integers, PlannedHolding, Request, Span
from streammega.order import Extents
from streammega.order.open_blocks import OpenBlocks, OpenedBlocks
from streammega.samples.fetch import SharedRequests, coalesce, rows_of
from streammega.storage.fetch.requests import FetchGroup
from streammega.storage.store import address_of

MOST_WASTE = 1 / 7
"""Share of the used bytes that coalescing may fetch in vain.

A fifth saves no CPU time beside it: the requests that are saved cost what the bytes do.
"""
NO_SLOT = -1
"""Of a row of which it is not known yet where its bytes will be."""
ENDLESS = 1 << 60
"""Uses of a slot that is never freed: more rows than any run gathers."""
_LIKE_BYTES = np.empty(0, np.uint8)
_LIKE_ADDRESSES = np.empty(0, np.int64)


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """The rows of a span while it is planned, int64 [rows].

    start, stop: bytes of `file`. slot, offset: where those bytes will be, written as it becomes
    known. slab: which of the span's slabs a row belongs to.
    """

    file: Integers
    start: Integers
    stop: Integers
    slot: Integers
    offset: Integers
    slab: Integers


class Slots:
    """Slots of `files` files, numbered as they are, one of address 0, and those of holdings.

    uses, addresses: int64 [slots]: the rows that each has still to serve, and where its bytes lie.
    Both are replaced by longer arrays when slots run out: do not keep them.
    """

    def __init__(self, files: int) -> None:
        self.zero = files
        """The slot of address 0: rows that refer to it have their address as offset."""
        never_freed = files + 1
        self.uses: Integers = np.full(never_freed, ENDLESS, np.int64)
        self.addresses: Integers = np.zeros(never_freed, np.int64)
        self.holdings: dict[int, FetchGroup] = {}
        """Those that were not given back yet, by slot."""
        self._free: list[int] = []

    def map_files(self, addresses: list[int]) -> None:
        """The addresses of mapped files, 0 where one is not mapped, by number of the file."""
        self.addresses[: len(addresses)] = addresses

    def take(self, count: int) -> Integers:
        """That many free slots. Those not needed are put back by `put_back`."""
        if len(self._free) < count:
            self._grow(count)
        kept = len(self._free) - count
        taken = self._free[kept:]
        del self._free[kept:]
        return np.array(taken, np.int64)

    def _grow(self, count: int) -> None:
        """Add at least `count` slots, and as many as there are: arrays are copied seldom."""
        first = len(self.uses)
        more = max(count, first)
        unused = np.zeros(more, np.int64)
        self.uses = np.concatenate([self.uses, unused])
        self.addresses = np.concatenate([self.addresses, unused])
        # the lowest last, so that it is taken first
        self._free += range(first + more - 1, first - 1, -1)

    def put_back(self, slots: Integers) -> None:
        """These slots, in the order in which they were taken, are not needed after all."""
        self._free += slots[::-1].tolist()

    def expect(self, slots: Integers, rows: Integers) -> None:
        """Slot slots[i] will serve rows[i] rows."""
        self.uses[slots] = rows

    def hold(self, holding: FetchGroup) -> None:
        """Keep a holding whose bytes will come."""
        self.holdings[holding.slot] = holding

    def fill(self, holding: FetchGroup) -> None:
        """The bytes of a holding are there."""
        assert holding.buffer is not None
        self.addresses[holding.slot] = address_of(holding.buffer)

    def serve(self, slot_of_row: Integers, tokens_of_row: Integers) -> list[FetchGroup]:
        """These rows were gathered: the holdings that serve no other, whose slots are free now."""
        most = np.empty(len(self.holdings), np.int64)
        freed = count_down(self.uses, slot_of_row, tokens_of_row, most)
        return self._release(most[:freed].tolist())

    def cancel(self, slots: Integers, rows: Integers) -> list[FetchGroup]:
        """Rows[i] of the rows that slots[i] was to serve will not come: the holdings that serve no
        other.
        """
        self.uses[slots] -= rows
        return self._release(slots[self.uses[slots] == 0].tolist())

    def _release(self, slots: list[int]) -> list[FetchGroup]:
        self._free += slots
        return [self.holdings.pop(slot) for slot in slots]

    def forget(self) -> None:
        """Reading has ended: refer to no holding any more."""
        self.holdings.clear()


class Planner:
    """Plans spans, one after the other.

    Args:
        files: sizes and places of the files.
        coalesce_bytes, part_bytes: as in StorageConfig.
        pieces: the open pieces of a reader of whole lanes; None: everything is fetched span by
            span.
        kept: which tokens of every sample are read.
    """

    def __init__(
        self,
        files: FileTable,
        coalesce_bytes: int,
        part_bytes: int,
        pieces: OpenBlocks | None,
        kept: KeptParts = WHOLE,
    ) -> None:
        self.files = files
        self.pieces = pieces
        self.kept = kept
        self.coalesce_bytes = coalesce_bytes
        self.part_bytes = part_bytes
        self.slots = Slots(len(files.itemsize))

    def plan(self, sample_ids: Integers, extents: Extents, slab_samples: int) -> Span:
        """The span of some samples (or of the kept parts of them), of which every `slab_samples`
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
            slab=in_sample.sample // (slab_samples * self.kept.rows_of_sample),
        )
        holdings: list[PlannedHolding] = []
        if self.pieces is not None:
            holdings += self._open_pieces(self.pieces, sample_ids, rows, extents, in_sample.sample)
        cached_bytes = self._serve_from_cache(rows)
        holdings += self._coalesce(rows)
        # memory is given to holdings in this order, so that what is needed first never waits for
        # what is needed later
        holdings.sort(key=lambda holding: holding.row)
        # rows without tokens were given no slot: any will do, as nothing is copied
        rows.slot[rows.slot == NO_SLOT] = 0
        remote_bytes = (rows.stop - rows.start)[~is_local]
        return Span(
            sample_ids=np.repeat(sample_ids, self.kept.rows_of_sample),
            row_splits=extents.row_splits,
            slot=rows.slot,
            offset=rows.offset,
            size=in_sample.size,
            file=file,
            start=extents.start,
            column=in_sample.column,
            holdings=holdings,
            useful_bytes=int(remote_bytes.sum()),
            cached_bytes=cached_bytes,
        )

    def jump(self, lanes: Integers) -> list[FetchGroup]:
        """The samples ahead do not follow those planned, and lie in these lanes: forget the pieces
        that are open.

        Returns the holdings that nothing planned uses any more.
        """
        if self.pieces is None:
            return []
        slots, samples_left = self.pieces.release_all(lanes)
        return self.slots.cancel(slots, samples_left * self.kept.rows_of_sample)

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

    # --- samples of pieces that are fetched whole ---

    def _open_pieces(
        self,
        pieces: OpenBlocks,
        sample_ids: Integers,
        rows: _Rows,
        extents: Extents,
        sample_of_row: Integers,
    ) -> Iterator[PlannedHolding]:
        """Holdings of pieces that open; the rows of all open pieces learn their places.

        extents, sample_of_row: of the kept parts, each as a sample.
        """
        # every sample may open a piece
        free = self.slots.take(len(sample_ids))
        slot_of_sample, offset_of_sample, opened = pieces.assign(sample_ids, free)
        self.slots.put_back(free[len(opened.slot) :])
        self._place_in_pieces(slot_of_sample, offset_of_sample, rows, sample_of_row)
        rows_of_sample = self.kept.rows_of_sample
        self.slots.expect(opened.slot, opened.uses * rows_of_sample)
        runs = self._requests_of(opened)
        first_rows = extents.row_splits[opened.row * rows_of_sample].tolist()
        for piece, (slot, first_row) in enumerate(
            zip(opened.slot.tolist(), first_rows, strict=True)
        ):
            size = 0
            requests: list[Request] = []
            for file, start, stop in runs[piece]:
                requests += self._in_parts(file, start, stop, at=size)
                size += stop - start
            yield PlannedHolding(slot=slot, size=size, row=first_row, parts=requests)

    def _place_in_pieces(
        self,
        slot_of_sample: Integers,
        offset_of_sample: Integers,
        rows: _Rows,
        sample_of_row: Integers,
    ) -> None:
        """Tell the rows of samples that lie in an open piece where that will be: such a sample is
        one run of tokens, and each of its kept parts one row.
        """
        sample, part = np.divmod(sample_of_row, self.kept.rows_of_sample)
        slot = slot_of_sample[sample]
        offset = offset_of_sample[sample]
        if self.kept.bounds:
            offset = offset + self.kept.starts[part] * self.files.itemsize[rows.file]
        in_piece = slot != NO_SLOT
        rows.slot[in_piece] = slot[in_piece]
        rows.offset[in_piece] = offset[in_piece]

    def _requests_of(self, opened: OpenedBlocks) -> list[list[tuple[int, int, int]]]:
        """(file, first byte, byte after the last) of the runs of each piece, in their order."""
        file = self.files.firsts[opened.dataset] + opened.file
        itemsize = self.files.itemsize[file]
        runs = zip(
            opened.block.tolist(),
            file.tolist(),
            (opened.start * itemsize).tolist(),
            (opened.stop * itemsize).tolist(),
            strict=True,
        )
        runs_of_piece: list[list[tuple[int, int, int]]] = [[] for _ in opened.slot]
        for piece, number, start, stop in runs:
            runs_of_piece[piece].append((number, start, stop))
        return runs_of_piece

    # --- rows whose pages are cached ---

    def _serve_from_cache(self, rows: _Rows) -> int:
        """Rows whose pages are all there are read from the mapped chunk; returns their bytes."""
        files = self.files
        if not files.verified_at.any():
            return 0
        served: int = cached_rows(
            _LIKE_BYTES, _LIKE_ADDRESSES, files.verified_at, files.mapped_at,
            rows.file, rows.start, rows.stop, files.page_bytes, files.chunk_bytes,
            self.slots.zero, rows.slot, rows.offset,
        )  # fmt: skip
        return served

    # --- everything else ---

    def _coalesce(self, rows: _Rows) -> list[PlannedHolding]:
        """Holdings for the rows that have no place yet."""
        left = np.flatnonzero((rows.slot == NO_SLOT) & (rows.stop > rows.start))
        if not len(left):
            return []
        requests = self._share_requests(rows.file[left], rows.start[left], rows.stop[left])
        first_row = left[_first_of_each(requests.of_row, len(requests))]
        slot_of_request = np.empty(len(requests), np.int64)
        shift_of_request = np.empty(len(requests), np.int64)  # from byte of file to that of holding
        holdings: list[PlannedHolding] = []
        for group in self._groups(requests, first_row, rows.slab):
            slot = int(self.slots.take(1)[0])
            parts, size, begins = self._end_to_end(requests, group)
            slot_of_request[group] = slot
            shift_of_request[group] = begins - requests.start[group]
            needed_by = int(first_row[group[0]])
            holdings.append(PlannedHolding(slot=slot, size=size, row=needed_by, parts=parts))
        slot_of_row = slot_of_request[requests.of_row]
        rows.slot[left] = slot_of_row
        rows.offset[left] = rows.start[left] + shift_of_request[requests.of_row]
        slots, rows_of_slot = np.unique(slot_of_row, return_counts=True)
        self.slots.expect(slots, rows_of_slot)
        return holdings

    def _end_to_end(
        self, requests: SharedRequests, group: list[int]
    ) -> tuple[list[Request], int, list[int]]:
        """Requests of a group as parts of one holding: those, its bytes, and where each request of
        the group begins in it.
        """
        files = requests.file[group].tolist()
        starts = requests.start[group].tolist()
        stops = requests.stop[group].tolist()
        itemsizes = self.files.itemsize[files].tolist()
        parts: list[Request] = []
        begins = []
        size = 0
        for file, start, stop, itemsize in zip(files, starts, stops, itemsizes, strict=True):
            begin = _aligned(size, itemsize)
            parts += self._in_parts(file, start, stop, begin)
            begins.append(begin)
            size = begin + stop - start
        return parts, size, begins

    def _share_requests(self, file: Integers, start: Integers, stop: Integers) -> SharedRequests:
        """Requests for bytes [start, stop) of files, as few as waste allows."""
        by_place = np.lexsort((start, file))
        gap = largest_gap(file[by_place], start[by_place], stop[by_place], self.coalesce_bytes)
        return coalesce(file, start, stop, by_place, gap=gap, largest=self.part_bytes)

    def _groups(
        self, requests: SharedRequests, first_row: Integers, slab_of_row: Integers
    ) -> Iterator[list[int]]:
        """Requests that share a holding: needed first by the same slab, so that they are waited for
        together, and not more than a part, so that memory is freed in small steps.

        first_row [requests]: the row that needs it first.
        """
        first_slab = slab_of_row[first_row]
        size = requests.stop - requests.start
        group: list[int] = []
        group_bytes = 0
        for number in np.argsort(first_row, kind="stable").tolist():
            fits = group_bytes + size[number] <= self.part_bytes
            if group and not (fits and first_slab[number] == first_slab[group[0]]):
                yield group
                group = []
                group_bytes = 0
            group.append(number)
            group_bytes += int(size[number])
        if group:
            yield group

    def _in_parts(self, file: int, start: int, stop: int, at: int) -> list[Request]:
        """Bytes [start, stop) of a file as requests of `part_bytes`, to byte `at` of a holding and
        on.
        """
        step = self.part_bytes
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


def _aligned(offset: int, itemsize: int) -> int:
    """The first multiple of `itemsize` from an offset on: kernels read whole tokens in place."""
    return -(-offset // itemsize) * itemsize


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
    bridged = int(np.searchsorted(waste, MOST_WASTE * used_bytes, side="right"))
    return int(gaps[bridged - 1]) if bridged else 0
