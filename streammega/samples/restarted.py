"""Phases of the Megatron order: each is a run of its own, as Megatron's `--phase-transition-iterations`
makes it.

Megatron ends a run at a transition and begins another there, whose datasets are built for as many
samples as the phase has and are read from their first one on. So nothing is carried from one phase
into the next: a dataset that stays is shuffled anew, from its first epoch on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streammega.config import DataConfig, PhaseConfig
from streammega.dataset import IndexedDataset
from streammega.errors import ConfigError
from streammega.order import Extents
from streammega.order.extents import merge_extents
from streammega.order.schedule import check_in_samples
from streammega.order.split import SPLITS
from streammega.order.state import PHASES
from streammega.samples.blended import BlendedDataset
from streammega.samples.build import build_split
from streammega.samples.excluded import SkippedTokens, skipped_tokens, skips_identity
from streammega.samples.gpt import GPTDataset
from streammega.samples.packed import check_one_kind
from streammega.samples.phases import Phased, numbers_of_phases, prefixes_of
from streammega.samples.token_file import TokenFile, check_tokenizers

OF_ALL_PHASES = ("order", "order_version", "split", "seed", "add_extra_token", "drop_last")
"""What of an identity is the same in every phase."""


class RestartedPhase:
    """Samples of one phase, by their numbers in the whole stream.

    Args: samples: Megatron's dataset of the phase. first_sample: the sample of the stream at which
        it begins. numbers: of each of its datasets the number over all phases. files: of all of
        these, by their numbers. skipped: what of them is not seen.
    """

    def __init__(
        self,
        samples: GPTDataset | BlendedDataset,
        first_sample: int,
        numbers: Sequence[int],
        files: Sequence[Sequence[TokenFile]],
        skipped: SkippedTokens | None,
    ) -> None:
        self.samples = samples
        self.skipped = skipped
        self.config: DataConfig = samples.config
        self.first_sample = first_sample
        self.numbers = np.array(numbers, np.int32)
        self.files = files

    @property
    def num_samples(self) -> int:
        """The sample of the stream behind the last one that the phase could have."""
        return self.first_sample + len(self.samples)

    def locate(self, sample_ids: NDArray[np.int64]) -> Extents:
        """Where samples lie. `dataset`: its number over all phases."""
        extents = self.samples.locate(sample_ids - self.first_sample)
        return replace(extents, dataset=self.numbers[extents.dataset])

    def identity(self, consumed: int | None = None) -> dict[str, Any]:
        """What defines the phase: its samples are counted from its own first one."""
        return self.samples.identity()


class RestartedPhases(Phased):
    """Samples of training in the Megatron order, over all phases of a config.

    Raises ConfigError for a phase that holds nothing, or less than its samples, naming it;
    StorageError and FormatError for the files.
    """

    def __init__(self, config: DataConfig, split: str, num_samples: int) -> None:
        self.config = config
        self.split = split
        self.starts = [0, *(phase.first_sample for phase in config.phases_of(split))]
        built = built_phases(config, split, num_samples)
        self._numbers = numbers_of_phases(config, split)
        self.files: Sequence[Sequence[TokenFile]] = self._files_of(built)
        self.skipped = skipped_tokens(config, split, prefixes_of(config, split), self.files)
        self.phases: Sequence[RestartedPhase] = [
            RestartedPhase(samples, start, numbers, self.files, self.skipped)
            for samples, start, numbers in zip(built, self.starts, self._numbers, strict=True)
        ]

    @property
    def num_samples(self) -> int:
        """Samples of all phases, to the end of the last one's dataset."""
        return self.phases[-1].num_samples

    def locate(self, sample_ids: NDArray[np.int64]) -> Extents:
        """Where samples lie."""
        phase_of_sample = np.searchsorted(self._firsts, sample_ids, side="right") - 1
        parts: list[tuple[NDArray[np.int64], Extents]] = []
        for phase in np.unique(phase_of_sample).tolist():
            of_phase = np.flatnonzero(phase_of_sample == phase)
            parts.append((of_phase, self.phases[phase].locate(sample_ids[of_phase])))
        if len(parts) == 1:  # as nearly always: a phase is many thousands of steps
            return parts[0][1]
        return merge_extents(parts)

    def identity(self, consumed: int | None = None) -> dict[str, Any]:
        """That of the first phase, and beside it those that began before `consumed`, by their
        numbers. None: all of them.

        How many samples a phase has is part of it: Megatron shuffles it as a whole.
        """
        identity = self.phases[0].identity()
        identity |= skips_identity(self.skipped, consumed, self._drawn_before(consumed))
        begun = {
            str(number): _identity_of(phase)
            for number, phase in enumerate(self.phases)
            if number and (consumed is None or phase.first_sample < consumed)
        }
        return identity | {PHASES: begun} if begun else identity

    def _drawn_before(self, consumed: int | None) -> set[int]:
        """The datasets of phases that began before a sample; None: of all."""
        in_phases = zip(self.starts, self._numbers, strict=True)
        begun = [
            own for first, own in in_phases if not first or consumed is None or first < consumed
        ]
        return {number for numbers in begun for number in numbers}

    @cached_property
    def _firsts(self) -> NDArray[np.int64]:
        return np.array(self.starts, np.int64)

    def _files_of(
        self, built: Sequence[GPTDataset | BlendedDataset]
    ) -> Sequence[Sequence[TokenFile]]:
        """The files of each dataset, by its number: those of the phase that has it first.

        Raises ConfigError for datasets of which some are packed, or of another tokenizer.
        """
        found: dict[int, GPTDataset] = {}
        for samples, numbers in zip(built, self._numbers, strict=True):
            for number, dataset in zip(numbers, datasets_of(samples), strict=True):
                found.setdefault(number, dataset)
        datasets = [found[number] for number in sorted(found)]
        opened = [dataset.indexed for dataset in datasets]
        check_one_kind([(indexed.prefix, indexed.bin_tokens) for indexed in opened])
        if not self.config.mix_tokenizers:
            tokenizers = [(indexed.prefix, indexed.tokenizers) for indexed in opened]
            check_tokenizers(tokenizers, self.config)
        return [dataset.files[0] for dataset in datasets]


def datasets_of(samples: GPTDataset | BlendedDataset) -> Sequence[GPTDataset]:
    """The datasets of a blend, or the only one."""
    return samples.datasets if isinstance(samples, BlendedDataset) else [samples]


def built_phases(
    config: DataConfig, split: str, num_samples: int
) -> list[GPTDataset | BlendedDataset]:
    """Megatron's dataset of each phase. num_samples: of all of them. Raises ConfigError."""
    phases = config.phases_of(split)
    check_in_samples(phases)
    starts = [0, *(phase.first_sample for phase in phases), num_samples]
    if starts[-1] <= starts[-2]:
        raise ConfigError(
            f"num_samples asks {num_samples} samples of {split}, and phase {len(phases)} begins at "
            f"sample {starts[-2]}; ask for those of all phases"
        )
    opened: dict[str, IndexedDataset] = {}
    of_phase = _alone(config)
    built = []
    for number, start in enumerate(starts[:-1]):
        if number:
            of_phase = _in_phase(of_phase, split, phases[number - 1])
        asked = starts[number + 1] - start
        built.append(_built(of_phase, split, number, asked, opened))
    return built


def _built(
    config: DataConfig, split: str, number: int, asked: int, opened: dict[str, IndexedDataset]
) -> GPTDataset | BlendedDataset:
    """The dataset of one phase. Raises ConfigError where it has fewer samples than are asked."""
    try:
        samples = build_split(config, split, asked, opened)
    except ConfigError as error:
        raise ConfigError(f"phase {number}: {error}" if number else str(error)) from None
    if not isinstance(samples, GPTDataset | BlendedDataset):
        raise ConfigError(f"phase {number}: split {config.split!r} leaves nothing for {split}")
    if len(samples) < asked:
        raise ConfigError(
            f"phase {number} has {asked} samples, and its datasets, each of them once, "
            f"{len(samples)}; give them weights, by which they are read as often as it takes"
        )
    return samples


def _alone(config: DataConfig) -> DataConfig:
    """The config of the first phase, without those that follow. What is skipped goes by the samples
    of all of them.
    """
    return replace(config, phases=(), skip_documents=())


def _in_phase(before: DataConfig, split: str, phase: PhaseConfig) -> DataConfig:
    """The config of a phase, of that before it."""
    length = phase.sequence_length or before.sequence_length
    if phase.blend is None:
        return replace(before, sequence_length=length)
    if before.blend_per_split is None:
        return replace(before, sequence_length=length, blend=phase.blend)
    blends = list(before.blend_per_split)
    blends[SPLITS.index(split)] = phase.blend
    return replace(before, sequence_length=length, blend_per_split=blends)


def _identity_of(phase: RestartedPhase) -> dict[str, Any]:
    """What defines a later phase, without what all of them share."""
    own = phase.identity()
    own = {name: value for name, value in own.items() if name not in OF_ALL_PHASES}
    return {"first_sample": phase.first_sample} | own
