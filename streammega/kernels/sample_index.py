"""Megatron's sample index by its closed form: where, in the shuffled documents, each sample starts.

Two streaming passes over document_index, each in parallel: token sums per chunk, then the rows that fall into each
chunk. No prefix sum of the corpus is stored, so peak memory is the returned array.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from streammega.kernels.parallel import chunk_bounds, map_in_threads


def build_sample_index(
    lengths: NDArray[np.int32],
    document_index: NDArray[np.int32],
    num_rows: int,
    sequence_length: int,
    extra_token: int,
    dtype: type[np.int32] | type[np.int64],
) -> NDArray[np.int32] | NDArray[np.int64]:
    """Rows 0..num_rows (inclusive) of the sample index, shape [num_rows + 1, 2].

    Column 0 is a position in document_index, column 1 a token offset in that sequence. Row k is the place of
    token k * sequence_length: with the extra token the sequence that holds it, without it the one that holds
    the token before. Rows past the last token stay at the end: (last position, its length - extra_token).

    Args:
        lengths: tokens of each sequence, int32 [sequences].
        document_index: sequence ids in shuffled order, int32 [positions].
        extra_token: 1 if samples carry one token more than sequence_length, else 0.
        dtype: int32 or int64, of the result.
    """
    positions = len(document_index)
    rows: NDArray[Any] = np.empty((num_rows + 1, 2), dtype)
    chunks = chunk_bounds(positions, 1 << 16)
    sums = map_in_threads(lambda chunk: _sum(lengths, document_index, *chunk), chunks)
    bases = np.concatenate([np.zeros(1, np.int64), np.cumsum(sums, dtype=np.int64)])

    def fill(c: int) -> None:
        _fill(rows, lengths, document_index, *chunks[c], bases[c], sequence_length, extra_token, num_rows)

    map_in_threads(fill, range(len(chunks)))
    end = (bases[-1] - extra_token) // sequence_length + 1  # the first row past the tokens
    if end <= num_rows:
        rows[max(end, 1) :] = (positions - 1, lengths[document_index[-1]] - extra_token)
    rows[0] = (0, 0)
    return rows


@numba.njit(cache=True, nogil=True)
def _sum(lengths, index, start, stop):  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    total = np.int64(0)
    for i in range(start, stop):
        total += lengths[index[i]]
    return total


@numba.njit(cache=True, nogil=True)
def _fill(  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    rows, lengths, index, start, stop, base, sequence_length, extra_token, num_rows
) -> None:
    """The rows whose token lies in positions [start, stop), which begin at token `base`.

    Without the extra token a row belongs to the sequence of the token before it, so shift by one.
    """
    shift = 1 - extra_token
    row = (base + shift + sequence_length - 1) // sequence_length  # the first k with k * S - shift >= base
    at = np.int64(base)
    for position in range(start, stop):
        end = at + lengths[index[position]]
        while row <= num_rows and row * sequence_length - shift < end:
            rows[row, 0] = position
            rows[row, 1] = row * sequence_length - at
            row += 1
        at = end


@numba.njit(cache=True, nogil=True)
def sample_pieces(document_index, sample_index, lengths, rows, extra):  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    """For each row of the sample index its (sequence, start, stop) pieces; empty ones are left out."""
    bound = np.int64(0)
    for row in rows:
        bound += sample_index[row + 1, 0] - sample_index[row, 0] + 1
    splits = np.zeros(len(rows) + 1, np.int64)
    sequence, start, stop = np.empty(bound, np.int64), np.empty(bound, np.int64), np.empty(bound, np.int64)
    at = np.int64(0)
    for i in range(len(rows)):
        first, last = sample_index[rows[i], 0], sample_index[rows[i] + 1, 0]
        for position in range(first, last + 1):
            low = np.int64(sample_index[rows[i], 1]) if position == first else np.int64(0)
            high = np.int64(lengths[document_index[position]])
            if position == last:
                high = np.int64(sample_index[rows[i] + 1, 1]) + extra
            if high > low:
                sequence[at], start[at], stop[at] = document_index[position], low, high
                at += 1
        splits[i + 1] = at
    return splits, sequence[:at], start[:at], stop[:at]
