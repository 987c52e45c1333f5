"""How well the samples of a segment are shuffled, against a full shuffle of as many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streammega.order.quality import PLACE_BYTES, place_shares, places_of, shuffle_quality
from streammega.order.stream_order import default_lanes
from streammega.samples.source import SegmentSource

WINDOW_STEPS = 32
"""Global batches over which the drift of domain shares is measured."""

GOOD_SHARE = 0.9
"""From so many of a full shuffle's places on, batches are mixed well: chance takes some of the rest."""
FAIR_SHARE = 0.7
"""Below, a loader warns: losses of such orders were worse (docs/orders-measured.md)."""
MIXED_BATCHES = 8
"""A good shuffle also mixes batches that follow each other."""
MIXED_LANES = 512
"""Samples that large datasets take from as many places: what the lanes have at least, by default."""
MIN_MIXED_SAMPLES = 1 << 14
"""Samples that are looked at, so that a source of a hundredth is judged."""
MAX_MIXED_SAMPLES = 1 << 15
"""Larger batches are judged by a part: a loader looks between its first two batches."""
FIGURES = {
    "places_per_256": ("places", "4096ths of the data in 256 samples; more is better"),
    "neighbour_distance": ("neighbours", "samples between neighbours; more is better"),
    "domain_drift": ("domain drift", f"of {WINDOW_STEPS} steps, 1 is chance; less is better"),
}
"""Fields of `ShuffleQuality`: the name that reports and docs/orders-measured.md have, and what it is."""


def shuffle_figures(
    segment: SegmentSource, sample_ids: NDArray[np.int64], global_batch_size: int
) -> list[dict[str, Any]]:
    """A row for each figure of consecutive samples: its name in "figure", "this_order",
    "full_shuffle" and its "meaning". Too few samples for a figure give None. No token is read.
    """
    samples = len(sample_ids)
    starts, total = _file_starts(segment)
    places = places_of(segment.locate(sample_ids), starts, segment.config.sequence_length)
    # samples are drawn without repetition, so there must be as many places
    population = max(total, samples)
    # memory grows with the samples, not with the population
    shuffled = np.random.default_rng(0).choice(population, samples, replace=False)
    window = WINDOW_STEPS * global_batch_size
    quality = shuffle_quality(places, total, window)
    full = shuffle_quality(shuffled, population, window)
    return [
        {
            "figure": title,
            "this_order": _figure(getattr(quality, name)),
            "full_shuffle": _figure(getattr(full, name)),
            "meaning": meaning,
        }
        for name, (title, meaning) in FIGURES.items()
    ]


def _figure(value: float) -> float | None:
    return None if np.isnan(value) else float(value)


def _file_starts(segment: SegmentSource) -> tuple[list[NDArray[np.int64]], int]:
    """Samples before each file of each dataset, and the number of all samples."""
    length = segment.config.sequence_length
    starts: list[NDArray[np.int64]] = []
    samples_before = 0
    for files in segment.files:
        starts_of_files: list[int] = []
        for file in files:
            starts_of_files.append(samples_before)
            samples_before += file.num_tokens // length
        starts.append(np.array(starts_of_files, np.int64))
    return starts, samples_before


@dataclass(frozen=True, kw_only=True)
class Mixing:
    """How well consecutive batches are mixed: distinct places of 256 KiB that they come from, divided
    by a full shuffle's. Each figure is of the dataset with the lowest; those with few samples are
    judged together. None: too few samples.

    one_batch, eight_batches: by global batches. share: the smaller of them, for the verdict. Of
    datasets with more blocks than lanes it has windows of at most 512 samples: more take from few
    blocks by design. dataset: the number, over all phases, of the one that `share` is of.
    """

    share: float | None
    one_batch: float | None
    eight_batches: float | None
    dataset: int | None

    @property
    def verdict(self) -> str:
        """`share` in one word."""
        if self.share is None:
            return "unknown"
        return (
            "good" if self.share >= GOOD_SHARE else "fair" if self.share >= FAIR_SHARE else "poor"
        )


def mixing_of(segment: SegmentSource, first_sample: int, global_batch_size: int) -> Mixing:
    """How well batches are mixed from a sample on. No token is read."""
    config = segment.config
    samples = max(4 * MIXED_BATCHES * global_batch_size, MIN_MIXED_SAMPLES)
    samples = min(samples, MAX_MIXED_SAMPLES)
    end = first_sample + samples
    if segment.num_samples is not None:
        end = min(end, segment.num_samples)
    ids = np.arange(first_sample, max(first_sample, end))
    if not len(ids):
        return Mixing(share=None, one_batch=None, eight_batches=None, dataset=None)
    extents = segment.locate(ids)
    numbers = segment.dataset_numbers
    column_of_number = np.zeros(len(segment.files), np.int64)
    column_of_number[numbers] = np.arange(len(numbers))
    number = extents.dataset[extents.row_splits[:-1]]
    starts, _ = _file_starts(segment)
    before = np.array([of_files[0] if len(of_files) else 0 for of_files in starts], np.int64)
    within = places_of(extents, starts, config.sequence_length) - before[number]
    sizes = np.maximum(np.array(segment.tokens_per_epoch) // config.sequence_length, 1)
    order = segment.order
    if order is not None:
        sizes = order.layout.datasets["size"]  # short files have no sample
    itemsizes = np.array([segment.files[n][0].dtype.itemsize for n in numbers.tolist()])
    sample_bytes = config.sequence_length * itemsizes
    of_place = np.maximum(PLACE_BYTES // sample_bytes, 1)

    eight_batches = MIXED_BATCHES * global_batch_size
    windows = [
        global_batch_size,
        eight_batches,
        max(global_batch_size, min(eight_batches, MIXED_LANES)),
    ]
    one, eight, of_lanes = place_shares(within, column_of_number[number], sizes, of_place, windows)
    judged = np.fmin(one, eight)
    if order is not None:
        is_large = sizes * sample_bytes >= order.lanes * order.shuffle_block_bytes
        judged[is_large] = np.fmin(one, of_lanes)[is_large]
    lowest = None if np.isnan(judged).all() else int(np.nanargmin(judged))
    return Mixing(
        share=None if lowest is None else float(judged[lowest]),
        one_batch=_lowest(one),
        eight_batches=_lowest(eight),
        dataset=None if lowest is None else int(numbers[lowest]),
    )


def mixing_report(
    segment: SegmentSource, first_sample: int, global_batch_size: int, names: Sequence[str]
) -> dict[str, Any]:
    """What reports say of `mixing_of`. names: of the datasets, by their numbers."""
    mixing = mixing_of(segment, first_sample, global_batch_size)
    report: dict[str, Any] = {"verdict": mixing.verdict, "of_a_full_shuffle": mixing.share}
    if mixing.dataset is not None and len(names) > 1:
        report["lowest_dataset"] = names[mixing.dataset]
    report |= {"one_batch": mixing.one_batch, "eight_batches": mixing.eight_batches}
    if mixing.verdict in ("fair", "poor"):
        report["advice"] = mixing_advice(segment, global_batch_size)
    return report


def mixing_lines(report: Mapping[str, Any]) -> list[str]:
    """A report of mixing in one sentence, and in another what mixes better."""
    figures = {"one batch": report["one_batch"], "eight batches": report["eight_batches"]}
    parts = [f"{name} {value:.2f}" for name, value in figures.items() if value is not None]
    if not parts:
        return [f"{report['verdict']}: too few samples to judge"]
    dataset = f", lowest in {report['lowest_dataset']}" if "lowest_dataset" in report else ""
    line = f"{report['verdict']}: {', '.join(parts)} of the places of a full shuffle{dataset}"
    return [line, *([f"to mix better, {report['advice']}"] if "advice" in report else [])]


def _lowest(shares: NDArray[np.float64]) -> float | None:
    return None if np.isnan(shares).all() else float(np.nanmin(shares))


def mixing_advice(segment: SegmentSource, global_batch_size: int) -> str:
    """What mixes batches better, as the end of a sentence."""
    order = segment.order
    if order is None:
        return 'set order to "stream" or "megatron", which shuffle'
    has_few = order.lanes < MIXED_LANES
    enough = default_lanes(global_batch_size, None) if has_few else 2 * order.lanes
    return (
        f"set shuffle_lanes to {enough} or more instead of {order.lanes}, before the run or in a phase: "
        "it is another order"
    )
