"""Sizes and positions may be numbers of numpy or torch: what is read, and what is saved, is that of
Python's own.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from streammega import (
    DataConfig,
    FieldsConfig,
    MegatronBatchSampler,
    ParallelLayout,
    PhaseConfig,
    Provenance,
    RankBatches,
    Ranks,
    StorageConfig,
    StreamingDataset,
    StreamLoader,
    build_datasets,
)
from streammega.convert import ConvertOptions
from streammega.errors import ConfigError
from streammega.integrations.megatron import MegatronBatches
from streammega.integrations.webdataset import TextStream
from streammega.parallel import open_loader
from streammega.train.config import ModelConfig, ParallelConfig, TrainConfig
from tests.support.builders import data_config
from tests.support.expected import checked_batch

Kind = Callable[[int], Any]
KINDS: dict[str, Kind] = {
    "numpy": np.int64,
    "product": lambda number: np.prod([number, 1]),
    "array": np.array,
    "unsigned": np.uint8,
    "torch": torch.tensor,
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.fixture
def stream(pair: str, tmp_path: Path) -> DataConfig:
    return data_config([pair], tmp_path, order="stream", shuffle_lanes=16)


def saved(state: Any) -> Any:
    """A state as torch's checkpoints keep it, which must be JSON too."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert json.loads(json.dumps(state)) == loaded
    return loaded


def other_numbers(value: Any, path: str = "") -> Iterator[str]:
    """Where settings have a number of another kind than Python's."""
    if is_dataclass(value):
        for item in fields(value):
            yield from other_numbers(getattr(value, item.name), f"{path}.{item.name}")
    elif isinstance(value, np.generic | np.ndarray | torch.Tensor):
        yield path
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from other_numbers(item, f"{path}[{number}]")


def opened(config: DataConfig, way: str, n: Kind) -> Any:
    """Something that reads, with each of its numbers made by `n`."""
    sizes: Any = {"micro_batch_size": n(2), "global_batch_size": n(8)}
    ranks: Any = {"dp_rank": n(1), "dp_size": n(2)}
    ramp: Any = {"rampup_batch_size": (n(4), n(4), n(16))}
    if way == "loader":
        return StreamLoader(config, **sizes, **ranks, **ramp, prefetch=n(2), log_every=n(3))
    if way == "ids":
        parts: Any = {"cp_rank": n(1), "cp_size": n(2)}
        return StreamLoader(config, **sizes, **ranks, ids_only=True, **parts)
    if way == "dataset":
        return StreamingDataset(config, **sizes, **ranks, **ramp)
    if way == "megatron":
        return MegatronBatches(
            config, split="train", micro_batch_size=n(2), **ranks, consumed_samples=n(8)
        )
    if way == "ranks":
        group = Ranks(ParallelLayout(tp=n(1), dp=n(1)))
        return RankBatches(open_loader(config, group, **sizes, **ramp), group, ahead=n(1))
    fields = FieldsConfig(sequence_length=n(16), eod_id=n(0))
    names = [f"shard-{number}" for number in range(8)]
    texts: Any = {"texts": lambda name: [f"{name} has text number {n}" for n in range(40)]}
    return TextStream(
        names,
        lambda text: list(text.encode()),
        fields,
        **sizes,
        **ranks,
        lanes=n(4),
        seed=n(3),
        **texts,
    )


@pytest.mark.guarantee("numbers-plain")
@pytest.mark.parametrize("way", ["loader", "ids", "dataset", "megatron", "ranks", "texts"])
def test_what_is_read_and_saved_is_that_of_pythons_own_numbers(
    stream: DataConfig, way: str, kind: Kind
) -> None:
    def read(n: Kind, state: Any = None) -> tuple[list[Any], Any]:
        reader = opened(stream, way, n)
        load = getattr(reader, "load_state_dict", None) or reader.restore_state
        save = getattr(reader, "state_dict", None) or reader.save_state
        if state is not None:
            load(state)
        batches = iter(reader)
        taken = [next(batches) for _ in range(3)]
        got = [{name: field.tolist() for name, field in batch.items()} for batch in taken]
        state = saved(save())
        if way != "dataset":
            reader.close()
        return got, state

    expected, state = read(int)
    assert read(kind) == (expected, state)
    assert read(kind, state) == read(int, state)


@pytest.mark.guarantee("numbers-plain")
def test_positions_may_be_numbers_of_arrays(stream: DataConfig, kind: Kind) -> None:
    sizes: Any = {"micro_batch_size": 2, "global_batch_size": 8}
    with StreamLoader(stream, **sizes) as loader:
        dataset = loader.dataset
        expected = dataset.state_at(16)
        assert saved(dataset.state_at(kind(16))) == expected
        loader.seek(kind(16))
        assert saved(loader.state_dict()) == expected
        iter(dataset)
        assert saved(dataset.state_dict(num_batches=kind(4)))["consumed_samples"] == 24
        dataset.advance(kind(24))
        assert saved(dataset.state_dict())["consumed_samples"] == 26
        assert dataset.batch(kind(16))["tokens"].equal(dataset.batch(16)["tokens"])
        step = dataset.steps.schedule.samples_of_step(kind(3))
        answers = (step.start, step.stop, dataset.tokens_before(kind(16)))
        assert answers == (16, 24, 16 * 16)
        assert list(other_numbers(answers)) == []


@pytest.mark.guarantee("numbers-plain")
def test_what_a_loader_keeps_of_its_sizes_are_pythons_own_numbers(
    stream: DataConfig, kind: Kind
) -> None:
    n = kind
    later = PhaseConfig(first_step=n(5), sequence_length=n(8), shuffle_lanes=n(32))
    sized = replace(
        stream,
        sequence_length=n(16),
        seed=n(3),
        shuffle_lanes=n(16),
        shuffle_block_bytes=n(64),
        exclude_samples=[(n(8), n(16))],
        phases=[PhaseConfig(first_sample=n(24), global_batch_size=n(16)), later],
    )
    with StreamLoader(
        sized, micro_batch_size=n(2), global_batch_size=n(8), dp_rank=n(1), dp_size=n(2)
    ) as loader:
        dataset = loader.dataset
        sizes = (
            dataset.micro_batch_size,
            dataset.global_batch_size,
            dataset.dp_rank,
            dataset.dp_size,
        )
        assert sizes == (2, 8, 1, 2)
        orders = [
            (order.sequence_length, order.lanes, order.first_sample, order.shuffle_block_bytes)
            for segment in dataset.samples.segments
            if (order := segment.order) is not None
        ]
        assert orders == [(16, 16, 0, 64), (16, 16, 24, 64), (8, 32, 56, 64)]
        schedule = dataset.steps.schedule
        kept = (sizes, orders, schedule, schedule.stages, dataset.config)
        assert list(other_numbers(kept)) == []
        next(loader)
        assert saved(loader.state_dict())["consumed_samples"] == 4


@pytest.mark.guarantee("numbers-plain")
def test_settings_are_pythons_own_numbers_from_their_check_on(pair: str, kind: Kind) -> None:
    n = kind
    array: Any = np.array
    wide: Any = np.int64
    narrow: Any = np.float32
    half: Any = np.float64(0.5)
    of_torch: Any = torch.tensor(0.5)
    settings = (
        DataConfig(
            blend=[(pair, half), (pair, of_torch)],
            sequence_length=n(16), eod_id=n(0), pad_id=n(9), vocab_size=n(100), seed=n(3), order="stream",
            num_samples=(n(80), n(0), n(0)), shuffle_lanes=n(16), shuffle_block_bytes=n(64),
            exclude_samples=array([[8, 24], [32, 40]]),
            exclude_documents=[(n(5), ["web#1"])],
            storage=StorageConfig(memory_bytes=wide(1 << 20), request_timeout=narrow(5)),
        ),
        PhaseConfig(first_sample=n(16), global_batch_size=n(8), sequence_length=n(8), shuffle_lanes=n(8)),
        ParallelLayout(tp=n(2), cp=n(1), ep=n(1), dp=n(4), pp=n(1), etp=n(2)),
        ParallelLayout.of_world(n(8), tp=n(2)),
        ConvertOptions(max_tokens=n(9), shuffle_seed=n(3), eod_id=n(0), shard_bytes=wide(1 << 20)),
        ModelConfig(vocab_size=n(100), dim=n(16), layers=n(1), heads=n(2)),
        ParallelConfig(tp=n(2), cp=n(1), pp=n(1)),
        TrainConfig(
            train_iters=n(4), micro_batch_size=n(2), global_batch_size=n(8), lr=np.float64(1e-3),
            rampup_batch_size=(n(4), n(4), n(16)), weight_decay=of_torch, out_dir="run",
        ),
    )  # fmt: skip
    for made in settings:
        assert list(other_numbers(made, type(made).__name__)) == []
    ranges: Any = settings[0].exclude_samples
    assert ranges == ((8, 24), (32, 40))


@pytest.mark.guarantee("numbers-plain")
def test_a_run_with_excluded_samples_of_an_array_resumes(stream: DataConfig) -> None:
    sizes: Any = {"micro_batch_size": 2, "global_batch_size": 8}
    ranges: Any = np.array([[8, 24]])
    config = replace(stream, exclude_samples=ranges)
    with StreamLoader(config, **sizes) as loader:
        for _ in range(4):
            next(loader)
        state = saved(loader.state_dict())
        assert next(loader)["tokens"].equal(checked_batch(loader.dataset, 24)["tokens"])
    with StreamLoader(replace(stream, exclude_samples=[(8, 24)]), **sizes) as loader:
        loader.load_state_dict(state)
        assert next(loader)["tokens"].equal(checked_batch(loader.dataset, 24)["tokens"])


@pytest.mark.guarantee("numbers-plain")
def test_indices_and_samplers_of_other_numbers_are_the_same(
    stream: DataConfig, pair: str, tmp_path: Path, kind: Kind
) -> None:
    sampler = MegatronBatchSampler(*map(kind, (100, 8, 2, 1, 2)))
    assert list(sampler) == list(MegatronBatchSampler(100, 8, 2, 1, 2))
    config = data_config([pair], tmp_path)
    train, _, _ = build_datasets(config, (kind(80), kind(0), kind(0)))
    expected, _, _ = build_datasets(config, (80, 0, 0))
    assert train is not None
    assert expected is not None
    assert not isinstance(train, list)
    assert not isinstance(expected, list)
    assert json.dumps(train.identity()) == json.dumps(expected.identity())
    config = replace(stream, shuffle_lanes=None)
    lanes = [Provenance(config, global_batch_size=size).source.lanes for size in (kind(8), 8)]
    assert json.dumps(lanes[0]) == json.dumps(lanes[1])
    provenance = Provenance(config, global_batch_size=8)
    (traced,) = provenance.trace(kind(7), tokens=(kind(1), kind(4)))
    assert [traced] == provenance.trace(7, tokens=(1, 4))
    assert list(other_numbers(traced)) == []
    uses = list(provenance.uses([traced.runs[0].name], start=kind(0), end=kind(40)))
    assert uses == list(provenance.uses([traced.runs[0].name], start=0, end=40))
    assert list(other_numbers(uses)) == []


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"micro_batch_size": np.float64(2)}, "micro_batch_size is 2.0; it must be a whole number"),
        ({"micro_batch_size": True}, "micro_batch_size is True; it must be a whole number"),
        ({"global_batch_size": torch.tensor([8, 8])}, r"global_batch_size is \[8, 8\]; it must be"),
        ({"dp_rank": 0, "dp_size": "2"}, "dp_size is '2'; it must be a whole number"),
        ({"dp_rank": 0.0, "dp_size": 2}, "dp_rank is 0.0; it must be a whole number"),
        (
            {"rampup_batch_size": (4, 4.5, 16)},
            "rampup_batch_size is 4.5; it must be a whole number",
        ),
        ({"rampup_batch_size": 4}, "rampup_batch_size is 4; it takes three numbers"),
        ({"cp_rank": 0.5, "cp_size": 2, "ids_only": True}, "cp_rank is 0.5; it must be a whole"),
        ({"log_every": -1}, "log_every is -1; it must be a whole number, at least 0"),
    ],
)
def test_what_is_no_whole_number_is_refused(
    stream: DataConfig, sizes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        StreamLoader(stream, **({"micro_batch_size": 2, "global_batch_size": 8} | sizes))


@pytest.mark.parametrize("name", ["exclude_samples", "phases", "fields"])
def test_a_list_that_can_be_read_once_is_refused(pair: str, name: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name} is .*; it must be a list"):
        once: Any = {name: iter(())}
        DataConfig(blend=[pair], sequence_length=16, order="stream", **once)
