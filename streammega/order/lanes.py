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

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from streammega.kernels.keyed import keyed
from streammega.kernels.lanes import locate_stream
from streammega.order.extents import Extents
from streammega.order.former_phases import FormerPhases, with_rests
from streammega.order.lane_draws import LaneDraws
from streammega.order.lane_geometry import StreamDataset, StreamGeometry, geometry_of
from streammega.order.rests import Grid, Rest

Integers = NDArray[np.int64]
STREAM_VERSION = 1
"""In every identity: another order needs another version."""
MIN_LANES = 1024
"""Many lanes with fine blocks shuffle better than few with coarse ones of the same memory:
docs/orders.md.
"""
DEFAULT_BLOCK_BYTES = 1 << 18


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
            return with_rests(self, sample_ids, column, found)
        return found

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
        draws = self._draws
        return self.key, draws.first_segment, draws.rows, draws.fractions, self._bases

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
        return self.geometry.num_runs

    def check(self) -> None:
        """Raise ConfigError if a dataset holds no sample."""
        _ = self.geometry

    def counts(self, num_samples: int) -> Integers:
        """Samples that the first `num_samples` of this phase, and those of the phases before it
        since a dataset began anew, take from each dataset in each lane, int64 [lanes, datasets].

        In closed form: no sample is located.
        """
        return self._former.draws() + self.own_counts(num_samples)

    def own_counts(self, num_samples: int) -> Integers:
        """The same without the phases before."""
        rows, more = divmod(num_samples, self.lanes)
        counts = self._draws.of_rows(rows)
        if more:  # of the last row only the first lanes have a sample
            counts[:more] = self._draws.of_rows(rows + 1)[:more]
        return counts

    @cached_property
    def key(self) -> np.uint64:
        """What all keys of this order are made of."""
        return np.uint64(keyed(np.uint64(self.seed), 0, STREAM_VERSION, self.lanes))

    @cached_property
    def geometry(self) -> StreamGeometry:
        """The sizes that the kernels read, computed once."""
        return geometry_of(
            self.datasets,
            length=self.sequence_length,
            extra=int(self.extra_token),
            lanes=self.lanes,
            block_bytes=self.block_bytes,
        )

    @cached_property
    def _draws(self) -> LaneDraws:
        """Which dataset each lane draws from, in the rows of this phase."""
        first_rows = [-(-(first - self.first_sample) // self.lanes) for first, _ in self.schedule]
        return LaneDraws(
            key=self.key,
            lanes=self.lanes,
            # the number among the segments of all phases
            first_segment=sum(len(order.schedule) for order in self.earlier),
            rows=np.array(first_rows, np.int64),
            weights=[weights for _, weights in self.schedule],
        )

    def first_of_segment(self, segment: int) -> int:
        """The first sample of a segment of the schedule: it begins with a whole row."""
        return self.first_sample + int(self._draws.rows[segment]) * self.lanes

    @cached_property
    def _bases(self) -> Integers:
        """Draws of each lane from each dataset before each segment, [segments, lanes, datasets]."""
        drawn = self._former.draws()
        for column, rest in enumerate(self.rests):
            if rest is not None:
                drawn[:, column] -= rest.shares
        return self._draws.before_segments(drawn)

    @property
    def _former(self) -> FormerPhases:
        """What the phases before have left to this one."""
        return FormerPhases(self, self.earlier)

    @cached_property
    def rests(self) -> list[Rest | None]:
        """What earlier phases have left of each dataset, in samples and lanes of their own; None of
        one that goes on, or is new, or begins a new epoch.
        """
        return self._former.rests()

    def left_before(self, column: int) -> tuple[Rest | None, bool]:
        """What earlier phases left of a dataset that begins anew in this one, and whether it is
        read here: a restart passes it over. (None, True) of one that goes on, or is new.
        """
        return self._former.left_before(column)

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

    def counts_up_to(self, end: int) -> Integers:
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
        return self._former.first_epochs()

    def epochs_of(self, draws: Integers, dataset: int) -> int:
        """How many epochs of a dataset have begun when each lane has made `draws`, int64 [lanes]."""
        last = np.where(draws > 0, self.geometry.epochs_of_draws(draws - 1, dataset), -1)
        return int(last.max()) + 1


def default_lanes(global_batch_size: int) -> int:
    """The smallest multiple of the global batch that is at least 1024."""
    return global_batch_size * -(-MIN_LANES // global_batch_size)
