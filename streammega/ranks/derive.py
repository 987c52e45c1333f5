"""Fields from ids in their stored width, on the device that trains. Equal to `samples.fields`, which does it for the CPU."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from streammega.config import DataConfig
from streammega.errors import ConfigError
from streammega.ranks.context import Bounds, split_batch
from streammega.samples.fields import Batch, batch_fields


def needs_whole_samples(config: DataConfig) -> bool:
    """Whether some field of a part depends on tokens before it: then every context-parallel rank reads whole samples."""
    return config.reset_position_ids or config.reset_attention_mask or config.create_attention_mask


def rank_fields(ids: Tensor, valid: Tensor, config: DataConfig, bounds: Bounds, *, parts: bool) -> Batch:
    """tokens, labels, loss_mask, position_ids [samples, kept], and what the config adds, of the tokens that a rank keeps.

    Args:
        ids: in the stored dtype, [samples, S + 1]; or with `parts` [samples * len(bounds), P + 1], the rows of a sample in order.
        valid: int64 [rows of ids], how many ids of a row are not padding.
        bounds: [start, stop) of the kept parts; one of [0, S) where everything is kept.
        parts: the rows are the parts, already.
    """
    if not parts:
        batch = _fields(ids, valid, config)
        return batch if len(bounds) == 1 else split_batch(batch, bounds)
    if needs_whole_samples(config):
        raise ConfigError("document bounds need whole samples: open the loader without cp_rank and cp_size, or by open_loader")
    count, length = len(bounds), bounds[0][1] - bounds[0][0]
    batch = _fields(ids, valid, replace(config, sequence_length=length))
    samples = len(ids) // count
    kept = {name: batch[name].reshape(samples, count * length) for name in ("tokens", "labels", "loss_mask")}
    starts = torch.cat([torch.arange(start, stop, device=ids.device) for start, stop in bounds])
    return kept | {"position_ids": starts.expand(samples, -1)}


def _fields(ids: Tensor, valid: Tensor, config: DataConfig) -> Batch:
    if ids.device.type == "cpu":
        return batch_fields(ids.numpy(), valid.numpy(), config, bounds=True)
    return device_fields(ids, valid, config)


def device_fields(ids: Tensor, valid: Tensor, config: DataConfig) -> Batch:
    """What `samples.fields.batch_fields` makes, by torch on any device. ids: [samples, S + 1] of any integer dtype."""
    samples, length = len(ids), config.sequence_length
    pad, eod = config.effective_pad_id, -1 if config.eod_id is None else config.eod_id
    whole = _widen(ids)
    column = torch.arange(length + 1, device=ids.device)
    whole = torch.where(column < valid[:, None], whole, pad)
    documents = whole
    padding = whole == pad
    whole = whole.masked_fill(padding, 0)
    tokens, labels = whole[:, :-1], whole[:, 1:]
    masked = padding[:, 1:]
    if config.eod_mask_loss:
        masked = masked | (documents[:, :-1] == eod)
    ends = documents[:, :-1] == eod
    position = column[:-1].expand(samples, -1)
    begins = torch.zeros_like(position)
    begins[:, 1:] = torch.where(ends[:, :-1], position[:, 1:], 0)
    first = begins.cummax(1).values  # where the document of each token begins
    batch = {
        "tokens": tokens,
        "labels": labels,
        "loss_mask": (~masked).float(),
        "position_ids": position - first if config.reset_position_ids else position,
    }
    if config.reset_attention_mask:
        batch["cu_seqlens"] = _cu_seqlens(first)
    if config.create_attention_mask:
        later = torch.ones(length, length, dtype=torch.bool, device=ids.device).triu(1).expand(samples, -1, -1)
        other = first[:, :, None] != first[:, None, :] if config.reset_attention_mask else later
        batch["attention_mask"] = (later | other)[:, None]
    return batch


def _cu_seqlens(first: Tensor) -> Tensor:
    """Bounds of documents from the beginning of each token's document, int64 [samples, S]."""
    samples, length = first.shape
    own = torch.arange(length, device=first.device)
    bounds = torch.where(first == own, own, length).sort(1).values
    most = int((bounds < length).sum(1).max())
    bounds = torch.cat([bounds, bounds.new_full((samples, 1), length)], 1)
    return bounds[:, : most + 1].to(torch.int32)


def _widen(ids: Tensor) -> Tensor:
    """int64; where a device has no unsigned integers, their bits are widened by hand."""
    if ids.dtype in (torch.uint16, torch.uint32):
        signed, mask = (torch.int16, 0xFFFF) if ids.dtype == torch.uint16 else (torch.int32, 0xFFFFFFFF)
        return ids.view(signed).to(torch.int64) & mask
    return ids.to(torch.int64)


@lru_cache(maxsize=64)
def torch_dtype(dtype: np.dtype[np.generic]) -> torch.dtype:
    """The torch dtype of stored ids."""
    return torch.from_numpy(np.empty(0, dtype)).dtype
