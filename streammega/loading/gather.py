"""Turns the fetched bytes of a group into micro-batches.

The gatherer copies ids in the stored dtype, by one kernel call for each token width. The assembler
makes the fields when a micro-batch is handed out.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from streammega.kernels.addresses import check_rows
from streammega.kernels.fields import fill_tails
from streammega.kernels.plan import gather_rows
from streammega.loading.micro_steps import MicroSteps
from streammega.loading.planner import GatherGroup, Integers
from streammega.loading.read_plan import ReadPlan
from streammega.samples.derived_fields import Allocate, Batch, Samples, make_fields, torch_dtype
from streammega.samples.excluded import ExclusionMask
from streammega.samples.packed import are_packed
from streammega.samples.source import field_names, masks_by_files
from streammega.samples.token_file import Runs, clear_by_modes

TAIL_ID = 0
"""The id written after the end of a short sample. `valid` says that it is padding."""
Batches = deque[tuple[int, Batch]]
"""The micro-batches to hand out next, as (consumed, batch)."""


@dataclass(frozen=True, kw_only=True)
class ReadyGroup:
    """Gathered micro-batches: their positions, their ids, and all that their fields are made from.

    ids: [samples, width] in the stored dtype. valid: int64 [samples], the number of ids of each sample.
    learned: bool [samples, width], whether an id has a loss; None: all have. dataset_id: of each sample.
    row_splits: sample i consists of rows [row_splits[i], row_splits[i + 1]). size: the tokens of each
    row.
    """

    consumed: list[int]
    ids: Tensor
    valid: Tensor
    learned: Tensor | None
    row_splits: Integers
    size: Integers
    dataset_id: Integers

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        learned_bytes = 0 if self.learned is None else self.learned.nbytes
        return self.ids.nbytes + self.valid.nbytes + learned_bytes


class Gatherer:
    """Gathers groups.

    Args:
        steps: the micro-steps of this rank.
        plan: the files, and the table with the addresses of fetched buffers.
        allocate: makes the tensors.
    """

    def __init__(self, steps: MicroSteps, plan: ReadPlan, allocate: Allocate) -> None:
        self._width = plan.planner.kept.width(steps.config.sequence_length + 1)
        self._config = steps.config
        self._plan = plan
        self._allocate = allocate
        self._has_learned = masks_by_files(steps.samples)
        self._excluded = steps.samples.excluded
        files_of_dataset = [len(files) for files in steps.samples.files]
        self._dataset_of_file = np.repeat(np.arange(len(files_of_dataset)), files_of_dataset)

    def gather(self, group: GatherGroup) -> ReadyGroup:
        """Gather a group. All of its bytes must be in memory."""
        samples = group.last - group.first
        ids = self._allocate((samples, self._width), torch_dtype(self._plan.dtype))
        valid = self._allocate((samples,), torch.int64)
        self._copy_rows(group, ids, valid)
        if (valid.numpy() < self._width).any():
            fill_tails(ids.numpy(), valid.numpy(), TAIL_ID)
        window = group.window
        rows = group.rows
        excluded = None
        if self._excluded is not None:
            sample_ids = window.sample_ids[group.first : group.last]
            excluded = self._excluded.columns(_runs_of(group), sample_ids)
        if excluded is not None:
            assert self._config.eod_id is not None
            excluded.overwrite(ids.numpy(), self._config.eod_id)
        return ReadyGroup(
            consumed=group.consumed,
            ids=ids,
            valid=valid,
            learned=self._learned(group, excluded) if self._has_learned else None,
            row_splits=group.row_splits - rows.start,
            size=window.size[rows],
            dataset_id=self._datasets_of(group),
        )

    def _datasets_of(self, group: GatherGroup) -> Integers:
        """The dataset of each sample: that of its first row, since all of its rows have the same one."""
        file_of_row = group.window.file
        if not len(file_of_row):
            return np.zeros(len(group.row_splits) - 1, np.int64)
        # a part of a short sample may have no row, and is then taken for one of the next dataset
        first_rows = np.minimum(group.row_splits[:-1], len(file_of_row) - 1)
        return self._dataset_of_file[file_of_row[first_rows]]

    def _learned(self, group: GatherGroup, excluded: ExclusionMask | None) -> Tensor:
        """Which ids of a group have a loss, bool [samples, width]."""
        learned = self._allocate((group.last - group.first, self._width), torch.bool)
        learned.numpy().fill(True)
        clear_by_modes(self._plan.files, _runs_of(group), learned.numpy())
        if excluded is not None:
            excluded.clear_learned(learned.numpy())
        return learned

    def _copy_rows(self, group: GatherGroup, ids: Tensor, valid: Tensor) -> None:
        """Write the ids of a group's samples to `ids`, and how many each has to `valid`.

        The kernel is compiled for each stored dtype. A call copies the rows of files with its dtype
        and skips the others.
        """
        window = group.window
        plan = self._plan
        table = plan.planner.table
        files = plan.table
        check_rows(
            group.row_splits,
            (window.slot, window.offset, window.size, window.file, window.start),
            (table.room, table.zero),
            (files.itemsize, files.num_tokens, files.mapped_at),
            files.chunk_bytes,
            f"samples {window.sample_ids[group.first]:,} and later",
        )
        for dtype, number in plan.dtype_numbers.items():
            fit = gather_rows(
                np.empty(0, dtype), number, plan.dtype_of_file, table.addresses,
                window.slot, window.offset, window.size, window.file, window.column,
                group.row_splits, ids.numpy(), valid.numpy(),
            )  # fmt: skip
            if not fit:
                raise AssertionError("rows of a sample exceed its width")


def _runs_of(group: GatherGroup) -> Runs:
    """The runs of tokens that a group's samples consist of."""
    window = group.window
    rows = group.rows
    rows_of_sample = np.diff(group.row_splits)
    return Runs(
        file=window.file[rows],
        start=window.start[rows],
        size=window.size[rows],
        sample=np.repeat(np.arange(len(rows_of_sample)), rows_of_sample),
        column=window.column[rows],
    )


class Assembler:
    """Makes the micro-batches of ready groups, a few at a time, when the caller takes them.

    Fields that were made earlier would only take memory. No two batches share memory, so the caller
    may write to them.

    Args:
        allocate: makes the tensors of the fields; None: batches are ids, see `Engine`.
    """

    def __init__(self, steps: MicroSteps, plan: ReadPlan, allocate: Allocate | None) -> None:
        self._steps = steps
        self._config = steps.config
        self._names = field_names(steps.samples)
        self._batch_rows = steps.micro_batch_size * plan.planner.kept.rows_of_sample
        self._is_packed = are_packed(plan.files)
        self._allocate = allocate

    def assemble(self, group: ReadyGroup, first: int, last: int) -> Batches:
        """Make micro-batches [first, last) of a group.

        Raises FormatError for an id outside of the vocabulary. Raises ConfigError if `fields` of the
        config leaves out a field that these samples need.
        """
        rows = self._batch_rows
        samples = slice(first * rows, last * rows)
        if self._allocate is None:
            fields = {"ids": group.ids[samples], "valid": group.valid[samples]}
            if group.learned is not None:
                fields["learned"] = group.learned[samples]
            if self._config.return_dataset_ids:
                # not those of the rows, for parts of short samples have none
                ids = self._steps.dataset_ids(np.array(group.consumed[first:last]))
                fields["dataset_id"] = torch.from_numpy(ids.reshape(-1))
            columns = {name: field.chunk(last - first) for name, field in fields.items()}
            batches = [
                dict(zip(columns, values, strict=True))
                for values in zip(*columns.values(), strict=True)
            ]
        else:
            batches = make_fields(
                self._samples(group, samples),
                self._config,
                self._names,
                self._allocate,
                batches=last - first,
                packed=self._is_packed,
            )
        return deque(zip(group.consumed[first:last], batches, strict=True))

    def _samples(self, group: ReadyGroup, chosen: slice) -> Samples:
        """The chosen samples of a group, as `make_fields` takes them."""
        pieces = None
        if self._config.inter_document_masking:
            splits = group.row_splits[chosen.start : chosen.stop + 1]
            pieces = splits - splits[0], group.size[splits[0] : splits[-1]]
        return Samples(
            ids=group.ids[chosen].numpy(),
            valid=group.valid[chosen].numpy(),
            learned=None if group.learned is None else group.learned[chosen].numpy(),
            pieces=pieces,
            dataset_id=group.dataset_id[chosen] if self._config.return_dataset_ids else None,
        )
