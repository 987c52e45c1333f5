"""Texts of many MiB to tokens, with the ids of the whole.

A tokenizer that takes little memory for a text encodes it by one call. Others (of Hugging Face some
110 bytes for each character) encode it in windows that overlap. The characters that two windows
share are encoded by themselves, too. Their first tokens are those of the second window, which
begins where they do; their last tokens are those of the first window, which ends where they do.
Where both stretches meet, all three have the same tokens, and the windows are joined there. Where
they do not meet, as within a word that is longer than a window, all windows are made wider.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from streammega.convert.tokenize.tokenizers import Tokenizer, TokenSpans
from streammega.errors import ConvertError

LONG = 1 << 20
"""Characters from which on a text is encoded alone."""
WINDOW = 128 << 10
"""Characters of a window, at first."""
WINDOWS_AT_ONCE = 8
"""Windows that are encoded together."""
OVERLAPS = 32
"""A window shares one of so many parts of it with the one before it."""
AGREEMENT = 64
"""Tokens that two windows must have in common."""
MAX_WINDOW = 16 << 20
"""Characters of the widest window, which takes some 2 GiB of memory."""

Ids = NDArray[np.int32]
NO_PLACES = np.empty(0, np.int64)
NO_TOKENS = TokenSpans(np.empty(0, np.int32), NO_PLACES, NO_PLACES)
Encode: TypeAlias = Callable[[list[str]], list[TokenSpans]]


def encode_long(tokenizer: Tokenizer, text: str, where: str) -> Ids:
    """Ids of a text: those that it has as a whole.

    Raises ConvertError that names where it came from, also where windows do not agree.
    """

    def without_places(texts: list[str]) -> list[TokenSpans]:
        every_ids = tokenizer.encode(texts, bare=True)
        return [TokenSpans(np.asarray(ids, np.int32), NO_PLACES, NO_PLACES) for ids in every_ids]

    before, after = tokenizer.added_ids()
    ids = _encode(tokenizer, without_places, text, where).ids
    return np.concatenate([np.array(before, np.int32), ids, np.array(after, np.int32)])


def encode_long_with_spans(tokenizer: Tokenizer, text: str, where: str) -> TokenSpans:
    """Tokens of a text with their places: those that it has as a whole. Raises ConvertError."""
    return _encode(tokenizer, tokenizer.encode_with_spans, text, where)


def _encode(tokenizer: Tokenizer, encode: Encode, text: str, where: str) -> TokenSpans:
    try:
        if tokenizer.encodes_any_length:
            return encode([text])[0]
        return _encode_in_windows(encode, text)
    except ConvertError as error:
        raise ConvertError(f"{where}: {error}") from None


def _encode_in_windows(encode: Encode, text: str) -> TokenSpans:
    """By windows of one size, and of twice the size until they agree."""
    disagreement = ""
    size = WINDOW
    while size <= MAX_WINDOW:
        parts, place = _windows(encode, text, size)
        if place is None:
            ids, starts, stops = (np.concatenate(values) for values in zip(*parts, strict=True))
            return TokenSpans(ids, starts, stops)
        disagreement = disagreement or place
        size *= 2
    raise ConvertError(
        f"the text cannot be cut into windows between characters {disagreement}, since their tokens do "
        f"not agree where they overlap; cut it into documents of less than {LONG:,} characters, or "
        f"leave it out"
    )


def _windows(encode: Encode, text: str, size: int) -> tuple[list[TokenSpans], str | None]:
    """The tokens of a text, window by window; or between which characters two of them do not
    agree.
    """
    overlap = size // OVERLAPS
    starts = range(0, max(1, len(text) - overlap), size - overlap)
    parts: list[TokenSpans] = []
    window = NO_TOKENS
    first = 0
    """The first token of the window that is not among the parts."""
    for number in range(0, len(starts), WINDOWS_AT_ONCE):
        some = starts[number : number + WINDOWS_AT_ONCE]
        windows = encode([text[start : start + size] for start in some])
        overlaps = encode([text[start : start + overlap] for start in some])
        for start, following, shared in zip(some, windows, overlaps, strict=True):
            if start > 0:
                joined = _join(window.ids, shared.ids, following.ids)
                if joined is None or joined[0] < first:
                    return [], f"{start + overlap - size:,} and {start + size:,}"
                parts.append(window.part(first, joined[0]))
                first = joined[1]
            window = following.moved(start)
    return [*parts, window.part(first, len(window.ids))], None


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
