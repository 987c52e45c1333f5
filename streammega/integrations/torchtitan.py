"""torchtitan trains from s3:// and oss:// through this data loader, by `--module` and without a fork.

    from streammega.integrations.torchtitan import StreamDataLoader

    def llama3_8b_from_bucket():
        config = llama3_8b()
        config.dataloader = StreamDataLoader.Config(blend="s3://bucket/web", global_batch_size=1024)
        return config

For 0.3.0, whose batches are [rows, tokens], and for later ones, whose batches are one row of tokens.
The state is one entry of torchtitan's checkpoints, the same on all ranks, and fits any number of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from streammega.config import ORDERS, DataConfig, StorageConfig
from streammega.config.columns import refuse_columns
from streammega.errors import ConfigError
from streammega.integrations.dcp import DataState, read_state
from streammega.integrations.frameworks import (
    check_batch_size,
    check_phases,
    class_on_demand,
    import_framework,
    with_used_fields,
)
from streammega.loading import StreamLoader
from streammega.order.split import SPLITS

IGNORE_INDEX = -100
"""What torchtitan's losses leave out."""

POSITIONS = ("documents", "samples", "none")

Pair = tuple[dict[str, torch.Tensor], torch.Tensor]
"""({"input", "positions"}, labels): what torchtitan takes."""


@dataclass(frozen=True, kw_only=True)
class TitanBatch:
    """What a rank takes at once: `rows` samples of `length` tokens, in one dimension if `flat`."""

    length: int
    rows: int
    flat: bool


class TitanPairs(Iterator[Pair]):
    """Batches of a loader as torchtitan takes them; pass after pass if `repeat`.

    StopIteration is the end of the data, and nothing else: StateError once its loader was moved.
    """

    def __init__(self, loader: StreamLoader, *, flat: bool, positions: bool, repeat: bool) -> None:
        self._loader = loader
        self._batches = iter(loader)
        self._flat = flat
        self._positions = positions
        self._repeat = repeat

    def __next__(self) -> Pair:
        batch = next(self._batches, None)
        if batch is None and self._repeat:
            self._batches = iter(self._loader)  # the next pass
            batch = next(self._batches, None)
        if batch is None:
            raise StopIteration
        labels = batch["labels"]
        if "loss_mask" in batch:
            labels.masked_fill_(batch["loss_mask"] == 0, IGNORE_INDEX)
        inputs = {"input": batch["tokens"]}
        if self._positions:
            inputs["positions"] = batch["position_ids"]
        if not self._flat:
            return inputs, labels
        return {name: value.view(-1) for name, value in inputs.items()}, labels.view(-1)


def titan_data(config: Any, batch: TitanBatch, eos_id: int | None) -> DataConfig:
    """What a StreamDataLoader.Config reads."""
    _check(config, batch)
    settings = dict(config.settings)
    if "storage" in settings:
        settings["storage"] = _storage(settings["storage"])
    if isinstance(settings.get("storage_by_prefix"), Mapping):
        by_prefix = settings["storage_by_prefix"].items()
        settings["storage_by_prefix"] = {prefix: _storage(one) for prefix, one in by_prefix}
    restarts = config.positions == "documents"
    end_of_document = eos_id if config.eod_id < 0 else config.eod_id
    counts = [0, 0, 0]  # this loader reads no sample of the other splits
    counts[SPLITS.index(config.part)] = max(config.num_samples, 0)
    fields: dict[str, Any] = {
        "blend": config.blend,
        "split": config.split,
        "order": config.order,
        "seed": config.seed,
        "num_samples": tuple(counts) if config.num_samples >= 0 else None,
        "sequence_length": batch.length,
        "eod_id": end_of_document,
        "reset_position_ids": restarts,
    }
    # another name than those of orders is refused by DataConfig
    is_endless = config.order in ORDERS and ORDERS[config.order].is_endless
    if is_endless and fields["num_samples"] is None and not _repeats(config):
        if config.part == "train":
            raise ConfigError(
                "infinite=False or repeat=False asks for an end, which the stream order has only "
                "with num_samples; name it in the dataloader config"
            )
        fields["order"] = "sequential"  # all samples once are the same in any order
    repeated = sorted(set(fields) & set(settings))
    if repeated:
        raise ConfigError(
            f"settings of the dataloader config name {', '.join(repeated)}; "
            "these are fields of the config itself, or torchtitan's"
        )
    data = DataConfig(**fields, **settings)
    if "dataset_id" in data.field_names:
        raise ConfigError(
            "torchtitan's batches have no place for the datasets of their samples: leave "
            "dataset_id out of fields, and ask loader.dataset.dataset_ids(consumed) of the data loader, "
            "which knows them by the order"
        )
    refuse_columns(data, "torchtitan's batches have no place for columns")
    global_batch_size = config.global_batch_size if config.global_batch_size > 0 else None
    check_phases(data, "torchtitan", global_batch_size, one_length=True)
    # The fields that batches of torchtitan are made of.
    used = {"tokens", "labels", "loss_mask", "cu_seqlens"}
    if config.positions != "none":
        used.add("position_ids")
    return with_used_fields(data, used)


def _storage(settings: Any) -> Any:
    return StorageConfig(**settings) if isinstance(settings, Mapping) else settings


def _repeats(config: Any) -> bool:
    """Whether another pass follows the last sample: both names are torchtitan's, of its releases and
    of later ones.
    """
    return bool(config.infinite and config.repeat)


def _check(config: Any, batch: TitanBatch) -> None:
    """Raise ConfigError for what would be ignored, or read as something else."""
    for name in ("dataset", "dataset_path"):  # of 0.3.0's own config
        if getattr(config, name, None):
            raise ConfigError(f"{name} belongs to torchtitan's loaders; name the data in `blend`")
    if not config.blend:
        raise ConfigError('the dataloader config has no data: give it blend="s3://bucket/web"')
    if config.part not in SPLITS:
        raise ConfigError(f"part is {config.part!r}; it must be one of {', '.join(SPLITS)}")
    if config.positions not in POSITIONS:
        raise ConfigError(
            f"positions is {config.positions!r}; it must be one of {', '.join(POSITIONS)}"
        )
    if batch.flat and config.positions == "none":
        raise ConfigError(
            "this torchtitan puts samples one after another, so that without positions tokens would "
            'attend to other samples; use positions="samples" or "documents"'
        )


def titan_batch(sizes: Mapping[str, Any]) -> TitanBatch:
    """What torchtitan asks for: by seq_len and local_batch_size in 0.3.0, by max_context_length and
    num_tokens_per_batch in later ones.

    Raises ConfigError where samples do not fill a batch.
    """
    present = {name: size for name, size in sizes.items() if size is not None}
    if {"seq_len", "local_batch_size"} <= set(present):
        return TitanBatch(length=sizes["seq_len"], rows=sizes["local_batch_size"], flat=False)
    if not {"max_context_length", "num_tokens_per_batch"} <= set(present):
        raise ConfigError(
            "this torchtitan gives data loaders neither seq_len and local_batch_size nor "
            "max_context_length and num_tokens_per_batch; use 0.3.0"
        )
    length, tokens = sizes["max_context_length"], sizes["num_tokens_per_batch"]
    rows, rest = divmod(tokens, length)
    if rest or not rows:
        raise ConfigError(
            f"batches of {tokens} tokens are not whole samples of {length}; make the tokens of a batch "
            "a multiple of the context length"
        )
    return TitanBatch(length=length, rows=rows, flat=True)


def _base_class() -> Any:
    """torchtitan's BaseDataLoader, where its releases or later ones have it."""
    import_framework("torchtitan", "torchtitan")
    is_later = find_spec("torchtitan.components.data") is not None
    name = "data.loader" if is_later else "dataloader"
    return import_module(f"torchtitan.components.{name}").BaseDataLoader


class TitanLoader:
    """What torchtitan asks of a data loader, of a StreamLoader; before its own base class.

    Args:
        config: a StreamDataLoader.Config.
        tokenizer: has the `eos_id` that ends documents, unless the config names one.
        sizes: of a batch, see `titan_batch`; others are not looked at.

    Raises ConfigError for what cannot be served.
    """

    def __init__(
        self, config: Any, *, dp_world_size: int, dp_rank: int, tokenizer: Any = None, **sizes: Any
    ) -> None:
        batch = titan_batch(sizes)
        global_batch_size = config.global_batch_size
        if global_batch_size < 0:  # as torchtitan's own: no accumulation
            global_batch_size = batch.rows * dp_world_size
        self.config = config
        self.flat = batch.flat
        self.loader = StreamLoader(
            titan_data(config, batch, getattr(tokenizer, "eos_id", None)),
            split=config.part,
            micro_batch_size=batch.rows,
            global_batch_size=global_batch_size,
            dp_rank=dp_rank,
            dp_size=dp_world_size,
            prefetch=config.prefetch,
        )

    def __iter__(self) -> Iterator[Pair]:
        return TitanPairs(
            self.loader,
            flat=self.flat,
            positions=self.config.positions != "none",
            repeat=_repeats(self.config),
        )

    def state_dict(self) -> dict[str, Any]:
        """One entry, the same on every rank."""
        return DataState(self.loader).state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Raises StateError for a state of another loader or order, and changes nothing. So it does for
        one of another global batch, where the config leaves that to the number of ranks.
        """
        if self.config.global_batch_size < 0:
            sizes = "training.global_batch_size, and that of the dataloader config, to {size}"
            meant = "global_batch_size of the dataloader config to that of this run"
            check_batch_size(read_state(state_dict), self.loader.dataset, sizes, meant)
        DataState(self.loader).load_state_dict(state_dict)

    def close(self) -> None:
        """End reading and its threads."""
        self.loader.close()


def _config_class(base_config: Any) -> Any:
    """The config of a StreamDataLoader, which torchtitan finds within its class."""

    @dataclass(kw_only=True, slots=True)
    class Config(base_config):  # type: ignore[misc]
        """What is read; sequence length, batch and ranks come from torchtitan."""

        blend: str = ""
        """Datasets, as in DataConfig: a prefix or URL, or "0.7 s3://a/web 0.3 s3://a/code"."""
        part: str = "train"
        """Which split is read: train, valid or test."""
        split: str = "1,0,0"
        """Shares of train, valid and test, cut by sequence."""
        order: str = "stream"
        """"stream", "megatron" or "sequential"."""
        seed: int = 1234
        """Seed of the order."""
        global_batch_size: int = -1
        """training.global_batch_size, which torchtitan does not tell its loaders; -1: one batch
        of every rank."""
        num_samples: int = -1
        """Samples of this part; -1: an endless stream, or one epoch in other orders."""
        positions: str = "documents"
        """Restarting after each document, or each sample; "none": left out."""
        eod_id: int = -1
        """The id that ends documents; -1: the tokenizer's eos_id, or else that of the data's manifests."""
        infinite: bool = True
        """Begin another pass after the last sample."""
        repeat: bool = True
        """The same, in later torchtitans. Either ends the data when it is false."""
        prefetch: int = 4
        """Batches made ahead."""
        settings: dict[str, Any] = field(default_factory=dict)
        """Other fields of DataConfig, such as {"shuffle_lanes": 4096, "storage": {"cache_dir": "/nvme"}}.
        torchtitan writes configs to its logs: credentials belong into the environment."""

    Config.__qualname__ = "StreamDataLoader.Config"
    return Config


__getattr__ = class_on_demand(
    "StreamDataLoader",
    TitanLoader,
    _base_class,
    lambda base: {"Config": _config_class(base.Config)},
)
