"""The Megatron order over the segments of a run: each is a run of its own, as with Megatron's
`--phase-transition-iterations`.

Megatron ends a run at a transition, and begins another. It builds the datasets for the samples of
the phase, and reads them from their first sample on. So a phase takes nothing over from the one
before: a dataset that stays is shuffled again, from its first epoch on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from streammega.config import DataConfig, Segment
from streammega.dataset import IndexedDataset
from streammega.errors import ConfigError
from streammega.order import Extents
from streammega.order.epoch_layout import Records
from streammega.order.schedule import check_in_samples
from streammega.order.split import SPLITS
from streammega.samples.blended import BlendedDataset
from streammega.samples.build import build_split
from streammega.samples.excluded import ExcludedTokens, excluded_tokens
from streammega.samples.gpt import GPTDataset
from streammega.samples.packed import check_one_kind
from streammega.samples.segments import dataset_names, datasets_of_segments
from streammega.samples.source import Integers, SampleSource, SegmentSource, Span
from streammega.samples.token_file import TokenFile, check_tokenizers


class MegatronSegment(SegmentSource):
    """Samples of one phase, by their numbers in the whole stream.

    Args:
        samples: Megatron's dataset of the phase.
        first_sample: where the phase begins.
        numbers: the number over all segments of each of its datasets.
        files: of the datasets of all segments.
        excluded: the tokens of these that are not seen.
    """

    def __init__(
        self,
        samples: GPTDataset | BlendedDataset,
        first_sample: int,
        numbers: Sequence[int],
        files: Sequence[Sequence[TokenFile]],
        excluded: ExcludedTokens | None,
    ) -> None:
        self.samples = samples
        self.excluded = excluded
        self.config = samples.config
        self.split = samples.split
        self.first_sample = first_sample
        self.dataset_numbers = np.array(numbers, np.int64)
        self.files = files
        self.shares = samples.shares
        self.tokens_per_epoch = samples.tokens_per_epoch

    @property
    def num_samples(self) -> int:
        """The end of the samples that the phase could have."""
        return self.first_sample + len(self.samples)

    def locate(self, sample_ids: Integers) -> Extents:
        """Where samples are stored. `dataset`: its number over all segments."""
        extents = self.samples.locate(sample_ids - self.first_sample)
        numbers = self.dataset_numbers.astype(np.int32)
        return replace(extents, dataset=numbers[extents.dataset])

    def identity(self, consumed: int | None = None) -> dict[str, Any]:
        """With the number of samples: Megatron shuffles a phase as a whole."""
        return self.samples.identity()

    def usage(self, spans: Sequence[Span]) -> Records:
        """Counted over the built indices."""
        shift = self.first_sample
        return self.samples.usage([(start - shift, stop - shift) for start, stop in spans])


def open_megatron_segments(config: DataConfig, split: str, num_samples: int) -> SampleSource:
    """Samples of a split in the Megatron order, over all phases of a config.

    Raises ConfigError naming a phase that has nothing, or too few samples; and if only some
    datasets are packed, or their tokenizers differ. Raises StorageError and FormatError for the
    files.
    """
    built = build_phases(config, split, num_samples)
    segments = datasets_of_segments(config, split)
    dataset_of_number: dict[int, GPTDataset] = {}
    for samples, segment in zip(built, segments, strict=True):
        for number, dataset in zip(segment.numbers, samples.datasets, strict=True):
            dataset_of_number.setdefault(number, dataset)
    datasets = [dataset_of_number[number] for number in sorted(dataset_of_number)]
    opened = [dataset.indexed for dataset in datasets]
    check_one_kind([(indexed.prefix, indexed.bin_tokens) for indexed in opened])
    if not config.allow_mixed_tokenizers:
        check_tokenizers((indexed.prefix, indexed.tokenizers) for indexed in opened)
    files = [dataset.files[0] for dataset in datasets]
    prefixes = [prefix for prefix, _ in dataset_names(segments)]
    excluded = excluded_tokens(config, split, prefixes, files)
    return SampleSource(
        config,
        [
            MegatronSegment(samples, segment.segment.first_sample, segment.numbers, files, excluded)
            for samples, segment in zip(built, segments, strict=True)
        ],
    )


def build_phases(
    config: DataConfig, split: str, num_samples: int
) -> list[GPTDataset | BlendedDataset]:
    """Megatron's dataset of each phase. num_samples: of all of them. Raises ConfigError."""
    check_in_samples(config.phases)
    segments = config.segments(split)
    starts = [segment.first_sample for segment in segments]
    if num_samples <= starts[-1]:
        raise ConfigError(
            f"num_samples asks for {num_samples} samples of {split}, but phase {len(starts) - 1} begins "
            f"at sample {starts[-1]}; ask for the samples of all phases"
        )
    opened: dict[str, IndexedDataset] = {}
    built = []
    for number, (segment, end) in enumerate(zip(segments, [*starts[1:], num_samples], strict=True)):
        of_segment = _config_of(config, split, segment)
        built.append(_built(of_segment, split, number, end - segment.first_sample, opened))
    return built


def _built(
    config: DataConfig, split: str, number: int, num_samples: int, opened: dict[str, IndexedDataset]
) -> GPTDataset | BlendedDataset:
    """The dataset of one phase. Raises ConfigError where it has fewer samples than are asked."""
    try:
        samples = build_split(config, split, num_samples, opened)
    except ConfigError as error:
        raise ConfigError(f"phase {number}: {error}" if number else str(error)) from None
    if samples is None or isinstance(samples, list):
        raise ConfigError(f"phase {number}: split {config.split!r} leaves nothing for {split}")
    if len(samples) < num_samples:
        raise ConfigError(
            f"phase {number} has {num_samples} samples, but one epoch of its datasets has {len(samples)}; give "
            "them weights, and they are read for as many epochs as needed"
        )
    return samples


def _config_of(config: DataConfig, split: str, segment: Segment) -> DataConfig:
    """The config of one segment alone, without exclude_documents: those count samples of the whole
    run.
    """
    alone = replace(
        config, phases=(), exclude_documents=(), sequence_length=segment.sequence_length
    )
    if config.blend_per_split is None:
        return replace(alone, blend=segment.blend)
    blends = list(config.blend_per_split)
    blends[SPLITS.index(split)] = segment.blend
    return replace(alone, blend_per_split=blends)
