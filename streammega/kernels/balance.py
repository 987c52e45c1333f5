"""What attention over documents costs, and a global batch dealt out so that it costs all ranks the
same.
"""

from __future__ import annotations

import numpy as np

from streammega.kernels.jit import kernel


@kernel
def add_document_costs(offsets, bounds, itemsize, start, stop, sample, costs) -> None:
    """Add to costs [samples], int64, the squared tokens of each stretch of a document in rows of
    one file.

    offsets (bytes, rising) [sequences]; bounds [documents + 1]: the first sequence of each
    document. Row r is tokens [start[r], stop[r]) of the file, and part of sample[r]. Cost: two
    binary searches for each row, then one step for each document in it.
    """
    for r in range(len(start)):
        token = start[r]
        end = stop[r]
        sequence = np.searchsorted(offsets, token * itemsize, "right") - 1
        document = max(np.searchsorted(bounds, sequence, "right") - 1, 0)
        while token < end:
            document += 1
            stretch_end = end
            # what a damaged index names beyond its own arrays is taken for its end
            if document < len(bounds) and 0 <= bounds[document] < len(offsets):
                stretch_end = min(end, offsets[bounds[document]] // itemsize)
            if stretch_end > token:
                length = stretch_end - token
                costs[sample[r]] += length * length
                token = stretch_end


@kernel
def deal(costs, by_cost, ranks, rows, places) -> None:
    """Deal a global batch out to micro-steps, ranks and rows: places int64 [micro-steps, ranks,
    rows], of its samples.

    costs int64 [samples]; by_cost [samples]: their places, the most expensive first. A micro-step
    takes the next ranks * rows of these, whatever the ranks and rows. Within it, they are dealt in
    rounds of one to each micro-batch, the most expensive of a round to the micro-batch that costs
    least so far; the most expensive micro-batch goes to the rank that has had least so far. Cost: a
    sort of the ranks for each round.
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
        dearest_first = np.argsort(-totals, kind="mergesort")
        idlest_first = np.argsort(rank_totals, kind="mergesort")
        for number in range(ranks):
            batch = dearest_first[number]
            rank = idlest_first[number]
            places[step, rank, :] = np.sort(dealt[batch])
            rank_totals[rank] += totals[batch]
