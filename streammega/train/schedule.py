"""The learning rate of each step."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from typing import Any

from streammega.order.schedule import StepNumbers
from streammega.train.config import RunConfig, TrainConfig


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


def step_numbers_of(config: RunConfig) -> StepNumbers:
    """The steps of a run from sample 0 on with the batch sizes of its config."""
    return StepNumbers(schedule=config.schedule, skips=config.data.skip_samples)


class Decay:
    """How far the decay of the learning rate is, by samples or tokens.

    Args: config: of the run. tokens_before: the tokens of all samples before one.
    """

    def __init__(self, config: RunConfig, tokens_before: Callable[[int], int]) -> None:
        self._train = config.train
        self._step_numbers = step_numbers_of(config)
        by_tokens = config.train.decay_by == "tokens"
        self._before: Callable[[int], int] = tokens_before if by_tokens else int

    def done_before(self, sample: int) -> float | None:
        """The part of it before a sample; None: it goes by steps."""
        if self._train.decay_by == "steps":
            return None
        first, last = self._ends
        done = (self._amount_before(sample) - first) / max(1, last - first)
        return min(max(done, 0.0), 1.0)

    @cached_property
    def _ends(self) -> tuple[int, int]:
        """Where the decay begins and ends, in what it goes by."""
        first_step = self._step_numbers.samples(self._train.warmup_iters + 1)
        last_step = self._step_numbers.samples(self._train.iters)
        return self._amount_before(first_step.start), self._amount_before(last_step.stop)

    def _amount_before(self, sample: int) -> int:
        """Samples or tokens that steps take before a sample: none of what is skipped."""
        amount = self._before(sample)
        for start, stop in self._step_numbers.skipped:
            amount -= self._before(min(stop, sample)) - self._before(min(start, sample))
        return amount
