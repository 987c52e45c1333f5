#!/usr/bin/env python3
"""Shuffle quality of several systems at equal memory, from their published constructions, and of
lanes and block sizes.

The data: a model of 64 GiB of uint16 tokens, samples of 4096. Memory: what a node must hold open (a
megabyte is 128 samples).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from streammega.cli.plotting import pyplot
from streammega.order.quality import Places, shuffle_quality
from streammega.order.stream_order import default_block_bytes, default_lanes
from tools.bench import harness
from tools.bench.shuffle_models import block_shuffle, full_shuffle, py1e, shuffle_buffer, stream

TOTAL = 1 << 23
LENGTH = 4096
SAMPLE_BYTES = 2 * LENGTH
BATCH = 1024
GLOBAL_BATCH = 256
"""By which lanes and blocks are chosen by default."""
SHARD = 8192  # samples of a 64 MiB shard
MiB = 1 << 20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plot", help="write a PNG of domain drift over memory")
    parser.add_argument(
        "--samples", type=int, default=1 << 21, help="how many samples are looked at"
    )
    chosen = parser.parse_args()
    rng = np.random.default_rng(0)
    harness.table(
        "order",
        "memory",
        "entropy (bits)",
        "places / 256",
        "adjacent",
        "neighbours apart",
        "domain drift",
    )
    row("full shuffle", None, full_shuffle(TOTAL, rng)[: chosen.samples])
    points: dict[str, list[tuple[float, float]]] = {
        name: [] for name in ("py1e", "shuffle buffer", "block shuffle")
    }
    for memory in (64, 256, 1024, 4096):
        held = memory * MiB // SAMPLE_BYTES
        peers: dict[str, Callable[[], Places]] = {
            "py1e": lambda held=held: py1e(TOTAL, SHARD, max(held, SHARD), rng),  # type: ignore[misc]
            "shuffle buffer": lambda held=held: shuffle_buffer(TOTAL, SHARD, held, rng),  # type: ignore[misc]
            "block shuffle": lambda held=held: block_shuffle(TOTAL, held, rng),  # type: ignore[misc]
        }
        for name, make in peers.items():
            points[name].append((memory, row(name, memory, make()[: chosen.samples])))
        for lanes, block in ((1024, memory * MiB // 1024), (4096, memory * MiB // 4096)):
            if block >= SAMPLE_BYTES:
                drift = stream_row(lanes, block, chosen.samples)
                points.setdefault(f"stream, {lanes} lanes", []).append((memory, drift))
    lanes = default_lanes(GLOBAL_BATCH, None)
    stream_row(lanes, default_block_bytes(lanes), chosen.samples, ", the default")
    if chosen.plot:
        plot(points, chosen.plot)
    return 0


def stream_row(lanes: int, block_bytes: int, samples: int, note: str = "") -> float:
    """Print the row of a stream order; returns the domain drift."""
    starts = stream(
        TOTAL * LENGTH + 1, LENGTH, samples, lanes=lanes, shuffle_block_bytes=block_bytes
    )
    title = f"stream, {lanes} lanes, {block_bytes // 1024} KiB blocks{note}"
    return row(title, lanes * block_bytes // MiB, starts // LENGTH)


def row(name: str, memory: int | None, places: Places) -> float:
    """Print a row; returns the domain drift."""
    q = shuffle_quality(places, TOTAL, 32 * BATCH)
    held = "all" if memory is None else f"{memory} MiB"
    harness.row(
        name,
        held,
        f"{q.distance_entropy:.2f}",
        f"{q.places_per_256:.0f}",
        f"{q.adjacent_share:.4f}",
        f"{q.neighbour_distance:,.0f}",
        f"{q.domain_drift:.2f}",
    )
    return q.domain_drift


def plot(points: dict[str, list[tuple[float, float]]], path: str) -> None:
    figure, axes = pyplot().subplots(figsize=(7, 4.5))
    for name, pairs in points.items():
        axes.plot(*zip(*sorted(pairs), strict=True), "o-", label=name)
    axes.axhline(1.0, color="gray", linestyle="--", label="independent draws")
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="memory held open (MiB)",
        ylabel="drift of domain shares over 32 steps (1: none)",
    )
    # The curves leave no corner free.
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.savefig(path, dpi=120, bbox_inches="tight")


if __name__ == "__main__":
    sys.exit(main())
