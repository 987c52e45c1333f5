"""Megatron-Bridge trains from s3:// and oss:// by its contract for datasets of one's own.

    from streammega.integrations.megatron_bridge import stream_dataset

    dataset, callback = stream_dataset(data_config, micro_batch_size=2)
    config.dataset = dataset
    pretrain(config, forward_step, callbacks=[callback])

Its checkpoints need nothing of ours: the callback goes to the samples that they count, on any
data-parallel size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from streammega.config import ORDERS, DataConfig
from streammega.errors import ConfigError
from streammega.integrations.frameworks import check_phases, import_framework, with_bases
from streammega.integrations.megatron import SplitBatches
from streammega.order.split import SPLITS
from streammega.samples.fields import Batch
from streammega.samples.segments import has_data

BRIDGE = "megatron-bridge"
"""The extra that brings it."""


class BridgeBatches(SplitBatches):
    """What Bridge calls `next` on. Batches of training need `seek` first.

    Has no `save_state`: where there is one, Bridge keeps it by rank, and refuses other ranks.
    """

    _has_position = False

    def __next__(self) -> Batch:
        if self.split == "train" and not self._has_position:
            raise ConfigError(
                "the sample at which training goes on is not set, so every resume would begin at the "
                "first sample: pass the callback of stream_dataset to pretrain(callbacks=[...])"
            )
        return super().__next__()

    def seek(self, consumed_samples: int) -> None:
        """Go on at a sample, counted over all ranks. Raises StateError outside of the data."""
        super().seek(consumed_samples)
        self._has_position = True


def stream_dataset(
    config: DataConfig,
    *,
    micro_batch_size: int,
    eval_micro_batch_size: int | None = None,
    prefetch: int = 4,
) -> tuple[Any, Any]:
    """(a DatasetProvider for `config.dataset`, a Callback for `pretrain`) of Bridge.

    config: what is read; its num_samples are those that Bridge asks for. The stream order needs
    `shuffle_lanes`, a multiple of the global batch. prefetch: micro-batches made ahead of the step. Raises
    ConfigError.
    """
    if ORDERS[config.order].has_lanes and config.shuffle_lanes is None:
        raise ConfigError(
            "the stream order goes on with other ranks only in the lanes it began in; set shuffle_lanes "
            'in the DataConfig, to a multiple of the global batch of at least 512, or order="megatron"'
        )
    check_phases(config, "Megatron", None, one_length=True)
    built: dict[str, BridgeBatches] = {}

    def build(context: Any) -> tuple[BridgeBatches | None, ...]:
        """The batches of train, valid and test that a DatasetBuildContext asks for."""
        sample_counts = (context.train_samples, context.valid_samples, context.test_samples)
        train, valid, test = (count or 0 for count in sample_counts)
        sized = replace(config, num_samples=(train, valid, test))
        dp_rank, dp_size = _data_parallel(context)
        for split, count in zip(SPLITS, sample_counts, strict=True):
            if not count or not has_data(sized, split):
                continue
            eval_size = eval_micro_batch_size or micro_batch_size
            built[split] = BridgeBatches(
                sized,
                split=split,
                micro_batch_size=micro_batch_size if split == "train" else eval_size,
                dp_rank=dp_rank,
                dp_size=dp_size,
                prefetch=prefetch,
            )
        return tuple(built.get(split) for split in SPLITS)

    provider = _provider_class()(seq_length=config.sequence_length)
    # No field: Bridge writes fields to its checkpoints, and a DataConfig may hold credentials. And a
    # function, which copies of the provider share.
    provider.build = build
    callback = import_framework("megatron.bridge.training.callbacks", BRIDGE).Callback
    return provider, with_bases(StreamSeek, callback)(built)


def _data_parallel(context: Any) -> tuple[int, int]:
    """This rank among those that take different samples, and how many they are."""
    groups = getattr(context, "pg_collection", None)
    if groups is not None:  # newer ones tell
        return groups.dp.rank(), groups.dp.size()
    from megatron.core import parallel_state

    return (
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_data_parallel_world_size(),
    )


def _provider_class() -> type:
    try:
        from megatron.bridge.training.config import DatasetProvider
    except ImportError:  # where newer ones have it
        DatasetProvider = import_framework("megatron.bridge.data.base", BRIDGE).DatasetProvider

    @dataclass(kw_only=True)
    class StreamDatasetProvider(DatasetProvider):  # type: ignore[misc]
        """Made by `stream_dataset`."""

        seq_length: int
        dataloader_type: str = "external"
        num_workers: int = 0

        def build_datasets(self, context: Any) -> Any:
            """Micro-batches of train, valid and test of this rank; None where nothing is asked."""
            build = getattr(self, "build", None)
            if build is None:
                raise ConfigError(
                    "a StreamDatasetProvider that was read from a file does not know its data; "
                    "make it by stream_dataset"
                )
            return build(context)

    return StreamDatasetProvider


class StreamSeek:
    """Goes to the samples that Bridge has counted, before the first is asked for: a callback, before
    Bridge's own base class.
    """

    def __init__(self, built: dict[str, BridgeBatches]) -> None:
        self._built = built

    def on_train_start(self, context: Any) -> None:
        """Called when the checkpoint is loaded and training begins."""
        state = context.state.train_state
        for split, consumed in (
            ("train", state.consumed_train_samples),
            ("valid", state.consumed_valid_samples),
        ):
            if split in self._built:
                self._built[split].seek(consumed)
