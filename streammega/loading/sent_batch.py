"""A micro-batch on its way from a DataLoader worker to the process that trains.

As torch sends it, each field is a file in shared memory whose descriptor is handed over by a
connection of its own: a millisecond a field, and 28 bytes a token to be written and mapped. What
fields hold takes two or four bytes a token: labels are the tokens one place later, and a mask of
ones or positions that count up need not be sent at all. So that is what goes through the pipe, and
the fields are made of it where they arrive.

What is sent is told from the values, never from where they came from: a program in the worker may
have written to them. A field that does not fit goes as torch sends it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from streammega.loading.batch_memory import received_memory
from streammega.samples.derived_fields import Allocate, plain_mask, plain_positions

TOKENS = "tokens"
LABELS = "labels"
NARROW = (np.dtype(np.uint16), np.dtype(np.uint32))
"""What integers are sent as where they fit."""
Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class _Shifted:
    """Tokens and labels: int64 [samples, S] each, of ids [samples, S + 1]."""

    ids: NDArray[Any]

    def fields(self, allocate: Allocate) -> tuple[Tensor, Tensor]:
        samples, width = self.ids.shape
        tokens = allocate((samples, width - 1), torch.int64)
        labels = allocate((samples, width - 1), torch.int64)
        tokens.numpy()[:] = self.ids[:, :-1]
        labels.numpy()[:] = self.ids[:, 1:]
        return tokens, labels


@dataclass(frozen=True, kw_only=True)
class _Integers:
    """int64 or int32 values in fewer bytes."""

    values: NDArray[Any]
    dtype: torch.dtype

    def field(self, allocate: Allocate) -> Tensor:
        field = allocate(self.values.shape, self.dtype)
        field.numpy()[...] = self.values
        return field


@dataclass(frozen=True, kw_only=True)
class _CountsUp:
    """int64 [..., S]: 0 to S - 1 in each row."""

    shape: Shape

    def field(self, allocate: Allocate) -> Tensor:
        return plain_positions(self.shape, allocate)


@dataclass(frozen=True, kw_only=True)
class _Ones:
    """float32."""

    shape: Shape

    def field(self, allocate: Allocate) -> Tensor:
        return plain_mask(self.shape, allocate)


@dataclass(frozen=True, kw_only=True)
class _Bits:
    """float32 values that are 0 or 1, eight a byte."""

    packed: NDArray[np.uint8]
    shape: Shape

    def field(self, allocate: Allocate) -> Tensor:
        field = allocate(self.shape, torch.float32)
        bits = np.unpackbits(self.packed, count=field.numel())
        field.numpy()[...] = bits.reshape(self.shape)
        return field


class SentBatch(dict[str, Any]):
    """A batch that takes little room when it is pickled, and arrives as a plain dict."""

    def __copy__(self) -> SentBatch:
        """torch copies what a worker gives before it is sent."""
        return SentBatch(self)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        packed: dict[str, Any] = dict(self)
        shifted = _pack_shifted(self.get(TOKENS), self.get(LABELS))
        if shifted is not None:
            packed[TOKENS] = shifted
            packed[LABELS] = None
        for name, value in packed.items():
            packed[name] = _alone(_pack(value))
        return _unpack, (packed,)


def _unpack(packed: dict[str, Any]) -> dict[str, Any]:
    """The fields, in their order, each in memory of its own."""
    allocate = received_memory()
    fields: dict[str, Any] = {}
    for name, value in packed.items():
        packs = isinstance(value, (_Integers, _CountsUp, _Ones, _Bits))
        fields[name] = value.field(allocate) if packs else value
    shifted = packed.get(TOKENS)
    if isinstance(shifted, _Shifted):
        fields[TOKENS], fields[LABELS] = shifted.fields(allocate)
    return fields


def unpack_ids(ids: NDArray[Any]) -> dict[str, Any]:
    """The fields of ids [samples, S + 1] that are all tokens, each in memory of its own."""
    samples, width = ids.shape
    shape = (samples, width - 1)
    allocate = received_memory()
    tokens, labels = _Shifted(ids=ids).fields(allocate)
    return {
        TOKENS: tokens,
        LABELS: labels,
        "loss_mask": plain_mask(shape, allocate),
        "position_ids": plain_positions(shape, allocate),
    }


def _pack_shifted(tokens: Any, labels: Any) -> _Shifted | None:
    """Tokens and labels as one, where labels are the tokens one place later."""
    both = (tokens, labels)
    if not all(_is_plain(field) and field.dtype == torch.int64 for field in both):
        return None
    if tokens.ndim != 2 or tokens.shape != labels.shape or not tokens.numel():
        return None
    inputs = tokens.numpy()
    targets = labels.numpy()
    if not np.array_equal(inputs[:, 1:], targets[:, :-1]):
        return None
    last = targets[:, -1:]
    narrow = _narrowest(inputs, last)
    if narrow is None:
        return None
    samples, length = inputs.shape
    ids = np.empty((samples, length + 1), narrow)
    ids[:, :-1] = inputs
    ids[:, -1:] = last
    return _Shifted(ids=ids)


def _alone(value: Any) -> Any:
    """A tensor without what else lies in its memory, which torch would send with it."""
    if not _is_plain(value):
        return value
    if value.untyped_storage().nbytes() == value.numel() * value.itemsize:
        return value
    return value.clone()


def _pack(field: Any) -> Any:
    """A field in fewer bytes; as it is where it does not fit."""
    if not _is_plain(field) or not field.numel():
        return field
    values = field.numpy()
    shape = tuple(field.shape)
    if field.dtype == torch.float32:
        return _pack_mask(values, shape) or field
    if field.dtype not in (torch.int64, torch.int32):
        return field
    count = np.arange(shape[-1] if shape else 0)
    if field.dtype == torch.int64 and shape and (values == count).all():
        return _CountsUp(shape=shape)
    narrow = _narrowest(values)
    if narrow is None:
        return field
    return _Integers(values=values.astype(narrow), dtype=field.dtype)


def _pack_mask(values: NDArray[np.float32], shape: Shape) -> _Ones | _Bits | None:
    is_one = values == 1
    if is_one.all():
        return _Ones(shape=shape)
    # By its bits: a minus zero is equal to zero and is another value.
    is_zero = values.view(np.uint32) == 0
    if not (is_one | is_zero).all():
        return None
    return _Bits(packed=np.packbits(is_one), shape=shape)


def _is_plain(field: Any) -> bool:
    """Whether a field is an ordinary tensor of the host, whose values are all that it is."""
    return (
        type(field) is Tensor
        and field.device.type == "cpu"
        and field.layout == torch.strided
        and field.is_contiguous()
        and not field.requires_grad
    )


def _narrowest(*values: NDArray[Any]) -> np.dtype[Any] | None:
    """The smallest dtype that holds all values; None: none is smaller than theirs."""
    lowest = min(int(part.min()) for part in values)
    highest = max(int(part.max()) for part in values)
    for dtype in NARROW:
        if lowest >= 0 and highest <= np.iinfo(dtype).max and dtype.itemsize < values[0].itemsize:
            return dtype
    return None
