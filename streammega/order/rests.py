"""The rest of an epoch in progress, where the samples or lanes of a dataset change.

What was begun and not read is intervals of tokens, about one a lane, known in closed form: of the
newest epoch whole pieces, and draws of lanes that lag or have a piece open. End to end they are cut
into samples of the new length and dealt to the new lanes in equal runs; after its share a lane goes
on with whole epochs. Stretches of whole blocks come first, so that nearly all samples are one run
of tokens; others join several. What is too short for a sample waits for the next change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
MOST_STRETCHES = 6
"""What blocks cut an interval into at most: two ends, and before and behind the short block a
stretch of whole ones with what is beside it.
"""


class Intervals(NamedTuple):
    """Tokens [low, high) of a grid, int64 [intervals] each: see kernels/rests.py."""

    grid: Integers
    kind: Integers
    which: Integers
    low: Integers
    high: Integers

    def taken(self, numbers: Integers, low: Integers, high: Integers) -> Intervals:
        """Parts [low, high) of some of them."""
        return Intervals(self.grid[numbers], self.kind[numbers], self.which[numbers], low, high)


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A dataset in the samples and lanes in which it was drawn: what intervals are of.

    key: of the order. number, first_epoch: in keys. size, block, group, and of its parts files,
    starts, slacks, before, ends, int64: as in StreamGeometry. length: tokens of a sample.
    """

    key: np.uint64
    lanes: int
    number: int
    first_epoch: int
    size: int
    block: int
    group: int
    length: int
    parts: Sequence[Integers]


@dataclass(frozen=True, kw_only=True)
class Grids:
    """Those in which a dataset was drawn so far."""

    grids: Sequence[Grid]

    @cached_property
    def arrays(self) -> tuple[Integers, ...]:
        """keys, lanes, numbers, epochs, sizes, blocks, groups, lengths, firsts, and of all parts
        files, starts, slacks, before, ends: as the kernels take them.
        """
        grids = self.grids
        keys = np.array([grid.key for grid in grids], np.uint64)
        fields = ("lanes", "number", "first_epoch", "size", "block", "group", "length")
        of_grids = [np.array([getattr(grid, name) for grid in grids], np.int64) for name in fields]
        counts = [len(grid.parts[0]) for grid in grids]
        of_parts = [
            np.concatenate(arrays) for arrays in zip(*(grid.parts for grid in grids), strict=True)
        ]
        return (keys, *of_grids, np.cumsum([0, *counts]), *of_parts)


@dataclass(frozen=True, kw_only=True)
class Rest:
    """Intervals end to end, cut into samples of `length` tokens and dealt to `lanes`."""

    grids: Grids
    intervals: Intervals
    length: int
    lanes: int

    @cached_property
    def ends(self) -> Integers:
        """Tokens up to the end of each interval, int64 [intervals]."""
        return np.cumsum(self.intervals.high - self.intervals.low)

    @property
    def tokens(self) -> int:
        """Tokens of all intervals."""
        return int(self.ends[-1]) if len(self.ends) else 0

    @property
    def samples(self) -> int:
        """How many samples they make."""
        return self.tokens // self.length

    @cached_property
    def shares(self) -> Integers:
        """How many of them each lane has, int64 [lanes]: they differ by one at most."""
        each, more = divmod(self.samples, self.lanes)
        return each + (np.arange(self.lanes) < more).astype(np.int64)

    @cached_property
    def firsts(self) -> Integers:
        """The first sample of each lane, int64 [lanes]."""
        return np.cumsum(self.shares) - self.shares

    def rows(self, samples: Integers, extra: int) -> tuple[Integers, Integers, Integers, Integers]:
        """(sample, file, start, stop) of the runs of tokens of samples, sample by sample."""
        from streammega.kernels.rests import rest_rows  # see `rest_of`

        intervals = self.intervals
        room = 4 * len(samples)
        while True:
            out = [np.empty(room, np.int64) for _ in range(4)]
            count = rest_rows(
                samples * self.length,
                self.length,
                extra,
                *intervals,
                self.ends - (intervals.high - intervals.low),
                *self.grids.arrays,
                *out,
            )
            if count <= room:
                sample, file, start, stop = (array[:count] for array in out)
                return sample, file, start, stop
            room = count

    def samples_with(self, file: int, start: int, stop: int) -> Integers:
        """The numbers of its samples that have tokens [start, stop) of a file, ascending: in closed
        form. The token after a sample's last is not one of its own here.
        """
        from streammega.kernels.rests_back import rest_samples_with  # see `rest_of`

        first_epoch, last_epoch = self._epochs
        room = 0
        while True:
            samples = np.empty(room, np.int64)
            count = rest_samples_with(
                file,
                start,
                stop,
                first_epoch,
                last_epoch,
                *self._in_order,
                self.length,
                *self.grids.arrays,
                samples,
            )
            if count <= room:
                found = np.unique(samples[:count])
                # what is behind the last is too short for one
                return found[found < self.samples]
            room = count

    def dealt(self, samples: Integers) -> tuple[Integers, Integers]:
        """(lane, which of its draws) that reads each of some samples."""
        lane = np.searchsorted(self.firsts + self.shares, samples, side="right")
        return lane, samples - self.firsts[lane]

    @cached_property
    def joined(self) -> Integers:
        """The numbers of its samples that are of several runs of tokens, ascending: those within
        which an interval, block, draw or file ends. No sample is looked at.
        """
        from streammega.kernels.rests import DRAWS_OF  # see `rest_of`
        from streammega.kernels.rests_back import run_bounds_within

        grid, kind, which, low, high, at = self._in_order
        keys, _, numbers, _, sizes, blocks, _, lengths, *_ = self.grids.arrays
        unit = np.where(kind == DRAWS_OF, 1, blocks[grid]) * lengths[grid]
        # of an interval one at most for each whole unit, and for two that are cut and a short one
        room = int(((high - low) // unit + 3).sum())
        within = np.empty(room, np.int64)
        count = run_bounds_within(
            *(grid, kind, which, low, high, at), keys, numbers, sizes, blocks, lengths, within
        )
        # marked, as sorting so many takes longer
        is_joined = np.zeros(self.samples + 1, np.bool_)
        for bounds in (self.ends, within[:count], self._part_bounds()):
            sample, offset = np.divmod(bounds, self.length)
            # a run may end with its sample; what is behind the last is too short for one
            is_joined[np.minimum(sample[offset != 0], self.samples)] = True
        return np.flatnonzero(is_joined[:-1])

    def _part_bounds(self) -> Integers:
        """Its tokens at which a file ends in the middle of a block."""
        from streammega.kernels.rests import DRAWS_OF  # see `rest_of`
        from streammega.kernels.rests_back import parts_within_blocks

        grid, kind, which, low, high, at = self._in_order
        keys, _, numbers, _, sizes, blocks, _, lengths, firsts, _, _, _, before, _ = (
            self.grids.arrays
        )
        found = [np.empty(0, np.int64)]
        of_blocks = np.flatnonzero(kind != DRAWS_OF)
        begins = np.ones(len(of_blocks), np.bool_)  # they are sorted by both
        begins[1:] = np.diff(grid[of_blocks]) != 0
        begins[1:] |= np.diff(which[of_blocks]) != 0
        first = of_blocks[begins]
        for number, epoch in zip(grid[first].tolist(), which[first].tolist(), strict=True):
            tokens = np.empty(firsts[number + 1] - firsts[number], np.int64)
            count = parts_within_blocks(
                number, epoch, keys, numbers, sizes, blocks, lengths, firsts, before, tokens
            )
            tokens = tokens[:count]
            here = of_blocks[(grid[of_blocks] == number) & (which[of_blocks] == epoch)]
            interval = here[np.searchsorted(low[here], tokens, side="right") - 1]
            is_within = (low[interval] < tokens) & (tokens < high[interval])
            kept = interval[is_within]
            found.append(at[kept] + tokens[is_within] - low[kept])
        return np.concatenate(found)

    @cached_property
    def _in_order(self) -> tuple[Integers, ...]:
        """Intervals by grid, kind, which and low, and the token at which each begins."""
        old = self.intervals
        at = self.ends - (old.high - old.low)
        order = np.lexsort((old.low, old.which, old.kind, old.grid))
        return tuple(array[order] for array in (*old, at))

    @cached_property
    def _epochs(self) -> tuple[Integers, Integers]:
        """The epochs [first, last) of each grid that intervals are of; int64 [grids] each."""
        from streammega.kernels.rests_back import epochs_of_intervals  # see `rest_of`

        _, lanes, _, epochs, sizes, _, groups, lengths, *_ = self.grids.arrays
        first = np.empty(len(sizes), np.int64)
        last = np.empty(len(sizes), np.int64)
        epochs_of_intervals(*self.intervals, lanes, epochs, sizes, groups, lengths, first, last)
        return first, last

    def left(self, drawn: Integers) -> Intervals:
        """What is left of it when each lane has made `drawn` draws; last what was too short to be
        dealt.
        """
        from streammega.kernels.rests import slices_of  # see `rest_of`

        taken = np.minimum(drawn, self.shares)
        dealt = self.samples * self.length
        first = np.append((self.firsts + taken) * self.length, dealt)
        stop = np.append((self.firsts + self.shares) * self.length, self.tokens)
        room = len(self.ends) + len(first)
        source = np.empty(room, np.int64)
        low = np.empty(room, np.int64)
        high = np.empty(room, np.int64)
        old = self.intervals
        count = slices_of(first, stop, self.ends, old.low, old.high, source, low, high)
        return old.taken(source[:count], low[:count], high[:count])


def rest_of(
    grid: Grid, before: Rest | None, drawn: Integers, *, length: int, lanes: int
) -> Rest | None:
    """What a dataset has left when each lane has made `drawn` draws, int64 [lanes], since it began
    in a grid with what was left before; dealt anew to `lanes` in samples of `length`. None: nothing
    has begun.

    The kernels are imported where they are used: most runs need none of them, and all would wait.
    """
    former = () if before is None else before.grids.grids
    grids = Grids(grids=[*former, grid])
    found = []
    if before is not None:
        found.append(before.left(drawn))
        drawn = np.maximum(drawn - before.shares, 0)
    found.append(_unread(grids, drawn))
    left = Intervals(*(np.concatenate(arrays) for arrays in zip(*found, strict=True)))
    if not len(left.low):
        return None
    return Rest(grids=grids, intervals=_in_stretches(grids, left), length=length, lanes=lanes)


def _unread(grids: Grids, drawn: Integers) -> Intervals:
    """What is left of the epochs that have begun in the last of some grids."""
    from streammega.kernels.rests import unread_of  # see `rest_of`

    grid = grids.grids[-1]
    room = 3 * grid.lanes
    kind = np.empty(room, np.int64)
    which = np.empty(room, np.int64)
    low = np.empty(room, np.int64)
    high = np.empty(room, np.int64)
    count = unread_of(
        drawn,
        grid.lanes,
        grid.key,
        grid.number,
        grid.first_epoch,
        grid.size,
        grid.block,
        grid.group,
        grid.length,
        kind,
        which,
        low,
        high,
    )
    number = np.full(count, len(grids.grids) - 1, np.int64)
    return Intervals(number, kind[:count], which[:count], low[:count], high[:count])


def _in_stretches(grids: Grids, intervals: Intervals) -> Intervals:
    """Intervals cut at the bounds of blocks, stretches of whole ones first; neighbours are one."""
    from streammega.kernels.rests import cut_by_blocks  # see `rest_of`

    keys, _, numbers, _, sizes, blocks, _, lengths, *_ = grids.arrays
    room = MOST_STRETCHES * len(intervals.low)
    source = np.empty(room, np.int64)
    whole = np.empty(room, np.bool_)
    low = np.empty(room, np.int64)
    high = np.empty(room, np.int64)
    count = cut_by_blocks(
        *intervals, keys, numbers, sizes, blocks, lengths, source, whole, low, high
    )
    by_kind = np.argsort(~whole[:count], kind="stable")
    cut = intervals.taken(source[by_kind], low[by_kind], high[by_kind])
    same = np.ones(max(0, count - 1), np.bool_)
    for array in (cut.grid, cut.kind, cut.which):
        same &= array[1:] == array[:-1]
    same &= cut.low[1:] == cut.high[:-1]
    begins = np.flatnonzero(np.append(True, ~same)[:count])
    last = np.append(begins[1:], count) - 1
    return cut.taken(begins, cut.low[begins], cut.high[last])
