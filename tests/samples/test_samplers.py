"""Megatron's samplers, by cases worked out by hand, and datasets that are computed."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streammega import (
    DataConfig,
    IndexedDataset,
    MegatronBatchSampler,
    StorageConfig,
    StreamLoader,
    build_datasets,
)
from streammega.dataset.idx import encode_index
from streammega.errors import ConfigError, StateError
from streammega.storage.open import open_store


@pytest.mark.guarantee("megatronbatchsampler-two-samplers")
def test_batches_of_two_ranks_are_those_counted_by_hand() -> None:
    """11 samples, micro-batches of 2 on 2 ranks, 1 consumed: runs [1..4], [5..8], and the tail [9,
    10].
    """
    assert list(MegatronBatchSampler(11, 1, 2, 0, 2)) == [[1, 2], [5, 6]]
    assert list(MegatronBatchSampler(11, 1, 2, 1, 2)) == [[3, 4], [7, 8]]
    assert list(MegatronBatchSampler(11, 1, 2, 0, 2, drop_last=False)) == [[1, 2], [5, 6], [9, 10]]
    assert list(MegatronBatchSampler(11, 1, 2, 1, 2, drop_last=False)) == [[3, 4], [7, 8], []]


def permutation(size: int, epoch: int) -> list[int]:
    generator = torch.Generator()
    generator.manual_seed(epoch)
    return torch.randperm(size, generator=generator).tolist()


@pytest.mark.guarantee("megatronbatchsampler-two-samplers")
def test_cyclic_with_data_sharding_by_hand() -> None:
    """11 samples, 2 x 2: active 8, buckets of 4.

    Sample 12 is epoch 1, offset 4: each rank has done 2 of its bucket.
    """
    own = permutation(4, 1)[2:]
    assert list(MegatronBatchSampler(11, 12, 2, 0, 2, "cyclic")) == [own]
    assert list(MegatronBatchSampler(11, 12, 2, 1, 2, "cyclic")) == [[4 + n for n in own]]


@pytest.mark.guarantee("megatronbatchsampler-two-samplers")
def test_cyclic_without_data_sharding_by_hand() -> None:
    """The permuted 10 (whole micro-batches of 11 samples), from offset 4 on, dealt to the ranks in
    turn.
    """
    rest = permutation(10, 1)[4:]
    assert list(MegatronBatchSampler(11, 12, 2, 0, 2, "cyclic", data_sharding=False)) == [
        rest[0:4:2]
    ]
    assert list(MegatronBatchSampler(11, 12, 2, 1, 2, "cyclic", data_sharding=False)) == [
        rest[1:4:2]
    ]


@pytest.mark.guarantee("megatronbatchsampler-two-samplers")
def test_cyclic_goes_on_with_the_next_epoch() -> None:
    sampler = MegatronBatchSampler(9, 0, 1, 0, 2, "cyclic")
    first = list(sampler)
    second = list(sampler)
    assert sorted(first) == sorted(second) == [[n] for n in range(4)]
    assert [n for (n,) in second] == permutation(4, 1)
    assert sampler.consumed_samples == 16


def test_samplers_refuse_what_cannot_be() -> None:
    with pytest.raises(StateError, match="nothing is left"):
        MegatronBatchSampler(8, 8, 1, 0, 1)
    with pytest.raises(StateError, match="inside a micro-batch"):
        next(iter(MegatronBatchSampler(11, 3, 2, 0, 2, "cyclic")))
    with pytest.raises(ConfigError, match="less than one micro-batch"):
        MegatronBatchSampler(3, 0, 2, 0, 2)
    bad: Any = "random"
    with pytest.raises(ConfigError, match="not one of"):
        MegatronBatchSampler(3, 0, 1, 0, 1, bad)


def test_a_plain_dataloader_with_the_sampler_gives_the_loaders_batches(config: DataConfig) -> None:
    dataset = build_datasets(config)[0]
    sampler = MegatronBatchSampler(len(dataset), 24, 3, 1, 2)  # type: ignore[arg-type]
    batches: Any = torch.utils.data.DataLoader(dataset, batch_sampler=sampler)  # type: ignore[arg-type]
    with StreamLoader(
        config, micro_batch_size=3, global_batch_size=24, dp_rank=1, dp_size=2
    ) as loader:
        loader.seek(24)
        for theirs, ours, _ in zip(batches, loader, range(8), strict=False):
            assert theirs["tokens"].equal(ours["tokens"])


def test_mock_datasets_serve_every_order_without_any_data(tmp_path: Path) -> None:
    name = "mock://tokens=100000,vocab=500,length=100,eod=7"
    read = IndexedDataset(name, storage=StorageConfig(cache_dir=tmp_path))
    document = np.asarray(read[3])
    assert (len(read), len(document), document[-1]) == (1000, 100, 7)
    assert not (document[:-1] == 7).any()
    assert document.max() < 500
    np.testing.assert_array_equal(read.get(3, 10, 5), document[10:15])
    orders: Any = ("megatron", "stream", "sequential")
    for order in orders:
        config = DataConfig(
            blend=name,
            sequence_length=64,
            order=order,
            num_samples=(200, 0, 0),
            vocab_size=500,
            storage=StorageConfig(cache_dir=tmp_path),
        )
        first = [
            next(iter(StreamLoader(config, micro_batch_size=4, global_batch_size=8)))["tokens"]
            for _ in range(2)
        ]
        assert first[0].equal(first[1])


@given(length=st.integers(1, 9), documents=st.integers(1, 40), data=st.data())
def test_every_part_of_a_mock_index_is_that_of_the_whole(
    length: int, documents: int, data: st.DataObject
) -> None:
    lengths = np.full(documents, length, np.int32)
    whole = b"".join(encode_index(np.dtype("<i4"), lengths, np.arange(documents + 1), None))
    store, key = open_store(
        f"mock://tokens={length * documents},length={length}.idx", StorageConfig()
    )
    assert store.info(key).size == len(whole)
    start = data.draw(st.integers(0, len(whole)))
    stop = data.draw(st.integers(start, len(whole)))
    assert bytes(store.read(key, [(start, stop)])[0]) == whole[start:stop]


def test_a_mock_dataset_of_any_size_is_opened_in_little_memory() -> None:
    config = DataConfig(
        blend="mock://tokens=1000000000000",
        sequence_length=64,
        order="stream",
        num_samples=(8, 0, 0),
    )
    tracemalloc.start()
    try:
        with StreamLoader(config, micro_batch_size=4, global_batch_size=8) as loader:
            assert next(loader)["tokens"].shape == (4, 64)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 200 << 20


@pytest.mark.parametrize(
    "name",
    [
        "mock://tokns=5",
        "mock://tokens=x",
        "mock://tokens=²",
        "mock://tokens=5,length=10",
        "mock://vocab=1",
        "mock://vocab=4294967296",
        "mock://tokens=100,length=1,seed=99999999999999999999",
        "mock://tokens=9999999999999999999999999",
        "mock://tokens=1000000000000,length=1",
    ],
)
def test_mock_names_that_mean_nothing_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="mock://"):
        IndexedDataset(name)
