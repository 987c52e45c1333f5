"""The learning rate of each step."""

from __future__ import annotations

import math
from typing import Any

from streammega.train.config import TrainConfig


def set_learning_rate(optimizer: Any, train: TrainConfig, step: int) -> None:
    """Linear warmup to lr, then down to the lowest rate at `iters`: a function of the step, so a
    resume needs no state.
    """
    lr = learning_rate(train, step)
    for group in optimizer.param_groups:
        group["lr"] = lr


def learning_rate(train: TrainConfig, step: int) -> float:
    """The rate of the step after `step` others."""
    if step < train.warmup_iters:
        # From the first step on more than 0: a step by nothing would be a wasted one.
        return train.lr * (step + 1) / train.warmup_iters
    decay_steps = max(1, train.iters - train.warmup_iters)
    done = min((step - train.warmup_iters) / decay_steps, 1.0)
    left = _left(train.decay, done)
    return train.lowest_lr + (train.lr - train.lowest_lr) * left


def _left(decay: str, done: float) -> float:
    """The part of the way from the lowest rate to lr that is left, of a decay that is so far."""
    if decay == "cosine":
        return 0.5 * (1 + math.cos(math.pi * done))
    if decay == "linear":
        return 1 - done
    return 1.0
