"""What an epoch in progress has left where samples or lanes change: as intervals of tokens, and from
there to files. See order/rests.py for what it means.

Arrays that describe grids (a dataset in the samples and lanes of one phase), end to end:

    keys [grids] uint64                  of the phase's order
    lanes, numbers, epochs [grids]       lanes; the dataset's number and first epoch, in keys
    sizes, blocks, groups [grids]        as in kernels/lanes.py
    lengths [grids]                      tokens of a sample
    firsts [grids + 1]                   the first part of each; files, starts, slacks, before, ends
                                         [parts] as in kernels/lanes.py

Arrays that describe intervals of tokens [low, high): grid, kind, which, low, high [intervals]. In
BLOCKS_OF an epoch they count over its blocks in their permuted order, forwards in each; in DRAWS_OF
a lane they count over its draws.
"""

from __future__ import annotations

import numpy as np

from streammega.kernels.jit import kernel
from streammega.kernels.keyed import BLOCKS, ROTATIONS, below, keyed, permute, permute_back
from streammega.kernels.lanes import part_of, piece_of, place_of, run_bounds, slot_of, start_of

BLOCKS_OF = 0
DRAWS_OF = 1


@kernel
def unread_of(
    drawn, lanes, key, number, first_epoch, size, block, group, length, kind, which, low, high,
):  # fmt: skip
    """Fill kind, which, low, high [lanes + 2 * runs] with what is left of the epochs that have begun
    when each lane has made `drawn` draws, int64 [lanes]; returns how many intervals that are.

    Lanes that lag behind, and the pieces that are open in the newest epoch, leave draws; the rest
    of that epoch is whole pieces, in a run's order from its rotation on and around.
    """
    blocks = (size + block - 1) // block
    runs = lanes // group
    newest = np.int64(-1)
    for lane in range(lanes):
        if drawn[lane] > 0:
            _, run_length = run_bounds(lane // group, lanes, group, size)
            newest = max(newest, ((drawn[lane] - 1) * group + lane % group) // run_length)
    if newest < 0:
        return 0
    epoch = first_epoch + newest
    dataset_key = keyed(key, BLOCKS, number, epoch)
    short = permute_back(blocks - 1, blocks, dataset_key)
    found = 0
    for run in range(runs):
        start, run_length = run_bounds(run, lanes, group, size)
        last = np.int64(-1)
        for lane in range(run * group, (run + 1) * group):
            if drawn[lane] > 0:
                last = max(last, (drawn[lane] - 1) * group + lane % group)
        rotation = below(keyed(dataset_key, ROTATIONS, run, 0), run_length)
        turned = last - newest * run_length
        touched = np.int64(0)  # places of the run, from its rotation on, whose pieces were opened
        if turned >= 0:
            place = start + (rotation + turned) % run_length
            _, slot_low, slot_high = slot_of(place, size, block, blocks, short)
            _, piece_end = piece_of(place, start, run_length, rotation, slot_low, slot_high)
            touched = turned + piece_end - place
        for lane in range(run * group, (run + 1) * group):
            ahead = newest * run_length + touched - lane % group
            stop = (ahead + group - 1) // group
            if drawn[lane] < stop:
                kind[found] = DRAWS_OF
                which[found] = lane
                low[found] = drawn[lane] * length
                high[found] = stop * length
                found += 1
        # from the rotation to the end of the run, and around from its beginning
        around = run_length - rotation
        for first, end, shift in (
            (touched, around, rotation),
            (max(touched, around), run_length, -around),
        ):
            if first < end:
                kind[found] = BLOCKS_OF
                which[found] = epoch
                low[found] = (start + first + shift) * length
                high[found] = (start + end + shift) * length
                found += 1
    return found


@kernel
def cut_by_blocks(
    grid, kind, which, low, high, keys, numbers, sizes, blocks_of, lengths,
    source, whole, new_low, new_high,
):  # fmt: skip
    """Intervals cut where stretches of whole, full blocks begin and end: source (the interval),
    whole (whether it is such a stretch), new_low, new_high [6 * intervals]; returns how many.
    """
    found = 0
    for i in range(len(grid)):
        g = grid[i]
        if kind[i] == DRAWS_OF:
            source[found] = i
            whole[found] = False
            new_low[found] = low[i]
            new_high[found] = high[i]
            found += 1
            continue
        size = sizes[g]
        block = blocks_of[g]
        length = lengths[g]
        full = block * length
        blocks = (size + block - 1) // block
        short = permute_back(blocks - 1, blocks, keyed(keys[g], BLOCKS, numbers[g], which[i]))
        token = low[i]
        while token < high[i]:
            slot, first, stop = slot_of(token // length, size, block, blocks, short)
            if slot < short:
                limit = short * full
            elif slot == short:
                limit = stop * length
            else:
                limit = size * length
            stretch = np.int64(0)
            if token == first * length:
                stretch = (min(high[i], limit) - token) // full * full
            tokens = stretch if stretch > 0 else min(high[i], stop * length) - token
            source[found] = i
            whole[found] = stretch > 0
            new_low[found] = token
            new_high[found] = token + tokens
            found += 1
            token += tokens
    return found


@kernel
def slices_of(first, stop, ends, low, high, source, new_low, new_high):
    """The intervals that tokens [first, stop) [ranges] of all intervals end to end consist of:
    source, new_low, new_high [intervals + ranges]; returns how many. Ranges ascend.

    ends [intervals]: tokens up to the end of each.
    """
    found = 0
    for i in range(len(first)):
        token = first[i]
        at = np.searchsorted(ends, token, side="right")
        while token < stop[i]:
            before = ends[at] - (high[at] - low[at])
            end = min(stop[i], ends[at])
            source[found] = at
            new_low[found] = low[at] + token - before
            new_high[found] = low[at] + end - before
            found += 1
            token = end
            at += 1
    return found


@kernel
def rest_rows(
    at, length, extra, grid, kind, which, low, high, tokens_before, keys, lanes, numbers, epochs,
    sizes, blocks_of, groups, lengths, firsts, files, starts, slacks, before, ends,
    sample, file, start, stop,
):  # fmt: skip
    """The runs of tokens of samples of a rest, each `length` tokens from token at [samples] of it
    on: sample, file, start, stop [room]; returns how many they are, however many have room.

    tokens_before [intervals]. The last run of each sample has `extra` tokens more.
    """
    found = 0
    room = len(sample)
    epoch_of = np.full(len(sizes), -1, np.int64)
    short_slots = np.zeros(len(sizes), np.int64)
    for i in range(len(at)):
        token = at[i]
        sample_end = at[i] + length
        interval = np.searchsorted(tokens_before, token, side="right") - 1
        while token < sample_end:
            g = grid[interval]
            # tokens of the grid: where this run begins, and where the interval or the sample ends
            here = low[interval] + token - tokens_before[interval]
            last = min(high[interval], here + sample_end - token)
            grain = here // lengths[g]
            offset = here % lengths[g]
            if kind[interval] == DRAWS_OF:
                lane = which[interval]
                dataset_key, _, place, _, _, _ = place_of(
                    lane, g, numbers[g], epochs[g], grain, lanes[g], keys[g], sizes[g],
                    blocks_of[g], groups[g], epoch_of, short_slots,
                )  # fmt: skip
                grains = np.int64(1)
            else:
                dataset_key = keyed(keys[g], BLOCKS, numbers[g], which[interval])
                blocks = (sizes[g] + blocks_of[g] - 1) // blocks_of[g]
                short = permute_back(blocks - 1, blocks, dataset_key)
                slot, first, end = slot_of(grain, sizes[g], blocks_of[g], blocks, short)
                place = permute(slot, blocks, dataset_key) * blocks_of[g] + grain - first
                grains = end - grain
            part = part_of(place, g, firsts, before)
            grains = min(grains, ends[part] - place)
            tokens = min(last - here, grains * lengths[g] - offset)
            if found < room:
                origin = start_of(dataset_key, part, g, firsts, starts, slacks)
                sample[found] = i
                file[found] = files[part]
                start[found] = origin + (place - before[part]) * lengths[g] + offset
                stop[found] = start[found] + tokens
                if token + tokens == sample_end:
                    stop[found] += extra
            found += 1
            token += tokens
            if here + tokens == high[interval]:
                interval += 1
    return found
