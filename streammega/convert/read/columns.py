"""Parquet and Arrow files, by pyarrow."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from streammega.config import StorageConfig
from streammega.convert.documents import LongRecord, LongString, RawDocument, one_each
from streammega.convert.options import ConvertOptions
from streammega.convert.read.keys import splits
from streammega.convert.read.long_records import LONG_RECORD, may_be_long
from streammega.convert.read.slices import Item, Skipped, Slice, open_plain
from streammega.convert.tokenize.long_texts import decoded
from streammega.dataset.conversations import not_utf8
from streammega.errors import ConvertError

Path = tuple[str, ...]
"""Names of a column, and of the fields within its structs that lead to one."""
PYTHON_BYTES = 1 << 20
BATCH_BYTES = 16 << 20
"""Of columns that are held together, decoded; so that rows of a MiB are not held by
the thousand.
"""


def _rows_at_once(metadata: Any, groups: list[int]) -> int:
    """Rows of about BATCH_BYTES, by what the row groups say of themselves; at most 1024."""
    size = sum(metadata.row_group(group).total_byte_size for group in groups)
    rows = sum(metadata.row_group(group).num_rows for group in groups)
    return int(max(1, min(1024, BATCH_BYTES * rows // max(1, size))))


def read_parquet(
    piece: Slice, options: ConvertOptions, storage: StorageConfig, skipped: Skipped
) -> Iterator[Item]:
    """Rows of row groups [start, stop)."""
    import pyarrow.parquet as pq

    with open_plain(piece.input.url, storage, piece.input.etag) as file:
        table = pq.ParquetFile(file)
        groups = list(range(piece.start, table.num_row_groups if piece.stop < 0 else piece.stop))
        paths = _paths(table.schema_arrow, options, piece.input.path)
        columns = [".".join(path) for path in paths]  # of structs, the fields that are wanted alone
        row = sum(table.metadata.row_group(group).num_rows for group in range(piece.start))
        for batch in table.iter_batches(
            _rows_at_once(table.metadata, groups), row_groups=groups, columns=columns
        ):
            yield from _rows(batch, paths, options, piece.input.path, row)
            row += batch.num_rows


def read_arrow(
    piece: Slice, options: ConvertOptions, storage: StorageConfig, skipped: Skipped
) -> Iterator[Item]:
    """Rows of an IPC file (.feather) or stream."""
    import pyarrow as pa

    with open_plain(piece.input.url, storage, piece.input.etag) as file:
        try:
            reader = pa.ipc.open_file(file)
            batches = (reader.get_batch(number) for number in range(reader.num_record_batches))
        except pa.ArrowInvalid:
            file.seek(0)
            reader = pa.ipc.open_stream(file)
            batches = iter(reader)
        paths = _paths(reader.schema, options, piece.input.path)
        row = 0
        columns = list(dict.fromkeys(path[0] for path in paths))
        for batch in batches:
            yield from _rows(batch.select(columns), paths, options, piece.input.path, row)
            row += batch.num_rows


def _paths(schema: Any, options: ConvertOptions, path: str) -> list[Path]:
    """Where what is wanted lies. Raises ConvertError for a column that is not there."""
    wanted = (
        ["messages", "conversations"] if options.chat else [key for key, _ in options.key_modes]
    )
    found = [place for key in wanted if (place := _place(schema, key))]
    if found and options.chat_template is not None and (tools := _place(schema, "tools")):
        found.append(tools)
    if not found or (not options.chat and len(found) < len(wanted)):
        names = ", ".join(name for field in schema for name in _names(field))
        raise ConvertError(
            f"{path}: has no column {' or '.join(wanted)} (it has: {names}); name it with --key"
        )
    return found


def _place(fields: Any, key: str) -> Path:
    """Of a key among fields, by name or within structs, as `value_at` looks for it; empty where it
    is not.
    """
    import pyarrow as pa

    kinds = {field.name: field.type for field in fields}
    if key in kinds:
        return (key,)
    for outer, inner in splits(key):
        kind = kinds.get(outer)
        if (
            kind is not None
            and pa.types.is_struct(kind)
            and (place := _place(_fields(kind), inner))
        ):
            return (outer, *place)
    return ()


def _fields(kind: Any) -> list[Any]:
    """Of a struct."""
    return [kind.field(number) for number in range(kind.num_fields)]


def _names(field: Any) -> list[str]:
    """Of a column, or of the fields within it."""
    import pyarrow as pa

    return (
        [f"{field.name}.{inner.name}" for inner in _fields(field.type)]
        if pa.types.is_struct(field.type)
        else [field.name]
    )


def _rows(
    batch: Any, paths: list[Path], options: ConvertOptions, path: str, first: int
) -> Iterator[Item]:
    """Records of a record batch; one column of integer lists is taken as tokens."""
    column = _column(batch, paths[0]) if len(paths) == 1 else None
    if column is not None and _is_token_list(column.type):
        yield _token_lists(column, batch.nbytes, path, first)
        return
    long = _long_rows(batch, paths) if batch.nbytes > LONG_RECORD and may_be_long(options) else []
    low = 0
    for row in [*long, batch.num_rows]:
        yield from _short_rows(batch.slice(low, row - low), path, first + low)
        if row < batch.num_rows:
            yield _long_row(
                batch,
                row,
                paths,
                RawDocument(data=b"", path=path, line=first + row + 1, record=True),
            )
        low = row + 1


def _short_rows(batch: Any, path: str, first: int) -> Iterator[Item]:
    mean = max(1, batch.nbytes // max(1, batch.num_rows))
    # as objects of Python, rows take several times their bytes
    at_once = max(1, PYTHON_BYTES // mean)
    for low in range(0, batch.num_rows, at_once):
        for number, fields in enumerate(batch.slice(low, at_once).to_pylist(), first + low + 1):
            yield RawDocument(
                data=b"", path=path, line=number, record=True, fields=fields, size=mean
            )


def _long_rows(batch: Any, paths: list[Path]) -> list[int]:
    """Rows with a text that is not to be copied."""
    import pyarrow.compute as pc

    found: set[int] = set()
    for place in paths:
        column = _column(batch, place)
        if _is_text(column.type):
            sizes = pc.fill_null(pc.binary_length(column), 0).to_numpy(zero_copy_only=False)
            found.update(np.flatnonzero(sizes > LONG_RECORD).tolist())
    return sorted(found)


def _long_row(batch: Any, row: int, paths: list[Path], place: RawDocument) -> LongRecord:
    """A record whose long texts are read from where pyarrow holds them."""
    fields: dict[str, Any] = {}
    size = 0
    for path in paths:
        column = _column(batch, path).slice(row, 1)
        value = (
            _ColumnText(_bytes_of(column), place.where)
            if _is_text(column.type) and not column.null_count
            else column[0].as_py()
        )
        size += len(value.data) if isinstance(value, _ColumnText) else 0
        within = fields
        for name in path[:-1]:
            within = within.setdefault(name, {})
        within[path[-1]] = value
    return LongRecord(document=replace(place, fields=fields, size=size))


def _bytes_of(column: Any) -> Any:
    """Of a column of one text, its bytes where they are: a scalar of pyarrow's would be a copy."""
    import pyarrow as pa

    _, offsets, data = column.buffers()
    wide = pa.types.is_large_string(column.type) or pa.types.is_large_binary(column.type)
    bounds = np.frombuffer(offsets, np.int64 if wide else np.int32)[
        column.offset : column.offset + 2
    ].tolist()
    return b"" if data is None else data.slice(bounds[0], bounds[1] - bounds[0])


class _ColumnText(LongString):
    """A text in a buffer of pyarrow's."""

    def __init__(self, data: Any, where: str) -> None:
        self.data = memoryview(data)
        self._where = where

    def __bool__(self) -> bool:
        return len(self.data) > 0

    def pieces(self) -> Iterator[str]:
        bytes_of = (
            bytes(self.data[start : start + PYTHON_BYTES])
            for start in range(0, len(self.data), PYTHON_BYTES)
        )
        return decoded(bytes_of, self._where, not_utf8)


def _is_text(kind: Any) -> bool:
    import pyarrow as pa

    return any(
        is_one(kind)
        for is_one in (
            pa.types.is_string,
            pa.types.is_large_string,
            pa.types.is_binary,
            pa.types.is_large_binary,
        )
    )


def _column(batch: Any, place: Path) -> Any:
    """The values of a column, or of a field within its structs."""
    import pyarrow.compute as pc

    column = batch.column(batch.schema.get_field_index(place[0]))
    for name in place[1:]:
        column = pc.struct_field(column, [name])
    return column


def _token_lists(column: Any, size: int, path: str, first: int) -> Item:
    """The lists of ids of a column, each a document. Raises ConvertError for a null within one."""
    import pyarrow as pa

    if pa.types.is_fixed_size_list(column.type):
        column = column.cast(pa.list_(column.type.value_type))
    if column.null_count:
        column = column.fill_null([])
    lengths = np.diff(np.asarray(column.offsets)).astype(np.int32)
    flat = column.flatten()
    if flat.null_count:
        raise ConvertError(
            f"{path}: a list of ids holds a null, from row {first + 1} on; leave such rows out"
        )
    return one_each(np.asarray(flat), lengths, size, path)


def _is_token_list(kind: Any) -> bool:
    import pyarrow as pa

    lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(is_one(kind) for is_one in lists) and bool(pa.types.is_integer(kind.value_type))
