"""Runs of other people's trainers, killed by SIGKILL and resumed by their own checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from streammega import DataConfig
from tests.support.gang import Gang
from tests.support.trainer_programs import (
    GLOBAL_BATCH,
    accelerate_train,
    accelerate_whole_checkpoint,
    fabric_train,
    lightning_train,
    logged,
    newest_torch_file,
    sft_train,
    stream,
    transformers_train,
    transformers_whole_checkpoint,
)

MORE_STEPS = 5
"""Of the run that goes on: behind its own checkpoints."""
KILLS = pytest.mark.parametrize(
    ("before", "after"), [(1, 1), (2, 2), (2, 1), pytest.param(1, 2, marks=pytest.mark.soak)]
)
"""Ranks of the run that is killed, and of the one that goes on."""
KILLS_OF_THE_BARE_LOADER = pytest.mark.parametrize(
    ("before", "after"),
    [(2, 1), *(pytest.param(*pair, marks=pytest.mark.soak) for pair in ((1, 1), (2, 2), (1, 2)))],
)
"""Where a trainer is given a StreamLoader as it is: fewer in `make test`."""


@dataclass(frozen=True)
class KilledTrainer:
    """A trainer: train(rank, config, folder, size, resume, steps) -> the position at the end; the
    names of its checkpoints in `folder`, and which of these is the newest whole one, with its step.
    """

    train: Callable[[int, DataConfig, str, int, str | None, int], dict[str, Any]]
    checkpoints: str
    newest: Callable[[Path], tuple[str, int]]


OF_TRANSFORMERS = ("checkpoint-*/trainer_state.json", transformers_whole_checkpoint)
LIGHTNING = KilledTrainer(lightning_train, "*.ckpt", newest_torch_file)
FABRIC = KilledTrainer(fabric_train, "*.ckpt", newest_torch_file)
ACCELERATE = KilledTrainer(accelerate_train, "step-*/whole", accelerate_whole_checkpoint)
TRANSFORMERS = KilledTrainer(transformers_train, *OF_TRANSFORMERS)
TRL = KilledTrainer(sft_train, *OF_TRANSFORMERS)


def check_killed_trainer(
    gang: Gang, trainer: KilledTrainer, config: DataConfig, folder: Path, before: int, after: int
) -> None:
    """Train on `before` ranks, kill them when three checkpoints are there, go on with `after`: what
    was trained on is, token by token, the stream of the bare loader.
    """
    run = folder / "run"
    again = folder / "again"
    run.mkdir()
    again.mkdir()

    def due() -> bool:
        return len(list(run.glob(trainer.checkpoints))) >= 3

    endless = 100_000
    assert gang.run_until(due, before, trainer.train, config, str(run), before, None, endless)
    checkpoint, step = trainer.newest(run)
    seen = logged(run, before)
    last = step + MORE_STEPS
    states = gang.run(after, trainer.train, config, str(again), after, checkpoint, last)
    rows = seen[: step * GLOBAL_BATCH] + logged(again, after)
    assert rows == stream(config, last)
    assert all(state == states[0] for state in states)
    assert states[0]["consumed_samples"] == last * GLOBAL_BATCH
    assert len(json.dumps(states[0])) < 1024
