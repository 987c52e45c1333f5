"""Token ids to the fields of a batch: tokens, labels, loss_mask, position_ids, and what describes
documents.

The functions of `__all__` are public, for ids from anywhere. They take NumPy arrays or torch
tensors of any integer dtype; what they return is contiguous, and memory of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from streammega.config import FieldsConfig
from streammega.config.columns import refuse_columns
from streammega.errors import ConfigError, FormatError
from streammega.kernels.fields import make_mask, make_positions
from streammega.samples.device_fields import NO_ID, DeviceFields
from streammega.samples.field_inputs import Batch as Batch
from streammega.samples.field_inputs import (
    FieldInputs,
    Samples,
    check_mask_is_there,
    make_fields,
    makers,
)
from streammega.samples.host_fields import (
    HostFields,
    Ids,
    bounds_of,
    causal_mask,
    new_memory,
    or_none,
    scan_padding,
)

__all__ = ["attention_mask", "batch_fields", "cu_seqlens", "loss_mask", "position_ids"]

IdsLike = NDArray[Any] | Tensor


def batch_fields(
    ids: IdsLike, valid: IdsLike | None, config: FieldsConfig, *, bounds: bool = False
) -> Batch:
    """The fields of samples as Megatron makes them, from ids of any source.

    "tokens", "labels", "position_ids": int64 [samples, S]; "loss_mask": float32 [samples, S], zero
    where there is no label. Labels are shifted already: labels[:, i] is the token after tokens[:,
    i]. Models of Hugging Face shift what they get as `labels`: give these as `shift_labels`. With
    `bounds` and reset_attention_mask also "cu_seqlens". Those that `fields` of the config names, if it
    names any.

    Args:
        ids: [samples, S + 1], or [samples, S] where the last token has no label; an array or
            tensor of integers. For ids on an accelerator, the fields are made there.
        valid: integers [samples], how many ids of each row are not padding; None: all of them.
        config: sequence_length and the fields wanted, a FieldsConfig or DataConfig.
        bounds: add "cu_seqlens", whose width differs from batch to batch.

    Raises ConfigError for ids of another shape or kind, and for inter_document_masking and
    "dataset_id", which ids do not tell; FormatError for an id at or past `vocab_size`, when the config
    gives one.
    """
    if getattr(config, "inter_document_masking", False):
        raise ConfigError(
            "inter_document_masking goes by the sequences of files, which ids do not tell; give "
            "a config without it"
        )
    config.check_eod_id(problem="ids do not tell it")
    names = [name for name in config.field_names if bounds or name != "cu_seqlens"]
    refuse_columns(config, "ids do not tell the values of columns")
    if "dataset_id" in names:
        raise ConfigError("ids do not tell their dataset; leave dataset_id out of fields")
    return fields_of_ids(ids, valid, config, names=names)


def fields_of_ids(
    ids: IdsLike,
    valid: IdsLike | None,
    config: FieldsConfig,
    *,
    names: Sequence[str] | None = None,
) -> Batch:
    """The same, of all that ids tell. names: of the fields; None: those of the config."""
    names = config.field_names if names is None else names
    if isinstance(ids, Tensor) and ids.device.type != "cpu":
        inputs: FieldInputs = inputs_on_device(ids, valid, config, names)
    else:
        stored = _array(ids, "ids")
        _check_ids(
            stored.dtype.kind in "iu", str(stored.dtype), stored.shape, config.sequence_length
        )
        stored = _as_kernels_take(stored)
        counts = np.full(len(stored), stored.shape[1])
        if valid is not None:
            counts = _valid_counts(_array(valid, "valid"), stored.shape)
        samples = Samples(torch.from_numpy(stored), torch.from_numpy(counts))
        inputs = HostFields(samples, config, names)
    (batch,) = make_fields(inputs, makers(names))
    return batch


def loss_mask(
    tokens: IdsLike, labels: IdsLike, *, pad_id: int = NO_ID, eod_id: int | None = None
) -> Tensor:
    """float32 [samples, S]: 0 where the label is pad_id and, if given, where the token is eod_id;
    else 1.

    tokens, labels: integers [samples, S]. pad_id: -1 is padding where a tokenizer has none,
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
    make_mask(inputs, targets, pad_id, or_none(eod_id), eod_id is not None, mask.numpy())
    return mask


def position_ids(tokens: IdsLike, *, eod_id: int | None = None) -> Tensor:
    """int64 [samples, S]: 0 to S - 1 in each row; counted from 0 again after every eod_id, if one is given.

    tokens: integers [samples, S]. Raises ConfigError for other shapes and kinds.
    """
    ids = _matrix(tokens, "tokens")
    positions = new_memory(ids.shape, torch.int64)
    if eod_id is None:
        positions.numpy()[:] = np.arange(ids.shape[1])
    else:
        make_positions(ids, eod_id, positions.numpy())
    return positions


def cu_seqlens(tokens: IdsLike, eod_id: int) -> Tensor:
    """Document bounds of samples, int32 [samples, most documents + 1], from 0 to S; rows are filled
    up with S.

    tokens: integers [samples, S]; a document ends with eod_id. The form that variable-length
    attention kernels take, row by row. Raises ConfigError for other shapes and kinds.
    """
    return bounds_of([_matrix(tokens, "tokens")], eod_id, new_memory)[0]


def attention_mask(tokens: IdsLike, *, eod_id: int | None = None) -> Tensor:
    """bool [samples, 1, S, S], True where attention is forbidden: to later tokens and, if eod_id is
    given, over it.

    tokens: integers [samples, S]. Raises ConfigError for other shapes and kinds.
    """
    ids = _matrix(tokens, "tokens")
    samples, length = ids.shape
    bounds = [] if eod_id is None else [cu_seqlens(ids, eod_id)]
    return causal_mask(samples, length, bounds, new_memory)


# --- ids from anywhere ---


def inputs_on_device(
    ids: Tensor, valid: IdsLike | None, config: FieldsConfig, names: Sequence[str]
) -> DeviceFields:
    """What fields of ids on an accelerator are made of."""
    fractional = ids.is_floating_point() or ids.is_complex()
    is_integer = not fractional and ids.dtype != torch.bool
    _check_ids(is_integer, str(ids.dtype), tuple(ids.shape), config.sequence_length)
    samples, width = ids.shape
    counts = np.full(samples, width)
    if isinstance(valid, Tensor):
        valid = valid.cpu().numpy()
    if valid is not None:
        counts = _valid_counts(np.asarray(valid), (samples, width))
    if (counts <= config.sequence_length).any():
        check_mask_is_there(names)
    # ids are copied to the host only if something there is looked for
    pad = config.effective_pad_id
    if config.vocab_size is not None or (pad >= 0 and "loss_mask" not in names):
        is_valid = np.arange(width) < counts[:, None]
        stored = np.where(is_valid, ids.cpu().numpy().astype(np.int64), pad)
        scan_padding(stored, config, names)
    return DeviceFields(Samples(ids, torch.from_numpy(counts).to(ids.device)), config)


def _as_kernels_take(ids: NDArray[Any]) -> NDArray[Any]:
    """Ids in memory of one kind: for each other kind a kernel would be compiled. Raises FormatError
    for an id that no int64 is.
    """
    if ids.dtype == np.uint64 and (ids >> np.uint64(63)).any():
        raise FormatError(
            f"token id {ids.max()} is no int64, which tokens are; "
            "are these bytes the ids that they are taken for?"
        )
    dtype = np.int64 if ids.dtype == np.uint64 else ids.dtype.newbyteorder("=")
    return np.require(ids, dtype, ["C", "W"])


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
            f"ids are {dtype} {list(shape)}; "
            f"they must be integers of the shape [samples, {length + 1}] "
            f"(sequence_length and the token after it), "
            f"or [samples, {length}] where the last token has no label"
        )


def _valid_counts(counts: NDArray[Any], shape: tuple[int, ...]) -> NDArray[np.int64]:
    """How many ids each row of ids of this shape has, int64 [samples]."""
    if counts.dtype.kind not in "iu" or counts.shape != shape[:1]:
        raise ConfigError(
            f"valid is {counts.dtype} {list(counts.shape)}; it must be integers of the shape "
            f"[{shape[0]}], one a row"
        )
    if len(counts):
        min_count = counts.min()
        max_count = counts.max()
        if min_count < 0 or max_count > shape[1]:
            raise ConfigError(
                f"valid counts are between {min_count} and {max_count}; rows have 0 to {shape[1]} ids"
            )
    return np.ascontiguousarray(counts, np.int64)
