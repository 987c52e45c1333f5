"""Small datasets of a bucket: fetched once, in large reads, and kept in memory."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streammega import DataConfig, PhaseConfig, StorageConfig, StreamLoader
from streammega.loading.planner import PIECE_BYTES, Resident
from tests.support.builders import write_dataset
from tools.bench.object_server import Running

LENGTH = 32
SIZES: dict[str, Any] = {"micro_batch_size": 4, "global_batch_size": 8}
TOKENS = {"tiny": 700, "small": 60_000, "larger": 6_000_000}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, _object_server: Running) -> tuple[Path, Path]:
    """(a local folder, the same in the bucket)."""
    local = tmp_path_factory.mktemp("local")
    remote = _object_server.root / "small"
    rng = np.random.default_rng(3)
    for name, tokens in TOKENS.items():
        documents = np.array_split(rng.integers(0, 60_000, tokens).astype(np.uint16), 5)
        for folder in (local, remote):
            write_dataset(folder / name, documents)
    return local, remote


def config_of(root: str, names: list[str], server: Running, tmp_path: Path, **options: Any) -> Any:
    settings: dict[str, Any] = {"sequence_length": LENGTH, "order": "stream"}
    storage = StorageConfig(storage_options=server.storage_options, **options.pop("storage", {}))
    blend = [
        (f"{root}/{name}", weight) for name, weight in zip(names, (0.5, 0.3, 0.2), strict=False)
    ]
    return DataConfig(
        blend=blend, storage=storage.changed(cache_dir=tmp_path / "idx"), **settings | options
    )


def some_batches(
    config: DataConfig, count: int, **options: Any
) -> tuple[list[Any], dict[str, Any]]:
    """The first batches of a loader, and its statistics."""
    with StreamLoader(config, **SIZES, **options) as loader:
        batches = [next(loader) for _ in range(count)]
        return batches, loader.stats()


@pytest.mark.guarantee("small-data-read-once")
@pytest.mark.parametrize("order", ["stream", "megatron"])
@pytest.mark.parametrize("names", [["tiny"], ["small", "tiny"], ["larger", "small", "tiny"]])
def test_a_small_dataset_is_fetched_once_over_all_epochs_by_every_rank(
    folders: tuple[Path, Path], server: Running, tmp_path: Path, order: Any, names: list[str]
) -> None:
    local, _ = folders
    options: dict[str, Any] = {"order": order, "num_samples": (8_000, 0, 0)}
    here = config_of(str(local), names, server, tmp_path, **options)
    there = config_of("s3://small", names, server, tmp_path, **options)
    size = 2 * sum(TOKENS[name] for name in names)
    for dp_rank in range(2):
        ranks = {"dp_rank": dp_rank, "dp_size": 2}
        expected, _ = some_batches(here, 1_000, **ranks)
        batches, stats = some_batches(there, 1_000, **ranks)
        assert stats["requests"] <= len(names) + size // PIECE_BYTES
        assert stats["fetched_bytes"] <= size + size // PIECE_BYTES * 2 * (LENGTH + 1)
        for one, other in zip(batches, expected, strict=True):
            assert torch.equal(one["tokens"], other["tokens"])
            assert torch.equal(one["labels"], other["labels"])


def test_a_few_samples_are_fetched_without_the_rest(
    folders: tuple[Path, Path], server: Running, tmp_path: Path
) -> None:
    """An evaluation of a few batches reads them at every pass."""
    names = ["larger"]
    config = config_of("s3://small", names, server, tmp_path, num_samples=(16, 0, 0))
    batches, stats = some_batches(config, 2)
    local, _ = folders
    expected, _ = some_batches(
        config_of(str(local), names, server, tmp_path, num_samples=(16, 0, 0)), 2
    )
    assert stats["fetched_bytes"] < 2 * TOKENS["larger"] / 4
    for one, other in zip(batches, expected, strict=True):
        assert torch.equal(one["tokens"], other["tokens"])


@pytest.mark.guarantee("small-data-read-once")
def test_parts_of_samples_phases_and_a_cache_read_the_same(
    folders: tuple[Path, Path], server: Running, tmp_path: Path
) -> None:
    local, _ = folders
    phases = [PhaseConfig(first_sample=400, sequence_length=2 * LENGTH)]
    for storage in ({}, {"cache_max_bytes": 1 << 30}):
        for options in ({}, {"ids_only": True, "cp_rank": 1, "cp_size": 2}):
            loaders = [
                some_batches(
                    config_of(
                        root, ["small", "tiny"], server, tmp_path, phases=phases, storage=storage
                    ),
                    200,
                    **options,
                )[0]
                for root in (str(local), "s3://small")
            ]
            for one, other in zip(*loaders, strict=True):
                assert list(one) == list(other)
                assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.guarantee("small-data-read-once")
def test_without_room_samples_are_read_one_by_one_and_that_is_said_once(
    folders: tuple[Path, Path], server: Running, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    local, _ = folders
    options: dict[str, Any] = {"shuffle_lanes": 8_192}  # 22 samples of "larger" a lane
    here = config_of(str(local), ["larger"], server, tmp_path, **options)
    there = config_of("s3://small", ["larger"], server, tmp_path, **options)
    little = replace(there, storage=replace(there.storage, memory_bytes=6_000_000))
    expected, _ = some_batches(here, 100)
    with caplog.at_level(logging.WARNING):
        for config, most in ((there, TOKENS["larger"] * 2 + 66), (little, 200_000)):
            batches, stats = some_batches(config, 100)
            assert stats["fetched_bytes"] <= most
            for one, other in zip(batches, expected, strict=True):
                assert torch.equal(one["tokens"], other["tokens"])
    (said,) = [record.getMessage() for record in caplog.records]
    assert "1 of the datasets have fewer than 32 samples for each lane" in said
    assert "in requests of 66 bytes" in said


@given(
    start=st.integers(0, 100),
    size=st.integers(1, 3 * PIECE_BYTES),
    row_bytes=st.integers(1, 100),
    data=st.data(),
)
def test_every_row_is_within_the_piece_that_it_begins_in(
    start: int, size: int, row_bytes: int, data: st.DataObject
) -> None:
    resident = Resident(
        start=np.array([0, start]),
        stop=np.array([0, start + size]),
        row_bytes=np.array([1, row_bytes]),
    )
    assert resident.pieces().tolist() == [0, -(-size // PIECE_BYTES)]
    first = data.draw(st.integers(start, start + size - 1))
    last = min(first + data.draw(st.integers(1, row_bytes)), start + size)
    low, high = resident.piece(1, (first - start) // PIECE_BYTES)
    assert low <= first < last <= high
