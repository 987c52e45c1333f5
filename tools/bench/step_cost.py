"""What the data path costs a training step of one rank: step time, waiting, host CPU time, and what
lies beside computation.
"""

from __future__ import annotations

import itertools
import json
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
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
Interval = tuple[float, float]


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
    trace: str | None,
) -> dict[str, list[float]]:
    """Seconds of steps of both sides, which take turns; the share waited for data; CPU seconds for
    10^9 tokens; copies.
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
        "copy": [],
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
        figures["copy"] = profile(step, feed, device, trace)
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


def profile(
    step: Step, feed: Iterator[Batch], device: torch.device, trace: str | None
) -> list[float]:
    """[microseconds a step of copies to the device, the share of them beside kernels]; empty where
    there is no device.
    """
    if device.type != "cuda" and trace is None:
        return []
    with torch.profiler.profile() as profiler:
        for _ in range(3):
            step(feed)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(trace or Path(folder) / "trace.json")
        profiler.export_chrome_trace(str(path))
        return copies_beside_kernels(json.loads(path.read_text())["traceEvents"], steps=3)


def copies_beside_kernels(events: Iterable[dict[str, Any]], steps: int) -> list[float]:
    """Of the events of a trace (times in microseconds): what copies to the device take a step, and
    their share beside kernels.
    """
    kernels: list[Interval] = []
    copies: list[Interval] = []
    for event in events:
        span = (
            float(event.get("ts", 0.0)),
            float(event.get("ts", 0.0)) + float(event.get("dur", 0.0)),
        )
        if event.get("cat") == "kernel":
            kernels.append(span)
        elif event.get("cat") == "gpu_memcpy" and "HtoD" in event.get("name", ""):
            copies.append(span)
    whole = sum(stop - start for start, stop in copies)
    return [whole / steps, overlap(copies, kernels) / whole] if whole else []


def overlap(these: Sequence[Interval], others: Sequence[Interval]) -> float:
    """How long something of `these` and something of the others run at once; `these` do not overlap
    each other.
    """
    merged: list[Interval] = []
    for start, stop in sorted(others):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return sum(max(0.0, min(stop, b) - max(start, a)) for start, stop in these for a, b in merged)
