"""What an order is like before a run is started: shuffle quality, blend drift, and what each rank
would fetch.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import Any

import numpy as np

from streammega.config import DataConfig
from streammega.order.quality import (
    FetchPlan,
    ShuffleQuality,
    fetch_plan,
    places_of,
    shuffle_quality,
)
from streammega.samples.lanes import StreamSource
from streammega.samples.open import open_source
from streammega.samples.source import SampleSource

WINDOW_STEPS = 32
FAR_MORE = 1.5
"""Bytes fetched for each byte used, above which a word is said on why."""


@dataclass(frozen=True, kw_only=True)
class OrderReport:
    """Figures of the first `samples` samples.

    `blend_drift`: largest distance from the target share, in samples, by prefix.
    """

    samples: int
    quality: ShuffleQuality
    full: ShuffleQuality
    plan: FetchPlan
    open_bytes: int
    blend_prefixes: list[int]
    blend_drift: list[float]
    lanes: int | None


def order_report(
    config: DataConfig, split: str, global_batch_size: int, dp_size: int, steps: int
) -> OrderReport:
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
        plan=fetch_plan(
            source.locate(own),
            own % order.lanes if order else own,
            itemsize,
            block,
            int(config.add_extra_token),
        ),
        open_bytes=order.lanes // dp_size * config.block_bytes if order else 0,
        blend_prefixes=prefixes,
        blend_drift=drift,
        lanes=order.lanes if order else None,
    )


NAMES = {
    "distance_entropy": "entropy of distances between consecutive samples (bits)",
    "places_per_256": "distinct places among 256 samples",
    "adjacent_share": "share of samples adjacent to the one before",
    "neighbour_distance": "median samples between neighbours of one document",
    "domain_drift": f"drift of domain shares over {WINDOW_STEPS} steps (1 = independent draws)",
}


def as_text(report: OrderReport, dp_size: int) -> str:
    """The report as a table."""
    ours = report.quality.row()
    full = report.full.row()
    lines = [f"{report.samples:,} samples" + (f", {report.lanes} lanes" if report.lanes else "")]
    lines.append(f"{'':<68}{'this order':>14}{'full shuffle':>14}")
    lines += [
        f"{title:<68}{_figure(ours[name]):>14}{_figure(full[name]):>14}"
        for name, title in NAMES.items()
    ]
    plan = report.plan
    lines.append(
        f"each of {dp_size} ranks: {plan.requests:,} requests, {plan.fetched_bytes / 2**20:,.1f} MiB fetched, "
        f"{plan.amplification:.4f} for each byte used; up to {report.open_bytes / 2**20:,.0f} MiB of blocks open"
    )
    if report.blend_drift:
        lines.append(
            f"blend: at most {max(report.blend_drift):.1f} samples from its target at any of {len(report.blend_drift)} prefixes"
        )
    lines += [f"note: {note}" for note in _notes(report)]
    return "\n".join(lines)


def _figure(value: float) -> str:
    return "-" if np.isnan(value) else f"{value:.4g}"


def _notes(report: OrderReport) -> list[str]:
    """What figures of little data mean."""
    notes = []
    rows = (*report.quality.row().values(), *report.full.row().values())
    if any(np.isnan(value) for value in rows):
        notes.append(
            f"- stands where {report.samples:,} samples are too few for a figure; look at more --steps"
        )
    if report.plan.amplification > FAR_MORE:
        notes.append(
            "more is fetched than used, since every lane has a block open, of which so few samples take little: over a whole "
            "epoch each byte is fetched about once; look at more --steps"
        )
    return notes


def write_plot(report: OrderReport, path: str) -> None:
    """Figures against a full shuffle's, and of a blend its drift, as a PNG."""
    from streammega.cli.plotting import pyplot

    blended = bool(report.blend_drift)
    figure, fields = pyplot().subplots(
        1, 1 + blended, figsize=(12 if blended else 8, 4), squeeze=False, layout="constrained"
    )
    _draw_quality(fields[0][0], report)
    if blended:
        right = fields[0][1]
        right.plot(report.blend_prefixes, report.blend_drift)
        right.set_title("Distance of the blend from its target")
        right.set_xlabel("samples so far")
        right.set_ylabel("samples, of the dataset that is furthest")
    figure.suptitle(
        f"{report.samples:,} samples" + (f", {report.lanes} lanes" if report.lanes else "")
    )
    figure.savefig(path, dpi=120)


def _draw_quality(axes: Any, report: OrderReport) -> None:
    """A bar for each figure as a share of a full shuffle's; beside it the figures themselves, which
    are all where that is 0.
    """
    ours = report.quality.row()
    full = report.full.row()
    titles = [textwrap.fill(title, 34) for title in NAMES.values()]
    shares = [ours[name] / full[name] if full[name] > 0 else np.nan for name in NAMES]
    axes.barh(titles, np.nan_to_num(shares))
    for row, (name, share) in enumerate(zip(NAMES, shares, strict=True)):
        words = f" {_figure(ours[name])} of {_figure(full[name])}"
        axes.text(np.nan_to_num(share), row, words, va="center", fontsize="small")
    axes.axvline(1.0, color="gray", linestyle="--")
    axes.margins(x=0.25)
    axes.set_xlim(left=0)
    axes.invert_yaxis()
    axes.set_title("Shuffling")
    axes.set_xlabel("this order / full shuffle")


def _fully_shuffled(total: int, count: int) -> Any:
    """The first `count` places of a full shuffle, in memory of that order however many places there
    are.
    """
    return np.random.default_rng(0).choice(total, count, replace=False)


def _file_starts(source: SampleSource) -> tuple[list[Any], int]:
    """Samples before each file of each dataset, and of all."""
    length = source.config.sequence_length
    starts = []
    total = 0
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
    drift = []
    counts = np.zeros(len(shares))
    before = 0
    for prefix in prefixes:
        counts += np.bincount(dataset[before:prefix], minlength=len(shares))
        drift.append(float(np.abs(counts - prefix * shares).max()))
        before = prefix
    return prefixes, drift
