"""A micro-batch on its way from a DataLoader worker to the process that trains.

torch sends each field as a file in shared memory, which takes a millisecond a field and 28 bytes a
token. Most batches are told by two or four bytes a token: labels are the tokens one place later, the
loss mask is ones, and positions count up. Such fields are sent as ids, and made where they arrive.

The values decide, because a program in the worker may have written to them. torch sends all other
fields.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from streammega.kernels.batch import join_labels
from streammega.loading.batch_memory import received_memory
from streammega.samples.derived_fields import plain_mask, plain_positions

NARROW = (np.uint16, np.uint32)
"""What ids are sent as, where they fit."""


class WorkerBatch(dict[str, Any]):
    """A batch in a worker. It takes little room when it is pickled, and arrives as a plain dict."""

    def __copy__(self) -> WorkerBatch:
        """torch copies what a worker gives before it is sent."""
        return WorkerBatch(self)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        sent = dict(self)
        ids = _ids_of(self.get("tokens"), self.get("labels"))
        made = []
        if ids is not None:
            made = ["tokens", "labels"]
            if _is_ones(self.get("loss_mask"), self["tokens"].shape):
                made.append("loss_mask")
            if _counts_up(self.get("position_ids"), self["tokens"].shape):
                made.append("position_ids")
        for name, value in sent.items():
            sent[name] = None if name in made else _without_rest(value)
        return _unpack, (sent, ids, made)


def _unpack(sent: dict[str, Any], ids: NDArray[Any] | None, made: list[str]) -> dict[str, Any]:
    """The fields, in their order; those that are made of ids in memory of their own."""
    if ids is None:
        return sent
    shape = (ids.shape[0], ids.shape[1] - 1)
    allocate = received_memory()
    for name, first in (("tokens", 0), ("labels", 1)):
        field = allocate(shape, torch.int64)
        field.numpy()[:] = ids[:, first : first + shape[1]]
        sent[name] = field
    if "loss_mask" in made:
        sent["loss_mask"] = plain_mask(shape, allocate)
    if "position_ids" in made:
        sent["position_ids"] = plain_positions(shape, allocate)
    return sent


def _ids_of(tokens: Any, labels: Any) -> NDArray[Any] | None:
    """Ids [samples, S + 1] of tokens and labels; None where labels are not the tokens one place
    later, or do not fit.
    """
    if not (_is_plain(tokens, torch.int64) and _is_plain(labels, torch.int64)):
        return None
    if tokens.ndim != 2 or tokens.shape != labels.shape or not tokens.numel():
        return None
    samples, length = tokens.shape
    for dtype in NARROW:
        ids = np.empty((samples, length + 1), dtype)
        if join_labels(tokens.numpy(), labels.numpy(), ids):
            return ids
    return None


def _is_ones(mask: Any, shape: torch.Size) -> bool:
    return (
        _is_plain(mask, torch.float32) and mask.shape == shape and bool((mask.numpy() == 1).all())
    )


def _counts_up(positions: Any, shape: torch.Size) -> bool:
    return (
        _is_plain(positions, torch.int64)
        and positions.shape == shape
        and bool((positions.numpy() == np.arange(shape[1])).all())
    )


def _is_plain(field: Any, dtype: torch.dtype) -> bool:
    """Whether a field is an ordinary tensor of the host, whose values are all that it is."""
    return (
        type(field) is Tensor
        and field.dtype == dtype
        and field.device.type == "cpu"
        and field.layout == torch.strided
        and field.is_contiguous()
        and not field.requires_grad
    )


def _without_rest(value: Any) -> Any:
    """A tensor without what else lies in its memory, which torch would send with it."""
    is_ordinary = type(value) is Tensor and value.device.type == "cpu"
    if not is_ordinary or value.layout != torch.strided or value.requires_grad:
        return value
    if value.untyped_storage().nbytes() == value.numel() * value.itemsize:
        return value
    return value.clone()
