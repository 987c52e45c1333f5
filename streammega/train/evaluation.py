"""Evaluation: the mean loss of the valid split and of validation sets. Each is read from its start every
time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from streammega.errors import ConfigError
from streammega.parallel import RankBatches, Ranks
from streammega.parallel.groups import WORLD
from streammega.samples.fields import Batch
from streammega.train.config import RunConfig
from streammega.train.parallel_model import ParallelModel
from streammega.train.splits import has_valid, open_split, validation_sets


def check_valid_splits(config: RunConfig, ranks: Ranks) -> None:
    """Open what will be evaluated, so that errors are found before training and not after hours.

    Raises ConfigError, and the errors of opening a split.
    """
    train = config.train
    if not train.eval_iters or not train.eval_interval:
        return
    runs = list(validation_sets(config).values())
    if has_valid(config.data):
        runs.append(config)
    if not runs:
        raise ConfigError(
            f"train.eval_iters is {train.eval_iters}, and there is nothing to evaluate: data.split "
            f"leaves nothing for valid, and there are no [validation] sets; give one, or set "
            f"train.eval_iters to 0"
        )
    for run in runs:
        open_split(run, "valid", ranks).close()


def evaluate_all(
    config: RunConfig, model: ParallelModel, progress: Callable[[], None]
) -> dict[str, Any]:
    """{"valid_loss": ...}, and with validation sets {"valid_loss_of": {name: ...}}.

    Collective over all ranks. progress: called before each global batch. The trainer adds the
    entries to the step's record: `RunLog.write` logs each step that has one whose name begins with
    "valid_loss", and `streammega plot` draws both (`FIELDS` in cli/plotting.py).
    """
    record: dict[str, Any] = {}
    if has_valid(config.data):
        record["valid_loss"] = valid_loss(config, model, progress)
    losses: dict[str, float] = {}
    for name, run in validation_sets(config).items():
        losses[name] = valid_loss(run, model, progress)
    if losses:
        record["valid_loss_of"] = losses
    return record


def valid_loss(config: RunConfig, model: ParallelModel, progress: Callable[[], None]) -> float:
    """Mean loss over the first eval_iters global batches of the valid split."""
    ranks = model.ranks
    train = config.train
    loss_and_tokens = torch.zeros(2, device=model.device, dtype=torch.float64)
    with open_split(config, "valid", ranks) as loader:
        batches = RankBatches(loader, ranks, model.device, every_stage=config.every_stage)
        micro_steps = train.global_batch_size // loader.dataset.step_samples
        for _ in range(train.eval_iters):
            progress()
            global_batch = _take_up_to(batches, micro_steps)
            if len(global_batch) < micro_steps:
                break
            losses = model.evaluate(global_batch)
            if model.counts_losses:
                loss_and_tokens[0] += losses.loss.double().sum()
                loss_and_tokens[1] += losses.tokens.double().sum()
        batches.close()
    ranks.all_reduce(loss_and_tokens, WORLD)
    loss, tokens = loss_and_tokens.tolist()
    return float(loss / max(tokens, 1.0))


def _take_up_to(batches: RankBatches, count: int) -> list[Batch]:
    """The next micro-batches; fewer at the end of the data."""
    global_batch: list[Batch] = []
    for _ in range(count):
        # Not a loop over `batches`: that would begin at the first sample again.
        batch = next(batches, None)
        if batch is None:
            break
        global_batch.append(batch)
    return global_batch
