"""Hours of reading at a low rate, with outages of two minutes: memory, threads, descriptors and speed stay.

    python tools/soak_long.py [--hours 1] [--again]

A loop takes batches from an S3 server on this machine, compares each with the same batch of the local
files, and now and then opens its loader again from its state. Each minute prints a line. It goes on where
it was ended, by soak-long-run/progress.json; `--again` forgets that.

Host names that fail and full disks need user namespaces (`unshare -rm`), and are left out without them.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import resource
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from streammega import DataConfig, StorageConfig, StreamLoader  # noqa: E402
from tests.support.builders import write_dataset  # noqa: E402
from tests.support.outages import NEED_NAMESPACE, Outages, in_namespace  # noqa: E402
from tools.bench.object_server import start  # noqa: E402

FOLDER = ROOT / "soak-long-run"
MiB = 1 << 20
TOKENS = 24 * MiB
"""Tokens of two bytes: twice what the page cache may take."""
BATCHES_A_SECOND = 20
BURST_BATCHES = 60
"""Batches that are taken at once, three times a minute, for the speed."""
MINUTE = 60.0
"""Seconds."""
OUTAGE_MINUTES = 2
FIRST_OUTAGE_MINUTE = 11
MINUTES_BETWEEN = 5
CLEAR_MINUTES = 10
"""Minutes without outages at the beginning and at the end, which are compared."""
REOPENED_EVERY = 7
"""Minutes after which the loader is opened again from its state."""
MOST_MORE_MEMORY = 16.0
"""MiB of memory that the last minutes may have more than the first. So much the allocator keeps or returns."""
MOST_MORE_THREADS = 2
MOST_MORE_DESCRIPTORS = 8
MOST_CPU = 1.25
"""Times the processor time of a batch in the first minutes."""
LEAST_SPEED = 0.75
"""Times the fastest burst of the first minutes. Other work on the machine disturbs it."""


class Warnings(logging.Handler):
    """Counts what the library says, and keeps the last line."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.count = 0
        self.last = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Count a line on waiting."""
        if "storage requests have failed" in record.msg:
            self.count += 1
            self.last = record.getMessage()


class Soak:
    """The loop, what it measures, and what it keeps."""

    def __init__(
        self, outages: Outages, config: DataConfig, local: DataConfig, minutes: int
    ) -> None:
        self.outages = outages
        self.config = config
        self.local = local
        self.minutes = minutes
        self.progress_file = FOLDER / "progress.json"
        self.progress: dict[str, Any] = {"state": None, "rows": [], "batches": 0}
        if self.progress_file.exists():
            self.progress = json.loads(self.progress_file.read_text())
        self.rows: list[dict[str, Any]] = self.progress["rows"]
        self.stretch = 1 + max((row["process"] for row in self.rows), default=0)
        self.warnings = Warnings()
        logging.getLogger("streammega").addHandler(self.warnings)
        self.batches = 0
        self.speed = 0.0
        self.over = threading.Event()
        self.failed: BaseException | None = None

    def run(self) -> None:
        """Take batches in this thread, and measure in another one, until the time is over."""
        measuring = threading.Thread(target=self._measure)
        measuring.start()
        try:
            self._take_batches()
        finally:
            self.over.set()
            measuring.join()
        if self.failed is not None:
            raise self.failed

    def _take_batches(self) -> None:
        state = self.progress["state"]
        while not self.over.is_set():
            until = time.monotonic() + MINUTE * REOPENED_EVERY
            with opened(self.config, state) as loader, opened(self.local, state) as local:
                pairs = zip(loader, local, strict=True)
                while time.monotonic() < until and not self.over.is_set():
                    began = time.monotonic()
                    self._take(pairs, BURST_BATCHES)
                    self.speed = max(self.speed, BURST_BATCHES / (time.monotonic() - began))
                    while time.monotonic() < began + MINUTE / 3 and not self.over.is_set():
                        self._take(pairs, 1)
                        time.sleep(1 / BATCHES_A_SECOND)
                    state = self.progress["state"] = loader.state_dict()

    def _take(self, pairs: Iterator[tuple[dict[str, Any], dict[str, Any]]], count: int) -> None:
        for _ in range(count):
            got, expected = next(pairs)
            if not torch.equal(got["tokens"], expected["tokens"]):
                raise AssertionError("a batch differs from that of the local files")
            self.batches += 1

    def _measure(self) -> None:
        try:
            while len(self.rows) < self.minutes and not self.over.is_set():
                self._measure_minute(len(self.rows))
        except BaseException as error:
            self.failed = error
        finally:
            self.over.set()

    def _measure_minute(self, minute: int) -> None:
        place, part = divmod(minute - FIRST_OUTAGE_MINUTE, MINUTES_BETWEEN)
        kind = ""
        if part < OUTAGE_MINUTES and FIRST_OUTAGE_MINUTE <= minute < self.minutes - CLEAR_MINUTES:
            kind = self.outages.kinds[place % len(self.outages.kinds)]
        is_first, is_last = part == 0, part == OUTAGE_MINUTES - 1
        batches, warned, used = self.batches, self.warnings.count, processor_seconds()
        self.speed = 0.0
        if kind and is_first:
            self.outages.begin(kind)
        began = time.monotonic()
        self.over.wait(MINUTE)
        if kind and (is_last or self.over.is_set()):
            self.outages.end(kind)
        if time.monotonic() - began < MINUTE:
            return  # the run ends
        taken = self.batches - batches
        self.progress["batches"] += taken
        gc.collect()  # sessions of expired credentials refer to themselves, and have connections
        status = Path("/proc/self/status").read_text()
        row = {
            "minute": minute,
            "process": self.stretch,
            "memory": int(status.partition("RssAnon:")[2].split()[0]) / 1024,
            "threads": threads_of(status),
            "descriptors": len(os.listdir("/proc/self/fd")),
            "batches": taken / MINUTE,
            "burst": self.speed,
            "cpu": (processor_seconds() - used) / max(1, taken) * 1000,
            "outage": kind,
            "warnings": self.warnings.count - warned,
            "said": self.warnings.last if self.warnings.count > warned else "",
        }
        self.rows.append(row)
        print(line_of(row), flush=True)
        text = json.dumps(self.progress, indent=1)
        temporary = self.progress_file.with_suffix(".new")
        temporary.write_text(text)
        temporary.replace(self.progress_file)


def opened(config: DataConfig, state: Any) -> StreamLoader:
    """A loader that goes on from a state."""
    loader = StreamLoader(config, micro_batch_size=8, global_batch_size=8)
    if state is not None:
        loader.load_state_dict(state)
    return loader


def processor_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def threads_of(status: str) -> int:
    return int(status.partition("Threads:")[2].split()[0])


def line_of(row: dict[str, Any]) -> str:
    return (
        f"{row['minute']:6} {row['memory']:10.1f} {row['threads']:8} {row['descriptors']:12} {row['batches']:10.1f} "
        f"{row['burst']:10.0f} {row['cpu']:8.2f}  {row['outage']} {row['said'][:75]}".rstrip()
    )


def complaints(rows: list[dict[str, Any]]) -> list[str]:
    """What grew or became slower, of minutes without outages; nothing where all is well."""
    found = []
    for process in sorted({row["process"] for row in rows}):
        stretch = [row for row in rows if row["process"] == process and not row["outage"]]
        if len(stretch) < 2 * CLEAR_MINUTES:
            continue  # too short to see anything grow
        first, last = stretch[1 : CLEAR_MINUTES + 1], stretch[-CLEAR_MINUTES:]
        # A loader keeps as many threads as requests were ever in flight: only the fewest say
        # whether threads of earlier loaders are left.
        for name, most, measure in (
            ("memory", MOST_MORE_MEMORY, statistics.median),
            ("threads", MOST_MORE_THREADS, min),
            ("descriptors", MOST_MORE_DESCRIPTORS, statistics.median),
        ):
            before, after = (float(measure(row[name] for row in part)) for part in (first, last))
            print(f"{name}: {before:.1f} in the first minutes, {after:.1f} in the last ones")
            if after > before + most:
                found.append(f"{name} grew from {before:.1f} to {after:.1f}")
    clear = [row for row in rows if not row["outage"]]
    first, last = clear[:CLEAR_MINUTES], clear[-CLEAR_MINUTES:]
    cpu = [statistics.median(row["cpu"] for row in part) for part in (first, last)]
    speed = [max(row["burst"] for row in part) for part in (first, last)]
    print(
        f"ms of a processor a batch: {cpu[0]:.2f} and {cpu[1]:.2f}; fastest burst: {speed[0]:.0f} and {speed[1]:.0f}"
    )
    if cpu[1] > MOST_CPU * cpu[0]:
        found.append(f"a batch took {cpu[0]:.2f} ms of a processor, and {cpu[1]:.2f} in the end")
    if speed[1] < LEAST_SPEED * speed[0]:
        found.append(
            f"the fastest burst was {speed[0]:.0f} batches/s, and {speed[1]:.0f} in the end"
        )
    return found


def main() -> int:
    """Run in a namespace where there is one."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--in-namespace", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    hosts = FOLDER / "hosts"
    cache = FOLDER / "cache"
    if not arguments.in_namespace:
        if arguments.again:
            shutil.rmtree(FOLDER, ignore_errors=True)
        cache.mkdir(parents=True, exist_ok=True)
        command = in_namespace(
            hosts, cache, [sys.executable, __file__, *sys.argv[1:], "--in-namespace"]
        )
        if command:
            os.execvp(command[0], command)
        print(f"no user namespaces: without {', '.join(NEED_NAMESPACE)}")
    return soak(hosts if arguments.in_namespace else None, cache, round(arguments.hours * 60))


def soak(hosts: Path | None, cache: Path, minutes: int) -> int:
    """Returns the exit status."""
    data = FOLDER / "bucket" / "web"
    if not data.with_suffix(".idx").exists():
        rng = np.random.default_rng(5)
        documents = (rng.integers(0, 60_000, 4096).astype(np.uint16) for _ in range(TOKENS // 4096))
        write_dataset(data, documents)
    server = start(FOLDER)
    outages = Outages(server, hosts, cache)
    storage = StorageConfig(
        storage_options=outages.storage_options(),
        cache_dir=cache,
        cache_max_bytes=24 * MiB,
        memory_bytes=16 * MiB,
        max_concurrent_requests=16,
    ).tuned(cache_chunk_bytes=MiB, max_request_bytes=256 << 10)

    def config_of(prefix: str, storage: StorageConfig) -> DataConfig:
        return DataConfig(
            blend=[prefix],
            sequence_length=1024,
            shuffle_lanes=8,
            shuffle_block_bytes=64 << 10,
            storage=storage,
        )

    run = Soak(
        outages,
        config_of("s3://bucket/web", storage),
        config_of(str(data), StorageConfig()),
        minutes,
    )
    print(
        "minute  memory MiB  threads  descriptors  batches/s  burst b/s  ms CPU  outage, and what was said"
    )
    for row in run.rows:
        print(line_of(row))
    try:
        run.run()
    finally:
        outages.server.process.kill()
        outages.server.process.wait()
    print(f"{run.progress['batches']:,} batches, each that of the local files")
    found = complaints(run.rows)
    print("\n".join(found) or "nothing grew, and nothing became slower")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
