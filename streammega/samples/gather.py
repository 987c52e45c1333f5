"""Samples from the bytes of files: ids by one kernel call for each token width, columns, and what fields
need besides. The loader gathers what it has fetched ahead; `read_samples` fetches by itself.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from streammega.config import StorageConfig
from streammega.kernels.addresses import address_of, check_rows
from streammega.kernels.fields import fill_tails
from streammega.kernels.plan import gather_rows
from streammega.samples.columns import GatheredRows
from streammega.samples.field_inputs import Batch, Samples, make_fields
from streammega.samples.host_fields import Allocate, HostFields, new_memory, torch_dtype
from streammega.samples.rows import (
    WHOLE,
    FileTable,
    KeptParts,
    Memory,
    PlacedRows,
    coalesce,
    rows_of,
)
from streammega.samples.source import SegmentSource

Integers = NDArray[np.int64]
TAIL_ID = 0
"""The id written after the end of a short sample. `valid` says that it is padding."""
ALIGNED = 16
"""Buffers of one read begin at multiples of it: kernels read aligned tokens."""


class Gatherer:
    """Gathers samples whose bytes are in memory.

    Args:
        source: the samples, of one segment.
        table: their files.
        kept: which tokens of every sample are gathered; each part becomes a row.
        kept_of_columns: the same for columns, which may be parts where ids are whole.
        allocate: makes the tensors.
    """

    def __init__(
        self,
        source: SegmentSource,
        table: FileTable,
        kept: KeptParts = WHOLE,
        kept_of_columns: KeptParts = WHOLE,
        allocate: Allocate = new_memory,
    ) -> None:
        self._config = source.config
        self._sample_width = source.config.sequence_length + 1
        self._table = table
        self._kept = kept
        self._kept_of_columns = kept_of_columns
        self._allocate = allocate
        self._excluded = source.excluded
        self._columns = source.columns

    def gather(self, rows: PlacedRows, first: int, last: int, memory: Memory) -> Samples:
        """Gather samples [first, last) of `rows`, where each kept part counts as one."""
        shape = last - first, self._kept.width(self._sample_width)
        ids = self._allocate(shape, torch_dtype(self._table.dtype))
        valid = self._allocate(shape[:1], torch.int64)
        if self._copy_rows(rows, first, last, memory, ids.numpy(), valid.numpy()):
            fill_tails(ids.numpy(), valid.numpy(), TAIL_ID)
        excluded = None
        if self._excluded is not None or self._columns:
            runs = rows.runs(first, last)
        if self._excluded is not None:
            excluded = self._excluded.mask(runs, rows.sample_ids[first:last])
        if excluded is not None:
            assert self._config.eod_id is not None
            excluded.overwrite(ids.numpy(), self._config.eod_id)
        columns: dict[str, Tensor] = {}
        for name, column in self._columns.items():
            values = self._allocate(shape, torch_dtype(column.dtype))
            values.fill_(column.fill)
            column.make(GatheredRows(self._table.files, runs, excluded), values.numpy())
            is_cut = self._kept_of_columns == self._kept
            columns[name] = values if is_cut else self._kept_of_columns.cut_rows(values)
        pieces = None
        if self._config.inter_document_masking:
            splits = rows.row_splits[first : last + 1]
            pieces = splits - splits[0], rows.size[splits[0] : splits[-1]]
        parts = self._kept.rows_of_sample
        dataset_id = self._allocate(((last - first) // parts,), torch.int64)
        dataset_id.numpy()[:] = rows.dataset[first // parts : last // parts]
        return Samples(ids, valid, columns, dataset_id, pieces)

    def _copy_rows(
        self,
        rows: PlacedRows,
        first: int,
        last: int,
        memory: Memory,
        ids: NDArray[Any],
        valid: Integers,
    ) -> bool:
        """Write ids to `ids`, and how many each sample has to `valid`. Returns whether some are short.

        The kernel is compiled for each stored dtype. A call copies the rows of files with its dtype
        and skips the others.
        """
        table = self._table
        splits = rows.row_splits[first : last + 1]
        check_rows(
            splits,
            (rows.slot, rows.offset, rows.size, rows.file, rows.start),
            (memory.room, memory.zero),
            (table.itemsize, table.num_tokens, table.mapped_at),
            table.chunk_bytes,
            f"samples {rows.sample_ids[first]:,} and later",
        )
        for dtype, number in table.dtype_numbers.items():
            fit = gather_rows(
                np.empty(0, dtype), number, table.dtype_of_file, memory.addresses,
                rows.slot, rows.offset, rows.size, rows.file, rows.sample_start,
                splits, ids, valid,
            )  # fmt: skip
            if not fit:
                raise AssertionError("rows of a sample exceed its width")
        return bool(valid.min(initial=ids.shape[1]) < ids.shape[1])


def read_samples(source: SegmentSource, sample_ids: Integers) -> Samples:
    """Read samples of one segment, int64 [n], by themselves: their reads are coalesced, and those of a
    file are concurrent. Raises ShortReadError for samples that a file does not hold, StorageError.
    """
    extents = source.locate(sample_ids)
    table = source.file_table
    file = table.checked_file_of_rows(extents)
    itemsize = table.itemsize[file]
    in_sample = rows_of(extents)
    start, stop = extents.start * itemsize, extents.stop * itemsize
    slot, offset = file, start.copy()
    contents: dict[int, NDArray[np.uint8]] = {}
    # the slot of a file is its number; that after all files has address 0
    zero = len(table.files)
    for number in set(file.tolist()):
        of_file = table.files[number]
        if table.local[number]:
            view = of_file.store.view(of_file.key, of_file.etag)
            of_file.check_bytes(len(view))
            contents[number] = np.frombuffer(view, np.uint8)
            continue
        here = np.flatnonzero((file == number) & (stop > start))
        if len(here):
            contents[number], offset[here] = _fetch(
                source.config.storage, table, number, start[here], stop[here]
            )
    addresses, room = np.zeros((2, zero + 1), np.int64)
    for number, content in contents.items():
        addresses[number] = address_of(content)
        room[number] = len(content)
    rows = PlacedRows(
        sample_ids=sample_ids,
        row_splits=extents.row_splits,
        slot=slot,
        offset=offset,
        size=in_sample.size,
        file=file,
        start=extents.start,
        sample_start=in_sample.sample_start,
        dataset=extents.dataset_of_sample,
    )
    return Gatherer(source, table).gather(rows, 0, len(sample_ids), Memory(addresses, room, zero))


def _fetch(
    storage: StorageConfig, table: FileTable, number: int, start: Integers, stop: Integers
) -> tuple[NDArray[np.uint8], Integers]:
    """Memory that holds bytes [start, stop) of a file that is not local, and where in it each begins."""
    file = table.files[number]
    requests = coalesce(
        np.zeros(len(start), np.int64),  # all of one file
        start,
        stop,
        np.argsort(start, kind="stable"),
        gap=storage.tuning.coalesce_gap_bytes,
        largest=storage.tuning.max_request_bytes,
    )
    spans = list(zip(requests.start.tolist(), requests.stop.tolist(), strict=True))
    room = -(-(requests.stop - requests.start) // ALIGNED) * ALIGNED
    begins = np.cumsum(room) - room
    content = np.empty(int(room.sum()), np.uint8)
    for begin, data in zip(
        begins.tolist(), file.store.read(file.key, spans, file.etag), strict=True
    ):
        content[begin : begin + len(data)] = np.frombuffer(data, np.uint8)
    return content, start + (begins - requests.start)[requests.of_row]


def read_fields(source: SegmentSource, sample_ids: Integers, *, bounds: bool = False) -> Batch:
    """The fields of samples of one segment, as a batch of a loader has them. Without `bounds` there is
    no "cu_seqlens", whose width differs from batch to batch, unless inter_document_masking asks for it.
    """
    config = source.config
    names = source.field_names
    if not (bounds or config.inter_document_masking):
        names = [name for name in names if name != "cu_seqlens"]
    samples = read_samples(source, sample_ids)
    inputs = HostFields(samples, config, names, extra_token=source.has_extra_token)
    (batch,) = make_fields(inputs, names)
    return batch
