"""JSON records too long to be held: their long texts go to a file of the work folder, a piece at a
time, and are read from there.

What is outside of strings, and short strings, is held and parsed as of any record, with a number in
the place of each long text.
"""

from __future__ import annotations

import codecs
import json
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import IO, Any

from streammega.convert.documents import LongRecord, LongString, RawDocument
from streammega.convert.options import ConvertOptions
from streammega.convert.read.json_values import REPEATS, match_all
from streammega.dataset.conversations import encodable, not_utf8
from streammega.errors import FormatError

LONG_RECORD = 16 << 20
"""Bytes from which on a record is not held: a worker takes some three times as much for one that
is. Tokens are the same.
"""
LONG_TEXT = 1 << 20
"""Bytes of JSON from which on a text of such a record is kept in a file."""
READ_BYTES = 1 << 20
_WITHIN = re.compile(rb'[^"\\]*(?:\\(?:u[^"\\]{4}|[^u])[^"\\]*){,%d}' % REPEATS, re.S)
"""Of a string, as far as escapes are whole."""
ESCAPE_BYTES = 6
"""Of \\uXXXX, the longest escape."""


class TextFile:
    """Long texts, end to end in a file. most: bytes that are kept of each, where only their
    beginnings are wanted.
    """

    def __init__(self, file: IO[bytes], most: int | None = None) -> None:
        self._file = file
        self._most = most

    def keep(self, pieces: Iterator[str]) -> LongString:
        """Write a text that comes in pieces. Raises what these raise."""
        start = self._file.seek(0, 2)
        size = 0
        for piece in pieces:
            if self._most is not None:
                piece = piece[: max(0, self._most - size)]
            size += self._file.write(piece.encode())
        return _KeptText(self._file, start, start + size)


class _KeptText(LongString):
    def __init__(self, file: IO[bytes], start: int, stop: int) -> None:
        self._file = file
        self._start = start
        self._stop = stop

    def pieces(self) -> Iterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8")()
        place = self._start
        while place < self._stop:
            self._file.seek(place)
            data = self._file.read(min(READ_BYTES, self._stop - place))
            place += len(data)
            yield decoder.decode(data)


def short(value: Any, most: int) -> Any:
    """Plain data with the beginnings of its long texts, of `most` characters, for what only shows
    it.
    """
    if isinstance(value, LongString):
        return value.beginning(most)
    if isinstance(value, dict):
        return {name: short(item, most) for name, item in value.items()}
    if isinstance(value, list):
        return [short(item, most) for item in value]
    return value


@contextmanager
def text_file(work: str) -> Iterator[TextFile]:
    """For long texts: in the work folder, or in this machine's own if that is a URL.

    It has no name: no kill leaves it.
    """
    folder = None if "://" in work else work
    with tempfile.TemporaryFile(dir=folder) as file:
        yield TextFile(file)


def may_be_long(options: ConvertOptions) -> bool:
    """Whether records may be read without being held: not where all of a text is looked at, or
    written by a template.
    """
    return not options.chat and options.split_sentences is None


def with_fields(record: LongRecord, texts: TextFile) -> RawDocument:
    """A record whose fields are known: its JSON is read.

    Raises FormatError, and what its pieces raise.
    """
    document = record.document
    if document.fields is not None:
        return document
    return replace(document, fields=read_record(record.pieces, texts, document.where))


def read_record(blocks: Iterator[bytes], texts: TextFile, where: str) -> Any:
    """A record whose bytes come in blocks, with LongStrings for its long texts.

    Raises FormatError, naming `where`, for what would be refused if the record were held; not all
    blocks are read then.
    """
    held: list[bytearray] = [bytearray()]  # what is around the long texts
    long: list[LongString] = []
    strings = _Strings(blocks, where)
    for outside in strings:
        held[-1] += outside
        if not strings.opens:
            continue
        start, ended = strings.take(LONG_TEXT)
        if ended:
            held[-1] += b'"%b"' % start
        else:
            long.append(texts.keep(_decoded(start, strings, where)))
            held.append(bytearray())
    return _parsed(held, long, where)


def _parsed(held: list[bytearray], long: list[LongString], where: str) -> Any:
    sign = _unused(held)

    def number(literal: str) -> Any:
        """A float, or the long string that a marked number stands for."""
        if not literal.startswith(sign):
            return float(literal)
        return long[int(literal.removeprefix(sign))]

    data = bytearray(held[0])
    for count, following in enumerate(held[1:]):
        if following.lstrip().startswith(b":"):  # it is a key, which has to be held
            data += json.dumps("".join(long[count].pieces())).encode()
        else:
            data += b" %b%d " % (sign.encode(), count)  # blanks: it is a value of its own
        data += following
    try:
        return json.loads(bytes(data), parse_float=number)
    except UnicodeDecodeError as error:
        raise not_utf8(where, error) from None
    except json.JSONDecodeError as error:  # whose place is one in what is held
        raise _broken(error.msg, where) from None
    except (ValueError, RecursionError) as error:
        raise _broken(str(error), where) from None


def _unused(held: list[bytearray]) -> str:
    """The beginning of a number that no number of a record has: numbers, unlike texts, are compared
    as they are spelt.
    """
    number = 0
    while any(b"0.%de" % number in part for part in held):
        number += 1
    return f"0.{number}e"


def _broken(what: str, where: str) -> FormatError:
    return FormatError(f"{where}: broken JSON ({what}); mend the record, or leave it out")


class _Strings:
    """JSON that comes in blocks: what is outside of strings by iteration, and each string that
    begins behind it by `take`.
    """

    def __init__(self, blocks: Iterator[bytes], where: str) -> None:
        self._blocks = blocks
        self._where = where
        self._data = b""
        self._place = 0
        self.opens = False
        """Whether a string begins where what was given last ends."""

    def __iter__(self) -> Iterator[bytes]:
        self.opens = False
        while self._place < len(self._data) or self._read():
            quote = self._data.find(b'"', self._place)
            self.opens = quote >= 0
            stop = quote if self.opens else len(self._data)
            found = self._data[self._place : stop]
            self._place = stop + self.opens
            yield found

    def take(self, most: int) -> tuple[bytes, bool]:
        """What a string holds, as it is spelt, and whether that is all of it: of more than `most`
        bytes it is the first ones.
        """
        found = bytearray()
        for piece, ended in self.pieces():
            found += piece
            if ended or len(found) > most:
                return bytes(found), ended
        raise _broken("Unterminated string", self._where)

    def pieces(self) -> Iterator[tuple[bytes, bool]]:
        """The rest of a string, cut between its escapes; with the last piece comes True.

        Raises FormatError without an end.
        """
        while True:
            stop = match_all(_WITHIN, self._data, self._place)
            if stop < len(self._data) and self._data[stop : stop + 1] == b'"':
                piece = self._data[self._place : stop]
                self._place = stop + 1
                yield piece, True
                return
            if len(self._data) - stop >= ESCAPE_BYTES:
                raise _broken("Invalid \\uXXXX escape", self._where)
            if stop > self._place:
                piece = self._data[self._place : stop]
                self._place = stop
                yield piece, False
            if not self._read():
                raise _broken("Unterminated string", self._where)

    def _read(self) -> bool:
        """Take in the next block, behind what is left of this one."""
        data = next(self._blocks, b"")
        self._data = self._data[self._place :] + data
        self._place = 0
        return bool(data)


def _decoded(start: bytes, strings: _Strings, where: str) -> Iterator[str]:
    """A string as text: its first bytes as they are spelt, and the rest of it."""
    decoder = codecs.getincrementaldecoder("utf-8")("surrogatepass")
    done = 0  # characters
    half = ""  # of a character that is spelt as two escapes
    last = False
    piece = start
    rest = strings.pieces()
    while True:
        text = _joined(half, _unescaped(decoder, piece, last, where))
        half = text[-1] if not last and "\ud800" <= text[-1:] <= "\udbff" else ""
        text = text[: len(text) - len(half)]
        yield encodable(text, where, done)
        done += len(text)
        if last:
            return
        piece, last = next(rest)


def _unescaped(decoder: codecs.IncrementalDecoder, piece: bytes, last: bool, where: str) -> str:
    try:
        return str(json.loads(f'"{decoder.decode(piece, last)}"'))
    except UnicodeDecodeError as error:
        raise not_utf8(where, error) from None
    except json.JSONDecodeError as error:
        raise _broken(error.msg, where) from None


def _joined(half: str, text: str) -> str:
    """A text behind half of a character, whose other half it may begin with."""
    if not half:
        return text
    first = (half + text[:1]).encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
    return first + text[1:]
