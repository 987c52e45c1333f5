"""Megatron's greedy blending, bit for bit, without looking at every dataset for every sample.

Sample i goes to the dataset with the largest error `weight * max(i, 1) - count`, the lowest index
winning ties. An error only rises until its dataset is chosen, so the sample at which it reaches a
threshold is known when it falls. Datasets wait in a calendar until then, and only those above the
threshold are compared, by the very float64 operations of a full scan. As long as the best of them
is not under the threshold, none that waits can be better; when it is, the threshold moves.

Cost: a comparison, in vector registers, of about a twentieth of the datasets per sample, when
weights differ. Datasets of the same weight fall due together and are compared together; if all have
the same, they take turns. Long blends are cut into a part for each core: all but the first begin
from guessed counts, which are compared with the true ones at the end and, if they differ, the part
is done again.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from streammega.kernels.intrinsics import float_bits
from streammega.kernels.jit import kernel
from streammega.kernels.parallel import num_threads

_WINDOW = 16
"""Samples chosen between two looks at the calendar."""
_SLOTS = 4096
"""Calendar slots of one window each; what is due later is looked at again."""
_WORTH_GUESSING = 1 << 17
"""Samples from which on a blend is cut into parts."""
_SMALL = 64
"""So many datasets are always compared whole."""
_EARLY = 1e-9
"""An error is taken to reach the threshold by this much before it does: far more than float64 can
be off.
"""


def blend_weighted(
    weights: NDArray[np.float64], size: int
) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    """(dataset_index int16 [size], dataset_sample_index int64 [size]) of a weighted blend.

    `weights`: normalised, positive, float64 [datasets]. `dataset_sample_index` counts the dataset's
    samples before.
    """
    return _outputs(np.ascontiguousarray(weights, np.float64), np.full(len(weights), np.inf), size)


def blend_exhaustive(sizes: NDArray[np.int64]) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    """The same for a blend that takes every sample of every dataset once; a dataset that is used up
    drops out.
    """
    total = int(sizes.sum())
    return _outputs(sizes / np.float64(total), sizes.astype(np.float64), total)


def _outputs(
    weights: NDArray[np.float64], sizes: NDArray[np.float64], total: int
) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    dataset = np.empty(total, np.int16)
    sample = np.empty(total, np.int64)
    if (weights == weights[0]).all() and (sizes == sizes[0]).all():  # they take turns
        for at in range(0, total, _WORTH_GUESSING):
            end = min(at + _WORTH_GUESSING, total)
            sample[at:end], dataset[at:end] = np.divmod(np.arange(at, end), len(weights))
        return dataset, sample
    threads = num_threads() if total >= _WORTH_GUESSING else 1
    edges = [total * n // threads for n in range(threads + 1)]
    counts = np.zeros(len(weights))
    with ThreadPoolExecutor(threads) as pool:
        arguments = (weights, sizes, dataset, sample)
        guesses = [
            pool.submit(_guess_part, *arguments, a, b)
            for a, b in zip(edges[1:-1], edges[2:], strict=True)
        ]
        _blend(weights, sizes, 0, dataset[: edges[1]], sample[: edges[1]], counts)
        for first, stop, guess in zip(edges[1:-1], edges[2:], guesses, strict=True):
            begun, ended = guess.result()
            if np.array_equal(begun, counts):
                counts = ended
            else:  # it began in another state than the part before it ended in: do it again from that
                _blend(weights, sizes, first, dataset[first:stop], sample[first:stop], counts)
    return dataset, sample


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
    start = first - min(first, max(len(dataset) // 64, 16 * len(weights)))
    counts = np.floor(weights * start)
    missing = start - int(counts.sum())
    if missing > 0:  # those nearest to their next sample have had it
        counts[np.argsort(counts - weights * start, kind="stable")[:missing]] += 1.0
    counts = np.minimum(counts, sizes)
    _blend(
        weights,
        sizes,
        start,
        np.empty(first - start, np.int16),
        np.empty(first - start, np.int64),
        counts,
    )
    begun = counts.copy()
    _blend(weights, sizes, first, dataset[first:stop], sample[first:stop], counts)
    return begun, counts


@kernel
def _choose(  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    first,
    stop,
    origin,
    weights,
    counts,
    ids,
    sizes,
    hits,
    padded,
    threshold,
    lowest,
    dataset,
    sample,
):
    """Choose samples [first, stop) among the due; returns the first whose best error is under the
    threshold, or stop.

    Sample `origin` goes to place 0 of the outputs. The due fill the first places of arrays of
    `padded` places; the others have infinite counts. Errors are compared by their bits: as
    integers, maxima are vectorised by themselves, and those that are not negative order alike. The
    largest one is negative only by rounding, and then looked for as a float.
    """
    for i in range(first, stop):
        x = float(max(i, 1))
        best = np.int64(-0x7FFFFFFFFFFFFFFF)
        for k in range(padded):
            best = max(best, float_bits(weights[k] * x - counts[k]))
        if best < 0:
            best = _negative_best(x, weights, counts, padded)
        place = np.int64(0)
        ties = np.int64(0)
        # whole registers are stored: a single element would hold up the next sample's loads
        for k in range(padded):
            hit = np.int64(float_bits(weights[k] * x - counts[k]) == best)
            counts[k] += np.float64(hit)
            hits[k] = hit
            place += hit * k
            ties += hit
        if ties > 1:
            place = _keep_lowest(counts, ids, hits, padded)
        error = weights[place] * x - (counts[place] - 1.0)
        if error < threshold:
            counts[place] -= 1.0
            return i
        lowest[0] = min(lowest[0], error)
        dataset[i - origin], sample[i - origin] = ids[place], np.int64(counts[place]) - 1
        if counts[place] >= sizes[place]:
            counts[place] = np.inf
    return stop


@kernel
def _negative_best(x, weights, counts, padded):  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    """The bits of the largest error, when all are negative."""
    best = -np.inf
    for k in range(padded):
        best = max(best, weights[k] * x - counts[k])
    return float_bits(best)


@kernel
def _keep_lowest(counts, ids, hits, padded):  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    """Of all that tied and were counted, keep the count of the lowest id; returns its place."""
    lowest = np.int64(0x7FFFFFFFFFFFFFFF)
    for k in range(padded):
        lowest = min(lowest, ((ids[k] << 32) | k) if hits[k] else np.int64(0x7FFFFFFFFFFFFFFF))
    for k in range(padded):
        counts[k] -= np.float64(hits[k])
    counts[lowest & 0xFFFFFFFF] += 1.0
    return lowest & 0xFFFFFFFF


@kernel
def _blend(weights, sizes, origin, dataset, sample, counts):  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    """Choose samples from `origin` on, as many as the outputs take; `counts` [datasets] say what
    was chosen before, and after.
    """
    num = len(weights)
    total = origin + len(dataset)
    room = num + 8
    due_w = np.zeros(room)
    due_c = np.full(room, np.inf)
    due_s = np.full(room, np.inf)
    due_id = np.zeros(room, np.int64)
    head = np.full(_SLOTS, -1, np.int64)
    after = np.full(num, -1, np.int64)
    small = num <= _SMALL
    inverse = 1.0 / weights
    threshold = -np.inf if small else np.inf
    margin = 0.05
    period = max(4 * num, 256)
    lowest = np.full(1, np.inf)
    hits = np.zeros(room, np.int64)
    check = origin + period
    due = 0
    i = np.int64(origin)
    sort = True
    while i < total:
        if sort:
            _store(counts, due_c, due_s, due_id, due)
            if not small:
                threshold = min(lowest[0], _best(i, weights, counts, sizes)) - margin
            due = _sort(
                i,
                threshold,
                weights,
                inverse,
                sizes,
                counts,
                due_w,
                due_c,
                due_s,
                due_id,
                head,
                after,
                small,
            )
            check, lowest[0] = i + period, np.inf
        stop = total if small else min(total, (i // _WINDOW + 1) * _WINDOW)
        padded = (due + 7) // 8 * 8
        i = _choose(
            i,
            stop,
            origin,
            due_w,
            due_c,
            due_id,
            due_s,
            hits,
            padded,
            threshold,
            lowest,
            dataset,
            sample,
        )
        sort = False
        if i < stop:  # the best lies under the threshold: one that waits may be better
            margin, sort, lowest[0] = min(margin * 1.25, 2.0), True, np.inf
        elif i < total:
            due = _turn(
                i,
                threshold,
                weights,
                inverse,
                sizes,
                counts,
                due_w,
                due_c,
                due_s,
                due_id,
                due,
                head,
                after,
            )
            if i >= check:  # a higher threshold, if the last period would have allowed it
                margin = max(margin * 0.85, 1e-3)
                sort = lowest[0] - margin > threshold + 0.2 * margin
                check, lowest[0] = i + period, lowest[0] if sort else np.inf
    _store(counts, due_c, due_s, due_id, due)


@kernel
def _best(i, weights, counts, sizes):  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    """The largest error of all datasets that are not used up."""
    best = -np.inf
    for d in range(len(weights)):
        if counts[d] < sizes[d]:
            best = max(best, weights[d] * float(max(i, 1)) - counts[d])
    return best


@kernel
def _store(counts, due_c, due_s, due_id, due):  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    """Counts of the due, back to their datasets; an infinite one is used up."""
    for k in range(due):
        counts[due_id[k]] = min(due_c[k], due_s[k])


@kernel
def _window_of(count, threshold, inverse):  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    """A window not after the one in which the error of a dataset, of weight 1 / inverse, reaches
    the threshold.
    """
    exact = (count + threshold - _EARLY - count * 1e-14) * inverse
    return (np.int64(max(min(exact, 9e18), 0.0)) - 1) // _WINDOW


@kernel
def _sort(  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    i, threshold, weights, inverse, sizes, counts, due_w, due_c, due_s, due_id, head, after, small
):
    """Sort every dataset into the due and the calendar; returns how many are due."""
    head[:] = -1
    due_c[:] = np.inf
    due = 0
    for d in range(len(weights)):
        if counts[d] >= sizes[d]:
            continue
        window = i // _WINDOW if small else _window_of(counts[d], threshold, inverse[d])
        if window <= i // _WINDOW:
            due_w[due], due_c[due], due_s[due], due_id[due] = weights[d], counts[d], sizes[d], d
            due += 1
        else:
            slot = min(window, i // _WINDOW + _SLOTS - 1) % _SLOTS
            after[d], head[slot] = head[slot], d
    return due


@kernel
def _turn(  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    i, threshold, weights, inverse, sizes, counts, due_w, due_c, due_s, due_id, due, head, after
):
    """At the start of a window: those that fell below the threshold wait, those whose slot it is
    are due.
    """
    now = i // _WINDOW
    kept = 0
    for k in range(due):
        d = due_id[k]
        count = due_c[k]
        if count == np.inf:
            counts[d] = sizes[d]
            continue
        # not chosen: still due
        window = now if count == counts[d] else _window_of(count, threshold, inverse[d])
        counts[d] = count
        if window <= now:
            due_w[kept], due_c[kept], due_s[kept], due_id[kept] = due_w[k], count, due_s[k], d
            kept += 1
        else:
            slot = min(window, now + _SLOTS - 1) % _SLOTS
            after[d], head[slot] = head[slot], d
    queued = head[now % _SLOTS]
    head[now % _SLOTS] = -1
    while queued >= 0:
        following = after[queued]
        window = _window_of(counts[queued], threshold, inverse[queued])
        if window <= now:
            due_w[kept], due_c[kept], due_s[kept], due_id[kept] = (
                weights[queued],
                counts[queued],
                sizes[queued],
                queued,
            )
            kept += 1
        else:
            slot = min(window, now + _SLOTS - 1) % _SLOTS
            after[queued], head[slot] = head[slot], queued
        queued = following
    due_c[kept:due] = np.inf
    return kept
