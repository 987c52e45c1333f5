"""The tokens of a document that is too long to be held, on their way into a segment of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from streammega.convert.options import ConvertOptions
from streammega.dataset.idx import MOST_TOKENS
from streammega.errors import ConvertError


def check_tokens(count: int, where: str) -> None:
    """Raise ConvertError for a document of more tokens than an .idx can say."""
    if count > MOST_TOKENS:
        raise ConvertError(
            f"{where}: a document of more than {MOST_TOKENS:,} tokens, the most an .idx can hold; "
            f"cut the file, or pass --max-tokens"
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
        self._is_wanted = np.ones(len(modes), np.bool_)
        """Whether a sequence is of a mode that was asked for."""
        if options.modes is not None:
            self._is_wanted = np.isin(modes, options.modes)
        self._sizes = np.zeros(len(modes), np.int64)
        """Tokens of each sequence."""
        self._kept = np.zeros(len(modes), np.int64)
        """Those of them that are kept."""

    def __iter__(self) -> Iterator[NDArray[Any]]:
        """What is kept of the document.

        Raises ConvertError when that is more than an .idx can say.
        """
        dedup = self._options.dedup
        for number, ids in self._chosen():
            self._kept[number] += len(ids)
            check_tokens(self.kept, self._where)
            if dedup:
                # As `document_hashes`: of ids, whatever their width.
                wide_ids = ids.astype("<i8")
                self._hash.update(wide_ids.tobytes())
            yield ids

    @property
    def total(self) -> int:
        """Tokens, without those of sequences that are not wanted."""
        return int(self._sizes[self._is_wanted].sum())

    @property
    def kept(self) -> int:
        """Tokens that are kept."""
        return int(self._kept.sum())

    @property
    def lengths(self) -> NDArray[np.int32]:
        """Tokens of each sequence that is left, int32."""
        return self._kept[self._is_left].astype(np.int32)

    @property
    def modes(self) -> NDArray[np.int8]:
        """Of the sequences that are left, int8."""
        return np.array(self._modes, np.int8)[self._is_left]

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
        total = self.total
        most = self._options.max_tokens
        if not total:
            return "empty"
        if total < self._options.min_tokens:
            return "too short"
        if most is not None and total > most and self._options.long == "drop":
            return "too long"
        return None

    @property
    def counts(self) -> dict[str, int]:
        """What happened to it, as the report counts that: by reasons."""
        dropped = self.dropped
        tokens_cut_off = self.total - self.kept
        is_of_other_mode = self._is_there & ~self._is_wanted
        # An empty document is counted as that alone.
        of_other_modes = 0 if self.is_empty else int(is_of_other_mode.sum())
        counts = {"sequences of other modes": of_other_modes}
        if dropped is not None:
            counts[dropped] = 1
        elif tokens_cut_off:
            counts["cut"] = 1
            counts["tokens cut off"] = tokens_cut_off
        return counts

    @property
    def _is_there(self) -> NDArray[np.bool_]:
        """Which sequences there are; one without a token is none, unless it was asked for."""
        return (self._sizes > 0) | self._options.keep_empty

    @property
    def _is_left(self) -> NDArray[np.bool_]:
        """Of the sequences that there are, those that are wanted and of which the cut left
        something.
        """
        is_not_cut_away = (self._kept > 0) | (self._sizes == 0)
        left: NDArray[np.bool_] = self._is_there & self._is_wanted & is_not_cut_away
        return left

    def _chosen(self) -> Iterator[tuple[int, NDArray[Any]]]:
        """All tokens of sequences that are wanted, or as many of them as documents may have."""
        most = self._options.max_tokens
        wanted = self._wanted()
        if most is None:
            yield from wanted
        else:
            yield from self._cut(wanted, most)

    def _wanted(self) -> Iterator[tuple[int, NDArray[Any]]]:
        for number, ids in self._pieces:
            self._sizes[number] += len(ids)
            if self._is_wanted[number]:
                yield number, ids

    def _cut(
        self, pieces: Iterator[tuple[int, NDArray[Any]]], most: int
    ) -> Iterator[tuple[int, NDArray[Any]]]:
        """The first `most` tokens; if there are more and the last of them ends documents, that in
        the place of the last that is kept.
        """
        token_at_limit: tuple[int, NDArray[Any]] | None = None
        last_token: tuple[int, NDArray[Any]] | None = None
        passed = 0
        for number, ids in pieces:
            # One token less for now: which comes last is known when all were seen.
            room = max(0, most - 1 - passed)
            yield number, ids[:room]
            if passed < most <= passed + len(ids):
                token_at_limit = (number, ids[most - 1 - passed : most - passed])
            passed += len(ids)
            if len(ids):
                last_token = (number, ids[-1:])
        if token_at_limit is None or last_token is None:
            return
        _, last_id = last_token
        if self._end is not None and int(last_id[0]) == self._end:
            yield last_token
        else:
            yield token_at_limit
