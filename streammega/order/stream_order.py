"""The stream order: shuffled, blended, elastic, and without an index.

The global stream is L independent lanes, interleaved: sample i is lane i mod L, row i div L. L is a
multiple of the global batch, so every usable number of ranks divides it, and ranks own disjoint
lanes.

A dataset is cut, in every epoch anew, into samples of consecutive tokens of one file (shifted by a
keyed phase, so that no token is always lost), and into blocks of whole samples. The blocks are
permuted by a keyed bijection; the permuted dataset is cut into runs, one for each lane (or group of
lanes, when there are few blocks), rotated by a keyed offset. What a run has of a block is
contiguous bytes, read in a keyed order. Which dataset a lane takes at a row comes from a binary
tree of exact fractions. Every part of it is arithmetic on (seed, sizes, weights), so any sample can
be located by itself.

Phases: the datasets, weights, sample lengths and lanes of a run may change at some samples. A phase
is a stream order of its own that goes on where those before it ended: row and lane of a sample
count from its first one, and the blend is a tree over the phase's own datasets. How many draws each
lane has made from a dataset before the phase is summed in closed form, whether it was in the phase
before or only in an earlier one, so nothing is read twice within an epoch. A dataset whose samples
or lanes change is read on from the remainder of its epochs in progress (epoch_remainder.py), and
then by whole epochs, whose numbers in keys are new ones. A phase that follows changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from streammega.kernels.stream import FRACTION_BITS, count_draws, keyed, locate
from streammega.order.epoch_layout import (
    EpochLayout,
    Integers,
    Records,
    StreamDataset,
    epoch_layout,
)
from streammega.order.epoch_remainder import EpochRemainder, remainder_of
from streammega.order.extents import Extents, merge_extents

STREAM_VERSION = 1
"""In every identity: another order needs another version."""
MIN_LANES = 1024
"""Many lanes with fine blocks shuffle better than few with coarse ones of the same memory:
docs/orders.md.
"""
DEFAULT_BLOCK_BYTES = 1 << 18


class BlendTree(NamedTuple):
    """What decides which dataset a lane draws from, as the kernels take it."""

    key: np.uint64
    """Of the order."""
    lanes: int
    segment: int
    """The number of the phase in keys."""
    fractions: NDArray[np.uint64]
    """[nodes]: of the draws at a node, how many go left, in 2**-44ths."""
    bases: Integers
    """[lanes, datasets]: draws of a lane from a dataset before the phase, less its share of the
    remainder of former epochs.
    """


class DatasetProgress(NamedTuple):
    """How far a dataset is drawn where a phase begins.

    layout: of it alone, in the samples and lanes in which it was drawn last. remainder: what earlier
    phases had left when it began so. draws: of each lane since then, those of the remainder first.
    """

    layout: EpochLayout
    remainder: EpochRemainder | None
    draws: Integers

    @property
    def first_epoch(self) -> int:
        """The number in keys of its first epoch since it began anew."""
        return int(self.layout.datasets["first_epoch"][0])

    @property
    def next_epoch(self) -> int:
        """The number in keys of the first epoch that has not begun."""
        draws = self.draws
        if self.remainder is not None:
            draws = np.maximum(draws - self.remainder.lane_counts, 0)
        return self.first_epoch + self.layout.epochs_begun(draws, 0)

    def unread(self, length: int, lanes: int) -> EpochRemainder | None:
        """What of its epochs is unread, dealt to so many lanes in samples of `length`."""
        return remainder_of(self.layout, self.remainder, self.draws, length=length, lanes=lanes)


@dataclass(frozen=True, kw_only=True)
class StreamOrder:
    """The order of one phase of a stream over datasets. `column`: a dataset's place among them.

    weights: of each dataset, relative; one may be zero. first_sample: where the phase begins. earlier:
    the orders of the phases before it. numbers: of each dataset over all phases, in the order in
    which they first appear; None: 0, 1, ... restart: numbers of those that begin a new epoch here,
    however far they were.
    """

    datasets: Sequence[StreamDataset]
    weights: Sequence[float]
    sequence_length: int
    extra_token: bool
    seed: int
    lanes: int
    block_bytes: int = DEFAULT_BLOCK_BYTES
    first_sample: int = 0
    numbers: Sequence[int] | None = None
    earlier: Sequence[StreamOrder] = ()
    restart: frozenset[int] = frozenset()

    def locate(self, sample_ids: Integers) -> Extents:
        """Where samples lie: one run of tokens each, or several where one joins what earlier phases
        have left. `dataset`: its number over all phases.

        Any ids from `first_sample` on; cost per sample O(log datasets).
        """
        count = len(sample_ids)
        column = np.empty(count, np.int32)
        file = np.empty(count, np.int32)
        start = np.empty(count, np.int64)
        stop = np.empty(count, np.int64)
        samples = self.within_phase(sample_ids)
        locate(samples, self.tree, *self.layout, self.extra, column, file, start, stop)
        dataset = column
        if self.numbers is not None:
            dataset = self.dataset_numbers[column].astype(np.int32)
        if not self.has_remainders or (file >= 0).all():  # as soon as all lanes are past them
            return _one_run_each(dataset, file, start, stop)
        own = np.flatnonzero(file >= 0)
        of_remainders = np.flatnonzero(file < 0)
        parts = [(own, _one_run_each(dataset[own], file[own], start[own], stop[own]))]
        for place in np.unique(column[of_remainders]).tolist():
            chosen = of_remainders[column[of_remainders] == place]
            parts.append((chosen, self._of_remainder(place, samples[chosen], start[chosen])))
        return merge_extents(parts)

    def _of_remainder(self, column: int, samples: Integers, before_own: Integers) -> Extents:
        """Where samples lie that are of the remainder of a dataset's former epochs. before_own: how
        many draws the lane of each is before its first own one, negative.
        """
        remainder = self.remainders[column]
        assert remainder is not None
        lane = samples % self.lanes
        draw = before_own + remainder.lane_counts[lane]
        runs = remainder.runs(remainder.lane_starts[lane] + draw, self.extra)
        splits = np.searchsorted(runs["item"], np.arange(len(samples) + 1))
        return Extents(
            row_splits=splits.astype(np.int64),
            dataset=np.full(len(runs), self.dataset_numbers[column], np.int32),
            file=runs["file"].astype(np.int32),
            start=runs["start"],
            stop=runs["stop"],
        )

    @property
    def extra(self) -> int:
        """1 where a sample has one token more than `sequence_length`, else 0."""
        return int(self.extra_token)

    def within_phase(self, sample_ids: Integers) -> Integers:
        """Samples as the kernels count them: from the first of this phase."""
        return np.ascontiguousarray(sample_ids, np.int64) - self.first_sample

    def lane_of(self, sample_ids: Integers) -> Integers:
        """The lane in which each sample lies."""
        return (sample_ids - self.first_sample) % self.lanes

    @cached_property
    def dataset_numbers(self) -> Integers:
        """The number of each dataset over all phases, int64 [datasets]."""
        numbers = range(len(self.datasets)) if self.numbers is None else self.numbers
        return np.array(numbers, np.int64)

    @property
    def block_samples(self) -> Integers:
        """Samples of a block of each dataset, int64 [datasets]."""
        return self._first_layout.datasets["block"]

    @property
    def lanes_per_run(self) -> Integers:
        """Lanes that share a run of each dataset, int64 [datasets]."""
        return self._first_layout.datasets["group"]

    def check(self) -> None:
        """Raise ConfigError if a dataset holds no sample."""
        _ = self._first_layout

    @cached_property
    def key(self) -> np.uint64:
        """What all keys of this order are made of."""
        return np.uint64(keyed(np.uint64(self.seed), 0, STREAM_VERSION, self.lanes))

    @cached_property
    def layout(self) -> EpochLayout:
        """How epochs are cut, as the kernels take it, computed once."""
        datasets, parts = self._first_layout
        datasets = datasets.copy()
        datasets["first_epoch"] = self.first_epochs
        return EpochLayout(datasets, parts)

    @cached_property
    def _first_layout(self) -> EpochLayout:
        """The same of draws that begin with epoch 0: no earlier phase is asked."""
        return epoch_layout(
            self.datasets,
            self.dataset_numbers,
            key=self.key,
            length=self.sequence_length,
            extra=self.extra,
            lanes=self.lanes,
            block_bytes=self.block_bytes,
        )

    @cached_property
    def tree(self) -> BlendTree:
        """Which dataset each lane draws from, as the kernels take it."""
        drawn = self._draws_before
        for column, remainder in enumerate(self.remainders):
            if remainder is not None:
                drawn[:, column] -= remainder.lane_counts
        return BlendTree(
            key=self.key,
            lanes=self.lanes,
            segment=len(self.earlier),
            fractions=self._fractions,
            bases=drawn,
        )

    @cached_property
    def _fractions(self) -> NDArray[np.uint64]:
        return tree_fractions(self.weights)

    def _draws_of_rows(self, rows: int) -> Integers:
        """What the first rows of this phase take from each dataset in each lane, [lanes, datasets]."""
        columns = len(self.weights)
        draws = np.zeros((self.lanes, columns), np.int64)
        segment = len(self.earlier)
        count_draws(rows, self.lanes, segment, self._fractions, columns, self.key, draws)
        return draws

    def counts(self, num_samples: int) -> Integers:
        """Samples that the first `num_samples` of this phase, and those of the phases before it
        since a dataset began anew, take from each dataset in each lane, int64 [lanes, datasets].

        In closed form: no sample is located.
        """
        rows, more = divmod(num_samples, self.lanes)
        counts = self._draws_of_rows(rows)
        if more:  # of the last row only the first lanes have a sample
            counts[:more] = self._draws_of_rows(rows + 1)[:more]
        return self._draws_before + counts

    # What the phases before have left to this one.

    @cached_property
    def progress(self) -> Mapping[int, DatasetProgress]:
        """How far the phases before have drawn each of their datasets, by its number."""
        if not self.earlier:
            return {}
        # from the first on: each by itself would ask the one before it, hundreds deep
        for order in self.earlier:
            _ = order.progress
        last = self.earlier[-1]
        draws = last.counts(self.first_sample - last.first_sample)
        progress = dict(last.progress)
        for column, number in enumerate(last.dataset_numbers.tolist()):
            progress[number] = DatasetProgress(
                last.layout.of_dataset(column), last.remainders[column], draws[:, column]
            )
        return progress

    def _continues(self, number: int) -> bool:
        """Whether a dataset goes on as it was drawn last: in the same samples and lanes."""
        before = self.progress.get(number)
        if before is None or number in self.restart:
            return False
        row = before.layout.datasets[0]
        return bool(row["length"] == self.sequence_length and row["lanes"] == self.lanes)

    @cached_property
    def has_remainders(self) -> bool:
        """Whether some samples are of what earlier phases have left, and may join runs."""
        return any(remainder is not None for remainder in self.remainders)

    @cached_property
    def remainders(self) -> Sequence[EpochRemainder | None]:
        """What earlier phases have left of each dataset, in samples and lanes of this one; of a
        dataset that continues, that with which it began. None of one that is new or restarts.
        """
        remainders: list[EpochRemainder | None] = []
        for number in self.dataset_numbers.tolist():
            before = self.progress.get(number)
            if before is None or number in self.restart:
                remainders.append(None)
            elif self._continues(number):
                remainders.append(before.remainder)
            else:
                remainders.append(before.unread(self.sequence_length, self.lanes))
        return remainders

    def dropped(self, column: int) -> EpochRemainder | None:
        """What earlier phases have left of a dataset that restarts; None of others."""
        number = int(self.dataset_numbers[column])
        before = self.progress.get(number)
        if before is None or number not in self.restart:
            return None
        return before.unread(self.sequence_length, self.lanes)

    def carried_over(self, column: int) -> EpochRemainder | None:
        """What earlier phases have left of a dataset that this phase cuts anew; None of others."""
        if self._continues(int(self.dataset_numbers[column])):
            return None
        return self.remainders[column]

    @cached_property
    def first_epochs(self) -> Integers:
        """The number in keys of the first epoch of each dataset since it began anew: epochs before
        have other numbers. int64 [datasets].
        """
        first = np.zeros(len(self.dataset_numbers), np.int64)
        for column, number in enumerate(self.dataset_numbers.tolist()):
            before = self.progress.get(number)
            if before is not None:
                continues = self._continues(number)
                first[column] = before.first_epoch if continues else before.next_epoch
        return first

    @property
    def _draws_before(self) -> Integers:
        """Draws of each lane from each dataset in the phases before, since it began anew, [lanes,
        datasets].
        """
        draws = np.zeros((self.lanes, len(self.dataset_numbers)), np.int64)
        for column, number in enumerate(self.dataset_numbers.tolist()):
            if self._continues(number):
                draws[:, column] = self.progress[number].draws
        return draws


def tree_fractions(weights: Sequence[float]) -> NDArray[np.uint64]:
    """The fraction that goes left at each node of a balanced tree over the datasets, in 2**-44ths;
    uint64 [nodes].

    Node 1 is the root and covers all datasets; node n covers [low, high), its children 2n and 2n +
    1 the halves.
    """
    num_leaves = 1 << (max(1, len(weights)) - 1).bit_length()
    fractions = np.zeros(num_leaves + 1, np.uint64)
    largest = max(weights)
    # Integers: sums of them do not depend on their order. Divided first: a weight near the largest
    # float, times 2**80, is none.
    exact = [int(weight / largest * 2.0**80) for weight in weights]
    root = (1, 0, len(weights))
    nodes = [root]
    while nodes:
        node, low, high = nodes.pop()
        if high - low < 2:
            continue
        middle = (low + high) // 2
        left = sum(exact[low:middle])
        both = left + sum(exact[middle:high])
        if both:  # below a node of no weight nothing is ever drawn
            fractions[node] = ((left << FRACTION_BITS) + both // 2) // both  # rounded
        nodes.append((2 * node, low, middle))
        nodes.append((2 * node + 1, middle, high))
    return fractions


def _one_run_each(
    dataset: NDArray[np.int32], file: NDArray[np.int32], start: Integers, stop: Integers
) -> Extents:
    splits = np.arange(len(file) + 1, dtype=np.int64)
    return Extents(row_splits=splits, dataset=dataset, file=file, start=start, stop=stop)


USAGE = np.dtype(
    [
        ("samples", np.int64),
        ("from_remainder", np.int64),  # of these, how many are cut from what earlier phases left
        ("carried_tokens", np.int64),  # tokens that earlier phases left, which this one cuts anew
        ("unused_tokens", np.int64),  # of these, those that make no sample, until the next change
        ("dropped_tokens", np.int64),  # tokens that earlier phases left, where a restart drops them
    ]
)
"""What samples of one phase take from a dataset."""


def usage_of(order: StreamOrder, spans: Sequence[tuple[int, int]]) -> Records:
    """What [start, stop) spans of samples of a phase, in their order, take from its datasets: USAGE
    [datasets].

    Cost: two walks of the blending tree in each lane for every span, whatever their length.
    """
    usage = np.zeros(len(order.datasets), USAGE)
    remainder_draws = np.zeros((order.lanes, len(order.datasets)), np.int64)
    for column, remainder in enumerate(order.remainders):
        if remainder is not None:
            remainder_draws[:, column] = remainder.lane_counts
    for start, stop in spans:
        before = order.counts(start - order.first_sample)
        after = order.counts(stop - order.first_sample)
        usage["samples"] += (after - before).sum(axis=0)
        cut_anew = np.minimum(after, remainder_draws) - np.minimum(before, remainder_draws)
        usage["from_remainder"] += cut_anew.sum(axis=0)
    for column in range(len(order.datasets)):
        carried_over = order.carried_over(column)
        if carried_over is not None:
            cut_tokens = carried_over.samples * carried_over.length
            usage["carried_tokens"][column] = carried_over.tokens
            usage["unused_tokens"][column] = carried_over.tokens - cut_tokens
        dropped = order.dropped(column)
        if dropped is not None:
            usage["dropped_tokens"][column] = dropped.tokens
    return usage


def default_lanes(global_batch_size: int) -> int:
    """The smallest multiple of the global batch that is at least 1024."""
    return global_batch_size * -(-MIN_LANES // global_batch_size)
