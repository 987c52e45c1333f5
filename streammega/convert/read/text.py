"""Text files: one text, JSON lines, and JSON arrays or records over several lines.

JSON lines are read in parts and a record at a time, all other JSON as a whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from streammega.config import StorageConfig
from streammega.convert.documents import RawDocument
from streammega.convert.read.compression import compression_of, compression_of_bytes, format_suffix
from streammega.convert.read.source import (
    READ_BYTES,
    Input,
    LongLine,
    Slice,
    Source,
    read_lines,
    skip_line,
    unreadable,
)
from streammega.dataset.conversations import not_utf8
from streammega.errors import ConvertError, StreammegaError
from streammega.storage.file_system import expect_end, open_file

JSON_LINES_SUFFIXES = (".jsonl", ".jsonlines", ".jl", ".ndjson")
"""Suffixes of files with a JSON record a line. Other JSON files are told apart by their content."""
JSON_SUFFIXES = (*JSON_LINES_SUFFIXES, ".json")
HEAD_BYTES = 64 << 10
"""Beginning of a JSON file, which shows whether it holds lines."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
OTHER_MARKS = {
    b"\xff\xfe\0\0": "UTF-32",
    b"\0\0\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}
"""Byte order marks of other encodings; that of UTF-32 begins like one of UTF-16."""
OPENINGS = (b"[", b"{", b"[{")
"""First lines of JSON that is not JSON lines."""
LONGEST_WORD = 12
"""Characters (of -Infinity, of an escape) that a cut may leave as broken JSON."""
_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"[ \t\n\r]*")


def why_no_text(head: bytes) -> str:
    """Why what begins so is no text in UTF-8, and what to do; "": that cannot be seen."""
    for mark, encoding in OTHER_MARKS.items():
        if head.startswith(mark):
            return f"is {encoding} by its byte order mark; write it as UTF-8: iconv -f {encoding} -t UTF-8"
    packed = compression_of_bytes(head)
    return f"is compressed, and its name does not say so; add {packed} to it" if packed else ""


def read_text(source: Source) -> Iterator[RawDocument]:
    """A file that is one text."""
    item = source.piece.input
    max_bytes = source.options.max_record_bytes
    if item.size > max_bytes and not compression_of(item.path):
        yield RawDocument(data=b"", path=item.path, size=item.size)
        return
    # one byte more than a text and a mark before it tells that the text is too large
    with source.open() as file:
        data = _read_up_to(file, len(BYTE_ORDER_MARK) + max_bytes + 1)
    yield RawDocument(data=data.removeprefix(BYTE_ORDER_MARK), path=item.path)


def _read_up_to(file: Any, size: int) -> bytes:
    """The next bytes of a file, as many if there are. Memory is taken for what is there."""
    parts: list[bytes] = []
    while size > 0 and (data := file.read(min(size, READ_BYTES))):
        parts.append(data)
        size -= len(data)
    return b"".join(parts)


def read_json(source: Source) -> Iterator[RawDocument]:
    """JSON records: a record a line, or the values of a whole file."""
    with source.open() as file:
        head = b""
        if source.piece.stop < 0 and format_suffix(source.path) not in JSON_LINES_SUFFIXES:
            head = file.read(HEAD_BYTES)
            if not holds_lines(head):
                max_bytes = source.options.max_record_bytes
                data = head + _read_up_to(file, max_bytes + 1 - len(head))
                yield from _records_of_values(data, source)
                return
        yield from _records_of_lines(file, head, source)


def _records_of_values(data: bytes, source: Source) -> Iterator[RawDocument]:
    """The records of arrays, and those outside of arrays; each is named by its number in the file.

    Raises ConvertError, naming the line, where the file is not JSON: none of it is read then.
    """
    path = source.path
    max_bytes = source.options.max_record_bytes
    if len(data) > max_bytes:
        message = (
            f"{path}: is read as a whole, since it is no JSON lines, and is larger than "
            f"max_record_bytes (--max-record-bytes), {max_bytes:,}; write it as lines, by "
            f"jq -c '.[]' for an array, or raise the limit if there is memory"
        )
        source.fault("too large", message)
        return
    records: list[Any] = []
    try:
        text = data.removeprefix(BYTE_ORDER_MARK).decode()
        place = _end_of_space(text, 0)
        while place < len(text):
            value, place = _DECODER.raw_decode(text, place)
            records += value if isinstance(value, list) else [value]
            place = _end_of_space(text, place)
    except UnicodeDecodeError as error:
        raise ConvertError(str(not_utf8(path, error))) from None
    except (ValueError, RecursionError) as error:  # of numbers with too many digits, of nesting
        where, reason = path, str(error)
        if isinstance(error, json.JSONDecodeError):
            where, reason = f"{path}:{error.lineno}", error.msg
        raise ConvertError(f"{where}: broken JSON ({reason}); mend the file") from None
    size = len(data) // max(1, len(records))
    for number, record in enumerate(records, 1):
        fields = {} if record is None else record
        yield RawDocument(
            data=b"", path=path, line=number, is_record=True, fields=fields, size=size
        )


def cut_lines(
    item: Input, slice_bytes: int, _max_slice_bytes: int, storage: StorageConfig
) -> Iterator[Slice]:
    """Slices of a large file whose lines are documents, so that several workers can read it.

    Slices of lines need no bound: they are cut at any byte. Where a file is cut decides the numbers
    of units, and so the order of shuffled documents (`shuffle_keys`): another cut gives other shards.
    A resumed conversion redoes units that are cut otherwise: their digest has start and stop.

    Raises StorageError and ConvertError if the beginning of the file cannot be read.
    """
    if item.size <= slice_bytes or compression_of(item.path) or not _has_lines(item, storage):
        yield Slice(input=item, stored_bytes=item.size)
        return
    for start in range(0, item.size, slice_bytes):
        stop = min(start + slice_bytes, item.size)
        yield Slice(input=item, start=start, stop=stop, stored_bytes=stop - start)


def _has_lines(item: Input, storage: StorageConfig) -> bool:
    if format_suffix(item.path) in JSON_LINES_SUFFIXES:
        return True
    try:
        with open_file(item.url, storage, etag=item.etag) as file:
            return holds_lines(file.read(HEAD_BYTES))
    except StreammegaError:
        raise
    except Exception as error:  # clients raise whatever they like
        raise ConvertError(unreadable(item.path, error)) from None


def _records_of_lines(file: Any, head: bytes, source: Source) -> Iterator[RawDocument]:
    """The records of the lines that begin within a slice. head: bytes that were read already."""
    piece = source.piece
    path = source.path
    position = piece.start
    if piece.stop >= 0:  # another worker reads what comes after it
        expect_end(file, piece.stop)
    if piece.start:
        # A line belongs to the slice in which it begins: the byte before the slice tells whether
        # one begins with it.
        file.seek(piece.start - 1)
        max_bytes = piece.stop - piece.start + 1 if piece.stop >= 0 else None
        skipped, rest = skip_line(file, max_bytes)
        if rest is None:
            return
        position += skipped - 1
        head = rest
    line = 0
    offset = -1
    for data in read_lines(head, file, source.options.max_record_bytes):
        if 0 <= piece.stop <= position:
            return
        # lines of a later slice are counted only for messages: see `with_line`
        if piece.start:
            offset = position
        else:
            line += 1
        if isinstance(data, LongLine):
            yield RawDocument(data=b"", path=path, line=line, offset=offset, size=data.size)
            position += data.size
            continue
        mark = b"" if position else BYTE_ORDER_MARK  # before a blank line, too
        if record := data.removeprefix(mark).strip():
            if line == 1 and record in OPENINGS and source.options.on_error == "stop":
                raise ConvertError(
                    f"{path}:1: is no record; an array, or records over several lines? call the "
                    f"file .json, whose content says what it is"
                )
            yield RawDocument(data=data, path=path, line=line, offset=offset, is_record=True)
        position += len(data)


def holds_lines(head: bytes) -> bool:
    """Whether a .json file that begins so (HEAD_BYTES, or all of it) has a record a line; else
    arrays, or records over lines.

    The first line that is not blank tells: a record of its own, or something broken, makes a file
    of lines.
    """
    text = head.removeprefix(BYTE_ORDER_MARK).decode("latin-1")
    start = _end_of_space(text, 0)
    if not text.startswith("{", start):
        return not text.startswith("[", start)
    if text.find("\n", start) < 0:
        return True
    try:
        # integers as text: `int` refuses those of very many digits
        _, stop = json.JSONDecoder(parse_int=str).raw_decode(text, start)
    except json.JSONDecodeError as error:
        return len(head) < HEAD_BYTES or not _may_be_cut(error, text)
    except RecursionError:
        return True
    return "\n" not in text[start:stop]


def _end_of_space(text: str, start: int) -> int:
    space = _SPACE.match(text, start)
    return space.end() if space else start


def _may_be_cut(error: json.JSONDecodeError, text: str) -> bool:
    """Whether an error may be there because the text ends too early."""
    return error.msg.startswith("Unterminated string") or error.pos >= len(text) - LONGEST_WORD
