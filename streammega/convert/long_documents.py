"""The tokens of a document that is too long to be held, on their way into a segment of its own."""

from __future__ import annotations

from collections.abc import Iterator
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
    """Tokens of one document, cut as the options ask. Once it is read, it knows how many there were and what they hash to."""

    def __init__(self, pieces: Iterator[NDArray[Any]], options: ConvertOptions, end: int | None, where: str) -> None:
        self._pieces, self._options, self._end, self._where = pieces, options, end, where
        self._hash = xxhash.xxh3_128()
        self.total = 0
        self.kept = 0

    def __iter__(self) -> Iterator[NDArray[Any]]:
        """What is kept of the document. Raises ConvertError when that is more than an .idx can say."""
        for ids in self._chosen():
            self.kept += len(ids)
            check_tokens(self.kept, self._where)
            if self._options.dedup:
                self._hash.update(ids.astype("<i8").tobytes())
            yield ids

    @property
    def hashes(self) -> list[NDArray[np.uint64]]:
        """As `document_hashes` of this document alone."""
        halves = np.frombuffer(self._hash.digest(), "<u8")
        return [halves[:1], halves[1:]]

    @property
    def dropped(self) -> str | None:
        """Why the document is left out, if it is."""
        options = self._options
        if not self.total:
            return "empty"
        if options.modes is not None and 0 not in options.modes:  # which a text that is no record has
            return "of another mode"
        if self.total < options.min_tokens:
            return "too short"
        if options.max_tokens is not None and options.long == "drop" and self.total > options.max_tokens:
            return "too long"
        return None

    @property
    def counts(self) -> dict[str, int]:
        """Of the report, by reasons."""
        if self.dropped == "of another mode":
            return {"sequences of other modes": 1, "empty": 1}
        return {self.dropped: 1} if self.dropped is not None else {}

    def _chosen(self) -> Iterator[NDArray[Any]]:
        """All tokens; of more than wanted the first ones, with the end of the document in the place of the last."""
        most = self._options.max_tokens
        last: NDArray[Any] | None = None
        passed = 0
        wanted: NDArray[Any] | None = None
        for ids in self._pieces:
            self.total += len(ids)
            if most is None:
                yield ids
                continue
            yield ids[: max(0, most - 1 - passed)]
            if passed < most <= self.total:
                wanted = ids[most - 1 - passed : most - passed]
            passed += len(ids)
            last = ids[-1:] if len(ids) else last
        if wanted is not None and last is not None:
            yield last if self._end is not None and int(last[0]) == self._end else wanted
