#!/usr/bin/env python3
"""Does the order matter to the loss? The same small GPT on the same tokens in several orders.

    .venv/bin/python tools/bench/shuffle_training.py                      # an hour on two cores
    git worktree add ../before 9b5f7156                                   # of stream order version 1
    .venv-bench/bin/python tools/bench/shuffle_training.py --before ../before

Byte-level tokens of Python sources, package after package: long stretches of one kind, the hard case. The
stream order is that of default settings for this batch. Each seed is one of weights and order; the difference
from a full shuffle is that of the same seed. With mosaicml-streaming installed, its py1e is measured too.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from streammega.order.stream_order import default_block_bytes, default_lanes
from streammega.train.config import ModelConfig
from streammega.train.model import GPT
from tools.bench import harness
from tools.bench.shuffle_models import block_shuffle, full_shuffle, stream

LENGTH = 128
BATCH = 32
ITEMSIZE = 2
MDS_SHARD_BYTES = 1 << 26
"""mosaicml-streaming's default."""
FULL = "full shuffle"
STREAM = "stream order"
VERSION_1 = "stream order, version 1"
PY1E = "mosaicml-streaming's py1e"
BLOCKS = "block shuffle, 12 blocks"
DOCUMENTS_BATCH = 8
"""Samples in which documents are counted."""
Starts = NDArray[np.int64]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=700)
    parser.add_argument("--megabytes", type=int, nargs="*", default=[3, 30, 300])
    parser.add_argument("--before", type=Path, help="a checkout with version 1 of the order")
    chosen = parser.parse_args()
    orders = [FULL, STREAM, BLOCKS]
    if chosen.before:
        orders.append(VERSION_1)
    if importlib.util.find_spec("streaming"):
        orders.append(PY1E)
    print(f"{harness.machine()}\n")
    print(
        f"torch {torch.__version__}; {chosen.steps} steps of {BATCH} x {LENGTH} bytes, "
        f"{chosen.seeds} seeds"
    )
    harness.table(
        "MB", "order", "held-out loss (nat per byte)", "deviation", "more than a full shuffle",
        f"documents in {DOCUMENTS_BATCH} samples",
    )  # fmt: skip
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for megabytes in chosen.megabytes:
            train_one = partial(train_once, megabytes, chosen.steps, chosen.before)
            runs = list(product(orders, range(chosen.seeds)))
            results = dict(zip(runs, pool.map(train_one, *zip(*runs, strict=True)), strict=True))
            for order in orders:
                show(megabytes, order, [results[order, seed] for seed in range(chosen.seeds)],
                     [results[FULL, seed][0] for seed in range(chosen.seeds)])  # fmt: skip
    return 0


def show(megabytes: int, order: str, results: list[tuple[float, float]], full: list[float]) -> None:
    """A row of the table: means over seeds, and standard errors."""
    losses = [loss for loss, _ in results]
    more = [loss - other for loss, other in zip(losses, full, strict=True)]
    deviation = statistics.stdev(losses)
    error = statistics.stdev(more) / len(more) ** 0.5
    difference = "" if order == FULL else f"{statistics.mean(more):+.4f} ± {error:.4f}"
    documents = statistics.mean(count for _, count in results)
    harness.row(
        str(megabytes), order, f"{statistics.mean(losses):.4f}", f"{deviation:.4f}", difference,
        f"{documents:.1f}",
    )  # fmt: skip


def python_documents(megabytes: int) -> list[bytes]:
    """Sources of packages, package by package: at most a twelfth of the corpus of each."""
    paths = sysconfig.get_paths()
    limit = megabytes * 1_000_000
    documents: list[bytes] = []
    for root in (Path(paths["purelib"]), Path(paths["stdlib"])):
        for package in sorted(path for path in root.iterdir() if path.is_dir()):
            if package.name == "site-packages":
                continue
            size = 0
            for path in sorted(package.rglob("*.py")):
                text = path.read_bytes()
                if len(text) > 500 and size < limit // 12:
                    documents.append(text + b"\0")
                    size += len(text)
            if sum(map(len, documents)) > 1.05 * limit:
                return documents
    return documents


def corpus(megabytes: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Training bytes, and those of every 20th document, which are held out."""
    documents = python_documents(megabytes)
    held_out = b"".join(documents[::20])[: 1 << 20]
    rest = b"".join(document for number, document in enumerate(documents) if number % 20)
    return np.frombuffer(rest, np.uint8), np.frombuffer(held_out, np.uint8)


def ordered(tokens: int, order: str, seed: int, samples: int, before: Path | None) -> Starts:
    """Where the first samples of an epoch start, in the order they are trained on."""
    count = (tokens - 1) // LENGTH
    rng = np.random.default_rng(seed)
    if order == FULL:
        return full_shuffle(count, rng) * LENGTH
    if order == BLOCKS:
        return block_shuffle(count, -(-count // 12), rng) * LENGTH
    if order == PY1E:
        return py1e(count, seed) * LENGTH
    if order == VERSION_1:
        assert before is not None
        return version_1(tokens, min(samples, count), seed, before)
    lanes = default_lanes(BATCH, None)
    return stream(
        tokens,
        LENGTH,
        min(samples, count),
        lanes=lanes,
        shuffle_block_bytes=default_block_bytes(lanes),
        seed=seed,
        itemsize=ITEMSIZE,
    )


def version_1(tokens: int, samples: int, seed: int, before: Path) -> Starts:
    """The order of another checkout, from a process of its own."""
    code = (
        "import sys; import numpy as np; sys.path.insert(0, sys.argv[1]); "
        "from streammega.order import stream_order as order; "
        "from tools.bench.shuffle_models import stream; assert order.STREAM_VERSION == 1; "
        f"lanes = order.default_lanes({BATCH}, None); "
        f"starts = stream({tokens}, {LENGTH}, {samples}, lanes=lanes, seed={seed}, itemsize={ITEMSIZE}, "
        "shuffle_block_bytes=order.default_block_bytes(lanes)); np.save(sys.argv[2], starts)"
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "starts.npy"
        command = [sys.executable, "-c", code, str(before.resolve()), str(path)]
        subprocess.run(command, check=True, cwd=before, env={**os.environ, "PYTHONPATH": ""})
        return np.asarray(np.load(path))


def py1e(count: int, seed: int) -> NDArray[np.int64]:
    """The samples of one node, by mosaicml-streaming itself, with its default shards and blocks."""
    from tools.bench.sides import stub_torchvision

    stub_torchvision()
    from streaming.base.shuffle import get_shuffle

    shard = MDS_SHARD_BYTES // (LENGTH * ITEMSIZE)
    sizes = np.diff(np.append(np.arange(0, count, shard), count))
    block_size = max(4_000_000, 1 << 18)
    return np.asarray(get_shuffle("py1e", sizes, 1, seed, 0, block_size))


def documents_of(data: NDArray[np.uint8], starts: Starts) -> float:
    """Distinct documents that a few consecutive samples begin in, on average."""
    before = np.cumsum(data == 0)
    at = starts[: len(starts) // DOCUMENTS_BATCH * DOCUMENTS_BATCH].reshape(-1, DOCUMENTS_BATCH)
    return statistics.fmean(len(np.unique(before[batch])) for batch in at)


def batches(data: NDArray[np.uint8], starts: Starts, steps: int) -> Iterator[torch.Tensor]:
    for step in range(steps):
        at = np.take(starts, range(step * BATCH, (step + 1) * BATCH), mode="wrap")
        yield torch.from_numpy(data[at[:, None] + np.arange(LENGTH + 1)].astype(np.int64))


def train_once(
    megabytes: int, steps: int, before: Path | None, order: str, seed: int
) -> tuple[float, float]:
    """(held-out loss, documents in a few samples) of one run."""
    torch.set_num_threads(1)
    train, held_out = corpus(megabytes)
    starts = ordered(len(train), order, seed, steps * BATCH, before)
    model = GPT(ModelConfig(vocab_size=256, dim=64, layers=2, heads=2))
    model.init_weights(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 3e-3, total_steps=steps, pct_start=0.1
    )
    for batch in batches(train, starts, steps):
        optimizer.zero_grad(set_to_none=True)
        loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        held = np.arange((len(held_out) - 1) // LENGTH, dtype=np.int64) * LENGTH
        loss = statistics.mean(
            float(loss_of(model, batch)) for batch in batches(held_out, held, len(held) // BATCH)
        )
    return loss, documents_of(train, starts[: steps * BATCH])


def loss_of(model: GPT, batch: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(LENGTH).expand(len(batch), -1)
    return F.cross_entropy(model(batch[:, :-1], positions).flatten(0, 1), batch[:, 1:].flatten())


if __name__ == "__main__":
    sys.exit(main())
