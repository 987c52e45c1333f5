"""Texts of any length to tokens, a piece at a time: memory is that of a piece, and the ids are
those of the whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streammega.convert.tokenize.safe_cuts import Cuts, cuts_of
from streammega.convert.tokenize.tokenizers import AT_ONCE, HuggingFaceTokenizer, TextTokenizer
from streammega.errors import ConvertError

LONG = 1 << 20
"""Characters from which on a text is encoded in pieces: the library holds about 110 bytes for
each.
"""
PIECE = 64 << 10
"""Characters of a piece, about."""
MOST_UNCUT = 16 << 20
"""Characters without a place to cut that are encoded as one, some 2 GiB of memory: more are
refused.
"""


class LongTextEncoder:
    """Encodes long texts by a tokenizer."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer

    @cached_property
    def _cuts(self) -> Cuts | None:
        return cuts_of(self._tokenizer)

    @cached_property
    def _around(self) -> tuple[list[int], list[int]]:
        """What a post-processor adds before and behind a text."""
        if isinstance(self._tokenizer, HuggingFaceTokenizer):
            return self._tokenizer.added_around()
        return [], []

    def encode(self, text: str, where: str) -> Iterator[NDArray[np.int32]]:
        """Ids of a text, piece by piece. Raises ConvertError where it cannot be cut."""
        before, behind = self._around
        if before:
            yield np.array(before, np.int32)
        pieces = (text[start : start + LONG] for start in range(0, len(text), LONG))
        yield from self._encode(pieces, where)
        if behind:
            yield np.array(behind, np.int32)

    def _encode(self, pieces: Iterator[str], where: str) -> Iterator[NDArray[np.int32]]:
        held = ""
        """What is not encoded yet."""
        done = 0
        """Characters before it."""
        for piece in pieces:
            held += piece
            if len(held) < LONG:
                continue
            bounds = self._bounds(held)
            if len(bounds) > 1:
                yield from self._ids(held, bounds, first=done == 0)
                done += bounds[-1]
                held = held[bounds[-1] :]
            if len(held) > MOST_UNCUT:
                raise self._cannot_cut(held, done, where)
        bounds = self._bounds(held)
        if bounds[-1] < len(held):
            bounds.append(len(held))
        yield from self._ids(held, bounds, first=done == 0)

    def _bounds(self, text: str) -> list[int]:
        """Where a text is cut: 0, and places about PIECE apart."""
        bounds = [0]
        cuts = self._cuts
        if cuts is None:
            return bounds
        last = 0
        while len(text) - last > PIECE:
            # further and further, doubled each time: what was looked at is looked at once more only
            reach = PIECE
            place = cuts.find(text, last, last + reach)
            while place is None and last + reach < len(text):
                reach *= 2
                place = cuts.find(text, last, min(last + reach, len(text)))
            if place is None:
                break
            bounds.append(place)
            last = place
        return bounds

    def _ids(self, text: str, bounds: list[int], *, first: bool) -> Iterator[NDArray[np.int32]]:
        """Ids of the pieces between bounds, a few together. first: the text begins where its
        document does.
        """
        drops_blank = self._cuts is not None and self._cuts.drops_blank
        spans: list[tuple[int, int]] = []
        for start, stop in pairwise(bounds):
            is_behind_cut = start > 0 or not first
            if drops_blank and is_behind_cut:
                # the tokenizer puts one before what it is given
                start += 1
            spans.append((start, stop))
        for number in range(0, len(spans), AT_ONCE):
            texts = [text[start:stop] for start, stop in spans[number : number + AT_ONCE]]
            for ids in self._encode_alone(texts):
                yield np.asarray(ids, np.int32)

    def _encode_alone(self, texts: list[str]) -> Any:
        """Ids without what a post-processor adds."""
        if isinstance(self._tokenizer, HuggingFaceTokenizer):
            return self._tokenizer.encode_pieces(texts)
        return self._tokenizer.encode(texts)

    def _cannot_cut(self, held: str, done: int, where: str) -> ConvertError:
        most = f"{MOST_UNCUT >> 20} Mi characters"
        if self._cuts is None:
            return ConvertError(
                f"{where}: a text of more than {most}, and for tokenizer {self._tokenizer.name} no "
                f"place is known where it could be cut without changing its tokens; cut it into "
                f"documents of less"
            )
        return ConvertError(
            f"{where}: more than {most} from character {done:,} on without a blank between words, "
            f"where the text could be cut without changing its tokens; is it text? cut it into "
            f"documents of less, or leave it out"
        )
