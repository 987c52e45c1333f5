"""The stream order backwards: from tokens of a file to the ids of the samples that read them.

What `locate_stream` does, undone step by step: tokens to samples of an epoch, sample to block, the
block's slot, the place in its run, the lane and its draw, and the row at which the lane makes that
draw. Arrays and letters are those of kernels/lanes.py.

Cost: a few Feistel walks and O(log datasets) divisions for each reading; nothing is searched but
the parts of a file and the segments of the schedule.
"""

from __future__ import annotations

import numba
import numpy as np

from streammega.kernels.jit import kernel
from streammega.kernels.keyed import BLOCKS, NODES, PIECES, ROTATIONS, below, keyed, permute_back
from streammega.kernels.lane_draws import FRACTION_BITS, lefts_of, phase_of_node
from streammega.kernels.lanes import piece_of, run_bounds, slot_of, start_of

NEVER = -1
"""In place of a row that a lane never reaches."""
_LAST_ROW = np.int64(1) << 41
"""Rows from here on are never counted exactly: no stream comes that far."""
_DEEPEST = 64
"""Levels of a tree: there are no 2**64 datasets."""


@numba.njit(inline="always")
def _parent_draw(child, is_left, fraction, phase):
    """The draw at a node that is draw number `child` of one of its halves; NEVER if none is.

    What a half gets grows by none or one with each draw. A quotient of floats is off by a draw at
    most, and exact counts move it to its place.
    """
    one = np.float64(np.int64(1) << FRACTION_BITS)
    share = np.float64(fraction) / one
    ahead = np.float64(phase) / one
    if is_left:
        # the first draw at which draws * share + ahead comes to child + 1
        share_before = np.float64(child) + (1.0 - ahead)
    else:
        share = 1.0 - share
        share_before = np.float64(child) + ahead
    if share_before >= share * np.float64(_LAST_ROW):
        return NEVER
    draw = np.int64(share_before / share)
    while draw > 0 and _taken(draw, is_left, fraction, phase) > child:
        draw -= 1
    while _taken(draw + 1, is_left, fraction, phase) <= child:
        draw += 1
    return draw


@numba.njit(inline="always")
def _taken(draws, is_left, fraction, phase):
    """Of so many draws at a node, how many one of its halves gets."""
    lefts = lefts_of(draws, fraction, phase)
    return lefts if is_left else draws - lefts


@kernel
def row_of_draw(draw, dataset, lane, segment, fractions, num, key):
    """The row within a segment at which a lane makes its draw from a dataset: the inverse of
    `choose`; NEVER where it does not.
    """
    nodes = np.empty(_DEEPEST, np.int64)
    lefts = np.empty(_DEEPEST, np.bool_)
    depth = 0
    low = np.int64(0)
    high = np.int64(num)
    node = np.int64(1)
    while high - low > 1:
        middle = (low + high) // 2
        nodes[depth] = node
        lefts[depth] = dataset < middle
        if lefts[depth]:
            high = middle
            node = 2 * node
        else:
            low = middle
            node = 2 * node + 1
        depth += 1
    lane_key = keyed(key, NODES, lane, segment)
    for level in range(depth - 1, -1, -1):
        here = nodes[level]
        phase = phase_of_node(lane_key, here)
        draw = _parent_draw(draw, lefts[level], fractions[here], phase)
        if draw < 0:
            return NEVER
    return draw


@kernel
def sample_of_draw(lane, d, draw, lanes, key, segment, rows, fractions, bases):
    """The sample that is a lane's draw from a dataset, over the whole schedule of a phase; NEVER
    where none is, and for what was drawn in an earlier phase.
    """
    s = len(rows) - 1
    while s >= 0 and bases[s, lane, d] > draw:
        s -= 1
    if s < 0:
        return NEVER
    num = bases.shape[2]
    row = row_of_draw(draw - bases[s, lane, d], d, lane, segment + s, fractions[s], num, key)
    if row < 0:
        return NEVER
    return (rows[s] + row) * lanes + lane


@kernel
def samples_of_draws(lanes_of, draws, d, lanes, key, segment, rows, fractions, bases, sample):
    """Fill sample [n] with what `sample_of_draw` says of draws [n] of some lanes [n] from dataset
    d.
    """
    for i in range(len(draws)):
        sample[i] = sample_of_draw(
            lanes_of[i], d, draws[i], lanes, key, segment, rows, fractions, bases
        )


@kernel
def own_draws(samples, d, lanes, key, segment, rows, fractions, bases, draws):
    """Fill draws [lanes] with how many of dataset d each lane has made up to the first `samples` of
    a phase, with those of earlier phases since it began anew; negative by those that are left of
    what former epochs had left.

    The path of `choose` to one dataset, where `count_draws` walks to all of them.
    """
    rows_of_all = samples // lanes
    more = samples % lanes
    for lane in range(lanes):
        row = rows_of_all + (1 if lane < more else 0)
        s = len(rows) - 1
        while s > 0 and rows[s] > row:
            s -= 1
        drawn = row - rows[s]
        lane_key = keyed(key, NODES, lane, segment + s)
        low = np.int64(0)
        high = np.int64(bases.shape[2])
        node = np.int64(1)
        while high - low > 1:
            lefts = lefts_of(drawn, fractions[s, node], phase_of_node(lane_key, node))
            middle = (low + high) // 2
            if d < middle:
                drawn = lefts
                high = middle
                node = 2 * node
            else:
                drawn -= lefts
                low = middle
                node = 2 * node + 1
        draws[lane] = bases[s, lane, d] + drawn


@numba.njit(inline="always")
def _lane_of(place, lanes, size):
    """The lane in whose equal share of the permuted dataset a place lies; the first lanes have one
    more.
    """
    each = size // lanes
    more = size % lanes
    if place < more * (each + 1):
        return place // (each + 1)
    return more + (place - more * (each + 1)) // each


@numba.njit(inline="always")
def slot_place_of(sample, dataset_key, short_slot, size, block):
    """Where a sample of a dataset stands among the permuted blocks of an epoch, forwards in each."""
    blocks = (size + block - 1) // block
    number = sample // block
    slot = permute_back(number, blocks, dataset_key)
    slot_low = slot * block
    if slot > short_slot:  # the short block lies before it
        slot_low -= blocks * block - size
    return slot_low + sample - number * block


@numba.njit(inline="always")
def draw_of_place(place, epoch, dataset_key, short_slot, lanes, size, block, group):
    """(lane, which draw of it) that reads what stands at a place among the permuted blocks, in an
    epoch: the inverse of `place_of`.
    """
    blocks = (size + block - 1) // block
    run = _lane_of(place, lanes, size) // group
    run_start, run_length = run_bounds(run, lanes, group, size)
    rotation = below(keyed(dataset_key, ROTATIONS, run, 0), run_length)
    _, low, high = slot_of(place, size, block, blocks, short_slot)
    low, high = piece_of(place, run_start, run_length, rotation, low, high)
    place = low + permute_back(place - low, high - low, keyed(dataset_key, PIECES, low, 0))
    turned = place - run_start - rotation
    if turned < 0:
        turned += run_length
    drawn = epoch * run_length + turned
    return run * group + drawn % group, drawn // group


@kernel
def read_by(
    d, number, epochs_before, file, token_start, token_stop, first_epoch, last_epoch, end, lanes, key, segment,
    rows, fractions, bases, size, block, group, firsts, files, starts, slacks, before, ends, length, width,
    sample, start, stop,
):  # fmt: skip
    """Fill sample, start and stop [room] with the samples below `end` that read tokens of
    [token_start, token_stop) of a file in the epochs [first_epoch, last_epoch), and with which of
    those tokens; returns how many they are, however many have room.

    number, size, block, group: of dataset d, whose draws begin with epoch `epochs_before`, from
    which epochs count here. Samples come by epoch, then by their place in the
    file, and count from the first of the phase, as `end` does.
    """
    found = 0
    room = len(sample)
    blocks = (size + block - 1) // block
    for epoch in range(first_epoch, last_epoch):
        dataset_key = keyed(key, BLOCKS, number, epochs_before + epoch)
        short_slot = permute_back(blocks - 1, blocks, dataset_key)
        for part in range(firsts[d], firsts[d + 1]):
            if files[part] != file:
                continue
            origin = start_of(dataset_key, part, d, firsts, starts, slacks)
            # the first sample that ends behind token_start, and the one behind the last
            first = max(0, (token_start - origin - width) // length + 1)
            last = min(ends[part] - before[part], (token_stop - origin - 1) // length + 1)
            for place in range(first, last):
                there = slot_place_of(before[part] + place, dataset_key, short_slot, size, block)
                lane, draw = draw_of_place(
                    there, epoch, dataset_key, short_slot, lanes, size, block, group
                )
                reader = sample_of_draw(lane, d, draw, lanes, key, segment, rows, fractions, bases)
                if reader < 0 or reader >= end:
                    continue
                if found < room:
                    sample_start = origin + place * length
                    sample[found] = reader
                    start[found] = max(token_start, sample_start)
                    stop[found] = min(token_stop, sample_start + width)
                found += 1
    return found
