"""What changes in the middle of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from streammega.config.blends import Blend, parse_blend
from streammega.config.setting_checks import set_whole_numbers
from streammega.config.skips import SkippedNames, skipped_names
from streammega.errors import ConfigError
from streammega.errors.redaction import redacted_repr


@dataclass(frozen=True, kw_only=True)
class PhaseConfig:
    """What holds from a sample of the stream on; what is not given stays as in the phase before."""

    first_sample: int = 0
    """The global sample it begins at: the end of a step of the phase before. Or first_step or
    first_token says it.
    """
    first_step: int | None = None
    """Its first step, counted from 1 as in metrics.jsonl: over the batch sizes of the config from
    sample 0 on, its ramp-up and its skips.
    """
    first_token: int | None = None
    """How many tokens the samples before it have, skipped ones too; a step must end there."""
    blend: Blend | None = None
    """Datasets and weights of training, in any form of `blend`. One that stays goes on where it
    was, and so does one that comes back; one that is new begins its first epoch.
    """
    global_batch_size: int | None = None
    """Samples of one optimizer step over all ranks."""
    sequence_length: int | None = None
    """Tokens of a sample. What epochs in progress have left is cut anew, so that nothing is lost."""
    lanes: int | None = None
    """Lanes, a multiple of the global batch. As of `sequence_length`."""
    restart: Sequence[str] = ()
    """Prefixes of the blend that begin a new epoch here. What is left of the one before is passed
    over.
    """
    skip_documents: SkippedNames = ()
    """Documents that are not seen from this phase on, beside those of the phases before it: as
    `skip_documents` of the run.
    """

    def __repr__(self) -> str:
        return redacted_repr(self)

    def __post_init__(self) -> None:
        sizes = ("global_batch_size", "sequence_length", "lanes")
        set_whole_numbers(self, ("first_sample", "first_step", "first_token", *sizes))
        self._check_start()
        for name in sizes:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} of a phase is {value}; it must be at least 1")
        if self.blend is not None:
            parse_blend(self.blend)
        if isinstance(self.restart, str):
            raise ConfigError(f"restart is {self.restart!r}; it must be a list of prefixes")
        skipped_names(self.skip_documents, self.first_sample)

    @property
    def is_in_samples(self) -> bool:
        """Whether it is told by its first sample, rather than by a step or token."""
        return self.first_step is None and self.first_token is None

    def _check_start(self) -> None:
        starts = {"first_step": (self.first_step, 2), "first_token": (self.first_token, 1)}
        # 0 stands for one that is left out, where another says it
        if self.first_sample or self.is_in_samples:
            starts["first_sample"] = (self.first_sample, 1)
        told = {name: start for name, start in starts.items() if start[0] is not None}
        if len(told) > 1:
            raise ConfigError(f"a phase says {' and '.join(told)}; it begins at one of them")
        for name, (value, least) in told.items():
            if value is not None and value < least:
                raise ConfigError(
                    f"{name} of a phase is {value}; it must be at least {least} (a phase begins at a "
                    "first_sample, a first_step or a first_token)"
                )


def check_phases(
    phases: Sequence[PhaseConfig],
    order: str,
    schedule: Sequence[tuple[int, Sequence[float]]] | None,
) -> None:
    """Raise ConfigError for phases that do not follow each other, or do not go with the order and
    the blend_schedule.
    """
    if order == "sequential":
        raise ConfigError(
            'phases belong to the stream order, and to that of Megatron: set order="stream"'
        )
    first_before = 0
    for number, phase in enumerate(phases, 1):
        if not isinstance(phase, PhaseConfig):
            raise ConfigError(
                f"phase {number} is {phase!r}; it must be a PhaseConfig, such as "
                "PhaseConfig(first_sample=1_000_000, blend=['s3://bucket/code'])"
            )
        if phase.is_in_samples and phase.first_sample <= first_before:
            raise ConfigError(
                f"phase {number} begins at sample {phase.first_sample}, and the one before it "
                f"at {first_before}; phases stand in the order of their first samples"
            )
        if order == "megatron":
            _check_megatron_phase(number, phase)
        first_before = max(first_before, phase.first_sample)
    _check_segments_before(phases[0].first_sample, schedule)


def _check_segments_before(
    first_of_phases: int, schedule: Sequence[tuple[int, Sequence[float]]] | None
) -> None:
    for start, _ in schedule or ():
        # 0 where that is told by a step or a token: then it is compared when that is known
        if start >= first_of_phases > 0:
            raise ConfigError(
                f"blend_schedule has a segment from sample {start} on, where the phase from "
                f"{first_of_phases} on holds; give its weights to a phase"
            )


def _check_megatron_phase(number: int, phase: PhaseConfig) -> None:
    """Raise ConfigError for what Megatron's phase transitions do not change."""
    if phase.global_batch_size is not None:
        raise ConfigError(
            f"phase {number} sets global_batch_size, which is the same in all phases of the Megatron "
            'order, as with --phase-transition-iterations; leave it out, or set order="stream"'
        )
    if phase.lanes is not None or phase.restart:
        name = "lanes" if phase.lanes is not None else "restart"
        raise ConfigError(
            f"phase {number} sets {name}, which is of the stream order; in that of Megatron every "
            "phase begins its datasets anew: leave it out"
        )
