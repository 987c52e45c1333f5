"""How evenly attention over documents is spread over ranks, as samples come and by balance_batches,
and what that is worth to a step.

    python tools/bench/balance.py [--runs 4] [--figures costs steps] [--documents sources lognormal]

The first table: the cost of a global batch (squared tokens of documents, added up) where ranks wait
for each other in every micro-step, and where they do at its end alone, divided by what it would be
if all ranks had the same; over 64 global batches. The second: steps of the example GPT with its
attention over documents on two gloo ranks of one thread each, which wait for each other in every
micro-step; the sides take turns and have the same global batches.
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
MODEL = ModelConfig(vocab_size=1024, dim=64, layers=2, heads=1)
"""So small that attention is most of what it does, as with long samples in a large one."""
LENGTH = 8192
MICRO_BATCHES = 4
RANKS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=4, help="rounds of steps of each side")
    parser.add_argument("--figures", nargs="+", default=["costs", "steps"])
    parser.add_argument("--documents", nargs="+", default=["sources", "lognormal"])
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        prefixes = {}
        for name in chosen.documents:
            prefixes[name] = f"{folder}/{name}"
            lengths.write(prefixes[name], lengths.sample(name, DOCUMENTS))
        if "costs" in chosen.figures:
            print_spread(prefixes)
            print()
        if "steps" in chosen.figures:
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
    prefix: str, layout: tuple[int, int, int, int], *, balanced: bool, batches: int = BATCHES
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
    for first in range(0, batches * batch, batch):
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
    harness.table(
        "documents", "costs would allow", "as they come (s)", "balanced (s)", "ratio of all steps", "95 %"
    )  # fmt: skip
    for name, prefix in prefixes.items():
        layout = (RANKS, 1, RANKS * MICRO_BATCHES, LENGTH)
        plain_pace, _ = spread_of(prefix, layout, balanced=False, batches=runs + 1)
        even_pace, _ = spread_of(prefix, layout, balanced=True, batches=runs + 1)
        times = on_ranks(prefix, runs)
        # the same global batches on both sides
        plain = times[False]
        even = times[True]
        low, high = harness.interval(even, plain, paired=True)
        harness.row(
            name,
            f"{even_pace / plain_pace:.3f}",
            f"{np.mean(plain):.2f}",
            f"{np.mean(even):.2f}",
            f"{sum(even) / sum(plain):.3f}",
            f"{low:.3f} to {high:.3f}",
        )


def on_ranks(prefix: str, runs: int) -> dict[bool, list[float]]:
    """Seconds of steps, {whether they are balanced: one for each step}, of rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        results = context.SimpleQueue()
        store = os.path.join(folder, "store")
        spawn(enter, (prefix, runs, store, results), nprocs=RANKS)  # type: ignore[no-untyped-call]
        times: dict[bool, list[float]] = results.get()
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


def time_steps(prefix: str, runs: int) -> dict[bool, list[float]]:
    ranks = Ranks(ParallelLayout(dp=RANKS))
    model = BucketedDataParallel(GPT(MODEL), ranks=ranks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    times: dict[bool, list[float]] = {False: [], True: []}
    with contextlib.ExitStack() as open_loaders:
        feeds = {}
        for balanced in times:
            loader = open_loader(
                config_of(prefix, LENGTH, balanced=balanced),
                ranks,
                micro_batch_size=1,
                global_batch_size=RANKS * MICRO_BATCHES,
            )
            feed = RankBatches(open_loaders.enter_context(loader), ranks, torch.device("cpu"))
            open_loaders.callback(feed.close)
            feeds[balanced] = feed
        for number in range(runs + 1):
            for balanced in (False, True) if number % 2 else (True, False):
                dist.barrier()
                began = time.perf_counter()
                step(model, optimizer, feeds[balanced])
                dist.barrier()
                if number:
                    times[balanced].append(time.perf_counter() - began)
    return times


def step(model: BucketedDataParallel, optimizer: torch.optim.Optimizer, feed: RankBatches) -> None:
    for micro in range(MICRO_BATCHES):
        batch = next(feed)
        with model.no_sync() if micro < MICRO_BATCHES - 1 else contextlib.nullcontext():
            logits = model(batch["tokens"], batch["position_ids"], batch["cu_seqlens"])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
            loss.backward()  # type: ignore[no-untyped-call]
        dist.barrier()  # as ranks do that gather parameters, or pass activations on
    model.finish_grad_sync()
    optimizer.step()
    model.zero_grad()


if __name__ == "__main__":
    main()
