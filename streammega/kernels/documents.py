"""The documents of a file of tokens, by the arrays of its `.idx`, and its ids.

offsets (bytes, ascending), lengths [sequences]; bounds [documents + 1]: the first sequence of each
document. Rows are tokens [start[r], stop[r]) of the file. Values of a damaged index that lead
outside of a row or of its arrays are ignored.
"""

from __future__ import annotations

import numpy as np

from streammega.kernels.jit import kernel


@kernel
def filled_tokens(offsets, lengths, itemsize, start, stop):
    """Where the documents of rows of a file end, before the padding behind them: int64 [rows].

    A row is a bin or its beginning, with documents end to end from its first token on. Cost: a
    binary search for each row.
    """
    ends = np.empty(len(start), np.int64)
    for r in range(len(start)):
        sequence = np.searchsorted(offsets, stop[r] * itemsize, "left") - 1
        end = start[r]
        if sequence >= 0:
            end = offsets[sequence] // itemsize + lengths[sequence]
        ends[r] = min(max(end, start[r]), stop[r])
    return ends


@kernel
def _document_at(offsets, bounds, itemsize, token):
    """The first document that begins at a token of the file, or after it."""
    sequence = np.searchsorted(offsets, token * itemsize, "left")
    return np.searchsorted(bounds, sequence, "left")


@kernel
def count_documents(offsets, bounds, itemsize, start, stop):
    """How many rows `list_documents` makes of each row, int64 [rows]: at least one."""
    counts = np.empty(len(start), np.int64)
    for r in range(len(start)):
        first = _document_at(offsets, bounds, itemsize, start[r])
        last = _document_at(offsets, bounds, itemsize, stop[r])
        counts[r] = max(1, last - first)
    return counts


@kernel
def list_documents(offsets, bounds, itemsize, start, stop, first_row, starts, stops) -> None:
    """Rows of documents: those that begin in row r, to starts and stops from first_row[r] on."""
    for r in range(len(start)):
        first = _document_at(offsets, bounds, itemsize, start[r])
        last = _document_at(offsets, bounds, itemsize, stop[r])
        row = first_row[r]
        starts[row] = start[r]
        for document in range(first + 1, last):
            begin = start[r]
            if bounds[document] < len(offsets):
                begin = offsets[bounds[document]] // itemsize
            begin = min(max(begin, starts[row]), stop[r])
            stops[row] = begin
            row += 1
            starts[row] = begin
        stops[row] = stop[r]


@kernel
def add_document_costs(offsets, bounds, itemsize, start, stop, sample, costs) -> None:
    """Add to costs [samples], int64, the squared tokens of each document in each row r, for
    sample[r].

    Cost: two binary searches for each row, then one step for each document in it.
    """
    for r in range(len(start)):
        token = start[r]
        end = stop[r]
        sequence = np.searchsorted(offsets, token * itemsize, "right") - 1
        document = max(np.searchsorted(bounds, sequence, "right") - 1, 0)
        while token < end:
            document += 1
            stretch_end = end
            # a damaged index may name sequences outside of its arrays: as if at their end
            if document < len(bounds) and 0 <= bounds[document] < len(offsets):
                stretch_end = min(end, offsets[bounds[document]] // itemsize)
            if stretch_end > token:
                length = stretch_end - token
                costs[sample[r]] += length * length
                token = stretch_end


@kernel
def id_range(ids):
    """(least, greatest) of at least one id. Cost: one read, vectorised in the ids' own width."""
    low = ids[0]
    high = ids[0]
    for k in range(len(ids)):
        low = min(low, ids[k])
        high = max(high, ids[k])
    return np.int64(low), np.int64(high)


@kernel
def wrong_ends(ids, first, ends, eod):
    """(how many, the first of) `ends` at which ids, that begin at token `first`, do not hold `eod`;
    (0, -1) if all do.
    """
    wrong = 0
    first_wrong = -1
    for k in range(len(ends)):
        if ids[ends[k] - first] != eod:
            if wrong == 0:
                first_wrong = k
            wrong += 1
    return wrong, first_wrong


@kernel
def find_overlaps(file, start, stop, first, low, high, row, place):
    """Fill row and place with each row of tokens [start, stop) of a file, and each interval [low, high)
    that it has tokens of; returns how many there are, which may be more than have room.

    file, start, stop [rows]. first [files + 1]: the first interval of each file; intervals of a file
    are ascending and apart. Cost: a binary search for each row of a file that has intervals.
    """
    count = 0
    for r in range(len(file)):
        k, end = first[file[r]], first[file[r] + 1]
        behind = end
        while k < behind:  # the first interval that ends after `start`
            middle = (k + behind) // 2
            if high[middle] <= start[r]:
                k = middle + 1
            else:
                behind = middle
        while k < end and low[k] < stop[r]:
            if count < len(row):
                row[count] = r
                place[count] = k
            count += 1
            k += 1
    return count
