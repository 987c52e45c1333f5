"""Global-batch ramp-up: the batch size as a pure function of the samples consumed."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from streammega.errors import ConfigError
from streammega.order.rank_samples import check_batch_sizes


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
