"""Losses by source in Megatron's reports: sums that Megatron adds up over micro-batches and ranks."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from streammega import DataConfig
from streammega.errors import ConfigError
from streammega.integrations import megatron_losses
from streammega.integrations.megatron import MegatronBatches
from streammega.integrations.megatron_losses import with_source_losses
from tests.support.builders import write_random_pair

MICRO = 2
MICRO_BATCHES = 3
LENGTH = 8


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    for seed, name in enumerate(("web", "code")):
        write_random_pair(str(tmp_path / name), vocab=90, seed=seed)
    return DataConfig(
        blend=[(str(tmp_path / "web"), 2.0), (str(tmp_path / "code"), 1.0)],
        split="80,20,0",
        sequence_length=LENGTH,
        num_samples=(96, 24, 0),
        index_cache_dir=tmp_path / "cache",
        eod_id=3,
        eod_mask_loss=True,
        return_dataset_ids=True,
    )


class Replaying:
    """Megatron's iterator, which can give the micro-batches of an iteration again."""

    def __init__(self, iterable: Any) -> None:
        self.iterable = iterable
        self.kept: list[Any] = []
        self.again: Iterator[Any] = iter(())

    def __next__(self) -> Any:
        batch = next(self.again, None)
        if batch is None:
            batch = next(self.iterable)
            self.kept.append(batch)
        return batch

    def rewind(self) -> None:
        self.again = iter(self.kept)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What Megatron has counted."""
    args = SimpleNamespace(consumed_train_samples=0)
    monkeypatch.setattr(megatron_losses, "_consumed", lambda given: args.consumed_train_samples)
    monkeypatch.setattr(megatron_losses, "_micro_batches", lambda: MICRO_BATCHES)
    return args


def forward_step(data_iterator: Any, model: Any) -> Any:
    """As that of Megatron's GPT; a token's loss is its id, in eighths."""
    batch = next(data_iterator)
    model.append(batch)
    return batch["tokens"] / 8, functools.partial(loss_func, batch["loss_mask"])


def loss_func(loss_mask: Any, output: Any) -> Any:
    loss = (output * loss_mask).sum()
    return loss, loss_mask.sum(), {"lm loss": torch.stack([loss, loss_mask.sum()])}


def sums_of(batch: Any) -> list[list[float]]:
    """(loss, tokens) of each dataset, by what the batch says of itself."""
    losses = (batch["tokens"] / 8 * batch["loss_mask"]).double()
    sums = []
    for number in range(2):
        of_source = batch["dataset_id"] == number
        sums.append([float(losses[of_source].sum()), float(batch["loss_mask"][of_source].sum())])
    return sums


def check_iteration(step: Any, iterator: Any) -> None:
    for _ in range(MICRO_BATCHES):
        seen: list[Any] = []
        output, loss = step(iterator, seen)
        _, _, report = loss(output)
        assert set(report) == {"lm loss", "lm loss/web", "lm loss/code"}
        (batch,) = seen
        assert [report["lm loss/web"].tolist(), report["lm loss/code"].tolist()] == sums_of(batch)


def batches_of(config: DataConfig, split: str, rank: int, **options: Any) -> MegatronBatches:
    return MegatronBatches(
        config, split=split, micro_batch_size=MICRO, dp_rank=rank, dp_size=2, **options
    )


@pytest.mark.guarantee("losses-source-megatron")
@pytest.mark.parametrize("rank", [0, 1])
def test_reports_have_the_sums_of_each_dataset_through_replays_evaluations_and_resumes(
    config: DataConfig, counted: SimpleNamespace, rank: int
) -> None:
    of_an_iteration = MICRO_BATCHES * MICRO * 2
    for begins in (0, 2):  # the second run goes on in its third iteration
        counted.consumed_train_samples = begins * of_an_iteration
        step = with_source_losses(forward_step)
        consumed = {"consumed_samples": counted.consumed_train_samples}
        train = Replaying(batches_of(config, "train", rank, **consumed))
        valid = Replaying(batches_of(config, "valid", rank))
        for iteration in range(3):
            train.kept = []
            check_iteration(step, train)
            if iteration == 1:
                train.rewind()
                check_iteration(step, train)
                check_iteration(step, valid)
            counted.consumed_train_samples += of_an_iteration
        train.iterable.close()
        valid.iterable.close()


@pytest.mark.guarantee("losses-source-megatron")
def test_ranks_that_do_not_read_tell_the_same(config: DataConfig, counted: SimpleNamespace) -> None:
    """Of a tensor-parallel group one rank reads, and all of them report."""
    reading = Replaying(batches_of(config, "train", 0))
    other = Replaying(batches_of(config, "train", 0))
    step = with_source_losses(forward_step)
    told = with_source_losses(lambda data_iterator, batch: forward_step(iter([batch]), []))
    for _ in range(MICRO_BATCHES):
        seen: list[Any] = []
        output, loss = step(reading, seen)
        _, _, report = loss(output)
        output, loss = told(other, seen[0])
        _, _, same = loss(output)
        assert {name: value.tolist() for name, value in report.items()} == {
            name: value.tolist() for name, value in same.items()
        }
    assert other.iterable.consumed_samples == 0
    reading.iterable.close()


def test_what_is_not_ours_is_reported_as_it_is(counted: SimpleNamespace) -> None:
    batch = {"tokens": torch.ones(1, 4), "loss_mask": torch.ones(1, 4)}
    output, loss = with_source_losses(forward_step)(Replaying(iter([batch])), [])
    _, _, report = loss(output)
    assert set(report) == {"lm loss"}


def test_a_loss_function_without_its_mask_is_told(
    config: DataConfig, counted: SimpleNamespace
) -> None:
    def without(data_iterator: Any, model: Any) -> Any:
        output, loss = forward_step(data_iterator, model)
        return output, lambda given: loss(given)

    iterator = Replaying(batches_of(config, "train", 0))
    output, loss = with_source_losses(without)(iterator, [])
    with pytest.raises(ConfigError, match=r"partial\(loss_func, loss_mask"):
        loss(output)
    iterator.iterable.close()


@pytest.mark.guarantee("losses-source-megatron")
def test_megatrons_own_training_logs_them_alike_on_one_rank_and_two(
    gang: Any, tmp_path: Path
) -> None:
    pytest.importorskip("megatron.training.training", reason="needs megatron-core 0.17 or newer")
    from tests.integrations.test_megatron_kills import run_arguments
    from tests.integrations.test_megatron_provider import write_datasets
    from tests.support.megatron_programs import train

    prefixes = write_datasets(tmp_path, np.random.default_rng(0), 2)
    given = {"data_path": prefixes, "data_cache_path": str(tmp_path / "idx"), "train_iters": 4}
    noted = []
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        gang.run(ranks, train, str(folder), given, "megatron", run_arguments)
        lines = (folder / f"noted-0-of-{ranks}.jsonl").read_text().splitlines()
        noted.append([json.loads(line)["losses"] for line in lines])
    assert len(noted[0]) == 4
    for alone, of_two in zip(*noted, strict=True):
        assert set(alone) == {"lm loss", "lm loss/data0", "lm loss/data1"}
        for name, loss in alone.items():
            assert float(of_two[name]) == pytest.approx(float(loss), rel=1e-5)
        means = [float(alone[f"lm loss/data{number}"]) for number in range(2)]
        assert not any(map(math.isnan, means))
        assert min(means) <= float(alone["lm loss"]) <= max(means)
