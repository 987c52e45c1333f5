"""From a config to the datasets of its splits, as Megatron builds them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from streammega.config import DataConfig
from streammega.config.validate import plain
from streammega.dataset import IndexedDataset
from streammega.dataset.manifest import Manifest
from streammega.errors import ConfigError
from streammega.errors.logs import get_logger
from streammega.errors.redaction import redact_urls
from streammega.order.megatron import normalized, samples_asked
from streammega.order.split import SPLITS, split_bounds
from streammega.samples.blended import BlendedDataset
from streammega.samples.gpt import GPTDataset, num_units_of
from streammega.samples.packed import check_packing
from streammega.samples.pinned import read_blend
from streammega.samples.segments import SplitData, has_data, split_data
from streammega.samples.token_file import check_tokenizers, with_vocabulary
from streammega.storage.thread_pool import parallel_map
from streammega.storage.warn_once import warn_once

log = get_logger(__name__)

MAX_OPENERS = 16
"""Pairs of a blend that are opened at once."""

SplitDataset: TypeAlias = "GPTDataset | BlendedDataset | list[GPTDataset]"


def build_datasets(
    config: DataConfig, num_samples: Sequence[int | None] | None = None
) -> tuple[SplitDataset | None, ...]:
    """The train, valid and test datasets; None where the split has no share or nothing is asked of
    it.

    num_samples: (train, valid, test) in place of the config's; a count of None is one epoch of
    everything; of valid and test, whatever the weights. With `multiple_validation_sets`, valid is a
    list of datasets. For the Megatron and the sequential order; the stream order builds nothing.
    Raises ConfigError for a split or blend that cannot be built, StorageError and FormatError for
    the files.
    """
    counts = list(plain(num_samples) or config.num_samples or (None, None, None))
    if len(counts) != len(SPLITS):
        raise ConfigError(
            f"num_samples is {counts}; it takes three counts: (train, valid, test), None for one epoch"
        )
    config = read_blend(config)
    opened: dict[str, IndexedDataset] = {}
    return tuple(
        build_split(config, split_data(config, split), count, opened)
        if has_data(config, split)
        else None
        for split, count in zip(SPLITS, counts, strict=True)
    )


def build_split(
    config: DataConfig,
    data: SplitData,
    num_samples: int | None,
    opened: dict[str, IndexedDataset] | None = None,
) -> SplitDataset | None:
    """The dataset of one split; None where it has no share or nothing is asked of it.

    num_samples: None: one epoch. opened: open pairs by prefix, which several splits share; this adds
    to it. Raises what `build_datasets` raises, and ConfigError for a split in phases.
    """
    split = data.split
    if len(data.segments) > 1:
        raise ConfigError(
            f"{split} has phases, which are of the stream order: read them by a StreamLoader, or build "
            "datasets by a config without phases"
        )
    # all of it once, however many samples are asked for
    if split == "valid" and config.full_validation:
        num_samples = None
    if num_samples == 0:
        return None
    (segment,) = data.segments
    # evaluation reads every sample once
    weights = None if num_samples is None and split != "train" else segment.weights
    # As Megatron builds them: the only dataset of a split is blended with itself where `blend`
    # gives it a weight, never where `blend_per_split` does.
    alone = len(segment.datasets) == 1 and (weights is None or config.blend is None)
    are_apart = split == "valid" and config.multiple_validation_sets
    if weights is not None and num_samples is None and not alone and not are_apart:
        raise ConfigError(
            f"the {split} blend has weights, so it needs a number of samples: "
            "set num_samples, or give prefixes without weights to take every sample once"
        )
    opened = {} if opened is None else opened
    _open_all(data.prefixes, config, opened)
    pairs = [opened[prefix] for prefix in segment.datasets]
    if not alone and not are_apart:
        return _blended(config, data, pairs, weights, num_samples)
    single = [
        _single(with_vocabulary(config, split, _manifests([pair])), data, pair, num_samples)
        for pair in pairs
    ]
    return single[0] if alone else [dataset for dataset in single if dataset is not None]


def _open_all(
    prefixes: Sequence[str], config: DataConfig, opened: dict[str, IndexedDataset]
) -> None:
    """Add each dataset to `opened` that is not there, once: a blend may name it several times."""
    missing = [prefix for prefix in dict.fromkeys(prefixes) if prefix not in opened]
    at_once = min(MAX_OPENERS, config.storage.max_concurrent_requests)
    datasets = parallel_map(
        lambda prefix: IndexedDataset(
            prefix,
            config.storage,
            manifest=config.manifests.get(prefix),
            columns=config.columns,
        ),
        missing,
        at_once,
    )
    opened.update(zip(missing, datasets, strict=True))


def _manifests(pairs: Sequence[IndexedDataset]) -> list[tuple[str, Manifest]]:
    """Datasets by their names."""
    return [(pair.prefix, pair.manifest) for pair in pairs]


def _single(
    config: DataConfig, data: SplitData, indexed: IndexedDataset, num_samples: int | None
) -> GPTDataset | None:
    """The samples of one dataset in a split; None where the split string gives it no share.

    Units of the split are sequences, or the bins of a packed dataset.
    """
    bounds = split_bounds(data.shares, num_units_of(indexed))[data.split]
    if bounds is None:
        return None
    unit_ids = np.arange(*bounds, dtype=np.int32)
    return GPTDataset(indexed, unit_ids, num_samples, config, data.split)


def _blended(
    config: DataConfig,
    data: SplitData,
    pairs: Sequence[IndexedDataset],
    weights: Sequence[float] | None,
    num_samples: int | None,
) -> BlendedDataset | None:
    """The blend of a split; None where the split string gives it no share of a dataset.

    With weights, num_samples are drawn by them. Without, all samples are taken in proportion to the
    lengths of the datasets, or the first num_samples of these.
    """
    counts: Sequence[int | None] = [None] * len(pairs)
    if weights is not None and num_samples is not None:
        weights = normalized(weights)
        counts = samples_asked(weights, num_samples, config.mid_level_dataset_surplus)
    if len(pairs) > 1 and not config.allow_mixed_tokenizers:
        check_tokenizers((pair.prefix, pair.tokenizers) for pair in pairs)
    config = with_vocabulary(config, data.split, _manifests(pairs))
    parts = parallel_map(
        lambda pair: _single(config, data, *pair),
        list(zip(pairs, counts, strict=True)),
        MAX_OPENERS,
    )
    datasets = [part for part in parts if part is not None]
    bins = [(part.indexed.prefix, part.indexed.bin_tokens) for part in datasets]
    check_packing(bins, config.sequence_length)
    _warn_of_repeats(datasets)
    if len(datasets) < len(pairs):
        return None  # the split string gives this split no share
    if weights is not None and num_samples is not None:
        # without the surplus, which only makes each dataset a little longer than it is drawn
        size = sum(samples_asked(weights, num_samples, 0.0))
        return BlendedDataset(datasets, weights, size)
    lengths = [len(dataset) for dataset in datasets]
    size_asked = None if num_samples is None else min(num_samples, sum(lengths))
    return BlendedDataset(datasets, lengths, size_asked)


def _warn_of_repeats(datasets: Sequence[GPTDataset]) -> None:
    """Warn once of entries of a blend that hold the same, under one name or as a copy: each is shuffled
    as the other, so the same samples come from both, as in Megatron.
    """
    name_of_content: dict[str, str] = {}
    for dataset in datasets:
        name = redact_urls(dataset.indexed.name)
        content = dataset.indexed.content
        if content in name_of_content:
            other = name_of_content[content]
            warn_once(
                log,
                f"{other} {name}",
                "the blend has %s and %s, which hold the same: both give the same samples, in the same "
                "order, as in Megatron; name the data once, with the sum of both weights",
                other,
                name,
            )
        name_of_content.setdefault(content, name)
