"""Documents on their way: raw, and as tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streammega.errors import ConvertError

MOST_TOKENS = 2**31 - 1
"""Tokens of a sequence: the `.idx` holds their number as int32."""


@dataclass(frozen=True, kw_only=True)
class RawDocument:
    """A document before parsing: its bytes, and where they came from (line 0: the whole file).

    offset: the byte of the file at which it begins, where its line is not known, else -1. record:
    whether the bytes are a JSON record; else they are text. A record that was parsed already is in
    `fields`, and `size` is about how many bytes it takes.
    """

    data: bytes
    path: str
    line: int = 0
    offset: int = -1
    record: bool = False
    fields: dict[str, Any] | None = None
    size: int = 0

    @property
    def where(self) -> str:
        """For messages."""
        if self.offset >= 0:
            return f"{self.path}@{self.offset}"
        return f"{self.path}:{self.line}" if self.line else self.path


@dataclass(frozen=True, kw_only=True)
class LongText:
    """A document that is a text too long to be held: its bytes, a few MiB at a time, and where they
    come from.

    size: how many bytes it has, where that is known; else 0.
    """

    path: str
    pieces: Iterator[bytes]
    size: int = 0


class LongString(ABC):
    """A text of a record that is too long to be held."""

    @abstractmethod
    def pieces(self) -> Iterator[str]:
        """All of it, about a MiB at a time. Raises FormatError where it is no text."""

    def beginning(self, most: int) -> str:
        """Its first characters, for what is only shown."""
        found = ""
        for piece in self.pieces():
            found += piece
            if len(found) >= most:
                break
        return found[:most]


@dataclass(frozen=True, kw_only=True)
class LongRecord:
    """A record too long to be held.

    document: where it comes from; its fields too, with LongStrings in them, where they are known.
    pieces: else its bytes of JSON, a MiB or so at a time.
    """

    document: RawDocument
    pieces: Iterator[bytes] = field(default_factory=lambda: iter(()))


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Some documents: tokens end to end, tokens of each sequence, sequences of each document, modes
    of sequences or None.
    """

    tokens: NDArray[Any]
    lengths: NDArray[np.int32]
    documents: NDArray[np.int64]
    modes: NDArray[np.int8] | None = None
    source_bytes: int = 0

    @property
    def document_tokens(self) -> NDArray[np.int64]:
        """Tokens of each document, int64."""
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.lengths, dtype=np.int64)])
        last = np.cumsum(self.documents)
        tokens: NDArray[np.int64] = ends[last] - ends[last - self.documents]
        return tokens

    def take(self, keep: NDArray[np.bool_]) -> Tokens:
        """Some of the documents, in their order."""
        if keep.all():
            return self
        sequences = np.repeat(keep, self.documents)
        return Tokens(
            tokens=self.tokens[np.repeat(sequences, self.lengths)],
            lengths=self.lengths[sequences],
            documents=self.documents[keep],
            modes=None if self.modes is None else self.modes[sequences],
            source_bytes=self.source_bytes,
        )

    def take_sequences(self, keep: NDArray[np.bool_]) -> Tokens:
        """Some of the sequences; documents may become empty."""
        owner = np.repeat(np.arange(len(self.documents)), self.documents)
        return Tokens(
            tokens=self.tokens[np.repeat(keep, self.lengths)],
            lengths=self.lengths[keep],
            documents=np.bincount(owner[keep], minlength=len(self.documents)).astype(np.int64),
            modes=None if self.modes is None else self.modes[keep],
            source_bytes=self.source_bytes,
        )

    def cut(self, most: int, end: int | None) -> Tokens:
        """Documents of at most `most` tokens; the last of them stays `end` where it was."""
        size = self.document_tokens
        starts = np.cumsum(size) - size
        keep = np.ones(len(self.tokens), np.bool_)
        for number in np.flatnonzero(size > most):
            first = int(starts[number])
            last = int(starts[number] + size[number])
            closed = end is not None and int(self.tokens[last - 1]) == end
            keep[first + most - closed : last - closed] = False
        kept = np.concatenate([np.zeros(1, np.int64), np.cumsum(keep)])
        ends = np.cumsum(self.lengths, dtype=np.int64)
        lengths = (kept[ends] - kept[ends - self.lengths]).astype(np.int32)
        whole = Tokens(
            tokens=self.tokens[keep],
            lengths=lengths,
            documents=self.documents,
            modes=self.modes,
            source_bytes=self.source_bytes,
        )
        return whole.take_sequences((lengths > 0) | (self.lengths == 0))


def concatenate(parts: list[Tokens], dtype: np.dtype[Any]) -> Tokens:
    """All documents of the parts, in order."""
    if len(parts) == 1 and parts[0].tokens.dtype == dtype:
        return parts[0]
    modes = [part.modes for part in parts if part.modes is not None]
    return Tokens(
        tokens=np.concatenate(
            [part.tokens.astype(dtype, copy=False) for part in parts] or [np.empty(0, dtype)]
        ),
        lengths=np.concatenate([part.lengths for part in parts] or [np.empty(0, np.int32)]),
        documents=np.concatenate([part.documents for part in parts] or [np.empty(0, np.int64)]),
        modes=np.concatenate(modes) if modes else None,
        source_bytes=sum(part.source_bytes for part in parts),
    )


def one_each(tokens: NDArray[Any], lengths: NDArray[Any], size: int, where: str) -> Tokens:
    """Every document is one sequence.

    Raises ConvertError, naming `where`, for what is no token id.
    """
    if not np.issubdtype(tokens.dtype, np.integer):
        raise ConvertError(f"{where}: token arrays hold integers, not {tokens.dtype}")
    if tokens.dtype.kind == "i" and len(tokens) and int(tokens.min()) < 0:
        raise ConvertError(
            f"{where}: holds the id {int(tokens.min())}; ids are not below zero: was it padded or masked?"
        )
    counts = np.ones(len(lengths), np.int64)
    check_lengths(lengths)
    return Tokens(
        tokens=tokens, lengths=lengths.astype(np.int32), documents=counts, source_bytes=size
    )


def check_lengths(lengths: NDArray[Any]) -> None:
    """Raise ConvertError for a sequence that has more tokens than the `.idx` can say."""
    if len(lengths) and int(lengths.max()) > MOST_TOKENS:
        raise ConvertError(
            f"a sequence of {int(lengths.max()):,} tokens; an .idx can hold {MOST_TOKENS:,}: cut the document before"
        )
