"""Fields made by kernels on the host, from ids as they are stored: for batches of the loader and for
ids from anywhere alike.

Masks and positions are filled for each batch. As copy-on-write pages they would save that, and lose as much
to page faults.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from streammega.config import FieldsConfig
from streammega.errors import FormatError
from streammega.errors.cached_property import cached_property
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
from streammega.samples.device_fields import NO_ID
from streammega.samples.field_inputs import FieldInputs, Samples, check_mask_is_there

Ids = NDArray[np.int64]
Allocate = Callable[[tuple[int, ...], torch.dtype], Tensor]
PLAIN = {
    "tokens": torch.int64,
    "labels": torch.int64,
    "loss_mask": torch.float32,
    "position_ids": torch.int64,
}
"""Fields that one kernel makes of whole samples where nothing is padding or restarts."""
_NOT_MADE = {
    dtype: np.empty((0, 0), numpy)
    for dtype, numpy in ((torch.int64, np.int64), (torch.float32, np.float32))
}
MAX_IDS = 5
"""Ids outside of the vocabulary that an error lists."""


def new_memory(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor in ordinary memory that nothing else has used or will use."""
    return torch.empty(shape, dtype=dtype)


def or_none(token: int | None) -> int:
    """An eod_id as kernels take it: `NO_ID` where there is none."""
    return NO_ID if token is None else token


class HostFields(FieldInputs):
    """Makes the fields of samples on the host. Each is made once.

    has_padding: whether some label is padding. allocate: makes the results. batches: micro-batches of
    equal size that the samples are. extra_token: whether samples have a token after the last.

    Raises FormatError for an id outside of the vocabulary, ConfigError where labels have no loss and
    `names`, the fields to make, have no loss_mask.
    """

    def __init__(
        self,
        samples: Samples,
        config: FieldsConfig,
        names: Collection[str],
        allocate: Allocate = new_memory,
        *,
        batches: int = 1,
        extra_token: bool = True,
        starts: Sequence[int] = (0,),
    ) -> None:
        super().__init__(samples, config, starts)
        self._names = names
        self._allocate = allocate
        self._batches = batches
        self._extra_token = extra_token
        self._length = length = config.sequence_length
        self._pad = pad = config.effective_pad_id
        self._eod = or_none(config.eod_id)
        ids = samples.ids.numpy()
        valid = samples.valid.numpy()
        self.has_padding = ids.shape[1] == length
        if valid.min(initial=ids.shape[1]) < ids.shape[1]:
            self.has_padding = True
            ids = ids.astype(np.int64)  # any pad_id fits
            fill_tails(ids, valid, pad)
        self._ids = ids
        self.has_padding |= scan_padding(ids, config)
        self._has_mask = self.has_padding or config.eod_mask_loss
        if self._has_mask or "has_loss" in samples.columns:
            check_mask_is_there(names)

    @cached_property
    def _raw(self) -> tuple[Ids, Ids]:
        """tokens and labels with padding as pad_id."""
        if not self.has_padding:
            return self.tokens.numpy(), self.labels.numpy()
        made = self._filled(("tokens", "labels"), new_memory)
        return made["tokens"].numpy(), made["labels"].numpy()

    @cached_property
    def tokens(self) -> Tensor:
        """int64 [rows, S]: 0 in place of padding."""
        return self._readable("tokens")

    @cached_property
    def labels(self) -> Tensor:
        """int64 [rows, S]: 0 in place of padding."""
        return self._readable("labels")

    def _readable(self, name: str) -> Tensor:
        ids = self._plain.get(name)
        if ids is None:  # it is not among the fields, and they are made of it
            ids = self._filled((name,), self._allocate)[name]
        if self.has_padding:
            zero_padding(ids.numpy(), self._pad)
        return ids

    @cached_property
    def _plain(self) -> dict[str, Tensor]:
        """tokens and labels, and a mask of ones and positions that only count up, where these are wanted."""
        config = self.config
        wanted = PLAIN.keys() & {*self._names}
        if self._has_mask:
            wanted -= {"loss_mask"}
        if config.reset_position_ids or self.samples.pieces is not None:
            wanted -= {"position_ids"}
        return self._filled(wanted, self._allocate)

    def _filled(self, names: Collection[str], allocate: Allocate) -> dict[str, Tensor]:
        """Those of PLAIN, by one call."""
        shape = len(self._ids), self._length
        made = {name: allocate(shape, PLAIN[name]) for name in names}
        arrays = [
            made[name].numpy() if name in made else _NOT_MADE[dtype]
            for name, dtype in PLAIN.items()
        ]
        fill_fields(self._ids, np.array(self.starts, np.int64), *arrays)
        if "labels" in made and self._ids.shape[1] == self._length:
            made["labels"].numpy()[:, -1] = self._pad
        return made

    @cached_property
    def loss_mask(self) -> Tensor:
        """float32 [rows, S]."""
        if self._has_mask:
            mask = self._allocate((len(self._ids), self._length), torch.float32)
            mask_eod = self.config.eod_mask_loss
            make_mask(*self._raw, self._pad, self._eod, mask_eod, mask.numpy())
        else:
            mask = self._plain["loss_mask"]
        has_loss = self.samples.columns.get("has_loss")
        if has_loss is not None:
            width = self._ids.shape[1]
            mask.numpy()[:, : width - 1] *= has_loss.numpy()[:, 1:]
        return mask

    @cached_property
    def position_ids(self) -> Tensor:
        """int64 [rows, S]."""
        if self._sequences is not None:
            return self._sequences[2]
        if not self.config.reset_position_ids:
            return self._plain["position_ids"]
        positions = self._allocate((len(self._ids), self._length), torch.int64)
        make_positions(self._raw[0], self._eod, positions.numpy())
        return positions

    @cached_property
    def cu_seqlens(self) -> Tensor | Sequence[Tensor] | None:
        """int32, of each micro-batch by eod_id, or of all by the sequences of files."""
        return self._bounds or (None if self._sequences is None else self._sequences[0])

    @cached_property
    def max_seqlen(self) -> Tensor | None:
        """int32 [samples], by the sequences of files."""
        return None if self._sequences is None else self._sequences[1]

    @cached_property
    def attention_mask(self) -> Tensor:
        """bool [rows, 1, S, S]."""
        return causal_mask(len(self._ids), self._length, self._bounds, self._allocate)

    @cached_property
    def dataset_id(self) -> Tensor | None:
        """int64 [samples]."""
        numbers = self.samples.dataset_id
        # memory of its own, as that of all fields
        return (
            None if numbers is None else self._allocate((len(numbers),), torch.int64).copy_(numbers)
        )

    def values_of(self, column: str, align: str) -> Tensor:
        """As the base class, in memory of batches. Rows are copied as bytes: torch takes ten times as
        long for some dtypes.
        """
        values = self.samples.columns[column]
        rows, width, *shape = values.shape
        made = self._allocate((rows, self._length, *shape), values.dtype)
        if rows:
            size = values[0, 0].nbytes
            first = size * int(align == "labels")
            source = values.view(torch.uint8).view(rows, width * size).numpy()
            target = made.view(torch.uint8).view(rows, self._length * size).numpy()
            target[:] = source[:, first : first + self._length * size]
        return made

    @cached_property
    def _bounds(self) -> list[Tensor]:
        """cu_seqlens of each micro-batch, by eod_id; none without reset_attention_mask."""
        if not self.config.reset_attention_mask:
            return []
        return bounds_of(np.split(self._raw[0], self._batches), self._eod, self._allocate)

    @cached_property
    def _sequences(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """What inter-document masking asks for, by the sequences that samples are made of: cu_seqlens
        int32 [samples, S + 1], max_seqlen int32 [samples] and position_ids.
        """
        if self.samples.pieces is None:
            return None
        row_splits, size = self.samples.pieces
        samples, length = len(row_splits) - 1, self._length
        cu_seqlens = self._allocate((samples, length + 1), torch.int32)
        max_seqlen = self._allocate((samples,), torch.int32)
        position_ids = self._allocate((samples, length), torch.int64)
        sequence_bounds(
            row_splits, size, int(self._extra_token),
            cu_seqlens.numpy(), max_seqlen.numpy(), position_ids.numpy(),
        )  # fmt: skip
        return cu_seqlens, max_seqlen, position_ids


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


def scan_padding(ids: NDArray[Any], config: FieldsConfig, names: Collection[str] = ()) -> bool:
    """Whether some id of whole samples is padding.

    Raises FormatError for an id that is neither padding nor within `vocab_size`, and ConfigError for
    padding among fields with labels and no loss_mask.
    """
    pad = config.effective_pad_id
    # Whole samples of unsigned ids cannot hold a pad_id of -1: then nothing need be looked at.
    if pad < 0 and ids.dtype.kind == "u" and config.vocab_size is None:
        return False
    vocab_size = config.vocab_size
    if pad < 0 and ids.dtype.kind == "u" and ids.size and ids.max() < vocab_size:
        return False  # as nearly always, in a quarter of the time
    num_padding, low, high = scan_ids(ids, pad)
    if vocab_size is not None and not 0 <= low <= high < vocab_size:
        raise _outside_of(vocab_size, ids, config)
    if num_padding:
        check_mask_is_there(names)
    return bool(num_padding)


@lru_cache(maxsize=64)
def torch_dtype(dtype: np.dtype[np.generic]) -> torch.dtype:
    """The torch dtype of stored ids."""
    return torch.from_numpy(np.empty(0, dtype)).dtype


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
