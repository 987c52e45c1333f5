"""The remainder of open epochs, where samples or lanes change: as intervals of tokens, and from there
to files. order/epoch_remainder.py explains it; `datasets` and `parts` are as in stream.py.
"""

from __future__ import annotations

import numba
import numpy as np

from streammega.kernels.jit import kernel
from streammega.kernels.keyed import bounded, keyed, permute
from streammega.kernels.stream import (
    KEY_BLOCKS,
    KEY_ROTATIONS,
    block_at,
    block_range,
    draw_location,
    file_part,
    find_short_slot,
    lane_of_run,
    num_blocks,
    part_origin,
    run_bounds,
    run_of_lane,
)

# compiled with keyed.py 90779475
# compiled with stream.py 2a8d2819

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
            _, run_length = run_bounds(row, run_of_lane(row, lane))
            newest = max(newest, ((drawn[lane] - 1) * group + lane % group) // run_length)
    if newest < 0:
        return 0
    epoch = row.first_epoch + newest
    dataset_key = keyed(row.key, KEY_BLOCKS, row.number, epoch)
    short_slot = find_short_slot(row, dataset_key)
    count = 0
    for run in range(row.lanes // group):
        start, run_length = run_bounds(row, run)
        last = np.int64(-1)
        first_lane = np.int64(0) if group > 1 else lane_of_run(row, run)
        for lane in range(first_lane, first_lane + group):
            if drawn[lane] > 0:
                last = max(last, (drawn[lane] - 1) * group + lane % group)
        rotation = bounded(keyed(dataset_key, KEY_ROTATIONS, run, 0), run_length)
        turned = last - newest * run_length
        touched = np.int64(0)  # places of the run, from its rotation on, whose blocks were opened
        if turned >= 0:
            place = start + (rotation + turned) % run_length
            _, slot_low, slot_high = block_at(row, place, short_slot)
            _, range_end = block_range(place, start, run_length, rotation, slot_low, slot_high)
            touched = turned + range_end - place
        for lane in range(first_lane, first_lane + group):
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
    """Fill split [6 * intervals] with the same intervals, cut where stretches of whole, full blocks
    begin and end; returns how many there are. is_whole: whether each is such a stretch.

    Intervals of DRAWS stay. One of BLOCKS is cut into the rest of a block, a stretch, the short
    block, a stretch, and the beginning of a block. Any of these may be missing.
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
        short_slot = find_short_slot(row, dataset_key)
        while token < high:
            slot, first, stop = block_at(row, token // length, short_slot)
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
            # tokens of the interval's kind: where this run begins, and where interval or sample ends
            here = interval.low + token - interval.at
            last = min(interval.high, here + sample_end - token)
            position = here // row.length
            offset = here % row.length
            if interval.kind == DRAWS:
                dataset_key, _, sample, _, _, _ = draw_location(
                    row, d, interval.which, position, epoch_of, short_slots
                )
                samples = np.int64(1)
            else:
                dataset_key = keyed(row.key, KEY_BLOCKS, row.number, interval.which)
                short_slot = find_short_slot(row, dataset_key)
                slot, first, end = block_at(row, position, short_slot)
                block = permute(slot, num_blocks(row), dataset_key)
                sample = block * row.block + position - first
                samples = end - position
            part = file_part(row, parts, sample)
            samples = min(samples, parts[part].end - sample)
            tokens = min(last - here, samples * row.length - offset)
            if count < len(runs):
                origin = part_origin(row, parts, part, dataset_key)
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
