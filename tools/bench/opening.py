#!/usr/bin/env python3
"""How long it takes to begin: from a process to its first batch, and opening blends, manifests and
folders of many datasets, from a local object server.

    .venv/bin/python tools/bench/opening.py            # all; --figures first or opening;
                                                       # --open folder: that opening alone

Every side is a process of its own, `--runs` times each; figures are medians. With 20 ms, every
answer of the server comes so late, to HEAD requests and listings too. Of openings, "cold" is with
an empty cache, "again" with the one that this filled, in the same process; "CPU": of the processor's
time, which other work on the machine moves least, without the server's.
"""

from __future__ import annotations

import argparse
import functools
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tools.bench import corpus, harness
from tools.bench.object_server import Running, running

MANIFEST = ".manifest.json"
PACKAGES = ("numpy", "numba", "torch", "obstore")
FOLDER = Path("/tmp/streammega-opening")
DATASETS = 1_000
SHARDS = 10_000
CORPUS_TOKENS = 32 << 20
LENGTH = 100
"""Tokens of a sequence of the many small datasets."""
SEQUENCES = 50
OPENINGS = {
    f"a blend of {DATASETS:,} pairs": "blend",
    "the same, written down": "pinned",
    f"a manifest of {SHARDS:,} shards": "manifest",
    f"a folder of {SHARDS:,} pairs": "folder",
}
STEPS = ("start", "torch", "ours", "settled", "construction", "batch")
PARTS = {
    "construction": "of that, opening: the construction of the loader",
    "plans": "of that, plans of the first windows, in the engine's thread",
    "bytes": "of that, the engine waits for bytes",
    "fields": "of that, fields",
    "kernels": "in all of these, kernels from their cache",
    "CPU": "CPU, all threads",
}
"""What the time from construction to the first batch is made of; they overlap in part."""
LATENCIES = (0.0, 0.02)
SETTLE = 1.0
"""Seconds between imports and the rest, where imports are warm: a program has much else to do."""


# --- what is opened ------------------------------------------------------------------------------


def prepare(root: Path) -> None:
    """A corpus, and many small pairs under names of all three kinds; once."""
    from streammega.dataset.manifest import Manifest, Shard
    from streammega.dataset.names import shard_name

    if (root / "done").exists():
        return
    bucket = root / "objects" / "data"
    shutil.rmtree(root, ignore_errors=True)
    for folder in ("blend", "manifest", "folder"):
        (bucket / folder).mkdir(parents=True)
    corpus.write_random(str(bucket / "web"), np.full(CORPUS_TOKENS // 1024, 1024), 60_000)
    corpus.write_random(str(root / "small"), np.full(SEQUENCES, LENGTH))
    tokens = (root / "small.bin").read_bytes()
    index = (root / "small.idx").read_bytes()
    for number in range(DATASETS):
        write_pair(bucket / "blend" / f"d{number:04d}", tokens, index)
    shards = []
    for number in range(SHARDS):
        write_pair(bucket / "folder" / f"p{number:05d}", tokens, index)
        name = shard_name("web", number, SHARDS)
        write_pair(bucket / "manifest" / name, tokens, index)
        shard = Shard(
            name=name,
            documents=SEQUENCES,
            sequences=SEQUENCES,
            tokens=LENGTH * SEQUENCES,
            bytes=len(tokens),
            checksums=["0" * 32],
            index_bytes=len(index),
            index_checksums=["0" * 32],
        )
        shards.append(shard)
    manifest = Manifest(
        kind="bin",
        dtype="uint16",
        documents=SEQUENCES * SHARDS,
        sequences=SEQUENCES * SHARDS,
        tokens=LENGTH * SEQUENCES * SHARDS,
        shards=shards,
    )
    (bucket / "manifest" / f"web{MANIFEST}").write_bytes(manifest.to_json())
    (root / "done").touch()


def write_pair(prefix: Path, tokens: bytes, index: bytes) -> None:
    prefix.with_name(f"{prefix.name}.bin").write_bytes(tokens)
    prefix.with_name(f"{prefix.name}.idx").write_bytes(index)


def names_of(what: str) -> list[str]:
    """The blend of an opening."""
    if what == "pinned":
        return ["s3://data/blend.json"]
    if what == "blend":
        return [f"s3://data/blend/d{number:04d}" for number in range(DATASETS)]
    return {"manifest": [f"s3://data/manifest/web{MANIFEST}"], "folder": ["s3://data/folder/"]}[
        what
    ]


def write_versions(server: Running, root: Path) -> None:
    """The manifest and the blend as they are where they were written: with ETags of this server."""
    from streammega import write_manifest
    from streammega.dataset.opening import open_manifests

    arguments = {"options": server.storage_options, "cache": str(root / "cache")}
    data = root / "objects" / "data"
    storage = config_of(names_of("blend"), 64, arguments).storage
    (manifest,) = open_manifests(names_of("manifest"), storage)
    (data / "manifest" / f"web{MANIFEST}").write_bytes(manifest.to_json())
    write_manifest(config_of(names_of("blend"), 64, arguments), str(data / "blend.json"))


# --- sides, each in a process of its own ---------------------------------------------------------


def config_of(blend: Sequence[str], length: int, arguments: dict[str, Any]) -> Any:
    from streammega import DataConfig, StorageConfig

    return DataConfig(
        blend=list(blend),
        sequence_length=length,
        storage=StorageConfig(storage_options=arguments["options"], cache_dir=arguments["cache"]),
    )


def first_batch(**arguments: Any) -> dict[str, float]:
    """Seconds of each step to the first batch ("start": from before the process to its first line),
    and of what the last two are made of: PARTS.
    """
    times = [arguments["began"], time.time()]
    import torch  # noqa: F401

    times.append(time.time())
    from streammega import StreamLoader

    times.append(time.time())
    time.sleep(arguments["settle"])
    times.append(time.time())
    parts = timed_parts() if arguments["settle"] else {}
    spent = time.process_time()
    config = config_of(["s3://data/web"], 4096, arguments)
    loader = StreamLoader(config, micro_batch_size=8, global_batch_size=64)
    times.append(time.time())
    next(iter(loader))
    times.append(time.time())
    parts["CPU"] = time.process_time() - spent
    loader.close()
    steps = [after - before for before, after in zip(times[:-1], times[1:], strict=True)]
    return dict(zip(STEPS, steps, strict=True)) | parts


def timed_parts() -> dict[str, float]:
    """Seconds, in all threads together, of what a first batch is made of; they grow as it is made."""
    from streammega.kernels import jit
    from streammega.loading.lookahead import Lookahead
    from streammega.loading.ready import Assembler
    from streammega.storage.fetch.fetcher import Fetcher

    parts: dict[str, float] = {}
    kernels = jit._KernelCache
    for name, owner, method in (
        ("kernels", kernels, "load_overload"),
        ("plans", Lookahead, "plan_window"),
        ("bytes", Fetcher, "wait"),
        ("fields", Assembler, "assemble"),
    ):
        parts[name] = 0.0
        setattr(owner, method, adding_to(parts, name, getattr(owner, method)))
    return parts


def adding_to(parts: dict[str, float], name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """A function that adds its seconds to a part."""

    @functools.wraps(call)
    def timed(*arguments: Any, **options: Any) -> Any:
        began = time.perf_counter()
        try:
            return call(*arguments, **options)
        finally:
            parts[name] += time.perf_counter() - began

    return timed


def opening(**arguments: Any) -> dict[str, float]:
    """Seconds to open a dataset cold, and again, and of the processor's time that took this process."""
    from streammega import StreamLoader

    shutil.rmtree(arguments["cache"], ignore_errors=True)
    time.sleep(SETTLE)
    seconds = {}
    for name in ("cold", "again"):
        config = config_of(names_of(arguments["what"]), 64, arguments)

        def construct(config: Any = config) -> None:
            StreamLoader(config, micro_batch_size=8, global_batch_size=64).close()

        began = time.process_time()
        seconds[name] = harness.seconds_of(construct)
        seconds[f"{name}, CPU"] = time.process_time() - began
    return seconds


def medians_of(
    server: Running, runs: int, side: Callable[..., dict[str, float]], **arguments: Any
) -> dict[str, float]:
    """The medians of what a side gives that reads from a server, in a process of its own."""
    arguments |= {"options": server.storage_options, "cache": str(FOLDER / "cache")}
    results = [harness.in_process(side, began=time.time(), **arguments) for _ in range(runs)]
    return {key: statistics.median(result[key] for result in results) for key in results[0]}


# --- figures -------------------------------------------------------------------------------------


def first(chosen: argparse.Namespace) -> None:
    """The table of the first batch."""
    columns = []
    with running(FOLDER / "objects") as server:
        write_versions(server, FOLDER)
        for delay in LATENCIES:
            server.behave(latency=delay, latency_of_all=True)
            at_once = medians_of(server, chosen.runs, first_batch, settle=0.0)
            warm = medians_of(server, chosen.runs, first_batch, settle=SETTLE)
            columns.append(
                {
                    "from construction, imports warm": warm["construction"] + warm["batch"],
                    **{title: warm[name] for name, title in PARTS.items()},
                    "from the start of the process": from_start(at_once),
                    "of that, torch's import": at_once["torch"],
                    "of that, our imports": at_once["ours"],
                }
            )
    harness.table("seconds to the first batch", "loopback", "20 ms")
    for name in columns[0]:
        harness.row(name, *(f"{column[name]:.2f}" for column in columns))
    print()


def from_start(steps: dict[str, float]) -> float:
    """Seconds from the start of a process to its first batch."""
    return sum(steps[name] for name in STEPS) - steps["settled"]


def seconds_to_open(server: Running, what: str, runs: int) -> dict[str, float]:
    """Medians of what `opening` gives: with an empty cache, and with the one that this filled."""
    return medians_of(server, runs, opening, what=what)


def openings(chosen: argparse.Namespace) -> None:
    """The table of those openings that are chosen."""
    columns = ("cold", "again", "cold, CPU", "again, CPU")
    harness.table("opening, seconds", "latency", *columns)
    with running(FOLDER / "objects") as server:
        write_versions(server, FOLDER)
        for delay in LATENCIES:
            server.behave(latency=delay, latency_of_all=True)
            for name, what in OPENINGS.items():
                if what not in chosen.open:
                    continue
                seconds = seconds_to_open(server, what, chosen.runs)
                cells = [f"{seconds[column]:.2f}" for column in columns]
                harness.row(name, f"{delay * 1e3:.0f} ms", *cells)


FIGURES = harness.Figures(first=first, opening=openings)


def main() -> int:
    parser = harness.parser(__doc__, FIGURES)
    parser.add_argument("--open", nargs="+", choices=OPENINGS.values(), default=OPENINGS.values())
    chosen = parser.parse_args()
    prepare(FOLDER)
    harness.print_head(PACKAGES, chosen.runs)
    return harness.print_figures(FIGURES, chosen)


if __name__ == "__main__":
    sys.exit(main())
