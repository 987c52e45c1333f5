"""A micro-batch on its way from a DataLoader worker to the process that trains.

torch sends each field as a file in shared memory, which takes a millisecond a field and 28 bytes a
token. Two or four bytes a token are enough for most batches: labels are the tokens one place later, the
loss mask is ones, and positions count up. Such fields are sent as ids, and the receiver makes them.

If user code in the worker may read batches, they are dicts of all fields. Their values then decide how
they are sent, because the code may have changed them; torch sends all other fields. If only torch
reads batches, the worker makes no fields: it gathers ids and sends them.
"""

from __future__ import annotations

import fcntl
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType
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
"""The dtypes in which ids are sent, if they fit."""
PIPE_BYTES = 1 << 20
"""Size of the pipe for results: the most that Linux gives without privileges."""


class IdBatch:
    """Ids [samples, S + 1] for a batch that no user code reads in the worker.

    The receiver gets a dict of fields.
    """

    def __init__(self, ids: Tensor, names: Sequence[str] = tuple(PLAIN_FIELDS)) -> None:
        self._ids = ids
        self._names = names

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _unpack, (dict.fromkeys(self._names), self._ids.numpy(), self._names)


def only_torch_sees_batches(dataset: object) -> bool:
    """Whether no user code reads batches in this worker. Only `__iter__` of `dataset` may call it.

    This holds if torch itself iterates over `dataset` and the user set no `collate_fn`.
    """
    worker = get_worker_info()
    if worker is None or worker.dataset is not dataset:
        return False
    # torch has no API for this: only the object that calls `__iter__` knows the collate function
    fetcher = sys._getframe(2).f_locals.get("self")
    collate = getattr(fetcher, "collate_fn", None)
    return collate is default_convert and getattr(fetcher, "auto_collation", None) is False


def enlarge_pipe() -> None:
    """Give the pipe, through which this worker sends its batches, room for several of them.

    Linux gives 64 KiB, often half a batch. The thread that feeds the pipe then waits until the
    training process reads, and needs the worker's GIL again for the rest. Where Linux refuses a
    larger pipe, it stays as it is. Only `__iter__` of a dataset may call this.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_name != "_worker_loop":
        frame = frame.f_back
    # torch has no API for this: only the frame of its loop knows the queue
    queue = None if frame is None else frame.f_locals.get("data_queue")
    writer: Any = getattr(queue, "_writer", None)
    if writer is not None:
        with suppress(OSError):
            fcntl.fcntl(writer.fileno(), fcntl.F_SETPIPE_SZ, PIPE_BYTES)


def fields_follow_from_ids(steps: MicroSteps) -> bool:
    """Whether the fields of all batches can be made from ids alone, if no id is padding."""
    config = steps.config
    names = field_names(steps.samples)
    if "position_ids" in names and (config.reset_position_ids or config.inter_document_masking):
        return False
    if "loss_mask" in names and (
        config.eod_mask_loss
        or not config.add_extra_token
        or masks_by_files(steps.samples)
        or are_packed(all_files(steps.samples.files))
    ):
        return False
    return PLAIN_FIELDS.keys() >= set(names)


def batch_of_ids(fields: Batch, steps: MicroSteps) -> IdBatch | WorkerBatch:
    """The batch that a worker sends for {"ids", "valid"}: ids, or fields if some ids are padding.

    Raises FormatError for an id outside of the vocabulary.
    """
    ids = fields["ids"]
    names = field_names(steps.samples)
    if _all_are_tokens(ids, fields["valid"], steps):
        return IdBatch(ids, names)
    return WorkerBatch(fields_of_ids(ids, fields["valid"], steps.config, names=names))


def _all_are_tokens(ids: Tensor, valid: Tensor, steps: MicroSteps) -> bool:
    """Whether all ids are tokens of the vocabulary and none is padding."""
    config = steps.config
    stored = ids.numpy()
    if (valid.numpy() < stored.shape[1]).any():
        return False
    pad = config.effective_pad_id
    if pad < 0 and stored.dtype.kind == "u" and config.vocab_size is None:
        return True
    padding, lowest, highest = scan_ids(stored, pad)
    if config.vocab_size is not None and not 0 <= lowest <= highest < config.vocab_size:
        return False  # making their fields raises the error
    return not padding


class WorkerBatch(dict[str, Any]):
    """A batch in a worker. Its pickle is small, and the receiver gets a plain dict."""

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
            sent[name] = None if name in made else _without_unused_memory(value)
        return _unpack, (sent, ids, made)


def _unpack(sent: dict[str, Any], ids: NDArray[Any] | None, made: Sequence[str]) -> dict[str, Any]:
    """The fields in their order. Fields made from ids have their own memory."""
    if ids is not None:
        sent |= plain_fields(ids, ids.shape[1] - 1, made, recycled_memory())
    return sent


def _ids_of(tokens: Any, labels: Any) -> NDArray[Any] | None:
    """The ids [samples, S + 1] of tokens and labels.

    None if labels are not the tokens one place later, or if the ids do not fit a dtype of NARROW.
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
    """Whether a field is an ordinary tensor in host memory: its values are its whole state."""
    return (
        type(field) is Tensor
        and field.dtype == dtype
        and field.device.type == "cpu"
        and field.layout == torch.strided
        and field.is_contiguous()
        and not field.requires_grad
    )


def _without_unused_memory(value: Any) -> Any:
    """Copy a tensor that is a part of a larger memory. torch would send all of that memory."""
    is_ordinary = type(value) is Tensor and value.device.type == "cpu"
    if not is_ordinary or value.layout != torch.strided or value.requires_grad:
        return value
    if value.untyped_storage().nbytes() == value.numel() * value.itemsize:
        return value
    return value.clone()
