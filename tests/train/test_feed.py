"""What a step waits for: its first micro-batch, and each other one only when the one before is
under way.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from streammega.errors import EndpointError
from streammega.parallel import RankBatches
from streammega.train.config import load_run
from streammega.train.trainer import Trainer
from tests.support.builders import write_small_run


@pytest.fixture
def trainer(tmp_path: Path, pair: str) -> Trainer:
    run_file = write_small_run(tmp_path, pair)
    return Trainer(load_run(run_file, ["data.order=stream"]), torch.device("cpu"))


@pytest.mark.guarantee("micro-batch-given")
def test_micro_batches_are_taken_while_the_one_before_is_computed(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    take = RankBatches.__next__
    forward = trainer.model.module.forward

    def taking(self: RankBatches) -> Any:
        events.append("take")
        return take(self)

    def computing(*arguments: Any, **keywords: Any) -> Any:
        events.append("compute")
        return forward(*arguments, **keywords)

    monkeypatch.setattr(RankBatches, "__next__", taking)
    monkeypatch.setattr(trainer.model.module, "forward", computing)
    record, _ = trainer.train_step()
    assert events == ["take", "compute"] * 4
    assert record["samples"] == [0, 8]
    assert len(record["batch_hash"]) == 32


@pytest.mark.guarantee("micro-batch-given")
def test_an_error_of_storage_within_a_step_is_raised_where_it_is_due(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = trainer.loader.take
    taken = iter(range(100))

    def failing() -> Any:
        if next(taken) == 2:
            raise EndpointError("s3://bucket/web.bin: 503 SlowDown")
        return take()

    monkeypatch.setattr(trainer.loader, "take", failing)
    with pytest.raises(EndpointError):
        trainer.train_step()
    assert trainer.batches.consumed_samples == 4, "two micro-batches of two were given"
