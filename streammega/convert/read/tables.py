"""Files of rows with named columns: Parquet and Arrow by pyarrow, CSV and TSV by the csv module.

What pyarrow reads may end the process: it is one of a worker (`processes.py`), and says what it reads
before. pyarrow's own reader of CSV takes an open quote for the end of the file, without a word, and
reads no further than a row that is larger than its block.
"""

from __future__ import annotations

import csv
import io
import itertools
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from streammega.config import StorageConfig
from streammega.convert.documents import RawDocument, Tokens, one_per_document
from streammega.convert.options import ConvertOptions
from streammega.convert.read.compression import format_suffix
from streammega.convert.read.fields import hint_of_ids, id_fields, join_names, names_of, splits
from streammega.convert.read.source import (
    READ_BYTES,
    Input,
    Slice,
    Source,
    too_large,
    unreadable,
)
from streammega.convert.read.text import BYTE_ORDER_MARK, why_no_text
from streammega.dataset.conversations import not_utf8
from streammega.dataset.provenance import LINE
from streammega.errors import ConvertError, StreammegaError
from streammega.errors.words import pluralize
from streammega.storage.file_system import open_file

Path = tuple[str, ...]
"""Names of a column, and of the fields within its structs that lead to one."""
PYTHON_BYTES = 1 << 20
"""Bytes of rows that are made Python objects together; these take several times as much."""
BATCH_BYTES = 16 << 20
"""Bytes of columns that are decoded together, so that rows of a MiB are not read by the thousand."""
MAX_ROWS = 1024
"""Rows that are decoded together at most, however short."""
PIECE_BYTES = 64 << 10
"""Bytes of a line of CSV at a time: expressions take many times as much while they replace."""
DELIMITERS = ";|\t,"
"""What may divide columns: that of the suffix is read, the others are named."""
RENAMED = {"\t": "call it .tsv", ",": "call it .csv"}


def read_parquet(source: Source) -> Iterator[RawDocument | Tokens]:
    """Rows of row groups [start, stop)."""
    import pyarrow.parquet as pq

    piece = source.piece
    with source.open_stored() as file:
        # Read and decoded by this thread alone: each worker is a process, and in that of `describe` a
        # thread of pyarrow that lets go of a Python object when the interpreter ends aborts it.
        table = pq.ParquetFile(file, page_checksum_verification=True, pre_buffer=False)
        metadata = table.metadata
        stop = metadata.num_row_groups if piece.stop < 0 else piece.stop
        rows_of = [metadata.row_group(number).num_rows for number in range(stop)]
        num_rows = max(1, sum(rows_of[piece.start :]))
        paths, ids = _wanted_paths(table.schema_arrow, source)
        # of structs, only the fields that are wanted; the text may be the id
        columns = [".".join(path) for path in dict.fromkeys([*paths, *ids])]
        next_row = sum(rows_of[: piece.start])
        for number in range(piece.start, stop):
            first_row = row = next_row
            next_row += rows_of[number]
            if not source.begins(f"row group {number}", rows_of[number]):
                continue
            try:
                rows_at_once = _rows_at_once(metadata, number, columns)
                for batch in table.iter_batches(rows_at_once, [number], columns, use_threads=False):
                    read = (piece.stored_bytes or 0) * batch.num_rows // num_rows
                    source.skipped.note_read(read)
                    yield from _rows(batch, paths, source, row)
                    row += batch.num_rows
                if row != next_row:  # pyarrow gives none where a column says another number
                    raise EOFError(
                        f"{row - first_row:,} of {next_row - first_row:,} rows are there"
                    )
            except StreammegaError:
                raise
            except Exception as error:  # of pyarrow, of codecs
                where = f" from row {row + 1:,} to {next_row:,}, in row group {number:,}"
                message = unreadable(source.path, error, where)
                source.fault("unreadable row", message, next_row - row)


def _rows_at_once(metadata: Any, number: int, names: Sequence[str]) -> int:
    """Rows of a row group whose columns of these names take BATCH_BYTES or so when they are decoded."""
    group = metadata.row_group(number)
    size = 1
    for place in range(group.num_columns):
        path = metadata.schema.column(place).path
        if any(f"{path}.".startswith(f"{name}.") for name in names):
            size += group.column(place).total_uncompressed_size
    return max(1, min(MAX_ROWS, BATCH_BYTES * int(group.num_rows) // size))


def cut_row_groups(
    item: Input, slice_bytes: int, _max_slice_bytes: int, storage: StorageConfig
) -> Iterator[Slice]:
    """Slices of a large Parquet file: row groups of so many bytes together."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    whole_file = Slice(input=item, stored_bytes=item.size)
    if item.size <= slice_bytes:
        yield whole_file
        return
    with open_file(item.url, storage, etag=item.etag) as file:
        try:
            metadata = pq.ParquetFile(file).metadata
        except (pa.ArrowException, OSError):  # its reader says what is wrong
            yield whole_file
            return
        last_group = metadata.num_row_groups - 1
        sizes = [metadata.row_group(group).total_byte_size for group in range(last_group + 1)]
        first = 0
        size = 0
        for group, group_bytes in enumerate(sizes):
            size += group_bytes
            if size >= slice_bytes or group == last_group:
                stored = item.size * size // max(1, sum(sizes))
                yield Slice(input=item, start=first, stop=group + 1, stored_bytes=stored)
                first = group + 1
                size = 0


def read_arrow(source: Source) -> Iterator[RawDocument | Tokens]:
    """Rows of an IPC file (.feather) or stream."""
    with source.open_stored() as file:
        yield from arrow_rows(file, source, source.skipped.note_read)


def arrow_rows(
    file: Any, source: Source, note: Callable[[int], None]
) -> Iterator[RawDocument | Tokens]:
    """Rows of an opened IPC file or stream. note: called with the bytes of each record batch.

    Of a stream nothing can be read behind a record batch whose reading ends the process.
    """
    import pyarrow as pa

    options = pa.ipc.IpcReadOptions(use_threads=False)
    is_file = True
    try:
        reader = pa.ipc.open_file(file, options=options)
    except pa.ArrowInvalid:
        is_file = False
        file.seek(0)
        reader = pa.ipc.open_stream(file, options=options)
    paths, ids = _wanted_paths(reader.schema, source)
    columns = list(dict.fromkeys(path[0] for path in [*paths, *ids]))
    row = 0
    for number in range(reader.num_record_batches) if is_file else itertools.count():
        if not source.begins(f"record batch {number}{'' if is_file else ' and all behind it'}"):
            if is_file:
                continue
            return
        try:
            batch = reader.get_batch(number) if is_file else reader.read_next_batch()
        except StopIteration:
            return
        note(batch.get_total_buffer_size())
        if source.begins(f"rows of record batch {number}", batch.num_rows):
            yield from _rows(batch.select(columns), paths, source, row)
        row += batch.num_rows


def read_csv(source: Source) -> Iterator[RawDocument]:
    """Rows of a .csv or .tsv file after the first one, which names the columns.

    A row is named by the line in which it begins. An empty cell is null.
    """
    path = source.path
    options = source.options
    delimiter = "\t" if format_suffix(path) == ".tsv" else ","
    # The module's own limit is 128 KiB. `_RowLines` gives it no more of a row than this.
    csv.field_size_limit(min(2 * options.max_record_bytes, sys.maxsize))
    with source.open() as file:
        pieces = _pieces_of_lines(file)
        first = next(pieces, b"")
        if reason := why_no_text(first):
            raise ConvertError(f"{path}: {reason}")
        _check_delimiter(first, delimiter, source)
        lines = _RowLines(itertools.chain([first], pieces), options.max_record_bytes)
        rows = csv.reader(iter(lines), delimiter=delimiter, strict=True)
        line = 1
        try:
            header = next(rows, [])
            if lines.row_is_too_large():
                raise ConvertError(too_large(f"{path}:1", options))
            _check_header(header, options, path)
            line = lines.begin_row()
            for row in rows:
                if lines.row_is_too_large():
                    source.fault("too large", too_large(f"{path}:{line}", options))
                elif len(row) == len(header):
                    yield RawDocument(
                        data=b"",
                        path=path,
                        line=line,
                        is_record=True,
                        size=lines.row_bytes,
                        fields=dict(zip(header, map(_cell, row), strict=True)),
                    )
                elif row:  # a blank line is not a row
                    message = (
                        f"{path}:{line}: has {pluralize(len(row), 'cell')}, where the header names "
                        f"{pluralize(len(header), 'column')}; mend the row, or leave it out"
                    )
                    source.fault("broken record", message)
                line = lines.begin_row()
        except csv.Error as error:
            reason = "is a quote missing? mend it, since what comes after it cannot be read"
            if "new-line character" in str(error):
                reason = "do its lines end in CR alone? write them with LF: tr '\\r' '\\n'"
            message = f"{path}:{line}: broken CSV ({error}): {reason}"
            lost = 1 if options.on_error == "stop" else lines.count_from(line)
            source.fault("unreadable row", message, lost)


class _RowLines:
    """Lines for csv.reader, which takes as many as a row has. pieces: of the lines of a file.

    Of a row that is too large, the lines beyond the limit are shortened: runs of letters, and of
    quotes, which leave the reader in the same state, so that it finds the end of the row. Bytes
    that are not UTF-8 become surrogates, which `_cell` undoes.
    """

    def __init__(self, pieces: Iterator[bytes], max_bytes: int) -> None:
        self._pieces = pieces
        self._max_bytes = max_bytes
        self._lines = 0
        self.row_bytes = 0
        """Bytes of the row so far, with its ending."""
        self._shortened_bytes = 0
        self._is_too_large = False

    def begin_row(self) -> int:
        """Count from zero; the number of the line with which the next row begins."""
        self.row_bytes = self._shortened_bytes = 0
        self._is_too_large = False
        return self._lines + 1

    def row_is_too_large(self) -> bool:
        """Whether the row that was begun last is, so far."""
        return self._is_too_large

    def __iter__(self) -> Iterator[str]:
        mark = BYTE_ORDER_MARK
        begun: list[bytes] = []
        for piece in itertools.chain(self._pieces, [b""]):
            self.row_bytes += len(piece)
            part = piece if self.row_bytes <= self._max_bytes else self._shortened(piece)
            if piece and not piece.endswith(b"\n"):
                begun.append(part)
                continue
            line = b"".join([*begun, part]) if begun else part
            begun = []
            if line:
                self._lines += 1
                yield line.removeprefix(mark).decode("utf-8", "surrogateescape")
            mark = b""

    def _shortened(self, piece: bytes) -> bytes:
        """A piece of a row beyond the limit. Raises csv.Error where the row has no end in sight."""
        ending = len(piece) - len(piece.rstrip(b"\r\n"))
        if self.row_bytes - ending <= self._max_bytes:  # an ending is not part of the row
            return piece
        self._is_too_large = True
        short = _QUOTES.sub(rb"\1", _LETTERS.sub(rb"\1\2", piece))
        self._shortened_bytes += len(short)
        if self._shortened_bytes > self._max_bytes:
            raise csv.Error(f"a row of more than {self.row_bytes:,} bytes")
        return short

    def count_from(self, line: int) -> int:
        """The lines from that of a number to the end of the file, which is read."""
        last = b"\n"
        rest = 0
        for last in self._pieces:
            rest += last.endswith(b"\n")
        return self._lines - line + 1 + rest + (not last.endswith(b"\n"))


_LETTERS = re.compile(rb'([^"\r\n])[^"\r\n]*([^"\r\n])')
"""What is neither quote nor ending. The first and the last may be delimiters, which count."""
_QUOTES = re.compile(rb'(""?)(?:"")*(?!")')
"""As many quotes as are left of a run without pairs of them: one or two."""


def _pieces_of_lines(file: Any) -> Iterator[bytes]:
    """The lines of a file with their endings; long ones in several pieces."""
    while data := file.read(READ_BYTES):
        yield from iter(partial(io.BytesIO(data).readline, PIECE_BYTES), b"")


def _check_delimiter(first: bytes, delimiter: str, source: Source) -> None:
    """Raise ConvertError for a first line in which another sign divides the columns that are wanted."""
    line, _, _ = first.removeprefix(BYTE_ORDER_MARK).partition(b"\n")
    header = line.decode("utf-8", "replace")
    if delimiter in header:
        return
    for sign in DELIMITERS:
        names = {name.strip().strip('"') for name in header.split(sign)}
        if len(names) > 1 and all(names & set(keys) for keys in _wanted_columns(source.options)):
            commas_or_tabs = "tabs" if delimiter == "\t" else "commas"
            remedy = RENAMED.get(sign, f"write it with {commas_or_tabs}")
            raise ConvertError(f"{source.path}: its columns are divided by {sign!r}; {remedy}")


def _check_header(header: list[str], options: ConvertOptions, path: str) -> None:
    """Raise ConvertError unless the first row names all columns that are wanted, each once."""
    if not header:
        raise ConvertError(f"{path}: has no first row, which names the columns; add one")
    if len(set(header)) < len(header):
        name, _ = Counter(header).most_common(1)[0]
        raise _two_columns(path, name)
    for names in _wanted_columns(options):
        if not set(names) & set(header):
            raise _no_column(path, names, header, options)
    if options.provenance and options.id_field is not None and options.id_field not in header:
        raise _no_id_column(path, options)


def _cell(text: str) -> str | bytes | None:
    """The text of a cell; its bytes where they are no UTF-8, which are refused later."""
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


def _no_column(
    path: str, wanted: Sequence[str], names: Iterable[str], options: ConvertOptions, hint: str = ""
) -> ConvertError:
    shown = " or ".join(repr(name) for name in wanted if len(wanted) == 1 or "," not in name)
    remedy = "rename its column" if options.chat else f"name it with --text-key{hint}"
    return ConvertError(f"{path}: has no column {shown} (it has: {join_names(names)}); {remedy}")


def _wanted_paths(schema: Any, source: Source) -> tuple[list[Path], list[Path]]:
    """The columns of the document, and the column of its id if that is kept and there.

    Raises ConvertError for a column that was named and is missing.
    """
    options = source.options
    paths: list[Path] = []
    for names in _wanted_columns(options):
        paths_of_key = [path for name in names if (path := _find(schema, name))]
        if not paths_of_key:
            columns = dict(_all_columns(schema))
            hint = hint_of_ids([name for name, kind in columns.items() if _is_token_list(kind)])
            raise _no_column(source.path, names, columns, options, hint)
        paths += paths_of_key
    if options.chat_template is not None and (tools := _find(schema, "tools")):
        paths.append(tools)
    ids = []
    if options.provenance:
        ids = [path for name in id_fields(options) if (path := _find(schema, name))][:1]
        if options.id_field is not None and not ids:
            raise _no_id_column(source.path, options)
    for name, *_ in [*paths, *ids]:
        if len(schema.get_all_field_indices(name)) > 1:
            raise _two_columns(source.path, name)
    return paths, ids


def _two_columns(path: str, name: str) -> ConvertError:
    return ConvertError(f"{path}: has two columns {join_names([name])}; rename one of them")


def _no_id_column(path: str, options: ConvertOptions) -> ConvertError:
    return ConvertError(
        f"{path}: has no column {options.id_field!r}, which --id-field names; leave it out where "
        "there are no ids"
    )


def _find(fields: Iterable[Any], key: str) -> Path:
    """Where a key is among fields, by name or within structs, as `value_at` looks for it; empty
    where it is not.
    """
    import pyarrow as pa

    type_of_name = {field.name: field.type for field in fields}
    if key in type_of_name:
        return (key,)
    for outer, inner in splits(key):
        outer_type = type_of_name.get(outer)
        if outer_type is not None and pa.types.is_struct(outer_type):
            path = _find(outer_type, inner)
            if path:
                return (outer, *path)
    return ()


def _all_columns(schema: Any) -> Iterator[tuple[str, Any]]:
    """(name, type) of columns, and of the fields of structs."""
    import pyarrow as pa

    for field in schema:
        if pa.types.is_struct(field.type):
            yield from ((f"{field.name}.{inner.name}", inner.type) for inner in field.type)
        else:
            yield field.name, field.type


def _rows(
    batch: Any, paths: list[Path], source: Source, first: int
) -> Iterator[RawDocument | Tokens]:
    """Records of a record batch; one column of integer lists is taken as tokens.

    A bad value makes a fault of its row: the rows that were to be read with it are read one by one.
    """
    import pyarrow as pa

    mean_bytes = max(1, batch.nbytes // max(1, batch.num_rows))
    rows_at_once = max(1, min(MAX_ROWS, PYTHON_BYTES // mean_bytes))
    for start in range(0, batch.num_rows, rows_at_once):
        rows = batch.slice(start, rows_at_once)
        where = f"{source.path}:{first + start + 1}"
        try:
            yield from _documents(rows, paths, source, first + start)
        except Exception as error:  # of codecs, of times: each type has its own
            if rows.num_rows > 1:
                for number in range(rows.num_rows):
                    yield from _rows(rows.slice(number, 1), paths, source, first + start + number)
                continue
            message = (
                f"{where}: has a value that Python cannot hold ({type(error).__name__}: {error}); "
                f"cast its column, or leave the row out"
            )
            if isinstance(error, UnicodeDecodeError):
                message = str(not_utf8(where, error))
            elif isinstance(error, pa.ArrowInvalid):
                message = unreadable(where, error)
            elif isinstance(error, ConvertError):
                message = str(error)
            source.fault("broken record", message)


def _documents(
    rows: Any, paths: list[Path], source: Source, first: int
) -> list[RawDocument] | list[Tokens]:
    """The documents of some rows. Raises what is wrong with one of them."""
    import pyarrow as pa
    import pyarrow.compute as pc

    try:
        rows.validate(full=True)  # pyarrow follows wrong offsets to other memory
    except pa.ArrowInvalid as error:
        if rows.num_rows > 1 or "UTF8" not in str(error):
            raise
    options = source.options
    if len(paths) == 1:
        name, *inner = paths[0]
        column = rows.column(rows.schema.get_field_index(name))
        if inner:
            column = pc.struct_field(column, inner)
        if _is_token_list(column.type):
            tokens = token_lists(column, rows.nbytes, source.path, first)
            if options.provenance:
                tokens = tokens.with_origins(source.path, LINE, first + 1)
            return [tokens]
    names = rows.schema.names
    rows = pa.RecordBatch.from_arrays([_own_values(column) for column in rows.columns], names)
    size = rows.nbytes
    if size > options.max_record_bytes and rows.num_rows > 1:
        raise OverflowError("one of the rows may be too large")
    # A row that is too large is left out by its size.
    records: list[Any] = rows.to_pylist() if size <= options.max_record_bytes else [{}]
    return [
        RawDocument(
            data=b"",
            path=source.path,
            line=line,
            is_record=True,
            fields=fields,
            size=size // rows.num_rows,
        )
        for line, fields in enumerate(records, first + 1)
    ]


def _own_values(column: Any) -> Any:
    """A column whose rows share no bytes, so that these can be counted."""
    import pyarrow as pa

    if pa.types.is_dictionary(column.type):
        values = _own_values(column.dictionary)
        return pa.DictionaryArray.from_arrays(column.indices, values).dictionary_decode()
    if pa.types.is_string_view(column.type):
        return column.cast(pa.large_string(), safe=False)
    if pa.types.is_binary_view(column.type):
        return column.cast(pa.large_binary())
    return column


def token_lists(column: Any, size: int, path: str, first: int) -> Tokens:
    """The lists of ids of a column, each a document. Raises ConvertError for a null within one, and
    for what can be no id; it names the first row.
    """
    import pyarrow as pa

    if pa.types.is_fixed_size_list(column.type):
        column = column.cast(pa.list_(column.type.value_type))
    if column.null_count:
        column = column.fill_null([])
    lengths = np.diff(np.asarray(column.offsets))
    flat = column.flatten()
    where = f"{path}:{first + 1}"
    if flat.null_count:
        raise ConvertError(f"{where}: a list of ids holds a null; leave such rows out")
    return one_per_document(np.asarray(flat), lengths, size, where)


def _is_token_list(kind: Any) -> bool:
    import pyarrow as pa

    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if not is_list and not pa.types.is_fixed_size_list(kind):
        return False
    return bool(pa.types.is_integer(kind.value_type))
