"""The loss of a step: sums over unmasked tokens, by sample, and the totals over all ranks.

The totals are one small collective a step, since each collective waits for the slowest rank. They have
the losses of the global batch, and everything that ends a run: so all ranks end after the same step.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from streammega.loading.source_losses import add_losses_by_source
from streammega.parallel import Ranks
from streammega.parallel.groups import WORLD

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
            losses = vocab_parallel_loss(rows, labels, self._part, IGNORED)
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


@dataclass(frozen=True, kw_only=True)
class StepTotals:
    """The totals of one step, the same on all ranks.

    stop_signal: a signal that asks some rank to end the run; SIGINT if any rank has received one.
    failed_save: whether a save has failed on some rank. loss: the mean over unmasked tokens of the
    global batch. loss_of_source: the same for each dataset of a blend that has such tokens.
    """

    stop_signal: signal.Signals | None
    failed_save: bool
    loss: float
    loss_of_source: dict[str, float]


def add_over_ranks(
    stop_signal: signal.Signals | None,
    failed_save: bool,
    losses: Losses | None,
    source_of_sample: NDArray[np.int64] | None,
    sources: Sequence[str],
    ranks: Ranks,
    device: torch.device,
) -> StepTotals:
    """Collective over all ranks.

    Args:
        stop_signal: the signal that asks this rank to stop.
        failed_save: whether a save has failed here.
        losses: of the samples of this rank; None where another rank counts them.
        source_of_sample: int64 [samples], the index in `sources` of each; None: not by source.
        sources: names of the datasets of the blend.
        ranks: of the run.
        device: of the collective.
    """
    num_sources = len(sources)
    sums = torch.zeros(5 + 2 * num_sources, dtype=torch.float64)
    sizes = [3, 2, 2 * num_sources]
    flags, loss_and_tokens, by_source = torch.split(sums, sizes)
    flags[0] = stop_signal is not None
    flags[1] = stop_signal == signal.SIGINT
    flags[2] = failed_save
    if losses is not None:
        loss = losses.loss.double().cpu()
        tokens = losses.tokens.double().cpu()
        loss_and_tokens[0] = loss.sum()
        loss_and_tokens[1] = tokens.sum()
        if source_of_sample is not None:
            # The mean of each sample, which weighs as much as it has tokens.
            add_losses_by_source(
                by_source.view(num_sources, 2),
                torch.from_numpy(source_of_sample),
                (loss / tokens)[:, None],
                tokens[:, None],
            )
    sums = sums.to(device)
    ranks.all_reduce(sums, WORLD)
    flags, loss_and_tokens, by_source = torch.split(sums.cpu(), sizes)
    num_stops, num_interrupts, num_failed_saves = flags.tolist()
    stop_signal = None
    if num_stops:
        stop_signal = signal.SIGINT if num_interrupts else signal.SIGTERM
    loss_sum, token_sum = loss_and_tokens.tolist()
    means = {
        name: source_loss / source_tokens
        for name, (source_loss, source_tokens) in zip(
            sources, by_source.view(num_sources, 2).tolist(), strict=True
        )
        if source_tokens
    }
    return StepTotals(
        stop_signal=stop_signal,
        failed_save=num_failed_saves > 0,
        loss=loss_sum / max(token_sum, 1.0),
        loss_of_source=means if num_sources > 1 else {},
    )


@dataclass(frozen=True)
class VocabPart:
    """This rank's part of the vocabulary: `size` entries from `start` on.

    group: the ranks that have all of it.
    """

    group: dist.ProcessGroup
    start: int
    size: int


def vocab_parallel_loss(logits: Tensor, target: Tensor, part: VocabPart, ignored: int) -> Tensor:
    """The cross entropy of each row, float32 [rows], the same on all ranks of the group. It is 0 where
    the target is `ignored`.

    logits: [rows, entries of this rank], of any float dtype. target: int64 [rows], of the whole
    vocabulary.
    """
    loss: Tensor = _VocabParallelLoss.apply(logits, target, part, ignored)  # type: ignore[no-untyped-call]
    return loss


class _VocabParallelLoss(torch.autograd.Function):
    """log(sum exp(x)) - x[target] of each row x. Its gradient is softmax(x), less 1 at the target.

    Ranks exchange three numbers of each row: its largest logit, the sum of its exponentials, and the
    target's logit, which one rank has. torch's `loss_parallel` is a context around forward and
    backward, but here pipeline schedules call backward. It also needs three arrays of the logits'
    size instead of one.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, part: VocabPart, ignored: int) -> Tensor:
        """Two small collectives: of the largest logits, so that exponentials do not overflow, and of both
        sums together.
        """
        # This copy becomes the probabilities in place, so there is one array of this size.
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
        """grad: [rows], the same on all ranks. There is no collective."""
        probabilities, column, here, used = ctx.saved_tensors
        grad = grad.masked_fill(~used, 0.0)[:, None]
        grad_logits = probabilities * grad
        less_at_target = -grad * here[:, None]
        grad_logits.scatter_add_(1, column, less_at_target)
        return grad_logits.to(ctx.dtype), None, None, None
