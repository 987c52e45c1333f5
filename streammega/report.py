"""What an order is like before a run is started: shuffle quality, blend drift, and what each rank would fetch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from streammega.config import DataConfig
from streammega.order.quality import FetchPlan, ShuffleQuality, fetch_plan, places_of, shuffle_quality
from streammega.samples.open import open_source
from streammega.samples.source import SampleSource
from streammega.samples.stream import StreamSource

WINDOW_STEPS = 32


@dataclass(frozen=True, kw_only=True)
class OrderReport:
    """Figures of the first `samples` samples. `blend_drift`: largest distance from the target share, in samples, by prefix."""

    samples: int
    quality: ShuffleQuality
    full: ShuffleQuality
    plan: FetchPlan
    open_bytes: int
    blend_prefixes: list[int]
    blend_drift: list[float]
    lanes: int | None


def order_report(config: DataConfig, split: str, global_batch_size: int, dp_size: int, steps: int) -> OrderReport:
    """Measure `steps` global batches of an order from its plan; no token is read."""
    source = open_source(config, split, global_batch_size)
    count = steps * global_batch_size
    if source.num_samples is not None:
        count = min(count, source.num_samples)
    ids = np.arange(count)
    extents = source.locate(ids)
    starts, total = _file_starts(source)
    window = WINDOW_STEPS * global_batch_size
    places = places_of(extents, starts, config.sequence_length)
    own = ids[ids % dp_size == 0]
    order = source.order if isinstance(source, StreamSource) else None
    itemsize = max(file.dtype.itemsize for files in source.files for file in files)
    block = config.block_bytes // itemsize if order else config.sequence_length
    prefixes, drift = _blend_drift(extents.dataset[extents.row_splits[:-1]], order)
    return OrderReport(
        samples=count,
        quality=shuffle_quality(places, total, window),
        full=shuffle_quality(_fully_shuffled(max(total, count), count), max(total, count), window),
        plan=fetch_plan(source.locate(own), own % order.lanes if order else own, itemsize, block, int(config.add_extra_token)),
        open_bytes=order.lanes // dp_size * config.block_bytes if order else 0,
        blend_prefixes=prefixes,
        blend_drift=drift,
        lanes=order.lanes if order else None,
    )


def as_text(report: OrderReport, dp_size: int) -> str:
    """The report as a table."""
    names = {
        "distance_entropy": "entropy of distances between consecutive samples (bits)",
        "places_per_256": "distinct places among 256 samples",
        "adjacent_share": "share of samples adjacent to the one before",
        "neighbour_distance": "median samples between neighbours of one document",
        "domain_drift": f"drift of domain shares over {WINDOW_STEPS} steps (1 = independent draws)",
    }
    ours, full = report.quality.row(), report.full.row()
    lines = [f"{report.samples:,} samples" + (f", {report.lanes} lanes" if report.lanes else "")]
    lines.append(f"{'':<68}{'this order':>14}{'full shuffle':>14}")
    lines += [f"{title:<68}{ours[name]:>14.4g}{full[name]:>14.4g}" for name, title in names.items()]
    plan = report.plan
    lines.append(
        f"each of {dp_size} ranks: {plan.requests:,} requests, {plan.fetched_bytes / 2**20:,.1f} MiB fetched, "
        f"{plan.amplification:.4f} for each byte used; up to {report.open_bytes / 2**20:,.0f} MiB of blocks open"
    )
    if report.blend_drift:
        lines.append(
            f"blend: at most {max(report.blend_drift):.1f} samples from its target at any of {len(report.blend_drift)} prefixes"
        )
    return "\n".join(lines)


def write_plot(report: OrderReport, path: str) -> None:
    """Blend drift and figures against a full shuffle's, as a PNG."""
    from streammega.plotting import pyplot

    figure, (left, right) = pyplot().subplots(1, 2, figsize=(11, 4))
    ours, full = report.quality.row(), report.full.row()
    ratio = [ours[name] / full[name] if full[name] else 0.0 for name in ours]
    left.barh(list(ours), ratio)
    left.axvline(1.0, color="gray", linestyle="--")
    left.set_xlabel("this order / full shuffle")
    right.plot(report.blend_prefixes, report.blend_drift)
    right.set_xlabel("samples")
    right.set_ylabel("largest distance from the blend's target (samples)")
    figure.savefig(path, dpi=120, bbox_inches="tight")


def _fully_shuffled(total: int, count: int) -> Any:
    """The first `count` places of a full shuffle, in memory of that order however many places there are."""
    return np.random.default_rng(0).choice(total, count, replace=False)


def _file_starts(source: SampleSource) -> tuple[list[Any], int]:
    """Samples before each file of each dataset, and of all."""
    length, starts, total = source.config.sequence_length, [], 0
    for files in source.files:
        sizes = [file.num_tokens // length for file in files]
        starts.append(np.cumsum([total, *sizes[:-1]]))
        total += sum(sizes)
    return starts, total


def _blend_drift(dataset: Any, order: Any) -> tuple[list[int], list[float]]:
    if order is None or len(order.datasets) < 2 or len(order.schedule) > 1:
        return [], []
    shares = np.array(order.schedule[0][1]) / np.sum(order.schedule[0][1])
    prefixes = [int(n) for n in np.unique(np.linspace(1, len(dataset), 200).astype(np.int64))]
    drift, counts, before = [], np.zeros(len(shares)), 0
    for prefix in prefixes:
        counts += np.bincount(dataset[before:prefix], minlength=len(shares))
        drift.append(float(np.abs(counts - prefix * shares).max()))
        before = prefix
    return prefixes, drift
