"""A loader as an iterator, and its batches on a device: the cursor counts what was handed out, and
nothing is read after it was given up.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from streammega import DataConfig, ParallelLayout, Ranks, StorageConfig, StreamLoader, get_batch
from streammega.errors import AccessDeniedError, ConfigError, StateError
from streammega.loading import loader as loader_module
from streammega.loading.device_prefetch import CopiedBatch
from streammega.samples.fields import Batch
from tests.support.builders import data_config
from tests.support.cuda_support import NEEDS_CUDA
from tests.support.pinned_blocks import Copy, PinnedBlocks
from tests.support.servers import http_server
from tests.support.typed import first_prefix

SIZES: Any = {"micro_batch_size": 4, "global_batch_size": 8}
TOTAL = 26
"""Micro-batches of a pass."""
DEVICE = "meta"
"""Stands for a device that no machine of the tests has: what copies to it is put in its place."""


@pytest.fixture
def config(pair: str, tmp_path: Path) -> DataConfig:
    samples = (4 * TOTAL, 40, 0)
    return data_config([pair], tmp_path, order="stream", num_samples=samples, split="70,30,0")


def numbers(batches: Iterator[Batch] | StreamLoader, most: int | None = None) -> list[list[int]]:
    """The first tokens of batches, which tell them apart."""
    return [batch["tokens"][:, :4].flatten().tolist() for batch in itertools.islice(batches, most)]


@pytest.fixture
def whole(config: DataConfig) -> list[list[int]]:
    with StreamLoader(config, **SIZES) as loader:
        return numbers(loader)


# A loader as an iterator.


@pytest.mark.guarantee("next-takes-batches")
def test_next_of_a_loader_is_its_next_batch(config: DataConfig, whole: list[list[int]]) -> None:
    loader = StreamLoader(config, **SIZES)
    assert isinstance(loader, Iterator)
    assert numbers(iter([next(loader), next(loader)])) == whole[:2]
    held = iter(loader)
    assert numbers(held, 2) == whole[2:4]
    assert numbers(iter([next(loader)])) == whole[4:5], "of the iteration that runs"
    assert numbers(held, 1) == whole[5:6]
    assert len(numbers(held)) == TOTAL - 6
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(loader)
    assert numbers(loader) == whole, "iter begins the next pass"
    loader.close()


@pytest.mark.guarantee("next-takes-batches")
def test_next_goes_on_where_a_state_was_loaded_and_no_held_iterator_looks_ended(
    config: DataConfig, whole: list[list[int]]
) -> None:
    loader = StreamLoader(config, **SIZES)
    held = iter(loader)
    next(held)
    next(loader)
    state = loader.state_dict()
    next(loader)
    for _ in range(2):
        loader.load_state_dict(state)
        assert numbers(iter([next(loader)])) == whole[2:3]
        with pytest.raises(StateError, match="load_state_dict moved its loader"):
            next(held)
    second = iter(loader)
    with pytest.raises(StateError, match="cannot go on"):
        next(held)
    assert numbers(second) == whole[3:]


# On a device.


class LateCopier:
    """A device whose copies arrive when somebody waits for them, from where the host had them."""

    def __init__(self, blocks: PinnedBlocks) -> None:
        self._blocks = blocks
        self.started = 0
        self.finished = 0

    @property
    def under_way(self) -> int:
        return self.started - self.finished

    def start(self, batch: Batch) -> CopiedBatch:
        self.started += 1
        copies: Any = {
            name: (self._blocks.copy_later(field), field.dtype, field.shape)
            for name, field in batch.items()
        }
        return CopiedBatch(copies)

    def finish(self, copied: CopiedBatch) -> Batch:
        self.finished += 1
        waiting: Any = copied.batch
        return {name: self._arrived(*parts) for name, parts in waiting.items()}

    def _arrived(self, copy: Copy, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
        assert copy.block is not None
        assert self._blocks.arrive(copy), "the memory was used again before the copy was made"
        return torch.frombuffer(bytearray(copy.meant), dtype=dtype).view(shape)


@pytest.fixture
def copier(pinned: PinnedBlocks, monkeypatch: pytest.MonkeyPatch) -> LateCopier:
    late = LateCopier(pinned)
    monkeypatch.setattr(loader_module, "Copier", lambda device: late)
    return late


@pytest.mark.guarantee("prefetch-batches-host")
def test_batches_on_a_device_are_those_of_the_host(
    config: DataConfig, whole: list[list[int]], copier: LateCopier
) -> None:
    with StreamLoader(config, **SIZES) as loader:
        assert loader.prefetch_to(DEVICE) is loader
        assert numbers(loader) == whole
        assert numbers(loader) == whole, "the next pass too"
    assert copier.started == copier.finished == 2 * TOTAL


@pytest.mark.guarantee("prefetch-batches-host")
def test_the_cursor_counts_what_was_handed_out_and_not_what_is_under_way(
    config: DataConfig, whole: list[list[int]], copier: LateCopier
) -> None:
    reference = StreamLoader(config, **SIZES)
    loader = StreamLoader(config, **SIZES).prefetch_to(DEVICE)
    states = []
    ahead = []
    for batch, _ in zip(loader, reference, strict=True):
        assert loader.state_dict() == reference.state_dict()
        states.append(loader.state_dict())
        ahead.append(copier.under_way)
        del batch
    assert set(ahead) == {0, 1}, "one at most, and none after the last"
    assert sum(ahead) > TOTAL // 2
    for taken in (0, 6, 17, TOTAL - 2):
        loader.load_state_dict(states[taken])
        for step in itertools.count(taken + 1):
            if step == TOTAL:
                break
            assert numbers(iter([next(loader)])) == whole[step : step + 1]
            if step % 5 == 0:  # leave the loop in the middle: what was under way is read again
                loader.load_state_dict(loader.state_dict())
        with pytest.raises(StopIteration):
            next(loader)
    loader.close()


@pytest.mark.guarantee("prefetch-batches-host")
def test_an_error_under_way_is_raised_where_it_is_due(
    config: DataConfig, whole: list[list[int]], copier: LateCopier
) -> None:
    objects = {
        f"/p{suffix}": Path(f"{first_prefix(config)}{suffix}").read_bytes()
        for suffix in (".bin", ".idx")
    }
    with http_server(objects) as server:
        storage = StorageConfig(request_timeout=60, memory_bytes=1 << 20).tuned(max_retries=0)
        remote = replace(config, blend=[f"{server.url}/p"], storage=storage)
        with StreamLoader(remote, **SIZES).prefetch_to(DEVICE) as loader:
            server.status = 403
            held = iter(loader)
            with pytest.raises(AccessDeniedError):
                next(held)
            server.status = None
            with pytest.raises(StateError, match="ended by AccessDeniedError"):
                next(held)
            assert numbers(loader) == whole


@pytest.mark.guarantee("prefetch-batches-host")
def test_another_device_in_the_middle_of_a_pass_repeats_and_loses_nothing(
    config: DataConfig, whole: list[list[int]], copier: LateCopier
) -> None:
    with StreamLoader(config, **SIZES) as loader:
        held = iter(loader)
        seen = numbers(held, 3)
        seen += numbers(loader.prefetch_to(DEVICE), 4)
        with pytest.raises(StateError, match="prefetch_to changed the device"):
            next(held)
        held = iter(loader.prefetch_to(DEVICE))
        assert loader.prefetch_to(DEVICE) is loader
        seen += numbers(held, 2)  # the same device: the iteration goes on
        seen += numbers(loader.prefetch_to(None))
        assert seen == whole
        assert loader.device is None


def test_a_device_that_was_refused_is_chosen_by_a_second_call(
    config: DataConfig, whole: list[list[int]]
) -> None:
    with StreamLoader(config, **SIZES) as loader:
        iteration = loader._begin()
        with iteration._lock, pytest.raises(StateError, match="another thread waits"):
            loader.prefetch_to("meta")
        assert numbers(iteration, 1) == whole[:1]
        assert loader.prefetch_to("meta").device is not None
        with pytest.raises(StateError, match="prefetch_to changed the device"):
            next(iteration)


@pytest.mark.guarantee("prefetch-batches-host")
def test_on_the_cpu_batches_are_the_same(config: DataConfig, whole: list[list[int]]) -> None:
    with StreamLoader(config, **SIZES).prefetch_to("cpu") as loader:
        assert numbers(loader, 5) == whole[:5]
        assert loader.state_dict()["consumed_samples"] == 20
        assert numbers(loader) == whole[5:]


def test_ranks_that_bring_ids_to_a_device_themselves_say_so(config: DataConfig) -> None:
    with (
        StreamLoader(config, ids_only=True, **SIZES).prefetch_to("meta") as loader,
        pytest.raises(ConfigError, match="leave out prefetch_to"),
    ):
        get_batch(loader, Ranks(ParallelLayout()))


@pytest.mark.guarantee("prefetch-batches-host")
@pytest.mark.parametrize("delay", [0, 200_000_000])
@pytest.mark.cuda
@NEEDS_CUDA[1]
def test_on_cuda_batches_arrive_whole_however_far_the_device_is_behind(
    config: DataConfig, delay: int
) -> None:
    with StreamLoader(config, **SIZES) as loader:
        expected = [{name: field.clone() for name, field in batch.items()} for batch in loader]
    kept = []
    with StreamLoader(config, **SIZES).prefetch_to("cuda") as loader:
        for batch in loader:
            assert all(field.is_cuda for field in batch.values())
            torch.cuda._sleep(delay)  # cycles, in which the memory of others is asked for
            kept.append({name: field * 1 for name, field in batch.items()})
            del batch
    for wanted, batch in zip(expected, kept, strict=True):
        for name, field in batch.items():
            assert torch.equal(field.cpu(), wanted[name]), name
