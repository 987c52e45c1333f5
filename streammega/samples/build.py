"""From a config to the datasets of its splits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from streammega.config import DataConfig
from streammega.errors import ConfigError
from streammega.index import IndexedDataset
from streammega.order.split import SPLITS, split_bounds
from streammega.samples.gpt import GPTDataset


def build_datasets(config: DataConfig, num_samples: Sequence[int | None] | None = None) -> tuple[GPTDataset | None, ...]:
    """The train, valid and test datasets; None where the split has no share.

    `num_samples` (train, valid, test) overrides the config's; None: one epoch each.
    Raises ConfigError for a split that leaves nothing, StorageError and FormatError for its files.
    """
    wanted = list(num_samples or config.num_samples or (None, None, None))
    indexed = open_indexed(config)
    return tuple(build_split(config, indexed, split, wanted[i]) for i, split in enumerate(SPLITS))


def open_indexed(config: DataConfig) -> IndexedDataset:
    """The dataset's pair, opened with the config's storage and cache."""
    return IndexedDataset(config.blend[0], config.storage, config.index_cache_dir)


def build_split(config: DataConfig, indexed: IndexedDataset, split: str, num_samples: int | None) -> GPTDataset | None:
    """One split of an open dataset, or None where it has no share or nothing is asked of it."""
    bounds = split_bounds(config.split, len(indexed))
    if split not in bounds:
        raise ConfigError(f"split {split!r} is not one of {', '.join(SPLITS)}")
    share = bounds[split]
    if share is None or num_samples == 0:
        return None
    return GPTDataset(indexed, np.arange(*share, dtype=np.int32), num_samples, config, split)
