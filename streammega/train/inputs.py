"""The inputs of this rank's pipeline stages, made of the fields of a micro-batch."""

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

    tokens: int64 [samples, kept] on first stages, else None. keywords: of GPT.forward, for every stage:
    "position_ids", and with documents "cu_seqlens" and "longest". target: labels with IGNORED where
    there is no loss, int64 [samples, kept], on last stages, else None.
    """

    tokens: Tensor | None
    keywords: dict[str, Tensor]
    target: Tensor | None

    @property
    def arguments(self) -> tuple[Tensor, ...]:
        """Positional arguments of the model. A later stage gets activations from the pipeline instead."""
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
            inputs = self._make_inputs(batch, kept)
            cu_seqlens = inputs.keywords.get("cu_seqlens")
            if cu_seqlens is None:
                yield inputs
                continue
            longest = batch.longest if isinstance(batch, RankBatch) else None
            if longest is not None:
                yield _with_longest(inputs, longest)
            elif self._device.type == "cpu":
                yield _with_longest(inputs, int(longest_document(cu_seqlens)))
            else:
                others = [self._make_inputs(other, kept) for other in batches]
                inputs_of_step = [inputs, *others]
                lengths = [longest_document(each.keywords["cu_seqlens"]) for each in inputs_of_step]
                longest = int(torch.stack(lengths).max())
                yield from (_with_longest(each, longest) for each in inputs_of_step)

    def _make_inputs(self, batch: Batch, kept: Bounds) -> StageInputs:
        """The inputs of a micro-batch, but for "longest".

        batch: the fields of this rank's stage, as `parallel.broadcast.stage_fields` names them: tokens
        on the first, labels and loss_mask on the last; on a stage between them there may be none.
        kept: tokens [start, stop) of each sample that this rank keeps.
        """
        positions = batch.get("position_ids")
        if positions is None:  # they count from 0 in each sample
            columns = [torch.arange(start, stop, device=self._device) for start, stop in kept]
            positions = torch.cat(columns).expand(self._micro_batch_size, -1)
        keywords = {"position_ids": positions}
        # With context parallelism "cu_seqlens" is of the kept tokens, and "cu_seqlens_whole" of whole
        # samples. Attention needs the latter: queries also see keys of other ranks.
        cu_seqlens = batch.get("cu_seqlens_whole", batch.get("cu_seqlens"))
        if cu_seqlens is not None:
            keywords["cu_seqlens"] = cu_seqlens
        target = None
        if "labels" in batch:
            target = batch["labels"].masked_fill(batch["loss_mask"] == 0, IGNORED)
        return StageInputs(batch.get("tokens"), keywords, target)


def _with_longest(inputs: StageInputs, longest: int) -> StageInputs:
    """Add the length of the longest document, on the host, once for each sample."""
    num_samples = len(inputs.keywords["cu_seqlens"])
    inputs.keywords["longest"] = torch.tensor(longest).expand(num_samples)
    return inputs
