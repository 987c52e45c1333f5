"""What it costs to find the samples that read a document: samples searched a second of one core, by order.

python tools/bench/audits.py [--samples 20000000]

The stream order over one dataset and over a thousand; a phase whose samples are cut of what the epochs
before had left; and the Megatron order, of built indices. Each for one document, and for 1,000 at once.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from streammega import DataConfig, PhaseConfig, StorageConfig
from streammega.samples.document_names import DocumentName
from streammega.samples.provenance import Provenance
from tools.bench import harness

LENGTH = 2048
BATCH = 512
SEED = 7


def mock(tokens: int, seed: int) -> str:
    """A dataset of documents of 1,003 tokens that takes no room."""
    return f"mock://tokens={tokens},length=1003,seed={seed}"


def configs(samples: int, cache: str) -> dict[str, tuple[DataConfig, int]]:
    """(config, first sample to search) by name."""
    one = [mock(samples * LENGTH // 2, 0)]
    many = [(mock(samples * LENGTH // 1000, seed), 1.0 + seed % 7) for seed in range(1000)]
    middle = samples // 4 // BATCH * BATCH
    stream = DataConfig(
        blend=one,
        sequence_length=LENGTH,
        seed=SEED,
        storage=StorageConfig(cache_dir=cache),
    )
    shorter = PhaseConfig(first_sample=middle, sequence_length=LENGTH // 2)
    few = replace(stream, blend=[mock(10**9, 0)], order="megatron", num_samples=(samples, 0, 0))
    return {
        "stream, 1 dataset": (stream, 0),
        "stream, 1,000 datasets": (replace(stream, blend=many), 0),
        "stream, remainders": (replace(stream, phases=[shorter]), middle),
        "megatron": (few, 0),
    }


def some_documents(provenance: Provenance, count: int) -> list[DocumentName]:
    """Documents of all datasets, each chosen once."""
    rng = np.random.default_rng(SEED)
    chosen: set[DocumentName] = set()
    while len(chosen) < count:
        dataset = int(rng.integers(len(provenance.datasets)))
        documents = provenance.shards(dataset)[0].num_documents
        chosen.add(DocumentName(dataset, 0, int(rng.integers(documents))))
    return sorted(chosen)


def report(samples: int) -> None:
    """Print a row for each order."""
    harness.table("order", "documents", "uses", "samples a second of a core", "on the clock")
    with tempfile.TemporaryDirectory(prefix="audits-") as cache:
        for name, (config, start) in configs(samples, cache).items():
            provenance = Provenance(config, "train", BATCH)
            for count in (1, 1000):
                documents = some_documents(provenance, count)
                end = start + samples // 2
                _ = list(provenance.uses(documents, start=start, end=start + BATCH))
                began, busy = time.perf_counter(), time.process_time()
                uses = sum(1 for _ in provenance.uses(documents, start=start, end=end))
                cpu, clock = time.process_time() - busy, time.perf_counter() - began
                rate = samples / 2 / cpu
                harness.row(
                    name, f"{count:,}", f"{uses:,}", f"{rate / 1e6:.2f} M", f"{clock:.2f} s"
                )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=20_000_000)
    report(parser.parse_args().samples)


if __name__ == "__main__":
    main()
