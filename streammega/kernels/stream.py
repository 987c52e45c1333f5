"""The stream order: from sample ids to tokens of files and back, by closed forms and keyed
bijections. order/stream_order.py explains the order, order/epoch_remainder.py the remainder.

Cost of a sample: O(log datasets) multiplications and two short Feistel walks. Only a few sizes are
looked up.

Three arguments describe an order. `tree`, a BlendTree of order/stream_order.py, says which dataset
a lane draws from. `datasets` and `parts`, records as below, say how the epochs of a dataset are
cut; the parts of all datasets are end to end in one array. `extra` is 1 if a sample has one token
more than `length`, else 0. Samples count from the first one of the phase.

All kernels of the stream order are in this file: numba's cache on disk notices changes only in the
file of the kernel, not in other files that it calls.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from streammega.kernels.jit import kernel

DATASET = np.dtype(
    [
        ("key", np.uint64),  # of the order
        ("lanes", np.int64),
        ("number", np.int64),  # of the dataset in keys: the same in every phase
        ("first_epoch", np.int64),  # in keys: the epoch that the first draw is of
        ("size", np.int64),  # samples of an epoch
        ("block", np.int64),  # samples of a block
        ("group", np.int64),  # lanes that share a run
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
"""Consecutive tokens of a file, which samples do not cross."""
INTERVAL = np.dtype(
    [
        ("dataset", np.int64),  # its place in `datasets`
        ("kind", np.int64),  # BLOCKS or DRAWS
        ("which", np.int64),  # the epoch (BLOCKS) or the lane (DRAWS)
        ("low", np.int64),  # tokens [low, high)
        ("high", np.int64),
        ("at", np.int64),  # the token of the remainder at which the interval begins
    ],
    align=True,
)
"""Unread tokens of an epoch in progress."""
BLOCKS = 0
"""The tokens of an interval count over the blocks of an epoch in their permuted order."""
DRAWS = 1
"""The tokens of an interval count over the draws of a lane."""
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

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""2**64 over the golden ratio, odd: the step of SplitMix64.

Multiples of consecutive numbers are far apart.
"""
_FIRST_SHIFT = np.uint64(30)
_FIRST_FACTOR = np.uint64(0xBF58476D1CE4E5B9)
_SECOND_SHIFT = np.uint64(27)
_SECOND_FACTOR = np.uint64(0x94D049BB133111EB)
_LAST_SHIFT = np.uint64(31)
"""The constants of SplitMix64's finaliser."""


def mix(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A bijection of 64 bits: each bit changes half of the result's bits (the finaliser of
    SplitMix64). 0 stays 0.

    Stored orders, shuffles and hashes depend on it: its bits never change. The n-th number of
    SplitMix64 with seed s is mix(s + n * GOLDEN). An array of the caller's is not written to.
    """
    value = (value ^ (value >> _FIRST_SHIFT)) * _FIRST_FACTOR
    value = (value ^ (value >> _SECOND_SHIFT)) * _SECOND_FACTOR
    return value ^ (value >> _LAST_SHIFT)


mix_one: Any = numba.njit(inline="always")(mix)
"""`mix` of one uint64, inlined into kernels."""

# Checkpoints count in orders that are made of these constants: they never change.

# The purpose of a key, so that no two uses share a stream of random numbers.
KEY_BLOCKS = 1
KEY_RANGES = 2
KEY_ROTATIONS = 3
KEY_OFFSETS = 4
KEY_NODES = 5

_TURNS = 6
"""Turns of a Feistel walk."""
_SHUFFLED = 32
"""Permutations of at most so many numbers are shuffles: a walk over so few is measurably uneven."""
_TURN_STEP = np.uint64(0xD1342543DE82EF95)
_TURN_FACTOR = np.uint64(0xBF58476D1CE4E5B9)
"""Odd multipliers: keys of turns that differ in many bits, and upper bits that depend on all."""
_ONE = np.uint64(1)
_WORD = np.uint64(32)

FRACTION_BITS = 44
"""Fixed point of a blend's fractions: exact for rows below 2**41."""
_HALF = np.uint64(FRACTION_BITS // 2)
_LOW = np.uint64((1 << (FRACTION_BITS // 2)) - 1)
_MAX_DEPTH = 64
"""Levels of a tree, at most: there are less than 2**64 datasets."""
_LAST_ROW = np.int64(1) << 41
"""Rows from here on are not counted exactly: no stream comes that far."""
NEVER = -1
"""Returned instead of a row that a lane never reaches."""


# Keys, and keyed numbers below a limit and permutations.


@kernel
def keyed(key, purpose, a, b):
    """A 64-bit key for (key, purpose, a, b)."""
    state = mix_one(np.uint64(key) + np.uint64(purpose) * GOLDEN)
    state = mix_one(state + np.uint64(a) * GOLDEN + _ONE)
    return mix_one(state + np.uint64(b) * GOLDEN + _ONE)


@numba.njit(inline="always")
def _round(key, value, turn):
    """The round function of the Feistel walk: 64 bits, whose upper half is used."""
    bits = (key + np.uint64(turn) * _TURN_STEP) ^ (np.uint64(value) * GOLDEN)
    bits ^= bits >> _WORD
    return bits * _TURN_FACTOR


@numba.njit(inline="always")
def _bounded(bits, limit):
    """64 random bits scaled to [0, limit), for limits up to 2**62, by their upper halves."""
    if limit <= 0xFFFFFFFF:
        return np.int64(((bits >> _WORD) * np.uint64(limit)) >> _WORD)
    return np.int64(bits % np.uint64(limit))


@numba.njit(inline="always")
def _swapped(value, i, key):
    """Where the i-th swap of a keyed shuffle takes a place."""
    j = _bounded(mix_one(key + np.uint64(i)), i + 1)
    if value == i:
        return j
    if value == j:
        return i
    return value


@kernel
def permute(value, size, key):
    """The image of `value` under a keyed permutation of range(size): a Feistel walk on an almost
    square domain.

    The domain has `right_size * left_size` numbers, a few more than `size`: a walk that ends beyond
    `size` is repeated from there. A few turns are not random enough on tiny domains: there the
    value is followed through the swaps of a shuffle.
    """
    key = np.uint64(key)
    if size <= _SHUFFLED:
        for i in range(size - 1, 0, -1):
            value = _swapped(value, i, key)
        return value
    low_size = np.int64(np.ceil(np.sqrt(np.float64(size))))
    high_size = (size + low_size - 1) // low_size
    while True:
        low_half = value % low_size
        high_half = value // low_size
        for turn in range(0, _TURNS, 2):
            low_half += _bounded(_round(key, high_half, turn), low_size)
            low_half -= low_size if low_half >= low_size else 0
            high_half += _bounded(_round(key, low_half, turn + 1), high_size)
            high_half -= high_size if high_half >= high_size else 0
        value = high_half * low_size + low_half
        if value < size:
            return value


@kernel
def permute_back(value, size, key):
    """The inverse of `permute`: the same turns or swaps in reverse."""
    key = np.uint64(key)
    if size <= _SHUFFLED:
        for i in range(1, size):
            value = _swapped(value, i, key)
        return value
    low_size = np.int64(np.ceil(np.sqrt(np.float64(size))))
    high_size = (size + low_size - 1) // low_size
    while True:
        low_half = value % low_size
        high_half = value // low_size
        for back in range(0, _TURNS, 2):
            turn = _TURNS - 2 - back
            high_half -= _bounded(_round(key, low_half, turn + 1), high_size)
            high_half += high_size if high_half < 0 else 0
            low_half -= _bounded(_round(key, high_half, turn), low_size)
            low_half += low_size if low_half < 0 else 0
        value = high_half * low_size + low_half
        if value < size:
            return value


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


@kernel
def lane_draw_counts(samples, d, tree, draws):
    """Fill draws [lanes] with how many draws each lane has made from dataset d before sample
    `samples` of a phase, with those of earlier phases; negative: so many draws of the remainder are
    left.

    Walks the path of `choose` to one dataset; `count_draws` walks to all of them.
    """
    key, lanes, segment, fractions, bases = tree
    rows = samples // lanes
    more = samples % lanes
    for lane in range(lanes):
        drawn = rows + (1 if lane < more else 0)
        lane_key = keyed(key, KEY_NODES, lane, segment)
        low = np.int64(0)
        high = np.int64(bases.shape[1])
        node = np.int64(1)
        while high - low > 1:
            left_draws = _draws_left(drawn, fractions[node], _phase_of_node(lane_key, node))
            middle = (low + high) // 2
            if d < middle:
                drawn = left_draws
                high = middle
                node = 2 * node
            else:
                drawn -= left_draws
                low = middle
                node = 2 * node + 1
        draws[lane] = bases[lane, d] + drawn


# From a draw to its place in a run and in a block, to a sample of the dataset, to tokens of a file.


@kernel
def _run_bounds(row, run):
    """(start, length) of a run in the permuted dataset, which its group of lanes shares.

    The length is what these lanes draw in an epoch, if there is no other dataset: then the first
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
def _num_blocks(row):
    """Blocks of an epoch; the last one may be short."""
    return (row.size + row.block - 1) // row.block


@kernel
def _block_at(row, place, short_slot):
    """(slot, its first place, its end) of a place in the permuted blocks; one block may be short."""
    block = row.block
    short = row.size - (_num_blocks(row) - 1) * block
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
def _block_range(place, start, length, rotation, slot_low, slot_high):
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
def _short_slot(row, dataset_key):
    """The slot of the short block of a dataset in an epoch."""
    blocks = _num_blocks(row)
    return permute_back(blocks - 1, blocks, dataset_key)


@numba.njit(inline="always")
def _draw_location(row, d, lane, draw, epoch_of, short_slots):
    """(key of the epoch, epoch, sample of the dataset, first sample and samples of its part of a
    block, draws left in that part with this one).

    The lane's draws go through the places of its run, from the rotation on and around. A place is
    in a permuted block, and the samples of its part of the block are permuted too. epoch_of,
    short_slots [datasets] keep the last epoch and its short slot.
    """
    blocks = _num_blocks(row)
    group = row.group
    run = lane // group
    run_start, run_length = _run_bounds(row, run)
    place = draw * group + lane % group
    epoch = row.first_epoch + place // run_length
    place = place % run_length
    dataset_key = keyed(row.key, KEY_BLOCKS, row.number, epoch)
    if epoch_of[d] != epoch:
        epoch_of[d] = epoch
        short_slots[d] = _short_slot(row, dataset_key)
    rotation = _bounded(keyed(dataset_key, KEY_ROTATIONS, run, 0), run_length)
    place += rotation
    place = run_start + (place - run_length if place >= run_length else place)
    slot, slot_low, slot_high = _block_at(row, place, short_slots[d])
    low, high = _block_range(place, run_start, run_length, rotation, slot_low, slot_high)
    remaining = high - place
    place = low + permute(place - low, high - low, keyed(dataset_key, KEY_RANGES, low, 0))
    # from a place to the sample: of the block that the permutation puts into this slot
    base = permute(slot, blocks, dataset_key) * row.block - slot_low
    return dataset_key, epoch, base + place, base + low, high - low, remaining


@numba.njit(inline="always")
def _file_part(row, parts, sample):
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
def _part_origin(row, parts, part, dataset_key):
    """The token of the file at which the samples of a part begin in an epoch; it changes every
    epoch.
    """
    offset_key = keyed(dataset_key, KEY_OFFSETS, part - row.first_part, 0)
    return parts[part].start + _bounded(offset_key, parts[part].slack + 1)


@kernel
def locate(samples, tree, datasets, parts, extra, dataset, file, start, stop):
    """Fill dataset, file, start and stop (in tokens) [n] of samples [n].

    For a sample of a remainder, file is -1, and start is negative: its draw, counted from the first
    draw of the lane after the remainder.
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
        dataset_key, _, sample, _, _, _ = _draw_location(row, d, lane, draw, epoch_of, short_slots)
        part = _file_part(row, parts, sample)
        origin = _part_origin(row, parts, part, dataset_key)
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
        _, epoch, sample, first, samples_of_block, remaining = _draw_location(
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
        parts_before = _file_part(row, parts, sample) - _file_part(row, parts, first)
        tokens_before = (sample - first) * row.length + parts_before * extra
        offset[i] = tokens_before * itemsizes[d]
    return count


@kernel
def block_runs(datasets, parts, extra, opened, runs):
    """Fill runs, RUN records, with the tokens of blocks in the order of their offsets; returns how
    many. item: the block's place in `opened`. A block has at most count + 1 runs.
    """
    count = 0
    for i in range(len(opened)):
        row = datasets[opened[i].dataset]
        sample = opened[i].first
        end_sample = sample + opened[i].count
        dataset_key = keyed(row.key, KEY_BLOCKS, row.number, opened[i].epoch)
        part = _file_part(row, parts, sample)
        while sample < end_sample:
            before = parts[part].before
            stop_sample = min(parts[part].end, end_sample)
            origin = _part_origin(row, parts, part, dataset_key)
            runs[count].item = i
            runs[count].file = parts[part].file
            runs[count].start = origin + (sample - before) * row.length
            runs[count].stop = origin + (stop_sample - before) * row.length + extra
            sample = stop_sample
            part += 1
            count += 1
    return count


# The inverse: from tokens of a file to the samples that read them. It undoes `locate` step by step:
# tokens to samples of an epoch, sample to block, the block's slot, the place in its run, the lane and
# its draw, and the row of that draw.


@numba.njit(inline="always")
def _draws_taken(draws, is_left, fraction, phase):
    """How many of the first draws at a node go to one of its halves."""
    left_draws = _draws_left(draws, fraction, phase)
    return left_draws if is_left else draws - left_draws


@numba.njit(inline="always")
def _parent_draw(child, is_left, fraction, phase):
    """The draw at a node that is draw number `child` of one of its halves; NEVER if no draw is.

    Each draw adds one or nothing to a half. A quotient of floats is off by one draw at most, which
    exact counts correct.
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
    while draw > 0 and _draws_taken(draw, is_left, fraction, phase) > child:
        draw -= 1
    while _draws_taken(draw + 1, is_left, fraction, phase) <= child:
        draw += 1
    return draw


@kernel
def row_of_draw(draw, dataset, lane, segment, fractions, num, key):
    """The row within a segment at which a lane makes its draw from a dataset: the inverse of
    `choose`; NEVER where it does not.
    """
    nodes = np.empty(_MAX_DEPTH, np.int64)
    is_left = np.empty(_MAX_DEPTH, np.bool_)
    depth = 0
    low = np.int64(0)
    high = np.int64(num)
    node = np.int64(1)
    while high - low > 1:
        middle = (low + high) // 2
        nodes[depth] = node
        is_left[depth] = dataset < middle
        if is_left[depth]:
            high = middle
            node = 2 * node
        else:
            low = middle
            node = 2 * node + 1
        depth += 1
    lane_key = keyed(key, KEY_NODES, lane, segment)
    for level in range(depth - 1, -1, -1):
        here = nodes[level]
        draw = _parent_draw(draw, is_left[level], fractions[here], _phase_of_node(lane_key, here))
        if draw < 0:
            return NEVER
    return draw


@numba.njit(inline="always")
def _sample_of_draw(lane, d, draw, key, lanes, segment, fractions, bases):
    """The sample that is a lane's draw from a dataset; NEVER where none is, and for what was drawn
    in an earlier segment.
    """
    draw -= bases[lane, d]
    if draw < 0:
        return np.int64(NEVER)
    row = row_of_draw(draw, d, lane, segment, fractions, bases.shape[1], key)
    return row * lanes + lane if row >= 0 else np.int64(NEVER)


@kernel
def samples_of_draws(lane, draw, d, tree, sample):
    """Fill sample [n] with the samples that draws [n] of lanes [n] from dataset d are; NEVER where
    none is.
    """
    key, lanes, segment, fractions, bases = tree
    for i in range(len(draw)):
        sample[i] = _sample_of_draw(lane[i], d, draw[i], key, lanes, segment, fractions, bases)


@numba.njit(inline="always")
def _place_of_sample(row, sample, dataset_key, short_slot):
    """The place among the permuted blocks of an epoch at which a sample stands."""
    blocks = _num_blocks(row)
    number = sample // row.block
    slot = permute_back(number, blocks, dataset_key)
    slot_low = slot * row.block
    if slot > short_slot:
        slot_low -= blocks * row.block - row.size
    return slot_low + sample - number * row.block


@numba.njit(inline="always")
def _lane_of_place(row, place):
    """The lane whose equal share of the permuted dataset has a place; the first lanes have one
    more.
    """
    each = row.size // row.lanes
    more = row.size % row.lanes
    if place < more * (each + 1):
        return place // (each + 1)
    return more + (place - more * (each + 1)) // each


@numba.njit(inline="always")
def _draw_at_place(row, place, epoch, dataset_key, short_slot):
    """(lane, its draw) that reads a place of the permuted blocks, in an epoch that counts from
    `first_epoch`: the inverse of `_draw_location`.
    """
    group = row.group
    run = _lane_of_place(row, place) // group
    run_start, run_length = _run_bounds(row, run)
    rotation = _bounded(keyed(dataset_key, KEY_ROTATIONS, run, 0), run_length)
    _, low, high = _block_at(row, place, short_slot)
    low, high = _block_range(place, run_start, run_length, rotation, low, high)
    place = low + permute_back(place - low, high - low, keyed(dataset_key, KEY_RANGES, low, 0))
    turned = place - run_start - rotation
    if turned < 0:
        turned += run_length
    drawn = epoch * run_length + turned
    return run * group + drawn % group, drawn // group


@kernel
def samples_using(
    d,
    file,
    token_start,
    token_stop,
    first_epoch,
    last_epoch,
    end,
    tree,
    datasets,
    parts,
    extra,
    runs,
):
    """Fill runs, RUN records, with the samples (`item`) before `end` that read tokens [token_start,
    token_stop) of a file of dataset d in epochs [first_epoch, last_epoch), and with those tokens.

    Returns how many there are, which may be more than have room. Epochs count from that of the
    first draw. Samples are in the order of epochs, then of the file; they and `end` count from the
    first of the phase.
    """
    key, lanes, segment, fractions, bases = tree
    count = 0
    row = datasets[d]
    width = row.length + extra
    for epoch in range(first_epoch, last_epoch):
        dataset_key = keyed(row.key, KEY_BLOCKS, row.number, row.first_epoch + epoch)
        short_slot = _short_slot(row, dataset_key)
        for part in range(row.first_part, row.end_part):
            if parts[part].file != file:
                continue
            before = parts[part].before
            origin = _part_origin(row, parts, part, dataset_key)
            # the first sample that ends after token_start, and the end of those before token_stop
            first = max(0, (token_start - origin - width) // row.length + 1)
            last = min(parts[part].end - before, (token_stop - origin - 1) // row.length + 1)
            for number in range(first, last):
                place = _place_of_sample(row, before + number, dataset_key, short_slot)
                lane, draw = _draw_at_place(row, place, epoch, dataset_key, short_slot)
                sample = _sample_of_draw(lane, d, draw, key, lanes, segment, fractions, bases)
                if sample < 0 or sample >= end:
                    continue
                if count < len(runs):
                    sample_start = origin + number * row.length
                    runs[count].item = sample
                    runs[count].file = file
                    runs[count].start = max(token_start, sample_start)
                    runs[count].stop = min(token_stop, sample_start + width)
                count += 1
    return count


# The remainder of open epochs, where samples or lanes change: as intervals of tokens, from there to
# files, and back.


@kernel
def unread_intervals(drawn, datasets, d, intervals):
    """Fill intervals [lanes + 2 * runs] with the unread part of the epochs that have begun when
    each lane has made `drawn` draws from dataset d, int64 [lanes]; returns how many there are.

    Draws are left of lanes that are behind, and of open blocks of the newest epoch. The rest of
    that epoch is whole blocks, in the order of a run: from its rotation on and around.
    """
    row = datasets[d]
    group = row.group
    length = row.length
    newest = np.int64(-1)
    for lane in range(row.lanes):
        if drawn[lane] > 0:
            _, run_length = _run_bounds(row, lane // group)
            newest = max(newest, ((drawn[lane] - 1) * group + lane % group) // run_length)
    if newest < 0:
        return 0
    epoch = row.first_epoch + newest
    dataset_key = keyed(row.key, KEY_BLOCKS, row.number, epoch)
    short_slot = _short_slot(row, dataset_key)
    count = 0
    for run in range(row.lanes // group):
        start, run_length = _run_bounds(row, run)
        last = np.int64(-1)
        for lane in range(run * group, (run + 1) * group):
            if drawn[lane] > 0:
                last = max(last, (drawn[lane] - 1) * group + lane % group)
        rotation = _bounded(keyed(dataset_key, KEY_ROTATIONS, run, 0), run_length)
        turned = last - newest * run_length
        touched = np.int64(0)  # places of the run, from its rotation on, whose blocks were opened
        if turned >= 0:
            place = start + (rotation + turned) % run_length
            _, slot_low, slot_high = _block_at(row, place, short_slot)
            _, range_end = _block_range(place, start, run_length, rotation, slot_low, slot_high)
            touched = turned + range_end - place
        for lane in range(run * group, (run + 1) * group):
            ahead = newest * run_length + touched - lane % group
            stop = (ahead + group - 1) // group
            if drawn[lane] < stop:
                intervals[count].dataset = d
                intervals[count].kind = DRAWS
                intervals[count].which = lane
                intervals[count].low = drawn[lane] * length
                intervals[count].high = stop * length
                count += 1
        # from the rotation to the end of the run, and around from its beginning
        around = run_length - rotation
        for first, end, shift in (
            (touched, around, rotation),
            (max(touched, around), run_length, -around),
        ):
            if first < end:
                intervals[count].dataset = d
                intervals[count].kind = BLOCKS
                intervals[count].which = epoch
                intervals[count].low = (start + first + shift) * length
                intervals[count].high = (start + end + shift) * length
                count += 1
    return count


@kernel
def split_at_blocks(intervals, datasets, split, is_whole):
    """Fill split [6 * intervals] with intervals, cut where stretches of whole, full blocks begin
    and end; returns how many there are. is_whole: whether each is such a stretch.
    """
    count = 0
    for i in range(len(intervals)):
        row = datasets[intervals[i].dataset]
        token = intervals[i].low
        high = intervals[i].high
        if intervals[i].kind == DRAWS:
            split[count] = intervals[i]
            is_whole[count] = False
            count += 1
            continue
        length = row.length
        full = row.block * length
        dataset_key = keyed(row.key, KEY_BLOCKS, row.number, intervals[i].which)
        short_slot = _short_slot(row, dataset_key)
        while token < high:
            slot, first, stop = _block_at(row, token // length, short_slot)
            if slot < short_slot:
                limit = short_slot * full
            elif slot == short_slot:
                limit = stop * length
            else:
                limit = row.size * length
            stretch = np.int64(0)
            if token == first * length:
                stretch = (min(high, limit) - token) // full * full
            tokens = stretch if stretch > 0 else min(high, stop * length) - token
            split[count] = intervals[i]
            split[count].low = token
            split[count].high = token + tokens
            is_whole[count] = stretch > 0
            count += 1
            token += tokens
    return count


@numba.njit(inline="always")
def _interval_at(intervals, token):
    """The interval of a remainder that holds its token `token`."""
    low = np.int64(0)
    high = np.int64(len(intervals))
    while high - low > 1:
        middle = (low + high) // 2
        if intervals[middle].at <= token:
            low = middle
        else:
            high = middle
    return low


@kernel
def slice_intervals(first, stop, intervals, slices):
    """Fill slices [intervals + ranges] with the intervals of tokens [first, stop) [ranges] of a
    remainder; returns how many there are. Ranges ascend.
    """
    count = 0
    for i in range(len(first)):
        token = first[i]
        number = _interval_at(intervals, token)
        while token < stop[i]:
            begin = intervals[number].low + token - intervals[number].at
            tokens = min(stop[i] - token, intervals[number].high - begin)
            slices[count] = intervals[number]
            slices[count].low = begin
            slices[count].high = begin + tokens
            count += 1
            token += tokens
            number += 1
    return count


@kernel
def remainder_runs(at, length, extra, intervals, datasets, parts, runs):
    """Fill runs, RUN records, with the tokens of samples of a remainder, which begin at its tokens
    `at` [samples] and have `length`. item: the sample's place in `at`.

    Returns how many there are, which may be more than have room. The last run of each sample has
    `extra` tokens more.
    """
    count = 0
    epoch_of = np.full(len(datasets), -1, np.int64)
    short_slots = np.zeros(len(datasets), np.int64)
    for i in range(len(at)):
        token = at[i]
        sample_end = at[i] + length
        number = _interval_at(intervals, token)
        while token < sample_end:
            interval = intervals[number]
            d = interval.dataset
            row = datasets[d]
            # tokens of the dataset: where this run begins, and where interval or sample ends
            here = interval.low + token - interval.at
            last = min(interval.high, here + sample_end - token)
            position = here // row.length
            offset = here % row.length
            if interval.kind == DRAWS:
                dataset_key, _, sample, _, _, _ = _draw_location(
                    row, d, interval.which, position, epoch_of, short_slots
                )
                samples = np.int64(1)
            else:
                dataset_key = keyed(row.key, KEY_BLOCKS, row.number, interval.which)
                short_slot = _short_slot(row, dataset_key)
                slot, first, end = _block_at(row, position, short_slot)
                block = permute(slot, _num_blocks(row), dataset_key)
                sample = block * row.block + position - first
                samples = end - position
            part = _file_part(row, parts, sample)
            samples = min(samples, parts[part].end - sample)
            tokens = min(last - here, samples * row.length - offset)
            if count < len(runs):
                origin = _part_origin(row, parts, part, dataset_key)
                start = origin + (sample - parts[part].before) * row.length + offset
                runs[count].item = i
                runs[count].file = parts[part].file
                runs[count].start = start
                runs[count].stop = start + tokens
                if token + tokens == sample_end:
                    runs[count].stop += extra
            count += 1
            token += tokens
            if here + tokens == interval.high:
                number += 1
    return count


@kernel
def epochs_of_intervals(intervals, datasets, first, last):
    """Fill first and last [datasets] with the epochs [first, last) of each dataset that have
    intervals; they are equal if none has.
    """
    first[:] = 0
    last[:] = 0
    for i in range(len(intervals)):
        d = intervals[i].dataset
        row = datasets[d]
        if intervals[i].kind == BLOCKS:
            begin = intervals[i].which
            end = begin
        else:
            lane = intervals[i].which
            group = row.group
            _, run_length = _run_bounds(row, lane // group)
            first_draw = intervals[i].low // row.length
            last_draw = (intervals[i].high - 1) // row.length
            begin = row.first_epoch + (first_draw * group + lane % group) // run_length
            end = row.first_epoch + (last_draw * group + lane % group) // run_length
        first[d] = begin if last[d] == 0 else min(first[d], begin)
        last[d] = max(last[d], end + 1)


@kernel
def remainder_samples_using(
    file,
    token_start,
    token_stop,
    first_epoch,
    last_epoch,
    intervals,
    length,
    datasets,
    parts,
    sample,
):
    """Fill sample [room] with the numbers of a remainder's samples that have tokens of
    [token_start, token_stop) of a file; numbers may repeat. Returns how many there are, which may
    be more than have room.

    first_epoch, last_epoch [datasets]: the epochs to look at. Intervals are sorted by dataset,
    kind, which and low. length: tokens of a sample of the remainder. Cost: two Feistel walks and
    two binary searches for each sample of a dataset that the tokens touch.
    """
    count = np.int64(0)
    for d in range(len(datasets)):
        row = datasets[d]
        for epoch in range(first_epoch[d], last_epoch[d]):
            dataset_key = keyed(row.key, KEY_BLOCKS, row.number, epoch)
            short_slot = _short_slot(row, dataset_key)
            for part in range(row.first_part, row.end_part):
                if parts[part].file != file:
                    continue
                before = parts[part].before
                origin = _part_origin(row, parts, part, dataset_key)
                begin = max(0, token_start - origin)
                end = min((parts[part].end - before) * row.length, token_stop - origin)
                while begin < end:
                    number = begin // row.length
                    tokens = min(end, (number + 1) * row.length) - begin
                    offset = begin - number * row.length
                    place = _place_of_sample(row, before + number, dataset_key, short_slot)
                    lane, draw = _draw_at_place(
                        row, place, epoch - row.first_epoch, dataset_key, short_slot
                    )
                    for kind, which, position in ((BLOCKS, epoch, place), (DRAWS, lane, draw)):
                        first = position * row.length + offset
                        count = _add_samples_with(
                            (d, kind, which, first),
                            first + tokens,
                            intervals,
                            length,
                            sample,
                            count,
                        )
                    begin += tokens
    return count


@numba.njit
def _add_samples_with(begin, stop, intervals, length, sample, count):
    """Add the samples that have the tokens from begin (dataset, kind, which, token) to token
    `stop`; returns how many there are then.
    """
    d, kind, which, first = begin
    # the first such interval that ends after `first`
    i = np.int64(0)
    behind = np.int64(len(intervals))
    while i < behind:
        middle = (i + behind) // 2
        one = intervals[middle]
        if (one.dataset, one.kind, one.which, one.high) <= (d, kind, which, first):
            i = middle + 1
        else:
            behind = middle
    while i < len(intervals):
        one = intervals[i]
        if (one.dataset, one.kind, one.which) != (d, kind, which) or one.low >= stop:
            break
        first_token = one.at + max(first, one.low) - one.low
        last_token = one.at + min(stop, one.high) - one.low - 1
        for number in range(first_token // length, last_token // length + 1):
            if count < len(sample):
                sample[count] = number
            count += 1
        i += 1
    return count
