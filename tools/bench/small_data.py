#!/usr/bin/env python3
"""Small datasets in the stream order: how well it mixes them, and how fast they are read.

    .venv/bin/python tools/bench/small_data.py --figures mixing    # two minutes
    .venv/bin/python tools/bench/small_data.py --figures rates     # ten minutes

Mixing: places of 256 KiB that one and eight consecutive global batches come from, beside a full shuffle,
and how often a sample is used in 20 epochs. Rates: a loader of one rank, alone and as one of eight, that
reads from an object server in another process, beside the rate with a large dataset.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from streammega import DataConfig, StorageConfig, StreamLoader
from streammega.order.epoch_layout import FilePart, StreamDataset
from streammega.order.stream_order import StreamOrder, default_block_bytes, default_lanes
from tools.bench import harness
from tools.bench.corpus import write_random
from tools.bench.object_server import Running, running

PLACE_BYTES = 1 << 18
EPOCHS = 20
MAX_BATCHES = 400
"""Batches that are looked at, of longer epochs."""
MIXED_TOKENS = (200_000, 2_000_000, 7_000_000, 33_000_000, 66_000_000, 200_000_000)
BATCHES = (8, 64, 1024)
LENGTHS = (128, 512, 2048, 8192)
READ_TOKENS = {"1 MB": 500_000, "10 MB": 5_000_000, "100 MB": 50_000_000}
LARGE = "1 GB"
LARGE_TOKENS = 500_000_000
LATENCIES = (0.0, 0.02)
RANKS = (1, 8)
SECONDS = 1.0
ROUNDS = 3


def order_of(tokens: int, length: int, batch: int) -> StreamOrder:
    """The order of one dataset of 16-bit tokens, with the default lanes."""
    part = FilePart(file=0, start=0, tokens=tokens)
    lanes = default_lanes(batch, None)
    return StreamOrder(
        datasets=[StreamDataset(parts=[part], itemsize=2)],
        weights=[1.0],
        sequence_length=length,
        extra_token=True,
        seed=7,
        lanes=lanes,
        shuffle_block_bytes=default_block_bytes(lanes),
    )


def distinct(places: NDArray[np.int64], samples: int) -> float:
    """Distinct places of so many consecutive samples, on average."""
    windows = places[: len(places) // samples * samples].reshape(-1, samples)
    return statistics.fmean(len(np.unique(window)) for window in windows)


def mixing(tokens: int, length: int, batch: int) -> tuple[str, ...] | None:
    """The row of a dataset; None where an epoch has not eight batches."""
    order = order_of(tokens, length, batch)
    samples = (tokens - 1) // length
    batches = min(samples // batch, MAX_BATCHES)
    if batches < 8:
        return None
    places = order.locate(np.arange(batches * batch)).start * 2 // PLACE_BYTES
    shuffled = np.random.default_rng(0).permutation(samples)[: batches * batch]
    full = shuffled * length * 2 // PLACE_BYTES
    ratios = [distinct(places, count * batch) / distinct(full, count * batch) for count in (1, 8)]
    uses = np.zeros(samples + 1, np.int64)
    step = 1 << 20
    for first in range(0, EPOCHS * samples, step):
        found = order.locate(np.arange(first, min(first + step, EPOCHS * samples)))
        uses += np.bincount(found.start // length, minlength=samples + 1)
    # an epoch begins at an offset of its own, so the last sample may be short of a use or the first
    inner = uses[1:-2]
    few_blocks = samples * length * 2 < order.lanes * order.shuffle_block_bytes
    return (
        f"{tokens:,}", f"{length:,}", f"{batch:,}", "yes" if few_blocks else "no",
        f"{ratios[0]:.2f}", f"{ratios[1]:.2f}", f"{inner.min()} to {inner.max()}",
    )  # fmt: skip


def show_mixing() -> None:
    harness.table(
        "tokens", "S", "batch", "fewer blocks than lanes", "1 batch", "8 batches",
        f"uses in {EPOCHS} epochs",
    )  # fmt: skip
    for batch in BATCHES:
        for length in LENGTHS:
            for tokens in MIXED_TOKENS:
                cells = mixing(tokens, length, batch)
                if cells is not None:
                    harness.row(*cells)


def rate(server: Running, name: str, length: int, ranks: int) -> tuple[float, float]:
    """(million tokens a second of one rank, requests a second), from its first batch on."""
    sizes: dict[str, Any] = {"micro_batch_size": 8, "global_batch_size": 64}
    config = DataConfig(
        blend=f"s3://data/{name.replace(' ', '')}",
        sequence_length=length,
        order="stream",
        storage=StorageConfig(storage_options=server.storage_options),
        index_cache_dir=server.root.parent / "idx",
    )
    with StreamLoader(config, **sizes, dp_rank=0, dp_size=ranks) as loader:
        next(loader)
        began = time.perf_counter()
        batches = 0
        while (spent := time.perf_counter() - began) < SECONDS:
            for _ in range(16):
                next(loader)
            batches += 16
        return batches * 8 * length / spent / 1e6, loader.stats()["requests"] / spent


def show_rates() -> None:
    with tempfile.TemporaryDirectory(prefix="streammega-small-") as folder:
        root = Path(folder) / "objects"
        (root / "data").mkdir(parents=True)
        for name, tokens in {**READ_TOKENS, LARGE: LARGE_TOKENS}.items():
            lengths = np.full(tokens // 1000, 1000)
            write_random(str(root / "data" / name.replace(" ", "")), lengths)
        harness.table(
            "S", "latency", "ranks", *(f"{name}, M tokens/s" for name in READ_TOKENS),
            f"{LARGE}, M tokens/s", "smallest share",
        )  # fmt: skip
        with running(root) as server:
            for latency in LATENCIES:
                server.behave(latency=latency)
                for ranks in RANKS:
                    for length in LENGTHS:
                        show_rate(server, length, latency, ranks)


def show_rate(server: Running, length: int, latency: float, ranks: int) -> None:
    names = (*READ_TOKENS, LARGE)
    sides = {name: lambda name=name: rate(server, name, length, ranks)[0] for name in names}
    found = harness.medians(ROUNDS, sides)
    share = min(found[name] for name in READ_TOKENS) / found[LARGE]
    harness.row(
        f"{length:,}", f"{1000 * latency:g} ms", str(ranks), *(f"{found[name]:.1f}" for name in names),
        f"{share:.2f}",
    )  # fmt: skip


def main() -> int:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--figures", choices=("mixing", "rates"), required=True)
    chosen = options.parse_args()
    print(f"{harness.machine()}\n")
    if chosen.figures == "mixing":
        show_mixing()
    else:
        show_rates()
    return 0


if __name__ == "__main__":
    sys.exit(main())
