"""Gathered micro-batches until they are taken, and what they become then."""

from __future__ import annotations

from collections import deque
from typing import Any, Literal, NamedTuple

from streammega.loading.micro_steps import MicroSteps
from streammega.samples.field_inputs import Batch, Samples, make_fields, makers
from streammega.samples.host_fields import Allocate, HostFields

Form = Literal["fields", "ids", "both"]
"""What batches are: dicts of fields; dicts of ids and columns, from which fields can be made elsewhere; or
pairs of the fields and the `Samples` that they are made of.
"""
Batches = deque[tuple[int, Any]]
"""The micro-batches to hand out next, as (consumed, batch)."""


class ReadyGroup(NamedTuple):
    """Gathered micro-batches, and the position of each."""

    consumed: list[int]
    samples: Samples


def ids_batches(samples: Samples, batches: int) -> list[Batch]:
    """So many micro-batches as ids: {"ids", "valid", *columns, "dataset_id"}."""
    assert samples.dataset_id is not None
    arrays = {
        "ids": samples.ids,
        "valid": samples.valid,
        **samples.columns,
        "dataset_id": samples.dataset_id,
    }
    parts = zip(*(array.chunk(batches) for array in arrays.values()), strict=True)
    return [dict(zip(arrays, part, strict=True)) for part in parts]


class Assembler:
    """Makes the micro-batches of ready groups, a few at a time, when the caller takes them.

    Fields that were made earlier would only take memory. No two batches share memory, so the caller
    may write to them.

    Args:
        allocate: makes the tensors of fields.
    """

    def __init__(self, steps: MicroSteps, form: Form, allocate: Allocate) -> None:
        self._config = steps.config
        (segment,) = steps.samples.segments
        self._names = segment.field_names
        self._makers = makers(self._names, segment.column_fields)
        self._extra_token = segment.has_extra_token
        self._form = form
        self._allocate = allocate

    def assemble(self, group: ReadyGroup, first: int, last: int) -> Batches:
        """Make micro-batches [first, last) of a group.

        Raises FormatError for an id outside of the vocabulary. Raises ConfigError if `fields` of the
        config leaves out a field that these samples need.
        """
        total, batches = len(group.consumed), last - first
        samples = group.samples.cut(total, first, last)
        made: list[Any]
        if self._form == "ids":
            made = ids_batches(samples, batches)
        else:
            inputs = HostFields(
                samples,
                self._config,
                self._names,
                self._allocate,
                batches=batches,
                extra_token=self._extra_token,
            )
            made = make_fields(inputs, self._makers, batches)
        if self._form == "both":
            parts = [samples.cut(batches, number, number + 1) for number in range(batches)]
            made = list(zip(made, parts, strict=True))
        return deque(zip(group.consumed[first:last], made, strict=True))
