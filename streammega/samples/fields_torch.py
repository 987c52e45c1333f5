"""Fields from ids by torch, on the device that trains.

Equal to what `samples.fields` makes by kernels for the CPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from streammega.config import FieldsConfig


def device_fields(
    ids: Tensor,
    valid: Tensor,
    config: FieldsConfig,
    *,
    bounds: bool = True,
    most: int | None = None,
) -> dict[str, Tensor]:
    """What `batch_fields` makes, by torch on any device, without waiting for it. Ids are not
    checked.

    ids: [samples, S + 1] or [samples, S], of any integer dtype; valid: int64 [samples], ids of a
    row that are not padding. most: documents of the row that has most; None: for cu_seqlens it is
    asked of the device, which the host then waits for.
    """
    samples = len(ids)
    length = config.sequence_length
    pad = config.effective_pad_id
    eod = -1 if config.eod_id is None else config.eod_id
    whole = torch.nn.functional.pad(_widen(ids), (0, length + 1 - ids.shape[1]), value=pad)
    column = torch.arange(length + 1, device=ids.device)
    whole = torch.where(column < valid[:, None], whole, pad)
    documents = whole
    padding = whole == pad
    whole = whole.masked_fill(padding, 0)
    masked = padding[:, 1:]
    if config.eod_mask_loss:
        masked = masked | (documents[:, :-1] == eod)
    ends = documents[:, :-1] == eod
    position = column[:-1].repeat(samples, 1)
    begins = torch.zeros_like(position)
    begins[:, 1:] = torch.where(ends[:, :-1], position[:, 1:], 0)
    first = begins.cummax(1).values  # where the document of each token begins
    batch = {
        "tokens": whole[:, :-1].contiguous(),
        "labels": whole[:, 1:].contiguous(),
        "loss_mask": (~masked).float(),
        "position_ids": position - first if config.reset_position_ids else position,
    }
    if bounds and config.reset_attention_mask:
        batch["cu_seqlens"] = _cu_seqlens(first, most)
    if config.create_attention_mask:
        later = (
            torch.ones(length, length, dtype=torch.bool, device=ids.device)
            .triu(1)
            .expand(samples, -1, -1)
        )
        other = first[:, :, None] != first[:, None, :] if config.reset_attention_mask else later
        batch["attention_mask"] = (later | other)[:, None]
    return batch


def _cu_seqlens(first: Tensor, most: int | None) -> Tensor:
    """Bounds of documents from the beginning of each token's document, int64 [samples, S]."""
    samples, length = first.shape
    own = torch.arange(length, device=first.device)
    bounds = torch.where(first == own, own, length).sort(1).values
    if most is None:
        most = int((bounds < length).sum(1).max()) if samples else 1
    bounds = torch.cat([bounds, bounds.new_full((samples, 1), length)], 1)
    return bounds[:, : most + 1].to(torch.int32)


def _widen(ids: Tensor) -> Tensor:
    """int64; where a device has no unsigned integers, their bits are widened by hand."""
    if ids.dtype in (torch.uint16, torch.uint32):
        signed, mask = (
            (torch.int16, 0xFFFF) if ids.dtype == torch.uint16 else (torch.int32, 0xFFFFFFFF)
        )
        return ids.view(signed).to(torch.int64) & mask
    return ids.to(torch.int64)
