"""What fields are made of, wherever they are made: the table of fields is `config.fields.FIELDS`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from streammega.config import FieldsConfig
from streammega.config.fields import FIELDS, Field
from streammega.errors import ConfigError

Batch = dict[str, Tensor]
Make = Callable[[Any], Any]
"""Makes a field of `FieldInputs`; None: the samples do not have it."""


class Samples(NamedTuple):
    """Gathered samples: their ids as they are stored, and all else that fields are made of.

    Each sample is a row; or several, its kept parts, see `KeptParts`. Arrays on one device.

    ids: [rows, S + 1], or [rows, S] where the last token has no label. valid: integers [rows], how many
    ids of each row are not padding. columns: by name, what travels with each id, [rows, S + 1] or [rows, S + 1, width]: see
    `columns.py`. dataset_id: int64 [samples]. pieces: (row_splits, size) of the sequences that samples
    consist of, for inter_document_masking, int64: see `sequence_bounds`.
    """

    ids: Tensor
    valid: Tensor
    columns: Mapping[str, Tensor] = {}
    dataset_id: Tensor | None = None
    pieces: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None

    def cut(self, batches: int, first: int, last: int) -> Samples:
        """Micro-batches [first, last) of so many."""

        def part(array: Tensor) -> Tensor:
            rows = len(array) // batches
            return array[first * rows : last * rows]

        pieces = self.pieces
        if pieces is not None:
            splits, size = pieces
            rows = len(self.ids) // batches
            splits = splits[first * rows : last * rows + 1]
            pieces = splits - splits[0], size[splits[0] : splits[-1]]
        return Samples(
            ids=part(self.ids),
            valid=part(self.valid),
            columns={name: part(column) for name, column in self.columns.items()},
            dataset_id=None if self.dataset_id is None else part(self.dataset_id),
            pieces=pieces,
        )

    @property
    def nbytes(self) -> int:
        """Bytes of what it has for each row."""
        return sum(array.nbytes for array in (self.ids, self.valid, *self.columns.values()))


class FieldInputs:
    """What fields are made of, on the host (`HostFields`) or on a device (`DeviceFields`). Both have the
    fields as attributes, made when they are asked for:

    tokens, labels: int64 [rows, S], 0 in place of padding. loss_mask: float32 [rows, S]; 0 where there is
    no loss, for the label is padding or has none, or with eod_mask_loss comes after eod_id.
    position_ids: int64 [rows, S], counted from the first token of the sample, or of the document.
    cu_seqlens: int32 [rows, most documents + 1], a list of those of micro-batches, or None. max_seqlen:
    int32 [rows], or None where sequences are unknown. attention_mask: bool [rows, 1, S, S], True where
    attention is forbidden. dataset_id: int64 [samples], or None.

    starts: the token of its sample at which each row begins, for the rows of one sample in their order.
    """

    def __init__(
        self, samples: Samples, config: FieldsConfig, starts: Sequence[int] = (0,)
    ) -> None:
        self.samples = samples
        self.config = config
        self.starts = starts

    def values_of(self, column: str, align: str) -> Tensor:
        """The values of a stored column, [rows, S] or [rows, S, width]: of labels, or of tokens."""
        values = self.samples.columns[column]
        first = int(align == "labels")
        # contiguous() would leave one sample a view, whose memory others share
        kept = values[:, first : self.config.sequence_length + first]
        return kept.clone(memory_format=torch.contiguous_format)


def makers(names: Collection[str], columns: Mapping[str, Field] = {}) -> dict[str, Make]:
    """How fields of the table are made, in its order, and after them those of stored columns."""
    fields = {name: field for name, field in FIELDS.items() if name in names} | {**columns}
    return {name: field.make for name, field in fields.items()}


def make_fields(inputs: FieldInputs, wanted: Mapping[str, Make], batches: int = 1) -> list[Batch]:
    """The fields that are wanted, by `makers`, of so many micro-batches of equal size."""
    made: dict[str, Sequence[Tensor]] = {}
    for name, make in wanted.items():
        value = make(inputs)
        if isinstance(value, Tensor):
            made[name] = [value] if batches == 1 else value.chunk(batches)
        elif value is not None:
            made[name] = value
    return [{name: values[number] for name, values in made.items()} for number in range(batches)]


def check_mask_is_there(names: Collection[str]) -> None:
    """Raise ConfigError for batches without a loss_mask where some labels have no loss."""
    if "labels" in names and "loss_mask" not in names:
        raise ConfigError(
            "some labels have no loss (padding, eod_mask_loss, modes, or documents that are excluded), "
            "but batches have no loss_mask, which says where: add 'loss_mask' to fields"
        )
