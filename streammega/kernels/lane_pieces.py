"""The stream order, piece by piece: which piece each sample of a reader lies in, and the runs of
tokens that pieces consist of, for readers that fetch these whole.

Arrays and letters are those of lanes.py.
"""

from __future__ import annotations

import numpy as np

from streammega.kernels.jit import kernel
from streammega.kernels.keyed import (
    BLOCKS,
    keyed,
)
from streammega.kernels.lane_draws import draw_of
from streammega.kernels.lanes import part_of, place_of, start_of


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
        lane, d, draw = draw_of(samples[i], lanes, key, segment, rows, fractions, bases, num)
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
