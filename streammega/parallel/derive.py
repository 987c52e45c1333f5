"""The fields of a rank: from ids in their stored width, on the device that trains, of the tokens
that it keeps.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from streammega.config import DataConfig
from streammega.errors import ConfigError
from streammega.parallel.context import Bounds, split_batch, split_cu_seqlens
from streammega.samples.fields import Batch, batch_fields, cu_seqlens, torch_dtype
from streammega.samples.fields_torch import device_fields

__all__ = ["device_fields", "needs_whole_samples", "rank_fields", "torch_dtype"]


def needs_whole_samples(config: DataConfig) -> bool:
    """Whether some field of a part depends on tokens before it: then every context-parallel rank
    reads whole samples.
    """
    return config.reset_position_ids or config.reset_attention_mask or config.create_attention_mask


class DocumentCounts(NamedTuple):
    """What the shapes of a micro-batch's document bounds depend on, known where its ids were read.

    most, most_kept: documents of the sample that has most, and of what a rank keeps of it; longest:
    tokens of the longest of all.
    """

    most: int
    most_kept: int
    longest: int


def documents_of(ids: Tensor, valid: Tensor, config: DataConfig, bounds: Bounds) -> DocumentCounts:
    """The same numbers as those of the bounds that a device makes of ids [samples, S + 1], on the
    host.
    """
    length = config.sequence_length
    tokens = ids[:, :length].numpy().astype(np.int64)
    if int(valid.min()) < length:
        tokens[np.arange(length) >= valid.numpy()[:, None]] = config.effective_pad_id
    whole = cu_seqlens(tokens, -1 if config.eod_id is None else config.eod_id)
    kept = whole if len(bounds) == 1 else split_cu_seqlens(whole, bounds)
    return DocumentCounts(whole.shape[1] - 1, kept.shape[1] - 1, int(whole.diff(dim=1).max()))


def rank_fields(
    ids: Tensor,
    valid: Tensor,
    config: DataConfig,
    bounds: Bounds,
    *,
    parts: bool,
    documents: DocumentCounts | None = None,
    learned: Tensor | None = None,
) -> Batch:
    """tokens, labels, loss_mask, position_ids [samples, kept], and what the config adds, of the
    tokens that a rank keeps.

    Args: ids: in the stored dtype, [samples, S + 1]; or with `parts` [samples * len(bounds), P +
        1], the rows of a sample in order. valid: int64 [rows of ids], how many ids of a row are not
        padding. bounds: [start, stop) of the kept parts; one of [0, S) where everything is kept.
        parts: the rows are the parts, already. documents: of these ids; None: where they are
        needed, the host waits for the device to count them. learned: bool, of each of `ids`: there
        is no loss where a label is not learned; None: all are.
    """
    if not parts:
        batch = _fields(ids, valid, config, documents, learned)
        return (
            batch
            if len(bounds) == 1
            else split_batch(batch, bounds, documents and documents.most_kept)
        )
    if needs_whole_samples(config):
        raise ConfigError(
            "document bounds need whole samples: open the loader without cp_rank and cp_size, or by open_loader"
        )
    count = len(bounds)
    length = bounds[0][1] - bounds[0][0]
    batch = _fields(ids, valid, replace(config, sequence_length=length), None, learned)
    samples = len(ids) // count
    kept = {
        name: batch[name].reshape(samples, count * length)
        for name in ("tokens", "labels", "loss_mask")
    }
    starts = torch.cat([torch.arange(start, stop, device=ids.device) for start, stop in bounds])
    return kept | {"position_ids": starts.repeat(samples, 1)}


def _fields(
    ids: Tensor,
    valid: Tensor,
    config: DataConfig,
    documents: DocumentCounts | None,
    learned: Tensor | None,
) -> Batch:
    if ids.device.type == "cpu":
        batch = batch_fields(ids, valid, config, bounds=True)
    else:
        batch = device_fields(ids, valid, config, most=documents and documents.most)
    if learned is not None:
        batch["loss_mask"] = batch["loss_mask"] * learned[:, 1:]
    return batch
