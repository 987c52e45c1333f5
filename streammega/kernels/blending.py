"""Megatron's greedy blending, bit for bit, without looking at every dataset for every sample.

Sample i goes to the dataset with the largest error `weight * max(i, 1) - count`, the lowest index
winning ties. An error only rises until its dataset is chosen, so the sample at which it reaches a
threshold is known when it falls. Datasets wait in a calendar until then, and only those above the
threshold are compared, by the very float64 operations of a full scan. As long as the best of them
is not under the threshold, none that waits can be better; when it is, the threshold moves.

Cost: a comparison, in vector registers, of about an eighth of 256 datasets per sample, and of a
twentieth of 1000, when weights differ. Datasets of the same weight fall due together and are
compared together; if all have the same, they take turns. Long blends are cut into a part for each
core: all but the first begin from guessed counts, which are compared with the true ones at the end
and, if they differ, the part is done again.

What the arrays of the kernels hold:

    weights, sizes, counts [datasets] float64   share, samples there are (inf: no end), and chosen
                                                so far; counts of the due are in due_count instead
    inverse [datasets] float64                  1 / weights
    dataset int16, sample int64 [samples]       the outputs: which dataset, and which of its samples
    due_weight, due_count, due_size, due_id     the same of the due datasets and their numbers, in
      [datasets + 8]                            the first places; the others have infinite counts,
                                                so that they are never chosen
    head [SLOTS], after [datasets] int64        the calendar: the first dataset that waits in a
                                                slot, and the one behind each; -1: none
    hits [datasets + 8] int64                   which of the due have the best error: 1 or 0
    chosen [1] uint64                           bits of places that were chosen since the calendar
                                                was looked at, where few are due
    lowest [1] float64                          the lowest error that was chosen since it was reset

float64 counts are exact, and compared without conversions.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from streammega.kernels.blend_calendar import (
    SLOTS,
    WINDOW,
    best_error,
    call,
    sift_all,
    sift_chosen,
    sort_all,
    store,
)
from streammega.kernels.blend_choices import FEW, REGISTER, choose_of_few, choose_of_many
from streammega.kernels.jit import kernel
from streammega.kernels.parallel import num_threads

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
"""Of a margin: a threshold that would rise by less is not worth sorting all datasets for."""

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

    Counts are always near their targets, so a guess of them a while before `first` is nearly right,
    and the choices of that while mend it: a dataset counted once too often is chosen once less.
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
def _blend(weights, sizes, origin, dataset, sample, counts):
    """Choose samples from `origin` on, as many as the outputs take; `counts` [datasets] say what
    was chosen before, and after.
    """
    num = len(weights)
    total = origin + len(dataset)
    room = num + REGISTER
    due_weight = np.zeros(room)
    due_count = np.full(room, np.inf)
    due_size = np.full(room, np.inf)
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
    chosen = np.zeros(1, np.uint64)
    check = origin + period
    due = 0
    i = np.int64(origin)
    sort = True
    while i < total:
        if sort:
            store(counts, due_count, due_size, due_id, due)
            if not small:
                threshold = min(lowest[0], best_error(i, weights, counts, sizes)) - margin
            due = sort_all(
                i, threshold, weights, inverse, sizes, counts,
                due_weight, due_count, due_size, due_id, head, after, small
            )  # fmt: skip
            check = i + period
            lowest[0] = np.inf
        stop = total if small else min(total, (i // WINDOW + 1) * WINDOW)
        padded = (due + REGISTER - 1) // REGISTER * REGISTER
        chosen[0] = 0
        few = padded <= FEW
        if few:
            i = choose_of_few(
                i, stop, origin, due_weight, due_count, due_id, due_size,
                chosen, padded, threshold, lowest, dataset, sample
            )  # fmt: skip
        else:
            i = choose_of_many(
                i, stop, origin, due_weight, due_count, due_id, due_size,
                hits, padded, threshold, lowest, dataset, sample
            )  # fmt: skip
        sort = False
        if i < stop:  # the best lies under the threshold: one that waits may be better
            margin = min(margin * _WIDER, _WIDEST)
            sort = True
            lowest[0] = np.inf
        elif i < total:
            if few:
                due = sift_chosen(
                    i, threshold, inverse, sizes, counts,
                    due_weight, due_count, due_size, due_id, chosen[0], due, head, after
                )  # fmt: skip
            else:
                due = sift_all(
                    i, threshold, inverse, sizes, counts,
                    due_weight, due_count, due_size, due_id, due, head, after
                )  # fmt: skip
            due = call(
                i, threshold, weights, inverse, sizes, counts,
                due_weight, due_count, due_size, due_id, due, head, after
            )  # fmt: skip
            if i >= check:  # a higher threshold, if the last period would have allowed it
                margin = max(margin * _NARROWER, _NARROWEST)
                sort = lowest[0] - margin > threshold + _WORTH_SORTING * margin
                check = i + period
                lowest[0] = lowest[0] if sort else np.inf
    store(counts, due_count, due_size, due_id, due)
