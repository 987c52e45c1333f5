"""The stream order: shuffled, blended, elastic, and without an index.

The global stream is L independent lanes, interleaved: sample i is lane i mod L, row i div L. L is a
multiple of the global batch, so every usable number of ranks divides it, and ranks own disjoint
lanes.

A dataset is cut, in every epoch anew, into samples of consecutive tokens of one file (shifted by a
keyed phase, so that no token is always lost), and into blocks of whole samples. The blocks are
permuted by a keyed bijection; the permuted dataset is cut into runs, one for each lane (or group of
lanes, when there are few blocks), rotated by a keyed offset. A run within a block is a piece:
contiguous bytes, read in a keyed order. Which dataset a lane takes at a row comes from a binary
tree of exact fractions. Every part of it is arithmetic on (seed, sizes, weights), so any sample can
be located by itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from streammega.errors import ConfigError
from streammega.kernels.lanes import FRACTION_BITS, count_draws, keyed, locate_stream
from streammega.order.extents import Extents, merge_extents
from streammega.order.rests import Grid, Rest, rest_of

Integers = NDArray[np.int64]
STREAM_VERSION = 1
"""In every identity: another order needs another version."""
MIN_LANES = 1024
"""Many lanes with fine blocks shuffle better than few with coarse ones of the same memory:
docs/orders.md.
"""
DEFAULT_BLOCK_BYTES = 1 << 18


@dataclass(frozen=True, kw_only=True)
class FilePart:
    """Consecutive tokens [start, start + tokens) of a file."""

    file: int
    start: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class StreamDataset:
    """One dataset of the stream: its parts in order, and the bytes of a token.

    is_packed: samples are the bins of its files, with no token after them.
    """

    parts: Sequence[FilePart]
    itemsize: int
    is_packed: bool = False


@dataclass(frozen=True, kw_only=True)
class StreamGeometry:
    """The sizes that the kernels read, of all datasets end to end; int64 each.

    Parts too short for one sample are left out.
    """

    sizes: Integers
    """[datasets]: samples in one epoch."""
    blocks: Integers
    """[datasets]: samples of a block."""
    groups: Integers
    """[datasets]: lanes that share a run."""
    first_parts: Integers
    """[datasets + 1]: of the parts of all datasets, the first of each."""
    files: Integers
    """[parts]: the file, within its dataset."""
    starts: Integers
    """[parts]: the token of the file at which it starts."""
    slacks: Integers
    """[parts]: tokens that no whole sample takes: how far an epoch may shift the others."""
    before: Integers
    """[parts]: samples of its dataset before it."""
    ends: Integers
    """[parts]: the same with its own."""


@dataclass(frozen=True, kw_only=True)
class StreamOrder:
    """The order of a stream over datasets.

    schedule: (first sample, weight of each dataset) segments, the first at `first_sample`; a later
    segment starts at the next whole row. Weights are relative; a segment may give a dataset none.
    Of a phase: `first_sample`, where it begins; `earlier`, the orders of the phases before it, in
    whose place it goes on; `numbers`, the number of each dataset over all phases, in the order in
    which they first appear (None: 0, 1, ...); `restart`, numbers of those that begin a new epoch
    here, however far they were.
    """

    datasets: Sequence[StreamDataset]
    schedule: Sequence[tuple[int, Sequence[float]]]
    sequence_length: int
    extra_token: bool
    seed: int
    lanes: int
    block_bytes: int = DEFAULT_BLOCK_BYTES
    first_sample: int = 0
    numbers: Sequence[int] | None = None
    earlier: Sequence[StreamOrder] = ()
    restart: frozenset[int] = frozenset()

    @property
    def width(self) -> int:
        """Tokens of a sample, with the extra one."""
        return self.sequence_length + int(self.extra_token)

    def locate(self, sample_ids: Integers) -> Extents:
        """Where samples lie: one run of tokens each. `dataset`: its number over all phases.

        Any ids from `first_sample` on; cost per sample O(log datasets).
        """
        count = len(sample_ids)
        dataset = np.empty(count, np.int32)
        file = np.empty(count, np.int32)
        start = np.empty(count, np.int64)
        stop = np.empty(count, np.int64)
        geometry = self.geometry
        locate_stream(
            self.within(sample_ids),
            self.lanes,
            *self.drawing,
            self.dataset_numbers,
            self.first_epochs,
            geometry.sizes,
            geometry.blocks,
            geometry.groups,
            geometry.first_parts,
            geometry.files,
            geometry.starts,
            geometry.slacks,
            geometry.before,
            self.sequence_length,
            self.width,
            dataset,
            file,
            start,
            stop,
        )
        column = dataset
        if self.numbers is not None:
            dataset = self.dataset_numbers[column].astype(np.int32)
        splits = np.arange(count + 1, dtype=np.int64)
        found = Extents(row_splits=splits, dataset=dataset, file=file, start=start, stop=stop)
        if self.has_rests:
            return self._with_rests(sample_ids, column, found)
        return found

    def _with_rests(
        self, sample_ids: Integers, column: NDArray[np.int32], found: Extents
    ) -> Extents:
        """The same with those samples that are of the rest of former epochs, of which `found` has
        how many draws the lane is before its own.
        """
        of_rests = np.flatnonzero(found.file < 0)
        if not len(of_rests):  # as soon as all lanes are past them
            return found
        own = np.flatnonzero(found.file >= 0)
        splits = np.arange(len(own) + 1, dtype=np.int64)
        parts = [
            (
                own,
                Extents(
                    row_splits=splits,
                    dataset=found.dataset[own],
                    file=found.file[own],
                    start=found.start[own],
                    stop=found.stop[own],
                ),
            )
        ]
        for place in np.unique(column[of_rests]).tolist():
            rest = self.rests[place]
            assert rest is not None
            samples = of_rests[column[of_rests] == place]
            lane = self.lane_of(np.asarray(sample_ids, np.int64)[samples])
            draw = found.start[samples] + rest.shares[lane]
            of_sample, file, start, stop = rest.rows(
                rest.firsts[lane] + draw, self.width - self.sequence_length
            )
            number = np.full(len(file), self.dataset_numbers[place], np.int32)
            splits = np.searchsorted(of_sample, np.arange(len(samples) + 1))
            extents = Extents(
                row_splits=splits.astype(np.int64),
                dataset=number,
                file=file.astype(np.int32),
                start=start,
                stop=stop,
            )
            parts.append((samples, extents))
        return merge_extents(parts)

    def within(self, sample_ids: Integers) -> Integers:
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
    def drawing(self) -> tuple[np.uint64, int, Integers, NDArray[np.uint64], Integers]:
        """What decides which dataset a lane draws from: the key, the number of the first segment,
        and rows, fractions and draws before each segment.
        """
        return self.key, self._first_segment, self._rows, self._fractions, self._bases

    @property
    def sizes(self) -> Integers:
        """Samples of each dataset in one epoch, int64 [datasets]."""
        return self.geometry.sizes

    @property
    def block_samples(self) -> Integers:
        """Samples of a block of each dataset, int64 [datasets]."""
        return self.geometry.blocks

    @property
    def num_runs(self) -> Integers:
        """Runs of each dataset: as many as lanes where there are blocks enough, else a divisor;
        int64 [datasets].
        """
        runs: Integers = self.lanes // self.geometry.groups
        return runs

    def check(self) -> None:
        """Raise ConfigError if a dataset holds no sample."""
        _ = self.geometry

    def counts(self, num_samples: int) -> Integers:
        """Samples that the first `num_samples` of this phase, and those of the phases before it
        since a dataset began anew, take from each dataset in each lane, int64 [lanes, datasets].

        In closed form: no sample is located.
        """
        return self._draws_before_phase() + self.own_counts(num_samples)

    def own_counts(self, num_samples: int) -> Integers:
        """The same without the phases before."""
        rows, more = divmod(num_samples, self.lanes)
        counts = self._draws_of_rows(rows)
        if more:  # of the last row only the first lanes have a sample
            counts[:more] = self._draws_of_rows(rows + 1)[:more]
        return counts

    @cached_property
    def key(self) -> np.uint64:
        """What all keys of this order are made of."""
        return np.uint64(keyed(np.uint64(self.seed), 0, STREAM_VERSION, self.lanes))

    @cached_property
    def geometry(self) -> StreamGeometry:
        """The sizes that the kernels read, computed once."""
        return _geometry(self)

    @property
    def _first_segment(self) -> int:
        """The number of this phase's first segment among those of all phases."""
        return sum(len(order.schedule) for order in self.earlier)

    @cached_property
    def _rows(self) -> Integers:
        """The first row of each segment of the schedule, int64 [segments]."""
        firsts = [first - self.first_sample for first, _ in self.schedule]
        return np.array([-(-first // self.lanes) for first in firsts], np.int64)

    def first_of_segment(self, segment: int) -> int:
        """The first sample of a segment of the schedule: it begins with a whole row."""
        return self.first_sample + int(self._rows[segment]) * self.lanes

    @cached_property
    def _fractions(self) -> NDArray[np.uint64]:
        return np.stack([tree_fractions(weights) for _, weights in self.schedule])

    @cached_property
    def _bases(self) -> Integers:
        """Draws of each lane from each dataset before each segment, [segments, lanes, datasets]."""
        bases = np.zeros((len(self.schedule), self.lanes, len(self.datasets)), np.int64)
        bases[0] = self._draws_before_phase()
        for column, rest in enumerate(self.rests):
            if rest is not None:
                bases[0, :, column] -= rest.shares
        for segment in range(1, len(self.schedule)):
            former = segment - 1
            num_rows = int(self._rows[segment] - self._rows[former])
            bases[segment] = bases[former]
            self._add_draws(former, num_rows, bases[segment])
        return bases

    def _draws_before_phase(self) -> Integers:
        """Draws of each lane from each dataset in the phases before, since it began anew, [lanes,
        datasets].
        """
        draws = np.zeros((self.lanes, len(self.datasets)), np.int64)
        for column, number in enumerate(self.dataset_numbers.tolist()):
            former = self._former(number)
            if former is not None and self._goes_on(column, *former):
                draws[:, column] = self._drawn_in(*former)
        return draws

    @property
    def _ends(self) -> list[int]:
        """The end of each earlier phase."""
        return [order.first_sample for order in (*self.earlier, self)][1:]

    def _goes_on(self, column: int, phase: int, place: int) -> bool:
        """Whether a dataset is drawn as in an earlier phase: in the same samples and lanes."""
        order = self.earlier[phase]
        same_shape = (order.sequence_length, order.lanes) == (self.sequence_length, self.lanes)
        return same_shape and int(self.dataset_numbers[column]) not in self.restart

    @cached_property
    def rests(self) -> list[Rest | None]:
        """What earlier phases have left of each dataset, in samples and lanes of their own; None of
        one that goes on, or is new, or begins a new epoch.
        """
        if not self.earlier:
            return [None] * len(self.datasets)
        rests: list[Rest | None] = []
        for column, number in enumerate(self.dataset_numbers.tolist()):
            former = self._former(number)
            if former is None or number in self.restart:
                rests.append(None)
            elif self._goes_on(column, *former):
                phase, place = former
                rests.append(self.earlier[phase].rests[place])
            else:
                rests.append(self._left_of(*former))
        return rests

    def _left_of(self, phase: int, place: int) -> Rest | None:
        """What a dataset has left at the end of an earlier phase, in samples and lanes of this."""
        order = self.earlier[phase]
        return rest_of(
            order.grid(place),
            order.rests[place],
            self._drawn_in(phase, place),
            length=self.sequence_length,
            lanes=self.lanes,
        )

    def left_before(self, column: int) -> tuple[Rest | None, bool]:
        """What earlier phases left of a dataset that begins anew in this one, and whether it is
        read here: a restart passes it over. (None, True) of one that goes on, or is new.
        """
        number = int(self.dataset_numbers[column])
        former = self._former(number)
        if former is None or self._goes_on(column, *former):
            return None, True
        if number in self.restart:
            return self._left_of(*former), False
        return self.rests[column], True

    @cached_property
    def has_rests(self) -> bool:
        """Whether some of its samples are of what earlier phases have left, and may join runs."""
        return any(rest is not None for rest in self.rests)

    def grid(self, column: int) -> Grid:
        """One of the datasets in the samples and lanes of this order."""
        geometry = self.geometry
        first, stop = geometry.first_parts[column : column + 2].tolist()
        of_parts = (
            geometry.files,
            geometry.starts,
            geometry.slacks,
            geometry.before,
            geometry.ends,
        )
        return Grid(
            key=self.key,
            lanes=self.lanes,
            number=int(self.dataset_numbers[column]),
            first_epoch=int(self.first_epochs[column]),
            size=int(geometry.sizes[column]),
            block=int(geometry.blocks[column]),
            group=int(geometry.groups[column]),
            length=self.sequence_length,
            parts=[array[first:stop] for array in of_parts],
        )

    def _drawn_in(self, phase: int, place: int) -> Integers:
        """Draws of each lane from a dataset up to the end of an earlier phase, since it began in
        its samples and lanes; int64 [lanes of that phase].
        """
        order = self.earlier[phase]
        return order._counts_at_its_end(self._ends[phase])[:, place]

    def _counts_at_its_end(self, end: int) -> Integers:
        """`counts` up to the sample `end`, where a phase follows; kept, for every dataset of those
        that follow asks: counting is of all datasets at once.
        """
        kept = self._kept_counts
        if end not in kept:
            kept.clear()
            kept[end] = self.counts(end - self.first_sample)
        return kept[end]

    @cached_property
    def _kept_counts(self) -> dict[int, Integers]:
        return {}

    @cached_property
    def first_epochs(self) -> Integers:
        """The number in keys of the first epoch of each dataset since it began anew: those of the
        epochs before are not used again. int64 [datasets].
        """
        first = np.zeros(len(self.datasets), np.int64)
        for column, number in enumerate(self.dataset_numbers.tolist()):
            former = self._former(number)
            if former is None:
                continue
            phase, place = former
            order = self.earlier[phase]
            first[column] = order.first_epochs[place]
            if not self._goes_on(column, phase, place):
                draws = self._drawn_in(phase, place)
                rest = order.rests[place]
                if rest is not None:
                    draws = np.maximum(draws - rest.shares, 0)
                first[column] += order.epochs_of(draws, place)
        return first

    def epochs_of(self, draws: Integers, dataset: int) -> int:
        """How many epochs of a dataset have begun when each lane has made `draws`, int64 [lanes]."""
        last = np.where(draws > 0, self.epochs_of_draws(draws - 1, dataset), -1)
        return int(last.max()) + 1

    def epochs_of_draws(self, draws: Integers, dataset: int) -> Integers:
        """The epoch of each lane's draw of that number from a dataset, since it began anew and
        without what former epochs had left; int64 [lanes].
        """
        group = int(self.geometry.groups[dataset])
        lane = np.arange(self.lanes)
        run_length = self._run_lengths(dataset)[lane // group]
        epochs: Integers = (draws * group + lane % group) // run_length
        return epochs

    def _run_lengths(self, dataset: int) -> Integers:
        """Samples of each run of a dataset, int64 [runs]: as `run_bounds` of the kernels, the lanes
        of a run have its samples in equal shares.
        """
        size = int(self.sizes[dataset])
        first_lanes = np.arange(0, self.lanes + 1, int(self.geometry.groups[dataset]))
        starts = first_lanes * (size // self.lanes) + np.minimum(size % self.lanes, first_lanes)
        lengths: Integers = np.diff(starts)
        return lengths

    def _former(self, number: int) -> tuple[int, int] | None:
        """(phase, place in it) of a dataset in the last phase before that has it."""
        for phase in range(len(self.earlier) - 1, -1, -1):
            places = np.flatnonzero(self.earlier[phase].dataset_numbers == number)
            if len(places):
                return phase, int(places[0])
        return None

    def _draws_of_rows(self, rows: int) -> Integers:
        """What the first rows of this phase take from each dataset in each lane, without the
        phases before, [lanes, datasets].
        """
        draws = np.zeros((self.lanes, len(self.datasets)), np.int64)
        ends = [*self._rows[1:].tolist(), rows]
        for segment, (first, end) in enumerate(zip(self._rows.tolist(), ends, strict=True)):
            self._add_draws(segment, max(0, min(end, rows) - first), draws)
        return draws

    def _add_draws(self, segment: int, draws: int, counts: Integers) -> None:
        """Add the first draws of a segment to `counts`, int64 [lanes, datasets]."""
        count_draws(
            draws,
            self.lanes,
            self._first_segment + segment,
            self._fractions[segment],
            len(self.datasets),
            self.key,
            counts,
        )


def default_lanes(global_batch_size: int) -> int:
    """The smallest multiple of the global batch that is at least 1024."""
    return global_batch_size * -(-MIN_LANES // global_batch_size)


def samples_of(tokens: int, sequence_length: int, extra: int) -> int:
    """Samples that a part of so many tokens has in every epoch."""
    return max(0, (tokens - extra) // sequence_length)


def dataset_samples(dataset: StreamDataset, sequence_length: int, extra: int) -> int:
    """Samples of a dataset in one epoch."""
    return sum(samples_of(part.tokens, sequence_length, extra) for part in dataset.parts)


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


def _geometry(order: StreamOrder) -> StreamGeometry:
    """The sizes of an order's datasets. Raises ConfigError if one of them holds no sample."""
    extra = int(order.extra_token)
    length = order.sequence_length
    sizes = []
    blocks = []
    groups = []
    first_parts = [0]
    files = []
    starts = []
    slacks = []
    before = []
    ends = []
    for number, dataset in enumerate(order.datasets):
        size = 0
        for part in dataset.parts:
            samples = samples_of(part.tokens, length, extra)
            if samples == 0:
                continue
            files.append(part.file)
            starts.append(part.start)
            slacks.append(part.tokens - extra - samples * length)
            before.append(size)
            size += samples
            ends.append(size)
        if size == 0:
            longest = max((part.tokens for part in dataset.parts), default=0)
            raise ConfigError(
                f"dataset {number} of the blend holds no sample: its longest file has {longest} "
                f"tokens, a sample needs {length} + {extra}; lower sequence_length, or give it "
                "more data"
            )
        block = max(1, order.block_bytes // (length * dataset.itemsize))
        num_blocks = -(-size // block)
        num_runs = _num_runs(size, num_blocks, order.lanes)
        sizes.append(size)
        blocks.append(block)
        groups.append(order.lanes // num_runs)
        first_parts.append(len(files))
    return StreamGeometry(
        sizes=np.array(sizes, np.int64),
        blocks=np.array(blocks, np.int64),
        groups=np.array(groups, np.int64),
        first_parts=np.array(first_parts, np.int64),
        files=np.array(files, np.int64),
        starts=np.array(starts, np.int64),
        slacks=np.array(slacks, np.int64),
        before=np.array(before, np.int64),
        ends=np.array(ends, np.int64),
    )


def _num_runs(size: int, blocks: int, lanes: int) -> int:
    """As many runs as lanes, or the largest divisor of the lanes that leaves every run a block; one
    when samples are few.
    """
    if size < lanes:
        return 1
    return max(runs for runs in _divisors(lanes) if runs <= max(1, blocks))


def _divisors(number: int) -> list[int]:
    """All of them, in no order; a square's root twice."""
    divisors = []
    for small in range(1, math.isqrt(number) + 1):
        if number % small == 0:
            divisors.append(small)
            divisors.append(number // small)
    return divisors
