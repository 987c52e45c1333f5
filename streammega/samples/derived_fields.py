"""The fields of a batch from ids as they are stored: for batches of the loader and for ids from
anywhere alike.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from streammega.config import FIELD_NAMES, FieldsConfig
from streammega.errors import ConfigError, FormatError
from streammega.kernels.fields import (
    document_bounds,
    fill_fields,
    fill_tails,
    forbid,
    make_mask,
    make_positions,
    scan_ids,
    sequence_bounds,
    zero_padding,
)
from streammega.samples.fields_torch import NO_ID

Batch = dict[str, Tensor]
Ids = NDArray[np.int64]
Allocate = Callable[[tuple[int, ...], torch.dtype], Tensor]
PLAIN_FIELDS = {
    "tokens": torch.int64,
    "labels": torch.int64,
    "loss_mask": torch.float32,
    "position_ids": torch.int64,
}
"""The fields that all samples have, and their dtypes."""
MAX_IDS = 5
"""Ids outside of the vocabulary that an error lists."""
_NOT_MADE = {dtype: torch.empty((0, 0), dtype=dtype).numpy() for dtype in PLAIN_FIELDS.values()}


def or_none(token: int | None) -> int:
    """An eod_id as kernels take it: `NO_ID` where there is none."""
    return NO_ID if token is None else token


class Samples(NamedTuple):
    """Ids of samples as they are stored, and all else that fields are made of.

    ids: [samples, S + 1], or [samples, S] where the last token has no label. valid: int64 [samples],
    how many ids of each row are not padding. learned: bool of each id: there is no loss where a label
    is not learned; None: all are. pieces: (row_splits, size) of the sequences that samples consist of,
    for inter_document_masking: see `sequence_fields`. dataset_id: int64 [samples].
    """

    ids: NDArray[Any]
    valid: NDArray[np.int64]
    learned: NDArray[np.bool_] | None = None
    pieces: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None
    dataset_id: NDArray[np.int64] | None = None


def make_fields(
    samples: Samples,
    config: FieldsConfig,
    names: Sequence[str],
    allocate: Allocate,
    *,
    batches: int = 1,
    packed: bool = False,
) -> list[Batch]:
    """The fields of these names, of so many batches of equal size, in the order of FIELD_NAMES.

    The mask is zero where the label is padding and, with eod_mask_loss, where the token is eod_id.
    Positions restart after every eod_id with reset_position_ids. Padding becomes 0.

    allocate: makes the results. packed: samples are bins, which have no extra token. Raises
    FormatError for an id outside of the vocabulary, ConfigError where labels have no loss and the
    loss_mask is left out.
    """
    length = config.sequence_length
    pad = config.effective_pad_id
    eod = or_none(config.eod_id)
    ids = samples.ids
    width = ids.shape[1]
    has_padding = width == length
    if (samples.valid < width).any():
        has_padding = True
        ids = ids.astype(np.int64)  # any pad_id fits
        fill_tails(ids, samples.valid, pad)
    # Whole samples of unsigned ids cannot hold a pad_id of -1: then nothing need be looked at.
    if pad >= 0 or ids.dtype.kind != "u" or config.vocab_size is not None:
        num_padding, lowest, highest = scan_ids(ids, pad)
        has_padding |= bool(num_padding)
        _check_vocabulary(ids, lowest, highest, config)
    has_mask = has_padding or config.eod_mask_loss
    if has_mask or samples.learned is not None:
        check_mask_is_there(names)
    makes_mask = has_mask and "loss_mask" in names
    bounded = config.reset_attention_mask and not {"cu_seqlens", "attention_mask"}.isdisjoint(names)
    restarts = config.reset_position_ids and "position_ids" in names
    wanted = {*names}
    if bounded or restarts or makes_mask:
        wanted.add("tokens")
    if makes_mask:
        wanted.add("labels")
    if samples.pieces is not None:
        wanted.discard("position_ids")  # those of sequences are made below
    made = plain_fields(ids, length, wanted, allocate)
    arrays = {name: field.numpy() for name, field in made.items()}
    if width == length and "labels" in made:
        arrays["labels"][:, -1] = pad
    if makes_mask:
        mask = arrays["loss_mask"]
        make_mask(arrays["tokens"], arrays["labels"], pad, eod, config.eod_mask_loss, mask)
    if samples.learned is not None and "loss_mask" in made:
        arrays["loss_mask"][:, : width - 1] *= samples.learned[:, 1:]
    bounds: list[Tensor] = []
    if bounded:
        bounds = bounds_of(np.split(arrays["tokens"], batches), eod, allocate)
    if restarts and samples.pieces is None:
        make_positions(arrays["tokens"], eod, arrays["position_ids"])
    if "attention_mask" in names:
        made["attention_mask"] = causal_mask(len(ids), length, bounds, allocate)
    # last: masks and bounds are made by what padding was
    if has_padding:
        for name in {"tokens", "labels"} & made.keys():
            zero_padding(arrays[name], pad)
    if samples.pieces is not None:
        made |= sequence_fields(*samples.pieces, config, allocate, packed=packed)
    if samples.dataset_id is not None:
        made["dataset_id"] = allocate((len(ids),), torch.int64)
        made["dataset_id"].numpy()[:] = samples.dataset_id
    columns: dict[str, Sequence[Tensor]] = {}
    for name in FIELD_NAMES:
        if name in names and name in made:
            columns[name] = [made[name]] if batches == 1 else made[name].chunk(batches)
        elif name == "cu_seqlens" and name in names and bounds:
            columns[name] = bounds  # their widths differ
    return [
        dict(zip(columns, fields, strict=True)) for fields in zip(*columns.values(), strict=True)
    ]


def plain_fields(
    ids: NDArray[Any], length: int, names: Collection[str], allocate: Allocate
) -> Batch:
    """Those of PLAIN_FIELDS that `names` has, [samples, length], of whole samples: a mask of ones, and
    positions that only count up.
    """
    made: Batch = {}
    arrays = []
    for name, dtype in PLAIN_FIELDS.items():
        if name in names:
            made[name] = allocate((len(ids), length), dtype)
            arrays.append(made[name].numpy())
        else:
            arrays.append(_NOT_MADE[dtype])
    fill_fields(ids, *arrays)
    return made


def bytes_of_field(name: str, length: int) -> int:
    """Bytes that a field has for a sample of `length` tokens, at most."""
    sizes = {
        "loss_mask": 4 * length,
        "cu_seqlens": 4 * (length + 1),
        "max_seqlen": 4,
        "attention_mask": length * length,
        "dataset_id": 8,
    }
    return sizes.get(name, 8 * length)


def check_mask_is_there(names: Sequence[str]) -> None:
    """Raise ConfigError for batches without a loss_mask where some labels have no loss."""
    if "labels" in names and "loss_mask" not in names:
        raise ConfigError(
            "some labels have no loss (padding, eod_mask_loss, modes, or documents that are excluded), "
            "but batches have no loss_mask, which says where: add 'loss_mask' to fields"
        )


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
    config: FieldsConfig,
    allocate: Allocate,
    *,
    packed: bool = False,
) -> Batch:
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
    has_extra = getattr(config, "add_extra_token", True) and not packed
    sequence_bounds(
        row_splits, size, int(has_extra),
        cu_seqlens.numpy(), max_seqlen.numpy(), position_ids.numpy(),
    )  # fmt: skip
    return {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen, "position_ids": position_ids}


def causal_mask(samples: int, length: int, bounds: Sequence[Tensor], allocate: Allocate) -> Tensor:
    """bool [samples, 1, S, S], True where attention is forbidden. bounds: cu_seqlens of each batch of
    these samples, where documents do not see each other; empty: they do.
    """
    mask = allocate((samples, 1, length, length), torch.bool)
    if not bounds:
        bounds = [torch.zeros((samples, 1), dtype=torch.int32)]
    first = 0
    for cu_seqlens in bounds:
        last = first + len(cu_seqlens)
        forbid(cu_seqlens.numpy(), mask.numpy()[first:last, 0])
        first = last
    return mask


def new_memory(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor in ordinary memory that nothing else has used or will use."""
    return torch.empty(shape, dtype=dtype)


def check_ids(ids: NDArray[Any], config: FieldsConfig, names: Sequence[str] = ()) -> bool:
    """Whether some id of whole samples is padding, where fields are made without such checks.

    Raises what `make_fields` raises: FormatError for an id that is neither padding nor within
    `vocab_size`, ConfigError for padding among labels without a loss_mask.
    """
    pad = config.effective_pad_id
    if pad < 0 and ids.dtype.kind == "u" and config.vocab_size is None:
        return False
    num_padding, low, high = scan_ids(ids, pad)
    _check_vocabulary(ids, low, high, config)
    if num_padding:
        check_mask_is_there(names)
    return bool(num_padding)


@lru_cache(maxsize=64)
def torch_dtype(dtype: np.dtype[np.generic]) -> torch.dtype:
    """The torch dtype of stored ids."""
    return torch.from_numpy(np.empty(0, dtype)).dtype


def _check_vocabulary(ids: NDArray[Any], low: int, high: int, config: FieldsConfig) -> None:
    """low, high: of all ids but padding."""
    vocab_size = config.vocab_size
    if vocab_size is not None and not 0 <= low <= high < vocab_size:
        raise _outside_of(vocab_size, ids, config)


def _outside_of(vocab_size: int, ids: NDArray[Any], config: FieldsConfig) -> FormatError:
    """The error for ids outside of a vocabulary. Made here, since a frame that holds an error and
    raises it would leave what it holds to the garbage collector.
    """
    wide = ids.astype(np.int64)
    outside = ((wide < 0) | (wide >= vocab_size)) & (wide != config.effective_pad_id)
    bad = np.unique(wide[outside]).tolist()
    more = f" and {len(bad) - MAX_IDS:,} others" if len(bad) > MAX_IDS else ""
    error = FormatError(
        f"token id{'s' * (len(bad) > 1)} {', '.join(map(str, bad[:MAX_IDS]))}{more} "
        f"{'are' if len(bad) > 1 else 'is'} outside of the vocabulary of {vocab_size}; "
        "was the data made with another tokenizer? "
        "compare it with 'streammega describe', and set vocab_size to what the tokenizer has"
    )
    error.sample = int(np.flatnonzero(outside.any(axis=1))[0]), len(ids)
    return error
