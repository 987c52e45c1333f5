"""The learning rate of each step."""

from __future__ import annotations

import math
from typing import Any

from streammega.train.config import TrainConfig


def set_learning_rate(optimizer: Any, train: TrainConfig, step: int) -> None:
    """Linear warmup to lr, then down to the lowest rate at `iters`: a function of the step, so a
    resume needs no state.
    """
    if step < train.warmup_iters:
        lr = train.lr * (step + 1) / train.warmup_iters
    else:
        done = min((step - train.warmup_iters) / max(1, train.iters - train.warmup_iters), 1.0)
        left = {
            "cosine": 0.5 * (1 + math.cos(math.pi * done)),
            "linear": 1 - done,
            "constant": 1.0,
        }[train.decay]
        lr = train.lowest_lr + (train.lr - train.lowest_lr) * left
    for group in optimizer.param_groups:
        group["lr"] = lr
