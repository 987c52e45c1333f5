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
from streammega.samples.fields_torch import NO_ID, device_fields

__all__ = ["attention_mask", "batch_fields", "cu_seqlens", "loss_mask", "position_ids"]

Batch = dict[str, Tensor]
Ids = NDArray[np.int64]
IdsLike = NDArray[Any] | Tensor
Allocate = Callable[[tuple[int, ...], torch.dtype], Tensor]


def batch_fields(
    ids: IdsLike, valid: IdsLike | None, config: FieldsConfig, *, bounds: bool = False
) -> Batch:
    """The fields of samples as Megatron makes them, from ids of any source.

    "tokens", "labels", "position_ids": int64 [samples, S]; "loss_mask": float32 [samples, S], zero
    where there is no label. Labels are shifted already: labels[:, i] is the token after tokens[:,
    i]. Models of Hugging Face shift what they get as `labels`: give these as `shift_labels`. With
    create_attention_mask also "attention_mask"; with `bounds` and reset_attention_mask also
    "cu_seqlens".

    Args:
        ids: [samples, S + 1], or [samples, S] where the last token has no label; an array or
            tensor of integers. For ids on an accelerator, the fields are made there.
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
    _check_int64(stored)
    samples, width = stored.shape
    counts = np.full(samples, width)
    if valid is not None:
        counts = _valid_counts(_array(valid, "valid"), stored.shape)
    shape = (samples, length)
    tokens = new_memory(shape, torch.int64)
    labels = new_memory(shape, torch.int64)
    tokens.numpy()[:] = stored[:, :length]
    labels.numpy()[:, : width - 1] = stored[:, 1:]
    derived = derive(
        tokens, labels, counts, config, unsigned=stored.dtype.kind == "u", allocate=new_memory
    )
    loss_mask = derived.loss_mask
    if loss_mask is None:
        loss_mask = plain_mask(shape, new_memory)
    position_ids = derived.position_ids
    if position_ids is None:
        position_ids = plain_positions(shape, new_memory)
    batch = {
        "tokens": tokens,
        "labels": labels,
        "loss_mask": loss_mask,
        "position_ids": position_ids,
    }
    cu_seqlens = None
    if derived.cu_seqlens:
        (cu_seqlens,) = derived.cu_seqlens  # all rows are one batch
    if bounds and cu_seqlens is not None:
        batch["cu_seqlens"] = cu_seqlens
    if config.create_attention_mask:
        batch["attention_mask"] = causal_mask(samples, length, cu_seqlens, new_memory)
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
            f"tokens are {list(inputs.shape)}, labels {list(targets.shape)}; "
            "a loss mask needs one label a token"
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
    samples, length = ids.shape
    bounds = None if eod_id is None else cu_seqlens(ids, eod_id)
    return causal_mask(samples, length, bounds, new_memory)


# --- what the loader shares with these ---


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

    Raises FormatError for an id outside of the vocabulary.
    """
    inputs = tokens.numpy()
    targets = labels.numpy()
    samples, length = inputs.shape
    pad = config.effective_pad_id
    eod = _or_none(config.eod_id)
    # A sample of S + 1 ids has a label for every token; one of fewer is filled up with padding.
    some_partial = bool((valid <= length).any())
    if some_partial:
        fill_tails(inputs, valid, pad)
        fill_tails(targets, np.maximum(valid - 1, 0), pad)
    # Whole samples of unsigned ids cannot hold a pad_id of -1: then nothing need be looked at.
    num_padding = 0
    if some_partial or pad >= 0 or not unsigned or config.vocab_size is not None:
        num_padding = _scan(inputs, targets, config)
    cu_seqlens = None
    if config.reset_attention_mask:
        cu_seqlens = _bounds_of(_batches_of(inputs, rows), eod, allocate)
    loss_mask = None
    if num_padding or config.eod_mask_loss:
        loss_mask = allocate((samples, length), torch.float32)
        make_mask(inputs, targets, pad, eod, config.eod_mask_loss, loss_mask.numpy())
    position_ids = None
    if config.reset_position_ids:
        position_ids = allocate((samples, length), torch.int64)
        make_positions(inputs, eod, position_ids.numpy())
    # last: masks and bounds are made by what padding was
    if num_padding:
        zero_padding(inputs, pad)
        zero_padding(targets, pad)
    return Derived(loss_mask=loss_mask, position_ids=position_ids, cu_seqlens=cu_seqlens)


def _batches_of(tokens: Ids, rows: int | None) -> list[Ids]:
    """Samples [samples, S] cut into batches of `rows`; None: all are one."""
    samples = len(tokens)
    if not samples or rows is None:
        return [tokens]
    return np.split(tokens, samples // rows)


def _bounds_of(batches: list[Ids], eod: int, allocate: Allocate) -> list[Tensor]:
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
            "was the data made with another tokenizer? compare "
            f"it with 'streammega describe', and set vocab_size to what the tokenizer has"
        )


# --- ids from anywhere ---


def _or_none(token: int | None) -> int:
    return NO_ID if token is None else token


def _fields_there(ids: Tensor, valid: IdsLike | None, config: FieldsConfig, bounds: bool) -> Batch:
    """`batch_fields` of ids on an accelerator."""
    fractional = ids.is_floating_point() or ids.is_complex()
    is_integer = not fractional and ids.dtype != torch.bool
    _check_ids(is_integer, str(ids.dtype), tuple(ids.shape), config.sequence_length)
    samples, width = ids.shape
    counts = np.full(samples, width)
    if isinstance(valid, Tensor):
        valid = valid.cpu().numpy()
    if valid is not None:
        counts = _valid_counts(np.asarray(valid), (samples, width))
    if config.vocab_size is not None:
        is_valid = np.arange(width) < counts[:, None]
        stored = np.where(is_valid, ids.cpu().numpy(), config.effective_pad_id)
        check_ids(stored, config)
    counts_there = torch.from_numpy(counts).to(ids.device)
    return device_fields(ids, counts_there, config, bounds=bounds)


def _check_int64(stored: NDArray[Any]) -> None:
    """Raise FormatError for an id that no int64 is."""
    if stored.dtype == np.uint64 and (stored >> np.uint64(63)).any():
        raise FormatError(
            f"token id {stored.max()} is no int64, which tokens are; "
            "are these bytes the ids that they are taken for?"
        )


def _array(values: IdsLike, name: str) -> NDArray[Any]:
    if isinstance(values, Tensor):
        if values.device.type != "cpu":
            raise ConfigError(
                f"{name} are on {values.device}; move them to the CPU, or use batch_fields, "
                "which works on any device"
            )
        values = values.detach().numpy()
    return np.asarray(values)


def _matrix(values: IdsLike, name: str) -> Ids:
    """Ids [samples, S] as contiguous int64."""
    array = _array(values, name)
    if array.dtype.kind not in "iu" or array.ndim != 2:
        raise ConfigError(
            f"{name} are {array.dtype} {list(array.shape)}; they must be integers of the shape "
            "[samples, S]"
        )
    return np.ascontiguousarray(array, np.int64)


def _check_ids(integers: bool, dtype: str, shape: tuple[int, ...], length: int) -> None:
    if not integers or len(shape) != 2 or shape[1] not in (length, length + 1):
        raise ConfigError(
            f"ids are {dtype} {list(shape)}; they must be integers of the shape [samples, "
            f"{length + 1}] (sequence_length and the "
            f"token after it), or [samples, {length}] where the last token has no label"
        )


def _valid_counts(counts: NDArray[Any], shape: tuple[int, ...]) -> NDArray[np.int64]:
    """How many ids each row of ids of this shape has, int64 [samples]."""
    if counts.dtype.kind not in "iu" or counts.shape != shape[:1]:
        raise ConfigError(
            f"valid is {counts.dtype} {list(counts.shape)}; it must be integers of the shape "
            f"[{shape[0]}], one a row"
        )
    if len(counts) and (counts.min() < 0 or counts.max() > shape[1]):
        raise ConfigError(
            f"valid counts lie between {counts.min()} and {counts.max()}; "
            f"rows have 0 to {shape[1]} ids"
        )
    return np.ascontiguousarray(counts, np.int64)
