"""Global-batch ramp-up: the batch size as a pure function of the samples consumed."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import cached_property

from streammega.errors import ConfigError
from streammega.order.rank_samples import check_batch_sizes


@dataclass(frozen=True, kw_only=True)
class BatchSchedule:
    """The global batch size of every step: constant, or rising from `start` by `increment` over
    `samples` samples.

    Equal shares of samples are spent at each size before the last, counted from sample 0; a step
    ends with the size it began with. Steps follow each other from `origin`, the start of some step:
    0, or where a run resumed with another batch size.
    """

    final: int
    start: int | None = None
    increment: int = 0
    samples: int = 0
    origin: int = 0

    def __post_init__(self) -> None:
        if self.start is None:
            return
        if self.start < 1 or self.increment < 1 or self.samples < 1 or self.start > self.final:
            raise ConfigError(
                f"ramp-up ({self.start}, {self.increment}, {self.samples}) needs positive numbers, start <= {self.final}"
            )
        if (self.final - self.start) % self.increment:
            raise ConfigError(
                f"ramp-up from {self.start} to {self.final} is not a whole number of increments of {self.increment}; change one"
            )

    @cached_property
    def stages(self) -> list[tuple[int, int]]:
        """(first sample, global batch size) of every stage from `origin` on, in order."""
        if self.start is None or self.start == self.final:
            return [(self.origin, self.final)]
        count = (self.final - self.start) // self.increment
        found = []
        at = self.origin
        for number in range(count):
            size = self.start + number * self.increment
            end = self.samples * (number + 1) / count
            if at < end:
                found.append((at, size))
                # the first step that starts at or past the stage's end
                at += -int((at - end) // size) * size
        return [*found, (at, self.final)]

    def size_at(self, consumed: int) -> int:
        """The global batch size of the step that holds sample `consumed`."""
        return self._stage(consumed)[1]

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

    def samples_after(self, steps: int) -> int:
        """Samples of the first so many steps of a run that began at sample 0."""
        stages = replace(self, origin=0).stages
        for number, (first, size) in enumerate(stages):
            own = (stages[number + 1][0] - first) // size if number + 1 < len(stages) else steps
            if steps <= own:
                return first + steps * size
            steps -= own
        raise AssertionError("the last stage has no end")

    def check(self, micro_batch_size: int, dp_rank: int, dp_size: int) -> None:
        """Raise ConfigError unless micro_batch_size * dp_size divides every stage's size."""
        for _, size in replace(self, origin=0).stages:
            check_batch_sizes(size, micro_batch_size, dp_rank, dp_size)

    def resumed(self, consumed: int, offset: int) -> BatchSchedule:
        """The schedule of a run that resumes at `consumed`, `offset` samples into a
        global batch.
        """
        return replace(self, origin=consumed - offset)

    def _stage(self, consumed: int) -> tuple[int, int]:
        """The stage of a sample; before `origin` the steps are taken to be those of a run that
        began at 0.
        """
        if consumed < self.origin:
            return replace(
                self, origin=self.origin % self.final if self.start is None else 0
            )._stage_from(consumed)
        return self._stage_from(consumed)

    def _stage_from(self, consumed: int) -> tuple[int, int]:
        return self.stages[
            max(0, bisect_right(self.stages, consumed, key=lambda stage: stage[0]) - 1)
        ]


def batch_schedule(global_batch_size: int, rampup: tuple[int, int, int] | None) -> BatchSchedule:
    """The schedule of a global batch size, which (start, increment, samples) of a ramp-up begins
    smaller.
    """
    if rampup is None:
        return BatchSchedule(final=global_batch_size)
    if len(rampup) != 3:
        raise ConfigError(
            f"rampup is {rampup}; it takes three numbers: (first size, increment, samples)"
        )
    start, increment, samples = rampup
    return BatchSchedule(final=global_batch_size, start=start, increment=increment, samples=samples)
