"""Token ids to the fields of a batch: tokens, labels, loss_mask, position_ids."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from streammega.config import DataConfig
from streammega.errors import FormatError
from streammega.kernels.batch import document_bounds, fill_tails, make_mask, make_positions, scan_ids, zero_padding

Batch = dict[str, torch.Tensor]
Ids = NDArray[np.int64]
Allocate = Callable[[tuple[int, ...], Any], NDArray[Any]]


@dataclass(frozen=True, kw_only=True)
class Derived:
    """What is derived from ids and differs from the plain case; None: all ones, and 0 .. S - 1."""

    loss_mask: NDArray[np.float32] | None
    position_ids: NDArray[np.int64] | None


def batch_fields(ids: NDArray[Any], valid: NDArray[np.int64], config: DataConfig, *, bounds: bool = False) -> Batch:
    """The fields of samples whose ids are `ids` [samples, S + a], of which row r has valid[r] tokens.

    tokens, labels, position_ids: int64 [samples, S]; loss_mask: float32 [samples, S], zero where there is no label;
    labels are the tokens shifted by one, two views of one array (use `reshape`, not `view`, to flatten them).
    attention_mask, when the config asks for one: bool [samples, 1, S, S]; with `bounds` and reset_attention_mask also cu_seqlens.
    Raises FormatError for an id at or past `vocab_size`, when the config gives one.
    """
    samples, length = len(ids), config.sequence_length
    buffer = np.empty((samples, length + 1), np.int64)
    buffer[:, : ids.shape[1]] = ids
    extra = document_fields(buffer, valid, config, bounds=bounds)
    derived = derive(buffer, valid, config, np.dtype(ids.dtype).kind == "u", np.empty)
    mask, positions = derived.loss_mask, derived.position_ids
    if mask is None:
        mask = np.ones((samples, length), np.float32)
    if positions is None:
        positions = np.tile(np.arange(length), (samples, 1))
    whole = torch.from_numpy(buffer)
    batch = {"tokens": whole[:, :-1], "labels": whole[:, 1:]}
    return batch | {"loss_mask": torch.from_numpy(mask), "position_ids": torch.from_numpy(positions)} | extra


def document_fields(ids: Ids, valid: NDArray[np.int64], config: DataConfig, *, bounds: bool) -> Batch:
    """cu_seqlens and attention_mask, where the config asks for them, from ids [samples, S + 1] before `derive`."""
    length, fields = config.sequence_length, {}
    if bounds and config.reset_attention_mask and config.eod_id is not None:
        fill_tails(ids, valid, config.effective_pad_id)
        fields["cu_seqlens"] = cu_seqlens(ids[:, :length], config.eod_id)
    if config.create_attention_mask:
        fill_tails(ids, valid, config.effective_pad_id)
        fields["attention_mask"] = torch.from_numpy(attention_mask(ids[:, :length], config))
    return fields


def derive(ids: Ids, valid: NDArray[np.int64], config: DataConfig, unsigned: bool, allocate: Allocate) -> Derived:
    """Loss mask and positions of ids [samples, S + 1], of which row r has valid[r] tokens; padding among them becomes 0.

    The mask is zero where the label is padding and, with eod_mask_loss, where the token is eod_id. Positions restart after
    every eod_id with reset_position_ids. `unsigned`: the stored ids cannot be below zero.
    Raises FormatError for an id outside of the vocabulary.
    """
    samples, length = len(ids), config.sequence_length
    pad, eod = config.effective_pad_id, -1 if config.eod_id is None else config.eod_id
    partial = bool((valid <= length).any())
    if partial:
        fill_tails(ids, valid, pad)
    padding = 0
    if partial or pad >= 0 or not unsigned or config.vocab_size is not None:
        padding, low, high = scan_ids(ids, pad)
        if config.vocab_size is not None:
            _check_vocabulary(low, high, config.vocab_size)
    mask = positions = None
    if padding or config.eod_mask_loss:
        mask = allocate((samples, length), np.float32)
        make_mask(ids, pad, eod, config.eod_mask_loss, mask)
    if config.reset_position_ids:
        positions = allocate((samples, length), np.int64)
        make_positions(ids, eod, positions)
    if padding:
        zero_padding(ids, pad)
    return Derived(loss_mask=mask, position_ids=positions)


def cu_seqlens(ids: Ids, eod_id: int) -> torch.Tensor:
    """Document bounds of samples, int32 [samples, most documents + 1], from 0 to S; rows are filled up with S.

    ids: int64 [samples, S]. The form that variable-length attention kernels take, row by row.
    """
    bounds = np.empty((len(ids), ids.shape[1] + 1), np.int32)
    most = document_bounds(ids, eod_id, bounds)
    return torch.from_numpy(np.ascontiguousarray(bounds[:, : most + 1]))


def attention_mask(ids: NDArray[Any], config: DataConfig) -> NDArray[np.bool_]:
    """bool [samples, 1, S, S], True where attention is forbidden: to later tokens, and over an EOD with reset_attention_mask."""
    samples, length = ids.shape
    later = np.triu(np.ones((length, length), np.bool_), 1)
    mask = np.broadcast_to(later, (samples, 1, length, length)).copy()
    if config.reset_attention_mask:
        document = np.zeros((samples, length), np.int64)
        document[:, 1:] = np.cumsum(ids[:, :-1] == config.eod_id, axis=1)
        mask |= (document[:, :, None] != document[:, None, :])[:, None]
    return mask


def check_ids(ids: NDArray[Any], config: DataConfig) -> None:
    """Raise FormatError for an id that is neither padding nor within `vocab_size` of the config, where it has one."""
    if config.vocab_size is not None:
        _, low, high = scan_ids(ids, config.effective_pad_id)
        _check_vocabulary(low, high, config.vocab_size)


def _check_vocabulary(low: int, high: int, vocab_size: int) -> None:
    if high >= vocab_size or low < 0:
        bad = high if high >= vocab_size else low
        raise FormatError(
            f"token id {bad} is outside of the vocabulary of {vocab_size}; was the data made with another tokenizer? compare "
            f"it with 'streammega describe', and set vocab_size to what the tokenizer has"
        )
