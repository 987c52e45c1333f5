"""Megatron-Bridge's contracts for datasets and callbacks, with ours in them, and its training step,
killed and gone on with.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from streammega import DataConfig, StorageConfig
from streammega.errors import ConfigError, StateError
from streammega.integrations import megatron_bridge
from streammega.integrations.megatron import MegatronBatches
from tests.integrations.test_megatron_provider import write_datasets
from tests.support.bridge_contract import bridge_folder, contract
from tests.support.bridge_programs import train
from tests.support.gang import Gang
from tests.support.megatron_kills import KILLS, check_killed

if bridge_folder() is None:
    pytest.skip("needs megatron-bridge", allow_module_level=True)


@pytest.fixture
def _contract(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in contract().items():
        monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    prefixes = write_datasets(tmp_path, np.random.default_rng(0), 2)
    return DataConfig(
        blend=prefixes,
        split="8,1,1",
        sequence_length=16,
        eod_id=5,
        storage=StorageConfig(storage_options={"secret": "hidden"}, cache_dir=tmp_path / "idx"),
    )


def context_of(dp_rank: int = 0, dp_size: int = 1, samples: tuple[int, ...] = (80, 16, 0)) -> Any:
    """What Bridge tells of a run."""
    build_context = sys.modules["megatron.bridge.training.config"].DatasetBuildContext
    names = ("train_samples", "valid_samples", "test_samples")
    context = build_context(**dict(zip(names, samples, strict=True)))
    group = SimpleNamespace(rank=lambda: dp_rank, size=lambda: dp_size)
    # newer versions tell the groups; they are frozen
    object.__setattr__(context, "pg_collection", SimpleNamespace(dp=group))
    return context


def begin(callback: Any, train: int, valid: int = 0) -> None:
    state = SimpleNamespace(consumed_train_samples=train, consumed_valid_samples=valid)
    callback.on_train_start(SimpleNamespace(state=SimpleNamespace(train_state=state)))


def rows(batches: Any, count: int) -> list[list[int]]:
    return [row for _ in range(count) for row in next(batches)["tokens"].tolist()]


@pytest.mark.guarantee("megatron-bridge-samples")
@pytest.mark.usefixtures("_contract")
@pytest.mark.parametrize("order", ["megatron", "stream"])
def test_training_goes_on_on_other_ranks_by_bridges_count_alone(
    config: DataConfig, order: Any
) -> None:
    lanes = 1024 if order == "stream" else None
    config = dataclasses.replace(config, order=order, shuffle_lanes=lanes)
    asked = dataclasses.replace(config, num_samples=(80, 16, 0))
    reference = MegatronBatches(asked, split="train", micro_batch_size=2)
    whole = rows(reference, 40)
    provider, callback = megatron_bridge.stream_dataset(config, micro_batch_size=2)
    train, valid, test = provider.build_datasets(context_of())
    assert test is None
    begin(callback, 0)
    assert rows(train, 12) == whole[:24]
    later = []
    for dp_rank in range(2):
        provider, callback = megatron_bridge.stream_dataset(config, micro_batch_size=2)
        train, valid, _ = provider.build_datasets(context_of(dp_rank, 2))
        begin(callback, 24, 4)
        assert valid.consumed_samples == 4
        later += rows(train, 4)
        assert train.consumed_samples == 40
        assert len(rows(valid, 1)) == 2
    assert sorted(later) == sorted(whole[24:40])


@pytest.mark.guarantee("megatron-bridge-samples")
@pytest.mark.usefixtures("_contract")
def test_ranks_are_asked_of_megatron_where_bridge_does_not_tell_them(
    config: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core import parallel_state

    monkeypatch.setattr(parallel_state, "get_data_parallel_rank", lambda: 1)
    monkeypatch.setattr(parallel_state, "get_data_parallel_world_size", lambda: 2)
    context = context_of()
    object.__delattr__(context, "pg_collection")
    provider, callback = megatron_bridge.stream_dataset(config, micro_batch_size=2)
    train, _, _ = provider.build_datasets(context)
    begin(callback, 0)
    asked = dataclasses.replace(config, num_samples=(80, 16, 0))
    reference = MegatronBatches(asked, split="train", micro_batch_size=2, dp_rank=1, dp_size=2)
    assert torch.equal(next(train)["tokens"], next(reference)["tokens"])


@pytest.mark.guarantee("megatron-bridge-samples")
@pytest.mark.usefixtures("_contract")
def test_training_that_nobody_placed_is_refused(config: DataConfig) -> None:
    provider, callback = megatron_bridge.stream_dataset(config, micro_batch_size=2)
    train, valid, _ = provider.build_datasets(context_of())
    with pytest.raises(ConfigError, match="callback of stream_dataset"):
        next(train)
    next(valid)  # of a run that only evaluates
    begin(callback, 0)
    next(train)
    with pytest.raises(StateError):
        begin(callback, 10**6)


@pytest.mark.guarantee("megatron-bridge-samples")
@pytest.mark.usefixtures("_contract")
def test_nothing_of_the_data_goes_into_bridges_files_or_is_lost_by_copies(
    config: DataConfig,
) -> None:
    provider, callback = megatron_bridge.stream_dataset(config, micro_batch_size=2)
    assert provider.dataloader_type == "external"
    assert "hidden" not in repr(provider) + repr(dataclasses.asdict(provider))
    train, _, _ = copy.deepcopy(provider).build_datasets(context_of())
    begin(callback, 8)
    assert train.consumed_samples == 8
    assert not hasattr(train, "save_state")
    read_again = type(provider)(seq_length=16)
    with pytest.raises(ConfigError, match="make it by stream_dataset"):
        read_again.build_datasets(context_of())


@pytest.mark.guarantee("megatron-bridge-samples")
@pytest.mark.usefixtures("_contract")
def test_the_stream_order_asks_for_lanes(config: DataConfig) -> None:
    with pytest.raises(ConfigError, match="set shuffle_lanes"):
        megatron_bridge.stream_dataset(
            dataclasses.replace(config, order="stream"), micro_batch_size=2
        )


@pytest.mark.guarantee("megatron-bridge-run")
@KILLS
def test_a_killed_run_goes_on_exactly(
    gang: Gang, config: DataConfig, tmp_path: Path, order: Any, killed: int, goes_on: int
) -> None:
    """Bridge's iterators, callbacks, training step and counts, on as many ranks or fewer."""
    lanes = 1024 if order == "stream" else None
    masked = dataclasses.replace(
        config, order=order, shuffle_lanes=lanes, fields=[..., "attention_mask"]
    )
    check_killed(gang, tmp_path, killed, goes_on, train, masked)
