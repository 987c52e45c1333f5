"""The losses of the datasets of a blend, as exact sums over tokens."""

from __future__ import annotations

import torch
from torch import Tensor


def add_losses_by_source(
    sums: Tensor, dataset_id: Tensor, losses: Tensor, mask: Tensor | None = None
) -> None:
    """Add the losses of a micro-batch to the sums of its datasets. It waits for no device.

        names = sm.source_names(config)
        sums = torch.zeros(len(names), 2, dtype=torch.float64, device=device)
        for batch in loader:                             # of DataConfig(fields=[..., "dataset_id"])
            losses = cross_entropy(..., reduction="none")         # of each token, [batch, S]
            sm.add_losses_by_source(sums, batch["dataset_id"], losses, batch.get("loss_mask"))
        torch.distributed.all_reduce(sums)                                    # over all ranks
        means = {n: loss / tokens for n, (loss, tokens) in zip(names, sums.tolist()) if tokens}

    Args:
        sums: float64 [datasets, 2], the loss and the tokens of each.
        dataset_id: int64 [batch].
        losses: of each token, [batch, S].
        mask: their weights, [batch, S]. A token of weight 0 does not count, even if its loss is
            infinite. None: all tokens count.
    """
    losses = losses.detach().double()
    weights = torch.ones_like(losses) if mask is None else mask.detach().to(losses)
    # `where`, because 0 times an infinite loss is not 0
    loss_of_token = torch.where(weights != 0, losses * weights, 0.0)
    loss_and_tokens = torch.stack((loss_of_token.sum(1), weights.sum(1)), 1)
    sums.index_add_(
        0, dataset_id.to(sums.device, non_blocking=True), loss_and_tokens.to(sums.device)
    )
