#!/usr/bin/env python3
"""`streammega simulate` against runs: ranks in processes of their own read from a shaped server, and
their requests, bytes, start, waits and memory stand beside those that are simulated.

    .venv/bin/python tools/bench/simulate.py           # six minutes; --cases 0 3 for some

Each rank takes a micro-batch every `STEP_SECONDS`, as a training step would. Kernels and modules are
loaded before. "at first" is the first ten seconds, "later" the second half of the micro-batches.
"requests" are those of the server, with the opening. The
last column says how busy the ranks and the server kept the cores. The processor's time of a request,
which a rank and the server take of the same cores, is measured first. Ranks of a cluster have cores of
their own; here they start one after the other, so that each opens its datasets alone.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tools.bench import harness
from tools.bench.object_server import Running, etag, running

SHARDS = 12
SHARD_TOKENS = {"web": 16_000_000, "code": 8_000_000}
LENGTH = 1024
MICRO_BATCH = 8
LANES = 64
BLOCK_BYTES = 64 << 10
STEP_SECONDS = 0.01
FIRST_SECONDS = 10.0
START_SECONDS = 1.0
"""From the start of a rank to that of the next. All of them at once would keep the cores busy."""
CATCH_UP = 0.1
"""Seconds that a rank may be behind its pace, and runs faster until it is not."""
NOTHING = 0.01
"""Of smaller figures no ratio is printed."""
PLENTY = 1e12
"""A rate that limits nothing."""


class Case(NamedTuple):
    """A run. bandwidth: bytes a second of a connection; link: of all of them; rate: requests a second
    of all ranks, beyond which the server refuses. 0: no limit. step: seconds of a micro-batch.
    in_flight: bytes of a rank: few, so that short runs do not read all of their data at first.
    """

    title: str
    ranks: int
    latency: float = 0.02
    bandwidth: float = 0.0
    link: float = 0.0
    rate: float = 0.0
    step: float = STEP_SECONDS
    in_flight: int = 4 << 20


CASES = (
    Case("1 rank, 20 ms", 1),
    Case("2 ranks, 100 ms, 300 KB/s a connection", 2, 0.1, 3e5),
    Case("4 ranks, 100 ms, 40 MB/s for all", 4, 0.1, link=40e6),
    Case("8 ranks, 100 ms", 8, 0.1),
    Case("8 ranks, 100 ms, 300 requests/s for all", 8, 0.1, rate=300.0),
    Case("2 ranks, 20 ms, 2 MB/s for all: too slow", 2, link=2e6, in_flight=2 << 20),
)


def write_data(root: Path, shard_tokens: Mapping[str, int], shards: int) -> None:
    """Datasets of zeros as sparse files, with manifests: only sizes matter."""
    from streammega import StorageConfig
    from streammega.apps.simulated_reads import make_manifest
    from streammega.dataset.manifest import read_manifest
    from streammega.dataset.names import MANIFEST

    root.mkdir(parents=True)
    for name, tokens in shard_tokens.items():
        manifest = root / f"{name}{MANIFEST}"
        manifest.write_bytes(make_manifest(name, [tokens] * shards, "uint16"))
        for shard in read_manifest(str(manifest), StorageConfig()).shards:
            for suffix, size in ((".bin", shard.bytes), (".idx", shard.index_bytes)):
                with open(root / f"{shard.name}{suffix}", "wb") as file:
                    file.truncate(size)


def write_versions(root: Path, url: str, options: dict[str, Any]) -> None:
    """The ETags of shards into the manifests of a folder that a server has at `url`."""
    from streammega import StorageConfig
    from streammega.dataset.manifest import read_manifest
    from streammega.dataset.opening import place_of

    for path in root.glob("*.manifest.json"):
        manifest = read_manifest(str(path), StorageConfig())
        shards = [
            shard._replace(
                etag=etag((root / f"{shard.name}.bin").stat()),
                index_etag=etag((root / f"{shard.name}.idx").stat()),
            )
            for shard in manifest.shards
        ]
        seen_at = place_of(f"{url}/{path.name}", StorageConfig(storage_options=options))
        path.write_bytes(replace(manifest, shards=shards, seen_at=seen_at).to_json())


def config_of(case: Case, batches: int, storage: Any) -> Any:
    """The data of a case, which ends after so many micro-batches of each rank."""
    from streammega import DataConfig

    return DataConfig(
        blend=[("s3://data/web", 0.7), ("s3://data/code", 0.3)],
        sequence_length=LENGTH,
        order="stream",
        shuffle_lanes=LANES,
        shuffle_block_bytes=BLOCK_BYTES,
        num_samples=(batches * MICRO_BATCH * case.ranks, 0, 0),
        storage=storage,
    )


def loader_of(case: Case, rank: int, config: Any) -> Any:
    """The loader of a rank."""
    from streammega import StreamLoader

    return StreamLoader(
        config,
        micro_batch_size=MICRO_BATCH,
        global_batch_size=MICRO_BATCH * case.ranks,
        dp_rank=rank,
        dp_size=case.ranks,
    )


def read_at_once(options: dict[str, Any], results: Any) -> None:
    """Read without a pace, for the processor's time of a request."""
    from streammega import StorageConfig

    config = config_of(CASES[0], 2000, StorageConfig(storage_options=options))
    for _ in range(2):  # the first time modules are imported
        busy_before = sum(os.times()[:2])
        with loader_of(CASES[0], 0, config) as loader:
            for _ in loader:
                pass
            requests = loader.stats()["requests"]
        results.put(((sum(os.times()[:2]) - busy_before), requests))


def request_seconds(server: Running) -> tuple[float, float]:
    """Seconds of a processor that a request takes a rank, and the server."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=read_at_once, args=(server.storage_options, results))
    process.start()
    results.get(timeout=100)
    before = server_seconds(server)
    busy, requests = results.get(timeout=100)
    process.join()
    return busy / requests, (server_seconds(server) - before) / requests


def read(
    case: Case,
    rank: int,
    batches: int,
    options: dict[str, Any],
    barrier: Any,
    results: Any,
) -> None:
    """One rank, in a process of its own."""
    from streammega import StorageConfig

    storage = StorageConfig(storage_options=options).tuned(max_in_flight_bytes=case.in_flight)
    # At once: the server is not shaped yet.
    warm_config = config_of(case, 4, StorageConfig(storage_options=options))
    with loader_of(case, rank, warm_config) as warm:
        for _ in warm:
            pass
    barrier.wait()
    barrier.wait()  # until the server is shaped
    time.sleep(rank * START_SECONDS)
    busy_before = sum(os.times()[:2])
    began = time.perf_counter()
    with loader_of(case, rank, config_of(case, batches, storage)) as loader:
        opened = time.perf_counter()
        marks = []
        waited = 0.0
        first = 0.0
        due = 0.0
        iterator = iter(loader)
        while True:
            asked = time.perf_counter()
            if next(iterator, None) is None:
                break
            now = time.perf_counter()
            first = first or now - opened
            waited += now - asked if due else 0.0
            stats = loader.stats()
            marks.append((now - opened, stats["requests"], stats["fetched_bytes"]))
            # what a sleep was too long is made up for, and what was waited for is not
            due = max(due, now - CATCH_UP) + case.step if due else now + case.step
            time.sleep(max(0.0, due - time.perf_counter()))
        ended = time.perf_counter() - opened
        marks.append((ended, stats["requests"], stats["fetched_bytes"]))
        held = stats["most_held_bytes"]
    busy = sum(os.times()[:2]) - busy_before
    results.put((rank, opened - began, first, waited / ended, marks, held, busy))


def measure(case: Case, server: Running, batches: int) -> dict[str, float]:
    """Run the ranks of a case."""
    server.behave()
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(case.ranks + 1)
    results = context.Queue()
    options = server.storage_options
    arguments = [(case, rank, batches, options, barrier, results) for rank in range(case.ranks)]
    processes = [context.Process(target=read, args=words) for words in arguments]
    for process in processes:
        process.start()
    barrier.wait()
    server.behave(
        latency=case.latency,
        latency_of_all=True,
        bandwidth=case.bandwidth,
        link=case.link,
        rate=case.rate,
        burst=max(1, int(case.rate / 10)),
    )
    before = server_seconds(server)
    counts = server.counts()
    began = time.perf_counter()
    barrier.wait()
    ranks = [results.get(timeout=300) for _ in processes]
    wall = time.perf_counter() - began
    answered = sum(server.counts()[name] - counts[name] for name in ("requests", "lists"))
    busy = sum(rank[-1] for rank in ranks) + server_seconds(server) - before
    for process in processes:
        process.join()
    first = [rates(marks, 0.0, FIRST_SECONDS) for *_, marks, _, _ in ranks]
    later = [rates(marks, marks[len(marks) // 2][0], marks[-1][0]) for *_, marks, _, _ in ranks]
    return {
        "first batch, s": max(rank[1] + rank[2] for rank in ranks),
        "waits": max(rank[3] for rank in ranks),
        "requests/s at first": sum(rate[0] for rate in first),
        "requests/s later": sum(rate[0] for rate in later),
        "MB/s later": sum(rate[1] for rate in later) / 1e6,
        "requests": answered,
        "MB": sum(rank[4][-1][2] for rank in ranks) / 1e6,
        "memory of a rank, MB": max(rank[5] for rank in ranks) / 1e6,
        "busy": busy / (wall * (os.cpu_count() or 1)),
    }


def server_seconds(server: Running) -> float:
    """Seconds of a core that the server has used."""
    fields = Path(f"/proc/{server.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rates(marks: Any, begin: float, end: float) -> tuple[float, float]:
    """Requests and bytes a second between two times. marks: (time, requests, bytes) so far."""
    times, requests, nbytes = np.array(marks).T
    bounds = [begin, end]
    counted, fetched = np.interp(bounds, times, requests), np.interp(bounds, times, nbytes)
    if begin == 0:  # nothing was sent before the opening ended
        counted[0] = fetched[0] = 0
    seconds = end - begin
    return float(counted[1] - counted[0]) / seconds, float(fetched[1] - fetched[0]) / seconds


def simulate(
    case: Case, root: Path, batches: int, rank_busy: float, server_busy: float
) -> dict[str, float]:
    """The same figures, simulated. rank_busy, server_busy: seconds of a processor for a request."""
    from streammega import StorageConfig
    from streammega.apps.simulated_reads import simulate_reads

    datasets = {
        f"s3://data/{name}": (root / f"{name}.manifest.json").read_bytes() for name in SHARD_TOKENS
    }
    reads = simulate_reads(
        datasets,
        config_of(case, batches, StorageConfig().tuned(max_in_flight_bytes=case.in_flight)),
        latency=case.latency,
        connection_rate=case.bandwidth or PLENTY,
        rank_rate=case.link / case.ranks or PLENTY,
        request_rate=case.rate / case.ranks or PLENTY,
        micro_batch_size=MICRO_BATCH,
        global_batch_size=MICRO_BATCH * case.ranks,
        dp_size=case.ranks,
        dp_ranks=range(case.ranks),
        num_batches=batches,
        batch_seconds=case.step,
        request_seconds=max(rank_busy, (rank_busy + server_busy) / (os.cpu_count() or 1)),
    )
    ranks = reads.ranks

    def rate(begin: float, end: float) -> Any:
        counted = np.zeros(2)
        for rank in ranks:
            is_within = (rank.sent >= begin) & (rank.sent < end)
            counted += is_within.sum(), rank.nbytes[is_within].sum()
        return counted / (end - begin)

    end = float(ranks[0].step_end[-1])
    later = rate(end / 2, end)
    opening = reads.opening.seconds
    if case.rate:
        opening = max(opening, case.ranks * float(reads.opening.requests.sum()) / case.rate)
    return {
        "first batch, s": opening + max(rank.first_batch for rank in ranks),
        "waits": max(float(rank.waited[1:].sum() / rank.step_end[-1]) for rank in ranks),
        "requests/s at first": rate(0.0, FIRST_SECONDS)[0],
        "requests/s later": later[0],
        "MB/s later": later[1] / 1e6,
        "requests": sum(len(rank.sent) for rank in ranks)
        + case.ranks * int(reads.opening.requests.sum()),
        "MB": sum(int(rank.nbytes.sum()) for rank in ranks) / 1e6,
        "memory of a rank, MB": max(rank.memory_bytes for rank in ranks) / 1e6,
    }


def main() -> int:
    options = harness.parser(__doc__)
    options.add_argument("--seconds", type=float, default=40.0, help="of each run (%(default)s)")
    options.add_argument("--cases", type=int, nargs="+", help="numbers of cases, from 0")
    chosen = options.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="streammega-simulate-"))
    try:
        write_data(folder / "objects" / "data", SHARD_TOKENS, SHARDS)
        print(f"{harness.machine()}; each cell: measured, simulated, their ratio\n")
        cases = [CASES[number] for number in chosen.cases or range(len(CASES))]
        with running(folder / "objects") as server:
            write_versions(folder / "objects" / "data", "s3://data", server.storage_options)
            busy = request_seconds(server)
            print(
                f"a request takes a rank {busy[0] * 1e3:.2f} ms of a processor, the server {busy[1] * 1e3:.2f}\n"
            )
            for number, case in enumerate(cases):
                batches = int(chosen.seconds / case.step)
                measured = measure(case, server, batches)
                simulated = simulate(case, folder / "objects" / "data", batches, *busy)
                if not number:
                    harness.table("run", *simulated, "cores busy")
                print_row(case.title, measured, simulated)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


def print_row(title: str, measured: dict[str, float], simulated: dict[str, float]) -> None:
    cells = []
    for name, forecast in simulated.items():
        real = measured[name]
        ratio = f" ({forecast / real:.2f})" if real > NOTHING else ""
        cells.append(f"{real:.3g}, {forecast:.3g}{ratio}")
    harness.row(title, *cells, f"{measured['busy']:.0%}")


if __name__ == "__main__":
    sys.exit(main())
