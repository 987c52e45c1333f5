"""How well the samples of a segment are shuffled, against a full shuffle of as many."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from streammega.order.quality import places_of, shuffle_quality
from streammega.samples.source import SegmentSource

WINDOW_STEPS = 32
"""Global batches over which the drift of domain shares is measured."""


FIGURES = {
    "distance_entropy": "entropy of distances between consecutive samples (bits)",
    "places_per_256": "distinct places among 256 samples",
    "adjacent_share": "share of samples adjacent to the one before",
    "neighbour_distance": "median samples between neighbours of one document",
    "domain_drift": f"drift of domain shares over {WINDOW_STEPS} steps (1 = independent draws)",
}
"""The fields of `ShuffleQuality` in words."""


def shuffle_figures(
    segment: SegmentSource, sample_ids: NDArray[np.int64], global_batch_size: int
) -> list[dict[str, Any]]:
    """A row for each figure of consecutive samples: its title in "figure", "this_order" and
    "full_shuffle". Too few samples for a figure give None. No token is read.
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
        }
        for name, title in FIGURES.items()
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
