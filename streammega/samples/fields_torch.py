"""Fields from ids by torch, on the device that trains.

Equal to what `samples.fields` makes by kernels for the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from streammega.config import FieldsConfig

NO_ID = -1
"""An eod_id or pad_id that equals no stored id: there is none."""


def device_fields(
    ids: Tensor,
    valid: Tensor,
    config: FieldsConfig,
    names: Sequence[str] | None = None,
    *,
    may_pad: bool = True,
    max_documents: int | None = None,
) -> dict[str, Tensor]:
    """What `batch_fields` makes, by torch on any device, without waiting for it. Ids are not
    checked.

    ids: [samples, S + 1] or [samples, S], of any integer dtype; valid: integers [samples], ids
    of a row that are not padding. names: of the fields; None: those of the config. may_pad: False where
    the host knows that ids are [samples, S + 1] and none is padding, which saves half of the work.
    max_documents: the largest number of documents in a row; None: cu_seqlens computes it on the device,
    and the host waits for that.
    """
    samples = len(ids)
    length = config.sequence_length
    pad = config.effective_pad_id
    eod = NO_ID if config.eod_id is None else config.eod_id
    has_loss = torch.ones(samples, length, device=ids.device)
    padded = readable = _widen(ids)
    if may_pad:
        missing = length + 1 - ids.shape[1]
        padded = torch.nn.functional.pad(padded, (0, missing), value=pad)
        is_valid = torch.arange(length + 1, device=ids.device) < valid[:, None]
        padded = torch.where(is_valid, padded, pad)
        is_padding = padded == pad
        # the model reads 0 where there is padding; documents end by what stood there
        readable = padded.masked_fill(is_padding, 0)
        has_loss.masked_fill_(is_padding[:, 1:], 0)
    restarts = config.reset_position_ids or config.reset_attention_mask
    if config.eod_mask_loss or restarts:
        ends_document = padded[:, :-1] == eod
    if config.eod_mask_loss:
        has_loss.masked_fill_(ends_document, 0)
    names = config.field_names if names is None else names
    batch = {}
    if "tokens" in names:
        # contiguous() would leave one sample a view, whose memory tokens and labels share
        batch["tokens"] = readable[:, :-1].clone(memory_format=torch.contiguous_format)
    if "labels" in names:
        batch["labels"] = readable[:, 1:].clone(memory_format=torch.contiguous_format)
    if "loss_mask" in names:
        batch["loss_mask"] = has_loss
    position = torch.arange(length, device=ids.device).expand(samples, -1).contiguous()
    if "position_ids" in names:
        batch["position_ids"] = position
    if not restarts:
        if "attention_mask" in names:
            batch["attention_mask"] = _attention_mask(position, None)
        return batch
    document_begin = _document_begins(position, ends_document)
    if config.reset_position_ids and "position_ids" in names:
        batch["position_ids"] = position - document_begin
    if config.reset_attention_mask and "cu_seqlens" in names:
        batch["cu_seqlens"] = _cu_seqlens(document_begin, max_documents)
    if "attention_mask" in names:
        documents = document_begin if config.reset_attention_mask else None
        batch["attention_mask"] = _attention_mask(position, documents)
    return batch


def _document_begins(position: Tensor, ends_document: Tensor) -> Tensor:
    """Where the document of each token begins, int64 [samples, S]: after the last end before it."""
    begins = torch.zeros_like(position)
    begins[:, 1:] = torch.where(ends_document[:, :-1], position[:, 1:], 0)
    return begins.cummax(1).values


def _attention_mask(position: Tensor, document_begin: Tensor | None) -> Tensor:
    """bool [samples, 1, S, S], True where attention is forbidden: to later tokens and, where
    documents are given, to those of others.
    """
    samples, length = position.shape
    square = torch.ones(length, length, dtype=torch.bool, device=position.device)
    forbidden = square.triu(1).expand(samples, -1, -1)  # later tokens, the same for all samples
    if document_begin is not None:
        other_document = document_begin[:, :, None] != document_begin[:, None, :]
        forbidden = forbidden | other_document
    # every sample has a mask of its own, to write to as well
    return forbidden.contiguous()[:, None]


def _cu_seqlens(document_begin: Tensor, max_documents: int | None) -> Tensor:
    """Bounds of documents from the beginning of each token's document, int64 [samples, S]."""
    samples, length = document_begin.shape
    column = torch.arange(length, device=document_begin.device)
    # the first token of a document is where it begins; all others go behind, as length
    bounds = torch.where(document_begin == column, column, length).sort(1).values
    if max_documents is None:
        max_documents = int((bounds < length).sum(1).max()) if samples else 1
    end = bounds.new_full((samples, 1), length)
    bounds = torch.cat([bounds, end], 1)
    return bounds[:, : max_documents + 1].to(torch.int32)


def _widen(ids: Tensor) -> Tensor:
    """int64; where a device has no unsigned integers, their bits are widened by hand."""
    if ids.dtype == torch.uint16:
        return ids.view(torch.int16).to(torch.int64) & 0xFFFF
    if ids.dtype == torch.uint32:
        return ids.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    return ids.to(torch.int64)
