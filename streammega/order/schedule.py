"""How samples, steps and tokens of a run correspond: the batch size of every step with its ramp-up,
the samples that no step takes, the lengths of samples, and where phases begin.

All of it is pure arithmetic on the samples consumed.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from streammega.config import DataConfig, PhaseConfig, Segment
from streammega.config.validate import plain, whole_number
from streammega.errors import ConfigError
from streammega.errors.cached_property import cached_property
from streammega.order.sharding import check_batch_sizes


class Stage(NamedTuple):
    """From a sample on, until the next stage begins, global batches have one size."""

    first_sample: int
    global_batch_size: int


@dataclass(frozen=True, kw_only=True)
class TrainingSchedule:
    """The samples, steps and tokens of a run. Steps are counted from 1, as in metrics.jsonl.

    global_batch_size: of the first segment. rampup_batch_size: (start, increment, samples): it
    rises from `start` by `increment` over so many samples, as in Megatron: equal shares of them are
    spent at each size before the last, counted from sample 0, and a step ends with the size it
    began with.
    segments: those of the split, which may change sizes and lengths. excluded_ranges: [start, stop)
    ranges of samples that no step takes; whole global batches. origin: the start of some step, from
    which steps follow each other: 0, or where a run resumed with another batch size.
    """

    global_batch_size: int
    rampup_batch_size: tuple[int, int, int] | None = None
    segments: Sequence[Segment] = ()
    excluded_ranges: Sequence[tuple[int, int]] = ()
    origin: int = 0

    def __post_init__(self) -> None:
        size = whole_number("global_batch_size", self.global_batch_size, 1)
        object.__setattr__(self, "global_batch_size", size)
        if self.rampup_batch_size is None:
            return
        rampup = plain(self.rampup_batch_size)
        if not isinstance(rampup, tuple | list) or len(rampup) != 3:
            raise ConfigError(
                f"rampup_batch_size is {rampup}; it takes three numbers: (first size, increment, samples)"
            )
        start, increment, samples = (whole_number("rampup_batch_size", size) for size in rampup)
        object.__setattr__(self, "rampup_batch_size", (start, increment, samples))
        final = self.global_batch_size
        if start < 1 or increment < 1 or samples < 1 or start > final:
            raise ConfigError(
                f"rampup_batch_size is ({start}, {increment}, {samples}); it takes three positive numbers, "
                f"and the first is at most global_batch_size, {final}"
            )
        if (final - start) % increment:
            raise ConfigError(
                f"rampup_batch_size rises from {start} to {final}, which is not a whole number of increments of "
                f"{increment}; change one of the three"
            )

    # Samples and global batches.

    @cached_property
    def stages(self) -> list[Stage]:
        """Every stage from `origin` on, in order."""
        stages: list[Stage] = []
        first_sample = self.origin
        if self.rampup_batch_size is not None:
            start, increment, samples = self.rampup_batch_size
            count = (self.global_batch_size - start) // increment
            for number in range(count):
                size = start + number * increment
                end = _end_of_increment(number + 1, count, samples)
                if first_sample < end:
                    stages.append(Stage(first_sample, size))
                    # The next stage begins with the first step that starts at or past this one's end.
                    steps = -((first_sample - end) // size)
                    first_sample += steps * size
        stages.append(Stage(first_sample, self.global_batch_size))
        for segment in self.segments[1:]:
            if segment.global_batch_size is None:
                continue
            begins = max(segment.first_sample, self.origin)
            stages = [stage for stage in stages if stage.first_sample < begins]
            stages.append(Stage(begins, segment.global_batch_size))
        return stages

    def size_at(self, consumed: int) -> int:
        """The global batch size of the step that holds sample `consumed`."""
        return self._stage(consumed).global_batch_size

    def offset_at(self, consumed: int) -> int:
        """How many samples of its global batch come before sample `consumed`."""
        first, size = self._stage(consumed)
        return (consumed - first) % size

    def micro_batches_at(self, consumed: int, micro_batch_size: int, dp_size: int) -> int:
        """Micro-batches of each rank in the step that holds sample `consumed`."""
        return self.size_at(consumed) // (micro_batch_size * dp_size)

    def last_whole(self, num_samples: int) -> int:
        """The end of the last whole global batch within the first `num_samples` samples."""
        return num_samples - self.offset_at(num_samples)

    def check(self, micro_batch_size: int, dp_rank: int, dp_size: int) -> None:
        """Raise ConfigError unless micro_batch_size * dp_size divides every stage's size, and
        every segment begins at the end of a step.
        """
        for _, size in self._from_zero.stages:
            check_batch_sizes(size, micro_batch_size, dp_rank, dp_size)
        self._from_zero.check_segments()

    def check_segments(self) -> None:
        """Raise ConfigError for a segment after `origin` that does not begin at the end of a step."""
        for number, segment in enumerate(self.segments[1:], 1):
            first_sample = segment.first_sample
            if first_sample <= self.origin:
                continue
            first, size = self._stage_from(first_sample - 1)
            before = (first_sample - first) % size
            if before:
                raise ConfigError(
                    f"phase {number} begins at sample {first_sample}, {before} samples into a "
                    f"global batch of {size}; it may begin at {first_sample - before} or at "
                    f"{first_sample - before + size}"
                )

    @cached_property
    def _from_zero(self) -> TrainingSchedule:
        """The schedule of a run that began at sample 0."""
        return replace(self, origin=0) if self.origin else self

    def _stage(self, consumed: int) -> Stage:
        """The stage of a sample; before `origin` the steps are taken to be those of a run that
        began at 0.
        """
        if consumed >= self.origin:
            return self._stage_from(consumed)
        changes_size = any(segment.global_batch_size for segment in self.segments[1:])
        if self.rampup_batch_size is not None or changes_size:
            return self._from_zero._stage_from(consumed)
        # Of one size, the steps before `origin` are those that lead up to it.
        aligned = replace(self, origin=self.origin % self.global_batch_size)
        return aligned._stage_from(consumed)

    def _stage_from(self, consumed: int) -> Stage:
        later = bisect_right(self.stages, consumed, key=lambda stage: stage.first_sample)
        return self.stages[max(0, later - 1)]

    # Steps, of a run from sample 0 on.

    def samples_after(self, steps: int) -> int:
        """Samples of the first so many global batches, those that are excluded too."""
        stages = self._from_zero.stages
        for (first, size), (end, _) in pairwise(stages):
            steps_of_stage = (end - first) // size
            if steps <= steps_of_stage:
                return first + steps * size
            steps -= steps_of_stage
        first, size = stages[-1]  # which has no end
        return first + steps * size

    def samples_of_step(self, step: int) -> range:
        """The samples of a step. Raises ConfigError for one below 1."""
        if step < 1:
            raise ConfigError(f"step is {step}; steps are counted from 1, as in metrics.jsonl")
        # How many global batches there would be before it, were none excluded.
        before = step - 1
        for start, stop in self.excluded:
            first = self._batches_before(start)
            if first > before:
                break
            before += self._batches_before(stop) - first
        start = self.samples_after(before)
        return range(start, start + self._from_zero.size_at(start))

    def step_of(self, sample: int) -> int | None:
        """The step that takes a sample; None where it is excluded."""
        batches = self._batches_before(sample - self._from_zero.offset_at(sample))
        for start, stop in self.excluded:
            if start <= sample < stop:
                return None
            if stop <= sample:
                batches -= self._batches_before(stop) - self._batches_before(start)
        return batches + 1

    def steps_between(self, start: int, stop: int) -> tuple[int, int] | None:
        """The first and the last step that take any of the samples [start, stop), which begin and
        end with a global batch; None: all of them are excluded.
        """
        for skip_start, skip_stop in self.excluded:
            if skip_start <= start:
                start = max(start, skip_stop)
        for skip_start, skip_stop in reversed(self.excluded):
            if stop <= skip_stop:
                stop = min(stop, skip_start)
        first = self.step_of(start)
        last = self.step_of(stop - 1)
        if start >= stop or first is None or last is None:
            return None
        return first, last

    @cached_property
    def excluded(self) -> list[tuple[int, int]]:
        """The excluded ranges in order, without overlaps."""
        apart: list[tuple[int, int]] = []
        for start, stop in sorted(self.excluded_ranges):
            end_before = apart[-1][1] if apart else 0
            if stop > end_before:
                apart.append((max(start, end_before), stop))
        return apart

    def _batches_before(self, sample: int) -> int:
        """Whole global batches before the one that begins with a sample."""
        batches = 0
        for (first, size), (end, _) in pairwise([*self._from_zero.stages, (sample, 0)]):
            batches += max(0, min(end, sample) - first) // size
        return batches

    # Tokens of samples, of those that are excluded too.

    def tokens_before(self, sample: int) -> int:
        """Tokens of all samples before one."""
        ends = [segment.first_sample for segment in self.segments[1:]] + [sample]
        tokens = 0
        for segment, end in zip(self.segments, ends, strict=True):
            tokens += max(0, min(end, sample) - segment.first_sample) * segment.sequence_length
        return tokens


def _end_of_increment(number: int, count: int, samples: int) -> int:
    """The first sample by which Megatron's calculator counts `number` of `count` increments over so
    many samples.

    It divides floats. Their quotient may fall below `number` at samples * number / count, and then
    a step that begins there has the size before. Past `samples` its size is the last.
    """
    share = samples / count
    exact = samples * number // count
    slack = 2 + (samples >> 50)  # more than two roundings to 53 bits are off
    near = range(max(0, exact - slack), min(exact + slack, samples) + 1)
    return near[0] + bisect_left(near, number, key=lambda sample: int(sample / share))


def training_schedule(
    config: DataConfig,
    split: str,
    global_batch_size: int,
    rampup_batch_size: tuple[int, int, int] | None = None,
) -> TrainingSchedule:
    """The schedule of a split. global_batch_size, rampup_batch_size: of its first segment."""
    return TrainingSchedule(
        global_batch_size=global_batch_size,
        rampup_batch_size=rampup_batch_size,
        segments=config.segments(split),
        excluded_ranges=config.exclude_samples if split == "train" else (),
    )


def resolve_phase_starts(
    config: DataConfig,
    global_batch_size: int,
    rampup_batch_size: tuple[int, int, int] | None = None,
) -> DataConfig:
    """The config in which every phase has its `first_sample`.

    global_batch_size, rampup_batch_size: of the first phase, from sample 0 on, as in
    StreamingDataset.
    """
    for number, phase in enumerate(config.phases):
        if phase.first_step is not None:
            before = replace(config, phases=config.phases[:number])
            schedule = training_schedule(before, "train", global_batch_size, rampup_batch_size)
            first_sample = schedule.samples_of_step(phase.first_step).start
            # without the step, which would repeat it if the config is changed later
            phase = replace(phase, first_sample=first_sample, first_step=None)
            phases = (*config.phases[:number], phase, *config.phases[number + 1 :])
            config = replace(config, phases=phases)
    return config


def check_in_samples(phases: Sequence[PhaseConfig]) -> None:
    """Raise ConfigError for a phase that begins at a step: batch sizes are not known here."""
    for number, phase in enumerate(phases, 1):
        if not phase.is_in_samples:
            raise ConfigError(
                f"phase {number} begins at a first_step, and only batch sizes say which sample "
                "that is: take the config of a dataset that has them, "
                "StreamingDataset(config, ...).config, or give the phase first_sample"
            )
