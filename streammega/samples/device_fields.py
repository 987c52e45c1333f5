"""Fields from ids by torch, on the device that trains.

Equal to what `HostFields` makes by kernels for the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from streammega.config import FieldsConfig
from streammega.errors.cached_property import cached_property
from streammega.samples.field_inputs import FieldInputs, Samples

NO_ID = -1
"""An eod_id or pad_id that equals no stored id: there is none."""


class DeviceFields(FieldInputs):
    """Makes the fields of samples on their device, without waiting for it. Ids are not checked.

    may_pad: False where the host knows that ids are [samples, S + 1] and none is padding, which saves
    half of the work. max_documents: the largest number of documents in a row; None: cu_seqlens computes
    it on the device, and the host waits for that.
    """

    def __init__(
        self,
        samples: Samples,
        config: FieldsConfig,
        *,
        may_pad: bool = True,
        max_documents: int | None = None,
        starts: Sequence[int] = (0,),
    ) -> None:
        super().__init__(samples, config, starts)
        self._may_pad = may_pad
        self._max_documents = max_documents
        self._length = config.sequence_length
        self._ids = _widen(samples.ids)
        if may_pad:
            pad = config.effective_pad_id
            missing = self._length + 1 - self._ids.shape[1]
            padded = torch.nn.functional.pad(self._ids, (0, missing), value=pad)
            column = torch.arange(self._length + 1, device=padded.device)
            self._ids = torch.where(column < samples.valid[:, None], padded, pad)

    @cached_property
    def _readable(self) -> Tensor:
        """Ids, 0 in place of padding; documents end by what stood there."""
        return self._ids.masked_fill(self._is_padding, 0) if self._may_pad else self._ids

    @property
    def _is_padding(self) -> Tensor:
        return self._ids == self.config.effective_pad_id

    @property
    def tokens(self) -> Tensor:
        """int64 [rows, S]: 0 in place of padding."""
        # contiguous() would leave one sample a view, whose memory tokens and labels share
        return self._readable[:, :-1].clone(memory_format=torch.contiguous_format)

    @property
    def labels(self) -> Tensor:
        """int64 [rows, S]: 0 in place of padding."""
        return self._readable[:, 1:].clone(memory_format=torch.contiguous_format)

    @property
    def loss_mask(self) -> Tensor:
        """float32 [rows, S]."""
        mask = torch.ones(len(self._ids), self._length, device=self._ids.device)
        if self._may_pad:
            mask.masked_fill_(self._is_padding[:, 1:], 0)
        if self.config.eod_mask_loss:
            mask.masked_fill_(self._ends_document, 0)
        has_loss = self.samples.columns.get("has_loss")
        if has_loss is not None:
            mask[:, : has_loss.shape[1] - 1] *= has_loss[:, 1:]
        return mask

    @property
    def position_ids(self) -> Tensor:
        """int64 [rows, S]."""
        if self.config.reset_position_ids:
            return self._position - self._document_begin
        return self._position.clone()

    @property
    def cu_seqlens(self) -> Tensor | None:
        """int32 [rows, most documents + 1], by eod_id."""
        if not self.config.reset_attention_mask:
            return None
        return _cu_seqlens(self._document_begin, self._max_documents)

    @property
    def dataset_id(self) -> Tensor | None:
        """int64 [samples]."""
        return self.samples.dataset_id

    @property
    def max_seqlen(self) -> None:
        """Ids do not tell sequences."""

    @property
    def attention_mask(self) -> Tensor:
        """bool [rows, 1, S, S]."""
        documents = self._document_begin if self.config.reset_attention_mask else None
        return _attention_mask(self._position, documents)

    @cached_property
    def _position(self) -> Tensor:
        """The place of each token in its sample, int64 [rows, S]."""
        first = torch.tensor(self.starts, device=self._ids.device)[:, None]
        positions = first + torch.arange(self._length, device=self._ids.device)
        return positions.repeat(len(self._ids) // len(self.starts), 1)

    @cached_property
    def _ends_document(self) -> Tensor:
        eod = NO_ID if self.config.eod_id is None else self.config.eod_id
        return self._ids[:, :-1] == eod

    @cached_property
    def _document_begin(self) -> Tensor:
        return _document_begins(self._position, self._ends_document)


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
