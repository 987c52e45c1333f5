"""Evaluation: without `num_samples` each sample of its split is read once, in any order, on any number
of ranks; settings of training leave it alone.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streammega import DataConfig, PhaseConfig, StorageConfig, StreamingDataset, StreamLoader
from streammega.config import ORDERS
from streammega.errors import ConfigError
from streammega.order.split import split_bounds
from tests.support.builders import write_dataset
from tests.support.examples import examples
from tools.bench.object_server import Running

LENGTH = 8
GLOBAL = 12
DOCUMENTS = 13
TOKENS = {"web": 3_111, "code": 407, "tiny": 65}
"""Tokens of each dataset. No token has the id of another, in any of them."""


def write_datasets(folder: Path) -> list[str]:
    prefixes = []
    first = 0
    for name, tokens in TOKENS.items():
        ids = np.arange(first, first + tokens)
        prefixes.append(write_dataset(folder / name, np.array_split(ids, DOCUMENTS), np.int32))
        first += tokens
    return prefixes


@pytest.fixture
def blend(tmp_path: Path) -> list[tuple[str, float]]:
    return list(zip(write_datasets(tmp_path), (0.2, 0.7, 0.1), strict=True))


def data_of(order: Any, tmp_path: Path, **options: Any) -> DataConfig:
    return DataConfig(
        sequence_length=LENGTH,
        split="60,40,0",
        order=order,
        storage=StorageConfig(cache_dir=tmp_path / "cache"),
        **options,
    )


def read_by_ranks(config: DataConfig, dp_size: int, micro: int, size: int = GLOBAL) -> torch.Tensor:
    """The tokens of all samples that an evaluation reads, [samples, S]."""
    rows = []
    for rank in range(dp_size):
        sizes: dict[str, Any] = {"micro_batch_size": micro, "global_batch_size": size}
        with StreamLoader(config, split="valid", dp_rank=rank, dp_size=dp_size, **sizes) as loader:
            rows += [batch["tokens"] for batch in loader]
            assert sum(1 for _ in loader) == len(loader)  # again from the first sample
    return torch.cat(rows)


def expected_samples(names: list[str], shares: str) -> int:
    """How many samples the valid split of datasets has: all but what is too short at each end."""
    begin, end = split_bounds(shares, DOCUMENTS)["valid"] or (0, 0)
    tokens = [
        sum(len(part) for part in np.array_split(np.arange(TOKENS[name]), DOCUMENTS)[begin:end])
        for name in names
    ]
    return sum((count - 1) // LENGTH for count in tokens)


@pytest.mark.many_examples
@pytest.mark.guarantee("evaluation-reads-once")
@pytest.mark.parametrize("order", list(ORDERS))
@pytest.mark.parametrize("form", ["alone", "blended", "without weights", "blend_per_split"])
def test_an_evaluation_reads_each_sample_once_and_ends(
    blend: Any, tmp_path: Path, order: Any, form: str
) -> None:
    per_split = [blend[0][0], blend[1:], None]
    names, options = {
        "alone": (["web"], {"blend": blend[0][0]}),
        "blended": (list(TOKENS), {"blend": blend}),
        "without weights": (list(TOKENS), {"blend": [prefix for prefix, _ in blend]}),
        "blend_per_split": (["code", "tiny"], {"blend_per_split": per_split}),
    }[form]
    config = data_of(order, tmp_path, **options)
    samples = read_by_ranks(config, 1, 1, 1)
    shares = "0,1,0" if form == "blend_per_split" else config.split
    assert len(samples) == expected_samples(names, shares)
    assert set(Counter(samples.flatten().tolist()).values()) == {1}
    whole = read_by_ranks(config, 1, GLOBAL)
    assert len(whole) == len(samples) // GLOBAL * GLOBAL
    assert set(Counter(whole.flatten().tolist()).values()) == {1}
    ranks = ((3, 2), (1, 4), (2, 3), (4, 1), (12, 1))
    for dp_size, micro in ranks if form == "alone" else ranks[: examples(1)]:
        read = read_by_ranks(config, dp_size, micro)
        assert sorted(read[:, 0].tolist()) == sorted(whole[:, 0].tolist())


@pytest.mark.guarantee("evaluation-reads-once")
@given(
    sizes=st.lists(st.integers(9, 5_000), min_size=1, max_size=4),
    length=st.sampled_from([1, 7, 8]),
    lanes=st.sampled_from([8, 24, 512]),
    extra=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_the_stream_order_has_an_exact_epoch_for_evaluation(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: list[int],
    length: int,
    lanes: int,
    extra: bool,
) -> None:
    folder = tmp_path_factory.mktemp("data")
    prefixes = [
        write_dataset(folder / f"p{number}", [np.arange(size)], np.int32)
        for number, size in enumerate(sizes)
    ]
    config = DataConfig(
        blend_per_split=[None, prefixes, None],
        order="stream",
        sequence_length=length,
        add_extra_token=extra,
        shuffle_lanes=lanes,
        storage=StorageConfig(cache_dir=folder / "cache"),
    )
    source = StreamingDataset(
        config, split="valid", micro_batch_size=1, global_batch_size=1
    ).samples
    assert source.num_samples == sum((size - extra) // length for size in sizes)
    extents = source.locate(np.arange(source.num_samples))
    for number, size in enumerate(sizes):
        here = extents.dataset == number
        starts = np.sort(extents.start[here])
        assert (extents.stop[here] - extents.start[here] == length + extra).all()
        assert len(starts) == (size - extra) // length
        assert (np.diff(starts) == length).all()


@pytest.mark.guarantee("evaluation-reads-once")
def test_an_evaluation_from_a_bucket_reads_each_sample_once_by_blocks(
    server: Running, tmp_path: Path
) -> None:
    local = DataConfig(
        blend=write_datasets(tmp_path / "local"),
        sequence_length=LENGTH,
        split="0,1,0",
        order="stream",
        shuffle_lanes=GLOBAL,
        storage=StorageConfig(cache_dir=tmp_path / "cache"),
    )
    root = server.root / "evaluation"
    write_datasets(root)
    remote = replace(
        local,
        blend=[f"s3://evaluation/{name}" for name in TOKENS],
        storage=StorageConfig(storage_options=server.storage_options),
    )
    before = server.counts()["requests"]
    read = read_by_ranks(remote, 2, 2)
    assert server.counts()["requests"] - before < len(read) // 2
    assert torch.equal(read, read_by_ranks(local, 2, 2))


@pytest.mark.parametrize("order", list(ORDERS))
def test_samples_that_fill_no_global_batch_are_counted_once(
    blend: Any, tmp_path: Path, order: Any, caplog: pytest.LogCaptureFixture
) -> None:
    config = data_of(order, tmp_path, blend=blend[0][0])
    with caplog.at_level(logging.WARNING):
        for rank in range(2):
            sizes: dict[str, Any] = {"micro_batch_size": 5, "global_batch_size": 100}
            with StreamLoader(config, split="valid", dp_rank=rank, dp_size=2, **sizes) as loader:
                _ = [sum(1 for _ in loader) for _ in range(2)]
    (said,) = [record.getMessage() for record in caplog.records]
    assert "valid: 49 of 149 samples are not read" in said
    few = r"valid holds 149 samples, less than one global batch of 150; .* a larger share in split"
    with pytest.raises(ConfigError, match=few):
        StreamLoader(config, split="valid", micro_batch_size=1, global_batch_size=150)


@pytest.mark.parametrize("order", list(ORDERS))
def test_num_samples_ends_or_repeats_an_evaluation_as_before(
    blend: Any, tmp_path: Path, order: Any
) -> None:
    for count in (24, 600):
        config = data_of(order, tmp_path, blend=blend, num_samples=(24, count, 0))
        assert len(read_by_ranks(config, 1, 4)) == count


@pytest.mark.guarantee("settings-of-training")
@pytest.mark.parametrize("order", list(ORDERS))
@pytest.mark.parametrize("num_samples", [None, (480, 96, 0)])
def test_settings_of_training_leave_validation_alone(
    blend: Any, tmp_path: Path, order: Any, num_samples: Any
) -> None:
    if num_samples is None and order == "megatron":
        num_samples = (480, 96, 0)
    plain = data_of(order, tmp_path, blend=blend, num_samples=num_samples, eod_id=5_000)
    of_training: dict[str, Any] = {
        "exclude_samples": [(8, 24)],
        "exclude_documents": ["web#9", "web#10", "web#11", "web#12"],
    }
    if order == "stream":
        of_training["phases"] = [PhaseConfig(first_sample=24, sequence_length=4, blend=blend[:1])]
    changed = replace(plain, **of_training)
    for micro, size in ((4, 12), (4, 20)):  # ranges of other batches cut none of these
        sizes: dict[str, Any] = {"micro_batch_size": micro, "global_batch_size": size}
        batches = []
        for config in (plain, changed):
            dataset = StreamingDataset(config, split="valid", **sizes)
            batches.append(list(dataset))
            assert len(batches[-1]) == len(dataset)
        for one, other in zip(*batches, strict=True):
            assert torch.equal(one["tokens"], other["tokens"])
            assert torch.equal(one["labels"], other["labels"])
