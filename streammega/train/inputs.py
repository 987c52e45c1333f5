"""The inputs of the stages of a model, by micro-batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from streammega.order.sharding import zigzag_bounds
from streammega.parallel import Ranks
from streammega.parallel.broadcast import RankBatch
from streammega.parallel.fields import Bounds
from streammega.samples.fields import Batch
from streammega.train.attention import longest_document
from streammega.train.config import RunConfig
from streammega.train.losses import IGNORED


@dataclass(frozen=True)
class StageInputs:
    """The inputs of one micro-batch.

    tokens: int64 [samples, S] on first stages, else None. keywords: of every stage. target: labels
    with IGNORED where there is no loss, int64 [samples, S], on last stages.
    """

    tokens: Tensor | None
    keywords: dict[str, Tensor]
    target: Tensor | None

    @property
    def arguments(self) -> tuple[Tensor, ...]:
        """The tokens, if there are any."""
        return () if self.tokens is None else (self.tokens,)


class ModelInputs:
    """Makes the inputs of a run's micro-batches on this rank."""

    def __init__(self, config: RunConfig, ranks: Ranks, device: torch.device) -> None:
        self._micro_batch_size = config.train.micro_batch_size
        self._device = device
        self._ranks = ranks

    def bounds_of(self, length: int) -> list[tuple[int, int]]:
        """Tokens [start, stop) of every sample of so many tokens that this rank keeps."""
        return zigzag_bounds(length, self._ranks.at["cp"], self._ranks.layout.cp)

    def of_step(self, batches: Iterable[Batch], length: int) -> Iterator[StageInputs]:
        """The inputs of the micro-batches of a step, one by one. length: tokens of a sample.

        Kernels for documents need the length of the longest document on the host. Where no rank has
        counted it, the host reads it from the device once for a whole step, before the first
        micro-batch: otherwise each one would wait for the computation of the one before.
        """
        batches = iter(batches)
        kept = self.bounds_of(length)
        for batch in batches:
            inputs = self._of(batch, kept)
            bounds = inputs.keywords.get("cu_seqlens")
            if bounds is None:
                yield inputs
                continue
            longest = batch.longest if isinstance(batch, RankBatch) else None
            if longest is not None:
                yield _with_longest(inputs, longest)
            elif self._device.type == "cpu":
                yield _with_longest(inputs, int(longest_document(bounds)))
            else:
                inputs_of_step = [inputs, *(self._of(other, kept) for other in batches)]
                lengths = [longest_document(each.keywords["cu_seqlens"]) for each in inputs_of_step]
                longest = int(torch.stack(lengths).max())
                yield from (_with_longest(each, longest) for each in inputs_of_step)

    def _of(self, batch: Batch, kept: Bounds) -> StageInputs:
        keywords = {"position_ids": self._positions(batch, kept)}
        # Attention needs documents of whole samples: queries also see keys of other ranks.
        bounds = batch.get("cu_seqlens_whole", batch.get("cu_seqlens"))
        if bounds is not None:
            keywords["cu_seqlens"] = bounds
        target = None
        if "labels" in batch:
            has_no_loss = batch["loss_mask"] == 0
            target = batch["labels"].masked_fill(has_no_loss, IGNORED)
        return StageInputs(batch.get("tokens"), keywords, target)

    def _positions(self, batch: Batch, kept: Bounds) -> Tensor:
        """int64 [samples, kept]: those of the batch, or else counted from 0 in each sample."""
        positions = batch.get("position_ids")
        if positions is not None:
            return positions
        columns = [torch.arange(start, stop, device=self._device) for start, stop in kept]
        return torch.cat(columns).expand(self._micro_batch_size, -1)


def _with_longest(inputs: StageInputs, longest: int) -> StageInputs:
    """Add the length of the longest document, on the host, once for each sample."""
    num_samples = len(inputs.keywords["cu_seqlens"])
    inputs.keywords["longest"] = torch.tensor(longest).expand(num_samples)
    return inputs
