"""How evenly attention over documents is spread over ranks, as samples come and by balance_batches,
and what that is worth to a step.

    python tools/bench/balance.py [--runs 5] [--skip-steps]

The first table: the cost of a global batch (squared tokens of documents, added up) where ranks wait
for each other in every micro-step, and where they do at its end alone, divided by what it would be
if all ranks had the same; over 64 global batches. The second: steps of the example GPT with its
attention over documents on two gloo ranks of one thread each, the two sides in turns.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from streammega import BucketedDataParallel, DataConfig, ParallelLayout, Ranks, StreamingDataset
from streammega.order.balance import longest_rank, pace
from streammega.parallel import RankBatches, open_loader
from streammega.samples.attention_costs import attention_costs
from streammega.train.config import ModelConfig
from streammega.train.model import GPT
from tools.bench import harness, lengths

BATCHES = 64
DOCUMENTS = 20_000
LAYOUTS = ((8, 1, 256, 4096), (64, 1, 256, 4096), (64, 4, 256, 4096), (64, 1, 256, 32768))
"""Ranks, samples of a micro-batch and of a global batch, tokens of a sample."""
MODEL = ModelConfig(vocab_size=1024, dim=64, layers=2, heads=2)
LENGTH = 4096
MICRO_BATCHES = 4
RANKS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=5, help="rounds of steps of each side")
    parser.add_argument("--skip-steps", action="store_true", help="only count costs")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        prefixes = {}
        for name in ("sources", "lognormal"):
            prefixes[name] = f"{folder}/{name}"
            lengths.write(prefixes[name], lengths.sample(name, DOCUMENTS))
        print_spread(prefixes)
        if not chosen.skip_steps:
            print()
            print_steps(prefixes, chosen.runs)


def config_of(prefix: str, length: int, *, balanced: bool) -> DataConfig:
    return DataConfig(
        blend=[prefix],
        sequence_length=length,
        order="stream",
        eod_id=lengths.EOD,
        reset_attention_mask=True,
        reset_position_ids=True,
        balance_batches=balanced,
        index_cache_dir=f"{prefix}.cache",
    )


# Costs.


def print_spread(prefixes: dict[str, str]) -> None:
    harness.table(
        "documents", "ranks x micro-batch of global batch, tokens", "each micro-step", "balanced", "at the end", "balanced"
    )  # fmt: skip
    for name, prefix in prefixes.items():
        for layout in LAYOUTS:
            ranks, rows, batch, length = layout
            plain = spread_of(prefix, layout, balanced=False)
            even = spread_of(prefix, layout, balanced=True)
            told = f"{ranks} x {rows} of {batch}, {length}"
            figures = [plain[0], even[0], plain[1], even[1]]
            harness.row(name, told, *(f"{figure:.3f}" for figure in figures))


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
        costs = attention_costs(dataset.samples, dealt.reshape(-1)).reshape(dealt.shape)
        even = costs.sum() / ranks
        paces.append(pace(costs) / even)
        longest.append(longest_rank(costs) / even)
    return float(np.mean(paces)), float(np.mean(longest))


# Steps.


def print_steps(prefixes: dict[str, str], runs: int) -> None:
    print(
        f"steps of a GPT of dim {MODEL.dim} and {MODEL.layers} layers, {RANKS} ranks x {MICRO_BATCHES} samples of {LENGTH} tokens"
    )
    harness.table("documents", "ranks wait", "as they come (s)", "balanced (s)", "ratio", "95 %")
    for name, prefix in prefixes.items():
        times = on_ranks(prefix, runs)
        for waits in ("each micro-step", "at the end"):
            plain = times[waits, False]
            even = times[waits, True]
            low, high = harness.interval(even, plain, paired=True)
            harness.row(
                name, waits, f"{np.median(plain):.2f}", f"{np.median(even):.2f}",
                f"{np.median(even) / np.median(plain):.3f}", f"{low:.3f} to {high:.3f}",
            )  # fmt: skip


def on_ranks(prefix: str, runs: int) -> dict[tuple[str, bool], list[float]]:
    """Seconds of steps: {(when ranks wait, balanced): one for each step}, of rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        results = context.SimpleQueue()
        store = os.path.join(folder, "store")
        spawn(enter, (prefix, runs, store, results), nprocs=RANKS)  # type: ignore[no-untyped-call]
        times: dict[tuple[str, bool], list[float]] = results.get()
        return times


def enter(rank: int, prefix: str, runs: int, store: str, results: Any) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    times = time_steps(prefix, runs)
    if rank == 0:
        results.put(times)
    dist.barrier()
    os._exit(0)  # gloo's threads may abort a process that ends with a group


def time_steps(prefix: str, runs: int) -> dict[tuple[str, bool], list[float]]:
    ranks = Ranks(ParallelLayout(dp=RANKS))
    model = BucketedDataParallel(GPT(MODEL), ranks=ranks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    names = [("each micro-step", False), ("each micro-step", True), ("at the end", False), ("at the end", True)]  # fmt: skip
    times: dict[tuple[str, bool], list[float]] = {name: [] for name in names}
    with contextlib.ExitStack() as open_loaders:
        feeds = {}
        for name in names:
            loader = open_loader(
                config_of(prefix, LENGTH, balanced=name[1]),
                ranks,
                micro_batch_size=1,
                global_batch_size=RANKS * MICRO_BATCHES,
            )
            feed = RankBatches(open_loaders.enter_context(loader), ranks, torch.device("cpu"))
            open_loaders.callback(feed.close)
            feeds[name] = feed
        for number in range(runs + 1):
            for place in harness.turns([str(place) for place in range(len(names))], number):
                name = names[int(place)]
                dist.barrier()
                began = time.perf_counter()
                step(model, optimizer, feeds[name], waits=name[0] == "each micro-step")
                dist.barrier()
                if number:
                    times[name].append(time.perf_counter() - began)
    return times


def step(
    model: BucketedDataParallel, optimizer: torch.optim.Optimizer, feed: RankBatches, *, waits: bool
) -> None:
    for micro in range(MICRO_BATCHES):
        batch = next(feed)
        with model.no_sync() if micro < MICRO_BATCHES - 1 else contextlib.nullcontext():
            logits = model(batch["tokens"], batch["position_ids"], batch["cu_seqlens"])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
            loss.backward()  # type: ignore[no-untyped-call]
        if waits:
            dist.barrier()  # as ranks do that gather parameters, or pass activations on
    model.finish_grad_sync()
    optimizer.step()
    model.zero_grad()


if __name__ == "__main__":
    main()
