"""How well an order shuffles, and what it costs to fetch, from the plan alone.

A place is where a sample starts, in samples from the beginning of everything, datasets and files
end to end.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from streammega.order.extents import Extents

Places = NDArray[np.int64]
REGIONS = 4096
DOMAINS = 16


@dataclass(frozen=True, kw_only=True)
class ShuffleQuality:
    """Figures of one stretch of an order; what a full shuffle gives is in `full_shuffle`."""

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

    def row(self) -> dict[str, float]:
        """The figures by name."""
        return asdict(self)


def shuffle_quality(places: Places, total: int, window: int) -> ShuffleQuality:
    """Measure consecutive samples.

    `total`: places there are; `window`: samples of the windows of domain drift.
    """
    return ShuffleQuality(
        distance_entropy=_distance_entropy(places),
        places_per_256=_distinct_places(places, total),
        adjacent_share=float(np.mean(np.diff(places) == 1)),
        neighbour_distance=_neighbour_distance(places),
        domain_drift=_domain_drift(places, total, window),
    )


def places_of(extents: Extents, starts: list[NDArray[np.int64]], sequence_length: int) -> Places:
    """Places of located samples.

    `starts[d][f]`: samples before file f of dataset d, over all datasets. First rows count.
    """
    rows = extents.row_splits[:-1]
    firsts = np.cumsum([0, *(len(own) for own in starts)])
    before = np.concatenate(starts)
    return np.asarray(
        before[firsts[extents.dataset[rows]] + extents.file[rows]]
        + extents.start[rows] // sequence_length
    )


def _distance_entropy(places: Places) -> float:
    distances = np.abs(np.diff(places))
    bins = np.bincount(np.ceil(np.log2(np.maximum(distances, 1))).astype(np.int64))
    shares = bins[bins > 0] / len(distances)
    return float(-(shares * np.log2(shares)).sum())


def _distinct_places(places: Places, total: int) -> float:
    regions = places * REGIONS // max(total, 1)
    batches = regions[: len(regions) // 256 * 256].reshape(-1, 256)
    return (
        float(np.mean([len(np.unique(batch)) for batch in batches[:400]]))
        if len(batches)
        else float("nan")
    )


def _neighbour_distance(places: Places) -> float:
    """Over pairs (p, p + 1) that both occur."""
    order = np.argsort(places, kind="stable")
    after = np.flatnonzero(np.diff(places[order]) == 1)
    return float(np.median(np.abs(order[after + 1] - order[after]))) if len(after) else float("nan")


def _domain_drift(places: Places, total: int, window: int) -> float:
    domains = places * DOMAINS // max(total, 1)
    windows = domains[: len(domains) // window * window].reshape(-1, window)
    if len(windows) < 2:
        return float("nan")
    shares = np.stack([(windows == domain).mean(axis=1) for domain in range(DOMAINS)])
    expected = np.sqrt(1 / DOMAINS * (1 - 1 / DOMAINS) / window)
    return float(np.sqrt(np.mean((shares - 1 / DOMAINS) ** 2)) / expected)


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

    Rows of a lane, file and neighbourhood (nearer than `largest_piece` tokens) are one request.
    `overlap`: tokens of a row that the next one repeats (the label token), which are not counted as
    useful twice.
    """
    keys = np.repeat(lane, np.diff(extents.row_splits))
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    start = extents.start[order]
    stop = extents.stop[order]
    dataset = extents.dataset[order]
    file = extents.file[order]
    new = np.ones(len(order), np.bool_)
    new[1:] = (keys[1:] != keys[:-1]) | (dataset[1:] != dataset[:-1]) | (file[1:] != file[:-1])
    new[1:] |= np.abs(np.diff(start)) >= largest_piece
    firsts = np.flatnonzero(new)
    low = np.minimum.reduceat(start, firsts)
    high = np.maximum.reduceat(stop, firsts)
    useful = int((stop - start - overlap).sum())
    return FetchPlan(
        requests=len(firsts),
        fetched_bytes=int((high - low).sum()) * itemsize,
        useful_bytes=useful * itemsize,
    )


# --- other systems' shuffles, as published, over places 0 .. total -----------------------------------------------------------


def full_shuffle(total: int, rng: np.random.Generator) -> Places:
    """Every order equally likely: the quality to compare with; memory is the whole index and every
    read a small one.
    """
    return rng.permutation(total)


def block_shuffle(total: int, block: int, rng: np.random.Generator) -> Places:
    """Blocks in random order, shuffled inside, one at a time."""
    blocks = [np.arange(at, min(at + block, total)) for at in range(0, total, block)]
    return np.concatenate([rng.permutation(blocks[n]) for n in rng.permutation(len(blocks))])


def shuffle_buffer(total: int, shard: int, buffer: int, rng: np.random.Generator) -> Places:
    """Shards in random order into a buffer, from which a random sample is handed out (webdataset,
    tf.data).
    """
    source = np.concatenate(
        [
            np.arange(n * shard, min((n + 1) * shard, total))
            for n in rng.permutation(-(-total // shard))
        ]
    )
    buffer = min(buffer, total)
    held = source[:buffer].copy()
    out = np.empty(total, np.int64)
    picks = rng.integers(0, buffer, total)
    for i in range(total - buffer):
        out[i], held[picks[i]] = held[picks[i]], source[buffer + i]
    out[total - buffer :] = rng.permutation(held)
    return out


def py1e(total: int, shard: int, block: int, rng: np.random.Generator) -> Places:
    """mosaicml-streaming's py1e: shards in random order, each sample moved by a uniform distance
    within a window of `block`.
    """
    source = np.concatenate(
        [
            np.arange(n * shard, min((n + 1) * shard, total))
            for n in rng.permutation(-(-total // shard))
        ]
    )
    reach = max(0, block - shard) / 2
    moved = np.arange(total) + rng.uniform(-reach, reach, total)
    inside = rng.random(total)  # samples of one shard are shuffled among themselves as well
    start = np.arange(total) // shard * shard
    moved += (start + inside * shard) - np.arange(total)
    return source[np.argsort(moved, kind="stable")]
