"""Which dataset a sample is of, and losses by source."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.utils.data
from hypothesis import given, settings
from hypothesis import strategies as st

from streammega import (
    DataConfig,
    ParallelLayout,
    PhaseConfig,
    Ranks,
    StorageConfig,
    StreamingDataset,
    StreamLoader,
    add_losses_by_source,
    get_batch,
    source_names,
)
from streammega.parallel import open_loader
from tests.support.builders import write_dataset
from tests.support.expected import checked_batch
from tests.support.gang import on_ranks

BATCH = 12
SIZES: dict[str, Any] = {"micro_batch_size": 4, "global_batch_size": BATCH}
NAMES = ("web", "code", "math")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    """Of three datasets whose ids tell them apart: below 100, 200 and 300."""
    root = tmp_path_factory.mktemp("sources")
    for number, name in enumerate(NAMES):
        rng = np.random.default_rng(number)
        sizes = rng.integers(5, 80, 80)
        ids = [rng.integers(100 * number, 100 * number + 100, size) for size in sizes]
        write_dataset(root / name, ids)
    return DataConfig(
        blend=[(f"{root}/{name}", weight) for name, weight in zip(NAMES, (3, 2, 1), strict=True)],
        sequence_length=16,
        num_samples=(240, 0, 0),
        split="1,0,0",
        shuffle_lanes=24,
        shuffle_block_bytes=256,
        storage=StorageConfig(cache_dir=root / "cache"),
        fields=[..., "dataset_id"],
    )


def told_by_ids(batch: Any) -> torch.Tensor:
    first_ids: torch.Tensor = batch["tokens"][:, 0]
    return first_ids // 100


def test_no_two_datasets_have_one_name() -> None:
    config = DataConfig(blend=["a/web", "b/web", "c/web-1"], sequence_length=16, order="stream")
    names = source_names(config)
    assert len(set(names)) == 3, names


@pytest.mark.guarantee("samples-tell-dataset")
@pytest.mark.parametrize("order", ["stream", "megatron", "sequential"])
def test_samples_tell_their_dataset_in_every_order(config: DataConfig, order: Any) -> None:
    config = replace(config, order=order, shuffle_lanes=24 if order == "stream" else None)
    if order == "sequential":
        config = replace(config, blend=config.blend[:1])  # type: ignore[index]
    seen = set()
    with StreamLoader(config, **SIZES) as loader:
        for _ in range(20):
            consumed = loader.consumed_samples
            batch = loader.take()
            assert batch["dataset_id"].dtype == torch.int64
            assert batch["dataset_id"].equal(told_by_ids(batch))
            ids = loader.dataset.dataset_ids(consumed)
            assert ids.tolist() == batch["dataset_id"].tolist()
            again = checked_batch(loader.dataset, consumed)["dataset_id"]
            assert again.equal(batch["dataset_id"])
            seen |= set(ids.tolist())
        several = loader.dataset.dataset_ids(np.array([0, 12]))
        assert several.shape == (2, 4)
    assert seen == (set(range(3)) if order != "sequential" else {0})
    with StreamLoader(replace(config, fields=None), **SIZES) as loader:
        assert "dataset_id" not in loader.take()


@pytest.mark.guarantee("samples-tell-dataset")
@pytest.mark.parametrize("order", ["stream", "megatron"])
@pytest.mark.parametrize("cp_rank", [0, 1])
def test_ids_tell_their_dataset_whole_and_in_parts(
    config: DataConfig, order: Any, cp_rank: int
) -> None:
    config = replace(config, order=order, shuffle_lanes=24 if order == "stream" else None)
    parts: dict[str, Any] = {"ids_only": True, "cp_rank": cp_rank, "cp_size": 2}
    with StreamLoader(config, **SIZES) as loader, StreamLoader(config, **SIZES, **parts) as reader:
        for batch, part in zip(loader, reader, strict=True):
            assert part["dataset_id"].equal(batch["dataset_id"])
            assert (part["ids"][:, 0].long() // 100).tolist() == [
                number for number in batch["dataset_id"].tolist() for _ in range(2)
            ]


@pytest.mark.guarantee("samples-tell-dataset")
@on_ranks(4)
def test_ranks_with_a_loss_get_dataset_ids(rank: int, config: DataConfig) -> None:
    config = replace(config, order="stream")
    expected = StreamingDataset(config, **SIZES, dp_size=1)
    for layout in (ParallelLayout(tp=2, pp=2), ParallelLayout(tp=2, cp=2)):
        ranks = Ranks(layout)
        with open_loader(config, ranks, **SIZES) as loader:
            for consumed in range(0, 48, 4):
                batch = get_batch(loader, ranks)
                assert ("dataset_id" in batch) == ranks.is_last_stage
                if ranks.is_last_stage:
                    assert batch["dataset_id"].equal(
                        checked_batch(expected, consumed)["dataset_id"]
                    )


@pytest.mark.guarantee("samples-tell-dataset")
def test_ranks_workers_and_phases_tell_the_same(config: DataConfig) -> None:
    blend: Any = config.blend
    web, code, math = blend
    phases = [PhaseConfig(first_sample=24, blend=[math, web])]
    config = replace(config, order="stream", blend=[web, code], phases=phases)
    alone = StreamingDataset(config, **SIZES)
    expected = [
        checked_batch(alone, consumed)["dataset_id"].tolist() for consumed in range(0, 60, 4)
    ]
    assert {number for ids in expected[6:] for number in ids} == {0, 2}, "by first appearance"
    workers = torch.utils.data.DataLoader(
        StreamingDataset(config, **SIZES), batch_size=None, num_workers=2
    )
    for ids, batch in zip(expected, workers, strict=False):
        assert batch["dataset_id"].tolist() == ids
    by_ranks = []
    for rank in range(2):
        with StreamLoader(
            config, micro_batch_size=2, global_batch_size=BATCH, dp_rank=rank, dp_size=2
        ) as loader:
            by_ranks.append([loader.take()["dataset_id"].tolist() for _ in expected])
    for ids, first, second in zip(expected, *by_ranks, strict=True):
        assert [first[0], second[0], first[1], second[1]] == ids


@pytest.mark.guarantee("samples-tell-dataset")
@settings(max_examples=30)
@given(
    cuts=st.lists(st.integers(1, 23), max_size=4, unique=True),
    masked=st.lists(st.tuples(st.integers(0, 23), st.integers(0, 4)), max_size=20),
)
def test_losses_by_source_do_not_depend_on_how_samples_are_dealt_out(
    cuts: list[int], masked: list[tuple[int, int]]
) -> None:
    """The losses are eighths, so that sums of them are exact."""
    generator = torch.Generator().manual_seed(5)
    losses = torch.randint(0, 80, (24, 5), generator=generator) / 8
    dataset_id = torch.randint(0, 3, (24,), generator=generator)
    mask = torch.ones(24, 5)
    for row, column in masked:
        mask[row, column] = 0.0
        losses[row, column] = float("inf")  # what is not counted may be anything
    sums = torch.zeros(3, 2, dtype=torch.float64)
    bounds = [0, *sorted(cuts), 24]
    for start, stop in zip(bounds, bounds[1:], strict=False):
        add_losses_by_source(sums, dataset_id[start:stop], losses[start:stop], mask[start:stop])
    for number in range(3):
        counted = mask[dataset_id == number] == 1
        of_source = losses[dataset_id == number][counted].double()
        assert sums[number].tolist() == [float(of_source.sum()), int(counted.sum())]


@pytest.mark.guarantee("samples-tell-dataset")
@on_ranks(2)
def test_losses_by_source_are_summed_over_ranks(rank: int) -> None:
    sums = torch.zeros(3, 2, dtype=torch.float64)
    if rank == 0:
        add_losses_by_source(sums, torch.tensor([0, 1]), torch.tensor([[1.0, 2.0], [4.0, 8.0]]))
    else:
        losses, mask = torch.tensor([[3.0, 5.0]]), torch.tensor([[1.0, 0.0]])
        add_losses_by_source(sums, torch.tensor([1]), losses, mask)
    dist.all_reduce(sums)
    assert sums.tolist() == [[3.0, 2.0], [15.0, 3.0], [0.0, 0.0]]
