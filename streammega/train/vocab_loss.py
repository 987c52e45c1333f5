"""Cross entropy of logits whose vocabulary is divided over tensor-parallel ranks: no rank ever
holds a whole row.

Of each row two numbers go over all ranks, beside its largest logit: the sum of its exponentials,
and the target's logit, which one rank has. torch has the same as `loss_parallel`, for code that
holds it open around forward and backward both; here backward belongs to pipeline schedules, and
this keeps one array of the logits' size instead of three.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class VocabPart:
    """This rank's part of the vocabulary: `size` entries from `start` on.

    group: the ranks that have all of it.
    """

    group: dist.ProcessGroup
    start: int
    size: int


def vocab_parallel_loss(logits: Tensor, target: Tensor, part: VocabPart, ignored: int) -> Tensor:
    """The cross entropy of each row, float32 [rows], the same on all ranks of the group; 0 where
    the target is `ignored`.

    logits: [rows, entries of this rank], of any float dtype. target: int64 [rows], of the whole
    vocabulary.
    """
    loss: Tensor = _VocabParallelLoss.apply(logits, target, part, ignored)  # type: ignore[no-untyped-call]
    return loss


class _VocabParallelLoss(torch.autograd.Function):
    """log(sum exp(x)) - x[target] of each row x.

    Its gradient is softmax(x), less 1 at the target.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, part: VocabPart, ignored: int) -> Tensor:
        """Two small collectives: the largest logits first, or the exponentials would overflow; then
        both sums as one.
        """
        # A copy, which becomes the probabilities in place: there is one array of this size.
        values = logits.to(torch.float32, copy=True)
        largest = values.amax(1)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=part.group)
        values -= largest[:, None]
        used = target != ignored
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
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        """grad: [rows], the same on all ranks.

        No collective: each rank has what its own logits need.
        """
        probabilities, column, here, used = ctx.saved_tensors
        grad = grad.masked_fill(~used, 0.0)[:, None]
        grad_logits = probabilities * grad
        less_at_target = -grad * here[:, None]
        grad_logits.scatter_add_(1, column, less_at_target)
        return grad_logits.to(ctx.dtype), None, None, None
