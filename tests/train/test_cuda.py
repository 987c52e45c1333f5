"""What only a CUDA device can show: batches that were copied asynchronously and dropped arrive as
they were.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from streammega import (
    DataConfig,
    ParallelLayout,
    RankBatches,
    Ranks,
    StorageConfig,
    StreamingDataset,
    StreamLoader,
)
from streammega.parallel import open_loader
from streammega.samples.fields import Batch, batch_fields
from tests.support.builders import write_dataset
from tests.support.cuda_support import NEEDS_CUDA
from tests.support.device_fields import device_fields

pytestmark = NEEDS_CUDA

BATCHES = 96
AT_ONCE = 24
"""Micro-batches whose copies wait behind one long kernel."""
CYCLES = 200_000_000
"""Of the long kernel: a tenth of a second and more."""
FIELDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "documents": {
        "reset_position_ids": True,
        "reset_attention_mask": True,
        "eod_mask_loss": True,
        "fields": [..., "attention_mask"],
    },
}


@pytest.fixture(params=FIELDS)
def data(request: pytest.FixtureRequest, tmp_path: Path) -> DataConfig:
    rng = np.random.default_rng(3)
    write_dataset(
        tmp_path / "d", [rng.integers(0, 300, 20_000).astype(np.uint16) for _ in range(100)]
    )
    config = DataConfig(
        blend=[str(tmp_path / "d")],
        sequence_length=512,
        num_samples=(8 * BATCHES, 0, 0),
        eod_id=7,
        storage=StorageConfig(cache_dir=tmp_path / "c"),
    )
    return replace(config, **FIELDS[request.param])


def copy_and_drop(batches: Iterator[Batch]) -> Iterator[Batch]:
    """The batches on the device, copied behind a long kernel, their originals dropped before it
    ended and many others made.
    """
    while True:
        torch.cuda._sleep(CYCLES)
        copies = []
        for batch in itertools.islice(batches, AT_ONCE):
            assert all(field.is_pinned() for field in batch.values())
            copies.append(
                {name: field.to("cuda", non_blocking=True) for name, field in batch.items()}
            )
            del batch
        for _ in range(4):  # more are made in what the dropped ones lay in, if that was given away
            next(batches, None)
        torch.cuda.synchronize()
        if not copies:
            return
        yield from copies


def numbers(count: int) -> Iterator[int]:
    """The micro-batches that `copy_and_drop` yields."""
    return (n for n in range(count) if n % (AT_ONCE + 4) < AT_ONCE)


def assert_equal(got: Batch, expected: Batch) -> None:
    assert set(got) == set(expected)
    for name, field in expected.items():
        assert torch.equal(got[name].cpu(), field), name


@pytest.mark.guarantee("batch-may-dropped")
@pytest.mark.parametrize("micro", [1, 4])
@pytest.mark.parametrize("ids_only", [False, True])
def test_a_loaders_batches_may_be_dropped_after_an_asynchronous_copy(
    data: DataConfig, micro: int, ids_only: bool
) -> None:
    sizes: Any = {"micro_batch_size": micro, "global_batch_size": micro}
    truth = StreamingDataset(data, **sizes)
    with StreamLoader(data, **sizes, ids_only=ids_only) as loader:
        compared = 0
        for number, got in zip(
            numbers(BATCHES), copy_and_drop(itertools.islice(loader, BATCHES)), strict=True
        ):
            expected = truth.batch(number * micro)
            if ids_only:
                got = {name: field.cpu() for name, field in got.items()}
                got = batch_fields(got["ids"], got["valid"], data, bounds=True)
            assert_equal(got, expected)
            compared += 1
    assert compared > BATCHES // 2


@pytest.mark.guarantee("batch-may-dropped")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataloader_that_pins_hands_out_batches_that_may_be_dropped(
    data: DataConfig, workers: int
) -> None:
    dataset = StreamingDataset(data, micro_batch_size=4, global_batch_size=4)
    options: Any = {"multiprocessing_context": "spawn"} if workers else {}
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=None, pin_memory=True, num_workers=workers, **options
    )
    truth = StreamingDataset(data, micro_batch_size=4, global_batch_size=4)
    for number, got in zip(
        numbers(BATCHES), copy_and_drop(itertools.islice(iter(loader), BATCHES)), strict=True
    ):
        assert_equal(got, truth.batch(number * 4))


@pytest.mark.guarantee("batch-may-dropped")
@pytest.mark.parametrize("ahead", [1, 8])
def test_rank_batches_arrive_as_they_were_made_on_the_cpu(data: DataConfig, ahead: int) -> None:
    ranks = Ranks(ParallelLayout())
    sizes: Any = {"micro_batch_size": 4, "global_batch_size": 4}
    truth = StreamingDataset(data, **sizes)
    batches = RankBatches(open_loader(data, ranks, **sizes), ranks, "cuda", ahead=ahead)
    kept = []
    for number, batch in enumerate(itertools.islice(batches, BATCHES)):
        if number % AT_ONCE == 0:
            torch.cuda._sleep(CYCLES)
        # a kernel that reads it, behind the long one
        kept.append({name: field * 1 for name, field in batch.items()})
    torch.cuda.synchronize()
    batches.close()
    for number, got in enumerate(kept):
        expected = truth.batch(4 * number)
        assert_equal(
            {
                name: field.bool() if name == "attention_mask" else field
                for name, field in got.items()
            },
            expected,
        )


@pytest.mark.guarantee("fields-made-device")
def test_fields_made_on_the_device_are_those_made_on_the_cpu(data: DataConfig) -> None:
    ids = torch.randint(0, 300, (4, 513), dtype=torch.int32)
    valid = torch.tensor([513, 512, 0, 77])
    assert_equal(
        batch_fields(ids.cuda(), valid, data, bounds=True),
        batch_fields(ids, valid, data, bounds=True),
    )
    assert_equal(
        device_fields(ids.cuda(), valid.cuda(), data), batch_fields(ids, valid, data, bounds=True)
    )
