"""AdamW over the stages of a rank, and its learning rate at every step."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from streammega.train.config import TrainConfig

BETAS = (0.9, 0.95)
"""Those of GPT-3 and Llama: the mean of squares follows a change sooner than with torch's 0.999."""
LARGEST_TO_LOWEST = 10.0
"""The rate after the warmup to that of the last step, as for GPT-3, Chinchilla and Llama."""


def make_optimizer(
    chunks: Sequence[nn.Module], train: TrainConfig, *, fused: bool
) -> torch.optim.AdamW:
    """AdamW over the parameters of all stages, each once. Vectors have no weight decay.

    Groups may change between runs: checkpoints hold tensors by the name of the parameter, no groups
    or settings. The trainer sets `lr` of every group in each step.
    """
    parameters = {id(p): p for chunk in chunks for p in chunk.parameters()}.values()
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": train.weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=train.lr,
        betas=BETAS,
        fused=fused,
    )


def learning_rate(train: TrainConfig, step: int) -> float:
    """The rate of the step after `step` steps: linear warmup to lr, then decay to a tenth of it. It
    follows from the step alone, so a resume needs no state.
    """
    if step < train.warmup_iters:
        # More than 0 also in the first step: a step of 0 would be wasted.
        return train.lr * (step + 1) / train.warmup_iters
    done = (step - train.warmup_iters) / max(1, train.train_iters - train.warmup_iters)
    remaining = {
        "cosine": 0.5 * (1 + math.cos(math.pi * min(done, 1.0))),
        "linear": 1 - min(done, 1.0),
        "constant": 1.0,
    }[train.lr_decay_style]
    lowest = train.lr / LARGEST_TO_LOWEST
    return lowest + (train.lr - lowest) * remaining
