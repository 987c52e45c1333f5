"""Files of rows with named columns: Parquet and Arrow by pyarrow, CSV and TSV by the csv module."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from streammega.config import StorageConfig
from streammega.convert.documents import RawDocument, Tokens, one_each
from streammega.convert.options import ConvertOptions
from streammega.convert.read.fields import listed, names_of, splits
from streammega.convert.read.json import BYTE_ORDER_MARK
from streammega.convert.read.open import (
    Item,
    LongLine,
    Skipped,
    Slice,
    fault,
    open_plain,
    open_stream,
    read_lines,
    too_large,
    unreadable,
)
from streammega.convert.read.provenance import id_fields, of_rows
from streammega.convert.read.suffixes import bare_name, suffix_of
from streammega.errors import ConvertError, StreammegaError
from streammega.errors.words import pluralize
from streammega.storage.open import is_remote

Path = tuple[str, ...]
"""Names of a column, and of the fields within its structs that lead to one."""
PYTHON_BYTES = 1 << 20
"""Of rows that are objects of Python at once: as such they take several times their bytes."""
BATCH_BYTES = 16 << 20
"""Of columns that are held together, decoded; so that rows of a MiB are not held by the thousand."""
MOST_ROWS = 1024
"""Of them, however short."""


def _rows_at_once(metadata: Any, groups: list[int]) -> int:
    """Rows of about BATCH_BYTES, by what the row groups say of themselves; at most MOST_ROWS."""
    size = 0
    rows = 0
    for group in groups:
        described = metadata.row_group(group)
        size += described.total_byte_size
        rows += described.num_rows
    fit = BATCH_BYTES * rows // max(1, size)
    return int(max(1, min(MOST_ROWS, fit)))


def read_parquet(
    piece: Slice, options: ConvertOptions, storage: StorageConfig, skipped: Skipped
) -> Iterator[Item]:
    """Rows of row groups [start, stop)."""
    import pyarrow.parquet as pq

    with open_plain(piece.input.url, storage, piece.input.etag) as file:
        table = pq.ParquetFile(file, page_checksum_verification=True)
        metadata = table.metadata
        stop = piece.stop
        if stop < 0:
            stop = table.num_row_groups
        groups = list(range(piece.start, stop))
        paths = _paths(table.schema_arrow, options, piece.input.path)
        ids = _id_paths(table.schema_arrow, options, piece.input.path)
        # once each: the text may be the id
        wanted = dict.fromkeys([*paths, *ids])
        columns = [
            ".".join(path) for path in wanted
        ]  # of structs, the fields that are wanted alone
        rows_at_once = _rows_at_once(metadata, groups)
        row = 0
        for group in range(piece.start):
            row += metadata.row_group(group).num_rows
        rows = sum(metadata.row_group(group).num_rows for group in groups)
        for group in groups:
            first = row
            row += metadata.row_group(group).num_rows
            try:
                for batch in table.iter_batches(rows_at_once, row_groups=[group], columns=columns):
                    skipped.note_read((piece.stored_bytes or 0) * batch.num_rows // max(1, rows))
                    yield from _rows(batch, paths, ids, options, piece.input.path, first)
                    first += batch.num_rows
            except Exception as error:  # of pyarrow, of codecs
                if isinstance(error, StreammegaError) and not isinstance(error, ConvertError):
                    raise
                where = f" from row {first + 1:,} to {row:,}, in row group {group:,}"
                secrets = dict(storage.storage_options) if is_remote(piece.input.path) else {}
                message = unreadable(piece.input.path, error, secrets, where)
                fault(options, skipped, "unreadable row", message, row - first)


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
        ids = _id_paths(reader.schema, options, piece.input.path)
        row = 0
        columns = list(dict.fromkeys(path[0] for path in [*paths, *ids]))
        for batch in batches:
            skipped.note_read(batch.nbytes)
            yield from _rows(batch.select(columns), paths, ids, options, piece.input.path, row)
            row += batch.num_rows


def _paths(schema: Any, options: ConvertOptions, path: str) -> list[Path]:
    """Where what is wanted lies. Raises ConvertError for a column that is not there."""
    there: list[Path] = []
    for names in _wanted_columns(options):
        places = [place for name in names if (place := _place(schema, name))]
        if not places:
            raise _no_column(path, names, (name for field in schema for name in _names(field)))
        there += places
    if options.chat_template is not None:
        tools = _place(schema, "tools")
        if tools:
            there.append(tools)
    return there


def read_csv(
    piece: Slice, options: ConvertOptions, storage: StorageConfig, skipped: Skipped
) -> Iterator[Item]:
    """Rows of a .csv or .tsv file behind the first one, which names the columns.

    A row is named by the line in which it begins. An empty cell is null.
    """
    path = piece.input.path
    is_tsv = suffix_of(bare_name(path)) == ".tsv"
    # the module's own limit is 128 KiB
    csv.field_size_limit(options.max_record_bytes)
    with open_stream(piece.input.url, storage, piece.input.etag, skipped.note_read) as file:
        rows = csv.reader(
            _decoded_lines(file, path, options), delimiter="\t" if is_tsv else ",", strict=True
        )
        header = _next_row(rows, path)
        if not header:
            raise ConvertError(f"{path}: has no first row, which names the columns; add one")
        _check_header(header, options, path)
        while True:
            line = rows.line_num + 1
            row = _next_row(rows, path)
            if row is None:
                return
            if len(row) == len(header):
                cells = map(_cell, row)
                size = sum(map(_stored_bytes, row))
                yield RawDocument(
                    data=b"",
                    path=path,
                    line=line,
                    record=True,
                    size=size,
                    fields=dict(zip(header, cells, strict=True)),
                )
            elif row:  # a blank line is no row
                message = (
                    f"{path}:{line}: has {pluralize(len(row), 'cell')}, where the header names "
                    f"{pluralize(len(header), 'column')}; mend the row, or leave it out"
                )
                fault(options, skipped, "broken record", message)


def _decoded_lines(file: Any, path: str, options: ConvertOptions) -> Iterator[str]:
    """The lines of a file; bytes that are no UTF-8 become what `_cell` knows again."""
    mark = BYTE_ORDER_MARK
    for number, line in enumerate(read_lines(b"", file, options.max_record_bytes), 1):
        if isinstance(line, LongLine):
            raise ConvertError(too_large(f"{path}:{number}", options))
        yield line.removeprefix(mark).decode("utf-8", "surrogateescape")
        mark = b""


def _next_row(rows: Any, path: str) -> list[str] | None:
    """None at the end. Raises ConvertError where quotes are broken."""
    line = rows.line_num + 1
    try:
        row: list[str] | None = next(rows, None)
    except csv.Error as error:
        raise ConvertError(
            f"{path}:{line}: broken CSV ({error}): is a quote missing? mend it, since what comes "
            f"behind cannot be read"
        ) from None
    return row


def _check_header(header: list[str], options: ConvertOptions, path: str) -> None:
    """Raise ConvertError unless the first row names all columns that are wanted, each once."""
    for name in header:
        if header.count(name) > 1:
            raise ConvertError(f"{path}: has two columns {name!r}; rename one of them")
    for names in _wanted_columns(options):
        if not set(names) & set(header):
            raise _no_column(path, names, header)
    if options.origins and options.id_field is not None and options.id_field not in header:
        raise _no_id_column(path, options)


def _stored_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogateescape"))


def _cell(text: str) -> str | bytes | None:
    """The text of a cell; its bytes where they are no UTF-8, which whoever reads it refuses."""
    if text.isascii():
        return text or None
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogateescape")
    return text


def _wanted_columns(options: ConvertOptions) -> list[list[str]]:
    """The columns that are wanted; of each list one is enough."""
    if options.chat:
        return [["messages", "conversations"]]
    # a name may have a comma itself
    return [[key] if "," not in key else [key, *names_of(key)] for key, _ in options.key_modes]


def _no_column(path: str, wanted: Sequence[str], names: Iterable[str]) -> ConvertError:
    shown = " or ".join(repr(name) for name in wanted if len(wanted) == 1 or "," not in name)
    return ConvertError(
        f"{path}: has no column {shown} (it has: {listed(names)}); name it with --key"
    )


def _id_paths(schema: Any, options: ConvertOptions, path: str) -> list[Path]:
    """Where the id lies that is kept of each row; none if it has none, or none is kept. Raises
    ConvertError where the one that was named is not there.
    """
    if not options.origins:
        return []
    for name in id_fields(options):
        place = _place(schema, name)
        if place:
            return [place]
    if options.id_field is not None:
        raise _no_id_column(path, options)
    return []


def _no_id_column(path: str, options: ConvertOptions) -> ConvertError:
    return ConvertError(
        f"{path}: has no column {options.id_field!r}, which --id-field names; leave it out where "
        "there are no ids"
    )


def _place(fields: Any, key: str) -> Path:
    """Of a key among fields, by name or within structs, as `value_at` looks for it; empty where it
    is not.
    """
    import pyarrow as pa

    type_of_name = {field.name: field.type for field in fields}
    if key in type_of_name:
        return (key,)
    for outer, inner in splits(key):
        outer_type = type_of_name.get(outer)
        if outer_type is None or not pa.types.is_struct(outer_type):
            continue
        place = _place(_fields(outer_type), inner)
        if place:
            return (outer, *place)
    return ()


def _fields(kind: Any) -> list[Any]:
    """Of a struct."""
    return [kind.field(number) for number in range(kind.num_fields)]


def _names(field: Any) -> list[str]:
    """Of a column, or of the fields within it."""
    import pyarrow as pa

    if not pa.types.is_struct(field.type):
        return [field.name]
    return [f"{field.name}.{inner.name}" for inner in _fields(field.type)]


def _rows(
    batch: Any, paths: list[Path], ids: list[Path], options: ConvertOptions, path: str, first: int
) -> Iterator[Item]:
    """Records of a record batch, with their ids; one column of integer lists is taken as tokens."""
    column = _column(batch, paths[0]) if len(paths) == 1 else None
    if column is not None and _is_token_list(column.type):
        tokens = _token_lists(column, batch.nbytes, path, first)
        yield of_rows(tokens, path, first + 1) if options.origins else tokens
        return
    mean_bytes = max(1, batch.nbytes // max(1, batch.num_rows))
    rows_at_once = max(1, PYTHON_BYTES // mean_bytes)
    has_large_rows = batch.nbytes > options.max_record_bytes
    if has_large_rows:
        rows_at_once = 1
    line = first
    for begin in range(0, batch.num_rows, rows_at_once):
        rows = batch.slice(begin, rows_at_once)
        size = rows.nbytes if has_large_rows else mean_bytes
        for fields in rows.to_pylist():
            line += 1
            yield RawDocument(data=b"", path=path, line=line, record=True, fields=fields, size=size)


def _column(batch: Any, place: Path) -> Any:
    """The values of a column, or of a field within its structs."""
    import pyarrow.compute as pc

    column = batch.column(batch.schema.get_field_index(place[0]))
    for name in place[1:]:
        column = pc.struct_field(column, [name])
    return column


def _token_lists(column: Any, size: int, path: str, first: int) -> Tokens:
    """The lists of ids of a column, each a document. Raises ConvertError for a null within one."""
    import pyarrow as pa

    if pa.types.is_fixed_size_list(column.type):
        column = column.cast(pa.list_(column.type.value_type))
    if column.null_count:
        column = column.fill_null([])
    lengths = np.diff(np.asarray(column.offsets))
    flat = column.flatten()
    if flat.null_count:
        raise ConvertError(
            f"{path}: a list of ids holds a null, from row {first + 1} on; leave such rows out"
        )
    return one_each(np.asarray(flat), lengths, size, path)


def _is_token_list(kind: Any) -> bool:
    import pyarrow as pa

    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if not is_list and not pa.types.is_fixed_size_list(kind):
        return False
    return bool(pa.types.is_integer(kind.value_type))
