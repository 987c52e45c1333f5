"""Who owns the memory of a batch: its caller, also after the batch was dropped, and nobody else
before.
"""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from streammega import (
    DataConfig,
    ParallelLayout,
    Ranks,
    StorageConfig,
    StreamingDataset,
    StreamLoader,
    batch_fields,
    get_batch,
)
from streammega.loading import buffers
from streammega.loading.buffers import PinnedMemory, RecycledMemory, batch_memory
from streammega.parallel import open_loader
from streammega.samples.host_fields import new_memory
from tests.support.builders import write_dataset
from tests.support.device_fields import device_fields
from tests.support.pinned_blocks import Copy, PinnedBlocks

EOD = 7
KEPT = 1 << 20
"""Bytes of memory that is kept to be used again."""
FIELDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "documents": {
        "reset_position_ids": True,
        "reset_attention_mask": True,
        "eod_mask_loss": True,
        "fields": [..., "attention_mask"],
    },
}


@pytest.fixture
def data(tmp_path: Path) -> DataConfig:
    rng = np.random.default_rng(3)
    write_dataset(tmp_path / "d", [rng.integers(0, 50, 3000).astype(np.uint16) for _ in range(40)])
    return DataConfig(
        blend=[str(tmp_path / "d")],
        sequence_length=64,
        num_samples=(800, 0, 0),
        eod_id=EOD,
        storage=StorageConfig(cache_dir=tmp_path / "cache"),
    )


@pytest.mark.guarantee("batch-may-dropped")
@pytest.mark.parametrize("fields", FIELDS)
@pytest.mark.parametrize("micro", [1, 4])
@pytest.mark.parametrize("ids_only", [False, True])
@pytest.mark.parametrize("late", [1, 16])
def test_copies_that_run_late_read_the_batch_they_were_issued_for(
    data: DataConfig, pinned: PinnedBlocks, fields: str, micro: int, ids_only: bool, late: int
) -> None:
    config = replace(data, **FIELDS[fields])
    waiting: list[Copy] = []
    with StreamLoader(
        config, micro_batch_size=micro, global_batch_size=4, ids_only=ids_only
    ) as loader:
        for batch in itertools.islice(loader, 200):
            for name, field in batch.items():
                copy = pinned.copy_later(field)
                assert copy.block is not None, (
                    f"{name} is not the allocator's own storage: its copy is not known there"
                )
                waiting.append(copy)
            number = len(batch)
            del batch, field
            while len(waiting) > late * number:
                assert pinned.arrive(waiting.pop(0))
    assert all(pinned.arrive(copy) for copy in waiting)


def test_dataloaders_without_workers_hand_out_the_allocators_own_storage(
    data: DataConfig, pinned: PinnedBlocks
) -> None:
    """With pin_memory, torch passes on what is pinned already."""
    dataset = StreamingDataset(data, micro_batch_size=4, global_batch_size=4)
    for batch in itertools.islice(torch.utils.data.DataLoader(dataset, batch_size=None), 5):
        assert all(field.untyped_storage()._cdata in pinned.block_of for field in batch.values())


@pytest.mark.guarantee("memory-batches-used")
def test_blocks_are_used_again_once_nothing_reads_them(
    data: DataConfig, pinned: PinnedBlocks
) -> None:
    """Pinned memory costs milliseconds: after a while no block is new."""
    with StreamLoader(
        replace(data, num_samples=(20_000, 0, 0)), micro_batch_size=1, global_batch_size=4
    ) as loader:
        made = []
        for batch in loader:
            del batch
            made.append(len(pinned.every_block))
    assert made[-1] <= made[len(made) // 2] + 8, "of 20,000 micro-batches"


@pytest.mark.guarantee("batch-may-dropped")
def test_memory_is_chosen_by_who_may_read_it_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert isinstance(batch_memory(KEPT).__self__, RecycledMemory)  # type: ignore[attr-defined]
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert batch_memory(KEPT) is new_memory, "of the copies of other accelerators nothing is known"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    memory = batch_memory(KEPT).__self__  # type: ignore[attr-defined]
    assert isinstance(memory, PinnedMemory)
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    assert batch_memory(KEPT) is new_memory, "a forked child cannot use CUDA"
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: False)
    monkeypatch.setattr(torch.utils.data, "get_worker_info", lambda: object())
    memory = batch_memory(KEPT).__self__  # type: ignore[attr-defined]
    assert isinstance(memory, RecycledMemory), "a worker opens no context on a device"


def test_pinned_memory_is_made_on_the_device_of_the_thread_that_opened_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)

    def noted(device: Any) -> contextlib.AbstractContextManager[None]:
        asked.append(device)
        return contextlib.nullcontext()

    monkeypatch.setattr(torch.cuda, "device", noted)
    monkeypatch.setattr(torch, "empty", lambda shape, **options: asked.append(options))
    PinnedMemory().take((2, 3), torch.int64)
    assert asked == [3, {"dtype": torch.int64, "pin_memory": True}]


@pytest.mark.guarantee("memory-batches-used")
def test_the_ring_uses_memory_again_and_only_when_nothing_refers_to_it() -> None:
    ring = RecycledMemory(KEPT)
    tensor = ring.take((4, 8), torch.int64)
    address = tensor.data_ptr()
    kept: list[Any] = [tensor[1:, ::2], tensor.numpy(), tensor.view(-1).detach()]
    del tensor
    while kept:
        assert ring.take((4, 8), torch.int64).data_ptr() != address
        kept.pop(0)
    assert address in [
        tensor.data_ptr() for tensor in [ring.take((4, 8), torch.int64) for _ in range(3)]
    ]


@pytest.mark.guarantee("memory-batches-used")
def test_a_caller_that_catches_up_costs_no_new_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """It lets go of all batches that were ahead of it; what is kept of their memory has a limit."""
    made: list[int] = []

    def noted(size: int) -> Any:
        made.append(size)
        return np.zeros(size, np.uint8)

    monkeypatch.setattr(buffers, "new_buffer", noted)
    arrays = 12
    ring = RecycledMemory(arrays * 4 * 512 * 8)
    for _ in range(3):
        held = [ring.take((4, 512), torch.int64) for _ in range(arrays)]
        held.clear()
    assert len(made) == arrays
    held = [ring.take((4, 512), torch.int64) for _ in range(arrays + 5)]
    held.clear()
    made.clear()
    held = [ring.take((4, 512), torch.int64) for _ in range(arrays + 5)]
    assert len(made) == 5, "no more is kept than was allowed"


@pytest.mark.guarantee("field-batch-contiguous")
@pytest.mark.parametrize("fields", FIELDS)
def test_writes_past_torchs_notice_reach_no_other_batch(data: DataConfig, fields: str) -> None:
    config = replace(data, **FIELDS[fields])
    with StreamLoader(config, micro_batch_size=2, global_batch_size=4) as loader:
        expected = [{name: field.clone() for name, field in batch.items()} for batch in loader]
    with StreamLoader(config, micro_batch_size=2, global_batch_size=4) as loader:
        for wanted, batch in zip(expected, loader, strict=True):
            for name, field in batch.items():
                assert torch.equal(field, wanted[name])
                field.numpy()[:] = 0
                field.data.zero_()


@pytest.mark.guarantee("field-batch-contiguous")
@pytest.mark.parametrize("fields", FIELDS)
def test_batches_held_together_share_no_element(data: DataConfig, fields: str) -> None:
    with StreamLoader(
        replace(data, **FIELDS[fields]), micro_batch_size=2, global_batch_size=4
    ) as loader:
        held = [field for batch in itertools.islice(loader, 40) for field in batch.values()]
    spans = sorted(
        (field.data_ptr(), field.data_ptr() + field.numel() * field.element_size())
        for field in held
    )
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(spans))


def batches_of_all_kinds(config: DataConfig) -> list[dict[str, torch.Tensor]]:
    """One batch from every maker of batches."""
    loader = StreamLoader(config, micro_batch_size=4, global_batch_size=4)
    ranks = Ranks(ParallelLayout())
    ids = torch.from_numpy(np.arange(130, dtype=np.uint16).reshape(2, 65))
    with loader:
        return [
            next(iter(loader)),
            loader.dataset.batch(0),
            get_batch(open_loader(config, ranks, micro_batch_size=4, global_batch_size=4), ranks),
            device_fields(ids, torch.tensor([65, 3]), config),
            batch_fields(ids, None, config),
        ]


@pytest.mark.guarantee("field-batch-contiguous")
@pytest.mark.parametrize("fields", FIELDS)
def test_every_field_can_be_viewed_flat(data: DataConfig, fields: str) -> None:
    for batch in batches_of_all_kinds(replace(data, **FIELDS[fields])):
        for field in batch.values():
            field.view(-1)


@pytest.mark.guarantee("field-batch-contiguous")
@pytest.mark.parametrize("fields", FIELDS)
def test_writing_to_one_field_alters_no_other(data: DataConfig, fields: str) -> None:
    for batch in batches_of_all_kinds(replace(data, **FIELDS[fields])):
        before = {name: field.clone() for name, field in batch.items()}
        batch["labels"][batch["position_ids"] % 2 == 0] = -100
        for name in batch.keys() - {"labels"}:
            assert torch.equal(batch[name], before[name]), name


@pytest.mark.guarantee("attention-masks-take")
def test_attention_masks_take_the_memory_of_those_that_are_held(tmp_path: Path) -> None:
    length = 2048
    write_dataset(tmp_path / "d", [np.zeros(300 * length, np.uint16)])
    config = DataConfig(
        blend=[str(tmp_path / "d")],
        sequence_length=length,
        order="sequential",
        fields=[..., "attention_mask"],
        storage=StorageConfig(cache_dir=tmp_path),
    )
    with StreamLoader(config, micro_batch_size=1, global_batch_size=1, prefetch=4) as loader:
        batches = iter(loader)
        next(batches)  # compiles, and makes what is not a mask
        before = most = psutil.Process().memory_info().rss
        for _ in range(100):
            batch = next(batches)
            assert batch["attention_mask"].shape == (1, 1, length, length)
            most = max(most, psutil.Process().memory_info().rss)
    assert most - before <= 3 * length * length + (48 << 20), "ids and a few masks, not hundreds"
