"""Which dataset a lane draws from, and how often: a binary tree over the datasets, whose draws are
counted exactly.

Cost: O(log datasets) multiplications a draw. Arrays and letters are those of lanes.py.
"""

from __future__ import annotations

import numba
import numpy as np

from streammega.kernels.jit import kernel
from streammega.kernels.keyed import (
    NODES,
    keyed,
)
from streammega.kernels.mix import GOLDEN, mix_one

# What is below makes orders that checkpoints count in: no constant here ever changes.

FRACTION_BITS = 44
"""Fixed point of a blend's fractions: exact for rows below 2**41."""
_HALF = np.uint64(FRACTION_BITS // 2)
_LOW = np.uint64((1 << (FRACTION_BITS // 2)) - 1)
_DEEPEST = 64
"""Room for the nodes that wait while a tree is walked: one a level, and there are no 2**64
datasets.
"""


@numba.njit(inline="always")
def lefts_of(draws, fraction, phase):
    """floor(draws * fraction + phase), all of it exact; fraction and phase in 2**-44ths.

    In two halves of the fraction, as the product of both wholes would not fit 64 bits.
    """
    low = np.uint64(draws) * (fraction & _LOW) + phase
    high = np.uint64(draws) * (fraction >> _HALF)
    return np.int64((high + (low >> _HALF)) >> _HALF)


@numba.njit(inline="always")
def phase_of_node(lane_key, node):
    """Where the counting of a node starts, in 2**-44ths of a draw: another in every lane, so that
    lanes do not burst together.
    """
    return mix_one(lane_key + np.uint64(node) * GOLDEN) >> np.uint64(64 - FRACTION_BITS)


@kernel
def choose(draw, lane, segment, fractions, num, key):
    """(dataset, how many draws it had before) of a lane's draw within a segment of the blend
    schedule; `num` datasets, fractions [nodes] of the segment.

    A binary tree over the datasets: of m draws at a node, floor(m * fraction + phase) go left.
    """
    low = np.int64(0)
    high = np.int64(num)
    node = np.int64(1)
    lane_key = keyed(key, NODES, lane, segment)
    while high - low > 1:
        fraction = fractions[node]
        phase = phase_of_node(lane_key, node)
        lefts_before = lefts_of(draw, fraction, phase)
        middle = (low + high) // 2
        if lefts_of(draw + 1, fraction, phase) > lefts_before:
            draw = lefts_before
            high = middle
            node = 2 * node
        else:
            draw = draw - lefts_before
            low = middle
            node = 2 * node + 1
    return low, draw


@kernel
def count_draws(draws, lanes, segment, fractions, num, key, counts):
    """Add to counts [lanes, datasets] what the first `draws` draws of each lane in a segment take
    from each dataset.

    The tree of `choose`, walked whole: nodes that wait are on a stack, each with the datasets [low,
    high) that it covers and the draws that come to it.
    """
    low = np.empty(_DEEPEST, np.int64)
    high = np.empty(_DEEPEST, np.int64)
    node = np.empty(_DEEPEST, np.int64)
    many = np.empty(_DEEPEST, np.int64)
    for lane in range(lanes):
        lane_key = keyed(key, NODES, lane, segment)
        top = 0
        low[0] = 0
        high[0] = num
        node[0] = 1
        many[0] = draws
        while top >= 0:
            first = low[top]
            stop = high[top]
            here = node[top]
            drawn = many[top]
            top -= 1
            if stop - first == 1:
                counts[lane, first] += drawn
                continue
            lefts = lefts_of(drawn, fractions[here], phase_of_node(lane_key, here))
            middle = (first + stop) // 2
            top += 1
            low[top] = first
            high[top] = middle
            node[top] = 2 * here
            many[top] = lefts
            top += 1
            low[top] = middle
            high[top] = stop
            node[top] = 2 * here + 1
            many[top] = drawn - lefts


@numba.njit(inline="always")
def draw_of(sample, lanes, key, segment, rows, fractions, bases, num):
    """(lane, dataset, which draw of the lane from that dataset) of a sample."""
    lane = sample % lanes
    row = sample // lanes
    s = len(rows) - 1
    while rows[s] > row:
        s -= 1
    d, draw = choose(row - rows[s], lane, segment + s, fractions[s], num, key)
    return lane, d, draw + bases[s, lane, d]
