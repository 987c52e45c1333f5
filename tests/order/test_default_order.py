"""The order that a config has where nothing names one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streammega import DataConfig, StorageConfig, StreamLoader, build_datasets
from streammega.errors import ConfigError
from streammega.train.config import load_run
from tests.support.builders import data_config, write_dataset, write_run_file

SIZES: dict[str, Any] = {"micro_batch_size": 2, "global_batch_size": 4}
COUNTS = (40, 8, 0)


def config_of(**settings: Any) -> DataConfig:
    return DataConfig(blend="web", sequence_length=16, **settings)


@pytest.mark.guarantee("order-without-name")
def test_the_stream_order_is_the_default_unless_samples_are_counted() -> None:
    assert config_of().order == "stream"
    assert config_of() == config_of(order="stream")
    assert config_of(num_samples=COUNTS).order == "megatron"
    assert config_of(num_samples=COUNTS) == config_of(num_samples=COUNTS, order="megatron")
    for order in ("stream", "sequential"):
        assert config_of(num_samples=COUNTS, order=order).order == order
    assert config_of(order="megatron").order == "megatron"


@pytest.mark.guarantee("order-without-name")
def test_a_copy_keeps_the_order_whatever_it_changes() -> None:
    assert replace(config_of(), num_samples=COUNTS).order == "stream"
    assert replace(config_of(num_samples=COUNTS), num_samples=None).order == "megatron"
    again: Any = {"order": None, "num_samples": COUNTS}
    assert replace(config_of(), **again).order == "megatron"


@pytest.mark.guarantee("order-without-name")
@pytest.mark.parametrize("counts", [None, COUNTS])
def test_a_run_file_without_an_order_has_the_same_default(tmp_path: Path, counts: Any) -> None:
    data = {"blend": ["web"], "order": None, "num_samples": counts}
    path = write_run_file(tmp_path, data=data, train={"train_iters": 4})
    assert load_run(path).data.order == ("megatron" if counts else "stream")
    assert load_run(path, ["data.order=sequential"]).data.order == "sequential"
    assert load_run(path, ["data.num_samples=[40, 8, 0]"]).data.order == "megatron"


@pytest.mark.parametrize(("named", "counts"), [("stream", None), ("megatron", COUNTS)])
def test_a_state_of_a_run_that_named_its_order_goes_on_in_one_that_does_not(
    tmp_path: Path, named: Any, counts: Any
) -> None:
    blend = [write_dataset(tmp_path / "web", [np.arange(200) + n for n in range(20)])]
    settings = {"num_samples": counts}
    configs = [
        data_config(blend, tmp_path, **settings, order=named),
        DataConfig(
            blend=blend, sequence_length=16, storage=StorageConfig(cache_dir=tmp_path), **settings
        ),
    ]
    for first, second in (configs, reversed(configs)):
        with StreamLoader(first, **SIZES) as loader:
            next(loader)
            state = json.loads(json.dumps(loader.state_dict()))
            expected = next(loader)
        with StreamLoader(second, **SIZES) as loader:
            loader.load_state_dict(state)
            assert next(loader)["tokens"].equal(expected["tokens"])


def test_datasets_of_numbered_samples_are_refused_in_the_stream_order(tmp_path: Path) -> None:
    blend = [write_dataset(tmp_path / "web", [np.arange(200) for _ in range(20)])]
    with pytest.raises(ConfigError, match='set order="megatron", or read by a StreamLoader'):
        build_datasets(DataConfig(blend=blend, sequence_length=16), COUNTS)
