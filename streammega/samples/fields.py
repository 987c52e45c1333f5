"""Token ids to the fields of a batch: tokens, labels, loss_mask, position_ids, and what describes
documents.

The functions of `__all__` are public, for ids from anywhere. They take NumPy arrays or torch
tensors of any integer dtype; what they return is contiguous, and memory of its own.
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

from streammega.config import FieldsConfig
from streammega.errors import ConfigError, FormatError
from streammega.kernels.batch import (
    count_up,
    document_bounds,
    fill_tails,
    forbid,
    make_mask,
    make_positions,
    scan_ids,
    zero_padding,
)
from streammega.samples.fields_torch import device_fields

__all__ = ["attention_mask", "batch_fields", "cu_seqlens", "loss_mask", "position_ids"]

Batch = dict[str, Tensor]
Ids = NDArray[np.int64]
IdsLike = NDArray[Any] | Tensor
Allocate = Callable[[tuple[int, ...], torch.dtype], Tensor]
NO_ID = -1
"""Stands for an eod_id or pad_id that there is not: no stored id."""


def batch_fields(
    ids: IdsLike, valid: IdsLike | None, config: FieldsConfig, *, bounds: bool = False
) -> Batch:
    """The fields of samples as Megatron makes them, from ids of any source.

    "tokens", "labels", "position_ids": int64 [samples, S]; "loss_mask": float32 [samples, S], zero
    where there is no label. Labels are shifted already: labels[:, i] is the token after tokens[:,
    i]. Models of Hugging Face shift what they get as `labels`: give these as `shift_labels`. With
    create_attention_mask also "attention_mask"; with `bounds` and reset_attention_mask also
    "cu_seqlens".

    Args: ids: [samples, S + 1], or [samples, S] where the last token has no label; an array or
        tensor of integers. For ids on an
            accelerator, the fields are made there.
        valid: integers [samples], how many ids of each row are not padding; None: all of them.
        config: sequence_length and the fields wanted, a FieldsConfig or DataConfig.
        bounds: add "cu_seqlens", whose width differs from batch to batch.

    Raises ConfigError for ids of another shape or kind, FormatError for an id at or past
    `vocab_size`, when the config gives one.
    """
    if isinstance(ids, Tensor) and ids.device.type != "cpu":
        return _fields_there(ids, valid, config, bounds)
    length = config.sequence_length
    stored = _array(ids, "ids")
    _check_ids(stored.dtype.kind in "iu", str(stored.dtype), stored.shape, length)
    if stored.dtype == np.uint64 and (stored >> np.uint64(63)).any():
        raise FormatError(
            f"token id {stored.max()} is no int64, which tokens are; are these bytes the ids that they are taken for?"
        )
    counts = (
        _valid_counts(_array(valid, "valid"), stored.shape)
        if valid is not None
        else np.full(len(stored), stored.shape[1])
    )
    tokens = new_memory((len(stored), length), torch.int64)
    labels = new_memory((len(stored), length), torch.int64)
    tokens.numpy()[:] = stored[:, :length]
    labels.numpy()[:, : stored.shape[1] - 1] = stored[:, 1:]
    derived = derive(
        tokens, labels, counts, config, unsigned=stored.dtype.kind == "u", allocate=new_memory
    )
    mask = derived.loss_mask
    positions = derived.position_ids
    batch = {"tokens": tokens, "labels": labels}
    batch["loss_mask"] = plain_mask(tuple(tokens.shape), new_memory) if mask is None else mask
    batch["position_ids"] = (
        plain_positions(tuple(tokens.shape), new_memory) if positions is None else positions
    )
    seqlens = derived.cu_seqlens[0] if derived.cu_seqlens else None
    if bounds and seqlens is not None:
        batch["cu_seqlens"] = seqlens
    if config.create_attention_mask:
        batch["attention_mask"] = causal_mask(len(stored), length, seqlens, new_memory)
    return batch


def loss_mask(
    tokens: IdsLike, labels: IdsLike, *, pad_id: int = NO_ID, eod_id: int | None = None
) -> Tensor:
    """float32 [samples, S]: 0 where the label is pad_id and, if given, where the token is eod_id;
    else 1.

    tokens, labels: integers [samples, S]. pad_id: -1 stands for padding where a tokenizer has none,
    as in Megatron. Raises ConfigError for other shapes and kinds.
    """
    inputs = _matrix(tokens, "tokens")
    targets = _matrix(labels, "labels")
    if inputs.shape != targets.shape:
        raise ConfigError(
            f"tokens are {list(inputs.shape)}, labels {list(targets.shape)}; a loss mask needs one label a token"
        )
    mask = new_memory(inputs.shape, torch.float32)
    make_mask(inputs, targets, pad_id, _or_none(eod_id), eod_id is not None, mask.numpy())
    return mask


def position_ids(tokens: IdsLike, *, eod_id: int | None = None) -> Tensor:
    """int64 [samples, S]: 0 to S - 1 in each row; counted anew after every eod_id, if one is given.

    tokens: integers [samples, S]. Raises ConfigError for other shapes and kinds.
    """
    ids = _matrix(tokens, "tokens")
    if eod_id is None:
        return plain_positions(ids.shape, new_memory)
    positions = new_memory(ids.shape, torch.int64)
    make_positions(ids, eod_id, positions.numpy())
    return positions


def cu_seqlens(tokens: IdsLike, eod_id: int) -> Tensor:
    """Document bounds of samples, int32 [samples, most documents + 1], from 0 to S; rows are filled
    up with S.

    tokens: integers [samples, S]; a document ends with eod_id. The form that variable-length
    attention kernels take, row by row. Raises ConfigError for other shapes and kinds.
    """
    return _bounds_of([_matrix(tokens, "tokens")], eod_id, new_memory)[0]


def attention_mask(tokens: IdsLike, *, eod_id: int | None = None) -> Tensor:
    """bool [samples, 1, S, S], True where attention is forbidden: to later tokens and, if eod_id is
    given, over it.

    tokens: integers [samples, S]. Raises ConfigError for other shapes and kinds.
    """
    ids = _matrix(tokens, "tokens")
    return causal_mask(
        len(ids), ids.shape[1], None if eod_id is None else cu_seqlens(ids, eod_id), new_memory
    )


# What the loader shares with these.


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
    tokens: Tensor, labels: Tensor, valid: NDArray[np.int64], config: FieldsConfig, *, unsigned: bool, allocate: Allocate,
    rows: int | None = None,
) -> Derived:  # fmt: skip
    """Loss mask, positions and document bounds of samples of which row r has valid[r] ids; padding
    among them becomes 0.

    The mask is zero where the label is padding and, with eod_mask_loss, where the token is eod_id.
    Positions restart after every eod_id with reset_position_ids.

    Args:
        tokens, labels: int64 [samples, S], written to.
        unsigned: the stored ids cannot be below zero.
        allocate: makes the results.
        rows: samples of a batch, each of which gets a cu_seqlens; None: all are one.

    Raises FormatError for an id outside of the vocabulary.
    """
    inputs = tokens.numpy()
    targets = labels.numpy()
    shape = tuple(tokens.shape)
    pad = config.effective_pad_id
    eod = _or_none(config.eod_id)
    partial = bool((valid <= shape[1]).any())
    if partial:
        fill_tails(inputs, valid, pad)
        fill_tails(targets, np.maximum(valid - 1, 0), pad)
    padding = 0
    if partial or pad >= 0 or not unsigned or config.vocab_size is not None:
        padding = _scan(inputs, targets, config)
    seqlens = None
    if config.reset_attention_mask:
        seqlens = _bounds_of(
            np.split(inputs, shape[0] // (rows or shape[0] or 1) or 1), eod, allocate
        )
    mask = positions = None
    if padding or config.eod_mask_loss:
        mask = allocate(shape, torch.float32)
        make_mask(inputs, targets, pad, eod, config.eod_mask_loss, mask.numpy())
    if config.reset_position_ids:
        positions = allocate(shape, torch.int64)
        make_positions(inputs, eod, positions.numpy())
    if padding:
        zero_padding(inputs, pad)
        zero_padding(targets, pad)
    return Derived(loss_mask=mask, position_ids=positions, cu_seqlens=seqlens)


def _bounds_of(batches: list[Ids], eod: int, allocate: Allocate) -> list[Tensor]:
    """cu_seqlens of batches of tokens [samples, S], each contiguous, in one piece of memory."""
    found = []
    for tokens in batches:
        bounds = np.empty((len(tokens), tokens.shape[1] + 1), np.int32)
        most = document_bounds(tokens, eod, bounds)
        found.append(bounds[:, : most + 1])
    memory = allocate((sum(bounds.size for bounds in found),), torch.int32)
    made = []
    for bounds, part in zip(
        found, torch.split(memory, [bounds.size for bounds in found]), strict=True
    ):
        made.append(part.view(bounds.shape))
        made[-1].numpy()[:] = bounds
    return made


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
    """How many ids of samples are padding. Raises FormatError for one outside of the vocabulary."""
    padding, low, high = scan_ids(tokens, config.effective_pad_id)
    last, last_low, last_high = scan_ids(
        np.ascontiguousarray(labels[:, -1:]), config.effective_pad_id
    )
    if config.vocab_size is not None:
        _check_vocabulary(min(low, last_low), max(high, last_high), config.vocab_size)
    return int(padding + last)


def _check_vocabulary(low: int, high: int, vocab_size: int) -> None:
    if high >= vocab_size or low < 0:
        bad = high if high >= vocab_size else low
        raise FormatError(
            f"token id {bad} is outside of the vocabulary of {vocab_size}; was the data made with another tokenizer? compare "
            f"it with 'streammega describe', and set vocab_size to what the tokenizer has"
        )


# Ids from anywhere.


def _or_none(token: int | None) -> int:
    return NO_ID if token is None else token


def _fields_there(ids: Tensor, valid: IdsLike | None, config: FieldsConfig, bounds: bool) -> Batch:
    """`batch_fields` of ids on an accelerator."""
    integers = not (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool)
    _check_ids(integers, str(ids.dtype), tuple(ids.shape), config.sequence_length)
    counts = np.full(len(ids), ids.shape[1])
    if valid is not None:
        counts = _valid_counts(
            valid.cpu().numpy() if isinstance(valid, Tensor) else np.asarray(valid),
            tuple(ids.shape),
        )
    if config.vocab_size is not None:
        check_ids(
            np.where(
                np.arange(ids.shape[1]) < counts[:, None],
                ids.cpu().numpy(),
                config.effective_pad_id,
            ),
            config,
        )
    return device_fields(ids, torch.from_numpy(counts).to(ids.device), config, bounds=bounds)


def _array(values: IdsLike, name: str) -> NDArray[Any]:
    if isinstance(values, Tensor):
        if values.device.type != "cpu":
            raise ConfigError(
                f"{name} are on {values.device}; move them to the CPU, or use batch_fields, which works on any device"
            )
        values = values.detach().numpy()
    return np.asarray(values)


def _matrix(values: IdsLike, name: str) -> Ids:
    """Ids [samples, S] as contiguous int64."""
    array = _array(values, name)
    if array.dtype.kind not in "iu" or array.ndim != 2:
        raise ConfigError(
            f"{name} are {array.dtype} {list(array.shape)}; they must be integers of the shape [samples, S]"
        )
    return np.ascontiguousarray(array, np.int64)


def _check_ids(integers: bool, dtype: str, shape: tuple[int, ...], length: int) -> None:
    if not integers or len(shape) != 2 or shape[1] not in (length, length + 1):
        raise ConfigError(
            f"ids are {dtype} {list(shape)}; they must be integers of the shape [samples, {length + 1}] (sequence_length and the "
            f"token after it), or [samples, {length}] where the last token has no label"
        )


def _valid_counts(counts: NDArray[Any], shape: tuple[int, ...]) -> NDArray[np.int64]:
    """How many ids each row of ids of this shape has, int64 [samples]."""
    if counts.dtype.kind not in "iu" or counts.shape != shape[:1]:
        raise ConfigError(
            f"valid is {counts.dtype} {list(counts.shape)}; it must be integers of the shape [{shape[0]}], one a row"
        )
    if len(counts) and (counts.min() < 0 or counts.max() > shape[1]):
        raise ConfigError(
            f"valid counts lie between {counts.min()} and {counts.max()}; rows have 0 to {shape[1]} ids"
        )
    return np.ascontiguousarray(counts, np.int64)
