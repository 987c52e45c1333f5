"""Text files: one text, a text a line, JSON lines, and JSON arrays or records over several lines.

JSON that is not lines is parsed by Python's own parser, as JSON lines are. It finds the end of each
record in a text whose characters are bytes, so `RawDocument.data` are the record's own bytes: they
are parsed, refused and skipped as lines are. At most one record is held.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from streammega.config import StorageConfig
from streammega.convert.documents import RawDocument
from streammega.convert.options import ConvertOptions
from streammega.convert.read.compression import compression_of, compression_of_bytes, format_suffix
from streammega.convert.read.source import (
    READ_BYTES,
    Input,
    LongLine,
    Slice,
    Source,
    read_lines,
    skip_line,
    too_large,
    unreadable,
)
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
_STRICT = json.JSONDecoder(parse_int=str)
"""Leaves integers as text: `int` refuses those of more than 4,300 digits by a plain ValueError."""
_LOOSE = json.JSONDecoder(strict=False, parse_int=str)
"""Takes control characters within strings too. It finds the end of records that are refused later,
one by one.
"""
_OPENING = '{["'
_OUTSIDE_OF_STRINGS = re.compile(r'[^"{}\[\]]*')
_REST_OF_STRING = re.compile(r'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)
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
    parts: list[bytes] = []
    # one byte more than a text and a mark before it tells that the text is too large
    unread_bytes = len(BYTE_ORDER_MARK) + max_bytes + 1
    with source.open() as file:
        while unread_bytes and (data := file.read(min(unread_bytes, READ_BYTES))):
            parts.append(data)
            unread_bytes -= len(data)
    yield RawDocument(data=b"".join(parts).removeprefix(BYTE_ORDER_MARK), path=item.path)


def read_json(source: Source) -> Iterator[RawDocument]:
    """JSON records: a record a line, or `read_values`."""
    with source.open() as file:
        head = b""
        if source.piece.stop < 0 and format_suffix(source.path) not in JSON_LINES_SUFFIXES:
            head = file.read(HEAD_BYTES)
            if not holds_lines(head):
                yield from read_values(head, file, source.path, source.options)
                return
        yield from _records_of_lines(file, head, source)


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
        _, stop = _STRICT.raw_decode(text, start)
    except json.JSONDecodeError as error:
        return len(head) < HEAD_BYTES or not _may_be_cut(error, text)
    except RecursionError:
        return True
    return "\n" not in text[start:stop]


def read_values(
    head: bytes, file: Any, path: str, options: ConvertOptions
) -> Iterator[RawDocument]:
    """The records of a file: those of its arrays, and those outside of arrays. head: its beginning,
    which was read already.

    One that is too large to be held is given by its size. Raises ConvertError, naming the line,
    where the file is not JSON, or ends within a record or an array.
    """
    text = _Text(head.removeprefix(BYTE_ORDER_MARK), file, path, options)
    in_array = False
    needs_comma = False
    while sign := text.next_sign():
        if in_array and sign == "]":
            in_array = needs_comma = False
        elif needs_comma and sign == ",":
            needs_comma = False
        elif needs_comma:
            raise text.broken("a comma or the end of the array is missing")
        elif sign == "[" and not in_array:
            in_array = True
        else:
            yield text.take_value()
            needs_comma = in_array
            continue
        text.skip_sign()
    if in_array:
        raise text.broken("it ends within an array; is it cut short?")


class _Text:
    """The part of a file that is in memory, and a position in it. A character is a byte."""

    def __init__(self, head: bytes, file: Any, path: str, options: ConvertOptions) -> None:
        self._text = head.decode("latin-1")
        self._file = file
        self._path = path
        self._options = options
        self._at = 0
        self._counted = 0
        """Characters of the text whose lines are in `_line`."""
        self._line = 1
        self._ended = False

    def next_sign(self) -> str:
        """The next character that is not white space; "" at the end."""
        while True:
            self._at = _end_of_space(self._text, self._at)
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._read_on():
                return ""

    def skip_sign(self) -> None:
        """Go on after the character at this position."""
        self._at += 1

    def take_value(self) -> RawDocument:
        """The value that begins at this position."""
        end = self._end_of_value()
        # a number may go on after a dot
        while end is None or (end > len(self._text) - LONGEST_WORD and not self._ended):
            size = (len(self._text) if end is None else end) - self._at
            if size > self._options.max_record_bytes:
                return self._skip_value()
            self._read_on()
            end = self._end_of_value()
        data = self._text[self._at : end].encode("latin-1")
        document = RawDocument(data=data, path=self._path, line=self._count_lines(), is_record=True)
        self._at = end
        return document

    def _skip_value(self) -> RawDocument:
        """The value that begins at this position, by its size alone: it is too large to be held."""
        line = self._count_lines()
        if self._text[self._at] not in _OPENING:  # a number
            raise ConvertError(too_large(f"{self._path}:{line}", self._options))
        size = depth = 0
        in_string = False
        while not size or depth or in_string:
            sought = _REST_OF_STRING if in_string else _OUTSIDE_OF_STRINGS
            letters = sought.match(self._text, self._at)
            assert letters is not None
            # the sign behind it, unless more has to be read first: as behind half of an escape
            sign = self._text[letters.end() : letters.end() + 1].replace("\\", "")
            size += letters.end() + len(sign) - self._at
            self._at = letters.end() + len(sign)
            if sign == '"':
                in_string = not in_string
            elif sign:
                depth += 1 if sign in _OPENING else -1
            elif not self._read_on():
                raise self.broken("it ends within a record; is it cut short?")
        return RawDocument(data=b"", path=self._path, line=line, size=size)

    def broken(self, reason: str, position: int | None = None) -> ConvertError:
        """An error that names this position, or a later one."""
        line = self._count_lines() + self._text.count("\n", self._at, position or self._at)
        return ConvertError(
            f"{self._path}:{line}: broken JSON ({reason}); mend it: what comes after it cannot be read"
        )

    def _end_of_value(self) -> int | None:
        """Where the value ends that begins here; None if more has to be read first."""
        try:
            return _LOOSE.raw_decode(self._text, self._at)[1]
        except json.JSONDecodeError as error:
            if not self._ended and _may_be_cut(error, self._text):
                return None
            if error.msg.startswith("Unterminated string") or error.pos >= len(self._text.rstrip()):
                raise self.broken("it ends within a record; is it cut short?") from None
            raise self.broken(error.msg, error.pos) from None
        except RecursionError as error:
            raise self.broken(str(error)) from None

    def _count_lines(self) -> int:
        self._line += self._text.count("\n", self._counted, self._at)
        self._counted = self._at
        return self._line

    def _read_on(self) -> bool:
        """Read as much again as is held, so that a record is parsed a few times only; False at the
        end.
        """
        if self._ended:
            return False
        self._count_lines()
        rest = self._text[self._at :]
        data = self._file.read(max(READ_BYTES, len(rest)))
        self._ended = not data
        self._text = rest + data.decode("latin-1")
        self._at = self._counted = 0
        return not self._ended


def _end_of_space(text: str, start: int) -> int:
    space = _SPACE.match(text, start)
    return space.end() if space else start


def _may_be_cut(error: json.JSONDecodeError, text: str) -> bool:
    """Whether an error may be there because the text ends too early."""
    return error.msg.startswith("Unterminated string") or error.pos >= len(text) - LONGEST_WORD
