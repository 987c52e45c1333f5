"""Changes in the middle of a run: phases, and samples and documents to exclude."""

from __future__ import annotations

import operator
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

from streammega.config.blends import Blend, parse_blend
from streammega.config.orders import ORDERS, Order
from streammega.config.validate import Ge, check_fields, refuse_unknown
from streammega.errors import ConfigError
from streammega.errors.redaction import redacted_repr

ExcludedNames = str | Sequence[str] | Mapping[str, str | Sequence[str]]
"""Names of documents: a file of them, one a line; a list; or either for each of some datasets."""


class ExcludedList(NamedTuple):
    """Names of documents that are not seen in samples `first_sample` and later.

    names: the names, or the path of a file of them. dataset: the prefix whose documents they are;
    None: those of any.
    """

    first_sample: int
    names: str | tuple[str, ...]
    dataset: str | None = None


def excluded_lists(excluded: Any) -> list[ExcludedList]:
    """The lists in exclude_documents of a run. Raises ConfigError for other forms."""
    if isinstance(excluded, Sequence) and excluded and not isinstance(excluded[0], str):
        lists: list[ExcludedList] = []
        for entry in excluded:
            is_pair = isinstance(entry, Sequence) and len(entry) == 2
            if not is_pair or type(entry[0]) is not int or entry[0] < 0:
                raise ConfigError(
                    f"exclude_documents holds {entry!r}; it takes names of documents, or several lists "
                    "of them, each as (first sample, names)"
                )
            first_sample, names = entry
            lists += excluded_names(names, first_sample)
        return lists
    return excluded_names(excluded, 0)


def excluded_names(excluded: Any, first_sample: int) -> list[ExcludedList]:
    """One list of names, or one for each dataset. Raises ConfigError for other forms."""
    by_dataset = excluded if isinstance(excluded, Mapping) else {None: excluded}
    lists = []
    for dataset, names in by_dataset.items():
        if isinstance(names, os.PathLike):
            names = os.fspath(names)
        if isinstance(dataset, os.PathLike):
            dataset = os.fspath(dataset)
        are_names = isinstance(names, Sequence) and all(isinstance(name, str) for name in names)
        if not are_names or not isinstance(dataset, str | None):
            raise ConfigError(
                f"exclude_documents is {excluded!r}; it takes the path of a file of names, a list of "
                "names, or either for each dataset, as {prefix: names}"
            )
        if len(names):
            names = names if isinstance(names, str) else tuple(names)
            lists.append(ExcludedList(first_sample=first_sample, names=names, dataset=dataset))
    return lists


def excluded_ranges(excluded: Any) -> tuple[tuple[int, int], ...]:
    """The ranges [start, stop) of exclude_samples. Raises ConfigError for other forms."""
    try:
        ranges = tuple((operator.index(start), operator.index(stop)) for start, stop in excluded)
    except (TypeError, ValueError):
        raise ConfigError(
            f"exclude_samples is {excluded!r}; it takes ranges of sample ids, each as (start, stop)"
        ) from None
    for start, stop in ranges:
        if not 0 <= start < stop:
            raise ConfigError(
                f"exclude_samples holds [{start}, {stop}); ranges run upwards from 0 or more"
            )
    return ranges


@refuse_unknown
@dataclass(frozen=True, kw_only=True)
class PhaseConfig:
    """What holds from a sample of the stream on; what is not given stays as in the phase before."""

    first_sample: int = 0
    """The global sample at which it begins: the end of a step of the phase before. Set this or
    first_step.
    """
    first_step: int | None = None
    """Its first step, counted from 1 as in metrics.jsonl: over the batch sizes of the config from
    sample 0 on, its ramp-up and its skips.
    """
    blend: Blend | None = None
    """Datasets and weights of training, in any form of `blend`. One that stays goes on where it
    was, and so does one that comes back; one that is new begins its first epoch. Leave out what the
    phase does not draw from: no weight is zero.
    """
    global_batch_size: Annotated[int | None, Ge(1)] = None
    """Samples of one optimizer step over all ranks."""
    sequence_length: Annotated[int | None, Ge(1)] = None
    """Tokens of a sample. The rest of epochs in progress is cut to the new length, so nothing is lost."""
    shuffle_lanes: Annotated[int | None, Ge(1)] = None
    """Lanes, a multiple of the global batch. As of `sequence_length`."""
    exclude_documents: ExcludedNames = ()
    """Documents to leave out from this phase on, in addition to those of earlier phases. Given as
    `exclude_documents` of the run.
    """

    def __repr__(self) -> str:
        return redacted_repr(self)

    def __post_init__(self) -> None:
        check_fields(self, "phase.")
        self._check_start()
        if self.blend is not None:
            parse_blend(self.blend)
        excluded_names(self.exclude_documents, self.first_sample)

    @property
    def is_in_samples(self) -> bool:
        """Whether its beginning is given as a sample, and not as a step."""
        return self.first_step is None

    def _check_start(self) -> None:
        if self.first_step is not None and self.first_sample:
            raise ConfigError(
                "a phase has first_step and first_sample; set one of them, at which it begins"
            )
        name, value, minimum = "first_sample", self.first_sample, 1
        if self.first_step is not None:
            name, value, minimum = "first_step", self.first_step, 2
        if value < minimum:
            raise ConfigError(
                f"{name} of a phase is {value}; it must be at least {minimum} (a phase begins at a "
                "first_sample or a first_step)"
            )


class Segment(NamedTuple):
    """What holds in a split from a sample on: phases with all that they take over from those before.

    datasets: prefixes; none: the split has nothing. weights: None: in proportion to samples.
    global_batch_size: None: that of the run, with its ramp-up. lanes: None: as many as the first
    global batch size chooses. numbers: of its datasets over all segments, as `split_data` counts
    them.
    """

    first_sample: int
    datasets: Sequence[str]
    weights: Sequence[float] | None
    sequence_length: int
    global_batch_size: int | None = None
    lanes: int | None = None
    numbers: Sequence[int] = ()

    def followed_by(self, phase: PhaseConfig) -> Segment:
        """The segment of a phase after this one."""
        datasets, weights = self.datasets, self.weights
        if phase.blend is not None:
            datasets, weights = parse_blend(phase.blend)
        return Segment(
            first_sample=phase.first_sample,
            datasets=datasets,
            weights=weights,
            sequence_length=phase.sequence_length or self.sequence_length,
            global_batch_size=phase.global_batch_size or self.global_batch_size,
            lanes=phase.shuffle_lanes or self.lanes,
        )


def check_phases(phases: Sequence[PhaseConfig], order: Order) -> None:
    """Raise ConfigError for phases that do not follow each other, or do not go with the order.

    A phase at a step has first_sample 0 here and is not compared. `resolve_phase_starts` later gives
    it its sample and makes another config, which calls this again.
    """
    if not ORDERS[order].has_phases:
        raise ConfigError(
            'phases belong to the stream order: set order="stream". In Megatron-LM its own '
            "--phase-transition-iterations ends a run, and begins another one"
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
        first_before = max(first_before, phase.first_sample)
