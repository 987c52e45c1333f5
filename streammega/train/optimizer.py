"""AdamW over the stages of a rank, and its learning rate at every step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import nn

from streammega.errors.cached_property import cached_property
from streammega.train.config import RunConfig, TrainConfig


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
        betas=(train.beta1, train.beta2),
        fused=fused,
    )


class LearningRate:
    """Linear warmup to lr, then decay to the lowest rate. It follows from the position alone, so a
    resume needs no state.

    tokens_before: the tokens of all samples before a given one.
    """

    def __init__(self, config: RunConfig, tokens_before: Callable[[int], int]) -> None:
        self._train = config.train
        self._schedule = config.schedule
        by_tokens = config.train.lr_decay_unit == "tokens"
        self._before: Callable[[int], int] = tokens_before if by_tokens else int

    def at(self, step: int, sample: int) -> float:
        """The rate after `step` steps, when the next one begins with `sample`."""
        train = self._train
        if step < train.warmup_iters:
            # More than 0 also in the first step: a step of 0 would be wasted.
            return train.lr * (step + 1) / train.warmup_iters
        if train.lr_decay_unit == "steps":
            first, last = train.warmup_iters, train.train_iters
            position = step
        else:
            first, last = self._decay_span
            position = self._amount_before(sample)
        done = min(max((position - first) / max(1, last - first), 0.0), 1.0)
        remaining = {
            "cosine": 0.5 * (1 + math.cos(math.pi * done)),
            "linear": 1 - done,
            "constant": 1.0,
        }[train.lr_decay_style]
        return train.lowest_lr + (train.lr - train.lowest_lr) * remaining

    @cached_property
    def _decay_span(self) -> tuple[int, int]:
        """Where the decay begins and ends, in samples or tokens."""
        first_step = self._schedule.samples_of_step(self._train.warmup_iters + 1)
        last_step = self._schedule.samples_of_step(self._train.train_iters)
        return self._amount_before(first_step.start), self._amount_before(last_step.stop)

    def _amount_before(self, sample: int) -> int:
        """Samples or tokens that steps use before a sample, without those that are skipped."""
        amount = self._before(sample)
        for start, stop in self._schedule.excluded:
            amount -= self._before(min(stop, sample)) - self._before(min(start, sample))
        return amount
