"""What the adapters for other trainers cost a batch, beside the bare loader they are around.

    python tools/bench/integrations.py [--batches 3000] [--rounds 5]

CPU time, for each batch, of the thread that asks for it, where adapters do their work; what the loader's own
threads do is the same for all. The sides take turns on the same `mock://` data, and a side is the loop that its
trainer runs, without a model.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from streammega import DataConfig, StreamLoader
from tools.bench.harness import in_turns

SIZES: Any = {"micro_batch_size": 4, "global_batch_size": 16}
WARM = 50
"""Batches before a measurement: threads have begun, kernels are compiled."""


def data_config(sequence_length: int) -> DataConfig:
    """Tokens without an end, that cost next to nothing to read."""
    return DataConfig(
        blend=["mock://tokens=20000000,vocab=1000"],
        sequence_length=sequence_length,
        order="stream",
        vocab_size=1000,
    )


def cpu_per_batch(batches: Iterable[Any], count: int, after: Callable[[], None]) -> float:
    """Microseconds of CPU time of this thread for each of `count` batches."""
    iterator = iter(batches)
    for _ in itertools.islice(iterator, WARM):
        after()
    began = time.thread_time()
    for _ in itertools.islice(iterator, count):
        after()
    return (time.thread_time() - began) / count * 1e6


def nothing() -> None:
    """After a batch: the bare loop."""


def bare(config: DataConfig, count: int) -> float:
    """`for batch in loader`."""
    with StreamLoader(config, **SIZES) as loader:
        return cpu_per_batch(loader, count, nothing)


def by_next(config: DataConfig, count: int) -> float:
    """`next(loader)`, as Megatron asks."""
    with StreamLoader(config, **SIZES) as loader:
        return cpu_per_batch(iter(lambda: next(loader), None), count, nothing)


def on_device(config: DataConfig, count: int) -> float:
    """`prefetch_to` a device that copies nothing, so only what is around the copies is measured."""
    with StreamLoader(config, **SIZES).prefetch_to("meta") as loader:
        return cpu_per_batch(loader, count, nothing)


def lightning(config: DataConfig, count: int) -> float:
    """The data module's batches, each counted as trained on."""
    from streammega.integrations.lightning import StreamDataModule

    data = StreamDataModule(config, **SIZES)
    batches = data.train_dataloader()
    spent = cpu_per_batch(batches, count, batches.trained)
    data.teardown("fit")
    return spent


def accelerate(config: DataConfig, count: int) -> float:
    """The opt-out DataLoader."""
    from accelerate import Accelerator

    from streammega.integrations.accelerate import StreamDataLoader

    loader = StreamDataLoader(Accelerator(cpu=True), config, **SIZES)
    spent = cpu_per_batch(loader, count, nothing)
    loader.close()
    return spent


def transformers(config: DataConfig, count: int) -> float:
    """The same, with the fields of Hugging Face's models."""
    from accelerate import Accelerator

    from streammega.integrations.accelerate import StreamDataLoader
    from streammega.integrations.transformers import causal_lm_batch

    loader = StreamDataLoader(Accelerator(cpu=True), config, prepare_batch=causal_lm_batch, **SIZES)
    spent = cpu_per_batch(loader, count, nothing)
    loader.close()
    return spent


SIDES = {
    "for batch in loader": bare,
    "next(loader)": by_next,
    "prefetch_to, no copy": on_device,
    "Lightning": lightning,
    "accelerate": accelerate,
    "transformers": transformers,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, default=3000, help="of one side in one round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--length", type=int, default=1024, help="tokens of a sample")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    config = data_config(options.length)
    sides = {name: partial(side, config, options.batches) for name, side in SIDES.items()}
    given = in_turns(options.rounds, sides)
    base = statistics.median(given["for batch in loader"])
    print(f"CPU microseconds a batch of 4 x {options.length}, median (least, most) of the rounds")
    for name, values in given.items():
        median = statistics.median(values)
        spread = f"({min(values):.0f}, {max(values):.0f})"
        print(f"{name:<22} {median:7.0f} {spread:<14} {median - base:+7.0f}")
    print(json.dumps({name: round(statistics.median(values)) for name, values in given.items()}))


if __name__ == "__main__":
    main()
