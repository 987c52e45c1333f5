"""The stream order: from sample ids to places, by closed forms and keyed bijections. See
order/lanes.py for what it means.

Cost: O(log datasets) multiplications and two short Feistel walks per sample; nothing is looked up
but a few sizes.

What the arrays hold that describe an order; all int64 but `fractions`:

    rows [segments]                      the first row of each segment of the blend schedule
    segment                              the number of the first of them in keys: those of the
                                         phases before have the smaller ones
    fractions [segments, nodes] uint64   of the draws at a node, how many go left; 2**-44ths
    bases [segments, lanes, datasets]    draws of a lane from a dataset before the segment, less
                                         its share of what former epochs left
    numbers [datasets]                   the number of a dataset in keys: the same in every phase
    epochs [datasets]                    the number in keys of the epoch that draws begin with
    sizes [datasets]                     samples of one epoch
    blocks_of [datasets]                 samples of a block
    groups [datasets]                    lanes that share a run
    firsts [datasets + 1]                the first part of each dataset; parts lie end to end
    files [parts]                        the file of a part, within its dataset
    starts [parts]                       the token of the file that a part begins at
    slacks [parts]                       tokens of a part that no sample has; an epoch's samples
                                         begin up to so many later
    before, ends [parts]                 samples of the dataset before a part, and up to its end

`length` is tokens from one sample to the next, `width` tokens of a sample, with the extra one. `d`
is the place of a dataset, `num` how many there are, `mine` the number of a lane among a reader's.
Samples are counted from the first of the phase.
"""

from __future__ import annotations

import numba
import numpy as np

from streammega.kernels.jit import kernel
from streammega.kernels.mix import GOLDEN, mix_one

# Everything below makes orders that checkpoints count in: no constant here ever changes.

FRACTION_BITS = 44
"""Fixed point of a blend's fractions: exact for rows below 2**41."""
_TURNS = 6
"""Turns of a Feistel walk."""
_SHUFFLED = 32
"""Permutations of up to so many are followed shuffles: a walk over so few is measurably uneven."""
_TURN_STEP = np.uint64(0xD1342543DE82EF95)
_TURN_FACTOR = np.uint64(0xBF58476D1CE4E5B9)
"""Odd multipliers: keys of turns that differ in many bits, and upper bits that depend on all."""
_ONE = np.uint64(1)
_WORD = np.uint64(32)
_HALF = np.uint64(FRACTION_BITS // 2)
_LOW = np.uint64((1 << (FRACTION_BITS // 2)) - 1)
_DEEPEST = 64
"""Room for the nodes that wait while a tree is walked: one a level, and there are no 2**64
datasets.
"""
# What a keyed draw is for, so that no two uses share a stream.
BLOCKS = 1
PIECES = 2
ROTATIONS = 3
PHASES = 4
NODES = 5


# --- keys and permutations ---


@kernel
def keyed(key, purpose, a, b):
    """A 64-bit key for (key, purpose, a, b)."""
    state = mix_one(np.uint64(key) + np.uint64(purpose) * GOLDEN)
    state = mix_one(state + np.uint64(a) * GOLDEN + _ONE)
    return mix_one(state + np.uint64(b) * GOLDEN + _ONE)


@numba.njit(inline="always")
def _round(key, value, turn):
    """The round function of the Feistel walk: 64 bits of which the upper half is used."""
    bits = (key + np.uint64(turn) * _TURN_STEP) ^ (np.uint64(value) * GOLDEN)
    bits ^= bits >> _WORD
    return bits * _TURN_FACTOR


@numba.njit(inline="always")
def below(bits, limit):
    """64 random bits scaled to [0, limit), for limits up to 2**62, by their upper halves."""
    if limit <= 0xFFFFFFFF:
        return np.int64(((bits >> _WORD) * np.uint64(limit)) >> _WORD)
    return np.int64(bits % np.uint64(limit))


@kernel
def permute(value, size, key):
    """The image of `value` under a keyed permutation of range(size): a Feistel walk on an almost
    square domain.

    The domain has `right_size * left_size` numbers, a few more than `size`: a walk that ends beyond
    goes on from there, as often as need be. Few turns are not random enough on tiny domains: there
    the place is followed through the swaps of a shuffle.
    """
    key = np.uint64(key)
    if size <= _SHUFFLED:
        for i in range(size - 1, 0, -1):
            j = below(mix_one(key + np.uint64(i)), i + 1)
            if value == i:
                value = j
            elif value == j:
                value = i
        return value
    left_size = np.int64(np.ceil(np.sqrt(np.float64(size))))
    right_size = (size + left_size - 1) // left_size
    while True:
        left = value % left_size
        right = value // left_size
        for turn in range(0, _TURNS, 2):
            left += below(_round(key, right, turn), left_size)
            left -= left_size if left >= left_size else 0
            right += below(_round(key, left, turn + 1), right_size)
            right -= right_size if right >= right_size else 0
        value = right * left_size + left
        if value < size:
            return value


@kernel
def permute_back(value, size, key):
    """The inverse of `permute`: the same turns, or swaps, backwards."""
    key = np.uint64(key)
    if size <= _SHUFFLED:
        for i in range(1, size):
            j = below(mix_one(key + np.uint64(i)), i + 1)
            if value == i:
                value = j
            elif value == j:
                value = i
        return value
    left_size = np.int64(np.ceil(np.sqrt(np.float64(size))))
    right_size = (size + left_size - 1) // left_size
    while True:
        left = value % left_size
        right = value // left_size
        for back in range(0, _TURNS, 2):
            turn = _TURNS - 2 - back
            right -= below(_round(key, left, turn + 1), right_size)
            right += right_size if right < 0 else 0
            left -= below(_round(key, right, turn), left_size)
            left += left_size if left < 0 else 0
        value = right * left_size + left
        if value < size:
            return value


# --- which dataset a lane draws from ---


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
def _draw_of(sample, lanes, key, segment, rows, fractions, bases, num):
    """(lane, dataset, which draw of the lane from that dataset) of a sample."""
    lane = sample % lanes
    row = sample // lanes
    s = len(rows) - 1
    while rows[s] > row:
        s -= 1
    d, draw = choose(row - rows[s], lane, segment + s, fractions[s], num, key)
    return lane, d, draw + bases[s, lane, d]


# --- where a draw lies: run, block, piece, sample ---


@kernel
def run_bounds(run, lanes, group, num):
    """(start, length) of a run in the permuted dataset of `num` samples; `group` lanes share it.

    Lengths are what the lanes of the run draw from the first `num` samples of a lone dataset, so
    that those are one epoch.
    """
    first_lane = run * group
    start = first_lane * (num // lanes) + min(num % lanes, first_lane)
    end = (first_lane + group) * (num // lanes) + min(num % lanes, first_lane + group)
    return start, end - start


@kernel
def piece_of(place, start, length, rotation, slot_low, slot_high):
    """[low, high) of the piece that holds a place: its block cut to its run, and where the run's
    rotation begins.
    """
    low = max(slot_low, start)
    high = min(slot_high, start + length)
    cut = start + rotation
    if place >= cut:
        low = max(low, cut)
    else:
        high = min(high, cut)
    return low, high


@kernel
def slot_of(place, num, block, blocks, short_slot):
    """(slot, its first place, the place after its last) of a place in the permuted blocks, one of
    which is short.
    """
    short = num - (blocks - 1) * block
    before = short_slot * block
    if place < before:
        slot = place // block
        return slot, slot * block, (slot + 1) * block
    if place < before + short:
        return short_slot, before, before + short
    slot = short_slot + 1 + (place - before - short) // block
    low = (slot - 1) * block + short
    return slot, low, low + block


@numba.njit(inline="always")
def _short_slot(d, epoch, key, blocks, epoch_of, short_slots):
    """Where the short block of dataset d lies among the permuted ones, computed once an epoch:
    epoch_of, short_slots [datasets] keep the epoch computed last, and its answer.
    """
    if epoch_of[d] != epoch:
        epoch_of[d] = epoch
        short_slots[d] = permute_back(blocks - 1, blocks, key)
    return short_slots[d]


@numba.njit(inline="always")
def place_of(
    lane, d, number, first_epoch, draw, lanes, key, size, block, group, epoch_of, short_slots
):
    """(epoch's key, epoch, sample of the dataset, first sample and samples of its piece, draws left
    of it with this one).

    The lane's draws go through the run's places in order, from its rotation on and around; a place
    is one of a permuted block, and within its piece another sample stands there.
    """
    blocks = (size + block - 1) // block
    run = lane // group
    run_start, run_length = run_bounds(run, lanes, group, size)
    place = draw * group + lane % group
    epoch = first_epoch + place // run_length
    place = place % run_length
    dataset_key = keyed(key, BLOCKS, number, epoch)
    short = _short_slot(d, epoch, dataset_key, blocks, epoch_of, short_slots)
    rotation = below(keyed(dataset_key, ROTATIONS, run, 0), run_length)
    place += rotation
    place = run_start + (place - run_length if place >= run_length else place)
    slot, slot_low, slot_high = slot_of(place, size, block, blocks, short)
    low, high = piece_of(place, run_start, run_length, rotation, slot_low, slot_high)
    left = high - place
    place = low + permute(place - low, high - low, keyed(dataset_key, PIECES, low, 0))
    # from a place to the sample: the block that the permutation brought to this slot
    base = permute(slot, blocks, dataset_key) * block - slot_low
    return dataset_key, epoch, base + place, base + low, high - low, left


@numba.njit(inline="always")
def part_of(sample, d, firsts, before):
    """The part of dataset d that has a sample, among the parts of all datasets."""
    first = firsts[d]
    return np.searchsorted(before[first : firsts[d + 1]], sample, side="right") - 1 + first


@numba.njit(inline="always")
def start_of(dataset_key, part, d, firsts, starts, slacks):
    """The token of the file at which the samples of a part begin in an epoch: another one each."""
    phase = below(keyed(dataset_key, PHASES, part - firsts[d], 0), slacks[part] + 1)
    return starts[part] + phase


@kernel
def locate_stream(
    samples, lanes, key, segment, rows, fractions, bases, numbers, epochs, sizes, blocks_of, groups,
    firsts, files, starts, slacks, before, length, width, dataset, file, start, stop,
) -> None:  # fmt: skip
    """Fill dataset, file, start and stop (in tokens) [n] of samples [n].

    Of a sample of the rest of former epochs (see order/rests.py) file is -1, and start how many
    samples before its first own draw the lane is, negative.
    """
    num = len(sizes)
    epoch_of = np.full(num, -1, np.int64)
    short_slots = np.zeros(num, np.int64)
    for i in range(len(samples)):
        lane, d, draw = _draw_of(samples[i], lanes, key, segment, rows, fractions, bases, num)
        if draw < 0:
            dataset[i] = d
            file[i] = -1
            start[i] = draw
            continue
        dataset_key, _, sample, _, _, _ = place_of(
            lane, d, numbers[d], epochs[d], draw, lanes, key, sizes[d], blocks_of[d], groups[d],
            epoch_of, short_slots,
        )  # fmt: skip
        part = part_of(sample, d, firsts, before)
        part_start = start_of(dataset_key, part, d, firsts, starts, slacks)
        dataset[i] = d
        file[i] = files[part]
        start[i] = part_start + (sample - before[part]) * length
        stop[i] = start[i] + width


# --- pieces that are fetched whole ---


@kernel
def follow_pieces(
    samples, lanes, key, segment, rows, fractions, bases, numbers, epochs, sizes, blocks_of, groups,
    firsts, before, length, width, itemsizes, whole, local, open_piece, open_epoch, open_slot, open_left, free,
    slot, offset, new_dataset, new_epoch, new_first, new_count, new_uses, new_row,
):  # fmt: skip
    """Which piece each sample lies in: its slot and the byte offset of the sample in it, -1 for
    datasets not in `whole`.

    samples, slot, offset [n]. itemsizes (bytes of a token), whole (bool) [datasets]. local [lanes]:
    the number of each lane among the reader's, -1 for others. The state of each (lane of the
    reader, dataset): open_piece (its first sample), open_epoch, open_slot (-1: none is open),
    open_left (draws of the piece that are still to come).

    A piece that was not open takes the next slot of `free` [n] and an entry of the new_* arrays
    [n]: its dataset, epoch, first sample, samples, draws to come, and the sample that opened it.
    Returns how many did, or -1 - i if sample i lies in none of the reader's lanes.
    """
    num = len(sizes)
    opened = 0
    epoch_of = np.full(num, -1, np.int64)
    short_slots = np.zeros(num, np.int64)
    for i in range(len(samples)):
        lane, d, draw = _draw_of(samples[i], lanes, key, segment, rows, fractions, bases, num)
        slot[i] = -1
        if not whole[d] or draw < 0:
            continue
        _, epoch, sample, first, count, left = place_of(
            lane, d, numbers[d], epochs[d], draw, lanes, key, sizes[d], blocks_of[d], groups[d],
            epoch_of, short_slots,
        )  # fmt: skip
        mine = local[lane]
        if mine < 0:
            return -1 - i  # as an index it would be the state of another lane
        if open_slot[mine, d] < 0 or open_piece[mine, d] != first or open_epoch[mine, d] != epoch:
            open_piece[mine, d] = first
            open_epoch[mine, d] = epoch
            open_slot[mine, d] = free[opened]
            new_dataset[opened] = d
            new_epoch[opened] = epoch
            new_first[opened] = first
            new_count[opened] = count
            new_uses[opened] = left
            new_row[opened] = i
            opened += 1
        open_left[mine, d] = left - 1
        slot[i] = open_slot[mine, d]
        if left == 1:
            open_slot[mine, d] = -1
        # Runs of samples within a part lie end to end, the last of a part with its extra token.
        samples_before = before[firsts[d] : firsts[d + 1]]
        part = np.searchsorted(samples_before, sample, side="right")
        parts_before = part - np.searchsorted(samples_before, first, side="right")
        tokens_before = (sample - first) * length + parts_before * (width - length)
        offset[i] = tokens_before * itemsizes[d]
    return opened


@kernel
def piece_runs(
    key, numbers, dataset, epoch, first, count, firsts, files, starts, slacks, before, ends,
    length, width, piece, file, start, stop,
):  # fmt: skip
    """The runs of tokens that make up pieces: piece, file, start, stop of each; returns how many.
    In the order of their offsets.

    dataset, epoch, first, count [pieces]: as `follow_pieces` runs them. The outputs have room for
    count + 1 runs of each piece.
    """
    runs = 0
    for i in range(len(dataset)):
        d = dataset[i]
        sample = first[i]
        end_sample = first[i] + count[i]
        dataset_key = keyed(key, BLOCKS, numbers[d], epoch[i])
        part = part_of(sample, d, firsts, before)
        while sample < end_sample:
            stop_sample = min(ends[part], end_sample)
            part_start = start_of(dataset_key, part, d, firsts, starts, slacks)
            piece[runs] = i
            file[runs] = files[part]
            start[runs] = part_start + (sample - before[part]) * length
            stop[runs] = part_start + (stop_sample - 1 - before[part]) * length + width
            sample = stop_sample
            part += 1
            runs += 1
    return runs
