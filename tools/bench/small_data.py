#!/usr/bin/env python3
"""Small datasets in the stream order: how well it mixes them, and how fast they are read.

    .venv/bin/python tools/bench/small_data.py --figures mixing    # five minutes
    .venv/bin/python tools/bench/small_data.py --figures rates     # ten minutes

Mixing: places of 256 KiB that a dataset's samples in one and in eight consecutive global batches come from,
beside a full shuffle, and how often a sample is used in 20 epochs; alone and as a part of a blend with 200 M
tokens. Rates: a loader of one rank, alone and as one of eight, that
reads from an object server in another process, beside the rate with a large dataset.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from streammega import DataConfig, StorageConfig, StreamLoader
from streammega.order.epoch_layout import FilePart, StreamDataset
from streammega.order.quality import PLACE_BYTES, place_shares
from streammega.order.stream_order import StreamOrder, default_block_bytes, default_lanes
from tools.bench import harness
from tools.bench.corpus import write_random
from tools.bench.object_server import Running, running

EPOCHS = 20
MAX_BATCHES = 400
"""Batches that are looked at, of longer epochs; in a blend as many more as the share is smaller."""
MAX_SAMPLES = 1 << 22
MIXED_TOKENS = (
    200_000, 2_000_000, 7_000_000, 33_000_000, 66_000_000, 72_000_000, 100_000_000, 200_000_000,
)  # fmt: skip
SHARES = (1.0, 0.1, 0.01)
BESIDE_TOKENS = 200_000_000
BATCHES = (8, 64, 1024)
LENGTHS = (128, 512, 2048, 8192)
READ_TOKENS = {"1 MB": 500_000, "10 MB": 5_000_000, "100 MB": 50_000_000}
LARGE = "1 GB"
LARGE_TOKENS = 500_000_000
LATENCIES = (0.0, 0.02)
RANKS = (1, 8)
SECONDS = 1.0
ROUNDS = 3


class Mixed(NamedTuple):
    """Places of one and eight batches, divided by a full shuffle's, and (fewest, most) uses."""

    few_blocks: bool
    one_batch: float
    eight_batches: float
    uses: tuple[int, int] | None


def order_of(tokens: int, length: int, batch: int, share: float) -> StreamOrder:
    """The order of a dataset of 16-bit tokens, with the default lanes, alone or beside a larger one."""
    sizes = (tokens,) if share == 1 else (tokens, BESIDE_TOKENS)
    lanes = default_lanes(batch, None)
    return StreamOrder(
        datasets=[
            StreamDataset(parts=[FilePart(file=0, start=0, tokens=size)], itemsize=2)
            for size in sizes
        ],
        weights=[share, 1 - share][: len(sizes)],
        sequence_length=length,
        extra_token=True,
        seed=7,
        lanes=lanes,
        shuffle_block_bytes=default_block_bytes(lanes),
    )


def mixing(tokens: int, length: int, batch: int, share: float) -> Mixed | None:
    """The figures of a dataset; None where an epoch has not eight batches."""
    order = order_of(tokens, length, batch, share)
    samples = (tokens - 1) // length
    batches = min(int(min(samples, MAX_BATCHES * batch) / share), MAX_SAMPLES) // batch
    if batches < 8:
        return None
    found = order.locate(np.arange(batches * batch))
    dataset = found.dataset.astype(np.int64)
    place_samples = max(PLACE_BYTES // (2 * length), 1)
    sizes = np.array([dataset.tokens for dataset in order.datasets]) // length
    of_place = np.full(len(sizes), place_samples)
    shares = place_shares(found.start // length, dataset, sizes, of_place, (batch, 8 * batch))
    one, eight = shares[:, 0]
    few_blocks = samples * length * 2 < order.lanes * order.shuffle_block_bytes
    return Mixed(few_blocks, float(one), float(eight), uses(order, samples) if share == 1 else None)


def uses(order: StreamOrder, samples: int) -> tuple[int, int]:
    """(fewest, most) uses of a sample in EPOCHS epochs of the only dataset."""
    counts = np.zeros(samples + 1, np.int64)
    step = 1 << 20
    for first in range(0, EPOCHS * samples, step):
        found = order.locate(np.arange(first, min(first + step, EPOCHS * samples)))
        counts += np.bincount(found.start // order.sequence_length, minlength=samples + 1)
    # an epoch begins at an offset of its own, so the last sample may be short of a use or the first
    inner = counts[1:-2]
    return int(inner.min()), int(inner.max())


def show_mixing() -> None:
    harness.table(
        "share", "batch", "S", "tokens", "fewer blocks than lanes", "1 batch", "8 batches",
        f"uses in {EPOCHS} epochs",
    )  # fmt: skip
    figures: dict[float, list[Mixed]] = {share: [] for share in SHARES}
    for share, batch, length, tokens in product(SHARES, BATCHES, LENGTHS, MIXED_TOKENS):
        mixed = mixing(tokens, length, batch, share)
        if mixed is None or np.isnan(mixed.one_batch):
            continue
        figures[share].append(mixed)
        fewest_to_most = "" if mixed.uses is None else f"{mixed.uses[0]} to {mixed.uses[1]}"
        harness.row(
            f"{share:g}", f"{batch:,}", f"{length:,}", f"{tokens:,}",
            "yes" if mixed.few_blocks else "no", f"{mixed.one_batch:.2f}",
            f"{mixed.eight_batches:.2f}", fewest_to_most,
        )  # fmt: skip
    print()
    harness.table("share", "1 batch", "8 batches, fewer blocks than lanes", "8 batches, others")
    for share, of_share in figures.items():
        harness.row(
            f"{share:g}",
            from_to([mixed.one_batch for mixed in of_share]),
            from_to([mixed.eight_batches for mixed in of_share if mixed.few_blocks]),
            from_to([mixed.eight_batches for mixed in of_share if not mixed.few_blocks]),
        )


def from_to(values: list[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}" if values else ""


def rate(server: Running, name: str, length: int, ranks: int) -> tuple[float, float]:
    """(million tokens a second of one rank, requests a second), from its first batch on."""
    sizes: dict[str, Any] = {"micro_batch_size": 8, "global_batch_size": 64}
    config = DataConfig(
        blend=f"s3://data/{name.replace(' ', '')}",
        sequence_length=length,
        storage=StorageConfig(
            storage_options=server.storage_options, cache_dir=server.root.parent / "idx"
        ),
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
