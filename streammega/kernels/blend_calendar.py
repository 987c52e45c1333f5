"""The calendar of a blend: datasets that wait until their error may reach the threshold, and those
that are due.

Cost: a visit to each dataset about as often as it is chosen. Arrays are those of blending.py.
"""

from __future__ import annotations

import numpy as np

from streammega.kernels.intrinsics import (
    highest_bit,
)
from streammega.kernels.jit import kernel

WINDOW = 16
"""Samples chosen between two looks at the calendar."""
SLOTS = 4096
"""Calendar slots of one window each; what is due later is looked at again."""
_ONE = np.uint64(1)
_NO_BITS = np.uint64(0)
_EARLY = 1e-9
"""An error is taken to reach the threshold by this much before it does: far more than float64 can
be off.
"""
_EARLY_SHARE = 1e-14
"""The same, of the count: a large one has fewer bits behind the point."""
_NEVER = 9e18
"""A sample after the last of any blend, and still an int64."""


@kernel
def best_error(i, weights, counts, sizes):
    """The largest error of all datasets that are not used up."""
    best = -np.inf
    for d in range(len(weights)):
        if counts[d] < sizes[d]:
            best = max(best, weights[d] * float(max(i, 1)) - counts[d])
    return best


@kernel
def store(counts, due_count, due_size, due_id, due):
    """Counts of the due, back to their datasets; an infinite one is used up."""
    for k in range(due):
        counts[due_id[k]] = min(due_count[k], due_size[k])


@kernel
def _window_of(count, threshold, inverse):
    """A window not after the one in which the error of a dataset, of weight 1 / inverse, reaches
    the threshold.
    """
    exact = (count + threshold - _EARLY - count * _EARLY_SHARE) * inverse
    return (np.int64(max(min(exact, _NEVER), 0.0)) - 1) // WINDOW


@kernel
def _wait(d, window, now, head, after) -> None:
    """Put dataset d into the calendar until `window`; one beyond its end into its last slot."""
    slot = min(window, now + SLOTS - 1) % SLOTS
    after[d] = head[slot]
    head[slot] = d


@kernel
def sort_all(
    i, threshold, weights, inverse, sizes, counts,
    due_weight, due_count, due_size, due_id, head, after, small
):  # fmt: skip
    """Sort every dataset into the due and the calendar; returns how many are due."""
    now = i // WINDOW
    head[:] = -1
    due_count[:] = np.inf
    due = 0
    for d in range(len(weights)):
        if counts[d] >= sizes[d]:
            continue
        window = now if small else _window_of(counts[d], threshold, inverse[d])
        if window <= now:
            due_weight[due] = weights[d]
            due_count[due] = counts[d]
            due_size[due] = sizes[d]
            due_id[due] = d
            due += 1
        else:
            _wait(d, window, now, head, after)
    return due


@kernel
def sift_all(
    i, threshold, inverse, sizes, counts,
    due_weight, due_count, due_size, due_id, due, head, after
):  # fmt: skip
    """At the start of a window: the due that fell below the threshold wait. Returns how many are
    still due.
    """
    now = i // WINDOW
    kept = 0
    for k in range(due):
        d = due_id[k]
        count = due_count[k]
        if count == np.inf:
            counts[d] = sizes[d]
            continue
        # not chosen: still due
        window = now if count == counts[d] else _window_of(count, threshold, inverse[d])
        counts[d] = count
        if window <= now:
            due_weight[kept] = due_weight[k]
            due_count[kept] = count
            due_size[kept] = due_size[k]
            due_id[kept] = d
            kept += 1
        else:
            _wait(d, window, now, head, after)
    due_count[kept:due] = np.inf
    return kept


@kernel
def sift_chosen(
    i, threshold, inverse, sizes, counts,
    due_weight, due_count, due_size, due_id, chosen, due, head, after
):  # fmt: skip
    """As `sift_all`, where only the places of the bits `chosen` have other counts than before: the
    last of the due takes the place of one that waits.
    """
    now = i // WINDOW
    kept = due
    # The highest first: what is moved into a lower place was looked at, or was not chosen.
    while chosen != _NO_BITS:
        k = highest_bit(chosen)
        chosen ^= _ONE << np.uint64(k)
        d = due_id[k]
        count = due_count[k]
        if count == np.inf:
            counts[d] = sizes[d]
        else:
            counts[d] = count
            window = _window_of(count, threshold, inverse[d])
            if window <= now:
                continue
            _wait(d, window, now, head, after)
        kept -= 1
        due_weight[k] = due_weight[kept]
        due_count[k] = due_count[kept]
        due_size[k] = due_size[kept]
        due_id[k] = due_id[kept]
        due_count[kept] = np.inf
    return kept


@kernel
def call(
    i, threshold, weights, inverse, sizes, counts,
    due_weight, due_count, due_size, due_id, due, head, after
):  # fmt: skip
    """At the start of a window: those whose slot it is are due. Returns how many are, with the
    `due` before.
    """
    now = i // WINDOW
    queued = head[now % SLOTS]
    head[now % SLOTS] = -1
    while queued >= 0:
        following = after[queued]
        window = _window_of(counts[queued], threshold, inverse[queued])
        if window <= now:
            due_weight[due] = weights[queued]
            due_count[due] = counts[queued]
            due_size[due] = sizes[queued]
            due_id[due] = queued
            due += 1
        else:
            _wait(queued, window, now, head, after)
        queued = following
    return due
