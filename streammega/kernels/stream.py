"""The stream order: from sample ids to tokens of files, by closed forms and keyed bijections.
order/stream_order.py explains the order, order/epoch_remainder.py the remainder.

Cost of a sample: O(log datasets) multiplications and two short Feistel walks. Only a few sizes are
looked up.

Three arguments describe an order. `tree`, a BlendTree of order/stream_order.py, says which dataset
a lane draws from: `segment` is the number of the phase in keys, `bases` [lanes, datasets] the draws
before the phase minus the lane's share of the remainder. `datasets` and `parts`, records as below,
say how the epochs of a dataset are cut; the parts of all datasets are end to end in one array.
`extra` is 1 if a sample has one token more than `length`, else 0. Samples count from the first one
of the phase.

The remainder of open epochs, where a phase changes samples or lanes, is in remainder.py.
"""

from __future__ import annotations

import numba
import numpy as np

from streammega.kernels.jit import kernel
from streammega.kernels.keyed import GOLDEN, bounded, keyed, mix_one, permute, permute_back

# numba's cache of a kernel notices changes in the kernel's own file only. So after any change here,
# write this file's new digest into remainder.py; test_kernels.py prints the line.
# compiled with keyed.py 90779475

DATASET = np.dtype(
    [
        ("key", np.uint64),  # of the order
        ("lanes", np.int64),
        ("number", np.int64),  # of the dataset in keys: the same in every phase
        ("first_epoch", np.int64),  # in keys: the epoch that the first draw is of
        ("size", np.int64),  # samples of an epoch
        ("block", np.int64),  # samples of a block
        ("group", np.int64),  # lanes that share a run: 1, or all
        ("length", np.int64),  # tokens from one sample to the next
        ("first_part", np.int64),  # its parts are [first_part, end_part)
        ("end_part", np.int64),
    ],
    align=True,
)
"""How the epochs of a dataset are cut in the samples and lanes of one order."""
PART = np.dtype(
    [
        ("file", np.int64),  # within its dataset
        ("start", np.int64),  # the token of the file at which the part begins
        ("slack", np.int64),  # tokens in no sample: an epoch's samples begin up to so many later
        ("before", np.int64),  # samples of the dataset before the part
        ("end", np.int64),  # samples of the dataset up to its end
    ],
    align=True,
)
"""Consecutive tokens of a file, which samples do not cross: at least one sample."""
RUN = np.dtype(
    [("item", np.int64), ("file", np.int64), ("start", np.int64), ("stop", np.int64)], align=True
)
"""Tokens [start, stop) of a file. item: the sample or block that they belong to."""
OPEN_BLOCK = np.dtype(
    [("first", np.int64), ("epoch", np.int64), ("slot", np.int64), ("uses", np.int64)], align=True
)
"""The block that a lane has open in a dataset. slot: -1: no block is open. uses: draws of it that
are still to come.
"""
OPENED_BLOCK = np.dtype(
    [
        ("dataset", np.int64),
        ("epoch", np.int64),
        ("first", np.int64),  # its first sample, in the permuted dataset
        ("count", np.int64),  # its samples
        ("uses", np.int64),  # draws of it, with the one that opened it
        ("row", np.int64),  # the sample that opened it: its place in `samples`
    ],
    align=True,
)
"""A block that a sample has opened."""

# Checkpoints count in orders that are made of these constants: they never change.

# The purpose of a key, so that no two uses share a stream of random numbers.
KEY_BLOCKS = 1
KEY_RANGES = 2
KEY_ROTATIONS = 3
KEY_OFFSETS = 4
KEY_NODES = 5
KEY_LONGER_RUNS = 6
KEY_SHORTER_RUNS = 7

SPREAD_BLOCKS = 4
"""Lanes next to each other have runs far apart where runs are shorter than so many blocks: of longer
ones, lanes of a batch are hardly ever both in the block that their runs share.
"""
FRACTION_BITS = 44
"""Fixed point of a blend's fractions: exact for rows below 2**41."""
_HALF = np.uint64(FRACTION_BITS // 2)
_LOW = np.uint64((1 << (FRACTION_BITS // 2)) - 1)
_MAX_DEPTH = 64
"""Levels of a tree, at most: there are less than 2**64 datasets."""

# Which dataset a lane draws from: a binary tree over the datasets, whose draws are counted exactly.


@numba.njit(inline="always")
def _draws_left(draws, fraction, phase):
    """floor(draws * fraction + phase), exactly; fraction and phase in 2**-44ths.

    The fraction is multiplied in two halves, for the whole product would not fit 64 bits.
    """
    low = np.uint64(draws) * (fraction & _LOW) + phase
    high = np.uint64(draws) * (fraction >> _HALF)
    return np.int64((high + (low >> _HALF)) >> _HALF)


@numba.njit(inline="always")
def _phase_of_node(lane_key, node):
    """Where counting starts at a node, in 2**-44ths of a draw: different in every lane, so that
    lanes do not draw from a dataset at the same time.
    """
    return mix_one(lane_key + np.uint64(node) * GOLDEN) >> np.uint64(64 - FRACTION_BITS)


@kernel
def choose(draw, lane, segment, fractions, num, key):
    """(dataset, how many draws it had before) of a lane's draw in a segment, which has `num`
    datasets and fractions [nodes].

    A binary tree over the datasets: of m draws at a node, floor(m * fraction + phase) go left.
    """
    low = np.int64(0)
    high = np.int64(num)
    node = np.int64(1)
    lane_key = keyed(key, KEY_NODES, lane, segment)
    while high - low > 1:
        fraction = fractions[node]
        phase = _phase_of_node(lane_key, node)
        left_before = _draws_left(draw, fraction, phase)
        middle = (low + high) // 2
        if _draws_left(draw + 1, fraction, phase) > left_before:
            draw = left_before
            high = middle
            node = 2 * node
        else:
            draw = draw - left_before
            low = middle
            node = 2 * node + 1
    return low, draw


@kernel
def count_draws(draws, lanes, segment, fractions, num, key, counts):
    """Add to counts [lanes, datasets] how many of the first `draws` draws of each lane in a segment
    take each dataset.

    Walks all nodes of the tree of `choose`. Waiting nodes are on a stack, with the datasets [low,
    high) that they cover and their draws.
    """
    low = np.empty(_MAX_DEPTH, np.int64)
    high = np.empty(_MAX_DEPTH, np.int64)
    node = np.empty(_MAX_DEPTH, np.int64)
    many = np.empty(_MAX_DEPTH, np.int64)
    for lane in range(lanes):
        lane_key = keyed(key, KEY_NODES, lane, segment)
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
            left_draws = _draws_left(drawn, fractions[here], _phase_of_node(lane_key, here))
            middle = (first + stop) // 2
            top += 1
            low[top] = first
            high[top] = middle
            node[top] = 2 * here
            many[top] = left_draws
            top += 1
            low[top] = middle
            high[top] = stop
            node[top] = 2 * here + 1
            many[top] = drawn - left_draws


@numba.njit(inline="always")
def _draw_of_sample(sample, key, lanes, segment, fractions, bases):
    """(lane, dataset, which draw of the lane from that dataset) of a sample."""
    lane = sample % lanes
    d, draw = choose(sample // lanes, lane, segment, fractions, bases.shape[1], key)
    return lane, d, draw + bases[lane, d]


# From a draw to its place in a run and in a block, to a sample of the dataset, to tokens of a file.


@numba.njit(inline="always")
def has_spread_runs(row):
    """Whether runs are of so few blocks that many lanes draw from one that the next lane has too."""
    return row.group == 1 and row.size // row.lanes < SPREAD_BLOCKS * row.block


@numba.njit(inline="always")
def run_of_lane(row, lane):
    """The run that a lane reads. Lanes next to each other are drawn in one batch, so they read runs far
    apart where neighbouring runs share blocks. The first lanes have the longer runs.
    """
    if row.group > 1:
        return np.int64(0)
    if not has_spread_runs(row):
        return lane
    longer = row.size % row.lanes
    if lane < longer:
        return permute(lane, longer, keyed(row.key, KEY_LONGER_RUNS, row.number, 0))
    key = keyed(row.key, KEY_SHORTER_RUNS, row.number, 0)
    return longer + permute(lane - longer, row.lanes - longer, key)


@numba.njit(inline="always")
def lane_of_run(row, run):
    """The lane that reads a run of its own: the inverse of `run_of_lane`."""
    if not has_spread_runs(row):
        return run
    longer = row.size % row.lanes
    if run < longer:
        return permute_back(run, longer, keyed(row.key, KEY_LONGER_RUNS, row.number, 0))
    key = keyed(row.key, KEY_SHORTER_RUNS, row.number, 0)
    return longer + permute_back(run - longer, row.lanes - longer, key)


@kernel
def run_bounds(row, run):
    """(start, length) of a run in the permuted dataset.

    The length is what its lanes draw in an epoch, if there is no other dataset: then the first
    `size` samples are one epoch.
    """
    size = row.size
    lanes = row.lanes
    first_lane = run * row.group
    end_lane = first_lane + row.group
    start = first_lane * (size // lanes) + min(size % lanes, first_lane)
    end = end_lane * (size // lanes) + min(size % lanes, end_lane)
    return start, end - start


@numba.njit(inline="always")
def num_blocks(row):
    """Blocks of an epoch; the last one may be short."""
    return (row.size + row.block - 1) // row.block


@kernel
def block_at(row, place, short_slot):
    """(slot, its first place, its end) of a place in the permuted blocks; one block may be short."""
    block = row.block
    short = row.size - (num_blocks(row) - 1) * block
    before = short_slot * block
    if place < before:
        slot = place // block
        return slot, slot * block, (slot + 1) * block
    if place < before + short:
        return short_slot, before, before + short
    slot = short_slot + 1 + (place - before - short) // block
    low = (slot - 1) * block + short
    return slot, low, low + block


@kernel
def block_range(place, start, length, rotation, slot_low, slot_high):
    """[low, high) of the part of a block that a run reads in one go: the block is cut at the bounds
    of the run, and where its rotation begins.
    """
    low = max(slot_low, start)
    high = min(slot_high, start + length)
    cut = start + rotation
    if place >= cut:
        low = max(low, cut)
    else:
        high = min(high, cut)
    return low, high


@numba.njit(inline="always")
def find_short_slot(row, dataset_key):
    """The slot of the short block of a dataset in an epoch."""
    blocks = num_blocks(row)
    return permute_back(blocks - 1, blocks, dataset_key)


@numba.njit(inline="always")
def draw_location(row, d, lane, draw, epoch_of, short_slots):
    """Where a lane's draw from dataset d is: (key of the epoch, epoch, sample of the dataset, first
    sample and samples of its part of a block, draws left in that part with this one).

    The lane's draws go through the places of its run, from the rotation on and around. A place is
    in a permuted block, and the samples of its part of the block are permuted too. epoch_of,
    short_slots [datasets] are of the caller: they keep the last epoch and its short slot.
    """
    blocks = num_blocks(row)
    group = row.group
    run = run_of_lane(row, lane)
    run_start, run_length = run_bounds(row, run)
    place = draw * group + lane % group
    epoch = row.first_epoch + place // run_length
    place = place % run_length
    dataset_key = keyed(row.key, KEY_BLOCKS, row.number, epoch)
    if epoch_of[d] != epoch:
        epoch_of[d] = epoch
        short_slots[d] = find_short_slot(row, dataset_key)
    rotation = bounded(keyed(dataset_key, KEY_ROTATIONS, run, 0), run_length)
    place += rotation
    place = run_start + (place - run_length if place >= run_length else place)
    slot, slot_low, slot_high = block_at(row, place, short_slots[d])
    low, high = block_range(place, run_start, run_length, rotation, slot_low, slot_high)
    remaining = high - place
    place = low + permute(place - low, high - low, keyed(dataset_key, KEY_RANGES, low, 0))
    # from a place to the sample: of the block that the permutation puts into this slot
    base = permute(slot, blocks, dataset_key) * row.block - slot_low
    return dataset_key, epoch, base + place, base + low, high - low, remaining


@numba.njit(inline="always")
def file_part(row, parts, sample):
    """The part, by its number among those of all datasets, that has a sample of a dataset."""
    low = row.first_part
    high = row.end_part
    while high - low > 1:
        middle = (low + high) // 2
        if parts[middle].before <= sample:
            low = middle
        else:
            high = middle
    return low


@numba.njit(inline="always")
def part_origin(row, parts, part, dataset_key):
    """The token of the file at which the samples of a part begin in an epoch; it changes every
    epoch.
    """
    offset_key = keyed(dataset_key, KEY_OFFSETS, part - row.first_part, 0)
    return parts[part].start + bounded(offset_key, parts[part].slack + 1)


@kernel
def locate(samples, tree, datasets, parts, extra, dataset, file, start, stop):
    """Fill dataset, file, start and stop (in tokens) [n] of samples [n]. dataset: its place in
    `datasets`.

    A sample of a remainder is left to `remainder_runs`: its file is -1, its stop is not written, and
    its start is negative. That is its draw, counted from the first draw of the lane after the
    remainder.
    """
    key, lanes, segment, fractions, bases = tree
    epoch_of = np.full(len(datasets), -1, np.int64)
    short_slots = np.zeros(len(datasets), np.int64)
    for i in range(len(samples)):
        lane, d, draw = _draw_of_sample(samples[i], key, lanes, segment, fractions, bases)
        dataset[i] = d
        if draw < 0:
            file[i] = -1
            start[i] = draw
            continue
        row = datasets[d]
        dataset_key, _, sample, _, _, _ = draw_location(row, d, lane, draw, epoch_of, short_slots)
        part = file_part(row, parts, sample)
        origin = part_origin(row, parts, part, dataset_key)
        file[i] = parts[part].file
        start[i] = origin + (sample - parts[part].before) * row.length
        stop[i] = start[i] + row.length + extra


# Blocks that lanes have open, for readers that fetch whole blocks.


@kernel
def assign_blocks(
    samples, tree, datasets, parts, extra, itemsizes, local, open_blocks, free, slot, offset, opened
):
    """Fill slot and offset [n] of samples [n]: the slot of the block that holds each, and its byte
    offset there. slot: -1 for datasets that are not followed.

    itemsizes [datasets]: bytes of a token, 0 for a dataset that is not followed. local [lanes]: the
    number of each lane among the reader's, -1 for others. open_blocks: OPEN_BLOCK [lanes of the
    reader, datasets].

    A block that was not open takes the next slot of free [n] and an entry of opened, OPENED_BLOCK
    [n]. Returns the number of opened blocks, or -1 - i if sample i is in none of the reader's
    lanes.
    """
    key, lanes, segment, fractions, bases = tree
    count = 0
    epoch_of = np.full(len(datasets), -1, np.int64)
    short_slots = np.zeros(len(datasets), np.int64)
    for i in range(len(samples)):
        lane, d, draw = _draw_of_sample(samples[i], key, lanes, segment, fractions, bases)
        slot[i] = -1
        if itemsizes[d] == 0 or draw < 0:
            continue
        row = datasets[d]
        _, epoch, sample, first, samples_of_block, remaining = draw_location(
            row, d, lane, draw, epoch_of, short_slots
        )
        if local[lane] < 0:
            return -1 - i  # -1 as an index would be the state of another lane
        block = open_blocks[local[lane], d]
        if block.slot < 0 or block.first != first or block.epoch != epoch:
            block.first = first
            block.epoch = epoch
            block.slot = free[count]
            opened[count].dataset = d
            opened[count].epoch = epoch
            opened[count].first = first
            opened[count].count = samples_of_block
            opened[count].uses = remaining
            opened[count].row = i
            count += 1
        block.uses = remaining - 1
        slot[i] = block.slot
        if remaining == 1:
            block.slot = -1
        # Samples within a part are end to end; the last one of a part has the extra token.
        parts_before = file_part(row, parts, sample) - file_part(row, parts, first)
        tokens_before = (sample - first) * row.length + parts_before * extra
        offset[i] = tokens_before * itemsizes[d]
    return count


@kernel
def block_runs(datasets, parts, extra, opened, runs):
    """Fill runs, RUN records, with the tokens of blocks in the order of their offsets; returns how
    many. item: the block's place in `opened`. A block has at most as many runs as samples.
    """
    count = 0
    for i in range(len(opened)):
        row = datasets[opened[i].dataset]
        sample = opened[i].first
        end_sample = sample + opened[i].count
        dataset_key = keyed(row.key, KEY_BLOCKS, row.number, opened[i].epoch)
        part = file_part(row, parts, sample)
        while sample < end_sample:
            before = parts[part].before
            stop_sample = min(parts[part].end, end_sample)
            origin = part_origin(row, parts, part, dataset_key)
            runs[count].item = i
            runs[count].file = parts[part].file
            runs[count].start = origin + (sample - before) * row.length
            runs[count].stop = origin + (stop_sample - before) * row.length + extra
            sample = stop_sample
            part += 1
            count += 1
    return count
