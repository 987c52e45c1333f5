"""From the bytes of a slab that has come to the fields of its micro-batches: one kernel call for
each token width.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from streammega.config import FieldsConfig
from streammega.kernels.batch import fill_tails
from streammega.kernels.plan import gather_rows, gather_shifted
from streammega.loading.micro_steps import MicroSteps
from streammega.loading.read_plan import ReadingPlan
from streammega.loading.spans import PlannedSlab
from streammega.samples.derived_fields import (
    Allocate,
    causal_mask,
    derive,
    plain_mask,
    plain_positions,
    sequence_fields,
    torch_dtype,
)
from streammega.samples.excluded import ExclusionMask
from streammega.samples.fields import Batch
from streammega.samples.loss_masks import Seams, as_asked, seams_between
from streammega.samples.packed import are_packed
from streammega.samples.token_file import Runs, clear_by_modes, has_modes

PLAIN_BYTES = 1 << 20
"""Bytes of plain masks or positions that are written together: so few that they stay in caches when
used again, and no fewer, as memory for them costs half as much as writing them does.
"""
PLAIN_BATCHES = 64
"""Most micro-batches they are written for: of short sequences those bytes hold thousands, and
making so many tensors delays the first batch by tens of milliseconds.
"""
_LATER_FIELDS = (
    "loss_mask",
    "position_ids",
    "cu_seqlens",
    "max_seqlen",
    "attention_mask",
    "dataset_id",
)
"""What follows tokens and labels, in the order of a batch that is read on its own: it tells nothing
of which fields were plain, for programs take a batch apart by `batch.values()`.
"""
_MASK_ITEMSIZE = torch.float32.itemsize
_POSITION_ITEMSIZE = torch.int64.itemsize


@dataclass(frozen=True, kw_only=True)
class Slab:
    """Gathered micro-batches: their positions, and their fields.

    fields: by name, [micro-batches, ...] in memory of the slab's own: no two micro-batches share an
    element. cu_seqlens: of each micro-batch, where the config asks for them; their widths differ.
    """

    consumed: list[int]
    fields: dict[str, torch.Tensor]
    cu_seqlens: list[torch.Tensor] | None = None

    def batches(self) -> deque[tuple[int, Batch]]:
        """(consumed, batch) of each micro-batch, in order."""
        names = list(self.fields)
        columns = [field.unbind() for field in self.fields.values()]
        if self.cu_seqlens is not None:
            names.append("cu_seqlens")
            columns.append(tuple(self.cu_seqlens))
        batches: deque[tuple[int, Batch]] = deque()
        for consumed, *fields in zip(self.consumed, *columns, strict=True):
            batches.append((consumed, dict(zip(names, fields, strict=True))))
        return batches


class Finisher:
    """Adds to batches what need not be gathered, when they are handed out: until then it would only
    take memory.

    Each batch gets masks and positions of its own, though they are mostly alike: a batch is its
    caller's, to write to as well.
    """

    def __init__(self, config: FieldsConfig, micro_batch_size: int, allocate: Allocate) -> None:
        self._shape = (micro_batch_size, config.sequence_length)
        self._allocate = allocate
        self._masks: deque[torch.Tensor] = deque()
        self._positions: deque[torch.Tensor] = deque()
        self._attention = config.create_attention_mask

    def complete(self, batch: Batch) -> None:
        """Add loss_mask and position_ids, where they are plain, and the attention mask, where the
        config asks for one; bring all fields into their order.
        """
        if "loss_mask" not in batch:
            batch["loss_mask"] = self._next(self._masks, plain_mask, _MASK_ITEMSIZE)
        if "position_ids" not in batch:
            batch["position_ids"] = self._next(self._positions, plain_positions, _POSITION_ITEMSIZE)
        if self._attention:
            samples, length = self._shape
            documents = batch.get("cu_seqlens")
            batch["attention_mask"] = causal_mask(samples, length, documents, self._allocate)
        for name in _LATER_FIELDS:
            if name in batch:
                batch[name] = batch.pop(name)

    def _next(
        self, stock: deque[torch.Tensor], make: Callable[..., torch.Tensor], itemsize: int
    ) -> torch.Tensor:
        """The next of a stock, which is filled up by `make` when it is empty."""
        if not stock:
            samples, length = self._shape
            fitting = PLAIN_BYTES // (itemsize * samples * length)
            batches = min(PLAIN_BATCHES, max(1, fitting))
            stock.extend(make((batches, samples, length), self._allocate).unbind())
        return stock.popleft()


TAIL_ID = 0
"""What follows the ids of a sample that ended early: "valid" says that it is padding."""


class Gatherer:
    """Makes slabs.

    Args:
        steps: what is read.
        reading: where its bytes are.
        allocate: makes the tensors.
        ids_only: fields are {"ids": [batches, rows, width] in the stored dtype, "valid": int64
            [batches, rows]}, and where modes make the loss mask, or documents are skipped, "learned":
            bool as ids.
    """

    def __init__(
        self, steps: MicroSteps, reading: ReadingPlan, allocate: Allocate, *, ids_only: bool
    ) -> None:
        kept = reading.planner.kept
        self.batch_rows = steps.micro_batch_size * kept.rows_of_sample
        """Rows of a micro-batch: its samples, or the kept parts of them."""
        self._width = kept.width(steps.config.sequence_length + 1)
        self._config = steps.config
        self._reading = reading
        self._allocate = allocate
        self._ids_only = ids_only
        self._has_modes = has_modes(reading.files)
        self._skipped = steps.samples.skipped
        self._packed = are_packed(reading.files)
        files_of_dataset = [len(files) for files in steps.samples.files]
        self._dataset_of_file = np.repeat(steps.samples.segments[0].dataset_ids, files_of_dataset)

    def gather(self, slab: PlannedSlab) -> Slab:
        """A slab whose bytes are all there."""
        return self._gather_ids(slab) if self._ids_only else self._gather_fields(slab)

    def _gather_ids(self, slab: PlannedSlab) -> Slab:
        """Ids in their stored width, and how many of each row are not padding."""
        samples = slab.last - slab.first
        width = self._width
        ids = self._allocate((samples, width), torch_dtype(self._reading.dtype))
        valid = self._allocate((samples,), torch.int64)
        ids_array = ids.numpy()
        valid_array = valid.numpy()
        self._copy_rows(gather_rows, slab, [ids_array], valid_array)
        some_partial = bool((valid_array < width).any())
        if some_partial:
            fill_tails(ids_array, valid_array, TAIL_ID)
        fields = {"ids": ids, "valid": valid}
        skipped = self._skipped_columns(slab)
        if skipped is not None:
            skipped.overwrite(ids_array, self._eod_id)
        # of a whole run or of none, for ranks expect messages of one form
        if self._has_modes or self._skipped is not None:
            learned = self._allocate((samples, width), torch.bool)
            learned_array = learned.numpy()
            learned_array.fill(True)
            if self._has_modes:
                self._clear_by_modes(slab, learned_array, shift=0)
            if skipped is not None:
                skipped.clear_learned(learned_array)
            fields["learned"] = learned
        return Slab(consumed=slab.consumed, fields=self._by_batch(slab, fields))

    def _by_batch(self, slab: PlannedSlab, fields: dict[str, Tensor]) -> dict[str, Tensor]:
        """Views of fields [samples, ...] as [batches, rows, ...]."""
        batches = len(slab.consumed)
        return {
            name: field.view(batches, self.batch_rows, *field.shape[1:])
            for name, field in fields.items()
        }

    def _gather_fields(self, slab: PlannedSlab) -> Slab:
        """Tokens, labels and what is derived from them, each contiguous."""
        shape = (slab.last - slab.first, self._width - 1)
        tokens = self._allocate(shape, torch.int64)
        labels = self._allocate(shape, torch.int64)
        valid = np.empty(shape[0], np.int64)  # no field of a batch, so in no memory of batches
        self._copy_rows(gather_shifted, slab, [tokens.numpy(), labels.numpy()], valid)
        skipped = self._skipped_columns(slab)
        if skipped is not None:
            # first: positions and bounds are made by the ids that are seen
            skipped.overwrite(tokens.numpy(), self._eod_id)
            skipped.overwrite_labels(labels.numpy(), self._eod_id)
        derived = derive(
            tokens,
            labels,
            valid,
            self._config,
            unsigned=self._reading.dtype.kind == "u",
            allocate=self._allocate,
            rows=self.batch_rows,
            seams=self._seams(slab) if self._config.seams != "joined" else None,
        )
        loss_mask = derived.loss_mask
        if self._has_modes:
            if loss_mask is None:
                loss_mask = plain_mask(shape, self._allocate)
            # a label lies one column before its token
            self._clear_by_modes(slab, loss_mask.numpy(), shift=-1)
        if skipped is not None:
            if loss_mask is None:
                loss_mask = plain_mask(shape, self._allocate)
            skipped.clear_loss(loss_mask.numpy())
        fields = {"tokens": tokens, "labels": labels}
        # a plain mask and plain positions are made when a batch is handed out
        if loss_mask is not None:
            fields["loss_mask"] = loss_mask
        if derived.position_ids is not None:
            fields["position_ids"] = derived.position_ids
        if self._config.dataset_ids:
            fields["dataset_id"] = self._dataset_ids(slab)
        if self._config.inter_document_masking:
            size = slab.span.size
            fields |= sequence_fields(
                slab.row_splits, size, self._config, self._allocate, packed=self._packed
            )
        return Slab(
            consumed=slab.consumed,
            fields=self._by_batch(slab, fields),
            cu_seqlens=derived.cu_seqlens,
        )

    def _seams(self, slab: PlannedSlab) -> Seams | None:
        """Where samples go over from one run of tokens to another, as the config asks for them."""
        span = slab.span
        rows = slab.rows
        rows_of_sample = np.diff(slab.row_splits)
        seams = seams_between(
            rows_of_sample, span.file[rows], span.start[rows], span.size[rows], span.column[rows]
        )
        return as_asked(seams, self._config)

    def _dataset_ids(self, slab: PlannedSlab) -> Tensor:
        """Which dataset each sample is of, int64 [samples]: that of its first row, for all are of
        one.
        """
        first_rows = slab.row_splits[:-1]
        dataset_ids = self._allocate((len(first_rows),), torch.int64)
        dataset_ids.numpy()[:] = self._dataset_of_file[slab.span.file[first_rows]]
        return dataset_ids

    @property
    def _eod_id(self) -> int:
        """What stands for tokens that are not seen."""
        assert self._config.eod_id is not None
        return self._config.eod_id

    def _skipped_columns(self, slab: PlannedSlab) -> ExclusionMask | None:
        """Where the samples of a slab hold tokens that are not seen; None: nowhere."""
        if self._skipped is None:
            return None
        sample_ids = slab.span.sample_ids[slab.first : slab.last]
        return self._skipped.columns(self._runs(slab, shift=0), sample_ids)

    def _clear_by_modes(self, slab: PlannedSlab, out: NDArray[Any], *, shift: int) -> None:
        """Write 0 to `out` for tokens of a slab that are not learned, `shift` columns from where
        each lies in its sample.
        """
        clear_by_modes(self._reading.files, self._runs(slab, shift), out)

    def _runs(self, slab: PlannedSlab, shift: int) -> Runs:
        """Where the tokens of a slab's samples lie, each `shift` columns further on."""
        span = slab.span
        rows = slab.rows
        rows_of_sample = np.diff(slab.row_splits)
        return Runs(
            file=span.file[rows],
            start=span.start[rows],
            size=span.size[rows],
            sample=np.repeat(np.arange(len(rows_of_sample)), rows_of_sample),
            column=span.column[rows] + shift,
        )

    def _copy_rows(
        self,
        kernel: Callable[..., bool],
        slab: PlannedSlab,
        out: list[NDArray[Any]],
        valid: NDArray[np.int64],
    ) -> None:
        """The ids of a slab's samples into `out`, as `kernel` lays them, and how many each has into
        `valid`.

        A kernel is compiled for one stored dtype: each call passes over the rows of other files.
        """
        span = slab.span
        reading = self._reading
        for dtype, number in reading.dtype_numbers.items():
            fit = kernel(
                np.empty(0, dtype), number, reading.dtype_of_file, reading.planner.slots.addresses,
                span.slot, span.offset, span.size, span.file, span.column, slab.row_splits,
                *out, valid,
            )  # fmt: skip
            if not fit:
                raise AssertionError("rows of a sample exceed its width")
