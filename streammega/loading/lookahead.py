"""Plans windows ahead of the caller, submits their reads to the fetcher, and keeps their groups until
they are gathered.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator

import numpy as np

from streammega.loading.memory_plan import READY_GROUPS
from streammega.loading.micro_steps import MicroSteps
from streammega.loading.planner import GatherGroup, PlannedBuffer, PlanWindow
from streammega.loading.read_plan import FilesPlan, ReadPlan, lanes_from
from streammega.loading.stats import Stats
from streammega.storage.fetch.buffer_pool import rounded
from streammega.storage.fetch.fetcher import Fetcher
from streammega.storage.fetch.requests import FetchGroup, RangeRequest

MAX_WINDOWS = 8
"""Most windows planned ahead. memory_bytes may limit them further."""
SECONDS_AHEAD = 20.0
"""Batches are planned ahead for this time of the caller. A slow caller needs its cores for other work."""
REFILL = 4
"""Planning goes on after the caller has taken 1/REFILL of the batches that are planned ahead."""
SECONDS_FETCHED = 0.25
"""Time of the caller for which bytes are fetched ahead. A request that the storage answers very late
is sent a second time within it, even where a busy main thread keeps Python's lock.
"""
MAX_WAIT_SHARE = 0.1
"""A caller that waits for a larger share of its own time is faster than the storage."""
PACE_WEIGHT = 0.25
"""Weight of the latest group in the average of the caller's pace.

One long step, such as a checkpoint, changes the average little. A few longer steps change it fully.
"""


class Lookahead:
    """Plans the micro-steps at `positions`, window by window, and queues their groups.

    Only the engine's thread may use it. `record_pace` sets numbers and may run in any thread.

    Args:
        steps: the micro-steps of this rank.
        plan: the read plan of this rank.
        positions: the micro-steps to read, as values of `consumed`.
        fetcher: fetches the planned buffers; None if no file has to be fetched.
        stats: counts the planned bytes.
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
        """Micro-batches that are planned and not taken yet."""
        self._steps = steps
        self._plan = plan
        self._positions = positions
        self._fetcher = fetcher
        self._stats = stats
        self._groups: deque[GatherGroup] = deque()
        self._stride = steps.step_samples
        self._next: int | None = None  # the position that is planned next
        self._last: int | None = None  # the position that was planned last
        # The first window has one micro-batch, and each window has twice as many as the last one. So
        # the first batches wait neither for a long plan nor for each other.
        self._window_batches = 1
        self._pace: float | None = None
        self._waited = 0.0
        # Bytes of a micro-batch in the files. A reader that keeps parts of samples reads fewer.
        token_bytes = sum(int(one.table.itemsize.max()) for one in plan.files)
        sample_tokens = steps.config.sequence_length + 1
        self._batch_bytes = steps.micro_batch_size * sample_tokens * token_bytes

    def take_group(self) -> GatherGroup | None:
        """Take the group to gather next; None if no group is planned."""
        if not self._groups:
            return None
        group = self._groups.popleft()
        self.batches -= len(group.consumed)
        return group

    def plan(self) -> None:
        """Plan windows until there is a group to gather and the fetcher has enough reads, or the bytes
        of that group are there: the caller may wait for it.

        The fetcher has enough as soon as one of them waits for memory.
        """
        while not self.exhausted:
            # another plan would start no read
            no_more_reads = self._fetcher is None or self._fetcher.is_full
            if self._groups and (no_more_reads or self.has_enough_planned):
                return
            self.plan_window()
            if self._groups and all(buffer.ready for buffer in self._groups[0].all_buffers):
                return

    @property
    def has_enough_planned(self) -> bool:
        """Whether the batches planned ahead are as many as the caller will take soon.

        They may be a little fewer: a plan of a few micro-batches costs nearly as much as a large one.
        """
        max_batches = self._max_batches()
        worth_a_plan = min(self._plan.memory.window_batches, max_batches // REFILL)
        return self.batches > max_batches - max(1, worth_a_plan)

    def _max_batches(self) -> int:
        """Most micro-batches to plan ahead: those that the caller takes in SECONDS_AHEAD.

        The caller's pace is unknown before the end of its first group.
        """
        memory = self._plan.memory
        min_batches = READY_GROUPS * memory.group_batches
        limit = MAX_WINDOWS * memory.window_batches
        if self._pace is None:
            return min(2 * min_batches, limit)
        batches_in_time = SECONDS_AHEAD / max(self._pace, 1e-9)
        return int(min(max(batches_in_time, min_batches), limit))

    def record_pace(self, seconds: float, waited: float = 0.0) -> None:
        """Record the seconds that the caller spent on a micro-batch, its fields included, and waited
        for it, averaged over a group.

        A caller that rarely waits gets more memory to fetch ahead: what it takes in SECONDS_FETCHED.
        One that often waits is faster than the storage: it gets memory for the requests that far
        storage needs in flight.
        """
        if self._pace is None:
            self._pace, self._waited = seconds, waited
        self._pace += PACE_WEIGHT * (seconds - self._pace)
        self._waited += PACE_WEIGHT * (waited - self._waited)
        if self._fetcher is None:
            return
        memory = self._plan.memory
        flow = self._fetcher.flow
        ahead_bytes = flow.max_bytes - flow.near_bytes
        if self._waited < MAX_WAIT_SHARE * self._pace:
            ahead_bytes = int(SECONDS_FETCHED / self._pace * self._batch_bytes)
        self._fetcher.pool.budget = min(memory.fetch_bytes + ahead_bytes, memory.max_fetch_bytes)

    def plan_window(self) -> None:
        """Plan the next consecutive micro-steps as one window. Submit its reads and queue its groups.

        All positions are of one segment, since each phase has an engine of its own.
        """
        steps = self._steps
        memory = self._plan.memory
        # At least a group: a smaller window costs nearly as much to plan.
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
        windows = []
        buffers: list[list[FetchGroup]] = []
        for files in self._plan.files:
            window = files.planner.plan(sample_ids, extents, group_samples)
            fetched_bytes = sum(buffer.fetched_bytes for buffer in window.buffers)
            self._stats.useful_bytes += window.useful_bytes
            self._stats.cached_bytes += window.cached_bytes
            self._stats.planned_bytes += fetched_bytes + window.cached_bytes
            windows.append(window)
            buffers.append([_attach(files, planned) for planned in window.buffers])
        groups = self._cut_into_groups(windows, consumed, buffers, group_batches)
        self._groups += groups
        self.batches += len(consumed)
        if self._fetcher is not None:
            # No group waits for memory that a later one holds. In a group those of a file come together,
            # for a thread sends several requests at once only if they are for one object.
            self._fetcher.submit([buffer for group in groups for buffer in group.all_buffers])

    def _cut_into_groups(
        self,
        windows: list[PlanWindow],
        consumed: list[int],
        buffers: list[list[FetchGroup]],
        group_batches: int,
    ) -> list[GatherGroup]:
        """The groups of a stretch, each with the buffers that no earlier group needs.

        A group has up to `group_batches` micro-batches, and ends before it opens too many bytes.
        """
        memory = self._plan.memory
        batch_samples = self._steps.micro_batch_size
        ends = np.arange(len(consumed) + 1) * batch_samples
        # of the buffers of each window, at each micro-batch: they are in the order in which they are needed
        splits = []
        all_bytes = np.zeros(len(ends), np.int64)
        for window in windows:
            at_batch = np.searchsorted(window.first_samples, ends)
            sizes = [rounded(planned.size) for planned in window.buffers]
            all_bytes += np.cumsum([0, *sizes])[at_batch]
            splits.append(at_batch.tolist())
        bytes_before = all_bytes.tolist()
        groups = []
        first = 0
        while first < len(consumed):
            fitting = bisect_right(bytes_before, bytes_before[first] + memory.opening_bytes) - 1
            last = min(max(fitting, first + 1), first + group_batches, len(consumed))
            groups.append(
                GatherGroup(
                    windows=windows,
                    consumed=consumed[first:last],
                    first=first * batch_samples,
                    last=last * batch_samples,
                    buffers=[
                        of_window[at_batch[first] : at_batch[last]]
                        for of_window, at_batch in zip(buffers, splits, strict=True)
                    ],
                )
            )
            first = last
        return groups

    def _next_stretch(self, max_batches: int) -> list[int]:
        """Take up to `max_batches` positions, as long as each follows the one before it.

        Sets `exhausted` at the end. Closes the open blocks where positions go on elsewhere.
        """
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
                self._restart_blocks(self._next)
            stretch.append(self._next)
            self._last = self._next
            self._next = None
        return stretch

    def _restart_blocks(self, consumed: int) -> None:
        """Close all open blocks, because reading goes on at another position, `consumed`."""
        for files in self._plan.files:
            planner = files.planner
            if planner.blocks is None:
                continue
            lanes = lanes_from(self._steps, planner.blocks.order, consumed)
            unused = planner.follow_lanes(lanes)
            if unused and self._fetcher is not None:
                self._fetcher.release(unused)


def _attach(files: FilesPlan, planned: PlannedBuffer) -> FetchGroup:
    """Make a planned buffer with its reads, and attach it to its slot."""
    requests = []
    for number, start, stop, at in planned.requests:
        file = files.table.files[number]
        requests.append(RangeRequest(file.store, file.key, file.etag, start, stop, at))
    buffer = FetchGroup(planned.size, requests, planned.slot)
    files.planner.table.attach(buffer)
    return buffer
