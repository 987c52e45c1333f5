"""The inputs of the stages of a model, for each micro-batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
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
    """Of one micro-batch.

    tokens: int64 [samples, S] on first stages, else None. keywords: for every stage.
    target: labels with IGNORED where there is no loss, int64 [samples, S], on last stages.
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
        """The inputs of the micro-batches of a step, one by one, of samples of so many tokens.

        Kernels for documents need the length of the longest one on the host. Where no rank counted
        it, the host reads it from the device once for a whole step, before anything is under way:
        in each micro-batch it would wait for the computation of the one before.
        """
        batches = iter(batches)
        kept = self.bounds_of(length)
        for batch in batches:
            longest = batch.longest if isinstance(batch, RankBatch) else None
            on_device = self._device.type != "cpu"
            if longest is None and on_device and "cu_seqlens" in batch:
                yield from self._after_one_read([batch, *batches], kept)
                return
            inputs = self._of(batch, kept)
            bounds = inputs.keywords.get("cu_seqlens")
            if bounds is not None:
                known = longest_document(bounds).cpu() if longest is None else torch.tensor(longest)
                inputs.keywords["longest"] = known.expand(len(bounds))
            yield inputs

    def _after_one_read(self, batches: Sequence[Batch], kept: Bounds) -> list[StageInputs]:
        """The inputs of all micro-batches of a step, after one read from the device."""
        inputs_of_step = [self._of(batch, kept) for batch in batches]
        with_bounds = [inputs for inputs in inputs_of_step if "cu_seqlens" in inputs.keywords]
        if not with_bounds:
            return inputs_of_step
        lengths = [longest_document(inputs.keywords["cu_seqlens"]) for inputs in with_bounds]
        longest = torch.stack(lengths).max().cpu()
        for inputs in with_bounds:
            num_samples = len(inputs.keywords["cu_seqlens"])
            inputs.keywords["longest"] = longest.expand(num_samples)
        return inputs_of_step

    def _of(self, batch: Batch, kept: Bounds) -> StageInputs:
        keywords = {"position_ids": self._positions(batch, kept)}
        # Attention wants documents of whole samples: queries also see keys of other ranks.
        bounds = batch.get("cu_seqlens_whole", batch.get("cu_seqlens"))
        if bounds is not None:
            keywords["cu_seqlens"] = bounds
        target = None
        if "labels" in batch:
            has_no_loss = batch["loss_mask"] == 0
            target = batch["labels"].masked_fill(has_no_loss, IGNORED)
        return StageInputs(batch.get("tokens"), keywords, target)

    def _positions(self, batch: Batch, kept: Bounds) -> Tensor:
        """int64 [samples, kept]: those of the batch, or else of whole samples from 0."""
        positions = batch.get("position_ids")
        if positions is not None:
            return positions
        columns = [torch.arange(start, stop, device=self._device) for start, stop in kept]
        return torch.cat(columns).expand(self._micro_batch_size, -1)
