"""The learning rate of each step."""

from __future__ import annotations

import math
from typing import Any

from streammega.train.config import TrainConfig


def set_learning_rate(
    optimizer: Any, train: TrainConfig, step: int, done: float | None = None
) -> None:
    """Linear warmup to lr, then down to the lowest rate at `iters`: a function of the position, so a
    resume needs no state. done: as in `learning_rate`.
    """
    lr = learning_rate(train, step, done)
    for group in optimizer.param_groups:
        group["lr"] = lr


def learning_rate(train: TrainConfig, step: int, done: float | None = None) -> float:
    """The rate of the step after `step` others. done: the part of the decay that is behind it; None:
    that of the steps.
    """
    warmup = train.warmup_iters
    if step < warmup:
        # From the first step on more than 0: a step by nothing would be a wasted one.
        return train.lr * (step + 1) / warmup
    decay_steps = max(1, train.iters - warmup)
    if done is None:
        done = min((step - warmup) / decay_steps, 1.0)
    lowest = train.lowest_lr
    return lowest + (train.lr - lowest) * _left(train.decay, done)


def _left(decay: str, done: float) -> float:
    """The part of the way from the lowest rate to lr that is left, of a decay that is so far."""
    if decay == "cosine":
        return 0.5 * (1 + math.cos(math.pi * done))
    if decay == "linear":
        return 1 - done
    return 1.0
