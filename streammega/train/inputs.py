"""The inputs of this rank's pipeline stages, made of the fields of a micro-batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from streammega.parallel.broadcast import RankBatch
from streammega.parallel.fields import Bounds
from streammega.samples.fields import Batch
from streammega.train.losses import IGNORED


@dataclass(frozen=True)
class StageInputs:
    """The inputs of one micro-batch.

    tokens: int64 [samples, kept] on first stages, else None: a later one gets activations. keywords: of
    GPT.forward, for every stage: "position_ids", and with documents "cu_seqlens" and, if the host knows
    it, "longest". target: labels with IGNORED where there is no loss, int64 [samples, kept], on last
    stages, else None.
    """

    tokens: Tensor | None
    keywords: dict[str, Any]
    target: Tensor | None


def stage_inputs(
    batch: Batch, kept: Bounds, micro_batch_size: int, device: torch.device
) -> StageInputs:
    """The inputs of a micro-batch.

    Args:
        batch: the fields that RankBatches gives this rank's stage: tokens on the first, labels and
            loss_mask on the last; on a stage between them there may be none.
        kept: tokens [start, stop) of each sample that this rank keeps.
        micro_batch_size: samples of the micro-batch.
        device: of the stages.
    """
    positions = batch.get("position_ids")
    if positions is None:  # they count from 0 in each sample
        columns = [torch.arange(start, stop, device=device) for start, stop in kept]
        positions = torch.cat(columns).expand(micro_batch_size, -1)
    keywords: dict[str, Any] = {"position_ids": positions}
    # With context parallelism "cu_seqlens" is of the kept tokens, and "cu_seqlens_whole" of whole
    # samples. Attention needs the latter: queries also see keys of other ranks.
    cu_seqlens = batch.get("cu_seqlens_whole", batch.get("cu_seqlens"))
    if cu_seqlens is not None:
        keywords["cu_seqlens"] = cu_seqlens
        # Ranks with a CUDA device always know it, so they never wait for the device to tell them.
        if isinstance(batch, RankBatch) and batch.longest is not None:
            keywords["longest"] = batch.longest
    target = None
    if "labels" in batch:
        target = batch["labels"].masked_fill(batch["loss_mask"] == 0, IGNORED)
    return StageInputs(batch.get("tokens"), keywords, target)
