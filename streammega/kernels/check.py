"""A look at every token of a dataset."""

from __future__ import annotations

import numpy as np

from streammega.kernels.jit import kernel


@kernel
def id_range(ids):
    """(least, greatest) of at least one id. Cost: one read, vectorised in the ids' own width."""
    low = ids[0]
    high = ids[0]
    for k in range(len(ids)):
        low = min(low, ids[k])
        high = max(high, ids[k])
    return np.int64(low), np.int64(high)


@kernel
def wrong_ends(ids, first, ends, eod):
    """(how many, the first of) `ends` at which ids, that begin at token `first`, do not hold `eod`;
    (0, -1) if all do.
    """
    wrong = 0
    first_wrong = -1
    for k in range(len(ends)):
        if ids[ends[k] - first] != eod:
            if wrong == 0:
                first_wrong = k
            wrong += 1
    return wrong, first_wrong


@kernel
def find_ids(ids, wanted, places):
    """Fill `places` with the positions of `wanted` in ids; returns how many."""
    count = 0
    for k in range(len(ids)):
        if ids[k] == wanted:
            places[count] = k
            count += 1
    return count
