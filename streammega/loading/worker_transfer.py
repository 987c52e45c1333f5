"""A micro-batch on its way from a DataLoader worker to the process that trains.

torch sends each field as a file in shared memory, which takes a millisecond a field and 28 bytes a
token. Ids in their stored width and columns are enough: the receiver makes the fields of them. A field
that the worker's program has changed is sent as it is, by torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from streammega.config import FieldsConfig
from streammega.kernels.fields import is_widened
from streammega.loading.buffers import recycled_memory
from streammega.loading.micro_steps import MicroSteps
from streammega.samples.field_inputs import Batch, Make, Samples, make_fields, makers
from streammega.samples.host_fields import HostFields


@dataclass(frozen=True)
class FieldsOfPhase:
    """How the fields of the samples of one phase are made, in any process."""

    config: FieldsConfig
    names: Sequence[str]
    extra_token: bool
    columns: Mapping[str, Make] = field(default_factory=dict)
    """How the fields of stored columns are made."""

    @classmethod
    def of(cls, steps: MicroSteps) -> FieldsOfPhase:
        """Those of some micro-steps."""
        (segment,) = steps.samples.segments
        # a message has no datasets, which may be many thousands
        columns = {name: field.make for name, field in segment.column_fields.items()}
        return cls(steps.config.alone(), segment.field_names, segment.has_extra_token, columns)

    @property
    def makers(self) -> dict[str, Make]:
        """How each field is made, by name."""
        return makers(self.names) | {**self.columns}

    def inputs(self, samples: Samples) -> HostFields:
        """What the fields are made of. Raises FormatError for an id outside of the vocabulary."""
        memory = recycled_memory()
        return HostFields(samples, self.config, self.names, memory, extra_token=self.extra_token)


class WorkerBatch(dict[str, Any]):
    """A batch in a worker. Its pickle is small, and the receiver gets a plain dict."""

    def __init__(self, made: Batch, samples: Samples, how: FieldsOfPhase) -> None:
        super().__init__(made)
        self._samples = samples
        self._how = how

    def __copy__(self) -> WorkerBatch:
        """torch copies what a worker gives before it is sent."""
        copied = WorkerBatch.__new__(WorkerBatch)
        copied.update(self)
        copied.__dict__.update(self.__dict__)
        return copied

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        samples = self._samples
        follow = self._names_that_follow()
        others = {
            name: _without_unused_memory(value)
            for name, value in self.items()
            if name not in follow
        }
        if not follow:
            return dict, (others,)
        # as bytes: numpy has not all of their dtypes
        columns = {
            name: (array.view(torch.uint8).numpy(), array.dtype)
            for name, array in samples.columns.items()
        }
        dataset_id = None if samples.dataset_id is None else samples.dataset_id.numpy()
        arrays = (samples.ids.numpy(), samples.valid.numpy(), columns, dataset_id, samples.pieces)
        return _receive, (list(self), others, follow, arrays, self._how)

    def _names_that_follow(self) -> set[str]:
        """The fields that are what the receiver will make of the samples."""
        follow = set()
        pair = [self.get(name) for name in ("tokens", "labels")]
        stored = self._samples.ids.numpy()
        shape = len(stored), self._how.config.sequence_length
        anew = self._how.inputs(self._samples)
        are_plain = not anew.has_padding
        are_plain = are_plain and all(_is(field, torch.int64, shape) for field in pair)
        if are_plain and is_widened(stored, *(field.numpy() for field in pair)):  # type: ignore[union-attr]
            follow = {"tokens", "labels"}
        for name, make in self._how.makers.items():
            if name in follow or name not in self:
                continue
            value, made = self[name], make(anew)
            if made is not None and not isinstance(made, Tensor):
                (made,) = made
            is_ordinary = made is not None and _is(value, made.dtype, made.shape)
            # of zeros with a sign, too
            if is_ordinary and torch.equal(value.view(torch.uint8), made.view(torch.uint8)):
                follow.add(name)
        return follow


def _receive(
    names: Sequence[str],
    others: dict[str, Any],
    follow: set[str],
    arrays: tuple[Any, ...],
    how: FieldsOfPhase,
) -> dict[str, Any]:
    """The fields in their order. Those that are made here have memory of their own."""
    ids, valid, columns, dataset_id, pieces = arrays
    samples = Samples(
        ids=torch.from_numpy(ids),
        valid=torch.from_numpy(valid),
        columns={
            name: torch.from_numpy(column).view(dtype) for name, (column, dtype) in columns.items()
        },
        dataset_id=None if dataset_id is None else torch.from_numpy(dataset_id),
        pieces=pieces,
    )
    wanted = {name: make for name, make in how.makers.items() if name in follow}
    (made,) = make_fields(how.inputs(samples), wanted)
    return {name: others[name] if name in others else made[name] for name in names}


def _is(field: Any, dtype: torch.dtype, shape: Sequence[int]) -> bool:
    """Whether a field is an ordinary tensor in host memory: its values are its whole state."""
    return (
        type(field) is Tensor
        and field.dtype == dtype
        and field.shape == shape
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
