"""The stream order: shuffled, blended, elastic, and without an index.

The global stream is L independent lanes, interleaved: sample i is lane i mod L, row i div L. L is a
multiple of the global batch, so every usable number of ranks divides it, and ranks own disjoint
lanes.

Every epoch cuts a dataset into samples: consecutive tokens of one file, shifted by a keyed offset,
so that no token is lost in every epoch. Whole samples make blocks, which a keyed bijection
permutes. The permuted dataset is cut into a run for each lane, rotated by a keyed offset. Where
that is less than four blocks, lanes next to each other have runs far apart, for neighbouring runs
share blocks. Where it is few samples, all lanes share one run of single samples. The part of a
block in a run is contiguous bytes, read in a keyed order. A binary tree of exact fractions says
which dataset a lane draws from at a row. All of it is arithmetic on (seed, sizes, weights), so any
sample can be located by itself.

The datasets, weights, sample lengths and lanes of a run may change at some samples. Each such phase
has a stream order of its own, which continues where the phases before it ended. Rows and lanes
count from its first sample, and its tree has its own datasets. The draws that each lane made from a
dataset in earlier phases are counted in closed form, so nothing is read twice within an epoch.
Where the samples or lanes of a dataset change, the unread part of its open epochs comes first
(epoch_remainder.py), then whole epochs with new numbers in keys. A phase never changes earlier
ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from streammega.errors.cached_property import cached_property
from streammega.kernels.keyed import keyed
from streammega.kernels.stream import FRACTION_BITS, count_draws, locate
from streammega.order.epoch_layout import (
    EpochLayout,
    Integers,
    Records,
    StreamDataset,
    epoch_layout,
)
from streammega.order.epoch_remainder import EpochRemainder, remainder_of
from streammega.order.extents import Extents, merge_extents

STREAM_VERSION = 2
"""In every identity: another order needs another version."""
OPEN_BYTES = 128 << 20
"""Bytes of the open blocks of a dataset in all lanes, by default. A single rank holds all of them.

Many lanes with fine blocks shuffle better than few with coarse ones of the same memory:
docs/orders-measured.md.
"""
MAX_LANES = 4096
"""Most lanes by default, where blocks are small and the global batch needs no more."""
LANES_LIMIT = 1 << 24
"""Most lanes of all: some arrays hold a number of each lane and dataset."""
MAX_BLOCK_BYTES = 256 << 10
MIN_BLOCK_BYTES = 128 << 10
"""Bounds of a block by default. Smaller blocks need more requests."""


class BlendTree(NamedTuple):
    """What decides which dataset a lane draws from, as the kernels take it.

    key: the order's. segment: the number of the phase in keys. fractions [nodes]: the part of the
    draws at a node that goes left, in 2**-44ths. bases [lanes, datasets]: draws of a lane from a
    dataset before the phase, minus its share of the remainder.
    """

    key: np.uint64
    lanes: int
    segment: int
    fractions: NDArray[np.uint64]
    bases: Integers


class DatasetProgress(NamedTuple):
    """How far earlier phases have drawn a dataset.

    order, place: of the last phase that has it. draws: of each lane since it has these samples and
    lanes; those of its remainder come first.
    """

    order: StreamOrder
    place: int
    draws: Integers

    @property
    def remainder(self) -> EpochRemainder | None:
        """What was unread when it got these samples and lanes."""
        return self.order.remainders[self.place]

    @property
    def first_epoch(self) -> int:
        """The number in keys of the epoch that its draws began with."""
        return int(self.order.first_epochs[self.place])

    @property
    def next_epoch(self) -> int:
        """The number in keys of the first epoch that has not begun."""
        draws = self.draws
        if self.remainder is not None:
            draws = np.maximum(draws - self.remainder.lane_counts, 0)
        return self.first_epoch + self.order.layout.epochs_begun(draws, self.place)

    def unread(self, length: int, lanes: int) -> EpochRemainder | None:
        """The unread part of its epochs, in samples of `length` and so many lanes."""
        layout = self.order.layout.of_dataset(self.place)
        return remainder_of(layout, self.remainder, self.draws, length=length, lanes=lanes)


@dataclass(frozen=True, kw_only=True)
class StreamOrder:
    """The order of one phase of a stream over datasets. `place`: that of a dataset among them.

    Args:
        weights: relative.
        first_sample: where the phase begins.
        numbers: the datasets' numbers over all phases, in the order in which they first appear;
            None: 0, 1, ...
        earlier: the orders of the phases before it.
    """

    datasets: Sequence[StreamDataset]
    weights: Sequence[float]
    sequence_length: int
    extra_token: bool
    seed: int
    lanes: int
    shuffle_block_bytes: int = MAX_BLOCK_BYTES
    first_sample: int = 0
    numbers: Sequence[int] | None = None
    earlier: Sequence[StreamOrder] = ()

    def locate(self, sample_ids: Integers) -> Extents:
        """Where samples are stored: one run of tokens each, or several where a sample joins what
        earlier phases left unread. `dataset`: its number over all phases.

        Takes any ids from `first_sample` on. Cost of a sample: O(log datasets).
        """
        count = len(sample_ids)
        place = np.empty(count, np.int32)
        file = np.empty(count, np.int32)
        start = np.empty(count, np.int64)
        stop = np.empty(count, np.int64)
        samples = self.within_phase(sample_ids)
        locate(samples, self.tree, *self.layout, self.extra, place, file, start, stop)
        dataset = place
        if self.numbers is not None:
            dataset = self.dataset_numbers[place].astype(np.int32)
        # A negative file is the remainder, and its `start` is a negative draw: see `_of_remainder`.
        if not self.has_remainders or (file >= 0).all():  # as soon as all lanes are past them
            return _one_run_each(dataset, file, start, stop)
        of_epochs = np.flatnonzero(file >= 0)
        of_remainders = np.flatnonzero(file < 0)
        parts = [
            (
                of_epochs,
                _one_run_each(
                    dataset[of_epochs], file[of_epochs], start[of_epochs], stop[of_epochs]
                ),
            )
        ]
        for number in np.unique(place[of_remainders]).tolist():
            chosen = of_remainders[place[of_remainders] == number]
            parts.append((chosen, self._of_remainder(number, samples[chosen], start[chosen])))
        return merge_extents(parts)

    def _of_remainder(self, place: int, samples: Integers, before_own: Integers) -> Extents:
        """Where samples of a dataset's remainder are stored. before_own: how many draws each is
        before the first draw of its lane from whole epochs; negative.
        """
        remainder = self.remainders[place]
        assert remainder is not None
        lane = samples % self.lanes
        draw = before_own + remainder.lane_counts[lane]
        runs = remainder.runs(remainder.lane_starts[lane] + draw, self.extra)
        splits = np.searchsorted(runs["item"], np.arange(len(samples) + 1))
        return Extents(
            row_splits=splits.astype(np.int64),
            dataset=np.full(len(runs), self.dataset_numbers[place], np.int32),
            file=runs["file"].astype(np.int32),
            start=runs["start"],
            stop=runs["stop"],
        )

    @property
    def extra(self) -> int:
        """1 where a sample has one token more than `sequence_length`, else 0."""
        return int(self.extra_token)

    def within_phase(self, sample_ids: Integers) -> Integers:
        """Samples counted from the first of this phase, as kernels count them."""
        return np.ascontiguousarray(sample_ids, np.int64) - self.first_sample

    def lane_of(self, sample_ids: Integers) -> Integers:
        """The lane of each sample."""
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
        """Lanes that share a run of each dataset, 1 or all; int64 [datasets]."""
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
        """How epochs are cut, as the kernels take it."""
        datasets, parts = self._first_layout
        datasets = datasets.copy()
        datasets["first_epoch"] = self.first_epochs
        return EpochLayout(datasets, parts)

    @cached_property
    def _first_layout(self) -> EpochLayout:
        """The same, as if draws began with epoch 0: it needs no earlier phase."""
        return epoch_layout(
            self.datasets,
            self.dataset_numbers,
            key=self.key,
            length=self.sequence_length,
            extra=self.extra,
            lanes=self.lanes,
            shuffle_block_bytes=self.shuffle_block_bytes,
        )

    @cached_property
    def tree(self) -> BlendTree:
        """Which dataset each lane draws from, as the kernels take it."""
        drawn = self._draws_before
        for place, remainder in enumerate(self.remainders):
            if remainder is not None:
                drawn[:, place] -= remainder.lane_counts
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
        """How many draws each lane has made from each dataset after `num_samples` of this phase,
        int64 [lanes, datasets]. They count from where the dataset's samples and lanes last changed.

        In closed form: no sample is located.
        """
        rows, more = divmod(num_samples, self.lanes)
        counts = self._draws_of_rows(rows)
        if more:  # of the last row only the first lanes have a sample
            counts[:more] = self._draws_of_rows(rows + 1)[:more]
        return self._draws_before + counts

    # What this phase takes over from earlier ones.

    @cached_property
    def progress(self) -> Mapping[int, DatasetProgress]:
        """How far earlier phases have drawn each of their datasets, by its number."""
        if not self.earlier:
            return {}
        # from the first on: the last alone would recurse through hundreds of phases
        for order in self.earlier:
            _ = order.progress, order.remainders, order.first_epochs
        last = self.earlier[-1]
        draws = last.counts(self.first_sample - last.first_sample)
        progress = dict(last.progress)
        for place, number in enumerate(last.dataset_numbers.tolist()):
            progress[number] = DatasetProgress(last, place, draws[:, place])
        return progress

    def _continues(self, number: int) -> bool:
        """Whether a dataset is drawn in the same samples and lanes as before."""
        before = self.progress.get(number)
        if before is None:
            return False
        order = before.order
        return order.sequence_length == self.sequence_length and order.lanes == self.lanes

    @cached_property
    def has_remainders(self) -> bool:
        """Whether some samples are of remainders, and may join several runs."""
        return any(remainder is not None for remainder in self.remainders)

    @cached_property
    def remainders(self) -> Sequence[EpochRemainder | None]:
        """The unread part of each dataset's earlier epochs, in the samples and lanes of this phase.

        A dataset that continues keeps the remainder that it has. None for one that is new.
        """
        remainders: list[EpochRemainder | None] = []
        for number in self.dataset_numbers.tolist():
            before = self.progress.get(number)
            if before is None:
                remainders.append(None)
            elif self._continues(number):
                remainders.append(before.remainder)
            else:
                remainders.append(before.unread(self.sequence_length, self.lanes))
        return remainders

    def carried_over(self, place: int) -> EpochRemainder | None:
        """The remainder of a dataset that begins in this phase; None for others."""
        if self._continues(int(self.dataset_numbers[place])):
            return None
        return self.remainders[place]

    @cached_property
    def first_epochs(self) -> Integers:
        """The number in keys of the epoch that each dataset's draws begin with, int64 [datasets].
        Earlier epochs have smaller numbers.
        """
        first = np.zeros(len(self.dataset_numbers), np.int64)
        for place, number in enumerate(self.dataset_numbers.tolist()):
            before = self.progress.get(number)
            if before is not None:
                continues = self._continues(number)
                first[place] = before.first_epoch if continues else before.next_epoch
        return first

    @property
    def _draws_before(self) -> Integers:
        """Draws that each lane made in earlier phases from datasets that continue, int64 [lanes,
        datasets].
        """
        draws = np.zeros((self.lanes, len(self.dataset_numbers)), np.int64)
        for place, number in enumerate(self.dataset_numbers.tolist()):
            if self._continues(number):
                draws[:, place] = self.progress[number].draws
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
    # Sums of integers do not depend on their order. Divided first: the largest floats times 2**80
    # would overflow.
    exact = [int(weight / largest * 2.0**80) for weight in weights]
    root = (1, 0, len(weights))
    nodes = [root]
    while nodes:
        node, low, high = nodes.pop()
        if high - low < 2:
            continue
        middle = (low + high) // 2
        left_weight = sum(exact[low:middle])
        both = left_weight + sum(exact[middle:high])
        if both:  # nothing is drawn below a node without weight
            fractions[node] = ((left_weight << FRACTION_BITS) + both // 2) // both  # rounded
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
        ("from_remainder", np.int64),  # how many of them are of a remainder
        ("carried_tokens", np.int64),  # of the remainder that begins in this phase
        ("unused_tokens", np.int64),  # its end, too short for a sample until the next change
    ]
)
"""What samples of one phase take from a dataset."""


def usage_of(order: StreamOrder, spans: Sequence[tuple[int, int]]) -> Records:
    """What [start, stop) spans of samples of a phase, in their order, take from its datasets: USAGE
    [datasets].

    Cost: two walks of the blending tree in each lane for every span; its length does not matter.
    """
    usage = np.zeros(len(order.datasets), USAGE)
    remainder_draws = np.zeros((order.lanes, len(order.datasets)), np.int64)
    for place, remainder in enumerate(order.remainders):
        if remainder is not None:
            remainder_draws[:, place] = remainder.lane_counts
    for start, stop in spans:
        before = order.counts(start - order.first_sample)
        after = order.counts(stop - order.first_sample)
        usage["samples"] += (after - before).sum(axis=0)
        cut_anew = np.minimum(after, remainder_draws) - np.minimum(before, remainder_draws)
        usage["from_remainder"] += cut_anew.sum(axis=0)
    for place in range(len(order.datasets)):
        carried_over = order.carried_over(place)
        if carried_over is not None:
            cut_tokens = carried_over.samples * carried_over.length
            usage["carried_tokens"][place] = carried_over.tokens
            usage["unused_tokens"][place] = carried_over.tokens - cut_tokens
    return usage


def default_lanes(global_batch_size: int, block_bytes: int | None) -> int:
    """The smallest multiple of the global batch whose open blocks have at least OPEN_BYTES, or that
    is at least MAX_LANES.
    """
    lanes = min(-(-OPEN_BYTES // (block_bytes or MAX_BLOCK_BYTES)), MAX_LANES)
    return global_batch_size * -(-lanes // global_batch_size)


def default_block_bytes(lanes: int) -> int:
    """Bytes of a block, so that the open blocks of all lanes have about OPEN_BYTES.

    They depend on nothing else: every number of ranks and every machine has the same order.
    """
    return min(max(OPEN_BYTES // lanes, MIN_BLOCK_BYTES), MAX_BLOCK_BYTES)
