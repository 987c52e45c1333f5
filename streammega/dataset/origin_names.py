"""Names by which documents are asked for that came from somewhere: an id, or a place."""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property

FILE = 0
LINE = 1
BYTE = 2
DOCUMENT = 3
"""What the place of a document is: none (all of the file), the number of a line or row, from 1; the
byte at which it begins, where nobody has counted lines; its number in an .idx, from 0.
"""
SIGNS = {LINE: ":", BYTE: "@", DOCUMENT: "#"}
"""What stands between a path and a place."""

MOST_DIGITS = 18
"""Of a number of a document or line: those of an int64."""


class OriginNames:
    """Many names, to be compared with the origins of many documents."""

    def __init__(self, words: Collection[str]) -> None:
        self.words = frozenset(words)

    @cached_property
    def places(self) -> dict[str, dict[int, dict[int, str]]]:
        """{path: {kind of place: {place: name}}} of those that may be places; of a file that is a
        document of its own the place is 0.
        """
        places: dict[str, dict[int, dict[int, str]]] = {}
        for word in self.words:
            places.setdefault(word, {})[FILE] = {0: word}
            for kind, sign in SIGNS.items():
                path, _, number = word.rpartition(sign)
                if is_number(number):
                    of_kind = places.setdefault(path, {}).setdefault(kind, {})
                    of_kind[int(number)] = word
        return places


def is_number(text: str) -> bool:
    """Whether a text is a whole number as it is written, of at most MOST_DIGITS digits."""
    is_written_so = text == "0" or not text.startswith("0")
    return text.isascii() and text.isdecimal() and is_written_so and len(text) <= MOST_DIGITS
