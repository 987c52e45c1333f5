"""Samples from the bytes of files: ids by one kernel call for each token width, columns, and what fields
need besides. The loader gathers what it has fetched ahead; `read_samples` fetches by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from streammega.config import StorageConfig
from streammega.dataset.columns import stored_value
from streammega.kernels.addresses import address_of, copy_to
from streammega.kernels.fields import fill_tails
from streammega.kernels.plan import gather_rows
from streammega.order import Extents
from streammega.samples.columns import GatheredRows, TokenColumn
from streammega.samples.field_inputs import Batch, Samples, make_fields, makers
from streammega.samples.host_fields import Allocate, HostFields, new_memory, torch_dtype
from streammega.samples.rows import (
    WHOLE,
    FileTable,
    KeptParts,
    Memory,
    PlacedFiles,
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
        kept: which tokens of every sample are gathered; each part becomes a row.
        kept_of_columns: the same for columns, which may be parts where ids are whole.
        allocate: makes the tensors.
    """

    def __init__(
        self,
        source: SegmentSource,
        kept: KeptParts = WHOLE,
        kept_of_columns: KeptParts = WHOLE,
        allocate: Allocate = new_memory,
    ) -> None:
        self._config = source.config
        self._sample_width = source.config.sequence_length + 1
        self._kept = kept
        self._kept_of_columns = kept_of_columns
        self._allocate = allocate
        self._excluded = source.excluded
        self._columns = source.columns
        width = kept_of_columns.width(self._sample_width)
        self._filled = {
            name: tuple(_row_of(column, value, width) for value in (column.fill, column.missing))
            for name, column in self._columns.items()
            if column.make is None
        }

    def gather(
        self, ids: PlacedFiles, stored: Mapping[str, PlacedFiles], first: int, last: int
    ) -> Samples:
        """Gather samples [first, last). stored: the rows of each column that is stored."""
        rows, table = ids.rows, ids.table
        dataset = rows.dataset[first:last]
        begin, end = first * self._kept.rows_of_sample, last * self._kept.rows_of_sample
        shape = end - begin, self._kept.width(self._sample_width)
        out = self._allocate(shape, torch_dtype(table.dtype))
        valid = self._allocate(shape[:1], torch.int64)
        if _copy_ids(ids, begin, end, out.numpy(), valid.numpy()):
            fill_tails(out.numpy(), valid.numpy(), TAIL_ID)
        excluded = None
        if self._excluded is not None or self._columns:
            runs = rows.runs(begin, end)
        if self._excluded is not None:
            excluded = self._excluded.mask(runs, rows.sample_ids[begin:end])
        if excluded is not None:
            assert self._config.eod_id is not None
            excluded.overwrite(out.numpy(), self._config.eod_id)
        columns: dict[str, Tensor] = {}
        for name, column in self._columns.items():
            if column.make is None:
                columns[name] = self._stored(name, column, stored[name], first, last)
                continue
            values = self._allocate(shape, column.dtype)
            values.fill_(column.fill)
            column.make(GatheredRows(table.files, runs, excluded), values.numpy())
            is_cut = self._kept_of_columns == self._kept
            columns[name] = values if is_cut else self._kept_of_columns.cut_rows(values)
        pieces = None
        if self._config.inter_document_masking:
            splits = rows.row_splits[begin : end + 1]
            pieces = splits - splits[0], rows.size[splits[0] : splits[-1]]
        dataset_id = self._allocate(dataset.shape, torch.int64)
        dataset_id.numpy()[:] = dataset
        return Samples(out, valid, columns, dataset_id, pieces)

    def _stored(
        self, name: str, column: TokenColumn, placed: PlacedFiles, first: int, last: int
    ) -> Tensor:
        """The values of a stored column for samples [first, last)."""
        rows, memory, table = placed
        parts = self._kept_of_columns.rows_of_sample
        begin, end = first * parts, last * parts
        width = self._kept_of_columns.width(self._sample_width)
        placed.check(begin, end)
        splits = rows.row_splits[begin : end + 1]
        of_rows = slice(splits[0], splits[-1])
        runs = rows.runs(begin, end)
        if (runs.sample_start + runs.size > width).any() or (runs.sample_start < 0).any():
            raise AssertionError("rows of a sample exceed its width")
        tokens_before = np.zeros(len(runs.size) + 1, np.int64)
        np.cumsum(runs.size, out=tokens_before[1:])
        valid = np.diff(tokens_before[splits - splits[0]])
        fill, missing = self._filled[name]
        source = memory.addresses[rows.slot[of_rows]] + rows.offset[of_rows]
        if len(missing):
            source = np.where(table.itemsize[runs.file] == 0, address_of(missing), source)
        # what is copied, then what is not there: (row, its token, tokens, address)
        row = np.arange(end - begin)
        copies = [
            (runs.sample, runs.sample_start, runs.size, source),
            (row, valid, width - valid, np.full(len(row), address_of(fill))),
        ]
        if self._excluded is not None:
            excluded = self._excluded.mask(runs, rows.sample_ids[begin:end])
            if excluded is not None:
                row, low, high = excluded.ranges
                copies.append((row, low, high - low, np.full(len(row), address_of(fill))))
        row, at, tokens, source = (np.concatenate(parts) for parts in zip(*copies, strict=True))
        values = self._allocate((end - begin, width, *column.token_shape), column.dtype)
        size = column.token_bytes
        copy_to(source, tokens * size, values.view(torch.uint8).numpy(), (row * width + at) * size)
        return values


def _row_of(column: TokenColumn, value: Any, width: int) -> NDArray[np.uint8]:
    """The bytes of one value for each of `width` tokens; none where there is no value."""
    if value is None:
        return np.empty(0, np.uint8)
    one = stored_value(str(column.dtype).removeprefix("torch."), value)
    return np.tile(np.frombuffer(one, np.uint8), width * column.width)


def _copy_ids(
    placed: PlacedFiles, first: int, last: int, ids: NDArray[Any], valid: Integers
) -> bool:
    """Write ids to `ids`, and how many each sample has to `valid`. Returns whether some are short.

    The kernel is compiled for each stored dtype. A call copies the rows of files with its dtype
    and skips the others.
    """
    rows, memory, table = placed
    splits = rows.row_splits[first : last + 1]
    placed.check(first, last)
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
    storage = source.config.storage
    # memory is held until all is gathered
    ids, _ids_memory = _read(storage, source.file_table, extents, sample_ids)
    stored, _stored_memory = {}, []
    for name, table in source.column_tables.items():
        stored[name], memory = _read(storage, table, extents, sample_ids)
        _stored_memory.append(memory)
    return Gatherer(source).gather(ids, stored, 0, len(sample_ids))


def _read(
    storage: StorageConfig, table: FileTable, extents: Extents, sample_ids: Integers
) -> tuple[PlacedFiles, dict[int, NDArray[np.uint8]]]:
    """The rows of samples of some files, and the bytes that hold them, by the number of the file."""
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
            contents[number], offset[here] = _fetch(storage, table, number, start[here], stop[here])
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
    return PlacedFiles(rows, Memory(addresses, room, zero), table), contents


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
    (batch,) = make_fields(inputs, makers(names, source.column_fields))
    return batch
