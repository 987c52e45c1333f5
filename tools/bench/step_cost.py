"""What the data path costs a training step of one rank: step time, waiting and host CPU time."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from streammega import (
    DataConfig,
    ParallelLayout,
    Ranks,
    StorageConfig,
)
from streammega.parallel import RankBatches, open_loader
from streammega.samples.fields import Batch
from streammega.train.config import ModelConfig
from streammega.train.model import GPT
from streammega.train.sharding import make_mesh, set_last_micro_batch, shard

STEPS = 10
"""Of one side, before the other takes its turn."""


@dataclass(frozen=True)
class Size:
    """A model and its batches. tokens: of the dataset."""

    model: ModelConfig
    length: int
    rows: int
    micro_batches: int
    tokens: int
    dtype: torch.dtype

    def __str__(self) -> str:
        with torch.device("meta"):
            parameters = sum(parameter.numel() for parameter in GPT(self.model).parameters()) / 1e6
        return f"GPT of {parameters:.0f} M parameters in {self.dtype}, {self.micro_batches} x {self.rows} x {self.length} tokens a step"


BIG = Size(
    ModelConfig(vocab_size=50304, dim=768, layers=12, heads=12),
    1024,
    16,
    4,
    400_000_000,
    torch.bfloat16,
)
SMALL = Size(
    ModelConfig(vocab_size=8192, dim=64, layers=2, heads=2), 128, 2, 2, 2_000_000, torch.float32
)


def measure(
    device: torch.device,
    size: Size,
    options: dict[str, Any],
    cache: Path,
    runs: int,
) -> dict[str, list[float]]:
    """Seconds of steps of both sides, which take turns; the share waited for data; CPU seconds for
    10^9 tokens.
    """
    config = DataConfig(
        blend=["s3://data/web"], sequence_length=size.length, order="stream", index_cache_dir=cache, eod_id=0,
        storage=StorageConfig(storage_options=options),
    )  # fmt: skip
    ranks = Ranks(ParallelLayout())
    step = Step(device, size, ranks)
    figures: dict[str, list[float]] = {
        "loader": [],
        "resident": [],
        "share": [],
        "cpu": [],
    }
    used = {"loader": 0.0, "resident": 0.0}
    with open_loader(
        config, ranks, micro_batch_size=size.rows, global_batch_size=size.rows * size.micro_batches
    ) as loader:
        feed = RankBatches(loader, ranks, device)
        resident = {name: field.clone() for name, field in next(feed).items()}
        sides: dict[str, Iterator[Batch]] = {"loader": feed, "resident": itertools.repeat(resident)}
        for number in range(runs + 1):
            for name in ("loader", "resident") if number % 2 else ("resident", "loader"):
                began = time.process_time()
                for _ in range(STEPS):
                    seconds, waited = step(sides[name])
                    if number:  # the first round warms up
                        figures[name].append(seconds)
                        if name == "loader":
                            figures["share"].append(waited / seconds)
                used[name] += (time.process_time() - began) if number else 0.0
        feed.close()
    tokens = runs * STEPS * size.micro_batches * size.rows * size.length
    figures["cpu"].append((used["loader"] - used["resident"]) / tokens * 1e9)
    return figures


class Step:
    """One optimizer step on micro-batches of any source."""

    def __init__(self, device: torch.device, size: Size, ranks: Ranks) -> None:
        self.device = device
        self.size = size
        torch.manual_seed(1)
        self.model = GPT(size.model).to(device)
        shard(self.model, make_mesh(ranks, device.type), size.dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def __call__(self, batches: Iterator[Batch]) -> tuple[float, float]:
        """Seconds of the step, until the device is done, and those that were waited for data."""
        began = time.perf_counter()
        waited = 0.0
        last = self.size.micro_batches - 1
        for micro in range(last + 1):
            asked = time.perf_counter()
            batch = next(batches)
            waited += time.perf_counter() - asked
            set_last_micro_batch(self.model, micro == last)
            logits = self.model(batch["tokens"], batch["position_ids"])
            loss = nn.functional.cross_entropy(
                logits.flatten(0, 1).float(), batch["labels"].flatten()
            )
            loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.model.zero_grad()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - began, waited
