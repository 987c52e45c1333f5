"""What tests run as ranks: functions of (rank, ...) that return plain values. They import nothing slow."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from streammega import DataConfig, ParallelLayout, RankBatches, Ranks, get_batch
from streammega.ranks import open_loader


def read_batches(
    rank: int, layout: ParallelLayout, config: DataConfig, sizes: dict[str, Any], steps: int, ahead: int, every_stage: bool
) -> dict[str, Any]:
    """The first micro-batches of a rank, its state after them, and what was sent and read for them."""
    ranks = Ranks(layout)
    with open_loader(config, ranks, **sizes) as loader:
        if ahead:
            batches = RankBatches(loader, ranks, every_stage=every_stage, ahead=ahead)
            got = list(itertools.islice(batches, steps))
            state, sent = batches.state_dict(), batches.broadcast_bytes
            batches.close()
        else:
            got = [get_batch(loader, ranks, every_stage=every_stage) for _ in range(steps)]
            state, sent = loader.state_dict(), 0
        return {
            "at": ranks.at,
            "batches": [{name: field.clone().numpy() for name, field in batch.items()} for batch in got],
            "state": state,
            "sent": sent,
            "planned": loader.stats()["batches"],
        }


def to_the_end(rank: int, layout: ParallelLayout, config: DataConfig, sizes: dict[str, Any]) -> tuple[int, int, int]:
    """How many micro-batches a rank gets until the end: by itself, and by two handles that drift apart."""
    ranks = Ranks(layout)
    with open_loader(config, ranks, **sizes) as loader:
        alone = sum(1 for _ in RankBatches(loader, ranks))
    with open_loader(config, ranks, **sizes) as loader:
        first, second = RankBatches(loader, ranks).handles(2)
        a = [*itertools.islice(first, 3)]
        b = [*itertools.islice(second, 5)]
        a += list(first)
        b += list(second)
        for x, y in zip(a, b, strict=True):
            assert all(torch.equal(x[name], y[name]) for name in x)
    return alone, len(a), len(b)
