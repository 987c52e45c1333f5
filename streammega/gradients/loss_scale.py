"""The scale of fp16 losses, as it follows from good and bad steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from streammega.errors import GradientError


class LossScale:
    """The factor that keeps fp16 gradients from vanishing: doubled after `interval` good steps,
    halved after a bad one.

    Multiply the loss by `value`; after the reduction `unscale` says whether the step is good, on
    all ranks alike.
    """

    def __init__(self, value: float = 2.0**16, interval: int = 1000, least: float = 1.0) -> None:
        self.value = value
        self.interval = interval
        self.least = least
        self.good = 0

    def unscale(
        self, grads: Sequence[Tensor], device: torch.device, divided_by: float = 1.0
    ) -> bool:
        """Divide the gradients by the scale; False, and a smaller scale, where they are not finite
        on some rank.

        grads: this rank's parts. device: theirs.
        divided_by: what the loss was divided by besides, so that a sum over many tokens keeps
        within fp16.

        Raises GradientError where they are not finite at the least scale: no smaller one is left.
        """
        bad = torch.zeros((), device=device)
        # a norm is finite where all elements are: one pass, and no array of flags
        norms = [torch.linalg.vector_norm(grad) for grad in grads]
        if norms:
            is_finite = torch.stack(norms).isfinite()
            bad = (~is_finite).any().float()
        # over all ranks, whatever their groups: with one scale all step, or none
        if dist.is_initialized():
            dist.all_reduce(bad, op=dist.ReduceOp.MAX)
        if bad:
            if self.value <= self.least:
                raise GradientError(
                    f"gradients are not finite at the least loss scale, {self.least:g}: the run has "
                    f"diverged; resume from the last checkpoint with a lower learning rate"
                )
            self.value = max(self.value / 2, self.least)
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
        """Go on with a saved scale."""
        self.value = float(state["value"])
        self.good = int(state["good"])
