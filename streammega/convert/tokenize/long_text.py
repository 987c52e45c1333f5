"""Texts of many MiB to tokens, in windows that overlap: the tokenizers take about 110 bytes of memory for
each character, which would be too much for a whole text.

The characters that two windows share are encoded by themselves, too. Their first tokens are those
of the second window, which begins where they do; their last tokens are those of the first window,
which ends where they do. Where both stretches meet, all three have the same tokens, and the windows
are joined there. Where they do not meet, as within a word that is longer than a window, the first
window is made wider until they do.

SentencePiece's unigram models are the exception: they add up the scores of all tokens before a place
in float32, and so choose others of nearly the same score far into a text. Windows round less.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from streammega.convert.tokenize.tokenizers import Tokenizer, TokenSpans, end_to_end
from streammega.errors import ConvertError

LONG = 1 << 20
"""Characters from which on a text is encoded in windows."""
WINDOW = 128 << 10
"""Characters of a window."""
WINDOWS_AT_ONCE = 8
"""Windows that are encoded together."""
OVERLAP = 4 << 10
"""Characters that a window shares with the one before it."""
AGREEMENT = 64
"""Tokens that two windows must have in common."""
MAX_WINDOW = 16 << 20
"""Characters of the widest window, which takes some 2 GiB of memory."""

Ids = NDArray[np.int32]
NO_PLACES = np.empty(0, np.int64)


class _Window(NamedTuple):
    """Characters [start, stop) of a text, and their tokens with their places in the window."""

    start: int
    stop: int
    tokens: TokenSpans

    @property
    def ids(self) -> Ids:
        return self.tokens.ids

    def part(self, first: int, stop: int | None = None) -> TokenSpans:
        """Its tokens [first, stop). Places in characters are those in the text."""
        ids, starts, stops = self.tokens
        return TokenSpans(
            ids[first:stop], starts[first:stop] + self.start, stops[first:stop] + self.start
        )


class _Windows:
    """Windows of a text, encoded several at a time."""

    def __init__(self, encode: Callable[[list[str]], Iterable[TokenSpans]], text: str) -> None:
        self._encode = encode
        self._text = text
        self._ready: deque[tuple[_Window, Ids]] = deque()

    def encode(self, bounds: list[tuple[int, int]]) -> list[_Window]:
        """Windows of these characters."""
        encoded = self._encode([self._text[start:stop] for start, stop in bounds])
        return [
            _Window(start, stop, tokens)
            for (start, stop), tokens in zip(bounds, encoded, strict=True)
        ]

    def after(self, window: _Window) -> tuple[_Window, Ids]:
        """The window that follows this one, and the tokens of the characters that both have."""
        if self._ready and self._ready[0][0].start != window.stop - OVERLAP:
            self._ready.clear()  # that window was made wider meanwhile
        if not self._ready:
            bounds: list[tuple[int, int]] = []
            shared: list[tuple[int, int]] = []
            stop = window.stop
            while stop < len(self._text) and len(bounds) < WINDOWS_AT_ONCE:
                start = stop - OVERLAP
                shared.append((start, stop))
                stop = min(len(self._text), start + WINDOW)
                bounds.append((start, stop))
            overlaps = [overlap.ids for overlap in self.encode(shared)]
            self._ready.extend(zip(self.encode(bounds), overlaps, strict=True))
        return self._ready.popleft()

    def wider(self, window: _Window) -> _Window | None:
        """A window of twice the size with the same start; None: it would be too wide."""
        size = 2 * (window.stop - window.start)
        if size > MAX_WINDOW:
            return None
        stop = min(len(self._text), window.start + size)
        return self.encode([(window.start, stop)])[0]


def encode_long(tokenizer: Tokenizer, text: str, where: str) -> Iterator[Ids]:
    """Ids of a text, a window at a time: those that it would have as a whole.

    Raises ConvertError where windows do not agree.
    """

    def without_places(texts: list[str]) -> Iterator[TokenSpans]:
        for ids in tokenizer.encode(texts, bare=True):
            yield TokenSpans(np.asarray(ids, np.int32), NO_PLACES, NO_PLACES)

    before, after = tokenizer.added_ids()
    yield np.array(before, np.int32)
    for part in _parts(without_places, text, where):
        yield part.ids
    yield np.array(after, np.int32)


def encode_long_with_spans(tokenizer: Tokenizer, text: str, where: str) -> TokenSpans:
    """Tokens of a text with their places: those that `encode_with_spans` finds in it as a whole.

    Raises ConvertError where windows do not agree.
    """
    parts = list(_parts(tokenizer.encode_with_spans, text, where))
    ids, starts, stops = (np.concatenate(values) for values in zip(*parts, strict=True))
    if tokenizer.spans_in_bytes:  # these are those in the windows
        return end_to_end(ids, stops - starts)
    return TokenSpans(ids, starts, stops)


def _parts(
    encode: Callable[[list[str]], Iterable[TokenSpans]], text: str, where: str
) -> Iterator[TokenSpans]:
    """The tokens of a text, a window at a time."""
    windows = _Windows(encode, text)
    (window,) = windows.encode([(0, min(len(text), WINDOW))])
    first = 0
    """The first token of the window that was not given yet."""
    while window.stop < len(text):
        following, overlap = windows.after(window)
        joined = _join(window.ids, overlap, following.ids)
        if joined is not None and joined[0] >= first:
            yield window.part(first, joined[0])
            window = following
            first = joined[1]
            continue
        wider = windows.wider(window)
        # the wider window has to go on at token `first` as the narrower one does
        if wider is None or (first > 0 and _count_equal(window.ids, wider.ids) < first + AGREEMENT):
            raise ConvertError(
                f"{where}: the text cannot be cut into windows between characters {window.start:,} "
                f"and {following.stop:,}, since their tokens do not agree where they overlap; cut "
                f"it into documents of less than {LONG:,} characters, or leave it out"
            )
        window = wider
    yield window.part(first)


def _join(before: Ids, overlap: Ids, after: Ids) -> tuple[int, int] | None:
    """Where the first window ends, and the second one goes on: in the middle of the tokens that
    both have in their overlap, or before it, so that AGREEMENT of these follow. None if both have
    fewer.
    """
    first = len(overlap) - _count_equal(before[::-1], overlap[::-1])
    stop = _count_equal(after, overlap)
    if stop - first < AGREEMENT:
        return None
    place = min((first + stop) // 2, stop - AGREEMENT)
    return len(before) - len(overlap) + place, place


def _count_equal(first: Ids, second: Ids) -> int:
    """How many tokens both begin with."""
    size = min(len(first), len(second))
    others = np.flatnonzero(first[:size] != second[:size])
    return int(others[0]) if len(others) else size
