"""The micro-steps of one rank, and the samples that the rank reads in each of them.

MicroSteps is a frozen value without a position. The read plan and the engine receive this value and
not the dataset, so nothing can change the samples of a running iteration.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streammega.config import ORDERS, DataConfig
from streammega.errors import ConfigError, FormatError, StateError
from streammega.errors.logs import get_logger
from streammega.order.schedule import TrainingSchedule
from streammega.order.sharding import check_resume, rank_samples
from streammega.order.state import make_state
from streammega.samples.field_inputs import Batch
from streammega.samples.gather import read_fields
from streammega.samples.source import SampleSource
from streammega.samples.token_file import tokenizer_origin

log = get_logger(__name__)

NO_END = 1 << 62
"""The end of an endless stream: more samples than any run consumes."""


@dataclass(frozen=True, kw_only=True)
class MicroSteps:
    """The micro-steps of one data-parallel rank.

    A micro-step is named by the number of global samples consumed before it, its `consumed`.

    split: "train", "valid" or "test", for messages. samples: the samples of that split, in their
    order. schedule: the sizes of global batches and the samples at which they begin. pads_last: whether
    the last global batch is completed by samples without tokens, and not left out.
    """

    split: str
    samples: SampleSource
    schedule: TrainingSchedule
    micro_batch_size: int
    dp_rank: int
    dp_size: int
    pads_last: bool = False

    @property
    def config(self) -> DataConfig:
        """The config of the samples, which has their length where they are of one segment."""
        return self.samples.config

    def check(self) -> None:
        """Raise ConfigError if excluded samples cut a global batch, or the data has no whole one."""
        self._check_excluded(0)
        available = self.samples.num_samples
        reads_once = self.split != "train" and self.config.num_samples is None
        if self.num_samples == 0:
            more = (
                f"give {self.split} a larger share in split"
                if reads_once
                else "ask for more samples"
            )
            raise ConfigError(
                f"{self.split} holds {available} samples, less than one global batch of "
                f"{self.schedule.global_batch_size}; lower its global_batch_size, or {more}"
            )
        if reads_once and self.num_samples != available and self.dp_rank == 0:
            assert self.num_samples is not None
            assert available is not None
            log.warning(
                "%s: %d of %d samples are not read, for they fill no global batch of %d; "
                "a smaller global_batch_size reads more of them",
                self.split,
                available - self.num_samples,
                available,
                self.schedule.global_batch_size,
            )

    def _check_excluded(self, consumed: int) -> None:
        """Raise ConfigError if samples excluded from `consumed` on cut a global batch."""
        schedule = self.schedule
        # an excluded range has to begin and end where a global batch begins
        for start, stop in self.schedule.excluded_ranges:
            if stop <= consumed:
                continue
            if schedule.offset_at(max(start, consumed)) or schedule.offset_at(stop):
                size = schedule.size_at(start)
                raise ConfigError(
                    f"exclude_samples [{start}, {stop}) cuts a global batch of {size} samples apart; "
                    f"global batches are counted from sample {schedule.origin} on"
                    f"{self._size_change_hint()}"
                )

    def _size_change_hint(self) -> str:
        """How a config sets another batch size from a sample on, as the end of a message."""
        if not ORDERS[self.config.order].has_phases or self.split != "train":
            return ""
        return (
            "; for batches of another size from a checkpoint on, keep the former global_batch_size "
            "and add a phase with the new one that begins at the checkpoint's sample"
        )

    @property
    def step_samples(self) -> int:
        """Samples that one micro-batch on every rank takes from the global stream."""
        return self.micro_batch_size * self.dp_size

    @property
    def num_samples(self) -> int | None:
        """Samples over all ranks, whole global batches only; None: the stream has no end."""
        total = self.samples.num_samples
        if total is None:
            return None
        end = self.schedule.last_whole(total)
        if not self.pads_last:
            return end
        if end < total:
            end += self.schedule.size_at(total)
        return max(end, self.schedule.origin)  # a larger batch may have ended the data before

    @property
    def lanes(self) -> int:
        """Lanes of the stream order; 0 for other orders."""
        return self.samples.lanes

    def tokens_before(self, sample: int) -> int:
        """Tokens of all samples before this one, including excluded samples."""
        return self.schedule.tokens_before(sample)

    def sequence_length_at(self, sample: int) -> int:
        """Tokens of a sample, as its phase sets them."""
        return self.samples.segment_at(sample).config.sequence_length

    def sample_ids(self, consumed: int | NDArray[np.int64]) -> NDArray[np.int64]:
        """Global sample ids of this rank's micro-batch in the micro-step at `consumed`, int64 [...,
        micro_batch_size].
        """
        return rank_samples(
            consumed,
            self.micro_batch_size,
            self.dp_rank,
            self.dp_size,
            contiguous=ORDERS[self.config.order].has_contiguous_ranks,
        )

    def dataset_ids(self, consumed: int | NDArray[np.int64]) -> NDArray[np.int64]:
        """The dataset of each sample of this rank's micro-batch in the micro-step at `consumed`.

        int64 [..., micro_batch_size], numbered as "dataset_id" of batches. It reads no token.
        """
        sample_ids = self.sample_ids(consumed)
        extents = self.samples.locate(sample_ids.reshape(-1))
        return extents.dataset_of_sample.reshape(sample_ids.shape)

    def batch(self, consumed: int) -> Batch:
        """Read this rank's micro-batch in the micro-step at `consumed`, which alone determines it."""
        segment = self.samples.segment_at(consumed)
        with self.naming_datasets(consumed):
            return read_fields(segment, self.sample_ids(consumed), bounds=True)

    @contextmanager
    def naming_datasets(self, consumed: int) -> Iterator[None]:
        """Add the dataset and its tokenizer to the error for ids of the micro-batch at `consumed`
        that are outside of the vocabulary.
        """
        try:
            yield
        except FormatError as error:
            if error.sample is None:
                raise
            # a row may be a part of a sample
            row, rows = error.sample
            sample_ids = self.sample_ids(consumed)
            sample = sample_ids[row * len(sample_ids) // rows]
            number = int(self.samples.locate(sample[None]).dataset_of_sample[0])
            origin = tokenizer_origin(self.samples.prefixes[number], self.config)
            # on Python 3.13 its traceback leads to the frame of contextlib that holds it: a cycle, which
            # would leave the loader to the garbage collector
            error.__traceback__ = None
            raise FormatError(f"{origin}: {error}") from None

    def parts(self, start: int) -> Iterator[range]:
        """The micro-steps from `start` on, as ranges between the excluded samples."""
        num_samples = self.num_samples
        end = NO_END if num_samples is None else num_samples
        for skip_start, skip_stop in sorted(self.schedule.excluded_ranges):
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
        """Group the positions of an iteration from `start` on by segment.

        Yields (micro-steps of the segment, positions in it, first sample to read in it). Read each
        segment to its end before the next, because they share one iterator of positions.
        """
        samples = self.samples
        for number, positions_here in itertools.groupby(positions, samples.segment_number):
            here = samples.of_segment(number)
            begin = max(start, here.segments[0].first_sample)
            yield replace(self, samples=here), positions_here, begin

    def after(self, start: int, num_batches: int) -> int:
        """The position after `num_batches` micro-batches from `start` on.

        Raises StateError if the data ends earlier.
        """
        if num_batches == 0:
            return start
        remaining = num_batches
        for part in self.parts(start):
            if 0 < remaining <= len(part):
                return part[remaining - 1] + self.step_samples
            remaining -= len(part)
        raise StateError(
            f"there are no {num_batches} micro-batches from sample {start} on; "
            "count only the micro-batches of one iteration"
        )

    def num_micro_batches(self, consumed: int) -> int:
        """Micro-batches of each rank in the global batch that holds sample `consumed`."""
        return self.schedule.micro_batches_at(consumed, self.micro_batch_size, self.dp_size)

    def is_step_end(self, consumed: int) -> bool:
        """Whether a global batch ends before sample `consumed`."""
        return self.schedule.offset_at(consumed) == 0

    def state(self, consumed: int) -> dict[str, Any]:
        """The state of a run that has handed out all samples before `consumed`."""
        return make_state(
            self.samples.identity(consumed),
            consumed,
            self.schedule.offset_at(consumed),
            global_batch_size=self.schedule.global_batch_size,
        )

    def check_position(self, consumed: int) -> None:
        """Raise StateError unless these ranks can continue at `consumed`."""
        num_samples = self.num_samples
        end = NO_END if num_samples is None else num_samples
        if not 0 <= consumed <= end:
            some = "endless" if num_samples is None else num_samples
            raise StateError(f"sample {consumed} is not within the {some} samples of {self.split}")
        check_resume(self.schedule.offset_at(consumed), self.micro_batch_size, self.dp_size)

    def check_ahead(self, consumed: int) -> None:
        """Raise StateError if the resumed steps do not fit the data after `consumed`.

        A later phase has to begin where a step ends, and excluded samples must not cut a step.
        """
        try:
            self.schedule.check_segments()
            self._check_excluded(consumed)
        except ConfigError as error:
            raise StateError(
                f"steps of these sizes from sample {self.schedule.origin} on do not fit the phases "
                f"and exclude_samples ahead: {error}; resume with the former global_batch_size, or "
                f"change those phases and exclude_samples"
            ) from None

    def from_origin(self, origin: int) -> MicroSteps:
        """The micro-steps of global batches that are counted from sample `origin`."""
        return replace(self, schedule=replace(self.schedule, origin=origin))

    def with_lanes(self, lanes: int | None) -> MicroSteps:
        """These micro-steps with the number of lanes of a state, unless the config sets the lanes.

        None or 0 changes nothing.
        """
        return replace(self, samples=self.samples.with_lanes(lanes or 0))
