"""Training, compared with torch's own parts: gradient buckets, get_batch, and how long steps wait for data.

    python tools/bench/training.py [--runs 9] [--launches 3] [--device cuda] [--figures cost]

Two ranks, gloo on the CPU (NCCL with --device cuda), one thread each. Both sides of a ratio
alternate within one run, in one pair of processes, and steps are timed in several pairs, since
the place of memory changes all figures of a pair by 5 %; printed are ratios of medians with a 95 %
bootstrap interval. `cost` is of one rank: its step from `s3://` on loopback, compared with the same step on
one batch that stays on the device.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

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
    ParallelLayout,
    Ranks,
    StorageConfig,
    get_batch,
)
from streammega.parallel import RankBatches, open_loader
from streammega.samples.fields import Batch
from streammega.train.config import ModelConfig
from streammega.train.model import GPT
from streammega.train.parallel_model import gradient_sync
from streammega.train.stages import make_mesh, shard
from tools.bench import corpus, harness
from tools.bench.object_server import running


class Size(NamedTuple):
    """A model and its batches. tokens: of the dataset."""

    model: ModelConfig
    length: int
    rows: int
    micro_batches: int
    tokens: int = 0
    dtype: torch.dtype = torch.float32


MODEL = ModelConfig(vocab_size=8192, dim=384, layers=6, heads=6)
RESIDENT = Size(MODEL, 128, 2, 2)
FETCHED = Size(MODEL, 256, 4, 2, 20_000_000)
SENT = Size(MODEL, 4096, 4, 2, 40_000_000)
MEGATRON_FIELDS = ("tokens", "labels", "loss_mask", "position_ids")
BIG = Size(
    ModelConfig(vocab_size=50304, dim=768, layers=12, heads=12),
    1024,
    16,
    4,
    400_000_000,
    torch.bfloat16,
)
SMALL = Size(ModelConfig(vocab_size=8192, dim=64, layers=2, heads=2), 128, 2, 2, 2_000_000)
"""Sizes of `cost`, with CUDA and without."""
BUCKET = 25 << 18
"""Elements: DDP's 25 MiB."""
STEPS = 10
"""Steps of one side of `cost` before the other takes its turn."""
DOCUMENT = 10_000
"""Tokens."""
Times = dict[str, list[float]]


def main() -> int:
    parser = harness.parser(__doc__, FIGURES, runs=9)
    parser.add_argument("--launches", type=int, default=3, help="pairs of processes (%(default)s)")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    chosen = parser.parse_args()
    if chosen.device == "cuda":
        if not torch.cuda.is_available():
            print("torch.cuda.is_available() is False: nothing was measured")
            return 0
        print(torch.cuda.get_device_name())
        if torch.cuda.device_count() == 1:  # NCCL takes one rank for each GPU
            chosen.figures = ["cost"]
    harness.print_head(["torch"], chosen.runs)
    harness.table("ours / theirs", "ours", "theirs", "ratio")
    return harness.print_figures(FIGURES, chosen)


# --- figures -------------------------------------------------------------------------------------


def buckets(chosen: argparse.Namespace) -> None:
    """Steps with BucketedDataParallel, with and without its check, compared with torch DDP."""
    times: Times = {"ddp": [], "buckets": [], "checked": []}
    for _ in range(chosen.launches):
        for name, seconds in on_two_ranks(chosen, time_sides, tuple(times)).items():
            times[name] += seconds
    row("step, BucketedDataParallel / torch DDP", times["buckets"], times["ddp"])
    title = "the same with the check for NaN and Inf, which DDP has not"
    row(title, times["checked"], times["ddp"])


def batches(chosen: argparse.Namespace) -> None:
    """A micro-batch to the other tensor-parallel rank."""
    with tempfile.TemporaryDirectory() as folder:
        prefix = f"{folder}/local"
        write_tokens(Path(prefix), SENT)
        times = on_two_ranks(chosen, time_batches, prefix)
    title = f"a micro-batch of {SENT.rows} x {SENT.length} tokens to the other tensor-parallel rank"
    row(f"{title}, get_batch / five broadcasts", times["get_batch"], times["five broadcasts"])
    sent = times["bytes"][0] / (SENT.rows * SENT.length)
    title = "bytes of it per token, uint16 data / Megatron's fields"
    harness.row(title, f"{sent:.2f}", "28", f"{28 / sent:.2f}x fewer")


def waiting(chosen: argparse.Namespace) -> None:
    """Steps of two ranks from an object server that is far."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "objects"
        write_tokens(root / "data" / "web", FETCHED)
        with running(root) as server:
            server.behave(latency=0.02, bandwidth=60e6)
            times = on_two_ranks(chosen, time_waiting, server.storage_options, f"{folder}/cache")
    waited, step = (float(np.median(times[name])) for name in ("wait", "step"))
    share = np.median(np.array(times["wait"]) / np.array(times["step"]))
    title = f"waiting for data, 2 ranks x {FETCHED.micro_batches} x {FETCHED.rows} x {FETCHED.length} tokens"
    harness.row(
        f"{title}, 20 ms and 60 MB/s a connection",
        f"{waited * 1e6:.0f} us of a step",
        f"{step * 1e3:.0f} ms",
        f"{share:.4%}",
    )


def cost(chosen: argparse.Namespace) -> None:
    """A step from `s3://`, compared with the same step on one batch that stays on the device."""
    size = BIG if chosen.device == "cuda" else SMALL
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "objects"
        write_tokens(root / "data" / "web", size)
        with running(root) as server:
            config = config_of("s3://data/web", size, f"{folder}/cache", server.storage_options)
            times = time_cost(torch.device(chosen.device), size, config, chosen.runs)
    title = f"step, {size.micro_batches} x {size.rows} x {size.length} tokens, {size.dtype}"
    row(f"{title}, from s3:// on loopback / one resident batch", times["loader"], times["resident"])
    share = np.median(np.array(times["wait"]) / np.array(times["loader"]))
    harness.row("of that, waiting for data", f"{share:.4%}", "", "")
    if times["host"]:
        share = np.median(np.array(times["host"]) / np.array(times["loader"]))
        harness.row("the host in `next`, while the device computes", f"{share:.4%}", "", "")
    title = "CPU seconds of the host for 10^9 tokens, beyond those of the resident batch"
    harness.row(title, f"{times['cpu'][0]:.1f}", "", "")


FIGURES = harness.Figures(buckets=buckets, batches=batches, waiting=waiting, cost=cost)


def row(title: str, ours: list[float], theirs: list[float]) -> None:
    """Medians in milliseconds, and their ratio."""
    low, high = harness.interval(ours, theirs, paired=True)
    a, b = (float(np.median(seconds)) * 1e3 for seconds in (ours, theirs))
    harness.row(title, f"{a:.2f} ms", f"{b:.2f} ms", f"{a / b:.2f} [{low:.2f}, {high:.2f}]")


def write_tokens(prefix: Path, size: Size) -> None:
    """A pair of random documents."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    lengths = np.full(size.tokens // DOCUMENT, DOCUMENT)
    corpus.write_random(str(prefix), lengths, size.model.vocab_size)


# --- what ranks do -------------------------------------------------------------------------------


def on_two_ranks(
    chosen: argparse.Namespace, program: Callable[..., Times], *arguments: Any
) -> Times:
    """The result of rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        results = multiprocessing.get_context("spawn").SimpleQueue()
        store = os.path.join(folder, "store")
        spawn(  # type: ignore[no-untyped-call]
            enter, (chosen.device, chosen.runs, program, arguments, store, results), nprocs=2
        )
        times: Times = results.get()
        return times


def enter(
    rank: int,
    device_type: str,
    runs: int,
    program: Callable[..., Times],
    arguments: tuple[Any, ...],
    store: str,
    results: Any,
) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    device = torch.device("cpu")
    if device_type == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    backend = "nccl" if device_type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=2)
    value = program(device, runs, *arguments)
    if rank == 0:
        results.put(value)
    dist.barrier()
    os._exit(0)  # gloo's threads may abort a process that ends with a group, torch's DDP included


def time_sides(device: torch.device, runs: int, names: tuple[str, ...]) -> Times:
    """Seconds of steps of all sides, which take turns."""
    size = RESIDENT
    models = {name: model_of(name, device) for name in names}
    tokens = torch.randint(
        0, size.model.vocab_size, (size.micro_batches, size.rows, size.length + 1), device=device
    )
    positions = torch.arange(size.length, device=device).expand(size.rows, -1)
    feed = itertools.cycle(
        [{"tokens": t[:, :-1], "labels": t[:, 1:], "position_ids": positions} for t in tokens]
    )
    times: Times = {name: [] for name in names}
    for number in range(runs + 1):
        for name in harness.turns(names, number):
            for _ in range(2):
                seconds = timed(lambda name=name: models[name].step(feed), device)  # type: ignore[misc]
                if number:
                    times[name].append(seconds)
    return times


def model_of(side: str, device: torch.device) -> Model:
    """The model in what reduces its gradients."""
    bare = GPT(MODEL).to(device)
    bare.init_weights(1)
    if side == "ddp":
        ddp = DistributedDataParallel(bare, bucket_cap_mb=25, gradient_as_bucket_view=True)
        return Model(ddp, RESIDENT)
    checks = side == "checked"
    return Model(BucketedDataParallel(bare, bucket_size=BUCKET, check_gradients=checks), RESIDENT)


def time_batches(device: torch.device, runs: int, prefix: str) -> Times:
    rows, length = SENT.rows, SENT.length
    config = DataConfig(
        blend=[prefix],
        sequence_length=length,
        storage=StorageConfig(cache_dir=f"{prefix}.cache"),
    )
    ranks = Ranks(ParallelLayout(tp=2))
    times: Times = {"get_batch": [], "five broadcasts": [], "bytes": []}
    with open_loader(config, ranks, micro_batch_size=rows, global_batch_size=rows * 8) as loader:
        megatron = replace(config, fields=MEGATRON_FIELDS)
        plain = open_loader(megatron, ranks, micro_batch_size=rows, global_batch_size=rows * 8)
        plain.ids_only = False
        whole = iter(plain) if dist.get_rank() == 0 else None
        counted = RankBatches(loader, ranks, device, ahead=0)
        next(counted)
        times["bytes"].append(counted.broadcast_bytes)
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
    batch = next(whole) if whole is not None else None
    for name in MEGATRON_FIELDS:
        dtype = torch.float32 if name == "loss_mask" else torch.int64
        if batch is not None:
            field = batch[name].contiguous().to(device)
        else:
            field = torch.empty(rows, length, dtype=dtype, device=device)
        dist.broadcast(field, 0, group=ranks.group("tp"))
    dist.broadcast(torch.zeros(1, dtype=torch.bool, device=device), 0, group=ranks.group("tp"))


def time_waiting(device: torch.device, runs: int, options: dict[str, Any], cache: str) -> Times:
    ranks = Ranks(ParallelLayout(dp=2))
    bare = GPT(MODEL).to(device)
    bare.init_weights(1)
    wrapped = BucketedDataParallel(bare, ranks=ranks, bucket_size=BUCKET)
    model = Model(wrapped, FETCHED)
    times: Times = {"wait": [], "step": []}
    with open_loader(
        config_of("s3://data/web", FETCHED, cache, options),
        ranks,
        micro_batch_size=FETCHED.rows,
        global_batch_size=FETCHED.rows * 2 * FETCHED.micro_batches,
    ) as loader:
        feed = RankBatches(loader, ranks, device)
        for number in range(3 * runs + 3):
            began = time.perf_counter()
            waited = model.step(feed)
            if number >= 3:
                times["wait"].append(waited)
                times["step"].append(time.perf_counter() - began)
        feed.close()
    return times


def time_cost(device: torch.device, size: Size, config: DataConfig, runs: int) -> Times:
    """Seconds of steps of both sides, which take turns, and those that were waited for data; CPU
    seconds for 10^9 tokens.
    """
    ranks = Ranks(ParallelLayout())
    bare = GPT(size.model).to(device)
    bare.init_weights(1)
    shard(bare, make_mesh(ranks, device.type), size.dtype)
    model = Model(bare, size)
    times: Times = {"loader": [], "resident": [], "wait": [], "host": []}
    used = {"loader": 0.0, "resident": 0.0}
    with open_loader(
        config, ranks, micro_batch_size=size.rows, global_batch_size=size.rows * size.micro_batches
    ) as loader:
        feed = RankBatches(loader, ranks, device)
        resident = {name: field.clone() for name, field in next(feed).items()}
        sides: dict[str, Iterator[Batch]] = {"loader": feed, "resident": itertools.repeat(resident)}
        for number in range(runs + 1):
            for name in harness.turns(list(sides), number):
                began = time.process_time()
                for _ in range(STEPS):
                    step_began = time.perf_counter()
                    waited = model.step(sides[name])
                    if device.type == "cuda":
                        torch.cuda.synchronize(device)
                    if number:  # the first round warms up
                        times[name].append(time.perf_counter() - step_began)
                        if name == "loader" and device.type == "cuda":
                            times["host"].append(waited)
                            times["wait"].append(model.idle_seconds())
                        elif name == "loader":
                            times["wait"].append(waited)
                used[name] += (time.process_time() - began) if number else 0.0
        feed.close()
    tokens = runs * STEPS * size.micro_batches * size.rows * size.length
    times["cpu"] = [(used["loader"] - used["resident"]) / tokens * 1e9]
    return times


def config_of(prefix: str, size: Size, cache: str, options: dict[str, Any]) -> DataConfig:
    return DataConfig(
        blend=[prefix], sequence_length=size.length, eod_id=0,
        storage=StorageConfig(storage_options=options, cache_dir=cache),
    )  # fmt: skip


class Model:
    """A model in whatever reduces its gradients, and its optimizer."""

    def __init__(self, wrapped: nn.Module, size: Size) -> None:
        self.wrapped = wrapped
        self.micro_batches = size.micro_batches
        self.optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-4, fused=True)
        self.is_on_cuda = next(wrapped.parameters()).is_cuda
        self.around_next: list[tuple[Any, Any]] = []
        """On CUDA the events before and after each `next` of the last step."""

    def step(self, batches: Iterator[Any]) -> float:
        """Forward and backward of all micro-batches, reduction, optimizer.

        Returns the host's seconds in `next`. A device still computes meanwhile: see idle_seconds.
        """
        waited = 0.0
        self.around_next.clear()
        for micro in range(self.micro_batches):
            before = self._event()
            called_at = time.perf_counter()
            batch = next(batches)
            waited += time.perf_counter() - called_at
            self.around_next.append((before, self._event()))
            with gradient_sync(self.wrapped, is_last=micro == self.micro_batches - 1):
                logits = self.wrapped(batch["tokens"], batch["position_ids"])
                loss = nn.functional.cross_entropy(
                    logits.flatten(0, 1).float(), batch["labels"].flatten()
                )
                (loss / self.micro_batches).backward()  # type: ignore[no-untyped-call]
        if isinstance(self.wrapped, BucketedDataParallel):
            self.wrapped.finish_grad_sync()
        self.optimizer.step()
        self.wrapped.zero_grad()
        return waited

    def idle_seconds(self) -> float:
        """Seconds of the last step in which the CUDA device waited for data; after its end."""
        return float(sum(a.elapsed_time(b) for a, b in self.around_next)) / 1e3

    def _event(self) -> Any:
        if not self.is_on_cuda:
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def timed(action: Callable[[], object], device: torch.device) -> float:
    """Seconds from a common start until all ranks are done."""

    def until_all_are_done() -> None:
        action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        dist.barrier()

    dist.barrier()
    return harness.seconds_of(until_all_are_done)


if __name__ == "__main__":
    sys.exit(main())
