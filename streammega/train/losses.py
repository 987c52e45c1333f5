"""The loss of a step: sums over unmasked tokens, kept by sample."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

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
