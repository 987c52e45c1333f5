"""Requests that several rows share."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from streammega.kernels.plan import coalesce_rows

Integers = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class SharedRequests:
    """[start, stop) of `file`, [requests], in the unit of the rows that they serve; of_row [rows]:
    the number of the request in which a row lies.
    """

    file: Integers
    start: Integers
    stop: Integers
    of_row: Integers

    def __len__(self) -> int:
        return len(self.file)


def coalesce(
    file: Integers,
    start: Integers,
    stop: Integers,
    by_place: Integers,
    *,
    gap: int,
    largest: int,
) -> SharedRequests:
    """Requests that cover the rows [start, stop) of files, which `by_place` sorts by file and
    start; in tokens, or all in bytes.

    Rows with at most `gap` between them share a request until it would pass `largest` (a single row
    may be larger). A row lies whole in its request. Cost: one pass over the rows.
    """
    rows = len(file)
    of_row = np.empty(rows, np.int64)
    # as many requests as rows at most
    request_start = np.empty(rows, np.int64)
    request_stop = np.empty(rows, np.int64)
    request_file = np.empty(rows, np.int64)
    count = coalesce_rows(
        file, start, stop, by_place, gap, largest, of_row, request_start, request_stop, request_file
    )
    return SharedRequests(
        file=request_file[:count],
        start=request_start[:count],
        stop=request_stop[:count],
        of_row=of_row,
    )
