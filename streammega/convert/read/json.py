"""JSON files whose records are no lines: arrays of records, and records over several lines. At most
one record is held.

The parser is the one that reads JSON lines, Python's own. It looks for the end of each record in a
text in which a character is a byte, so that what follows (`RawDocument.data`) are the record's own
bytes: they are parsed, refused and passed over as lines are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from streammega.convert.documents import RawDocument
from streammega.convert.options import ConvertOptions
from streammega.convert.read.open import too_large
from streammega.errors import ConvertError

HEAD_BYTES = 64 << 10
"""Of a file, by which is told what it holds."""
READ_BYTES = 1 << 20
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
LONGEST_WORD = 12
"""Characters (of -Infinity, of an escape) that a cut may leave as something that is no JSON."""
_STRICT = json.JSONDecoder()
_LOOSE = json.JSONDecoder(strict=False)
"""Takes control characters within strings, by which it finds the end of records that are refused
later, one by one.
"""
_SPACE = re.compile(r"[ \t\n\r]*")


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
    """The records of a file of which `head` was read already: those of its arrays, and those that
    stand by themselves.

    Raises ConvertError, naming the line, where the file is not JSON, ends within a record or an
    array, or has a record that is too large.
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
                raise ConvertError(too_large(f"{self._path}:{self._count_lines()}", self._options))
            self._read_on()
            end = self._end_of_value()
        data = self._text[self._at : end].encode("latin-1")
        document = RawDocument(data=data, path=self._path, line=self._count_lines(), record=True)
        self._at = end
        return document

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
    found = _SPACE.match(text, start)
    return found.end() if found else start


def _may_be_cut(error: json.JSONDecodeError, text: str) -> bool:
    """Whether an error may be there because the text ends too early."""
    return error.msg.startswith("Unterminated string") or error.pos >= len(text) - LONGEST_WORD
