"""What is derived from token ids in contiguous memory, for batches of the loader and for ids from
anywhere alike: loss mask, positions, document bounds, and masks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from streammega.config import DataConfig, FieldsConfig
from streammega.errors import FormatError
from streammega.kernels.batch import (
    count_up,
    document_bounds,
    fill_tails,
    forbid,
    make_mask,
    make_positions,
    scan_ids,
    sequence_bounds,
    zero_padding,
)
from streammega.samples.fields_torch import NO_ID
from streammega.samples.loss_masks import Seams

Ids = NDArray[np.int64]
Allocate = Callable[[tuple[int, ...], torch.dtype], Tensor]


def or_none(token: int | None) -> int:
    """An eod_id as kernels take it: `NO_ID` where there is none."""
    return NO_ID if token is None else token


@dataclass(frozen=True, kw_only=True)
class Derived:
    """What is derived from tokens and labels [samples, S].

    loss_mask, position_ids: None where they would be plain: all ones, and 0 to S - 1. cu_seqlens:
    of each batch; None where the config asks for none.
    """

    loss_mask: Tensor | None
    position_ids: Tensor | None
    cu_seqlens: list[Tensor] | None


def derive(
    tokens: Tensor,
    labels: Tensor,
    valid: NDArray[np.int64],
    config: FieldsConfig,
    *,
    unsigned: bool,
    allocate: Allocate,
    rows: int | None = None,
    seams: Seams | None = None,
) -> Derived:
    """Loss mask, positions and document bounds of samples of which row r has valid[r] ids; padding
    among them becomes 0.

    The mask is zero where the label is padding and, with eod_mask_loss, where the token is eod_id.
    Positions restart after every eod_id with reset_position_ids.

    Args:
        tokens, labels: int64 [samples, S], written to.
        unsigned: the stored ids cannot be below zero.
        allocate: makes the results.
        rows: samples of a batch, each of which gets a cu_seqlens; None: all are one.
        seams: that have no loss on the label over them.

    Raises FormatError for an id outside of the vocabulary.
    """
    inputs = tokens.numpy()
    targets = labels.numpy()
    samples, length = inputs.shape
    pad = config.effective_pad_id
    eod = or_none(config.eod_id)
    # A sample of S + 1 ids has a label for every token; one of fewer is filled up with padding.
    some_partial = bool((valid <= length).any())
    if some_partial:
        fill_tails(inputs, valid, pad)
        fill_tails(targets, np.maximum(valid - 1, 0), pad)
    # Whole samples of unsigned ids cannot hold a pad_id of -1: then nothing need be looked at.
    num_padding = 0
    if some_partial or pad >= 0 or not unsigned or config.vocab_size is not None:
        num_padding = _scan(inputs, targets, config)
    ends = with_ends(inputs, eod, seams)
    cu_seqlens = None
    if config.reset_attention_mask:
        cu_seqlens = bounds_of(_batches_of(ends, rows), eod, allocate)
    loss_mask = None
    if num_padding or config.eod_mask_loss or seams is not None:
        loss_mask = allocate((samples, length), torch.float32)
        make_mask(inputs, targets, pad, eod, config.eod_mask_loss, loss_mask.numpy())
    if seams is not None and loss_mask is not None:
        loss_mask.numpy()[seams.sample, seams.label_column] = 0
    position_ids = None
    if config.reset_position_ids:
        position_ids = allocate((samples, length), torch.int64)
        make_positions(ends, eod, position_ids.numpy())
    # last: masks and bounds are made by what padding was
    if num_padding:
        zero_padding(inputs, pad)
        zero_padding(targets, pad)
    return Derived(loss_mask=loss_mask, position_ids=position_ids, cu_seqlens=cu_seqlens)


def with_ends(tokens: Ids, eod: int, seams: Seams | None) -> Ids:
    """Tokens [samples, S] in which documents end as the config says: at seams too, if they are
    apart.
    """
    if seams is None or not seams.apart or eod == NO_ID:
        return tokens
    # what stands there is read by nobody but those who look for ends
    ends = tokens.copy()
    ends[seams.sample, seams.label_column] = eod
    return ends


def _batches_of(tokens: Ids, rows: int | None) -> list[Ids]:
    """Samples [samples, S] cut into batches of `rows`; None: all are one."""
    samples = len(tokens)
    if not samples or rows is None:
        return [tokens]
    return np.split(tokens, samples // rows)


def bounds_of(batches: list[Ids], eod: int, allocate: Allocate) -> list[Tensor]:
    """cu_seqlens of batches of tokens [samples, S], each contiguous, in one piece of memory."""
    bounds_of_batch = []
    for tokens in batches:
        samples, length = tokens.shape
        bounds = np.empty((samples, length + 1), np.int32)
        most_documents = document_bounds(tokens, eod, bounds)
        bounds_of_batch.append(bounds[:, : most_documents + 1])
    sizes = [bounds.size for bounds in bounds_of_batch]
    memory = allocate((sum(sizes),), torch.int32)
    cu_seqlens = []
    for bounds, part in zip(bounds_of_batch, torch.split(memory, sizes), strict=True):
        target = part.view(bounds.shape)
        target.numpy()[:] = bounds
        cu_seqlens.append(target)
    return cu_seqlens


def sequence_fields(
    row_splits: NDArray[np.int64],
    size: NDArray[np.int64],
    config: DataConfig,
    allocate: Allocate,
    *,
    packed: bool = False,
) -> dict[str, Tensor]:
    """What inter-document masking asks for, by the sequences that samples are made of: "cu_seqlens"
    int32 [samples, S + 1], "max_seqlen" int32 [samples] and "position_ids" int64 [samples, S].

    size: tokens of each piece of a sequence, int64; those of sample i are [row_splits[i],
    row_splits[i + 1]). packed: samples are bins, which have no extra token.
    """
    samples = len(row_splits) - 1
    length = config.sequence_length
    cu_seqlens = allocate((samples, length + 1), torch.int32)
    max_seqlen = allocate((samples,), torch.int32)
    position_ids = allocate((samples, length), torch.int64)
    sequence_bounds(
        row_splits, size, int(config.add_extra_token and not packed),
        cu_seqlens.numpy(), max_seqlen.numpy(), position_ids.numpy(),
    )  # fmt: skip
    return {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen, "position_ids": position_ids}


def plain_mask(shape: tuple[int, ...], allocate: Allocate) -> Tensor:
    """float32 ones."""
    mask = allocate(shape, torch.float32)
    mask.numpy().fill(1)
    return mask


def plain_positions(shape: tuple[int, ...], allocate: Allocate) -> Tensor:
    """int64 [..., S]: 0 to S - 1 in each row."""
    positions = allocate(shape, torch.int64)
    count_up(positions.numpy().reshape(-1, shape[-1]))
    return positions


def causal_mask(samples: int, length: int, bounds: Tensor | None, allocate: Allocate) -> Tensor:
    """bool [samples, 1, S, S], True where attention is forbidden. bounds: cu_seqlens, where
    documents do not see each other.
    """
    mask = allocate((samples, 1, length, length), torch.bool)
    firsts = np.zeros((samples, 1), np.int32) if bounds is None else bounds.numpy()
    forbid(firsts, mask.numpy()[:, 0])
    return mask


def new_memory(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor in ordinary memory that nothing else has used or will use."""
    return torch.empty(shape, dtype=dtype)


def check_ids(ids: NDArray[Any], config: FieldsConfig) -> None:
    """Raise FormatError for an id that is neither padding nor within `vocab_size` of the config,
    where it has one.
    """
    if config.vocab_size is not None:
        _, low, high = scan_ids(ids, config.effective_pad_id)
        _check_vocabulary(low, high, config.vocab_size)


@lru_cache(maxsize=64)
def torch_dtype(dtype: np.dtype[np.generic]) -> torch.dtype:
    """The torch dtype of stored ids."""
    return torch.from_numpy(np.empty(0, dtype)).dtype


def _scan(tokens: Ids, labels: Ids, config: FieldsConfig) -> int:
    """How many ids of samples are padding. Raises FormatError for one outside of the vocabulary.

    Every id is a token of its sample, but for the last label.
    """
    pad = config.effective_pad_id
    padding, lowest, highest = scan_ids(tokens, pad)
    last_labels = np.ascontiguousarray(labels[:, -1:])
    last_padding, last_lowest, last_highest = scan_ids(last_labels, pad)
    if config.vocab_size is not None:
        _check_vocabulary(min(lowest, last_lowest), max(highest, last_highest), config.vocab_size)
    return int(padding + last_padding)


def _check_vocabulary(low: int, high: int, vocab_size: int) -> None:
    if high >= vocab_size or low < 0:
        bad = high if high >= vocab_size else low
        raise FormatError(
            f"token id {bad} is outside of the vocabulary of {vocab_size}; "
            "was the data made with another tokenizer? "
            "compare it with 'streammega describe', and set vocab_size to what the tokenizer has"
        )
