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
from streammega.kernels.keyed import (
    BLOCKS,
    PHASES,
    PIECES,
    ROTATIONS,
    below,
    keyed,
    permute,
    permute_back,
)
from streammega.kernels.lane_draws import draw_of


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
        lane, d, draw = draw_of(samples[i], lanes, key, segment, rows, fractions, bases, num)
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
