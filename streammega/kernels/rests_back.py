"""The rest of epochs backwards: which of its samples have given tokens of a file. Intervals and
grids are those of kernels/rests.py; `at` [intervals] is the token of the rest at which each begins.

Cost: for each sample of a grid that the tokens touch, two Feistel walks and two binary searches.
"""

from __future__ import annotations

import numba
import numpy as np

from streammega.kernels.jit import kernel
from streammega.kernels.keyed import BLOCKS, keyed, permute_back
from streammega.kernels.lanes import run_bounds, slot_of, start_of
from streammega.kernels.lanes_back import draw_of_place, slot_place_of
from streammega.kernels.rests import BLOCKS_OF, DRAWS_OF


@kernel
def epochs_of_intervals(
    grid, kind, which, low, high, lanes, epochs, sizes, groups, lengths, first, last,
):  # fmt: skip
    """Fill first and last [grids] with the epochs [first, last) of each grid that intervals are
    of: none where they are equal.
    """
    first[:] = 0
    last[:] = 0
    for i in range(len(grid)):
        g = grid[i]
        if kind[i] == BLOCKS_OF:
            begin = which[i]
            end = which[i]
        else:
            lane = which[i]
            group = groups[g]
            _, run_length = run_bounds(lane // group, lanes[g], group, sizes[g])
            first_draw = low[i] // lengths[g]
            last_draw = (high[i] - 1) // lengths[g]
            begin = epochs[g] + (first_draw * group + lane % group) // run_length
            end = epochs[g] + (last_draw * group + lane % group) // run_length
        first[g] = begin if last[g] == 0 else min(first[g], begin)
        last[g] = max(last[g], end + 1)


@kernel
def rest_samples_with(
    file, token_start, token_stop, first_epoch, last_epoch, grid, kind, which, low, high, at, length,
    keys, lanes, numbers, epochs, sizes, blocks_of, groups, lengths, firsts, files, starts, slacks, before, ends,
    sample,
):  # fmt: skip
    """Fill sample [room] with those of a rest, by number, that have tokens of [token_start,
    token_stop) of a file; returns how many they are, however many have room. One may come again.

    first_epoch, last_epoch [grids]: the epochs that are looked at. Intervals are sorted by grid,
    kind, which and low. length: tokens of a sample of the rest.
    """
    found = np.int64(0)
    for g in range(len(keys)):
        size = sizes[g]
        block = blocks_of[g]
        blocks = (size + block - 1) // block
        for epoch in range(first_epoch[g], last_epoch[g]):
            dataset_key = keyed(keys[g], BLOCKS, numbers[g], epoch)
            short_slot = permute_back(blocks - 1, blocks, dataset_key)
            for part in range(firsts[g], firsts[g + 1]):
                if files[part] != file:
                    continue
                origin = start_of(dataset_key, part, g, firsts, starts, slacks)
                begin = max(0, token_start - origin)
                end = min((ends[part] - before[part]) * lengths[g], token_stop - origin)
                while begin < end:
                    grain = begin // lengths[g]
                    grain_start = grain * lengths[g]
                    grain_stop = min(end, grain_start + lengths[g])
                    offset = begin - grain_start
                    tokens = grain_stop - begin
                    place = slot_place_of(
                        before[part] + grain, dataset_key, short_slot, size, block
                    )
                    lane, draw = draw_of_place(
                        place, epoch - epochs[g], dataset_key, short_slot, lanes[g], size, block,
                        groups[g],
                    )  # fmt: skip
                    found = _samples_in(
                        g, BLOCKS_OF, epoch, place * lengths[g] + offset, tokens,
                        grid, kind, which, low, high, at, length, sample, found,
                    )  # fmt: skip
                    found = _samples_in(
                        g, DRAWS_OF, lane, draw * lengths[g] + offset, tokens,
                        grid, kind, which, low, high, at, length, sample, found,
                    )  # fmt: skip
                    begin = grain_stop
    return found


@numba.njit
def _samples_in(
    g, space, number, first, tokens, grid, kind, which, low, high, at, length, sample, found
):
    """Add the samples that have tokens [first, first + tokens) of one space of a grid; returns how
    many there are then.
    """
    stop = first + tokens
    # the first interval of that space that ends behind `first`
    i = np.int64(0)
    behind = np.int64(len(grid))
    while i < behind:
        middle = (i + behind) // 2
        if (grid[middle], kind[middle], which[middle], high[middle]) <= (g, space, number, first):
            i = middle + 1
        else:
            behind = middle
    while i < len(grid) and (grid[i], kind[i], which[i]) == (g, space, number) and low[i] < stop:
        here = at[i] + max(first, low[i]) - low[i]
        end = at[i] + min(stop, high[i]) - low[i]
        for one in range(here // length, (end - 1) // length + 1):
            if found < len(sample):
                sample[found] = one
            found += 1
        i += 1
    return found


@kernel
def run_bounds_within(
    grid, kind, which, low, high, at, keys, numbers, sizes, blocks_of, lengths, bound
):
    """Fill bound [room] with the tokens of a rest at which a run ends within an interval because a
    block or a draw does; returns how many they are, however many have room.
    """
    found = 0
    for i in range(len(grid)):
        g = grid[i]
        length = lengths[g]
        size = sizes[g]
        block = blocks_of[g]
        blocks = (size + block - 1) // block
        short_slot = np.int64(-1)
        if kind[i] == BLOCKS_OF:
            dataset_key = keyed(keys[g], BLOCKS, numbers[g], which[i])
            short_slot = permute_back(blocks - 1, blocks, dataset_key)
        token = low[i]
        while True:
            grain = token // length
            if kind[i] == BLOCKS_OF:
                _, _, end = slot_of(grain, size, block, blocks, short_slot)
                token = end * length
            else:
                token = (grain + 1) * length
            if token >= high[i]:
                break
            if found < len(bound):
                bound[found] = at[i] + token - low[i]
            found += 1
    return found


@kernel
def parts_within_blocks(g, epoch, keys, numbers, sizes, blocks_of, lengths, firsts, before, token):
    """Fill token [parts of the grid] with where, among the permuted blocks of an epoch, a part
    begins in the middle of a block; returns how many do.
    """
    size = sizes[g]
    block = blocks_of[g]
    blocks = (size + block - 1) // block
    dataset_key = keyed(keys[g], BLOCKS, numbers[g], epoch)
    short_slot = permute_back(blocks - 1, blocks, dataset_key)
    found = 0
    for part in range(firsts[g], firsts[g + 1]):
        if before[part] % block != 0:
            place = slot_place_of(before[part], dataset_key, short_slot, size, block)
            token[found] = place * lengths[g]
            found += 1
    return found
