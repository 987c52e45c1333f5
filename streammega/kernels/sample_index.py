"""Megatron's sample index by its closed form: where, in the shuffled documents, each sample starts.

Chunks of document_index are done in parallel. First their lengths are gathered, with prefetches,
and summed. Once the start of a chunk is known, its rows are written. No prefix sum of the corpus is
stored: beyond the returned array, memory is a few chunks.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streammega.kernels import num_threads
from streammega.kernels.intrinsics import prefetch
from streammega.kernels.jit import kernel

# compiled with intrinsics.py 732f1ead

CHUNK = 1 << 18
"""Positions of document_index that a thread takes at a time: their lengths are 1 MiB."""
_PREFETCH = 128
"""How many elements ahead memory is prefetched."""
_CHUNKS_A_THREAD = 2
"""Chunks under way for each thread: one is worked on, and the next waits."""

SOUND = 0
BAD_DOCUMENT_INDEX = 1
BAD_SAMPLE_INDEX = 2
BAD_SHUFFLE_INDEX = 3
"""Results of `sample_pieces`: which array is bad."""


def build_sample_index(
    lengths: NDArray[np.int32],
    document_index: NDArray[np.int32],
    num_rows: int,
    sequence_length: int,
    extra_token: int,
    dtype: type[np.int32] | type[np.int64],
) -> NDArray[np.int32] | NDArray[np.int64]:
    """Rows 0..num_rows (inclusive) of the sample index, shape [num_rows + 1, 2].

    Column 0 is a position in document_index, column 1 a token offset in that sequence. Row k is the
    place of token k * sequence_length: the sequence that holds it, or without the extra token the
    one that holds the token before. Rows past the last token are (last position, its length -
    extra_token).

    Args:
        lengths: tokens of each sequence, int32 [sequences].
        document_index: sequence ids in shuffled order, int32 [positions].
        extra_token: 1 if samples carry one token more than sequence_length, else 0.
        dtype: int32 or int64, of the result.
    """
    rows: NDArray[Any] = np.empty((num_rows + 1, 2), dtype)
    tokens = _fill_rows(rows, lengths, document_index, sequence_length, extra_token)
    first_row_past = (tokens - extra_token) // sequence_length + 1
    if first_row_past <= num_rows:
        last_position = len(document_index) - 1
        last_offset = lengths[document_index[last_position]] - extra_token
        rows[max(first_row_past, 1) :] = (last_position, last_offset)
    rows[0] = (0, 0)
    return rows


def _fill_rows(
    rows: NDArray[Any],
    lengths: NDArray[np.int32],
    document_index: NDArray[np.int32],
    sequence_length: int,
    extra_token: int,
) -> int:
    """Write all rows that begin within the tokens; returns how many tokens there are.

    Threads gather the lengths of chunks, at most `max_chunks` at once. The first token of a chunk is
    known when all chunks before it are gathered. Then a thread writes its rows, while later chunks
    are gathered.
    """
    ids = document_index.view(np.uint32)
    positions = len(document_index)
    threads = num_threads()
    max_chunks = _CHUNKS_A_THREAD * threads
    shift = 1 - extra_token
    gathering: deque[tuple[int, Future[tuple[NDArray[np.int32], int]]]] = deque()
    writing: deque[Future[None]] = deque()
    tokens = 0
    with ThreadPoolExecutor(threads) as pool:

        def write_first_chunk() -> None:
            """Wait for the lengths of the first chunk, and begin to write its rows."""
            nonlocal tokens
            start, future = gathering.popleft()
            sizes, chunk_tokens = future.result()
            writing.append(pool.submit(_fill, rows, sizes, start, tokens, sequence_length, shift))
            tokens += chunk_tokens
            if len(writing) > max_chunks:
                writing.popleft().result()

        for start in range(0, positions, CHUNK):
            stop = min(start + CHUNK, positions)
            gathering.append((start, pool.submit(_gather_chunk, lengths, ids, start, stop)))
            if len(gathering) >= max_chunks:
                write_first_chunk()
        while gathering:
            write_first_chunk()
        for future in writing:
            future.result()
    return tokens


def _gather_chunk(
    lengths: NDArray[np.int32], ids: NDArray[np.uint32], start: int, stop: int
) -> tuple[NDArray[np.int32], int]:
    sizes = np.empty(stop - start, np.int32)
    return sizes, int(_gather(lengths, ids, start, sizes))


@kernel
def _gather(lengths, ids, start, sizes):
    """sizes[i] = lengths[ids[start + i]]; returns their sum."""
    count = len(sizes)
    for i in range(count):
        prefetch(lengths, np.int64(ids[start + min(i + _PREFETCH, count - 1)]))
        # a negative length, of a damaged file, would lead before the rows
        sizes[i] = max(lengths[ids[start + i]], 0)
    total = np.int64(0)
    for i in range(count):
        total += sizes[i]
    return total


@kernel
def _fill(rows, sizes, start, base, sequence_length, shift) -> None:
    """Write the rows whose token is in the positions from `start` on, which have `sizes` and begin
    at token `base`.

    Without the extra token (`shift` 1) a row belongs to the sequence of the token before it.
    """
    # the first k with k * S - shift >= base
    row = (base + shift + sequence_length - 1) // sequence_length
    token = row * sequence_length - shift
    last_token = (len(rows) - 1) * sequence_length - shift
    sequence_begin = np.int64(base)
    for i in range(len(sizes)):
        sequence_end = sequence_begin + sizes[i]
        while token < sequence_end:
            if token > last_token:
                return
            rows[row, 0] = start + i
            rows[row, 1] = token + shift - sequence_begin
            row += 1
            token += sequence_length
        sequence_begin = sequence_end


@kernel
def sample_pieces(document_index, sample_index, lengths, rows, extra, width, with_empty):
    """For each row of the sample index its (sequence, start, stop) pieces; empty ones are left out,
    unless `with_empty`.

    document_index [positions]: sequence ids; sample_index [rows + 1, 2]: as `build_sample_index`
    makes it; lengths [sequences] in tokens; rows [samples]: the rows asked for; extra: 1 if samples
    carry one token more than the next begins at.

    Returns (SOUND or the bad array, splits [samples + 1] of the pieces, sequence, start and stop
    [pieces] in tokens of the sequence). The arrays come from files, so every value is checked
    before it is used as an index, and samples have at most `width` tokens. If an array is bad,
    there are no pieces.
    """
    splits = np.zeros(len(rows) + 1, np.int64)
    none = np.empty(0, np.int64)
    most_pieces = np.int64(0)
    for row in rows:
        if row < 0 or row + 1 >= len(sample_index):
            return BAD_SHUFFLE_INDEX, splits, none, none, none
        first = np.int64(sample_index[row, 0])
        last = np.int64(sample_index[row + 1, 0])
        if first < 0 or last < first or last >= len(document_index):
            return BAD_SAMPLE_INDEX, splits, none, none, none
        most_pieces += last - first + 1
    sequence = np.empty(most_pieces, np.int64)
    start = np.empty(most_pieces, np.int64)
    stop = np.empty(most_pieces, np.int64)
    pieces = np.int64(0)
    for i in range(len(rows)):
        first = np.int64(sample_index[rows[i], 0])
        last = np.int64(sample_index[rows[i] + 1, 0])
        room = np.int64(width)
        for position in range(first, last + 1):
            document = np.int64(document_index[position])
            if document < 0 or document >= len(lengths):
                return BAD_DOCUMENT_INDEX, splits, none, none, none
            size = np.int64(lengths[document])
            low = np.int64(sample_index[rows[i], 1]) if position == first else np.int64(0)
            high = np.int64(sample_index[rows[i] + 1, 1]) + extra if position == last else size
            if high > low or (with_empty and high == low):
                room -= high - low
                if low < 0 or high > size or room < 0:
                    return BAD_SAMPLE_INDEX, splits, none, none, none
                sequence[pieces] = document
                start[pieces] = low
                stop[pieces] = high
                pieces += 1
        splits[i + 1] = pieces
    return SOUND, splits, sequence[:pieces], start[:pieces], stop[:pieces]
