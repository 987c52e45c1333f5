"""AdamW over the stages of a rank, its learning rate at every step, and the scale of fp16 losses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from streammega.errors import GradientError
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


class LossScale:
    """The factor that keeps fp16 gradients from vanishing: it doubles after `interval` good steps, and
    halves after one whose gradients overflow.

    Multiply the loss by `value`. After the reduction `unscale` returns whether to step, the same on
    all ranks.
    """

    def __init__(
        self, value: float = 2.0**16, interval: int = 1000, min_value: float = 1.0
    ) -> None:
        self.value = value
        self.interval = interval
        self.min_value = min_value
        self.good = 0

    def unscale(
        self, grads: Sequence[Tensor], device: torch.device, divided_by: float = 1.0
    ) -> bool:
        """Divide the gradients by the scale. If they are not finite on some rank, make the scale smaller
        instead, and return False.

        grads: this rank's parts. device: of the gradients. divided_by: a divisor of the loss, which
        keeps a sum over many tokens within fp16.

        Raises GradientError where they are not finite at the smallest scale.
        """
        bad = torch.zeros((), device=device)
        # Not the 2-norm, whose squares may overflow. torch has no largest element of an empty tensor.
        largest = [
            torch.linalg.vector_norm(grad, torch.inf).float() for grad in grads if grad.numel()
        ]
        if largest:
            bad = (~torch.stack(largest).isfinite()).any().float()
        # over all ranks of the world: they have one scale, so all of them step, or none
        if dist.is_initialized():
            dist.all_reduce(bad, op=dist.ReduceOp.MAX)
        if bad:
            if self.value <= self.min_value:
                raise GradientError(
                    f"gradients are not finite at the least loss scale, {self.min_value:g}: the run has "
                    f"diverged; resume from the last checkpoint with a lower learning rate"
                )
            self.value = max(self.value / 2, self.min_value)
            self.good = 0
            return False
        if grads:
            torch._foreach_mul_(list(grads), divided_by / self.value)
        self.good += 1
        if self.good == self.interval:
            self.value *= 2
            self.good = 0
        return True

    def state_dict(self) -> dict[str, float]:
        """What a resume needs."""
        return {"value": self.value, "good": self.good}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue with a saved scale."""
        self.value = float(state["value"])
        self.good = int(state["good"])
