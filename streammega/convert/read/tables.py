"""Files of rows with named columns: Parquet and Arrow by pyarrow, CSV and TSV by the csv module."""

from __future__ import annotations

import bisect
import contextlib
import csv
import io
import itertools
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
VIEW_WORDS = 4
"""Words of 32 bits of Arrow's view of a text: its length, and its bytes or where they are."""
PYTHON_BYTES = 1 << 20
"""Bytes of rows that are made Python objects together; these take several times as much."""
BATCH_BYTES = 16 << 20
"""Bytes of decoded columns in memory, so that rows of a MiB are not read by the thousand."""
MAX_ROWS = 1024
"""Rows that are decoded together at most, however short."""
VALUE_BYTES = 8
"""Bytes of a decoded value, about: of a number, or of the place of a text."""
MAX_SHARED_BYTES = 64 << 20
"""Bytes that the texts of a row group may become without a look at the largest of them."""
PIECE_BYTES = 64 << 10
"""Bytes of a line of CSV at a time: expressions take many times as much while they replace."""
DELIMITERS = ";|\t,"
"""What may divide columns: that of the suffix is read, the others are named."""
RENAMED = {"\t": "call it .tsv", ",": "call it .csv"}
DICTIONARY_BYTES = 1 << 20
"""Bytes of one read of a dictionary: as many as it has at most, as writers make it."""


def read_parquet(source: Source) -> Iterator[RawDocument | Tokens]:
    """Rows of row groups [start, stop)."""
    import pyarrow.parquet as pq

    piece = source.piece
    with source.open_stored() as file:
        # Read and decoded by this thread alone: the workers of a conversion are its threads, and a
        # thread of pyarrow that still lets go of a Python object when the interpreter ends aborts
        # the process, or never ends.
        table = pq.ParquetFile(file, page_checksum_verification=True, pre_buffer=False)
        stop = table.num_row_groups if piece.stop < 0 else piece.stop
        groups = [table.metadata.row_group(number) for number in range(stop)]
        wanted = groups[piece.start :]
        num_rows = max(1, sum(group.num_rows for group in wanted))
        paths, ids = _wanted_paths(table.schema_arrow, source)
        # of structs, only the fields that are wanted; the text may be the id
        columns = [".".join(path) for path in dict.fromkeys([*paths, *ids])]
        stop_row = sum(group.num_rows for group in groups[: piece.start])
        for number, group in enumerate(wanted, piece.start):
            first_row = row = stop_row
            stop_row += group.num_rows
            try:
                rows_at_once = _rows_at_once(file, table.metadata, number, columns)
                batches = table.iter_batches(
                    rows_at_once, row_groups=[number], columns=columns, use_threads=False
                )
                for batch in batches:
                    read = (piece.stored_bytes or 0) * batch.num_rows // num_rows
                    source.skipped.note_read(read)
                    yield from _rows(batch, paths, source, row)
                    row += batch.num_rows
                if row != stop_row:  # pyarrow gives none where a column says another number
                    raise ConvertError(
                        f"{source.path}: of the rows {first_row + 1:,} to {stop_row:,}, in row group "
                        f"{number:,}, {row - first_row:,} can be read; copy the file again"
                    )
            except ConvertError as error:  # of values, not of the file
                source.fault("unreadable row", str(error), stop_row - row)
            except StreammegaError:
                raise
            except Exception as error:  # of pyarrow, of codecs
                where = f" from row {row + 1:,} to {stop_row:,}, in row group {number:,}"
                message = unreadable(source.path, error, where)
                source.fault("unreadable row", message, stop_row - row)


def _rows_at_once(file: Any, metadata: Any, number: int, names: Sequence[str]) -> int:
    """Rows of a row group whose columns of these names take BATCH_BYTES or so when they are decoded.

    The sizes that are stored do not count a text again that many rows share by a dictionary, or
    that repeats the one before.
    """
    _check_descriptions(file, metadata, number, names)
    group = metadata.row_group(number)
    num_bytes = 1
    rows = MAX_ROWS
    for place in range(group.num_columns):
        path = metadata.schema.column(place).path
        if not any(f"{path}.".startswith(f"{name}.") for name in names):
            continue
        column = group.column(place)
        stored = max(1, column.total_uncompressed_size)
        value_bytes = max(VALUE_BYTES, metadata.schema.column(place).length or 0)
        num_bytes += max(stored, column.num_values * value_bytes)
        if column.physical_type != "BYTE_ARRAY" or stored * column.num_values < MAX_SHARED_BYTES:
            continue
        largest = 0
        if "DELTA_BYTE_ARRAY" in column.encodings:
            largest = stored
        elif column.has_dictionary_page:
            largest = _largest_text(file, metadata, number, path) or stored
        if largest:
            texts = BATCH_BYTES // largest
            rows = min(rows, texts * group.num_rows // max(1, column.num_values))
    return max(1, min(rows, BATCH_BYTES * int(group.num_rows) // num_bytes))


def _check_descriptions(file: Any, metadata: Any, number: int, names: Sequence[str]) -> None:
    """Raise what pyarrow raises for damaged descriptions of columns in a row group, before it reads.

    It ends the process where Python asks for a description that is damaged.
    """
    import pyarrow.parquet as pq

    unread = _Unread(file.seek(0, os.SEEK_END))
    with contextlib.suppress(_IsRead):
        table = pq.ParquetFile(unread, metadata=metadata, buffer_size=1, pre_buffer=False)
        next(table.iter_batches(1, row_groups=[number], columns=names, use_threads=False), None)


class _IsRead(Exception):
    pass


class _Unread(io.RawIOBase):
    """A file of a size, which raises _IsRead when it is read."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._position = 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = offset + (0, self._position, self._size)[whence]
        return self._position

    def read(self, _size: int = -1) -> bytes:
        raise _IsRead


def _largest_text(file: Any, metadata: Any, number: int, path: str) -> int:
    """Bytes of the largest text in a column's dictionary, which pyarrow gives with the first row; 0:
    not known.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    options = {"read_dictionary": [path], "buffer_size": DICTIONARY_BYTES, "pre_buffer": False}
    try:
        table = pq.ParquetFile(file, metadata=metadata, **options)
        batch = next(table.iter_batches(1, row_groups=[number], columns=[path], use_threads=False))
        column = batch.column(0)
        while not pa.types.is_dictionary(column.type):
            column = column.field(0) if pa.types.is_struct(column.type) else column.values
        return int(_value_bytes(column.dictionary).max(initial=0))
    except Exception:  # of a type that has none; of damage, which the reader tells
        return 0


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
    """Rows of an opened IPC file or stream. note: called with the bytes of each record batch."""
    import pyarrow as pa

    # the workers of a conversion are its threads
    options = pa.ipc.IpcReadOptions(use_threads=False)
    try:
        reader = pa.ipc.open_file(file, options=options)
        batches = (reader.get_batch(number) for number in range(reader.num_record_batches))
    except pa.ArrowInvalid:
        file.seek(0)
        reader = pa.ipc.open_stream(file, options=options)
        batches = iter(reader)
    paths, ids = _wanted_paths(reader.schema, source)
    columns = list(dict.fromkeys(path[0] for path in [*paths, *ids]))
    row = 0
    for batch in batches:
        note(batch.get_total_buffer_size())
        wanted = batch.select(columns)
        # Arrow follows the offsets that are stored: wrong ones end the process, or show other memory.
        num_sound = batch.num_rows
        try:
            _check_offsets(wanted)
        except pa.ArrowInvalid as error:
            num_sound = _sound_rows(wanted)
            lost = f" from row {row + num_sound + 1:,} to {row + batch.num_rows:,}"
            message = unreadable(source.path, error, lost)
        if num_sound:
            yield from _rows(wanted.slice(0, num_sound), paths, source, row)
        if num_sound < batch.num_rows:
            source.fault("unreadable row", message, batch.num_rows - num_sound)
        row += batch.num_rows


def _check_offsets(batch: Any) -> None:
    """Raise pyarrow's ArrowInvalid for what it must not read. A text in another encoding may be read:
    it is refused with its row.
    """
    import pyarrow as pa

    try:
        batch.validate(full=True)
    except pa.ArrowInvalid:
        for column in batch.columns:
            kind = _with_bytes(column.type)
            (column if kind == column.type else column.view(kind)).validate(full=True)


def _with_bytes(kind: Any) -> Any:
    """A type with bytes in place of texts."""
    import pyarrow as pa

    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_with_bytes(field.type)) for field in kind])
    if pa.types.is_dictionary(kind):
        return pa.dictionary(kind.index_type, _with_bytes(kind.value_type), kind.ordered)
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_with_bytes(kind.value_type)))
    if pa.types.is_large_list(kind):
        return pa.large_list(kind.value_field.with_type(_with_bytes(kind.value_type)))
    types = {
        pa.string(): pa.binary(),
        pa.large_string(): pa.large_binary(),
        pa.string_view(): pa.binary_view(),
    }
    return types.get(kind, kind)


def _sound_rows(batch: Any) -> int:
    """How many rows of a damaged record batch come before the damage."""
    import pyarrow as pa

    def is_damaged(rows: int) -> bool:
        try:
            _check_offsets(batch.slice(0, rows))
        except pa.ArrowInvalid:
            return True
        return False

    return bisect.bisect_left(range(1, batch.num_rows + 1), True, key=is_damaged)


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
                        size=sum(map(_stored_bytes, row)),
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
            message = (
                f"{path}:{line}: broken CSV ({error}): is a quote missing? mend it, since what "
                f"comes after it cannot be read"
            )
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
        self._row_bytes = 0
        self._shortened_bytes = 0
        self._is_too_large = False

    def begin_row(self) -> int:
        """Count from zero; the number of the line with which the next row begins."""
        self._row_bytes = self._shortened_bytes = 0
        self._is_too_large = False
        return self._lines + 1

    def row_is_too_large(self) -> bool:
        """Whether the row that was begun last is, so far."""
        return self._is_too_large

    def __iter__(self) -> Iterator[str]:
        mark = BYTE_ORDER_MARK
        begun: list[bytes] = []
        for piece in itertools.chain(self._pieces, [b""]):
            self._row_bytes += len(piece)
            part = piece if self._row_bytes <= self._max_bytes else self._shortened(piece)
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
        if self._row_bytes - ending <= self._max_bytes:  # an ending is not part of the row
            return piece
        self._is_too_large = True
        short = _QUOTES.sub(rb"\1", _LETTERS.sub(rb"\1\2", piece))
        self._shortened_bytes += len(short)
        if self._shortened_bytes > self._max_bytes:
            raise csv.Error(f"a row of more than {self._row_bytes:,} bytes")
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


def _stored_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogateescape"))


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
    import pyarrow.compute as pc

    options = source.options
    if len(paths) == 1:
        name, *inner = paths[0]
        column = batch.column(batch.schema.get_field_index(name))
        if inner:
            column = pc.struct_field(column, inner)
        if _is_token_list(column.type):
            try:
                tokens = token_lists(column, batch.nbytes, source.path, first)
            except ConvertError as error:
                yield from _one_by_one(batch, paths, source, first, str(error))
                return
            yield (
                tokens.with_origins(source.path, LINE, first + 1) if options.provenance else tokens
            )
            return
    max_bytes = options.max_record_bytes
    batch_bytes = _batch_bytes(batch, max_bytes, source.path)
    mean_bytes = max(1, batch_bytes // max(1, batch.num_rows))
    has_large_rows = batch_bytes > max_bytes
    rows_at_once = 1 if has_large_rows else max(1, PYTHON_BYTES // mean_bytes)
    for begin in range(0, batch.num_rows, rows_at_once):
        rows = batch.slice(begin, rows_at_once)
        size = _batch_bytes(rows, max_bytes, source.path) if has_large_rows else mean_bytes
        try:
            # A row that is too large is left out by its size.
            records = rows.to_pylist() if size <= max_bytes else [{}]
        except Exception as error:  # of codecs, of times: each type has its own
            where = f"{source.path}:{first + begin + 1}"
            message = (
                f"{where}: has a value that Python cannot hold ({type(error).__name__}: {error}); "
                f"cast its column, or leave the row out"
            )
            if isinstance(error, UnicodeDecodeError):
                message = str(not_utf8(where, error))
            yield from _one_by_one(rows, paths, source, first + begin, message)
            continue
        for line, fields in enumerate(records, first + begin + 1):
            yield RawDocument(
                data=b"", path=source.path, line=line, is_record=True, fields=fields, size=size
            )


def _one_by_one(
    batch: Any, paths: list[Path], source: Source, first: int, message: str
) -> Iterator[RawDocument | Tokens]:
    """The rows of a record batch in which one cannot be read. message: the fault if it has one row."""
    if batch.num_rows == 1:
        source.fault("broken record", message)
        return
    for number in range(batch.num_rows):
        yield from _rows(batch.slice(number, 1), paths, source, first + number)


def _batch_bytes(batch: Any, limit: int, path: str) -> int:
    """Bytes that the rows of a record batch become, at least: in Arrow a few bytes may claim any number
    of them. A null in a list may take none, and values of dictionaries and views may be used by many
    rows. Counts no further than beyond `limit`. Raises ConvertError for types whose rows cannot be
    counted.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    size = 0
    columns = list(batch.columns)
    for column in columns:
        kind = column.type
        is_shared = pa.types.is_dictionary(kind) or _is_text_view(kind) or _is_list_view(kind)
        size += 0 if is_shared else column.nbytes
    while columns and size <= limit:
        column = columns.pop()
        kind = column.type
        if isinstance(column, pa.ExtensionArray):
            columns.append(column.storage)
        elif pa.types.is_struct(kind):
            columns += column.flatten()
        elif pa.types.is_map(kind):
            if len(column):
                first, stop = column.offsets[0].as_py(), column.offsets[-1].as_py()
                columns.append(column.items.slice(first, stop - first))
        elif pa.types.is_dictionary(kind) and not pa.types.is_nested(kind.value_type):
            used = column.indices.drop_null().to_numpy()
            size += column.indices.nbytes + int(_value_bytes(column.dictionary)[used].sum())
        elif _is_text_view(kind):
            size += int(_value_bytes(column).sum())
        elif isinstance(column, pa.lib.BaseListArray):
            count = pc.sum(pc.list_value_length(column)).as_py() or 0
            size += count
            if _is_list_view(kind) and count > len(column.values):
                raise ConvertError(f"{path}: has {kind}s that share values; cast them to lists")
            if size <= limit:
                flat = column.flatten()
                columns.append(flat)
                size += flat.nbytes if _is_list_view(kind) else 0
        elif (
            pa.types.is_dictionary(kind)
            or pa.types.is_union(kind)
            or pa.types.is_run_end_encoded(kind)
        ):
            raise ConvertError(f"{path}: has a column of type {kind}, which is not read; cast it")
    return size


def _is_text_view(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_string_view(kind) or pa.types.is_binary_view(kind))


def _is_list_view(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind))


def _value_bytes(values: Any) -> NDArray[np.int64]:
    """Bytes of each value of an array that is not nested, int64 [values]."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if _is_text_view(values.type):  # Arrow counts none of these; each begins with its length
        views = np.frombuffer(values.buffers()[1], "<i4").reshape(-1, VIEW_WORDS)
        lengths = views[values.offset : values.offset + len(values), 0].astype(np.int64)
        lengths *= np.asarray(values.is_valid())  # that of a null may be anything
        return lengths
    try:
        lengths = np.asarray(pc.binary_length(values).fill_null(0)).astype(np.int64)
    except pa.ArrowNotImplementedError:  # of numbers
        lengths = np.full(len(values), max(1, values.type.bit_width // 8), np.int64)
    return lengths


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
