"""Where phases begin that are told by a step or a token: at which sample, by batch sizes and lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from streammega.config import DataConfig, PhaseConfig
from streammega.errors import ConfigError
from streammega.order.batch_size import BatchSchedule, batch_schedule
from streammega.order.sample_lengths import SampleLengths
from streammega.order.step_numbers import StepNumbers


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
        first_sample = _first_sample(phase, before, schedule)
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


def _first_sample(phase: PhaseConfig, before: DataConfig, schedule: BatchSchedule) -> int:
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
