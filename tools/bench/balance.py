"""How evenly attention over documents is spread over ranks, as samples come and by balance_attention_cost.

    python tools/bench/balance.py [--documents sources lognormal]

The cost of a global batch (squared tokens of documents, added up) where ranks wait for each other
in every micro-step, and where they do at its end alone, divided by what it would be if all ranks
had the same; over 64 global batches.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from streammega import DataConfig, StreamingDataset
from streammega.loading.micro_steps import attention_costs
from tools.bench import corpus, harness

BATCHES = 64
DOCUMENTS = 20_000
LAYOUTS = ((8, 1, 256, 4096), (64, 1, 256, 4096), (64, 4, 256, 4096), (64, 1, 256, 32768))
"""Ranks, samples of a micro-batch and of a global batch, tokens of a sample."""


def pace(costs: NDArray[np.int64]) -> int:
    """The cost of a global batch where ranks wait for each other in every micro-step: the sum of the
    highest costs of a rank.

    costs: int64 [micro-steps, dp_size, micro_batch_size].
    """
    return int(costs.sum(axis=2).max(axis=1).sum())


def longest_rank(costs: NDArray[np.int64]) -> int:
    """The cost of a global batch where ranks wait for each other only at its end. costs: as in
    `pace`.
    """
    return int(costs.sum(axis=(0, 2)).max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--documents", nargs="+", default=["sources", "lognormal"])
    chosen = parser.parse_args()
    harness.table(
        "documents", "ranks x micro-batch of global batch, tokens", "each micro-step", "balanced", "at the end", "balanced"
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        for name in chosen.documents:
            prefix = f"{folder}/{name}"
            corpus.write_random(prefix, corpus.sample_lengths(name, DOCUMENTS))
            for layout in LAYOUTS:
                ranks, rows, batch, length = layout
                plain = spread_of(prefix, layout, balanced=False)
                even = spread_of(prefix, layout, balanced=True)
                title = f"{ranks} x {rows} of {batch}, {length}"
                figures = [plain[0], even[0], plain[1], even[1]]
                harness.row(name, title, *(f"{figure:.3f}" for figure in figures))


def config_of(prefix: str, length: int, *, balanced: bool) -> DataConfig:
    return DataConfig(
        blend=[prefix],
        sequence_length=length,
        order="stream",
        eod_id=corpus.EOD,
        reset_attention_mask=True,
        reset_position_ids=True,
        balance_attention_cost=balanced,
        index_cache_dir=f"{prefix}.cache",
    )


def spread_of(
    prefix: str, layout: tuple[int, int, int, int], *, balanced: bool
) -> tuple[float, float]:
    """(pace, longest rank) of global batches over what they would be if all were even."""
    ranks, rows, batch, length = layout
    config = config_of(prefix, length, balanced=True)
    dataset = StreamingDataset(
        config, micro_batch_size=rows, global_batch_size=batch, dp_rank=0, dp_size=ranks
    )
    # The samples know what they cost because they were opened to be balanced.
    dealt_config = config_of(prefix, length, balanced=balanced)
    steps = replace(dataset.steps, config=dealt_config)
    paces = []
    longest = []
    for first in range(0, BATCHES * batch, batch):
        starts = np.arange(first, first + batch, ranks * rows)
        ids = [replace(steps, dp_rank=rank).sample_ids(starts) for rank in range(ranks)]
        dealt = np.stack(ids, axis=1)
        costs = attention_costs(dataset.samples.segments[0], dealt.reshape(-1)).reshape(dealt.shape)
        even = costs.sum() / ranks
        paces.append(pace(costs) / even)
        longest.append(longest_rank(costs) / even)
    return float(np.mean(paces)), float(np.mean(longest))


if __name__ == "__main__":
    main()
