"""What a change of the length of samples costs: the time to open its phase, and how the rest of the
epochs in progress is read.

python tools/bench/phases.py
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from streammega.order.epoch_layout import FilePart, StreamDataset
from streammega.order.stream_order import StreamOrder

SHARD = 200_000_000
"""Tokens of a file."""
TOKENS = (40_000_000, 400_000_000, 4 * 10**9, 4 * 10**10, 10**11, 4 * 10**11)
WEIGHTS = (1.0, 2.0, 4.0, 8.0, 8.0, 16.0)
SAMPLES = 2_000_000
"""Samples of every phase."""
LOCATED = 4096


def dataset_of(tokens: int) -> StreamDataset:
    parts = [
        FilePart(file=file, start=0, tokens=min(SHARD, tokens - file * SHARD))
        for file in range(-(-tokens // SHARD))
    ]
    return StreamDataset(parts=parts, itemsize=2)


def last_of_chain(lengths: Sequence[int]) -> StreamOrder:
    """The order of the last phase: samples of 4096 first, then of each of some lengths."""
    datasets = [dataset_of(tokens) for tokens in TOKENS]
    orders: list[StreamOrder] = []
    for number, length in enumerate([4096, *lengths]):
        order = StreamOrder(
            datasets=datasets,
            weights=WEIGHTS,
            sequence_length=length,
            extra_token=True,
            seed=1,
            lanes=1024,
            first_sample=SAMPLES * number,
            earlier=tuple(orders),
        )
        orders.append(order)
    return orders[-1]


def report(lengths: Sequence[int]) -> str:
    order = last_of_chain(lengths)
    ids = SAMPLES * len(lengths) + np.arange(LOCATED)
    began = time.process_time()
    runs = np.diff(order.locate(ids).row_splits)
    opened = time.process_time() - began
    began = time.process_time()
    order.locate(ids + LOCATED)
    each = (time.process_time() - began) / LOCATED
    remainders = [each for each in order.remainders if each is not None]
    waiting = max(each.tokens - each.samples * each.length for each in remainders)
    return (
        f"{len(lengths):2} changes, the last to {lengths[-1]:6}: {opened:.2f} s to open, "
        f"{each * 1e6:.1f} us a sample, {(runs == 1).mean():.1%} of one run, at most {runs.max()}; "
        f"at most {waiting:,} tokens of a dataset wait"
    )


def main() -> None:
    report([8192])  # compiles
    for lengths in ([8192], [32768], [6000], [131072], [8192, 4096] * 10):
        print(report(lengths))


if __name__ == "__main__":
    main()
