"""What the planner is given and what it makes: the table of files, and spans of rows with the
holdings that serve them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from streammega.storage.fetch.requests import FetchGroup

Integers = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class FileTable:
    """What the planner knows of the files, all datasets end to end.

    firsts [datasets + 1]: the number of each dataset's first file. All others are [files].
    itemsize: bytes of a token. verified_at, mapped_at: where the states of cached pages and the
    addresses of cached chunks lie in memory; 0: not cached. page_bytes, chunk_bytes: of the cache.
    """

    firsts: Integers
    itemsize: Integers
    num_tokens: Integers
    local: NDArray[np.bool_]
    names: Sequence[str]
    verified_at: Integers
    mapped_at: Integers
    page_bytes: int
    chunk_bytes: int

    def files_of(self, dataset: int) -> slice:
        """The numbers of a dataset's files."""
        return slice(self.firsts[dataset], self.firsts[dataset + 1])


class Request(NamedTuple):
    """One request: bytes [start, stop) of a file, to byte `at` of the holding."""

    file: int
    start: int
    stop: int
    at: int


@dataclass(frozen=True, kw_only=True)
class PlannedHolding:
    """`size` bytes that are fetched, held and freed together.

    `row`: the first row of the span that needs them.
    """

    slot: int
    size: int
    row: int
    parts: Sequence[Request]


@dataclass(frozen=True, kw_only=True)
class Span:
    """Rows of consecutive samples, in their order, and the holdings that they are the first to
    need, in order of need.

    sample_ids [samples]: their numbers in the global stream; a kept part has that of its sample.
    row_splits [samples + 1]: sample i owns rows [row_splits[i], row_splits[i + 1]). Of each row,
    [rows]: its bytes begin at byte `offset` of what lies in `slot`, are `size` tokens from token
    `start` of `file` on, and go to token `column` of the sample and on.
    """

    sample_ids: Integers
    row_splits: Integers
    slot: Integers
    offset: Integers
    size: Integers
    file: Integers
    start: Integers
    column: Integers
    holdings: Sequence[PlannedHolding]
    useful_bytes: int
    cached_bytes: int


@dataclass(frozen=True, kw_only=True)
class PlannedSlab:
    """A slab that is to be gathered: the micro-steps at `consumed`, which are samples [first, last)
    of a span.

    holdings: those that no slab before it needs.
    """

    span: Span
    consumed: list[int]
    first: int
    last: int
    holdings: Sequence[FetchGroup]

    @property
    def row_splits(self) -> Integers:
        """The rows of each of its samples, [samples + 1], as rows of the span."""
        return self.span.row_splits[self.first : self.last + 1]

    @property
    def rows(self) -> slice:
        """The rows of all of its samples."""
        return slice(self.span.row_splits[self.first], self.span.row_splits[self.last])

    def one_by_one(self) -> Iterator[PlannedSlab]:
        """Its micro-batches as slabs of one, each with the holdings that no other before needs."""
        span = self.span
        first_row_of_slot: dict[int, int] = {}
        for row in range(self.rows.start, self.rows.stop):
            first_row_of_slot.setdefault(int(span.slot[row]), row)
        samples = (self.last - self.first) // len(self.consumed)
        for number, consumed in enumerate(self.consumed):
            first = self.first + number * samples
            last = first + samples
            rows = range(span.row_splits[first], span.row_splits[last])
            yield PlannedSlab(
                span=span,
                consumed=[consumed],
                first=first,
                last=last,
                holdings=[
                    holding
                    for holding in self.holdings
                    if first_row_of_slot.get(holding.slot, -1) in rows
                ],
            )
