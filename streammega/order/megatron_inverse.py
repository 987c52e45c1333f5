"""The inverse of the Megatron order: which samples read given tokens of a sequence. Its indices are
shuffles, so they are scanned, a stretch at a time.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streammega.order.megatron import GptIndices
from streammega.order.stream_inverse import TokenUses

Integers = NDArray[np.int64]
ROWS_AT_ONCE = 1 << 22
"""Entries of an index that are compared at once: what bounds the memory."""


def gpt_token_uses(
    indices: GptIndices, length: int, extra: int, sequence: int, start: int, stop: int
) -> TokenUses:
    """The uses of tokens [start, stop) of a sequence, which has `length`, in the order of
    samples; `start` and `stop` of what is returned count from the beginning of the sequence.

    The inverse of `locate_gpt`. extra: 1 if samples carry one token more than the next begins at.
    Cost: a scan of document_index, and one of shuffle_index if the tokens are used.
    """
    row: list[int] = []
    low: list[int] = []
    high: list[int] = []
    for position in _places(indices.document_index, np.array([sequence])):
        for number, begin, end in _rows_of(indices.sample_index, int(position), length, extra):
            if max(begin, start) < min(end, stop):
                row.append(number)
                low.append(max(begin, start))
                high.append(min(end, stop))
    # A row may read a sequence twice: where one epoch's last is the next one's first.
    rows = np.unique(np.array(row, np.int64))
    sample = samples_of_rows(indices.shuffle_index, rows)[np.searchsorted(rows, row)]
    starts = np.array(low, np.int64)
    by_sample = np.lexsort((starts, sample))
    return TokenUses(
        sample=sample[by_sample],
        start=starts[by_sample],
        stop=np.array(high, np.int64)[by_sample],
    )


def samples_of_rows(shuffle_index: NDArray[Any], rows: Integers) -> Integers:
    """The sample of each row of the sample index, int64 [rows]; rows are ascending."""
    if not len(rows):
        return rows
    samples = _places(shuffle_index, rows)
    row_of_sample = shuffle_index[samples].astype(np.int64)
    in_order: Integers = samples[np.argsort(row_of_sample)]
    return in_order


def samples_of_blend(
    dataset_index: NDArray[np.int16],
    dataset_sample_index: NDArray[np.int64],
    dataset: int,
    samples: Integers,
) -> dict[int, int]:
    """{sample of a dataset: sample of the blend}, without samples that the blend does not take.
    Cost: a scan of both indices.
    """
    taken: dict[int, int] = {}
    if not len(samples):
        return taken
    for first, stretch in _stretches(dataset_index):
        of_dataset = np.flatnonzero(stretch == dataset)
        drawn = np.asarray(dataset_sample_index[first : first + len(stretch)])[of_dataset]
        for place in np.flatnonzero(np.isin(drawn, samples)).tolist():
            taken[int(drawn[place])] = first + int(of_dataset[place])
    return taken


def _rows_of(
    sample_index: NDArray[Any], position: int, length: int, extra: int
) -> Iterator[tuple[int, int, int]]:
    """(row, start, stop) of the rows that read the sequence at a position of the document index,
    and the tokens of it that they read: as the kernel `sample_pieces` has them.
    """
    positions = sample_index[:, 0]
    # The row before the first that begins there may reach into it.
    first = max(0, bisect_left(positions, position) - 1)
    last = min(len(sample_index) - 1, bisect_right(positions, position))
    for row in range(first, last):
        begin = int(sample_index[row, 1]) if positions[row] == position else 0
        end = length
        if positions[row + 1] == position:
            end = int(sample_index[row + 1, 1]) + extra
        if positions[row] <= position <= positions[row + 1]:
            yield row, begin, end


def _places(index: NDArray[Any], values: Integers) -> Integers:
    """Where an index has one of some values, ascending."""
    places = [np.empty(0, np.int64)]
    for first, stretch in _stretches(index):
        equal = stretch == values[0] if len(values) == 1 else np.isin(stretch, values)
        places.append(np.flatnonzero(equal) + first)
    return np.concatenate(places)


def _stretches(index: NDArray[Any]) -> Iterator[tuple[int, NDArray[Any]]]:
    for first in range(0, len(index), ROWS_AT_ONCE):
        yield first, np.asarray(index[first : first + ROWS_AT_ONCE])
