"""Packs whole documents into bins, and the samples of a global batch into micro-batches that cost
about the same.
"""

from __future__ import annotations

import numpy as np

from streammega.kernels.jit import kernel


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


@kernel
def deal(costs, by_cost, ranks, rows, places) -> None:
    """Fill places int64 [micro-steps, ranks, rows] with the samples of a global batch.

    costs int64 [samples]; by_cost [samples]: their places, the most expensive first. A micro-step
    takes the next ranks * rows of these. In each round every micro-batch gets one; the most
    expensive goes to the micro-batch that costs least so far. Then the most expensive micro-batch
    goes to the rank with the lowest cost so far. Cost: a sort of the ranks for each round.
    """
    rank_totals = np.zeros(ranks, np.int64)
    dealt = np.empty((ranks, rows), np.int64)
    for step in range(len(places)):
        first = step * ranks * rows
        totals = np.zeros(ranks, np.int64)
        for row in range(rows):
            cheapest_first = np.argsort(totals, kind="mergesort")
            for number in range(ranks):
                place = by_cost[first + row * ranks + number]
                batch = cheapest_first[number]
                dealt[batch, row] = place
                totals[batch] += costs[place]
        costliest_first = np.argsort(-totals, kind="mergesort")
        idlest_first = np.argsort(rank_totals, kind="mergesort")
        for number in range(ranks):
            batch = costliest_first[number]
            rank = idlest_first[number]
            places[step, rank, :] = np.sort(dealt[batch])
            rank_totals[rank] += totals[batch]
