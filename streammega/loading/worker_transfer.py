"""A micro-batch on its way from a DataLoader worker to the process that trains.

torch sends each field as a file in shared memory, which takes a millisecond a field and 28 bytes a
token. Two or four bytes a token are enough for most batches: labels are the tokens one place later, the
loss mask is ones, and positions count up. Such fields are sent as ids, and made where they arrive.

Where a program in the worker may look at batches, they are dicts of all fields, and the values decide
how they are sent, because the program may have written to them. torch sends all other fields. Where
nobody looks, the worker makes no fields: it gathers ids and sends them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import default_convert, get_worker_info

from streammega.kernels.fields import join_labels, scan_ids
from streammega.loading.buffers import recycled_memory
from streammega.loading.micro_steps import MicroSteps
from streammega.samples.derived_fields import PLAIN_FIELDS, plain_fields
from streammega.samples.fields import Batch, fields_of_ids
from streammega.samples.packed import are_packed
from streammega.samples.source import all_files, field_names, masks_by_files

NARROW = (np.uint16, np.uint32)
"""What ids are sent as, where they fit."""


class IdBatch:
    """Ids [samples, S + 1] that no program looks at in the worker. They arrive as a dict of fields."""

    def __init__(self, ids: Tensor, names: Sequence[str] = tuple(PLAIN_FIELDS)) -> None:
        self._ids = ids
        self._names = names

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _unpack, (dict.fromkeys(self._names), self._ids.numpy(), self._names)


def is_sent_unseen(dataset: object) -> bool:
    """Whether no program looks at batches in this worker. Only `__iter__` of `dataset` may ask.

    That is so where torch itself iterates over `dataset`, and has no `collate_fn` of a user.
    """
    worker = get_worker_info()
    if worker is None or worker.dataset is not dataset:
        return False
    # torch says nowhere what it does with batches, but to the object that begins the iteration
    fetcher = sys._getframe(2).f_locals.get("self")
    collate = getattr(fetcher, "collate_fn", None)
    return collate is default_convert and getattr(fetcher, "auto_collation", None) is False


def ids_tell_fields(steps: MicroSteps) -> bool:
    """Whether the fields of all batches can be made of ids, but for padding."""
    config = steps.config
    names = field_names(steps.samples)
    if "position_ids" in names and (config.reset_position_ids or config.inter_document_masking):
        return False
    if "loss_mask" in names and (
        config.eod_mask_loss
        or config.sample_joins != "keep"
        or not config.add_extra_token
        or masks_by_files(steps.samples)
        or are_packed(all_files(steps.samples.files))
    ):
        return False
    return PLAIN_FIELDS.keys() >= set(names)


def batch_of_ids(fields: Batch, steps: MicroSteps) -> IdBatch | WorkerBatch:
    """What a worker gives for {"ids", "valid"}: ids, or where there is padding among them, fields.

    Raises FormatError for an id outside of the vocabulary.
    """
    ids = fields["ids"]
    names = field_names(steps.samples)
    if _all_are_tokens(ids, fields["valid"], steps):
        return IdBatch(ids, names)
    return WorkerBatch(fields_of_ids(ids, fields["valid"], steps.config, names=names))


def _all_are_tokens(ids: Tensor, valid: Tensor, steps: MicroSteps) -> bool:
    """Whether all ids can be widened as they are: none is padding, none has to be refused."""
    config = steps.config
    stored = ids.numpy()
    if (valid.numpy() < stored.shape[1]).any():
        return False
    pad = config.effective_pad_id
    if pad < 0 and stored.dtype.kind == "u" and config.vocab_size is None:
        return True
    padding, lowest, highest = scan_ids(stored, pad)
    if config.vocab_size is not None and not 0 <= lowest <= highest < config.vocab_size:
        return False  # they are refused where fields are made of them
    return not padding


class WorkerBatch(dict[str, Any]):
    """A batch in a worker. It takes little room when it is pickled, and arrives as a plain dict."""

    def __copy__(self) -> WorkerBatch:
        """torch copies what a worker gives before it is sent."""
        return WorkerBatch(self)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        sent = dict(self)
        ids = _ids_of(self.get("tokens"), self.get("labels"))
        made: list[str] = []
        if ids is not None:
            made = ["tokens", "labels"]
            shape = self["tokens"].shape
            for name, plain in (("loss_mask", 1), ("position_ids", np.arange(shape[1]))):
                field: Any = self.get(name)
                is_like_tokens = _is_plain(field, PLAIN_FIELDS[name]) and field.shape == shape
                if is_like_tokens and (field.numpy() == plain).all():
                    made.append(name)
        for name, value in sent.items():
            sent[name] = None if name in made else _without_rest(value)
        return _unpack, (sent, ids, made)


def _unpack(sent: dict[str, Any], ids: NDArray[Any] | None, made: Sequence[str]) -> dict[str, Any]:
    """The fields, in their order; those that are made of ids in memory of their own."""
    if ids is not None:
        sent |= plain_fields(ids, ids.shape[1] - 1, made, recycled_memory())
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
