"""Documents that are not to be seen: which columns of samples hold tokens of them, and writing there
something else.
"""

from __future__ import annotations

import numpy as np

from streammega.kernels.jit import kernel

FILE_STRIDE = 1 << 44
"""Tokens from one file to the next where all are laid end to end. No file has as many, and there is
room for half a million files: `samples/skipped_checks.py` asks both.
"""


@kernel
def find_skipped(starts, stops, since, file, start, size, column, row, sample, found):
    """Columns of samples that hold tokens of skipped stretches; returns how many stretches of them
    there are.

    starts, stops (rising, disjoint), since [stretches]: tokens [starts[n], stops[n]) of all files,
    FILE_STRIDE apart, are skipped in samples since[n] and later. Run r, of each a value: tokens
    [start, start + size) of a file go to column `column` and on of a row; the row is the sample of
    that number. Fills found int64 [3, room]: the row, its first column, and the one behind the last,
    as far as there is room. Cost: a binary search for each run, then one step for each stretch in
    it.
    """
    room = found.shape[1]
    count = 0
    for r in range(len(file)):
        if not size[r]:
            continue  # it lies within a stretch, perhaps, but takes nothing of it into the sample
        begin = file[r] * FILE_STRIDE + start[r]
        end = begin + size[r]
        first_column = column[r] - begin
        n = np.searchsorted(stops, begin, "right")
        while n < len(starts) and starts[n] < end:
            if since[n] <= sample[r]:
                if count < room:
                    found[0, count] = row[r]
                    found[1, count] = first_column + max(starts[n], begin)
                    found[2, count] = first_column + min(stops[n], end)
                count += 1
            n += 1
    return count


@kernel
def fill_columns(found, before, behind, value, out) -> None:
    """Write `value` to out [rows, width] in columns [low - before, high + behind) of each found row,
    as `find_skipped` gives them; columns outside of `out` are passed over.
    """
    width = out.shape[1]
    for k in range(found.shape[1]):
        low = max(found[1, k] - before, 0)
        high = min(found[2, k] + behind, width)
        for c in range(low, high):
            out[found[0, k], c] = value
