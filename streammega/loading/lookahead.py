"""What is planned ahead of the caller: positions become spans, their reads go to the fetcher, and
their slabs wait here until they are gathered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np

from streammega.loading.micro_steps import MicroSteps
from streammega.loading.read_plan import ReadingPlan, lanes_from
from streammega.loading.spans import PlannedHolding, PlannedSlab, Span
from streammega.loading.stats import Stats
from streammega.storage.fetch.fetcher import Fetcher
from streammega.storage.fetch.requests import FetchGroup, RangeRequest

MOST_SPANS = 8
"""Spans planned ahead at most; memory_bytes is what limits them otherwise."""
SECONDS_AHEAD = 20.0
"""What the caller will take in this time is planned ahead, no more: a slow caller needs its cores
for other things.
"""
READY_SLABS = 4
"""Slabs made ahead at least: with fewer, the two threads wait for each other at every one."""
REFILL = 4
"""What is planned ahead is filled up when this part of it was taken."""
NEWS = 0.25
"""What the latest slab counts of the caller's pace: one long step, such as a checkpoint, moves it
little, and a few steps of another length move it there.
"""


class Lookahead:
    """Plans the micro-steps at `positions`, span by span, and lines up their slabs.

    Used by the engine's thread alone, but for `keep_pace`, which sets one number.

    Args:
        steps: what is read.
        reading: how it is read.
        positions: which of the micro-steps, as values of `consumed`.
        fetcher: is given the reads; None where nothing has to be fetched.
        stats: counts what is planned.
    """

    def __init__(
        self,
        steps: MicroSteps,
        reading: ReadingPlan,
        positions: Iterator[int],
        *,
        fetcher: Fetcher | None,
        stats: Stats,
    ) -> None:
        self.exhausted = False
        """Whether all positions are planned."""
        self.batches = 0
        """Micro-batches that are planned, and not taken yet."""
        self._steps = steps
        self._reading = reading
        self._positions = positions
        self._fetcher = fetcher
        self._stats = stats
        self._slabs: deque[PlannedSlab] = deque()
        self._batch_rows = steps.micro_batch_size * reading.planner.kept.rows_of_sample
        self._stride = steps.step_samples
        self._next: int | None = None  # taken from `positions`, and not planned yet
        self._last: int | None = None  # planned last
        # The first span is one micro-batch, and each is twice the one before it: the first batches
        # wait neither for a long plan nor for each other.
        self._span_batches = 1
        self._pace: float | None = None

    def take_slab(self) -> PlannedSlab | None:
        """The slab to be gathered next; None: none is planned."""
        if not self._slabs:
            return None
        slab = self._slabs.popleft()
        self.batches -= len(slab.consumed)
        return slab

    def plan(self) -> None:
        """Plan while there is nothing to gather, or nothing waits for memory: reads never run out
        of work.
        """
        while not self.exhausted:
            if self._slabs and (self._reads_wait() or self.is_far):
                return
            self.plan_span()

    def _reads_wait(self) -> bool:
        """Whether more plans would bring no more reads: there are none, or no memory for them."""
        return self._fetcher is None or self._fetcher.unadmitted_bytes > 0

    @property
    def is_far(self) -> bool:
        """Whether as much is planned as the caller will take soon, but for less than is worth a
        plan: a plan of a few micro-batches costs nearly as much as one of many.
        """
        most = self._most_batches()
        worth_a_plan = min(self._reading.span_batches, most // REFILL)
        return self.batches > most - max(1, worth_a_plan)

    def _most_batches(self) -> int:
        """Micro-batches to be planned ahead: by the time that the caller itself needs for one, once
        that is known.
        """
        least = READY_SLABS * self._reading.slab_batches
        most = MOST_SPANS * self._reading.span_batches
        if self._pace is None:
            return min(2 * least, most)
        batches_in_time = SECONDS_AHEAD / max(self._pace, 1e-9)
        return int(min(max(batches_in_time, least), most))

    def keep_pace(self, seconds: float) -> None:
        """The caller took so long for a micro-batch."""
        if self._pace is None:
            self._pace = seconds
        else:
            self._pace = (1 - NEWS) * self._pace + NEWS * seconds

    def plan_span(self) -> None:
        """Plan the next micro-steps that follow each other: their reads go to the fetcher, their
        slabs to be gathered.
        """
        steps = self._steps
        reading = self._reading
        room = max(reading.slab_batches, self._most_batches() - self.batches)
        consumed = self._next_stretch(min(self._span_batches, room))
        if not consumed:
            return
        slab_batches = min(reading.slab_batches, self._span_batches)
        self._span_batches = min(reading.span_batches, 2 * self._span_batches)
        ids_of_batch = steps.sample_ids(np.array(consumed, np.int64))
        sample_ids = np.ascontiguousarray(ids_of_batch.reshape(-1))
        extents = steps.samples.locate(sample_ids)
        slab_samples = slab_batches * steps.micro_batch_size
        span = reading.planner.plan(sample_ids, extents, slab_samples)
        self._count(span)
        holdings = [self._hold(planned) for planned in span.holdings]
        self._cut_into_slabs(span, consumed, holdings, slab_batches)
        if self._fetcher is not None:
            self._fetcher.submit(holdings)

    def _count(self, span: Span) -> None:
        stats = self._stats
        fetched_bytes = sum(holding.size for holding in span.holdings)
        stats.useful_bytes += span.useful_bytes
        stats.cached_bytes += span.cached_bytes
        stats.planned_bytes += fetched_bytes + span.cached_bytes

    def _hold(self, planned: PlannedHolding) -> FetchGroup:
        """A holding that was planned, with its reads, to be submitted."""
        files = self._reading.files
        reads = []
        for number, start, stop, at in planned.parts:
            file = files[number]
            reads.append(RangeRequest(file.store, file.key, file.etag, start, stop, at))
        widest = self._reading.dtype.itemsize
        holding = FetchGroup(planned.size, reads, planned.slot, alignment=widest)
        self._reading.planner.slots.hold(holding)
        return holding

    def _cut_into_slabs(
        self, span: Span, consumed: list[int], holdings: list[FetchGroup], slab_batches: int
    ) -> None:
        """Line up the slabs of a span, each with the holdings that no slab before it needs."""
        first_row_of_holding = np.array([planned.row for planned in span.holdings], np.int64)
        first_sample = np.searchsorted(span.row_splits, first_row_of_holding, side="right") - 1
        for number in range(0, len(consumed), slab_batches):
            batches = consumed[number : number + slab_batches]
            first = number * self._batch_rows
            last = first + len(batches) * self._batch_rows
            # holdings are in the order of need
            begin, end = np.searchsorted(first_sample, [first, last])
            self._slabs.append(
                PlannedSlab(
                    span=span,
                    consumed=batches,
                    first=first,
                    last=last,
                    holdings=holdings[begin:end],
                )
            )
        self.batches += len(consumed)

    def _next_stretch(self, most: int) -> list[int]:
        """The next positions, up to `most`, as long as each follows the one before it."""
        taken: list[int] = []
        while len(taken) < most:
            if self._next is None:
                self._next = next(self._positions, None)
            if self._next is None:
                self.exhausted = True
                break
            follows = self._last is not None and self._next == self._last + self._stride
            if not follows:
                if taken:
                    break
                self._jump(self._next)
            taken.append(self._next)
            self._last = self._next
            self._next = None
        return taken

    def _jump(self, consumed: int) -> None:
        """Positions go on at `consumed`: what was open is forgotten."""
        pieces = self._reading.planner.pieces
        if pieces is None:
            return
        lanes = lanes_from(self._steps, pieces.order, consumed)
        forgotten = self._reading.planner.jump(lanes)
        if forgotten and self._fetcher is not None:
            self._fetcher.release(forgotten)
