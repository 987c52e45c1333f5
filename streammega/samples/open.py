"""The sample source of a config's split, whichever the order."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from streammega.config import DataConfig
from streammega.errors import ConfigError
from streammega.order import Extents
from streammega.order.phase_starts import check_in_samples
from streammega.order.split import SPLITS
from streammega.samples.build import build_split
from streammega.samples.following_source import FollowingSource
from streammega.samples.lanes import StreamSource
from streammega.samples.phases import PhasedSource
from streammega.samples.restarted import RestartedPhases
from streammega.samples.source import SampleSource


def open_source(config: DataConfig, split: str, global_batch_size: int) -> SampleSource:
    """Samples of a split in the config's order. Raises ConfigError before any token is read."""
    if split not in SPLITS:
        raise ConfigError(f"split {split!r} is not one of {', '.join(SPLITS)}")
    check_in_samples(config.phases_of(split))
    if config.order == "stream":
        if config.follows(split):
            return FollowingSource(config, split, global_batch_size)
        if config.phases_of(split):
            return PhasedSource(config, split, global_batch_size)
        return StreamSource(config, split, global_batch_size)
    asked = config.num_samples[SPLITS.index(split)] if config.num_samples else None
    takes_everything = split == "valid" and config.full_validation
    if config.order == "megatron" and asked is None and not takes_everything:
        raise ConfigError(
            "the Megatron order depends on how many samples are asked: "
            "set num_samples=(train, valid, test), "
            "for instance (train_iters * global_batch_size, 0, 0)"
        )
    if asked is not None and config.phases_of(split):
        return RestartedPhases(config, split, asked)
    source = build_split(config, split, asked)
    if isinstance(source, list):
        raise ConfigError(
            "multiple_validation_sets makes several datasets: open each by a config of its own, "
            "or build_datasets"
        )
    if source is None:
        raise ConfigError(
            f"split {config.split!r} with num_samples {config.num_samples} leaves nothing for "
            f"{split}"
        )
    _ = source.skipped  # names that no document has are told of now
    return source


def locate(
    config: DataConfig, sample_ids: ArrayLike, *, split: str = "train", global_batch_size: int = 1
) -> Extents:
    """Where samples of the global stream lie: arrays dataset, file, start, stop (in tokens), and
    `row_splits` of samples.

    A pure function of sizes, seed and config; no token is read. In the stream order every sample is
    one row, and `global_batch_size` chooses the lanes unless the config names them. In the others a
    sample may have several.
    """
    ids = np.asarray(sample_ids, np.int64).reshape(-1)
    source = open_source(config, split, global_batch_size)
    return locate_checked(source, ids, split)


def locate_checked(source: SampleSource, ids: NDArray[np.int64], split: str) -> Extents:
    """Where samples of a source lie. Raises IndexError for a number that none of them has."""
    if not len(ids):
        return source.locate(ids)
    # the closed forms answer for every number, also for one that no sample has
    first = ids.min()
    last = ids.max()
    end = source.num_samples
    if first < 0 or (end is not None and last >= end):
        there_are = "those from 0 on" if end is None else f"those from 0 to {end - 1}"
        raise IndexError(f"sample ids run from {first} to {last}; {split} has {there_are}")
    return source.locate(ids)
