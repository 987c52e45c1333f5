"""How well an order shuffles, and what it costs to fetch, from the plan alone.

A place is where a sample starts, in samples from the beginning of everything, datasets and files
end to end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from streammega.order.extents import Extents

Places = NDArray[np.int64]
REGIONS = 4096
"""Equal parts of the data: many more than samples of a batch, so that a good shuffle meets another
with nearly every sample.
"""
BATCH = 256
"""Consecutive samples in which distinct regions are counted."""
MAX_BATCHES = 400
"""So many of them are counted at most, from the first on: each is sorted by itself."""
DOMAINS = 16
"""Stretches of the data that are taken to be of one domain each."""


@dataclass(frozen=True, kw_only=True)
class ShuffleQuality:
    """Figures of one stretch of an order: compare them with those of as many numbers drawn at
    random.
    """

    distance_entropy: float
    """Entropy, in bits, of the distances between consecutive samples, in bins of powers of two."""
    places_per_256: float
    """Distinct places (of 4096 equal regions) among 256 consecutive samples, on average."""
    adjacent_share: float
    """Share of samples that follow, in the data, the sample before them."""
    neighbour_distance: float
    """Median number of samples between one and the next of its document (its successor in the
    data).
    """
    domain_drift: float
    """Standard deviation of domain shares over windows of steps, in multiples of an independent
    draw's, if the data were 16 stretches of one domain each: the hard case.
    """


def shuffle_quality(places: Places, total: int, window: int) -> ShuffleQuality:
    """Measure consecutive samples. A figure is nan where they are too few for it.

    `total`: places there are; `window`: samples of the windows of domain drift.
    """
    follows_in_data = np.diff(places) == 1
    return ShuffleQuality(
        distance_entropy=_distance_entropy(places),
        places_per_256=_distinct_places(places, total),
        adjacent_share=float(np.mean(follows_in_data)),
        neighbour_distance=_neighbour_distance(places),
        domain_drift=_domain_drift(places, total, window),
    )


def places_of(extents: Extents, starts: list[NDArray[np.int64]], sequence_length: int) -> Places:
    """Places of located samples.

    `starts[d][f]`: samples before file f of dataset d, over all datasets. A sample of several runs
    is where the first of them starts.
    """
    first_rows = extents.row_splits[:-1]
    dataset = extents.dataset[first_rows]
    file = extents.file[first_rows]
    files_of_dataset = [len(of_files) for of_files in starts]
    first_file = np.cumsum([0, *files_of_dataset])
    samples_before_file = np.concatenate(starts)
    samples_before = samples_before_file[first_file[dataset] + file]
    samples_within_file = extents.start[first_rows] // sequence_length
    return np.asarray(samples_before + samples_within_file)


def _distance_entropy(places: Places) -> float:
    distances = np.abs(np.diff(places))
    at_least_one = np.maximum(distances, 1)  # 0 has no logarithm
    powers = np.ceil(np.log2(at_least_one))
    counts = np.bincount(powers.astype(np.int64))
    shares = counts[counts > 0] / len(distances)
    bits = -np.log2(shares)
    return float((shares * bits).sum())


def _distinct_places(places: Places, total: int) -> float:
    batches = _windows(_parts(places, total, REGIONS), BATCH)
    if not len(batches):
        return float("nan")
    distinct = [len(np.unique(batch)) for batch in batches[:MAX_BATCHES]]
    return float(np.mean(distinct))


def _neighbour_distance(places: Places) -> float:
    """Over pairs (p, p + 1) that both occur."""
    by_place = np.argsort(places, kind="stable")
    has_successor = np.flatnonzero(np.diff(places[by_place]) == 1)
    if not len(has_successor):
        return float("nan")
    distances = np.abs(by_place[has_successor + 1] - by_place[has_successor])
    return float(np.median(distances))


def _domain_drift(places: Places, total: int, window: int) -> float:
    windows = _windows(_parts(places, total, DOMAINS), window)
    if len(windows) < 2:
        return float("nan")
    shares = np.stack([(windows == domain).mean(axis=1) for domain in range(DOMAINS)])
    equal_share = 1 / DOMAINS
    deviation = np.sqrt(np.mean((shares - equal_share) ** 2))
    # That of a share among `window` independent draws: a binomial's.
    expected = np.sqrt(equal_share * (1 - equal_share) / window)
    return float(deviation / expected)


def _parts(places: Places, total: int, count: int) -> Places:
    """Which of `count` equal parts of the data has each place."""
    return places * count // max(total, 1)


def _windows(values: Places, length: int) -> Places:
    """Values in rows of `length`; those left over are left out."""
    num_windows = len(values) // length
    return values[: num_windows * length].reshape(num_windows, length)


PLACE_BYTES = 1 << 18
"""Bytes of a place of a dataset in `place_shares`: a block's at most, by default."""
MIN_DRAWS = 64
"""Fewer samples in a stretch are not judged: chance would decide."""
MIN_OWN_DRAWS = 512
"""Datasets with fewer are judged together: by chance, the lowest of hundreds would be low."""


def place_shares(
    samples: Places,
    dataset: NDArray[np.int64],
    sizes: NDArray[np.int64],
    samples_of_place: NDArray[np.int64],
    windows: Sequence[int],
) -> NDArray[np.float64]:
    """Distinct places in windows of consecutive samples, divided by those of a full shuffle of each
    dataset, epoch after epoch. float64 [windows, datasets]; nan for a dataset with too few samples.

    Args:
        samples: which sample of its dataset each is, int64 [samples].
        dataset: the dataset of each.
        sizes: samples of an epoch of each dataset; samples_of_place: those of a place.
        windows: lengths in samples; of fewer samples one window has them all.
    """
    rng = np.random.default_rng(0)
    shuffled = np.empty_like(samples)
    by_dataset = np.argsort(dataset, kind="stable")
    numbers, firsts = np.unique(dataset[by_dataset], return_index=True)
    for number, drawn in zip(numbers.tolist(), np.split(by_dataset, firsts[1:]), strict=True):
        shuffled[drawn] = _full_shuffle(int(sizes[number]), len(drawn), rng)
    of_place = samples_of_place[dataset]
    orders = np.stack((samples // of_place, shuffled // of_place))
    return np.stack([_shares_of(orders, dataset, len(sizes), window) for window in windows])


def _shares_of(
    places: Places, dataset: NDArray[np.int64], num_datasets: int, window: int
) -> NDArray[np.float64]:
    """The shares in windows of one length. places: of the samples and of a full shuffle, int64 [2,
    samples].
    """
    number = np.arange(len(dataset)) // window
    is_whole = number < max(1, len(dataset) // window)
    dataset = dataset[is_whole]
    draws = np.bincount(dataset, minlength=num_datasets)
    stretch = (number[is_whole] * num_datasets + dataset) << 40
    distinct = [
        np.bincount(
            (np.unique(stretch | row[is_whole]) >> 40) % num_datasets, minlength=num_datasets
        )
        for row in places
    ]
    counts = np.stack(distinct).astype(np.float64)
    has_few = draws < MIN_OWN_DRAWS
    counts[:, has_few] = counts[:, has_few].sum(axis=1, keepdims=True)
    draws[has_few & (draws > 0)] = draws[has_few].sum()
    is_judged = draws >= MIN_DRAWS
    shares = np.full(num_datasets, np.nan)
    shares[is_judged] = counts[0, is_judged] / counts[1, is_judged]
    return shares


def _full_shuffle(size: int, count: int, rng: np.random.Generator) -> Places:
    """The first `count` of the numbers below `size`, in a new random order in each epoch."""
    if count < size:
        return rng.choice(size, count, replace=False)  # memory grows with the count alone
    epochs = np.tile(np.arange(size), (-(-count // size), 1))
    return rng.permuted(epochs, axis=1).ravel()[:count]


@dataclass(frozen=True, kw_only=True)
class FetchPlan:
    """What one rank fetches for a stretch of samples, when contiguous runs of its lanes are fetched
    as one.
    """

    requests: int
    fetched_bytes: int
    useful_bytes: int

    @property
    def amplification(self) -> float:
        """Bytes fetched for each byte used."""
        return self.fetched_bytes / max(self.useful_bytes, 1)


def fetch_plan(
    extents: Extents, lane: NDArray[np.int64], itemsize: int, largest_piece: int, overlap: int
) -> FetchPlan:
    """The plan of a rank's samples, each a row of `extents` drawn in `lane`, in the order they are
    used.

    Rows of a dataset, lane, file and neighbourhood (nearer than `largest_piece` tokens) are one request.
    `overlap`: tokens of a row that the next one repeats (the label token), which are not counted as
    useful twice.
    """
    lane_of_row = np.repeat(lane, np.diff(extents.row_splits))
    # within a dataset and lane as they are used
    by_lane = np.lexsort((lane_of_row, extents.dataset))
    start = extents.start[by_lane]
    stop = extents.stop[by_lane]
    is_far = np.abs(np.diff(start)) >= largest_piece
    new_request = np.ones(len(by_lane), np.bool_)
    new_request[1:] = is_far
    for key in (lane_of_row, extents.dataset, extents.file):
        key_of_row = key[by_lane]
        new_request[1:] |= key_of_row[1:] != key_of_row[:-1]
    first_rows = np.flatnonzero(new_request)
    lowest = np.minimum.reduceat(start, first_rows)
    highest = np.maximum.reduceat(stop, first_rows)
    fetched_tokens = int((highest - lowest).sum())
    useful_tokens = int((stop - start - overlap).sum())
    return FetchPlan(
        requests=len(first_rows),
        fetched_bytes=fetched_tokens * itemsize,
        useful_bytes=useful_tokens * itemsize,
    )
