"""The choices of a blend: of the datasets that are due, the one with the largest error, sample by
sample.

Cost: a comparison of the due in vector registers. Arrays are those of blending.py.
"""

from __future__ import annotations

import numba
import numpy as np

from streammega.kernels.intrinsics import (
    REGISTER_FLOATS,
    count_best,
    float_bits,
    lowest_bit,
)
from streammega.kernels.jit import kernel

REGISTER = REGISTER_FLOATS
"""The due are compared in multiples of so many: whole vector registers of float64."""
FEW = 64
"""So many due stand in vector registers all at once, and have a bit each in a word."""
_ONE = np.uint64(1)
_NO_BITS = np.uint64(0)
_LEAST_INT = np.int64(-0x7FFFFFFFFFFFFFFF)
_LARGEST_INT = np.int64(0x7FFFFFFFFFFFFFFF)
_PLACE = np.int64(0xFFFFFFFF)
"""The bits of a place where a dataset's number stands above it."""


@numba.njit(inline="always")
def _take(row, place, due_count, due_id, due_size, dataset, sample):
    """Write a choice, which is counted already, into a row of the outputs; a dataset whose last
    sample it is drops out.
    """
    dataset[row] = due_id[place]
    sample[row] = np.int64(due_count[place]) - 1
    if due_count[place] >= due_size[place]:
        due_count[place] = np.inf


@kernel
def choose_of_few(
    first, stop, origin, due_weight, due_count, due_id, due_size,
    chosen, padded, threshold, lowest, dataset, sample
):  # fmt: skip
    """As `choose_of_many`, of at most `FEW` places, which are compared without loops."""
    registers = padded // REGISTER
    for i in range(first, stop):
        target = float(max(i, 1))
        if registers <= 1:
            hits, error = count_best(due_weight, due_count, 1, target)
        elif registers == 2:
            hits, error = count_best(due_weight, due_count, 2, target)
        elif registers == 3:
            hits, error = count_best(due_weight, due_count, 3, target)
        elif registers == 4:
            hits, error = count_best(due_weight, due_count, 4, target)
        elif registers == 5:
            hits, error = count_best(due_weight, due_count, 5, target)
        elif registers == 6:
            hits, error = count_best(due_weight, due_count, 6, target)
        elif registers == 7:
            hits, error = count_best(due_weight, due_count, 7, target)
        else:
            hits, error = count_best(due_weight, due_count, 8, target)
        place = lowest_bit(hits)
        others = hits & (hits - _ONE)
        while others != _NO_BITS:
            # they tied, and were all counted: the lowest id keeps its count
            other = lowest_bit(others)
            others &= others - _ONE
            loser = other
            if due_id[other] < due_id[place]:
                loser = place
                place = other
            due_count[loser] -= 1.0
        if error < threshold:
            due_count[place] -= 1.0
            return i
        chosen[0] |= hits
        lowest[0] = min(lowest[0], error)
        _take(i - origin, place, due_count, due_id, due_size, dataset, sample)
    return stop


@kernel
def choose_of_many(
    first, stop, origin, due_weight, due_count, due_id, due_size,
    hits, padded, threshold, lowest, dataset, sample
):  # fmt: skip
    """Choose samples [first, stop) among the due; returns the first whose best error is under the
    threshold, or stop.

    Sample `origin` goes to place 0 of the outputs. The due are the first of `padded` places. Errors
    are compared by their bits: as integers, maxima are vectorised by themselves, and those that are
    not negative order alike. The largest one is negative only by rounding, and then looked for as a
    float.
    """
    for i in range(first, stop):
        target = float(max(i, 1))
        best = _LEAST_INT
        for k in range(padded):
            best = max(best, float_bits(due_weight[k] * target - due_count[k]))
        if best < 0:
            best = _negative_best(target, due_weight, due_count, padded)
        place = np.int64(0)
        ties = np.int64(0)
        # whole registers are stored: a single element would hold up the next sample's loads
        for k in range(padded):
            hit = np.int64(float_bits(due_weight[k] * target - due_count[k]) == best)
            due_count[k] += np.float64(hit)
            hits[k] = hit
            place += hit * k
            ties += hit
        if ties > 1:
            place = _keep_lowest(due_count, due_id, hits, padded)
        error = due_weight[place] * target - (due_count[place] - 1.0)
        if error < threshold:
            due_count[place] -= 1.0
            return i
        lowest[0] = min(lowest[0], error)
        _take(i - origin, place, due_count, due_id, due_size, dataset, sample)
    return stop


@kernel
def _negative_best(target, due_weight, due_count, padded):
    """The bits of the largest error, when all are negative."""
    best = -np.inf
    for k in range(padded):
        best = max(best, due_weight[k] * target - due_count[k])
    return float_bits(best)


@kernel
def _keep_lowest(due_count, due_id, hits, padded):
    """Of all that tied and were counted, keep the count of the lowest id; returns its place.

    The place stands below the id in one number, so that the least of them tells both.
    """
    lowest = _LARGEST_INT
    for k in range(padded):
        lowest = min(lowest, ((due_id[k] << 32) | k) if hits[k] else _LARGEST_INT)
    for k in range(padded):
        due_count[k] -= np.float64(hits[k])
    place = lowest & _PLACE
    due_count[place] += 1.0
    return place
