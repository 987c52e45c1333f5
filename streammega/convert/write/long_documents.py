"""The tokens of a document that is too long to be held, on their way into a segment of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from streammega.convert.documents import MOST_TOKENS
from streammega.convert.options import ConvertOptions
from streammega.errors import ConvertError


def check_tokens(count: int, where: str) -> None:
    """Raise ConvertError for a document of more tokens than an .idx can say."""
    if count > MOST_TOKENS:
        raise ConvertError(
            f"{where}: a document of more than {MOST_TOKENS:,} tokens, the most an .idx can hold; cut the file, or pass "
            f"--max-tokens"
        )


class TokenStream:
    """Tokens of one document, cut as the options ask. Once it is read, it knows how many there were
    and what they hash to.

    Args:
        pieces: (number of the sequence, ids), in order.
        modes: of each sequence.
        end: the id that ends documents, or None.
    """

    def __init__(
        self,
        pieces: Iterator[tuple[int, NDArray[Any]]],
        modes: Sequence[int],
        options: ConvertOptions,
        end: int | None,
        where: str,
    ) -> None:
        self._pieces = pieces
        self._modes = modes
        self._options = options
        self._end = end
        self._where = where
        self._hash = xxhash.xxh3_128()
        self._wanted = np.array(
            [options.modes is None or mode in options.modes for mode in modes], np.bool_
        )
        self._sizes = np.zeros(len(modes), np.int64)
        """Tokens of each sequence."""
        self._kept = np.zeros(len(modes), np.int64)
        """Those of them that are kept."""

    def __iter__(self) -> Iterator[NDArray[Any]]:
        """What is kept of the document.

        Raises ConvertError when that is more than an .idx can say.
        """
        for number, ids in self._chosen():
            self._kept[number] += len(ids)
            check_tokens(self.kept, self._where)
            if self._options.dedup:
                self._hash.update(ids.astype("<i8").tobytes())
            yield ids

    @property
    def total(self) -> int:
        """Tokens, without those of sequences that are not wanted."""
        return int(self._sizes[self._wanted].sum())

    @property
    def kept(self) -> int:
        """Tokens that are kept."""
        return int(self._kept.sum())

    @property
    def lengths(self) -> NDArray[np.int32]:
        """Tokens of each sequence that is left, int32."""
        return self._kept[self._left].astype(np.int32)

    @property
    def modes(self) -> NDArray[np.int8]:
        """Of the sequences that are left, int8."""
        return np.array(self._modes, np.int8)[self._left]

    @property
    def _there(self) -> NDArray[np.bool_]:
        """Which sequences there are; one without a token is none, unless it was asked for."""
        return (self._sizes > 0) | self._options.keep_empty

    @property
    def _left(self) -> NDArray[np.bool_]:
        """Of the sequences that there are, those that are wanted and of which the cut left
        something.
        """
        left: NDArray[np.bool_] = (
            self._there & self._wanted & ((self._kept > 0) | (self._sizes == 0))
        )
        return left

    @property
    def hashes(self) -> list[NDArray[np.uint64]]:
        """As `document_hashes` of this document alone."""
        halves = np.frombuffer(self._hash.digest(), "<u8")
        return [halves[:1], halves[1:]]

    @property
    def is_empty(self) -> bool:
        """Whether it has no token at all."""
        return not self._sizes.any()

    @property
    def dropped(self) -> str | None:
        """Why the document is left out, if it is."""
        options = self._options
        if not self.total:
            return "empty"
        if self.total < options.min_tokens:
            return "too short"
        if (
            options.max_tokens is not None
            and options.long == "drop"
            and self.total > options.max_tokens
        ):
            return "too long"
        return None

    @property
    def counts(self) -> dict[str, int]:
        """Of the report, by reasons."""
        others = 0 if self.is_empty else int((self._there & ~self._wanted).sum())
        counts = {"sequences of other modes": others} if others else {}
        if self.dropped is not None:
            counts[self.dropped] = 1
        return counts

    def _chosen(self) -> Iterator[tuple[int, NDArray[Any]]]:
        """All tokens; of more than wanted the first ones, with the end of the document in the place
        of the last.
        """
        most = self._options.max_tokens
        last: tuple[int, NDArray[Any]] | None = None
        wanted: tuple[int, NDArray[Any]] | None = None
        passed = 0
        for number, ids in self._pieces:
            self._sizes[number] += len(ids)
            if not self._wanted[number]:
                continue
            if most is None:
                yield number, ids
                continue
            yield number, ids[: max(0, most - 1 - passed)]
            if passed < most <= passed + len(ids):
                wanted = number, ids[most - 1 - passed : most - passed]
            passed += len(ids)
            last = (number, ids[-1:]) if len(ids) else last
        if wanted is not None and last is not None:
            yield last if self._end is not None and int(last[1][0]) == self._end else wanted
