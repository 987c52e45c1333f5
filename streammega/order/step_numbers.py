"""Which samples a step of a run takes, and which step takes a sample: by arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from streammega.errors import ConfigError
from streammega.order.batch_size import BatchSchedule


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
