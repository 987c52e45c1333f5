"""The remainder: what is unread of a dataset's open epochs where its samples or lanes change.

It is intervals of tokens, about one a lane, known in closed form: whole blocks of the newest epoch,
and draws of lanes that are behind or have a block open. End to end they are cut into samples of the
new length, and each new lane gets an equal run of these; lanes next to each other get runs far
apart, for neighbouring runs share blocks. After its share a lane draws from whole epochs. Stretches
of whole blocks come first, so nearly all samples are one run of tokens; the others join several.
Tokens too few for a sample stay unread until the next change.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from streammega.errors.cached_property import cached_property
from streammega.kernels.keyed import GOLDEN
from streammega.kernels.remainder import (
    INTERVAL,
    remainder_runs,
    slice_intervals,
    split_at_blocks,
    unread_intervals,
)
from streammega.kernels.stream import RUN
from streammega.order.epoch_layout import EpochLayout, Integers, Records

MAX_STRETCHES = 6
"""Room for the pieces of one interval: `split_at_blocks` makes no more."""


@dataclass(frozen=True, kw_only=True)
class EpochRemainder:
    """Intervals end to end, cut into samples of `length` tokens for `lanes`.

    layout: the dataset, once for each of the samples and lanes in which it was drawn. intervals:
    INTERVAL records.
    """

    layout: EpochLayout
    intervals: Records
    length: int
    lanes: int

    @property
    def tokens(self) -> int:
        """Tokens of all intervals."""
        last = self.intervals[-1]
        return int(last["at"] + last["high"] - last["low"])

    @property
    def samples(self) -> int:
        """How many samples they make; what is left at the end makes none."""
        return self.tokens // self.length

    @cached_property
    def _runs_of_lanes(self) -> Integers:
        """The run of each lane, counted from the beginning, int64 [lanes]: that of lane i is as far
        along as the fraction of i times the golden ratio, so that lanes next to each other are far apart.
        """
        fractions = np.arange(self.lanes, dtype=np.uint64) * GOLDEN  # in 2**-64ths
        runs = np.empty(self.lanes, np.int64)
        runs[np.argsort(fractions)] = np.arange(self.lanes)
        return runs

    @cached_property
    def lane_counts(self) -> Integers:
        """Samples of each lane, int64 [lanes]: lanes differ by one at most."""
        each, more = divmod(self.samples, self.lanes)
        return each + (self._runs_of_lanes < more).astype(np.int64)

    @cached_property
    def lane_starts(self) -> Integers:
        """The first sample of each lane, int64 [lanes]."""
        each, more = divmod(self.samples, self.lanes)
        return self._runs_of_lanes * each + np.minimum(self._runs_of_lanes, more)

    def runs(self, samples: Integers, extra: int) -> Records:
        """The runs of tokens of samples, sample by sample: RUN records, whose `item` is a place in
        `samples`.
        """
        runs = np.empty(4 * len(samples), RUN)
        first_tokens = samples * self.length
        while True:
            count = remainder_runs(
                first_tokens, self.length, extra, self.intervals, *self.layout, runs
            )
            if count <= len(runs):
                return runs[:count]
            runs = np.empty(count, RUN)

    def unread_after(self, drawn: Integers) -> Records:
        """What is unread of it when each lane has made `drawn` draws; last the tokens too few for a
        sample.
        """
        taken = np.minimum(drawn, self.lane_counts)
        dealt = self.samples * self.length
        by_start = np.argsort(self.lane_starts, kind="stable")
        first = np.append((self.lane_starts + taken)[by_start] * self.length, dealt)
        stop = np.append((self.lane_starts + self.lane_counts)[by_start] * self.length, self.tokens)
        slices = np.empty(len(self.intervals) + len(first), INTERVAL)
        return slices[: slice_intervals(first, stop, self.intervals, slices)]


def remainder_of(
    layout: EpochLayout, before: EpochRemainder | None, drawn: Integers, *, length: int, lanes: int
) -> EpochRemainder | None:
    """What is unread of a dataset when each lane has made `drawn` draws, int64 [lanes], for new
    `lanes` in samples of `length`. None: nothing has begun.

    layout: the dataset alone, as it was drawn. before: the remainder that it had.
    """
    intervals = []
    if before is not None:
        intervals.append(before.unread_after(drawn))
        drawn = np.maximum(drawn - before.lane_counts, 0)
        layout = before.layout.joined(layout)
    newest = np.zeros(3 * int(layout.datasets["lanes"][-1]), INTERVAL)
    count = unread_intervals(drawn, layout.datasets, len(layout.datasets) - 1, newest)
    intervals.append(newest[:count])
    unread = np.concatenate(intervals)
    if not len(unread):
        return None
    return EpochRemainder(
        layout=layout, intervals=_in_stretches(layout, unread), length=length, lanes=lanes
    )


def _in_stretches(layout: EpochLayout, intervals: Records) -> Records:
    """Intervals cut at the bounds of blocks, whole blocks first; adjacent ones are merged."""
    split = np.empty(MAX_STRETCHES * len(intervals), INTERVAL)
    is_whole = np.empty(len(split), np.bool_)
    count = split_at_blocks(intervals, layout.datasets, split, is_whole)
    split = split[np.argsort(~is_whole[:count], kind="stable")]
    follows = split["low"][1:] == split["high"][:-1]
    for field in ("dataset", "kind", "which"):
        follows &= split[field][1:] == split[field][:-1]
    begins = np.flatnonzero(np.append(True, ~follows))
    merged = split[begins]
    merged["high"] = split["high"][np.append(begins[1:], count) - 1]
    sizes = merged["high"] - merged["low"]
    merged["at"] = np.cumsum(sizes) - sizes
    return merged
