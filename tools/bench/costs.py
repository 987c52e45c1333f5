#!/usr/bin/env python3
"""What a token costs the host, and where: the CPU seconds of each kind of thread while the stream
order is read from a local object server, and those of obstore alone.

    .venv/bin/python tools/bench/costs.py                # --modes, --runs and --seconds choose

obstore alone reads random ranges as long as the loader's requests are on average, as many at once
as the loader had in flight, several by one call as the loader does, and drops their bytes. Every
side runs in a process of its own, in turns; the server (tools/bench/object_server.py) and both run
on the same cores. Files are those of runner.py.

    .venv/bin/python tools/bench/costs.py --floors       # what no loader can do without

shows instead how far the loader is from the minimum: obstore alone; and obstore that keeps as many
bytes as the loader, for a shuffle holds what it mixes, and makes of every body, when it is dropped,
what a batch is handed out as: ids, or int64 tokens and labels, a float32 mask and int64 positions,
by kernels without the interpreter's lock, into memory that is used again. The last has no order, no
batches and no queue between threads.

A token costs 2 stored bytes. "Switches" are those of a thread that waits for something: for bytes,
for a lock or for the interpreter. Figures are medians of the runs.
"""

from __future__ import annotations

import os
import statistics
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tools.bench import harness, sides
from tools.bench.runner import FOLDER, PACKAGES, S, serving

Result = dict[str, Any]
STORED_BYTES = 2
"""Bytes of a token: the corpus is uint16."""
ROWS = 16
"""Samples of a micro-batch."""
WARM_UP = 3000
"""Micro-batches before the clock starts: the lanes are open, the limits found."""
TICKS = os.sysconf("SC_CLK_TCK")
JOB = 8
"""Ranges that obstore alone is asked for by one call, as the loader's threads do."""
KINDS = {
    "streammega-read": "threads that wait for requests",
    "streammega-batch": "planning and gathering",
    "MainThread": "handing out",
    "tokio": "the transport's own threads",
}


class Spent(NamedTuple):
    """What a thread spent: CPU seconds, and how often it waited."""

    cpu: float
    switches: int


NOTHING = Spent(0.0, 0)
Threads = dict[int, tuple[str, Spent]]


def of_threads() -> Threads:
    """(name, what it spent) of each thread of this process, by its native id."""
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    spent = {}
    for folder in Path("/proc/self/task").iterdir():
        number = int(folder.name)
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            status = (folder / "status").read_text()
            comm = (folder / "comm").read_text().strip()
        except OSError:  # it has ended
            continue
        switches = int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])
        cpu = (int(fields[11]) + int(fields[12])) / TICKS  # out of the kernel and in it
        spent[number] = (names.get(number) or comm, Spent(cpu, switches))
    return spent


def by_kind(before: Threads, after: Threads) -> dict[str, Spent]:
    """What threads spent in between, added up by kind."""
    kinds: dict[str, Spent] = defaultdict(lambda: NOTHING)
    for number, (name, now) in after.items():
        _, then = before.get(number, (name, NOTHING))
        kind = next((label for begin, label in KINDS.items() if name.startswith(begin)), "others")
        total = kinds[kind]
        kinds[kind] = Spent(
            total.cpu + now.cpu - then.cpu, total.switches + now.switches - then.switches
        )
    return dict(kinds)


# --- sides, each in a process of its own ---


def loader(endpoint: str, mode: str, seconds: float) -> Result:
    """StreamLoader in its steady state."""
    import streammega as sm

    where = {"endpoint": endpoint, "prefix": "s3://data/web", "index_cache": str(FOLDER / "idx")}
    config = sides.config_of({**where, "num_samples": 520_000})
    # what --floors makes
    config = replace(config, fields=["tokens", "labels", "loss_mask", "position_ids"])
    with sm.StreamLoader(
        config, micro_batch_size=ROWS, global_batch_size=256, ids_only=mode == "ids"
    ) as batches:
        source = iter(batches)
        for _ in range(WARM_UP):
            next(source)
        stats = batches.stats()
        before = of_threads()
        in_flight = []
        held = []
        taken = 0
        began = time.perf_counter()
        for _ in source:
            taken += 1
            if taken % 64 == 0:
                stats_now = batches.stats()
                in_flight.append(stats_now["requests_in_flight"])
                held.append(stats_now["held_bytes"])
                if time.perf_counter() - began > seconds:
                    break
        wall = time.perf_counter() - began
        kinds = by_kind(before, of_threads())
        now = batches.stats()
    requests = now["requests"] - stats["requests"]
    fetched = now["fetched_bytes"] - stats["fetched_bytes"]
    return {
        "tokens": taken * ROWS * S,
        "bytes": taken * ROWS * S * STORED_BYTES,
        "wall": wall,
        "requests": requests,
        "size": fetched / max(1, requests),
        "at_once": statistics.median(in_flight),
        "held": statistics.median(held),
        "kinds": kinds,
    }


class HandingOut:
    """Makes of bodies what batches are handed out as, and nothing else: no order, no batches.

    mode: "ids" or "int64". Each thread has one of its own.
    """

    def __init__(self, mode: str, size: int) -> None:
        self._rows = size // STORED_BYTES // S
        width = S + 1 if mode == "int64" else S
        self._ids = np.empty((self._rows, width), np.uint16)
        shape = (self._rows, S)
        self._fields = [np.empty(shape, np.int64), np.empty(shape, np.int64)]
        self._mask = np.empty(shape, np.float32)
        self._positions = np.empty(shape, np.int64)
        self._mode = mode

    def make(self, bodies: list[Any]) -> None:
        """Make the whole samples of each body."""
        for body in bodies:
            tokens = np.frombuffer(body, np.uint8)
            address = np.array([tokens.ctypes.data], np.int64)
            if address[0] % STORED_BYTES:
                address = np.array([tokens.copy().ctypes.data], np.int64)
            self._make(address)

    def _make(self, address: np.ndarray[Any, Any]) -> None:
        from streammega.kernels.plan import gather_rows

        rows, width = self._ids.shape
        zeros = np.zeros(rows, np.int64)
        size = np.full(rows, width)
        size[-1] = S  # the token after the last belongs to another body
        gather_rows(
            np.empty(0, np.uint16), 0, zeros[:1], address, zeros,
            np.arange(rows) * S * STORED_BYTES, size, zeros, zeros, np.arange(rows + 1), self._ids,
            np.empty(rows, np.int64),
        )  # fmt: skip
        if self._mode == "int64":
            tokens, labels = self._fields
            tokens[:] = self._ids[:, :-1]
            labels[:] = self._ids[:, 1:]
            self._mask.fill(1)
            self._positions[:] = np.arange(S)


def transport(
    endpoint: str, size: int, at_once: int, count: int, held: int = 0, handed_out: str = ""
) -> Result:
    """obstore alone, which keeps the latest `held` bytes alive.

    handed_out: "ids" or "int64": what is made of the bytes when they are dropped.
    """
    import obstore
    from obstore.store import S3Store

    config: Any = {"endpoint": endpoint, "region": "us-east-1", "allow_http": "true"}
    store = S3Store("data", config=config, skip_signature=True)
    total = int(obstore.head(store, "web.bin")["size"])
    kept: deque[Any] = deque()
    most_kept = held // size // JOB
    starts = np.random.default_rng(0).integers(0, total - size, count + most_kept * JOB).tolist()
    jobs = [starts[first : first + JOB] for first in range(0, len(starts), JOB)]

    def fetch() -> None:
        job = jobs.pop()
        ends = [start + size for start in job]
        kept.append(obstore.get_ranges(store, "web.bin", starts=job, ends=ends, coalesce=0))

    def read() -> None:
        makes = HandingOut(handed_out, size) if handed_out else None
        while True:
            try:
                fetch()
            except IndexError:
                return
            dropped = kept.popleft()
            if makes is not None:
                makes.make(dropped)
            del dropped

    # before the clock starts: what is held, and kernels are compiled or loaded
    for _ in range(most_kept):
        fetch()
    if handed_out:
        HandingOut(handed_out, size).make([bytes(size)])

    before = of_threads()
    spent = os.times()
    began = time.perf_counter()
    threads = [threading.Thread(target=read) for _ in range(max(1, at_once // JOB))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wall = time.perf_counter() - began
    now = os.times()
    kinds = by_kind(before, of_threads())
    # The threads that waited have ended: theirs is the rest.
    gone = now.user + now.system - spent.user - spent.system
    gone -= sum(kind.cpu for kind in kinds.values())
    kinds[KINDS["streammega-read"]] = Spent(gone, 0)
    return {
        "tokens": count * size // STORED_BYTES,
        "bytes": count * size,
        "wall": wall,
        "requests": count,
        "kinds": kinds,
    }


def measured(function: Callable[..., Result], **arguments: Any) -> Result:
    """What a side gives in a process of its own. Raises SystemExit, with what it said, if it failed."""
    result = harness.in_process(function, **arguments)
    result["kinds"] = {kind: Spent(*spent) for kind, spent in result["kinds"].items()}
    return result


def cpu(result: Result) -> float:
    """CPU seconds per 10^9 tokens."""
    spent = sum(kind.cpu for kind in result["kinds"].values())
    return float(spent / result["tokens"] * 1e9)


def rate(result: Result) -> float:
    """MB/s of stored tokens."""
    return float(result["bytes"] / result["wall"] / 1e6)


def print_costs(mode: str, runs: list[Result], alone: list[Result]) -> None:
    """One line for each kind of thread, and one for all of them."""

    def seconds_of(results: list[Result], kind: str) -> Any:
        """CPU seconds per 10^9 tokens."""
        return statistics.median(
            result["kinds"].get(kind, NOTHING).cpu / result["tokens"] * 1e9 for result in results
        )

    tokens_of_request = statistics.median(run["tokens"] / run["requests"] for run in runs)
    for kind in sorted(KINDS.values()):
        seconds = seconds_of(runs, kind)
        theirs = seconds_of(alone, kind)
        switches = statistics.median(
            run["kinds"].get(kind, NOTHING).switches / run["requests"] for run in runs
        )
        harness.row(
            f"{mode}: {kind}",
            f"{seconds:.2f}",
            f"{1e3 * seconds / STORED_BYTES:.0f}",
            f"{seconds / 1e9 * tokens_of_request * 1e6:.0f}",
            f"{switches:.2f}",
            f"{theirs:.2f}" if theirs else "",
        )
    our_cpu, their_cpu = (statistics.median(map(cpu, side)) for side in (runs, alone))
    ours, theirs = (statistics.median(map(rate, side)) for side in (runs, alone))
    harness.row(
        f"{mode}: all, {ours:.0f} MB/s; obstore alone {theirs:.0f} MB/s: {100 * ours / theirs:.0f} %",
        f"{our_cpu:.2f}",
        f"{1e3 * our_cpu / STORED_BYTES:.0f}",
        "",
        "",
        f"{their_cpu:.2f}",
    )


def measure(
    endpoint: str, mode: str, runs: int, seconds: float
) -> tuple[list[Result], list[Result]]:
    """What the loader and obstore alone give, in turns.

    Raises SystemExit when a side fails, which has said why.
    """
    ours = []
    alone = []
    for _ in range(runs):
        of_loader = measured(loader, endpoint=endpoint, mode=mode, seconds=seconds)
        size = int(of_loader["size"])
        of_transport = measured(
            transport,
            endpoint=endpoint,
            size=size,
            at_once=int(of_loader["at_once"]),
            count=int(of_loader["bytes"] // size) // JOB * JOB,
        )
        ours.append(of_loader)
        alone.append(of_transport)
    return ours, alone


def floors(endpoint: str, mode: str, runs: int, seconds: float) -> None:
    """One line for each thing that a loader cannot do without, and one for the loader."""
    first = measured(loader, endpoint=endpoint, mode=mode, seconds=seconds)
    size = int(first["size"])
    alike: dict[str, Any] = {
        "endpoint": endpoint,
        "size": size,
        "at_once": int(first["at_once"]),
        "count": int(first["bytes"] // size) // JOB * JOB,
    }
    held = int(first["held"])
    floor = {
        "obstore alone": partial(measured, transport, **alike),
        "obstore, as much held and handed out": partial(
            measured, transport, held=held, handed_out=mode, **alike
        ),
        "the loader": partial(measured, loader, endpoint=endpoint, mode=mode, seconds=seconds),
    }
    by_name = harness.in_turns(runs, floor)
    rates = {name: statistics.median(map(rate, results)) for name, results in by_name.items()}
    for name, results in by_name.items():
        harness.row(
            f"{mode}: {name}",
            f"{statistics.median(map(cpu, results)):.2f}",
            f"{rates[name]:.0f}",
            f"{100 * rates[name] / rates['obstore alone']:.0f} %",
        )


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--modes", nargs="*", choices=["ids", "int64"], default=["ids", "int64"])
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--floors", action="store_true", help="what no loader can do without")
    chosen = parser.parse_args()
    harness.print_head(PACKAGES[:3], chosen.runs)
    cost = "CPU s per 10^9 tokens"
    if chosen.floors:
        harness.table("what", cost, "MB/s", "share of obstore alone")
    else:
        columns = ("us per MB", "us per request", "switches per request", f"obstore alone, {cost}")
        harness.table("stream order, default blocks", cost, *columns)
    with serving() as bench:
        for mode in chosen.modes:
            options = (bench.server.endpoint, mode, chosen.runs, chosen.seconds)
            if chosen.floors:
                floors(*options)
            else:
                print_costs(mode, *measure(*options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
