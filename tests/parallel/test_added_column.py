"""What travels with tokens is one entry, and so is a field: both are then everywhere where batches are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

from streammega import DataConfig, ParallelLayout, StorageConfig, StreamingDataset, StreamLoader
from streammega.config.fields import FIELDS
from streammega.order.sharding import zigzag_bounds
from tests.support.added_column import added, read_with_more
from tests.support.gang import Gang
from tests.support.streams import config_of, write_data
from tools.settings import settings_page

SIZES: Any = {"micro_batch_size": 2, "global_batch_size": 8}
STEPS = 4


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    write_data(tmp_path)
    config = config_of("stream", str(tmp_path), tmp_path / "idx", StorageConfig(), samples=64)
    with added():
        return replace(config, fields=["tokens", "labels", "place_ids"])


def wanted(config: DataConfig, dp_rank: int, dp_size: int) -> list[np.ndarray]:
    """The place of every token by the order alone."""
    dataset = StreamingDataset(config, dp_rank=dp_rank, dp_size=dp_size, **SIZES)
    batches = []
    for position in list(dataset.positions())[:STEPS]:
        rows = []
        for sample in dataset.sample_ids(position):
            found = dataset.samples.locate(np.array([sample]))
            runs = zip(found.start.tolist(), found.stop.tolist(), strict=True)
            rows.append(np.concatenate([np.arange(*run) for run in runs])[: config.sequence_length])
        batches.append(np.stack(rows))
    return batches


def test_a_loader_and_workers_have_it(config: DataConfig) -> None:
    with added():
        expected = wanted(config, 0, 1)
        with StreamLoader(config, **SIZES) as loader:
            for places in expected:
                batch = next(loader)
                assert [*batch] == ["tokens", "labels", "place_ids"]
                np.testing.assert_array_equal(batch["place_ids"].numpy(), places)
        with StreamLoader(config, ids_only=True, **SIZES) as loader:
            assert [*next(loader)] == ["ids", "valid", "place", "dataset_id"]
        dataset = StreamingDataset(config, **SIZES)
        workers: Any = DataLoader(
            dataset, batch_size=None, num_workers=2, multiprocessing_context="fork"
        )
        for batch, places in zip(workers, expected, strict=False):
            np.testing.assert_array_equal(batch["place_ids"].numpy(), places)
        np.testing.assert_array_equal(dataset.batch(0)["place_ids"].numpy(), expected[0])
        assert "| `place_ids` | int64 | where tokens are | first |" in settings_page()


def test_a_field_that_needs_whole_samples_has_no_columns_which_are_of_parts() -> None:
    always = DataConfig(blend="x", sequence_length=8, eod_id=1, reset_position_ids=True)
    for name, field in FIELDS.items():
        assert not (field.columns and field.needs_whole(always)), name


@pytest.mark.parametrize(
    "layout",
    [ParallelLayout(tp=2, cp=2, pp=2), ParallelLayout(cp=2, dp=2), ParallelLayout(tp=2, dp=2)],
    ids=lambda x: f"tp{x.tp}-cp{x.cp}-dp{x.dp}-pp{x.pp}",
)
@pytest.mark.parametrize("documents", [False, True], ids=["parts", "whole"])
def test_ranks_have_it(
    gang: Gang, config: DataConfig, layout: ParallelLayout, documents: bool
) -> None:
    with added():
        if documents:
            names = [*config.field_names, "position_ids"]
            config = replace(config, fields=names, eod_id=1, reset_position_ids=True)
        results = gang.run(layout.world_size, read_with_more, layout, config, SIZES, STEPS)
        for result in results:
            at = result["at"]
            bounds = zigzag_bounds(config.sequence_length, at["cp"], layout.cp)
            for batch, places in zip(
                result["batches"], wanted(config, at["dp"], layout.dp), strict=True
            ):
                assert ("place_ids" in batch) == (at["pp"] == 0)
                if at["pp"] == 0:
                    kept = np.concatenate([places[:, low:high] for low, high in bounds], 1)
                    np.testing.assert_array_equal(batch["place_ids"], kept)
