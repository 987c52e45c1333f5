"""Training beside torch's own parts: gradient buckets, get_batch, and how long steps
wait for data.

    python tools/bench/training.py [--runs 9] [--launches 3] [--device cuda]

Two ranks, gloo on the CPU (NCCL with --device cuda), one thread each. Both sides of a ratio
alternate within one run, in one pair of processes, and steps are timed in
several pairs, since where memory lies moves a whole pair's figures by 5 %; printed are ratios of
medians with a 95 % bootstrap interval.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import platform
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from streammega import (
    BucketedDataParallel,
    DataConfig,
    IndexedDatasetWriter,
    ParallelLayout,
    Ranks,
    StorageConfig,
    get_batch,
)
from streammega.parallel import RankBatches, open_loader
from streammega.train.config import ModelConfig
from streammega.train.model import GPT
from streammega.train.parallel_model import synchronised
from tools.bench import harness
from tools.bench.object_server import running

MODEL = ModelConfig(vocab_size=8192, dim=384, layers=6, heads=6)
BATCH = 2
LENGTH = 128
MICRO_BATCHES = 2
BUCKET = 25 << 18
"""Elements: DDP's 25 MiB."""
Side = Callable[[], None]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--runs", type=int, default=9, help="rounds of both sides (default: %(default)s)"
    )
    parser.add_argument(
        "--launches",
        type=int,
        default=3,
        help="pairs of processes that steps are timed in (default: %(default)s)",
    )
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument(
        "--only", choices=["buckets", "batches", "waiting", "cost"], help="one part"
    )
    chosen = parser.parse_args()
    if chosen.device == "cuda" and not torch.cuda.is_available():
        print("torch.cuda.is_available() is False: nothing was measured")
        return 0
    where = torch.cuda.get_device_name() if chosen.device == "cuda" else f"{os.cpu_count()} cores"
    print(
        f"Python {platform.python_version()}, torch {torch.__version__}, {where}; 2 ranks, {chosen.runs} rounds, medians; of steps {chosen.launches} launches\n"
    )
    with tempfile.TemporaryDirectory(prefix="streammega-bench-") as folder:
        # NCCL takes one rank for each GPU
        pairs = chosen.device == "cpu" or torch.cuda.device_count() > 1
        parts = {"buckets": buckets, "batches": batches, "waiting": waiting} if pairs else {}
        for name, part in (parts | {"cost": cost}).items():
            if chosen.only in (None, name):
                part(chosen, Path(folder))
    return 0


# Parts.


def buckets(chosen: argparse.Namespace, folder: Path) -> None:
    print(
        f"gradient buckets: GPT of {parameters():.1f} M parameters, {MICRO_BATCHES} micro-batches a step, buckets of 25 MiB"
    )
    times = over_launches(chosen, ("ddp", "buckets", "checked"))
    report("BucketedDataParallel / torch DDP", times["buckets"], times["ddp"])
    report(
        "  with the check for NaN and Inf / torch DDP, which has none",
        times["checked"],
        times["ddp"],
    )
    print()


def batches(chosen: argparse.Namespace, folder: Path) -> None:
    rows = 4
    length = 4096
    print(
        f"one micro-batch of {rows} x {length} tokens to the other tensor-parallel rank, uint16 data on a local disk"
    )
    write_tokens(folder / "local", 40_000_000)
    times = on_two_ranks(chosen, time_batches, str(folder / "local"), rows, length)
    report(
        "get_batch / Megatron's five broadcasts of the same fields",
        times["get_batch"],
        times["five broadcasts"],
        unit=1e3,
    )
    sent = times["bytes"][0] / (rows * length)
    print(f"  bytes sent per token: {sent:.3f}, Megatron 28: {28 / sent:.2f}x fewer\n")


def waiting(chosen: argparse.Namespace, folder: Path) -> None:
    print(
        "a step of 2 ranks x 2 micro-batches of 4 x 256 tokens, from an object server with 20 ms of latency, 60 MB/s a connection"
    )
    root = folder / "objects"
    write_tokens(root / "data" / "web", 20_000_000)
    with running(root) as server:
        server.behave(latency=0.02, bandwidth=60e6)
        times = on_two_ranks(chosen, time_waiting, server.storage_options, str(folder / "cache"))
    share = [wait / step for wait, step in zip(times["wait"], times["step"], strict=True)]
    print(
        f"  step {np.median(times['step']) * 1e3:.0f} ms, waiting {np.median(times['wait']) * 1e6:.0f} us: {np.median(share):.4%} (mean {np.mean(share):.4%})\n"
    )


def cost(chosen: argparse.Namespace, folder: Path) -> None:
    """One rank: its step from `s3://` on loopback beside the same step on one batch that stays on
    the device.
    """
    from tools.bench.step_cost import BIG, SMALL, measure

    size = BIG if chosen.device == "cuda" else SMALL
    print(f"cost to the step: {size}, from s3:// on loopback, beside one resident batch")
    root = folder / "cost"
    write_tokens(root / "data" / "web", size.tokens)
    with running(root) as server:
        figures = measure(
            torch.device(chosen.device),
            size,
            server.storage_options,
            folder / "cost.cache",
            chosen.runs,
        )
    report("  step", figures["loader"], figures["resident"])
    print(
        f"  waiting for data: {np.median(figures['share']):.4%} of a step (mean {np.mean(figures['share']):.4%})"
    )
    print(
        f"  CPU seconds of the host for 10^9 tokens, beyond those of the resident batch: {figures['cpu'][0]:.1f}"
    )
    print()


# What ranks do.


def over_launches(chosen: argparse.Namespace, names: tuple[str, ...]) -> dict[str, list[float]]:
    """Seconds of steps of all sides, in several pairs of processes one after the other."""
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(chosen.launches):
        for name, seconds in on_two_ranks(chosen, time_sides, names).items():
            times[name] += seconds
    return times


def on_two_ranks(chosen: argparse.Namespace, program: Callable[..., Any], *arguments: Any) -> Any:
    """The result of rank 0."""
    folder = tempfile.mkdtemp()
    try:
        context = multiprocessing.get_context("spawn")
        results = context.SimpleQueue()
        spawn(  # type: ignore[no-untyped-call]
            enter, (chosen, program, arguments, os.path.join(folder, "store"), results), nprocs=2
        )
        return results.get()
    finally:
        shutil.rmtree(folder)


def enter(
    rank: int,
    chosen: argparse.Namespace,
    program: Callable[..., Any],
    arguments: Any,
    store: str,
    results: Any,
) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    device = torch.device("cuda", rank) if chosen.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=2,
    )
    value = program(rank, device, chosen.runs, *arguments)
    if rank == 0:
        results.put(value)
    dist.barrier()
    os._exit(0)  # gloo's threads may abort a process that ends with a group, torch's DDP included


def time_sides(
    rank: int, device: torch.device, runs: int, names: tuple[str, ...]
) -> dict[str, list[float]]:
    """Seconds of steps of all sides, which take turns."""
    sides = {name: make_side(name, device) for name in names}
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(runs + 1):
        for name in harness.turns(names, number):
            for _ in range(2):
                seconds = timed(sides[name], device)
                if number:
                    times[name].append(seconds)
    return times


def time_batches(
    rank: int, device: torch.device, runs: int, prefix: str, rows: int, length: int
) -> dict[str, list[float]]:
    config = DataConfig(
        blend=[prefix], sequence_length=length, order="stream", index_cache_dir=f"{prefix}.cache"
    )
    ranks = Ranks(ParallelLayout(tp=2))
    times: dict[str, list[float]] = {"get_batch": [], "five broadcasts": [], "bytes": []}
    with open_loader(config, ranks, micro_batch_size=rows, global_batch_size=rows * 8) as loader:
        plain = open_loader(config, ranks, micro_batch_size=rows, global_batch_size=rows * 8)
        plain.ids_only = False
        whole = iter(plain) if rank == 0 else None
        counted = RankBatches(loader, ranks, device)
        next(counted)
        times["bytes"].append(counted.broadcast_bytes / 2)
        counted.close()
        for number in range(runs * 8 + 8):
            ours = timed(lambda: get_batch(loader, ranks, device), device)
            theirs = timed(lambda: five_broadcasts(whole, rows, length, device, ranks), device)
            if number >= 8:
                times["get_batch"].append(ours)
                times["five broadcasts"].append(theirs)
        plain.close()
    return times


def five_broadcasts(
    whole: Iterator[Any] | None, rows: int, length: int, device: torch.device, ranks: Ranks
) -> None:
    """tokens, labels, loss_mask, attention_mask (here of one element) and position_ids, one after
    the other.
    """
    shapes = {
        "tokens": torch.int64,
        "labels": torch.int64,
        "loss_mask": torch.float32,
        "position_ids": torch.int64,
    }
    batch = next(whole) if whole is not None else {}
    for name, dtype in shapes.items():
        field = (
            batch[name].contiguous().to(device)
            if whole is not None
            else torch.empty(rows, length, dtype=dtype, device=device)
        )
        dist.broadcast(field, 0, group=ranks.group("tp"))
    dist.broadcast(torch.zeros(1, dtype=torch.bool, device=device), 0, group=ranks.group("tp"))


def time_waiting(
    rank: int, device: torch.device, runs: int, options: dict[str, Any], cache: str
) -> dict[str, list[float]]:
    config = DataConfig(
        blend=["s3://data/web"], sequence_length=256, order="stream", index_cache_dir=cache, eod_id=0,
        storage=StorageConfig(storage_options=options),
    )  # fmt: skip
    ranks = Ranks(ParallelLayout(dp=2))
    rows = 4
    model = BucketedDataParallel(GPT(MODEL).to(device), ranks=ranks, bucket_size=BUCKET)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    times: dict[str, list[float]] = {"wait": [], "step": []}
    with open_loader(
        config, ranks, micro_batch_size=rows, global_batch_size=rows * 2 * MICRO_BATCHES
    ) as loader:
        feed = RankBatches(loader, ranks, device)
        for number in range(3 * runs + 3):
            began = time.perf_counter()
            waited = 0.0
            for micro in range(MICRO_BATCHES):
                asked = time.perf_counter()
                batch = next(feed)
                waited += time.perf_counter() - asked
                with model.no_sync() if micro < MICRO_BATCHES - 1 else contextlib.nullcontext():
                    logits = model(batch["tokens"], batch["position_ids"])
                    nn.functional.cross_entropy(
                        logits.flatten(0, 1), batch["labels"].flatten()
                    ).backward()  # type: ignore[no-untyped-call]
            model.finish_grad_sync()
            optimizer.step()
            model.zero_grad()
            if number >= 3:
                times["wait"].append(waited)
                times["step"].append(time.perf_counter() - began)
        feed.close()
    return times


# Sides.


def make_side(name: str, device: torch.device) -> Side:
    """One training step of a side: forward and backward of all micro-batches,
    reduction, optimizer.
    """
    torch.manual_seed(1)
    model = GPT(MODEL).to(device)
    tokens = torch.randint(0, MODEL.vocab_size, (MICRO_BATCHES, BATCH, LENGTH + 1), device=device)
    positions = torch.arange(LENGTH, device=device).expand(BATCH, -1)
    wrapped: nn.Module
    if name == "ddp":
        wrapped = DistributedDataParallel(model, bucket_cap_mb=25, gradient_as_bucket_view=True)
    else:
        checks = name == "checked"
        wrapped = BucketedDataParallel(model, bucket_size=BUCKET, check_gradients=checks)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-4, fused=True)
    del model

    def step() -> None:
        for micro in range(MICRO_BATCHES):
            with synchronised(wrapped, is_last=micro == MICRO_BATCHES - 1):
                logits = wrapped(tokens[micro, :, :-1], positions)
                loss = nn.functional.cross_entropy(
                    logits.flatten(0, 1), tokens[micro, :, 1:].flatten()
                )
                (loss / MICRO_BATCHES).backward()  # type: ignore[no-untyped-call]
        if isinstance(wrapped, BucketedDataParallel):
            wrapped.finish_grad_sync()
        optimizer.step()
        wrapped.zero_grad()

    return step


# Helpers.


def timed(action: Callable[[], object], device: torch.device) -> float:
    """Seconds from a common start until all ranks are done."""

    def until_all_are_done() -> None:
        action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        dist.barrier()

    dist.barrier()
    return harness.seconds_of(until_all_are_done)


def report(name: str, ours: list[float], theirs: list[float], unit: float = 1e3) -> None:
    low, high = harness.interval(ours, theirs, paired=True)
    a = np.median(ours) * unit
    b = np.median(theirs) * unit
    print(f"  {name}: {a:.2f} / {b:.2f} ms = {a / b:.3f} [{low:.3f}, {high:.3f}]")


def write_tokens(prefix: Path, count: int) -> None:
    if not prefix.with_suffix(".idx").exists():
        with IndexedDatasetWriter(str(prefix), np.uint16) as writer:
            for part in np.array_split(
                np.random.default_rng(0).integers(0, MODEL.vocab_size, count).astype(np.uint16), 100
            ):
                writer.add_item(part)
                writer.end_document()


def parameters() -> float:
    return sum(parameter.numel() for parameter in GPT(MODEL).parameters()) / 1e6


if __name__ == "__main__":
    sys.exit(main())
