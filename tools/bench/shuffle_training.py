#!/usr/bin/env python3
"""Does the order matter to the loss? The same small GPT on the same tokens in several orders.

Byte-level tokens of installed Python packages, once with documents shuffled and once in their order
(long stretches of one package: the hard case). The loss is that of held-out documents, averaged
over seeds of weights and order.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from streammega.train.config import ModelConfig
from streammega.train.model import GPT
from tools.bench import harness
from tools.bench.shuffle_models import stream

LENGTH = 128
BATCH = 32
CORPUS_BYTES = 3_000_000
Starts = NDArray[np.int64]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=500)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    documents = python_documents()
    print(
        f"torch {torch.__version__}; {chosen.steps} steps of {BATCH} x {LENGTH} bytes, {chosen.seeds} seeds"
    )
    harness.table("corpus", "order", "held-out loss (nat per byte)", "spread over seeds")
    for name in ("documents shuffled", "sorted by package"):
        train, held_out = corpus(documents, shuffled=name == "documents shuffled")
        for order in ("full shuffle", "stream", "stream, one block a lane", "coarse block shuffle"):
            losses = [
                train_once(train, held_out, order, seed, chosen.steps)
                for seed in range(chosen.seeds)
            ]
            spread = max(losses) - min(losses)
            harness.row(name, order, f"{statistics.mean(losses):.4f}", f"{spread:.4f}")
    return 0


def python_documents() -> list[bytes]:
    """Sources of several installed packages, package by package: a few hundred
    kilobytes of each.
    """
    root = Path(sysconfig.get_paths()["purelib"])
    documents: list[bytes] = []
    for package in sorted(
        path for path in root.iterdir() if path.is_dir() and (path / "__init__.py").exists()
    ):
        size = 0
        for path in sorted(package.rglob("*.py")):
            text = path.read_bytes()
            if 500 < len(text) < 50_000 and size < CORPUS_BYTES // 12:
                documents.append(text + b"\0")
                size += len(text)
        if sum(map(len, documents)) > 1.05 * CORPUS_BYTES:
            break
    return documents


def corpus(
    documents: list[bytes], *, shuffled: bool
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Training bytes, and those of every 20th document, which are held out."""
    held_out = b"".join(documents[::20])
    rest = [document for number, document in enumerate(documents) if number % 20]
    if shuffled:
        rest = [rest[n] for n in np.random.default_rng(0).permutation(len(rest))]
    return np.frombuffer(b"".join(rest), np.uint8), np.frombuffer(held_out, np.uint8)


def ordered(tokens: int, order: str, seed: int) -> Starts:
    """Where each sample of an epoch starts, in the order it is trained on."""
    count = (tokens - 1) // LENGTH
    every = np.arange(count, dtype=np.int64) * LENGTH
    rng = np.random.default_rng(seed)
    if order == "full shuffle":
        return rng.permutation(every)
    # blocks of 1/12 of the corpus in random order, shuffled inside, one at a time
    if order == "coarse block shuffle":
        blocks = np.array_split(every, 12)
        return np.concatenate([rng.permutation(blocks[n]) for n in rng.permutation(len(blocks))])
    # samples: fine blocks, or as coarse as 256 lanes allow
    block = 8 if order == "stream" else -(-count // 256)
    return stream(
        tokens, LENGTH, count, lanes=256, shuffle_block_bytes=block * LENGTH, seed=seed, itemsize=1
    )


def batches(data: NDArray[np.uint8], starts: Starts, steps: int) -> Iterator[torch.Tensor]:
    for step in range(steps):
        at = np.take(starts, range(step * BATCH, (step + 1) * BATCH), mode="wrap")
        yield torch.from_numpy(data[at[:, None] + np.arange(LENGTH + 1)].astype(np.int64))


def train_once(
    data: NDArray[np.uint8], held_out: NDArray[np.uint8], order: str, seed: int, steps: int
) -> float:
    model = GPT(ModelConfig(vocab_size=256, dim=64, layers=2, heads=2))
    model.init_weights(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 3e-3, total_steps=steps, pct_start=0.1
    )
    for batch in batches(data, ordered(len(data), order, seed), steps):
        optimizer.zero_grad(set_to_none=True)
        loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        starts = np.arange((len(held_out) - 1) // LENGTH, dtype=np.int64) * LENGTH
        return statistics.mean(
            float(loss_of(model, batch))
            for batch in batches(held_out, starts, len(starts) // BATCH)
        )


def loss_of(model: GPT, batch: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(LENGTH).expand(len(batch), -1)
    return F.cross_entropy(model(batch[:, :-1], positions).flatten(0, 1), batch[:, 1:].flatten())


if __name__ == "__main__":
    sys.exit(main())
