"""The loss of a step: sums over unmasked tokens, kept by sample, and what all ranks sum once a step.

That sum is one small collective, since each waits for the slowest rank: the losses of the global
batch, by source too, and what ends the run, so that no rank begins a step that another does not.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from streammega.parallel import Ranks
from streammega.parallel.groups import WORLD
from streammega.train.vocab_loss import VocabPart, vocab_parallel_loss

IGNORED = -100
"""The label of positions without loss."""


@dataclass(frozen=True)
class Losses:
    """Of some micro-batches on this rank: loss summed over the unmasked tokens of every sample, and
    how many those are.

    Both float32 [samples]; without samples where the loss is not computed.
    """

    loss: Tensor
    tokens: Tensor


class StepLosses:
    """The loss function of one step, which keeps the loss of every sample.

    Args:
        scale: the sum that is given to backward is multiplied by it.
        part: the part of the vocabulary of which logits are given; None: all of it.
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
        """Of all micro-batches so far."""
        if not self._loss:
            none = torch.zeros(0, device=device)
            return Losses(none, none)
        return Losses(torch.cat(self._loss), torch.cat(self._tokens))


@dataclass(frozen=True, kw_only=True)
class StepTotals:
    """Of one step, the same on all ranks.

    stop: some rank was asked to end the run. interrupted: some rank by Ctrl-C. failed_save: a save
    has failed on some rank. loss: the mean over unmasked tokens of the global batch.
    loss_of_source: the same of each dataset of a blend that had any; empty without a blend.
    """

    stop: bool
    interrupted: bool
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
        stop_signal: what has asked this rank to stop.
        failed_save: whether a save has failed here.
        losses: of the samples of this rank; None where another rank counts them.
        source_of_sample: int64 [samples], the index in `sources` of each; None: not by source.
        sources: names of the datasets of the blend.
        ranks: of the run.
        device: on which they talk.
    """
    flags = torch.tensor(
        [stop_signal is not None, stop_signal == signal.SIGINT, failed_save], dtype=torch.float64
    )
    sums, loss_by_source, tokens_by_source = _sums(losses, source_of_sample, len(sources))
    parts = (flags, sums, loss_by_source, tokens_by_source)
    total = torch.cat(parts).to(device)
    ranks.all_reduce(total, WORLD)
    sizes = [len(part) for part in parts]
    flags, sums, loss_by_source, tokens_by_source = torch.split(total.cpu(), sizes)
    stops, interrupts, failed_saves = flags.tolist()
    loss_sum, token_sum = sums.tolist()
    return StepTotals(
        stop=stops > 0,
        interrupted=interrupts > 0,
        failed_save=failed_saves > 0,
        loss=loss_sum / max(token_sum, 1.0),
        loss_of_source=_means(sources, loss_by_source, tokens_by_source),
    )


def _sums(
    losses: Losses | None, source_of_sample: NDArray[np.int64] | None, num_sources: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Of this rank's samples, float64 on the host: loss and tokens [2], and each by source
    [num_sources].
    """
    loss_by_source = torch.zeros(num_sources, dtype=torch.float64)
    tokens_by_source = torch.zeros(num_sources, dtype=torch.float64)
    if losses is None:
        return torch.zeros(2, dtype=torch.float64), loss_by_source, tokens_by_source
    loss = losses.loss.double().cpu()
    tokens = losses.tokens.double().cpu()
    if source_of_sample is not None:
        source = torch.from_numpy(source_of_sample)
        loss_by_source.index_add_(0, source, loss)
        tokens_by_source.index_add_(0, source, tokens)
    return torch.stack((loss.sum(), tokens.sum())), loss_by_source, tokens_by_source


def _means(sources: Sequence[str], loss: Tensor, tokens: Tensor) -> dict[str, float]:
    """The mean loss of each source that had tokens; none where there is but one source."""
    if len(sources) < 2:
        return {}
    means: dict[str, float] = {}
    for name, loss_sum, token_sum in zip(sources, loss.tolist(), tokens.tolist(), strict=True):
        if token_sum:
            means[name] = loss_sum / token_sum
    return means
