"""The micro-steps of one rank: which there are, and which samples the rank reads in each. Frozen,
and without a position.

Everything below the dataset (the plan of what is read, the engine) is given this value, and never
the dataset itself: what an iteration reads cannot change under it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streammega.config import DataConfig
from streammega.errors import ConfigError, StateError
from streammega.kernels.documents import add_document_costs
from streammega.order.schedule import TrainingSchedule
from streammega.order.sharding import balanced_places, check_resume, rank_samples
from streammega.order.state import make_state
from streammega.samples.fetch import rows_of
from streammega.samples.fields import Batch
from streammega.samples.loss_masks import NO_JOINS, SampleJoins
from streammega.samples.source import (
    SampleSource,
    SegmentSource,
    all_files,
    file_of_rows,
    joins_of,
)
from streammega.samples.token_file import open_indices

Integers = NDArray[np.int64]


def attention_costs(segment: SegmentSource, sample_ids: Integers) -> Integers:
    """The squared tokens of the documents of each sample, added up; int64 [samples].

    All else that a sample costs is the same for all of them. Documents are those of the `.idx`; of
    the Megatron order, which shuffles sequences, they are its sequences. Raises FormatError for an
    index whose sequences lie in no order, StorageError.
    """
    extents = segment.locate(sample_ids)
    rows = rows_of(extents)
    # The extra token of a sample is a label alone.
    inputs_end = np.minimum(rows.column + rows.size, segment.config.sequence_length)
    num_inputs = np.maximum(inputs_end - rows.column, 0)
    files = all_files(segment.files)
    number_of_file = file_of_rows(segment.files, extents)
    costs = np.zeros(len(extents), np.int64)
    in_bounds = np.zeros(len(num_inputs), np.bool_)
    for number, file, arrays in open_indices(files, number_of_file):
        # one file at a time: each has arrays of its own
        of_file = np.flatnonzero(number_of_file == number)
        in_bounds[of_file] = True
        start = extents.start[of_file]
        add_document_costs(
            arrays.offsets, arrays.bounds, file.dtype.itemsize,
            start, start + num_inputs[of_file], rows.sample[of_file], costs,
        )  # fmt: skip
    # rows of the other orders are documents already
    alone = np.flatnonzero(~in_bounds)
    np.add.at(costs, rows.sample[alone], num_inputs[alone] ** 2)
    return costs


KEPT_BATCHES = 8
"""Global batches that are remembered: plans go over them in their order, and the caller asks again
for the one that it is in.
"""


@dataclass(frozen=True, kw_only=True)
class BalancedBatches:
    """Which samples every micro-batch of a global batch has: a pure function of their numbers and
    of the lengths of documents.
    """

    samples: SampleSource
    micro_batch_size: int
    dp_size: int

    def sample_ids(self, first: int, size: int) -> Integers:
        """Global sample ids of the batch [first, first + size), int64 [micro-steps, dp_size,
        micro_batch_size].
        """
        return self._kept(first, size)

    @cached_property
    def _kept(self) -> Callable[[int, int], Integers]:
        # of a function, not of a method: what is kept would hold its owner, and all open files
        deal = partial(_dealt, self.samples, self.micro_batch_size, self.dp_size)
        return lru_cache(KEPT_BATCHES)(deal)

    def __getstate__(self) -> dict[str, Any]:
        """Without what is remembered: each process finds it out by itself."""
        return {name: value for name, value in self.__dict__.items() if name != "_kept"}


def _dealt(
    samples: SampleSource, micro_batch_size: int, dp_size: int, first: int, size: int
) -> Integers:
    """`BalancedBatches.sample_ids`, worked out."""
    sample_ids = np.arange(first, first + size, dtype=np.int64)
    costs = attention_costs(samples.segment_at(first), sample_ids)
    return first + balanced_places(costs, micro_batch_size, dp_size)


NO_END = 1 << 62
"""The end of a stream that has none: more samples than any run consumes."""


@dataclass(frozen=True, kw_only=True)
class MicroSteps:
    """What one data-parallel rank reads. A micro-step is named by the global samples consumed
    before it.

    split: "train", "valid" or "test", for messages. samples: the samples of that split, in their
    order. schedule: the sizes of global batches, and where their steps begin.
    """

    config: DataConfig
    split: str
    samples: SampleSource
    schedule: TrainingSchedule
    micro_batch_size: int
    dp_rank: int
    dp_size: int

    def check(self) -> None:
        """Raise ConfigError where excluded samples cut a global batch apart, or no global batch is
        whole.
        """
        self._check_excluded(0)
        if self.num_samples == 0:
            raise ConfigError(
                f"{self.split} holds {self.samples.num_samples} samples, "
                f"less than one global batch of {self.schedule.global_batch_size}; lower "
                f"global_batch_size or ask for more samples"
            )

    def _check_excluded(self, consumed: int) -> None:
        """Raise ConfigError where samples excluded from `consumed` on cut a global batch apart."""
        schedule = self.schedule
        # steps after a range begin where a global batch does, as those before it
        for start, stop in self.config.exclude_samples:
            if stop <= consumed:
                continue
            if schedule.offset_at(max(start, consumed)) or schedule.offset_at(stop):
                size = schedule.size_at(start)
                raise ConfigError(
                    f"exclude_samples [{start}, {stop}) cuts a global batch of {size} samples apart, "
                    f"of those that are counted from sample {schedule.origin} on{self._says_size()}"
                )

    def _says_size(self) -> str:
        """How a config says that the counting of batches restarts at a sample."""
        if self.config.order != "stream" or self.split != "train":
            return ""
        return (
            "; for batches of another size from a checkpoint on, keep the former global_batch_size "
            "and let a phase that begins at the checkpoint's sample have the new one"
        )

    @property
    def step_samples(self) -> int:
        """Samples that one micro-batch on every rank takes from the global stream."""
        return self.micro_batch_size * self.dp_size

    @property
    def num_samples(self) -> int | None:
        """Samples over all ranks, whole global batches only; None: the stream has no end."""
        total = self.samples.num_samples
        return None if total is None else self.schedule.last_whole(total)

    @property
    def lanes(self) -> int:
        """Lanes of the stream order; 0 for other orders."""
        return self.samples.lanes

    def tokens_before(self, sample: int) -> int:
        """Tokens of all samples before one, of those that are excluded too."""
        return self.schedule.tokens_before(sample)

    def sequence_length_at(self, sample: int) -> int:
        """Tokens of a sample: those of its phase."""
        return self.samples.segment_at(sample).config.sequence_length

    def sample_ids(self, consumed: int | NDArray[np.int64]) -> NDArray[np.int64]:
        """Global sample ids of this rank's micro-batch in the micro-step at `consumed`, int64 [...,
        micro_batch_size].
        """
        if self._balanced is not None:
            positions = np.asarray(consumed, np.int64)
            ids = [self._balanced_ids(position) for position in positions.reshape(-1).tolist()]
            return np.array(ids, np.int64).reshape(*positions.shape, self.micro_batch_size)
        return rank_samples(
            consumed,
            self.micro_batch_size,
            self.dp_rank,
            self.dp_size,
            contiguous=self.config.order == "megatron",
        )

    @cached_property
    def _balanced(self) -> BalancedBatches | None:
        """How global batches are dealt out by cost; None: by the numbers of samples."""
        if not self.config.balance_attention_cost:
            return None
        return BalancedBatches(
            samples=self.samples, micro_batch_size=self.micro_batch_size, dp_size=self.dp_size
        )

    def _balanced_ids(self, consumed: int) -> NDArray[np.int64]:
        assert self._balanced is not None
        self.advance_to(consumed)  # what is dealt out is remembered
        offset = self.schedule.offset_at(consumed)
        batch = self._balanced.sample_ids(consumed - offset, self.schedule.size_at(consumed))
        ids: NDArray[np.int64] = batch[offset // self.step_samples, self.dp_rank]
        return ids

    def batch(self, consumed: int) -> Batch:
        """This rank's micro-batch in the micro-step at `consumed`: a pure function of it."""
        self.advance_to(consumed)
        segment = self.samples.segment_at(consumed)
        return segment.sample_fields(self.sample_ids(consumed), bounds=True)

    def sample_joins(self, consumed: int) -> SampleJoins:
        """Where samples of this rank's micro-batch in the micro-step at `consumed` go over from one
        run of tokens to another. Of the order alone.
        """
        self.advance_to(consumed)
        segment = self.samples.segment_at(consumed)
        if not segment.has_remainders:
            return NO_JOINS
        return joins_of(segment.files, segment.locate(self.sample_ids(consumed)))

    def parts(self, start: int) -> Iterator[range]:
        """The micro-steps from `start` on, as ranges between the excluded samples."""
        num_samples = self.num_samples
        end = NO_END if num_samples is None else num_samples
        for skip_start, skip_stop in sorted(self.config.exclude_samples):
            if start < skip_start:
                yield range(start, min(skip_start, end), self.step_samples)
            start = max(start, skip_stop)
        if start < end:
            yield range(start, end, self.step_samples)

    def positions(self, start: int) -> Iterator[int]:
        """The micro-steps from `start` on, one by one."""
        return itertools.chain.from_iterable(self.parts(start))

    def by_segment(
        self, positions: Iterator[int], start: int
    ) -> Iterator[tuple[MicroSteps, Iterator[int], int]]:
        """The micro-steps at `positions`, of an iteration from `start` on, by segment: (those of the
        segment, its positions, where the iteration begins in it).

        Each is read to its end before the next: what is open in one is nothing to another.
        """
        samples = self.samples
        for number, positions_here in itertools.groupby(positions, samples.segment_number):
            here = samples.of_segment(number)
            begin = max(start, here.segments[0].first_sample)
            yield replace(self, samples=here, config=here.config), positions_here, begin

    def attach(self, start: int) -> None:
        """Note that reading goes on at `start`: what was appended before is known, and nothing more
        is looked for there.

        Raises StateError where data was appended later, within what is a step now.
        """
        self.samples.attach(start)
        for first_sample in self.samples.appended_at:
            if first_sample > start and self.schedule.offset_at(first_sample):
                raise StateError(
                    f"newer versions joined at sample {first_sample}, ahead of sample {start}, and "
                    f"no step of these sizes ends there; resume with the former global_batch_size, "
                    f"or remove the files of later samples from data.follow.log_url: versions are "
                    f"then looked for anew"
                )

    def advance_to(self, sample: int) -> bool:
        """Take in the data that is appended up to a sample, before that is handed out. Returns
        whether there are other segments now: what was planned before is of the order without them.
        """
        return self.samples.advance_to(sample, self.schedule)

    def after(self, start: int, num_batches: int) -> int:
        """The position after so many micro-batches from `start`.

        Raises StateError where the data ends before.
        """
        if num_batches == 0:
            return start
        left = num_batches
        for part in self.parts(start):
            if 0 < left <= len(part):
                return part[left - 1] + self.step_samples
            left -= len(part)
        raise StateError(
            f"there are no {num_batches} micro-batches from sample {start} on; "
            "count those of one iteration alone"
        )

    def state(self, consumed: int) -> dict[str, Any]:
        """The state of a run that has handed out all samples before `consumed`."""
        return make_state(self.identity(consumed), consumed, self.schedule.offset_at(consumed))

    def identity(self, consumed: int) -> dict[str, Any]:
        """What defines the order of the samples before `consumed`.

        Within a balanced batch it also says how large that is: another size, or none of it
        balanced, would have begun with other samples. Between batches it says nothing.
        """
        self.advance_to(consumed - 1)
        identity = self.samples.identity(consumed)
        if self.config.balance_attention_cost and self.schedule.offset_at(consumed):
            identity["balanced_batch"] = self.schedule.size_at(consumed)
        return identity

    def check_position(self, consumed: int) -> None:
        """Raise StateError unless these ranks can go on at `consumed`."""
        num_samples = self.num_samples
        end = NO_END if num_samples is None else num_samples
        if not 0 <= consumed <= end:
            some = "endless" if num_samples is None else num_samples
            raise StateError(f"sample {consumed} is not within the {some} samples of {self.split}")
        check_resume(self.schedule.offset_at(consumed), self.micro_batch_size, self.dp_size)

    def resumed(self, consumed: int, offset: int) -> MicroSteps:
        """The micro-steps of a run that goes on at `consumed`, `offset` samples into a global
        batch.
        """
        return replace(self, schedule=self.schedule.resumed(consumed, offset))

    def check_ahead(self, consumed: int) -> None:
        """Raise StateError where steps of these sizes, from where they were resumed, would cut a
        later phase's first sample off from the end of a step, or read some of what is excluded from
        `consumed` on.
        """
        try:
            self.schedule.check_segments()
            self._check_excluded(consumed)
        except ConfigError as error:
            raise StateError(
                f"steps of these sizes from sample {self.schedule.origin} on do not fit what is "
                f"ahead: {error}; resume with the former global_batch_size, or change what is ahead"
            ) from None

    def from_origin(self, origin: int) -> MicroSteps:
        """The micro-steps of global batches that are counted from sample `origin`."""
        return replace(self, schedule=replace(self.schedule, origin=origin))

    def with_lanes(self, lanes: int | None) -> MicroSteps:
        """The micro-steps of a state in so many lanes, unless the config names its own; None or 0:
        these.
        """
        return replace(self, samples=self.samples.with_lanes(lanes or 0))
