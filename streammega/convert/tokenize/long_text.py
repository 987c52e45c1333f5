"""Texts of many MiB to tokens, in windows that overlap: the tokenizers take about 110 bytes of memory for
each character, which would be too much for a whole text.

Two windows are joined within their overlap, at the first place after which both have the same tokens
for a while. Before it, the second window misses what stands before it; near its end, the first one
misses what follows. Where windows do not agree, as within a word that is longer than a window, the
first window is made wider until they do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from streammega.convert.tokenize.tokenizers import AT_ONCE, Tokenizer, TokenSpans
from streammega.errors import ConvertError

LONG = 1 << 20
"""Characters from which on a text is encoded in windows."""
WINDOW = 64 << 10
"""Characters of a window."""
OVERLAP = 4 << 10
"""Characters that a window shares with the one before it."""
AGREEMENT = 64
"""Tokens that two windows must have in common."""
MAX_WINDOW = 16 << 20
"""Characters of the widest window, which takes some 2 GiB of memory."""

Row = tuple[int, int, int]
"""A token: where it starts and stops, and its id."""


@dataclass(frozen=True, kw_only=True)
class _Window:
    """Characters [start, stop) of a text, and their tokens."""

    start: int
    stop: int
    tokens: TokenSpans

    def rows(self, first: int, stop: int, origin: int) -> list[Row]:
        """Tokens [first, stop), with places counted from `origin`."""
        part = slice(first, stop)
        starts = self.tokens.starts[part] - origin
        stops = self.tokens.stops[part] - origin
        return list(
            zip(starts.tolist(), stops.tolist(), self.tokens.ids[part].tolist(), strict=True)
        )


class _Windows:
    """Windows of a text, encoded several at a time."""

    def __init__(self, tokenizer: Tokenizer, text: str) -> None:
        self._tokenizer = tokenizer
        self._text = text
        self._ready: deque[_Window] = deque()

    def encode(self, bounds: list[tuple[int, int]]) -> list[_Window]:
        """Windows of these characters."""
        texts = [self._text[start:stop] for start, stop in bounds]
        encoded = self._tokenizer.encode_with_spans(texts)
        return [
            _Window(start=start, stop=stop, tokens=tokens)
            for (start, stop), tokens in zip(bounds, encoded, strict=True)
        ]

    def after(self, window: _Window) -> _Window:
        """The window that follows this one, and overlaps it."""
        if self._ready and self._ready[0].start != window.stop - OVERLAP:
            self._ready.clear()  # that window was made wider meanwhile
        if not self._ready:
            bounds: list[tuple[int, int]] = []
            stop = window.stop
            while stop < len(self._text) and len(bounds) < AT_ONCE:
                start = stop - OVERLAP
                stop = min(len(self._text), start + WINDOW)
                bounds.append((start, stop))
            self._ready.extend(self.encode(bounds))
        return self._ready.popleft()

    def wider(self, window: _Window) -> _Window | None:
        """A window of twice the size with the same start; None: it would be too wide."""
        size = 2 * (window.stop - window.start)
        if size > MAX_WINDOW:
            return None
        stop = min(len(self._text), window.start + size)
        return self.encode([(window.start, stop)])[0]

    def join(self, left: _Window, right: _Window) -> tuple[int, int] | None:
        """The first tokens of both windows after which they agree; None if there are none."""
        before = self._text[left.start : right.start]
        shift = len(before.encode()) if self._tokenizer.spans_in_bytes else len(before)
        overlap = self._text[right.start : left.stop]
        size = len(overlap.encode()) if self._tokenizer.spans_in_bytes else len(overlap)
        first = int(np.searchsorted(left.tokens.starts, shift))
        stop = int(np.searchsorted(right.tokens.starts, size))
        lefts = left.rows(first, len(left.tokens.ids), shift)
        rights = right.rows(0, stop, 0)
        found = _common(lefts, rights)
        return None if found is None else (first + found[0], found[1])


def encode_long(tokenizer: Tokenizer, text: str, where: str) -> Iterator[NDArray[np.int32]]:
    """Ids of a text, a window at a time: those that it would have as a whole.

    Raises ConvertError where windows do not agree.
    """
    before, after = tokenizer.added_ids()
    yield np.array(before, np.int32)
    windows = _Windows(tokenizer, text)
    (window,) = windows.encode([(0, min(len(text), WINDOW))])
    first = 0
    """The first token of the window that was not given yet."""
    while window.stop < len(text):
        following = windows.after(window)
        joined = windows.join(window, following)
        if joined is not None:
            yield window.tokens.ids[first : joined[0]]
            window = following
            first = joined[1]
            continue
        wider = windows.wider(window)
        found = 0 if first == 0 or wider is None else _find(window, first, wider)
        if wider is None or found is None:
            raise ConvertError(
                f"{where}: the text cannot be cut into windows between characters {window.start:,} "
                f"and {following.stop:,}, since their tokens do not agree where they overlap; cut "
                f"it into documents of less than {LONG:,} characters, or leave it out"
            )
        window = wider
        first = found
    yield window.tokens.ids[first:]
    yield np.array(after, np.int32)


def _find(window: _Window, first: int, wider: _Window) -> int | None:
    """Where a wider window with the same start has the tokens that begin at `first`."""
    wanted = window.rows(first, first + AGREEMENT, 0)
    stop = int(np.searchsorted(wider.tokens.starts, wanted[-1][0], "right"))
    found = _common(wanted, wider.rows(0, stop + AGREEMENT, 0))
    return None if found is None or found[0] else found[1]


def _common(lefts: list[Row], rights: list[Row]) -> tuple[int, int] | None:
    """The first places of two lists from which on both have the same rows."""
    place_of: dict[Row, int] = {}
    for place, row in enumerate(rights):
        place_of.setdefault(row, place)
    for left in range(len(lefts) - AGREEMENT + 1):
        right = place_of.get(lefts[left])
        if right is None or right + AGREEMENT > len(rights):
            continue
        if lefts[left : left + AGREEMENT] == rights[right : right + AGREEMENT]:
            return left, right
    return None
