"""Parquet and Arrow files, by pyarrow."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from streammega.config import StorageConfig
from streammega.convert.documents import RawDocument, one_each
from streammega.convert.options import ConvertOptions
from streammega.convert.slices import Item, Skipped, Slice, open_plain
from streammega.errors import ConvertError

PYTHON_BYTES = 1 << 20
BATCH_BYTES = 16 << 20
"""Of columns that are held together, decoded; so that rows of a MiB are not held by the thousand."""


def _rows_at_once(metadata: Any, groups: list[int]) -> int:
    """Rows of about BATCH_BYTES, by what the row groups say of themselves; at most 1024."""
    size = sum(metadata.row_group(group).total_byte_size for group in groups)
    rows = sum(metadata.row_group(group).num_rows for group in groups)
    return int(max(1, min(1024, BATCH_BYTES * rows // max(1, size))))


def read_parquet(piece: Slice, options: ConvertOptions, storage: StorageConfig, skipped: Skipped) -> Iterator[Item]:
    """Rows of row groups [start, stop)."""
    import pyarrow.parquet as pq

    with open_plain(piece.input.path, storage) as file:
        table = pq.ParquetFile(file)
        groups = list(range(piece.start, table.num_row_groups if piece.stop < 0 else piece.stop))
        columns = _columns(table.schema_arrow.names, options, piece.input.path)
        row = sum(table.metadata.row_group(group).num_rows for group in range(piece.start))
        for batch in table.iter_batches(_rows_at_once(table.metadata, groups), row_groups=groups, columns=columns):
            yield from _rows(batch, piece.input.path, row)
            row += batch.num_rows


def read_arrow(piece: Slice, options: ConvertOptions, storage: StorageConfig, skipped: Skipped) -> Iterator[Item]:
    """Rows of an IPC file (.feather) or stream."""
    import pyarrow as pa

    with open_plain(piece.input.path, storage) as file:
        try:
            reader = pa.ipc.open_file(file)
            batches = (reader.get_batch(number) for number in range(reader.num_record_batches))
        except pa.ArrowInvalid:
            file.seek(0)
            reader = pa.ipc.open_stream(file)
            batches = iter(reader)
        columns, row = _columns(reader.schema.names, options, piece.input.path), 0
        for batch in batches:
            yield from _rows(batch.select(columns), piece.input.path, row)
            row += batch.num_rows


def _columns(names: list[str], options: ConvertOptions, path: str) -> list[str]:
    wanted = ["messages", "conversations"] if options.chat else [key for key, _ in options.key_modes]
    found = [name for name in wanted if name in names]
    if found and options.chat_template is not None and "tools" in names:
        found.append("tools")
    if not found or (not options.chat and len(found) < len(wanted)):
        raise ConvertError(f"{path}: has no column {' or '.join(wanted)} (it has: {', '.join(names)}); name it with --key")
    return found


def _rows(batch: Any, path: str, first: int) -> Iterator[Item]:
    """Records of a record batch; one column of integer lists is taken as tokens."""
    import pyarrow as pa

    if batch.num_columns == 1 and pa.types.is_nested(batch.schema.types[0]) and _is_token_list(batch.schema.types[0]):
        column = batch.column(0)
        if column.null_count:
            column = column.fill_null([])
        lengths = np.diff(np.asarray(column.offsets)).astype(np.int32)
        flat = column.flatten()
        if flat.null_count:
            raise ConvertError(f"{path}: a list of ids holds a null, from row {first + 1} on; leave such rows out")
        yield one_each(np.asarray(flat), lengths, batch.nbytes, path)
        return
    mean = max(1, batch.nbytes // max(1, batch.num_rows))
    at_once = max(1, PYTHON_BYTES // mean)  # as objects of Python, rows take several times their bytes
    for low in range(0, batch.num_rows, at_once):
        for number, fields in enumerate(batch.slice(low, at_once).to_pylist(), first + low + 1):
            yield RawDocument(data=b"", path=path, line=number, record=True, fields=fields, size=mean)


def _is_token_list(kind: Any) -> bool:
    import pyarrow as pa

    return bool((pa.types.is_list(kind) or pa.types.is_large_list(kind)) and pa.types.is_integer(kind.value_type))
