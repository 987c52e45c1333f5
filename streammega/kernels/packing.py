"""Documents packed into bins of one size, none of them cut; and what of a bin is documents."""

from __future__ import annotations

import numpy as np

from streammega.kernels.jit import kernel


@kernel
def best_fit(sizes, largest_first, capacity, most_items, bins):
    """Put items into bins of `capacity`: bins int64 [items], the number of each item's; returns how
    many bins there are.

    sizes [items], none above the capacity; largest_first [items]: their places in that order. Each
    goes into the bin with the least room that still fits it, of several alike the one that was used
    last; one with most_items takes no more. Cost: O(log capacity) for each item.
    """
    # Bins by their room: a stack for each room, and a tree that tells the least room from one on
    # that any bin has. Leaf r of the tree, at `leaves + r`, counts the bins with room r.
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
        left = room - size
        if left > 0 and items_of_bin[chosen] < most_items:
            below[chosen] = top[left]
            top[left] = chosen
            _add(counts, leaves, left, 1)
    return num_bins


@kernel
def _add(counts, leaves, room, change) -> None:
    """Count a bin of a room in, or out."""
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


@kernel
def filled_tokens(offsets, lengths, itemsize, start, stop):
    """Where the documents of rows of a file end, before the padding behind them: int64 [rows].

    offsets (bytes, rising), lengths [sequences]. Row r is tokens [start[r], stop[r]), a bin or its
    beginning, whose documents lie end to end from its first token on. Cost: a binary search for
    each row.
    """
    ends = np.empty(len(start), np.int64)
    for r in range(len(start)):
        sequence = np.searchsorted(offsets, stop[r] * itemsize, "left") - 1
        end = start[r]
        if sequence >= 0:
            end = offsets[sequence] // itemsize + lengths[sequence]
        # what a damaged index says of tokens outside of the row is not believed
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
    """Rows of documents: of row r of a file, which is tokens [start[r], stop[r]), those that begin
    in it, to starts and stops from first_row[r] on.

    offsets (bytes, rising) [sequences]; bounds [documents + 1]: the first sequence of each
    document.
    """
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
