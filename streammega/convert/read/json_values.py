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
from typing import Any, AnyStr

from streammega.convert.documents import LongRecord, RawDocument
from streammega.convert.read.slices import Skipped
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
_BETWEEN = re.compile(r'[^"{}\[\],]*')
REPEATS = 1000
"""Of a group, by one match: each takes some hundred bytes until that ends.

`match_all` goes on behind them.
"""
_IN_STRING = re.compile(rf'[^"\\]*(?:\\.[^"\\]*){{,{REPEATS}}}', re.S)
_LOST = "; mend it: what comes after it cannot be read"


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
        return len(head) < HEAD_BYTES or not _cut(error, text)
    except RecursionError:
        return True
    return "\n" not in text[start:stop]


def read_values(
    head: bytes, file: Any, path: str, *, most: int | None = None, skipped: Skipped | None = None
) -> Iterator[RawDocument | LongRecord]:
    """The records of a file of which `head` was read already: those of its arrays, and those that
    stand by themselves.

    most: bytes from which on a record is not held. skipped: where members of arrays that are no
    JSON are noted and passed over, if their ends can be told.

    Raises ConvertError, naming the line, where it is no JSON or ends within a record or an array.
    """
    values = _Values(head.removeprefix(BYTE_ORDER_MARK), file, path, most)
    while sign := values.next_sign():
        try:
            item = values.step(sign)
        except ConvertError as error:
            if skipped is None or not values.within:
                raise
            skipped.add("broken record", values.pass_over(error))
            continue
        if item is not None:
            yield item
        if isinstance(item, LongRecord) and not values.finish(item):
            return
    if values.within:
        raise values.broken("it ends within an array; is it cut short?")


class _Values:
    """A text of JSON values, taken one after another from a file."""

    def __init__(self, head: bytes, file: Any, path: str, most: int | None) -> None:
        self._text = head.decode("latin-1")
        self._file = file
        self._path = path
        self._most = most
        self._at = 0
        self._counted = 0
        """Characters of the text whose lines are in `_line`."""
        self._line = 1
        self._ended = False
        self._found_end = False
        """Whether the last long record was read to its end."""
        self.within = False
        """Whether this place is in an array."""
        self._ready = True
        """Whether a record may come next, before which a comma has to be in an array."""

    def next_sign(self) -> str:
        """The next character that is no space; "" at the end."""
        while True:
            self._at = _end_of_space(self._text, self._at)
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._read_on():
                return ""

    def step(self, sign: str) -> RawDocument | LongRecord | None:
        """Go over the sign at this place, or take the value that begins with it."""
        if not self.within and sign == "[":
            self.within = True
        elif self.within and sign == "]":
            self.within = False
            self._ready = True
        elif self.within and sign == "," and not self._ready:
            self._ready = True
        elif not self._ready:
            raise self.broken("a comma or the end of the array is missing")
        else:
            found = self._take()
            self._ready = not self.within
            return found
        self._at += 1
        return None

    def _take(self) -> RawDocument | LongRecord:
        """The value that begins here."""
        end = self._end_of_value()
        # a number may go on behind a dot
        while end is None or (end > len(self._text) - LONGEST_WORD and not self._ended):
            if end is None and self._is_long():
                place = RawDocument(
                    data=b"", path=self._path, line=self._count_lines(), record=True
                )
                return LongRecord(document=place, pieces=self._rest_of_value())
            self._read_on()
            end = self._end_of_value()
        data = self._text[self._at : end].encode("latin-1")
        document = RawDocument(data=data, path=self._path, line=self._count_lines(), record=True)
        self._at = end
        return document

    def finish(self, record: LongRecord) -> bool:
        """Read a long record to its end; False if that could not be reached, as whoever read its
        pieces was told.
        """
        for _ in record.pieces:
            pass
        return self._found_end

    def _is_long(self) -> bool:
        """Whether the value that begins here is one of many bytes that ends by a
        sign of its own.
        """
        return (
            self._most is not None
            and len(self._text) - self._at > self._most
            and self._text[self._at] in '{["'
        )

    def _rest_of_value(self) -> Iterator[bytes]:
        """The bytes of the value that begins here, a block at a time.

        Raises ConvertError where it has no end.
        """
        self._found_end = False
        nesting = Nesting()
        while self._text:
            end = nesting.follow(self._text, self._at)
            for start in range(self._at, len(self._text) if end is None else end, READ_BYTES):
                yield self._text[
                    start : min(start + READ_BYTES, len(self._text) if end is None else end)
                ].encode("latin-1")
            if end is not None:
                self._at = end
                self._found_end = True
                return
            self._next_block()
        raise self.broken("it ends within a record; is it cut short?")

    def pass_over(self, error: ConvertError) -> str:
        """Go on where something broken in an array ends: at a comma, or the end of the array.
        Returns what to tell of it.

        Raises the error if there is no such place, as where a quote is missing, and text and
        records have changed places.
        """
        nesting = Nesting()
        while self._text:
            end = nesting.member_end(self._text, self._at)
            if end is not None:
                self._at = end
                self._ready = False
                reason = str(error).removesuffix(_LOST)
                return f"{reason}; passed over up to line {self._count_lines()}"
            self._next_block()
        raise error

    def _next_block(self) -> None:
        """Read on, without what was read so far."""
        self._at = len(self._text)
        self._count_lines()
        self._text = self._file.read(READ_BYTES).decode("latin-1")
        self._ended = not self._text
        self._at = 0
        self._counted = 0

    def _end_of_value(self) -> int | None:
        """Where the value that begins here ends; None if that is behind what was read."""
        try:
            return _LOOSE.raw_decode(self._text, self._at)[1]
        except json.JSONDecodeError as error:
            if not self._ended and _cut(error, self._text):
                return None
            if error.msg.startswith("Unterminated string") or error.pos >= len(self._text.rstrip()):
                raise self.broken("it ends within a record; is it cut short?") from None
            raise self.broken(error.msg, error.pos) from None
        except RecursionError as error:
            raise self.broken(str(error)) from None

    def broken(self, what: str, place: int | None = None) -> ConvertError:
        """An error that names this place, or another behind it."""
        line = self._count_lines() + self._text.count(
            "\n", self._at, self._at if place is None else place
        )
        return ConvertError(f"{self._path}:{line}: broken JSON ({what}){_LOST}")

    def _count_lines(self) -> int:
        self._line += self._text.count("\n", self._counted, self._at)
        self._counted = self._at
        return self._line

    def _read_on(self) -> bool:
        """Read more, as much as is held, so that a long record is looked through a few times only;
        False at the end.
        """
        if self._ended:
            return False
        self._count_lines()
        rest = self._text[self._at :]
        size = max(READ_BYTES, len(rest))
        # no more than tells that a record is a long one
        if self._most is not None and len(rest) <= self._most:
            size = min(size, self._most + 1 - len(rest))
        data = self._file.read(size)
        self._ended = not data
        self._text = rest + data.decode("latin-1")
        self._at = self._counted = 0
        return not self._ended


class Nesting:
    """Follows brackets through JSON that comes in blocks of text, each of which begins where the
    one before ended.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False
        """Whether the next character, of a string, is escaped."""

    def follow(self, text: str, place: int) -> int | None:
        """Where the value ends that the first block began with; None if it goes on
        behind this one.
        """
        for stop, sign in self._signs(text, place):
            if self._depth <= 0 and sign in '}]"':
                return stop
        return None

    def member_end(self, text: str, place: int) -> int | None:
        """Where, outside of all brackets but those of an array, a comma is or that array ends; None
        if that is further on.
        """
        for stop, sign in self._signs(text, place):
            if self._depth < 0 and sign == "]":
                return stop - 1
            self._depth = max(self._depth, 0)  # a } without its {
            if self._depth == 0 and sign == ",":
                return stop - 1
        return None

    def _signs(self, text: str, place: int) -> Iterator[tuple[int, str]]:
        """(place behind it, sign) of each bracket and comma outside of strings, and of each end of
        a string.
        """
        if self._escaped:
            place += 1
            self._escaped = False
        while place < len(text):
            place = (
                match_all(_IN_STRING, text, place)
                if self._in_string
                else _match_end(_BETWEEN, text, place)
            )
            if place >= len(text):
                return
            sign = text[place]
            place += 1
            if sign == "\\":  # the last character of this block
                self._escaped = True
                return
            if sign == '"':
                self._in_string = not self._in_string
            self._depth += (sign in "{[") - (sign in "}]")
            if not self._in_string:
                yield place, sign


def match_all(pattern: re.Pattern[AnyStr], text: AnyStr, place: int) -> int:
    """Where an expression ends that is matched again and again, from this place on."""
    while (found := pattern.match(text, place)) and found.end() > place:
        place = found.end()
    return place


def _match_end(pattern: re.Pattern[str], text: str, place: int) -> int:
    found = pattern.match(text, place)
    return found.end() if found else place


def _end_of_space(text: str, start: int) -> int:
    return _match_end(_SPACE, text, start)


def _cut(error: json.JSONDecodeError, text: str) -> bool:
    """Whether an error may be one because the text ends too early."""
    return error.msg.startswith("Unterminated string") or error.pos >= len(text) - LONGEST_WORD
