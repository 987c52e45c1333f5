#!/usr/bin/env python3
"""Building and locating orders, side by side with megatron-core's compiled helpers and NumPy, in
one run.

Both sides alternate, several times each; the ratio is that of the medians. Results are compared bit
for bit.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from streammega.kernels.blending import blend_weighted
from streammega.kernels.sample_index import build_sample_index
from streammega.kernels.shuffle import LegacyShuffler
from streammega.order.epoch_layout import FilePart, StreamDataset
from streammega.order.megatron import normalized
from streammega.order.state import make_state
from streammega.order.stream_order import StreamOrder

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tools.bench import harness

Side = Callable[[], Any]


def main() -> int:
    parser = harness.parser(__doc__, FIGURES, runs=5)
    parser.add_argument("--sequences", type=int, nargs="*", default=[20_000_000])
    chosen = parser.parse_args()
    harness.print_head(("numpy", "numba", "megatron-core"), chosen.runs)
    harness.table("kernel", "helpers / NumPy", "streammega", "ratio", "bits")
    return harness.print_figures(FIGURES, chosen)


def compare(name: str, theirs: Side, ours: Side, runs: int) -> None:
    """One row: medians of alternating runs, after one of each to warm up."""
    same = equal(theirs(), ours())
    sides = {
        "theirs": partial(harness.seconds_of, theirs),
        "ours": partial(harness.seconds_of, ours),
    }
    seconds = harness.medians(runs, sides)
    harness.row(
        name,
        f"{seconds['theirs']:.3f} s",
        f"{seconds['ours']:.3f} s",
        f"{seconds['theirs'] / seconds['ours']:.1f}x",
        "identical" if same else "DIFFERENT",
    )


def equal(theirs: Any, ours: Any) -> bool:
    pairs = zip(theirs, ours, strict=True) if isinstance(theirs, tuple) else [(theirs, ours)]
    return all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in pairs)


def indices(chosen: argparse.Namespace) -> None:
    for sequences in chosen.sequences:
        sample_index(sequences, chosen.runs)
        shuffles(sequences, chosen.runs)


def sample_index(sequences: int, runs: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.datasets import helpers
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 2000, sequences).astype(np.int32)
    index = np.arange(sequences, dtype=np.int32)
    LegacyShuffler(1).shuffle(index)
    tokens = int(lengths.sum(dtype=np.int64))
    rows = (tokens - 1) // 4096
    compare(
        f"sample index, {sequences / 1e6:.0f}M sequences",
        lambda: helpers.build_sample_idx_int32(lengths, index, 4096, 1, tokens, True, 1),
        lambda: build_sample_index(lengths, index, rows, 4096, 1, np.int32),
        runs,
    )


def shuffles(sequences: int, runs: int) -> None:
    """Document and shuffle index of one epoch: what Megatron builds with NumPy."""

    def shuffled(shuffler: Any) -> tuple[np.ndarray, np.ndarray]:
        documents = np.arange(sequences, dtype=np.int32)
        samples = np.arange(sequences // 4, dtype=np.uint32)
        shuffler.shuffle(documents)
        shuffler.shuffle(samples)
        return documents, samples

    compare(
        f"document + shuffle index, {sequences / 1e6:.0f}M sequences",
        lambda: shuffled(np.random.RandomState(1)),
        lambda: shuffled(LegacyShuffler(1)),
        runs,
    )


def blends(chosen: argparse.Namespace) -> None:
    rng = np.random.default_rng(0)
    for count, size in ((64, 4_000_000), (256, 2_000_000), (1000, 500_000)):
        kinds = {
            "random": rng.random(count) + 1e-6,
            "Zipf": 1 / np.arange(1, count + 1),
            "equal": np.ones(count),
        }
        for kind, raw in kinds.items():
            theirs, ours = blend_sides(raw, size)
            title = f"blending {count} datasets, {kind} weights, {size / 1e6:g}M samples"
            compare(title, theirs, ours, chosen.runs)


def blend_sides(raw_weights: np.ndarray, size: int) -> tuple[Side, Side]:
    """The helper's and ours, which blend so many samples."""
    from megatron.core.datasets import helpers

    weights = np.array(normalized(raw_weights.tolist()))

    def theirs() -> tuple[np.ndarray, np.ndarray]:
        dataset = np.zeros(size, np.int16)
        sample = np.zeros(size, np.int64)
        helpers.build_blending_indices(dataset, sample, weights.tolist(), len(weights), size, False)
        return dataset, sample

    def ours() -> tuple[np.ndarray, np.ndarray]:
        return blend_weighted(weights, size)

    return theirs, ours


def stream_order(datasets: int) -> StreamOrder:
    rng = np.random.default_rng(0)
    sizes = rng.integers(10**9, 10**12, datasets).tolist()
    return StreamOrder(
        datasets=[
            StreamDataset(parts=[FilePart(file=0, start=0, tokens=size)], itemsize=2)
            for size in sizes
        ],
        weights=rng.random(datasets).tolist(),
        sequence_length=4096,
        extra_token=True,
        seed=1,
        lanes=1024,
    )


def locate(chosen: argparse.Namespace) -> None:
    order = stream_order(64)
    ids = np.arange(10**10, 10**10 + 2_000_000)
    order.locate(ids[:10])
    sides = {"ours": lambda: harness.seconds_of(lambda: order.locate(ids))}
    rate = len(ids) / harness.medians(chosen.runs, sides)["ours"]
    print(f"\nlocate, stream order, 64 datasets blended: {rate / 1e6:.1f}M samples/s on one core")
    # from sizes to the first batch's places
    for first in (0, 10**10):
        began = time.perf_counter()
        order = stream_order(20)
        order.locate(np.arange(first, first + 1024))
        taken = time.perf_counter() - began
        print(f"start of a 20-dataset stream at sample {first:,}: {taken * 1e3:.1f} ms")
    state = make_state(
        {"datasets": ["0123456789ab*0.12345678"] * 20, "seed": 1, "order": "stream", "lanes": 1024},
        10**10,
        global_batch_size=1024,
    )
    print(f"state of a loader with 20 datasets: about {len(str(state))} bytes")


FIGURES = harness.Figures(indices=indices, blends=blends, locate=locate)


if __name__ == "__main__":
    sys.exit(main())
