"""How samples, steps and tokens of a run correspond: the batch size of every step with its ramp-up,
the steps that read no sample, the lengths of samples, and where phases begin.

All of it is pure arithmetic on the samples consumed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from streammega.config import DataConfig, PhaseConfig
from streammega.errors import ConfigError
from streammega.order.sharding import check_batch_sizes


@dataclass(frozen=True, kw_only=True)
class BatchSchedule:
    """The global batch size of every step: constant, or rising from `start` by `increment` over
    `samples` samples; and other ones from the samples of `changes` on.

    Equal shares of samples are spent at each size before the last, counted from sample 0; a step
    ends with the size it began with. Steps follow each other from `origin`, the start of some step:
    0, or where a run resumed with another batch size.

    changes: (first sample, size) of each later phase, in order; size None: it goes on as before.
    """

    final: int
    start: int | None = None
    increment: int = 0
    samples: int = 0
    origin: int = 0
    changes: Sequence[tuple[int, int | None]] = ()

    def __post_init__(self) -> None:
        if self.start is None:
            return
        if self.start < 1 or self.increment < 1 or self.samples < 1 or self.start > self.final:
            raise ConfigError(
                f"ramp-up ({self.start}, {self.increment}, {self.samples}) needs positive numbers, "
                f"start <= {self.final}"
            )
        if (self.final - self.start) % self.increment:
            raise ConfigError(
                f"ramp-up from {self.start} to {self.final} is not a whole number of increments of "
                f"{self.increment}; change one"
            )

    @cached_property
    def stages(self) -> list[tuple[int, int]]:
        """(first sample, global batch size) of every stage from `origin` on, in order."""
        stages = self._stages_of_first_phase()
        for first_sample, size in self.changes:
            if size is None:
                continue
            begins = max(first_sample, self.origin)
            stages = [stage for stage in stages if _first_sample(stage) < begins]
            stages.append((begins, size))
        return stages

    def _stages_of_first_phase(self) -> list[tuple[int, int]]:
        """The stages of a run whose first phase has no end."""
        if self.start is None or self.start == self.final:
            return [(self.origin, self.final)]
        count = (self.final - self.start) // self.increment
        stages = []
        first_sample = self.origin
        for number in range(count):
            size = self.start + number * self.increment
            end = self.samples * (number + 1) / count
            if first_sample < end:
                stages.append((first_sample, size))
                # The next stage begins with the first step that starts at or past this one's end.
                steps = -int((first_sample - end) // size)
                first_sample += steps * size
        stages.append((first_sample, self.final))
        return stages

    def size_at(self, consumed: int) -> int:
        """The global batch size of the step that holds sample `consumed`."""
        _, size = self._stage(consumed)
        return size

    def offset_at(self, consumed: int) -> int:
        """How many samples of its global batch come before sample `consumed`."""
        first, size = self._stage(consumed)
        return (consumed - first) % size

    def end_of_step(self, sample: int) -> int:
        """The first end of a step at or after a sample; 0 of sample 0."""
        offset = self.offset_at(sample)
        return sample - offset + self.size_at(sample) if offset else sample

    def micro_batches_at(self, consumed: int, micro_batch_size: int, dp_size: int) -> int:
        """Micro-batches of each rank in the step that holds sample `consumed`."""
        return self.size_at(consumed) // (micro_batch_size * dp_size)

    def last_whole(self, num_samples: int) -> int:
        """The end of the last whole global batch within the first `num_samples` samples."""
        return num_samples - self.offset_at(num_samples)

    def samples_after(self, steps: int) -> int:
        """Samples of the first so many steps of a run that began at sample 0."""
        stages = self._from_zero.stages
        for (first, size), (end, _) in zip(stages, stages[1:], strict=False):
            steps_of_stage = (end - first) // size
            if steps <= steps_of_stage:
                return first + steps * size
            steps -= steps_of_stage
        first, size = stages[-1]  # which has no end
        return first + steps * size

    def check(self, micro_batch_size: int, dp_rank: int, dp_size: int) -> None:
        """Raise ConfigError unless micro_batch_size * dp_size divides every stage's size, and
        every change is at the end of a step.
        """
        for _, size in self._from_zero.stages:
            check_batch_sizes(size, micro_batch_size, dp_rank, dp_size)
        self._from_zero.check_changes()

    def check_changes(self) -> None:
        """Raise ConfigError for a change after `origin` that is not at the end of a step."""
        for number, (first_sample, _) in enumerate(self.changes, 1):
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

    def resumed(self, consumed: int, offset: int) -> BatchSchedule:
        """The schedule of a run that resumes at `consumed`, `offset` samples into a
        global batch.
        """
        return replace(self, origin=consumed - offset)

    @property
    def _from_zero(self) -> BatchSchedule:
        """The schedule of a run that began at sample 0."""
        return replace(self, origin=0)

    def _stage(self, consumed: int) -> tuple[int, int]:
        """The stage of a sample; before `origin` the steps are taken to be those of a run that
        began at 0.
        """
        if consumed >= self.origin:
            return self._stage_from(consumed)
        if self.start is not None or any(size for _, size in self.changes):
            return self._from_zero._stage_from(consumed)
        # Of one size, the steps before `origin` are those that lead up to it.
        aligned = replace(self, origin=self.origin % self.final)
        return aligned._stage_from(consumed)

    def _stage_from(self, consumed: int) -> tuple[int, int]:
        later = bisect_right(self.stages, consumed, key=_first_sample)
        return self.stages[max(0, later - 1)]


def _first_sample(stage: tuple[int, int]) -> int:
    first, _ = stage
    return first


def batch_schedule(
    global_batch_size: int,
    rampup: tuple[int, int, int] | None,
    changes: Sequence[tuple[int, int | None]] = (),
) -> BatchSchedule:
    """The schedule of a global batch size, which (start, increment, samples) of a ramp-up begins
    smaller, and `changes` end.
    """
    if rampup is None:
        return BatchSchedule(final=global_batch_size, changes=changes)
    if len(rampup) != 3:
        raise ConfigError(
            f"rampup is {rampup}; it takes three numbers: (first size, increment, samples)"
        )
    start, increment, samples = rampup
    return BatchSchedule(
        final=global_batch_size,
        start=start,
        increment=increment,
        samples=samples,
        changes=changes,
    )


@dataclass(frozen=True, kw_only=True)
class StepNumbers:
    """The steps of a run from sample 0 on, counted from 1 as metrics count them: a global batch
    each, of whatever size the schedule has there.

    skips: [start, stop) ranges of samples that no step takes; whole global batches.
    """

    schedule: BatchSchedule
    skips: Sequence[tuple[int, int]] = ()

    def samples(self, step: int) -> range:
        """The samples of a step. Raises ConfigError for one below 1."""
        if step < 1:
            raise ConfigError(f"step is {step}; steps are counted from 1, as in metrics.jsonl")
        # How many global batches there would be before it, were none skipped.
        before = step - 1
        for start, stop in self.skipped:
            first = self._batches_before(start)
            if first > before:
                break
            before += self._batches_before(stop) - first
        start = self.schedule.samples_after(before)
        return range(start, start + self.schedule.size_at(start))

    def step_of(self, sample: int) -> int | None:
        """The step that takes a sample; None where it is skipped."""
        batches = self._batches_before(sample - self.schedule.offset_at(sample))
        for start, stop in self.skipped:
            if start <= sample < stop:
                return None
            if stop <= sample:
                batches -= self._batches_before(stop) - self._batches_before(start)
        return batches + 1

    def steps_between(self, start: int, stop: int) -> tuple[int, int] | None:
        """The first and the last step that take any of the samples [start, stop), which begin and
        end with a global batch; None: all of them are skipped.
        """
        for skip_start, skip_stop in self.skipped:
            if skip_start <= start:
                start = max(start, skip_stop)
        for skip_start, skip_stop in reversed(self.skipped):
            if stop <= skip_stop:
                stop = min(stop, skip_start)
        first = self.step_of(start)
        last = self.step_of(stop - 1)
        if start >= stop or first is None or last is None:
            return None
        return first, last

    @property
    def skipped(self) -> list[tuple[int, int]]:
        """The ranges in their order, none of which overlaps another."""
        apart: list[tuple[int, int]] = []
        for start, stop in sorted(self.skips):
            former = apart[-1][1] if apart else 0
            if stop > former:
                apart.append((max(start, former), stop))
        return apart

    def _batches_before(self, sample: int) -> int:
        """Whole global batches before the one that begins with a sample."""
        batches = 0
        stages = self.schedule.stages
        for number, (first, size) in enumerate(stages):
            is_last = number == len(stages) - 1
            end = sample if is_last else min(sample, stages[number + 1][0])
            if end > first:
                batches += (end - first) // size
        return batches


def rank_of(
    sample: int, batch_start: int, micro_batch_size: int, dp_size: int, *, contiguous: bool
) -> int:
    """The data-parallel rank that reads a sample of the global batch from `batch_start` on: the
    inverse of `rank_samples`.
    """
    if not contiguous:
        return sample % dp_size
    within_micro_step = (sample - batch_start) % (micro_batch_size * dp_size)
    return within_micro_step // micro_batch_size


@dataclass(frozen=True, kw_only=True)
class SampleLengths:
    """starts: (first sample, tokens of each sample from there on), in order, the first at 0."""

    starts: Sequence[tuple[int, int]]

    def tokens_before(self, sample: int) -> int:
        """Tokens of all samples before one."""
        tokens = 0
        for (first, length), (end, _) in pairwise([*self.starts, (sample, 0)]):
            tokens += max(0, min(end, sample) - first) * length
        return tokens

    def sample_at(self, token: int) -> int:
        """The sample that has a token, counted over all samples from 0 on."""
        first, length = self.starts[0]
        before = 0
        for next_first, next_length in self.starts[1:]:
            before_next = self.tokens_before(next_first)
            if before_next > token:
                break
            first, length, before = next_first, next_length, before_next
        return first + (token - before) // length


def in_samples(
    config: DataConfig, global_batch_size: int, rampup: tuple[int, int, int] | None = None
) -> DataConfig:
    """The config with every phase told by its `first_sample`.

    global_batch_size, rampup: of the first phase, from sample 0 on, as in StreamingDataset. Raises
    ConfigError for a token within a step, with those at which it begins and ends.
    """
    if all(phase.is_in_samples for phase in config.phases):
        return config
    if global_batch_size < 1:
        raise ConfigError(f"global_batch_size is {global_batch_size}; it must be at least 1")
    phases: list[PhaseConfig] = []
    for phase in config.phases:
        before = replace(config, phases=tuple(phases))
        schedule = batch_schedule(global_batch_size, rampup, before.batch_changes("train"))
        first_sample = _start_of(phase, before, schedule)
        # the others are left out: of a config that is changed later they would be told twice
        phases.append(replace(phase, first_sample=first_sample, first_step=None, first_token=None))
    return replace(config, phases=tuple(phases))


def check_in_samples(phases: Sequence[PhaseConfig]) -> None:
    """Raise ConfigError for a phase that is told by a step or token, where no batch sizes are
    known.
    """
    for number, phase in enumerate(phases, 1):
        if not phase.is_in_samples:
            raise ConfigError(
                f"phase {number} is told by its first step or token, and which sample that is only "
                "batch sizes tell: take the config of a dataset that has them, "
                "StreamingDataset(config, ...).config, or give it first_sample"
            )


def _start_of(phase: PhaseConfig, before: DataConfig, schedule: BatchSchedule) -> int:
    """The first sample of a phase. before: the config with the phases before it alone."""
    if phase.first_step is not None:
        steps = StepNumbers(schedule=schedule, skips=before.skip_samples)
        return steps.samples(phase.first_step).start
    if phase.first_token is None:
        return phase.first_sample
    lengths = SampleLengths(starts=before.length_starts("train"))
    sample = lengths.sample_at(phase.first_token)
    step_begin = sample - schedule.offset_at(sample)
    step_end = step_begin + schedule.size_at(sample)
    if lengths.tokens_before(step_begin) != phase.first_token:
        raise ConfigError(
            f"phase {len(before.phases) + 1} begins at token {phase.first_token}, within the step of "
            f"samples [{step_begin}, {step_end}); it may begin at token "
            f"{lengths.tokens_before(step_begin)} or at {lengths.tokens_before(step_end)}"
        )
    return step_begin
