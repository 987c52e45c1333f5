"""What is planned ahead of the caller: positions become windows, their reads go to the fetcher, and
their groups wait here until they are gathered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np

from streammega.loading.memory_plan import READY_GROUPS
from streammega.loading.micro_steps import MicroSteps
from streammega.loading.planner import GatherGroup, PlannedBuffer, PlanWindow
from streammega.loading.read_plan import ReadPlan, lanes_from
from streammega.loading.stats import Stats
from streammega.storage.fetch.fetcher import Fetcher
from streammega.storage.fetch.requests import FetchGroup, RangeRequest

MAX_WINDOWS = 8
"""Windows planned ahead at most; memory_bytes is what limits them otherwise."""
SECONDS_AHEAD = 20.0
"""What the caller will take in this time is planned ahead, no more: a slow caller needs its cores
for other things.
"""
REFILL = 4
"""What is planned ahead is filled up when this part of it was taken."""
PACE_WEIGHT = 0.25
"""What the latest group counts of the caller's pace: one long step, such as a checkpoint, moves it
little, and a few steps of another length move it there.
"""


class Lookahead:
    """Plans the micro-steps at `positions`, window by window, and lines up their groups.

    Used by the engine's thread alone, but for `keep_pace`, which sets one number.

    Args:
        steps: what is read.
        plan: how it is read.
        positions: which of the micro-steps, as values of `consumed`.
        fetcher: is given the reads; None where nothing has to be fetched.
        stats: counts what is planned.
    """

    def __init__(
        self,
        steps: MicroSteps,
        plan: ReadPlan,
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
        self._plan = plan
        self._positions = positions
        self._fetcher = fetcher
        self._stats = stats
        self._groups: deque[GatherGroup] = deque()
        self._batch_rows = steps.micro_batch_size * plan.planner.kept.rows_of_sample
        self._stride = steps.step_samples
        self._next: int | None = None  # taken from `positions`, and not planned yet
        self._last: int | None = None  # planned last
        # The first window is one micro-batch, and each is twice the one before it: the first batches
        # wait neither for a long plan nor for each other.
        self._window_batches = 1
        self._pace: float | None = None

    def take_group(self) -> GatherGroup | None:
        """The group to be gathered next; None: none is planned."""
        if not self._groups:
            return None
        group = self._groups.popleft()
        self.batches -= len(group.consumed)
        return group

    def plan(self) -> None:
        """Plan while there is nothing to gather, or nothing waits for memory: reads never run out
        of work.
        """
        while not self.exhausted:
            # without reads, or memory for more, plans would bring nothing
            no_more_reads = self._fetcher is None or self._fetcher.unadmitted_bytes > 0
            if self._groups and (no_more_reads or self.is_far):
                return
            self.plan_window()

    @property
    def is_far(self) -> bool:
        """Whether as much is planned as the caller will take soon, but for less than is worth a
        plan: a plan of a few micro-batches costs nearly as much as one of many.
        """
        max_batches = self._max_batches()
        worth_a_plan = min(self._plan.memory.window_batches, max_batches // REFILL)
        return self.batches > max_batches - max(1, worth_a_plan)

    def _max_batches(self) -> int:
        """Micro-batches to be planned ahead: by the time that the caller itself needs for one, once
        that is known.
        """
        memory = self._plan.memory
        least = READY_GROUPS * memory.group_batches
        limit = MAX_WINDOWS * memory.window_batches
        if self._pace is None:
            return min(2 * least, limit)
        batches_in_time = SECONDS_AHEAD / max(self._pace, 1e-9)
        return int(min(max(batches_in_time, least), limit))

    def keep_pace(self, seconds: float) -> None:
        """The caller took so long for a micro-batch."""
        if self._pace is None:
            self._pace = seconds
        else:
            self._pace = (1 - PACE_WEIGHT) * self._pace + PACE_WEIGHT * seconds

    def plan_window(self) -> None:
        """Plan the next micro-steps that follow each other: their reads go to the fetcher, their
        groups to be gathered.
        """
        steps = self._steps
        memory = self._plan.memory
        room = max(memory.group_batches, self._max_batches() - self.batches)
        consumed = self._next_stretch(min(self._window_batches, room))
        if not consumed:
            return
        group_batches = min(memory.group_batches, self._window_batches)
        self._window_batches = min(memory.window_batches, 2 * self._window_batches)
        ids_of_batch = steps.sample_ids(np.array(consumed, np.int64))
        sample_ids = np.ascontiguousarray(ids_of_batch.reshape(-1))
        extents = steps.samples.locate(sample_ids)
        group_samples = group_batches * steps.micro_batch_size
        window = self._plan.planner.plan(sample_ids, extents, group_samples)
        fetched_bytes = sum(buffer.size for buffer in window.buffers)
        self._stats.useful_bytes += window.useful_bytes
        self._stats.cached_bytes += window.cached_bytes
        self._stats.planned_bytes += fetched_bytes + window.cached_bytes
        buffers = [self._attach(planned) for planned in window.buffers]
        self._cut_into_groups(window, consumed, buffers, group_batches)
        if self._fetcher is not None:
            self._fetcher.submit(buffers)

    def _attach(self, planned: PlannedBuffer) -> FetchGroup:
        """A buffer that was planned, with its reads, to be submitted."""
        plan = self._plan
        requests = []
        for number, start, stop, at in planned.requests:
            file = plan.files[number]
            requests.append(RangeRequest(file.store, file.key, file.etag, start, stop, at))
        buffer = FetchGroup(planned.size, requests, planned.slot, alignment=plan.dtype.itemsize)
        plan.planner.table.attach(buffer)
        return buffer

    def _cut_into_groups(
        self,
        window: PlanWindow,
        consumed: list[int],
        buffers: list[FetchGroup],
        group_batches: int,
    ) -> None:
        """Line up the groups of a window, each with the buffers that no group before it needs."""
        first_row_of_buffer = np.array([planned.row for planned in window.buffers], np.int64)
        first_sample = np.searchsorted(window.row_splits, first_row_of_buffer, side="right") - 1
        for number in range(0, len(consumed), group_batches):
            batches = consumed[number : number + group_batches]
            first = number * self._batch_rows
            last = first + len(batches) * self._batch_rows
            # buffers are in the order of need
            begin, end = np.searchsorted(first_sample, [first, last])
            self._groups.append(
                GatherGroup(
                    window=window,
                    consumed=batches,
                    first=first,
                    last=last,
                    buffers=buffers[begin:end],
                )
            )
        self.batches += len(consumed)

    def _next_stretch(self, max_batches: int) -> list[int]:
        """The next positions, up to `max_batches`, as long as each follows the one before it."""
        stretch: list[int] = []
        while len(stretch) < max_batches:
            if self._next is None:
                self._next = next(self._positions, None)
            if self._next is None:
                self.exhausted = True
                break
            follows = self._last is not None and self._next == self._last + self._stride
            if not follows:
                if stretch:
                    break
                self._jump(self._next)
            stretch.append(self._next)
            self._last = self._next
            self._next = None
        return stretch

    def _jump(self, consumed: int) -> None:
        """Positions go on at `consumed`: what was open is forgotten."""
        planner = self._plan.planner
        if planner.blocks is None:
            return
        lanes = lanes_from(self._steps, planner.blocks.order, consumed)
        unused = planner.jump(lanes)
        if unused and self._fetcher is not None:
            self._fetcher.release(unused)
