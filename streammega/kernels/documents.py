"""The documents of a file of tokens, by the arrays of its `.idx`, and its ids; and how they are packed
into bins.

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


@kernel
def best_fit(sizes, largest_first, capacity, max_items, bins):
    """Fill bins [items], int64, with the number of the bin of `capacity` that each item goes into;
    returns how many bins there are.

    sizes [items], at most the capacity; largest_first [items]: the items, sorted. An item goes into
    the bin with the least room that fits it; of bins with the same room, into the one that was used
    last. A bin holds at most max_items. Cost: O(log capacity) for each item.
    """
    # Bins by their room: a stack for each room, and a tree to find the least room from a size on that
    # any bin has. Leaf r of the tree, at `leaves + r`, counts the bins with room r.
    leaves = 1
    while leaves <= capacity:
        leaves *= 2
    counts = np.zeros(2 * leaves, np.int32)
    top = np.full(capacity + 1, -1, np.int64)
    below = np.empty(len(sizes), np.int64)
    items_of_bin = np.zeros(len(sizes), np.int64)
    num_bins = 0
    for item in largest_first:
        size = sizes[item]
        room = _least_room(counts, leaves, size)
        if room < 0:
            room = capacity
            chosen = num_bins
            num_bins += 1
        else:
            chosen = top[room]
            top[room] = below[chosen]
            _add(counts, leaves, room, -1)
        bins[item] = chosen
        items_of_bin[chosen] += 1
        new_room = room - size
        if new_room > 0 and items_of_bin[chosen] < max_items:
            below[chosen] = top[new_room]
            top[new_room] = chosen
            _add(counts, leaves, new_room, 1)
    return num_bins


@kernel
def _add(counts, leaves, room, change) -> None:
    """Change the count of bins with a room."""
    node = leaves + room
    while node:
        counts[node] += change
        node //= 2


@kernel
def _least_room(counts, leaves, size):
    """The least room of a bin that fits `size`; -1 if none does."""
    node = leaves + size
    if counts[node]:
        return size
    # up to the first subtree on the right that holds a bin, and down along its left edge
    while node > 1:
        if node % 2 == 0 and counts[node + 1]:
            node += 1
            while node < leaves:
                node *= 2
                if not counts[node]:
                    node += 1
            return node - leaves
        node //= 2
    return -1
