"""Megatron's greedy blending, bit for bit, without looking at every dataset for every sample.

Sample i goes to the dataset with the largest error `weight * max(i, 1) - count`, the lowest index
winning ties. An error only rises until its dataset is chosen, so the sample at which it reaches a
threshold is known when it falls. Datasets wait in a calendar until then, and only those above the
threshold are compared, by the very float64 operations of a full scan. As long as the best of them
is not under the threshold, none that waits can be better; when it is, the threshold moves.

Cost: a comparison, in vector registers, of about an eighth of 256 datasets per sample, and of a
twentieth of 1000, when weights differ. Datasets of the same weight fall due together and are
compared together; if all have the same, they take turns. Long blends are cut into a part for each
core. All parts but the first begin from guessed counts. If these differ from the true counts in the
end, the part is done again.

What the arrays of the kernels hold:

    weights, sizes, counts [datasets] float64   share, samples there are (inf: no end), and chosen
                                                so far; those of the due are in `due` instead
    inverse [datasets] float64                  1 / weights
    dataset int16, sample int64 [samples]       the outputs: which dataset, and which of its samples
    due [WEIGHT/COUNT/SIZE, datasets + 8]       the same of the due datasets, in the first places;
      float64                                   the others have infinite counts, so that they are
                                                never chosen
    due_id [datasets + 8] int64                 their numbers
    head [SLOTS], after [datasets] int64        the calendar: the first dataset that waits in a
                                                slot, and the one behind each; -1: none
    hits [datasets + 8] int64                   which of the due have the best error: 1 or 0
    lowest [1] float64                          the lowest error that was chosen since it was reset

float64 counts are exact, and compared without conversions.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numba
import numpy as np
from numpy.typing import NDArray

from streammega.kernels import num_threads
from streammega.kernels.jit import kernel

REGISTER = 8
"""The due are compared in multiples of so many float64: whole vector registers, as the compiler
uses them.
"""
WINDOW = 16
"""Samples chosen between two looks at the calendar."""
SLOTS = 4096
"""Calendar slots of one window each; what is due later is looked at again."""
_EARLY = 1e-9
"""An error is taken to reach the threshold by this much before it does: far more than float64 can
be off.
"""
_EARLY_SHARE = 1e-14
"""The same, of the count: a large one has fewer bits behind the point."""
_NEVER = 9e18
"""A sample after the last of any blend, and still an int64."""


WEIGHT = 0
COUNT = 1
SIZE = 2
"""The rows of `due`."""

_MIN_INT = np.int64(-0x7FFFFFFFFFFFFFFF)
_MAX_INT = np.int64(0x7FFFFFFFFFFFFFFF)
_PLACE = np.int64(0xFFFFFFFF)
"""The bits of a place where a dataset's number stands above it."""

_WORTH_GUESSING = 1 << 17
"""Samples from which on a blend is cut into parts."""
_SMALL = 64
"""So many datasets are always compared whole."""

# The margin: how far under the lowest error chosen lately the threshold is laid. Too near, and it
# has to be moved often; too far, and many are due that are not chosen. It widens whenever the best
# error falls under the threshold, and narrows slowly otherwise.
_FIRST_MARGIN = 0.05
_WIDER = 1.25
_WIDEST = 2.0
_NARROWER = 0.85
_NARROWEST = 1e-3
_WORTH_SORTING = 0.2
"""A threshold that would rise by less than this part of a margin is not worth sorting all datasets.
"""

_SHARE_BEFORE = 64
_TURNS_BEFORE = 16
"""A guessed part begins its choices early, by a 64th of the blend or 16 samples a dataset,
whichever is more: in them the guess mends.
"""


def blend_weighted(
    weights: NDArray[np.float64], size: int
) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    """(dataset_index int16 [size], dataset_sample_index int64 [size]) of a weighted blend.

    `weights`: normalised, positive, float64 [datasets]. `dataset_sample_index` counts the dataset's
    samples before.
    """
    endless = np.full(len(weights), np.inf)
    return _outputs(np.ascontiguousarray(weights, np.float64), endless, size)


def blend_exhaustive(sizes: NDArray[np.int64]) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    """The same for a blend that takes every sample of every dataset once; a dataset that is used up
    drops out.
    """
    total = int(sizes.sum())
    return _outputs(sizes / np.float64(total), sizes.astype(np.float64), total)


def _outputs(
    weights: NDArray[np.float64], sizes: NDArray[np.float64], total: int
) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    """dataset and sample of each of `total` choices."""
    dataset = np.empty(total, np.int16)
    sample = np.empty(total, np.int64)
    if (weights == weights[0]).all() and (sizes == sizes[0]).all():
        _take_turns(len(weights), dataset, sample)
        return dataset, sample
    threads = num_threads() if total >= _WORTH_GUESSING else 1
    edges = [total * part // threads for part in range(threads + 1)]
    guessed_parts = list(zip(edges[1:-1], edges[2:], strict=True))
    counts = np.zeros(len(weights))
    with ThreadPoolExecutor(threads) as pool:
        guesses = [
            pool.submit(_guess_part, weights, sizes, dataset, sample, first, stop)
            for first, stop in guessed_parts
        ]
        _blend(weights, sizes, 0, dataset[: edges[1]], sample[: edges[1]], counts)
        for (first, stop), guess in zip(guessed_parts, guesses, strict=True):
            counts_begun, counts_ended = guess.result()
            if np.array_equal(counts_begun, counts):
                counts = counts_ended
                continue
            # it began in another state than the part before it ended in: do it again from that
            _blend(weights, sizes, first, dataset[first:stop], sample[first:stop], counts)
    return dataset, sample


def _take_turns(datasets: int, dataset: NDArray[np.int16], sample: NDArray[np.int64]) -> None:
    """Datasets of the same weight and size: one after the other, from the first on."""
    total = len(dataset)
    # a stretch at a time: what numpy makes on the way is int64, more than the outputs are
    for first in range(0, total, _WORTH_GUESSING):
        stop = min(first + _WORTH_GUESSING, total)
        sample[first:stop], dataset[first:stop] = np.divmod(np.arange(first, stop), datasets)


def _guess_part(
    weights: NDArray[np.float64],
    sizes: NDArray[np.float64],
    dataset: NDArray[np.int16],
    sample: NDArray[np.int64],
    first: int,
    stop: int,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Choose samples [first, stop) before it is known what was chosen before; returns the counts it
    began and ended with.

    Counts are always near their targets. So a guess of them a while before `first` is nearly right,
    and the choices until then correct it: a dataset counted once too often is chosen once less.
    """
    before = max(len(dataset) // _SHARE_BEFORE, _TURNS_BEFORE * len(weights))
    start = first - min(first, before)
    counts = np.floor(weights * start)
    missing = start - int(counts.sum())
    if missing > 0:  # those nearest to their next sample have had it
        nearest_first = np.argsort(counts - weights * start, kind="stable")
        counts[nearest_first[:missing]] += 1.0
    counts = np.minimum(counts, sizes)
    dataset_before = np.empty(first - start, np.int16)
    sample_before = np.empty(first - start, np.int64)
    _blend(weights, sizes, start, dataset_before, sample_before, counts)
    counts_begun = counts.copy()
    _blend(weights, sizes, first, dataset[first:stop], sample[first:stop], counts)
    return counts_begun, counts


@kernel
def _best_error(i, weights, counts, sizes):
    """The largest error of all datasets that are not used up."""
    best = -np.inf
    for d in range(len(weights)):
        if counts[d] < sizes[d]:
            best = max(best, weights[d] * float(max(i, 1)) - counts[d])
    return best


@kernel
def _store(counts, due, due_id, num_due):
    """Counts of the due, back to their datasets; an infinite one is used up."""
    for k in range(num_due):
        counts[due_id[k]] = min(due[COUNT, k], due[SIZE, k])


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


@numba.njit(inline="always")
def _append_due(due, due_id, k, d, weight, count, size):
    """Make dataset d the due in place k."""
    due[WEIGHT, k] = weight
    due[COUNT, k] = count
    due[SIZE, k] = size
    due_id[k] = d


@kernel
def _rebuild_calendar(
    i, threshold, weights, inverse, sizes, counts, due, due_id, head, after, small
):
    """Sort every dataset into the due and the calendar; returns how many are due."""
    now = i // WINDOW
    head[:] = -1
    due[COUNT, :] = np.inf
    num_due = 0
    for d in range(len(weights)):
        if counts[d] >= sizes[d]:
            continue
        window = now if small else _window_of(counts[d], threshold, inverse[d])
        if window <= now:
            _append_due(due, due_id, num_due, d, weights[d], counts[d], sizes[d])
            num_due += 1
        else:
            _wait(d, window, now, head, after)
    return num_due


@kernel
def _park_idle(i, threshold, inverse, sizes, counts, due, due_id, num_due, head, after):
    """At the start of a window: the due that fell below the threshold wait. Returns how many are
    still due.
    """
    now = i // WINDOW
    kept = 0
    for k in range(num_due):
        d = due_id[k]
        count = due[COUNT, k]
        if count == np.inf:
            counts[d] = sizes[d]
            continue
        # not chosen: still due
        window = now if count == counts[d] else _window_of(count, threshold, inverse[d])
        counts[d] = count
        if window <= now:
            _append_due(due, due_id, kept, d, due[WEIGHT, k], count, due[SIZE, k])
            kept += 1
        else:
            _wait(d, window, now, head, after)
    due[COUNT, kept:num_due] = np.inf
    return kept


@kernel
def _wake_due(i, threshold, weights, inverse, sizes, counts, due, due_id, num_due, head, after):
    """At the start of a window: those whose slot it is are due. Returns how many are, with the
    `num_due` before.
    """
    now = i // WINDOW
    queued = head[now % SLOTS]
    head[now % SLOTS] = -1
    while queued >= 0:
        following = after[queued]
        window = _window_of(counts[queued], threshold, inverse[queued])
        if window <= now:
            _append_due(
                due, due_id, num_due, queued, weights[queued], counts[queued], sizes[queued]
            )
            num_due += 1
        else:
            _wait(queued, window, now, head, after)
        queued = following
    return num_due


@numba.njit(inline="always")
def _bits_of(error):
    """The bits of a float64, as int64."""
    return np.float64(error).view(np.int64)


@numba.njit(inline="always")
def _take(row, place, due_count, due_id, due_size, dataset, sample):
    """Write a choice, which is counted already, into a row of the outputs; a dataset whose last
    sample it is drops out.
    """
    dataset[row] = due_id[place]
    sample[row] = np.int64(due_count[place]) - 1
    if due_count[place] >= due_size[place]:
        due_count[place] = np.inf


@kernel
def _choose(first, stop, origin, due, due_id, hits, padded, threshold, lowest, dataset, sample):
    """Choose samples [first, stop) among the due; returns the first whose best error is under the
    threshold, or stop.

    Sample `origin` goes to place 0 of the outputs. The due are the first of `padded` places. Errors
    are compared by their bits: as integers, maxima are vectorised by themselves, and those that are
    not negative order alike. The largest one is negative only by rounding, and then looked for as a
    float.
    """
    due_weight = due[WEIGHT]
    due_count = due[COUNT]
    due_size = due[SIZE]
    for i in range(first, stop):
        target = float(max(i, 1))
        best = _MIN_INT
        for k in range(padded):
            best = max(best, _bits_of(due_weight[k] * target - due_count[k]))
        if best < 0:
            best = _negative_best(target, due_weight, due_count, padded)
        place = np.int64(0)
        ties = np.int64(0)
        # whole registers are stored: a single element would hold up the next sample's loads
        for k in range(padded):
            hit = np.int64(_bits_of(due_weight[k] * target - due_count[k]) == best)
            due_count[k] += np.float64(hit)
            hits[k] = hit
            place += hit * k
            ties += hit
        if ties > 1:
            place = _keep_lowest(due_count, due_id, hits, padded)
        error = due_weight[place] * target - (due_count[place] - 1.0)
        if error < threshold:
            due_count[place] -= 1.0
            return i
        lowest[0] = min(lowest[0], error)
        _take(i - origin, place, due_count, due_id, due_size, dataset, sample)
    return stop


@kernel
def _negative_best(target, due_weight, due_count, padded):
    """The bits of the largest error, when all are negative."""
    best = -np.inf
    for k in range(padded):
        best = max(best, due_weight[k] * target - due_count[k])
    return _bits_of(best)


@kernel
def _keep_lowest(due_count, due_id, hits, padded):
    """All that tied were counted: keep only the count of the lowest id; returns its place.

    A number has the id in its upper and the place in its lower bits: the smallest gives both.
    """
    lowest = _MAX_INT
    for k in range(padded):
        lowest = min(lowest, ((due_id[k] << 32) | k) if hits[k] else _MAX_INT)
    for k in range(padded):
        due_count[k] -= np.float64(hits[k])
    place = lowest & _PLACE
    due_count[place] += 1.0
    return place


@kernel
def _blend(weights, sizes, origin, dataset, sample, counts):
    """Choose samples from `origin` on, as many as the outputs hold, and update `counts` [datasets]."""
    num = len(weights)
    total = origin + len(dataset)
    room = num + REGISTER
    due = np.full((3, room), np.inf)
    due[WEIGHT, :] = 0.0
    due_id = np.zeros(room, np.int64)
    head = np.full(SLOTS, -1, np.int64)
    after = np.full(num, -1, np.int64)
    small = num <= _SMALL
    inverse = 1.0 / weights
    threshold = -np.inf if small else np.inf
    margin = _FIRST_MARGIN
    period = max(4 * num, 256)  # samples between two looks whether the threshold may rise
    lowest = np.full(1, np.inf)
    hits = np.zeros(room, np.int64)
    check = origin + period
    num_due = 0
    i = np.int64(origin)
    sort = True
    while i < total:
        if sort:
            _store(counts, due, due_id, num_due)
            if not small:
                threshold = min(lowest[0], _best_error(i, weights, counts, sizes)) - margin
            num_due = _rebuild_calendar(
                i, threshold, weights, inverse, sizes, counts, due, due_id, head, after, small
            )
            check = i + period
            lowest[0] = np.inf
        stop = total if small else min(total, (i // WINDOW + 1) * WINDOW)
        padded = (num_due + REGISTER - 1) // REGISTER * REGISTER
        i = _choose(i, stop, origin, due, due_id, hits, padded, threshold, lowest, dataset, sample)
        sort = False
        if i < stop:  # the best is under the threshold: one that waits may be better
            margin = min(margin * _WIDER, _WIDEST)
            sort = True
            lowest[0] = np.inf
        elif i < total:
            num_due = _park_idle(
                i, threshold, inverse, sizes, counts, due, due_id, num_due, head, after
            )
            num_due = _wake_due(
                i, threshold, weights, inverse, sizes, counts, due, due_id, num_due, head, after
            )
            if i >= check:  # a higher threshold, if the last period would have allowed it
                margin = max(margin * _NARROWER, _NARROWEST)
                sort = lowest[0] - margin > threshold + _WORTH_SORTING * margin
                check = i + period
                lowest[0] = lowest[0] if sort else np.inf
    _store(counts, due, due_id, num_due)
