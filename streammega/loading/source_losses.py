"""The loss of each dataset of a blend, as exact means over the tokens of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from streammega.config import DataConfig
from streammega.errors import ConfigError
from streammega.samples.segments import source_names


class SourceLosses:
    """Sums the losses of samples by dataset until `means` is called.

        losses = SourceLosses.of(config, device=device)
        for batch in loader:                                # of DataConfig(return_dataset_ids=True)
            loss = cross_entropy(..., reduction="none")     # of each token, [batch, S]
            losses.add(batch["dataset_id"], loss.detach(), batch.get("loss_mask"))
            if step % 10 == 0:
                log(losses.means(prefix="train/loss/"))

    Sums are float64. No call waits for a device before `means`.

    Args:
        names: names of the datasets, in the order of their ids.
        device: the device of the sums, which the ranks add up there.

    Raises ConfigError if there are no names.
    """

    def __init__(self, names: Sequence[str], device: torch.device | str = "cpu") -> None:
        if not names:
            raise ConfigError("losses by source need at least one dataset name; names is empty")
        self.names = list(names)
        self._sums = torch.zeros(len(names), 2, dtype=torch.float64, device=device)

    @classmethod
    def of(
        cls, config: DataConfig, *, split: str = "train", device: torch.device | str = "cpu"
    ) -> SourceLosses:
        """Make one for the datasets of a config's split in all phases.

        Their names are the last parts of their prefixes. Raises ConfigError if the split has no data.
        """
        return cls(source_names(config, split), device)

    def add(self, dataset_id: Tensor, losses: Tensor, mask: Tensor | None = None) -> None:
        """Add a micro-batch: dataset_id int64 [batch], the loss of each token [batch, S], and their
        weights, mask [batch, S].

        A token with weight 0 does not count, even if its loss is infinite. None: all tokens count.
        """
        mask = torch.ones_like(losses) if mask is None else mask
        add_losses_by_source(self._sums, dataset_id, losses, mask.to(losses.device))

    def means(self, group: Any = None, *, prefix: str = "") -> dict[str, float]:
        """{prefix + name: mean loss} of each dataset that had tokens since the last call.

        The means are over all ranks of a group; None: all ranks. Under torch.distributed the call is
        collective: make it on all of them.
        """
        sums = self._sums
        self._sums = torch.zeros_like(sums)
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(sums, group=group)
        means: dict[str, float] = {}
        for name, (loss, tokens) in zip(self.names, sums.tolist(), strict=True):
            if tokens:
                means[prefix + name] = loss / tokens
        return means

    def clear(self) -> None:
        """Set all sums to 0."""
        self._sums = torch.zeros_like(self._sums)


def add_losses_by_source(sums: Tensor, dataset_id: Tensor, losses: Tensor, mask: Tensor) -> None:
    """Add the losses and weights of a micro-batch to the sums of its datasets.

    sums: float64 [datasets, 2], (loss, tokens) of each. losses, mask: [batch, S].
    """
    weights = mask.detach().double()
    # `where`, because 0 times an infinite loss is not 0
    loss_of_token = torch.where(weights != 0, losses.detach().double() * weights, 0.0)
    loss_and_tokens = torch.stack((loss_of_token.sum(1), weights.sum(1)), 1)
    sums.index_add_(
        0, dataset_id.to(sums.device, non_blocking=True), loss_and_tokens.to(sums.device)
    )
