"""What it costs to explain a run of 10^10 samples over a thousand datasets, through phases that
change datasets, weights and lengths; and whether its answers are what ranks read.

python tools/bench/audits.py [--samples 10000000000] [--datasets 1000] [--compared 1000]
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from streammega import DataConfig, IndexedDataset, StreamingDataset
from streammega.cli.main import main as streammega
from streammega.samples.provenance import Provenance, TracedSample
from streammega.train.config import load_run
from streammega.train.splits import data_of
from tools.bench import harness

T = TypeVar("T")
LENGTHS = (4096, 8192, 6000, 32768, 4096)
"""Tokens of a sample in each phase."""
JOIN = 5
"""Datasets that come, and that go, with every phase."""
BATCH = 1024
RANKS = 8
SEED = 7


def write_run(path: Path, samples: int, datasets: int) -> None:
    """A run of five phases of equally many samples."""
    rng = np.random.default_rng(SEED)
    total = datasets + JOIN * (len(LENGTHS) - 1)
    tokens = rng.integers(5 * 10**8, 4 * 10**9, total)
    names = [f"mock://tokens={count},length=1000003,seed={n}" for n, count in enumerate(tokens)]
    weights = rng.random(total) + 0.5
    lines = ["[data]", 'order = "stream"', 'split = "1,0,0"', f"sequence_length = {LENGTHS[0]}"]
    lines.append(f"blend = {blend_of(names, weights, 0, datasets)}")
    steps = samples // BATCH
    for number, length in enumerate(LENGTHS[1:], 1):
        lines.append("[[data.phases]]")
        lines.append(f"first_sample = {steps * number // len(LENGTHS) * BATCH}")
        lines.append(f"sequence_length = {length}")
        lines.append(f"blend = {blend_of(names, weights, number * JOIN, datasets)}")
    lines += ["[model]", "vocab_size = 50304", "[train]", f"iters = {steps}"]
    lines += ["micro_batch_size = 1", f"global_batch_size = {BATCH}", 'out_dir = "runs/audit"']
    path.write_text("\n".join(lines))


def blend_of(names: list[str], weights: np.ndarray, first: int, count: int) -> str:
    """A blend of some of all datasets, as TOML."""
    words: list[str] = []
    for name, weight in zip(names, weights.tolist(), strict=True):
        words += [f"{weight:.4f}", name]
    return json.dumps(words[2 * first : 2 * (first + count)])


def timed(what: str, do: Callable[[], T]) -> T:
    """Print the time that something takes, on the clock and of the processor."""
    began = time.perf_counter()
    busy = time.process_time()
    result = do()
    cpu = time.process_time() - busy
    wall = time.perf_counter() - began
    count = f"{result:,}" if isinstance(result, int) else ""
    harness.row(what, count, f"{wall:.2f} s", f"{cpu:.2f} s")
    return result


def command(*words: str) -> None:
    """Time a command, with all that it opens; it succeeds."""

    def characters() -> int:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            code = streammega(list(words))
        if code:
            raise SystemExit(f"{words}: exit status {code}")
        return len(printed.getvalue())

    timed(" ".join(word for word in words if "/" not in word), characters)


def digest(tokens: np.ndarray) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(tokens, np.int64).tobytes()).digest()


def same_as_ranks(config: DataConfig, traced: list[TracedSample]) -> tuple[int, int]:
    """How many of the traced samples are what their rank reads, by hashes; and how many join runs."""
    ranks = [
        StreamingDataset(
            config, micro_batch_size=1, global_batch_size=BATCH, dp_rank=rank, dp_size=RANKS
        )
        for rank in range(RANKS)
    ]
    opened: dict[str, IndexedDataset] = {}
    same = 0
    joined = 0
    for sample in traced:
        rank = sample.sample % RANKS
        batch = ranks[rank].batch(sample.sample - rank)
        row = np.append(batch["tokens"][0].numpy(), batch["labels"][0, -1:].numpy())
        parts = []
        for run in sample.runs:
            if run.shard not in opened:
                opened[run.shard] = IndexedDataset(run.shard)
            of_document = opened[run.shard].get(run.name.document, run.start, run.stop - run.start)
            parts.append(of_document.astype(np.int64))
        same += digest(row) == digest(np.concatenate(parts))
        joined += bool(sample.joins)
    return same, joined


def report(samples: int, datasets: int, compared: int) -> None:
    folder = Path(tempfile.mkdtemp(prefix="audits-"))
    path = folder / "run.toml"
    write_run(path, samples, datasets)
    run = str(path)
    config = data_of(load_run(run), "train")
    harness.table("what", "found", "on the clock", "CPU")
    provenance = timed("open the datasets", lambda: Provenance(config, "train", BATCH))
    rng = np.random.default_rng(SEED)
    firsts = provenance.source.starts  # type: ignore[attr-defined]
    timed("open all phases", lambda: len(provenance.trace(firsts)))
    end = samples // BATCH * BATCH
    # half of them soon behind a change, where samples join what epochs had left
    behind = rng.choice(firsts[1:], compared // 2) + rng.integers(0, 10 * BATCH, compared // 2)
    chosen = np.concatenate([behind, rng.integers(0, end, compared - compared // 2)])
    traced = timed(f"trace {compared:,} samples", lambda: list(provenance.trace(chosen)))
    (name,) = provenance.find(f"{provenance.datasets[datasets // 2]}#100")
    title = "find a document of 1,000,003 tokens: uses"
    timed(title, lambda: len(provenance.uses(name, end)))
    began = time.perf_counter()
    same, joined = same_as_ranks(config, traced)
    print(f"{same:,} of {len(traced):,} samples are what {RANKS} ranks read, by hashes; {joined:,} "
          f"join runs of tokens ({time.perf_counter() - began:.0f} s)")  # fmt: skip
    step = firsts[2] // BATCH + 3
    page = str(folder / "page.html")
    document = f"{provenance.datasets[datasets // 2]}#100"
    command("describe", run)
    command("describe", run, "--json")
    for what in (["--step", str(step)], ["--find", document]):
        command("trace", run, *what)
        command("trace", run, *what, "--json", "--html", page)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=10**10)
    parser.add_argument("--datasets", type=int, default=1000)
    parser.add_argument("--compared", type=int, default=1000)
    chosen = parser.parse_args()
    report(chosen.samples, chosen.datasets, chosen.compared)


if __name__ == "__main__":
    main()
