"""Token ids to the fields of a batch: tokens, labels, loss_mask, position_ids."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from streammega.config import DataConfig
from streammega.errors import FormatError
from streammega.kernels.batch import document_bounds, make_fields

Batch = dict[str, torch.Tensor]


def batch_fields(ids: NDArray[Any], valid: NDArray[np.int64], config: DataConfig) -> Batch:
    """The fields of samples whose ids are `ids` [samples, S + a], of which row r has valid[r] tokens.

    tokens, labels, position_ids: int64 [samples, S]; loss_mask: float32 [samples, S], zero where there is no label;
    attention_mask, when the config asks for one: bool [samples, 1, S, S].
    Raises FormatError for an id at or past `vocab_size`, when the config gives one.
    """
    samples, length = len(ids), config.sequence_length
    fields = {name: np.empty((samples, length), np.int64) for name in ("tokens", "labels", "position_ids")}
    loss_mask = np.empty((samples, length), np.float32)
    make_fields(
        ids,
        valid,
        int(config.add_extra_token),
        config.effective_pad_id,
        -1 if config.eod_id is None else config.eod_id,
        config.eod_mask_loss,
        config.reset_position_ids,
        fields["tokens"],
        fields["labels"],
        loss_mask,
        fields["position_ids"],
    )
    if config.vocab_size is not None:
        _check_vocabulary(fields, config.vocab_size)
    batch = {
        "tokens": torch.from_numpy(fields["tokens"]),
        "labels": torch.from_numpy(fields["labels"]),
        "loss_mask": torch.from_numpy(loss_mask),
        "position_ids": torch.from_numpy(fields["position_ids"]),
    }
    if config.create_attention_mask:
        batch["attention_mask"] = torch.from_numpy(attention_mask(ids[:, :length], config))
    return batch


def cu_seqlens(tokens: torch.Tensor, eod_id: int) -> torch.Tensor:
    """Document bounds of samples, int32 [samples, most documents + 1], from 0 to S; rows are filled up with S.

    tokens: int64 [samples, S]. The form that variable-length attention kernels take, row by row.
    """
    ids = tokens.numpy()
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


def _check_vocabulary(fields: dict[str, NDArray[np.int64]], vocab_size: int) -> None:
    highest = max(int(fields[name].max(initial=0)) for name in ("tokens", "labels"))
    lowest = min(int(fields[name].min(initial=0)) for name in ("tokens", "labels"))
    if highest >= vocab_size or lowest < 0:
        bad = highest if highest >= vocab_size else lowest
        raise FormatError(
            f"token id {bad} is outside of the vocabulary of {vocab_size}; was the data made with another tokenizer? compare "
            f"it with 'streammega describe', and set vocab_size to what the tokenizer has"
        )
