"""What a run reads: its splits and validation sets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from streammega.config import ORDERS, DataConfig
from streammega.errors import ConfigError
from streammega.loading import StreamLoader
from streammega.parallel import Ranks, open_loader
from streammega.samples.segments import has_data, short_names, split_data
from streammega.train.config import RunConfig


def open_split(
    config: RunConfig, split: str, ranks: Ranks, metrics_port: int | None = None
) -> StreamLoader:
    """The loader of a split for a rank of a layout, with the number of samples that the run needs."""
    sizes = batch_sizes(config, split)
    return open_loader(
        data_of(config, split), ranks, split=split, metrics_port=metrics_port, **sizes
    )


def validation_sets(config: RunConfig) -> dict[str, RunConfig]:
    """Name -> the run with that set as its valid split. The sets are those of [validation], and with
    multiple_validation_sets each valid prefix of blend_per_split.
    """
    blends: dict[str, Any] = dict(config.validation)
    data = config.data
    if data.multiple_validation_sets and has_data(data, "valid"):
        prefixes = split_data(data, "valid").prefixes
        for name, prefix in zip(short_names(prefixes), prefixes, strict=True):
            blends[name] = [prefix]
    return {name: _evaluated_on(config, blend) for name, blend in blends.items()}


def _evaluated_on(config: RunConfig, blend: Any) -> RunConfig:
    """The run with a blend as its whole valid split, without the settings of training data."""
    data = replace(
        config.data,
        blend=None,
        blend_per_split=(None, blend, None),
        split="1,0,0",
        multiple_validation_sets=False,
        phases=(),
    )
    return replace(config, data=data, validation={})


def data_of(config: RunConfig, split: str) -> DataConfig:
    """The data settings of a run for one of its splits. Raises ConfigError for too few samples."""
    # The trainer's attention uses the bounds of documents instead of a mask.
    data = replace(config.data, fields=None)
    used = {"tokens", "labels", "loss_mask", "cu_seqlens"}
    if data.reset_position_ids:  # else they count from 0
        used.add("position_ids")
    data = replace(data, fields=[name for name in data.field_names if name in used])
    # An endless order needs none. An end counted from the settings would be wrong for a run that began
    # with another global batch.
    if data.num_samples is None and not ORDERS[data.order].is_endless:
        data = replace(data, num_samples=config.num_samples())
    if split != "train":
        return replace(data, columns=())  # evaluation is of tokens alone
    needed, _, _ = config.num_samples()
    if data.num_samples is not None:
        requested, _, _ = data.num_samples
        if requested < needed:
            raise ConfigError(
                f"data.num_samples is {requested} for training, and the {config.train.train_iters} steps "
                f"of train.train_iters take {needed} samples; raise num_samples, or lower train_iters"
            )
    return data


def batch_sizes(config: RunConfig, split: str) -> dict[str, Any]:
    """The sizes of a split's batches, as arguments of a loader."""
    train = config.train
    sizes: dict[str, Any] = {
        "micro_batch_size": train.micro_batch_size,
        "global_batch_size": train.global_batch_size,
    }
    # Evaluations use whole global batches, also during the ramp-up of training.
    if split == "train":
        sizes["rampup_batch_size"] = train.rampup_batch_size
    return sizes


def has_valid(data: DataConfig) -> bool:
    """Whether the data itself has a valid split that can be read as one."""
    return not data.multiple_validation_sets and has_data(data, "valid")
