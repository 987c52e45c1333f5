"""The loss of a micro-batch: sums over unmasked tokens, by sample, also where ranks divide the vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100
"""The label of positions without loss."""


@dataclass(frozen=True)
class Losses:
    """Losses of micro-batches on this rank. loss: the sum over the unmasked tokens of each sample;
    tokens: how many those are. Both are float32 [samples]; empty where no loss is computed.
    """

    loss: Tensor
    tokens: Tensor


class StepLosses:
    """The loss function of one step, which keeps the loss of every sample.

    Args:
        scale: multiplies the sum before backward.
        part: this rank's part of the vocabulary; None: all of it.
    """

    def __init__(self, scale: float, part: VocabPart | None) -> None:
        self._scale = scale
        self._part = part
        self._loss: list[Tensor] = []
        self._tokens: list[Tensor] = []

    def __call__(self, logits: Tensor, target: Tensor | None) -> Tensor:
        """The scaled sum; logits [samples, S, vocab_size] or this rank's part of them, target
        [samples, S] with IGNORED.
        """
        assert target is not None
        rows = logits.flatten(0, 1)
        labels = target.flatten()
        if self._part is not None:
            losses = vocab_parallel_loss(rows, labels, self._part)
        else:
            losses = F.cross_entropy(rows.float(), labels, ignore_index=IGNORED, reduction="none")
        loss_of_sample = losses.view_as(target).sum(1)
        tokens_of_sample = (target != IGNORED).sum(1).float()
        self._loss.append(loss_of_sample.detach())
        self._tokens.append(tokens_of_sample)
        return loss_of_sample.sum() * self._scale

    def all(self, device: torch.device) -> Losses:
        """The losses of all micro-batches so far."""
        if not self._loss:
            none = torch.zeros(0, device=device)
            return Losses(none, none)
        return Losses(torch.cat(self._loss), torch.cat(self._tokens))


@dataclass(frozen=True)
class VocabPart:
    """This rank's part of the vocabulary: `size` entries from `start` on.

    group: the ranks that have all of it.
    """

    group: dist.ProcessGroup
    start: int
    size: int


def vocab_parallel_loss(logits: Tensor, target: Tensor, part: VocabPart) -> Tensor:
    """The cross entropy of each row, float32 [rows], the same on all ranks of the group. It is 0 where
    the target is IGNORED.

    logits: [rows, entries of this rank], of any float dtype. target: int64 [rows], of the whole
    vocabulary.
    """
    loss: Tensor = _VocabParallelLoss.apply(logits, target, part)  # type: ignore[no-untyped-call]
    return loss


class _VocabParallelLoss(torch.autograd.Function):
    """log(sum exp(x)) - x[target] of each row x. Its gradient is softmax(x), less 1 at the target.

    Ranks exchange three numbers of each row: its largest logit, the sum of its exponentials, and the
    target's logit, which one rank has. torch's `loss_parallel` is a context around forward and
    backward, but here pipeline schedules call backward. It also needs three arrays of the logits'
    size instead of one.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, part: VocabPart) -> Tensor:
        """Two small collectives: of the largest logits, so that exponentials do not overflow, and of both
        sums together.
        """
        # This copy becomes the probabilities in place, so there is one array of this size.
        values = logits.to(torch.float32, copy=True)
        largest = values.amax(1)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=part.group)
        values -= largest[:, None]
        used = target != IGNORED
        column = target - part.start
        # The logit of each target is added by the one rank that has it; the others add 0.
        here = (column >= 0) & (column < values.shape[1]) & used
        column = column.masked_fill(~here, 0)[:, None]
        target_logit = values.gather(1, column)[:, 0]
        target_logit = target_logit.masked_fill(~here, 0.0)
        exponentials = values.exp_()
        sums = torch.stack((exponentials.sum(1), target_logit))
        dist.all_reduce(sums, group=part.group)
        sum_of_exponentials, target_logit = sums.unbind()
        probabilities = values.div_(sum_of_exponentials[:, None])
        ctx.save_for_backward(probabilities, column, here, used)
        ctx.dtype = logits.dtype
        return torch.where(used, sum_of_exponentials.log() - target_logit, 0.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """grad: [rows], the same on all ranks. There is no collective."""
        probabilities, column, here, used = ctx.saved_tensors
        grad = grad.masked_fill(~used, 0.0)[:, None]
        grad_logits = probabilities * grad
        less_at_target = -grad * here[:, None]
        grad_logits.scatter_add_(1, column, less_at_target)
        return grad_logits.to(ctx.dtype), None, None
