#!/usr/bin/env python3
"""The table of docs/benchmarks.md: what the library is measured by, both sides by one command.

    make bench-peers        # once: .venv-bench, with the other loaders
    make bench              # the table; --figures names some: stalls takes ten minutes

Sides take turns, `--runs` times each, every one in a process of its own; a ratio is that of the
medians. Every loader reads the same tokens, 1 GiB in its own format, from the server of
tools/bench/object_server.py, on the same cores as everything else: "loopback" is as fast as that
goes, "20 ms" sends the first byte so late and 90 MB/s per connection. Files are those of the benches
that a figure is taken from: runner.py, costs.py, opening.py, convert.py, orders.py.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tools.bench import convert, corpus, costs, harness, opening, orders, runner
from tools.bench.object_server import running
from tools.bench.runner import LOCAL, SHAPES, WHOLE_EPOCH, WIDE, Bench

PEERS = {
    "litdata": "litdata",
    "s3torch": "s3torchconnector",
    "mosaic": "mosaicml-streaming",
}
"""Other loaders, by the name of their side."""
WELL_SHUFFLED = "mosaic"
"""The loader that shuffles over everything. The others shuffle within a shard or a buffer."""
WORKERS = (0, 2)
FIELDS = ("ids", "int64")
"""What batches have: ids in the stored dtype, or tokens and labels in int64."""
PEER_SECONDS = 15
"""Most seconds of an epoch of another loader. The slowest would take minutes."""
LONGER_SECONDS = 45
"""Most seconds of a loader that shuffles over everything, with workers. It fetches most of the data
for its first batch, and its rate counts from there.
"""
SECONDS = 4.0
"""Seconds of a measurement in the steady state."""
SAMPLES = 10**7
"""More samples than are read of local files in that time."""
BLEND = (256, 2_000_000)
"""Datasets of the blend that is built, and its samples."""
STALL_WARM_UP = 30
STALL_LINK = 100e6
"""Bytes a second of the link, so few that it and not the CPU is the limit."""
STALL_SHARE = 0.85
"""The consumer takes this share of the link."""
Result = dict[str, Any]


class Chosen(argparse.Namespace):
    """What is measured: runs of each side, and the other loaders."""

    runs: int
    peers: Sequence[str]
    stall_seconds: int


FIGURES = harness.Figures()


def print_row(
    figure: str,
    ours: float,
    theirs: float | None = None,
    *,
    digits: int = 0,
    ratio: Callable[[float, float], str] | None = None,
    goal: str = "",
    memory: str = "",
) -> None:
    """Print a line of the table.

    Args:
        goal: what the ratio, or our figure, should reach.
        memory: the peak memory of the other side and of ours, MB, imports included.
    """
    cells = ["" if value is None else f"{value:,.{digits}f}" for value in (theirs, ours)]
    compared = ratio(ours, theirs) if ratio is not None and theirs is not None else ""
    harness.row(figure, *cells, compared, goal, memory)


def times(ours: float, theirs: float, digits: int = 1) -> str:
    """A ratio."""
    return f"{ours / theirs:.{digits}f}x"


two_digits = partial(times, digits=2)


def share(ours: float, theirs: float) -> str:
    """A ratio of what cannot be passed."""
    return f"{100 * ours / theirs:.0f} %"


def medians_of(measured: Mapping[str, Sequence[Result]], key: str) -> dict[str, float]:
    """The median of one result of each side."""
    by_side = {}
    for side, results in measured.items():
        values = [float(result[key]) for result in results if key in result]
        if values:
            by_side[side] = statistics.median(values)
    return by_side


# --- the stream order and the transport alone -------------------------------------------------


@FIGURES.figure()
def transport(chosen: Chosen) -> None:
    """As many bytes, by requests of the same size, as many in flight."""
    with runner.serving() as bench:
        for mode, goal in (("ids", "85 %"), ("int64", "75 %")):
            sides = costs.measure(bench.server.endpoint, mode, chosen.runs, SECONDS)
            ours, alone = (statistics.median(map(costs.rate, results)) for results in sides)
            title = f"stream order, {mode}, MB/s, vs obstore alone, same requests in flight"
            print_row(title, ours, alone, ratio=share, goal=goal)


# --- whole epochs --------------------------------------------------------------------------------


@FIGURES.figure()
def epochs(chosen: Chosen) -> None:
    """On loopback: whole epochs, peak memory, host CPU, the first batch."""
    measured = epochs_of(chosen, "unshaped")
    print_epochs(measured, "loopback", goal="1.5x")
    print_cpu(medians_of(measured, "cpu"))
    print_first(medians_of(measured, "first"), "loopback")


@FIGURES.figure()
def far_epochs(chosen: Chosen) -> None:
    """With 20 ms: whole epochs, peak memory, the first batch."""
    measured = epochs_of(chosen, "shaped")
    print_epochs(measured, "20 ms", goal="2x")
    print_first(medians_of(measured, "first"), "20 ms")


def epochs_of(chosen: Chosen, shape: str) -> dict[str, list[Result]]:
    """Results of each side: tokens/s with the first batch, CPU seconds per 10^9 tokens, seconds to
    the first batch, peak memory.

    Names of sides: "ours" or another loader, its number of workers, what batches have: ids in the
    stored dtype, or int64, tokens and labels.
    """
    with runner.serving(peers=True) as bench:
        bench.server.behave(**SHAPES[shape])
        sides: dict[str, Callable[[], Result | None]] = {}
        for fields in FIELDS:
            for peer in chosen.peers:
                for workers in WORKERS:
                    side = partial(peer_epoch, bench, peer, workers, fields == "ids")
                    sides[f"{peer} {workers} {fields}"] = side
            sides[f"ours 0 {fields}"] = partial(our_epoch, bench, ids_only=fields == "ids")
        sides["ours 0 int64, 1 MiB blocks"] = partial(our_epoch, bench, data=WIDE)
        for method in runner.OUR_WORKERS:
            side = partial(our_workers, bench, **runner.OUR_WORKERS[method])
            sides[f"ours 2 int64, {method}"] = side
        return harness.in_turns(chosen.runs, sides)


def peer_epoch(bench: Bench, peer: str, workers: int, ids_only: bool) -> Result | None:
    """Another loader; None if it failed."""
    endpoint = bench.server.endpoint
    seconds = LONGER_SECONDS if peer == WELL_SHUFFLED and workers else PEER_SECONDS
    options: Result = {"workers": workers, "seconds": seconds, "ids_only": ids_only}
    result = bench.side(peer, endpoint=endpoint, **options)
    if not result:
        return None
    measured = {"rate": result["tokens"], "first": result["first"], "peak": result["peak"]}
    # The CPU time of workers that run on is unknown.
    return measured if workers else measured | {"cpu": result["cpu"]}


def our_epoch(bench: Bench, **arguments: Any) -> Result | None:
    """StreamLoader."""
    result = bench.ours(**WHOLE_EPOCH, **arguments)
    if not result:
        return None
    figures = {"rate": "whole_rate", "first": "first", "cpu": "whole_cpu", "peak": "peak"}
    return {figure: result[name] for figure, name in figures.items()}


def our_workers(bench: Bench, **options: Any) -> Result | None:
    """A torch DataLoader with two workers."""
    result = bench.side(
        "ours_workers", endpoint=bench.server.endpoint, workers=2, **WHOLE_EPOCH, **options
    )
    if not result:
        return None
    return {"rate": result["tokens"], "cpu": result["cpu"], "peak": result["peak"]}


def rivals_of(by_side: Mapping[str, float], fields: str, workers: str) -> list[str]:
    """Sides of other loaders with these fields and so many workers."""
    return [
        side
        for side in by_side
        if not side.startswith("ours") and side.endswith(f" {workers} {fields}")
    ]


def print_epochs(measured: Mapping[str, Sequence[Result]], where: str, goal: str) -> None:
    """Each of our sides, in M tokens/s, and every other loader that gives the same fields."""
    rates = medians_of(measured, "rate")
    peaks = medians_of(measured, "peak")

    def compare(what: str, side: str, rival: str, goal: str) -> None:
        memory = f"{peaks[rival] / 1e6:,.0f}, {peaks[side] / 1e6:,.0f}"
        title = f"epoch, {where}, {what}, vs {rival}"
        ours, theirs = rates[side] / 1e6, rates[rival] / 1e6
        print_row(
            title.replace(rival, named(rival)),
            ours,
            theirs,
            ratio=two_digits,
            goal=goal,
            memory=memory,
        )

    for fields in FIELDS:
        for rival in (*rivals_of(rates, fields, "0"), *rivals_of(rates, fields, "2")):
            compare(fields, f"ours 0 {fields}", rival, goal)
    for method in runner.OUR_WORKERS:
        for rival in rivals_of(rates, "int64", "2"):
            compare(f"int64, 2 workers {method}", f"ours 2 int64, {method}", rival, "1.0x")
    compare("int64, default blocks", "ours 0 int64", "ours 0 int64, 1 MiB blocks", "0.9x")


def named(side: str) -> str:
    """A side, for people."""
    loader, workers, rest = side.split(" ", 2)
    if loader == "ours":
        return rest.partition(", ")[2]
    return PEERS[loader] if workers == "0" else f"{PEERS[loader]}, {workers} workers"


def print_cpu(seconds: Mapping[str, float]) -> None:
    """Compared with the other loader that takes least."""
    for fields in FIELDS:
        rivals = rivals_of(seconds, fields, "0")
        if rivals:
            rival = min(rivals, key=lambda side: seconds[side])
            title = f"host CPU seconds per 10^9 tokens, {fields}, vs {named(rival)}"
            ours = seconds[f"ours 0 {fields}"]
            print_row(title, ours, seconds[rival], digits=1, ratio=two_digits, goal="0.8x")
    for method in runner.OUR_WORKERS:
        title = f"host CPU seconds per 10^9 tokens, int64, DataLoader with 2 {method} workers"
        print_row(title, seconds[f"ours 2 int64, {method}"], digits=1)


def print_first(seconds: Mapping[str, float], where: str) -> None:
    """Compared with other loaders without workers, which would have to be started."""
    rivals = rivals_of(seconds, "int64", "0")
    if rivals:
        rival = min(rivals, key=lambda side: seconds[side])
        title = f"first batch, {where}, seconds from construction, imports warm, vs {named(rival)}"
        ours, theirs = seconds["ours 0 int64"], seconds[rival]
        goal = "0.2 s and the round trips"
        print_row(title, ours, theirs, digits=2, ratio=two_digits, goal=goal)


# --- the Megatron order, and what other modes cost -----------------------------------------------


def megatron_side(bench: Bench, scheme: str) -> Result | None:
    """megatron-core's reader of a scheme, in its steady state."""
    return (
        bench.side("megatron", prefix=f"{scheme}://data/web", num_samples=500_000, seconds=SECONDS)
        or None
    )


def our_megatron_order(bench: Bench) -> Result | None:
    return bench.ours(order="megatron", seconds=SECONDS, warmup=100) or None


@FIGURES.figure()
def megatron(chosen: Chosen) -> None:
    """Cold, no cache, compared with megatron-core's faster reader of object storage."""
    with runner.serving() as bench:
        sides = {
            "theirs": partial(megatron_side, bench, "msc"),
            "ours": partial(our_megatron_order, bench),
        }
        measured = harness.in_turns(chosen.runs, sides)
    rates = medians_of(measured, "rate")
    reader = "megatron-core's multi-storage-client reader"
    title = f"Megatron order, loopback, samples/s, vs {reader}"
    print_row(title, rates["ours"], rates.get("theirs"), ratio=times, goal="20x")
    fetched = statistics.median(result["stats"]["amplification"] for result in measured["ours"])
    print_row("bytes fetched for each byte used", fetched, digits=2, goal="1.15")
    title = "host CPU seconds per 10^9 tokens, int64, Megatron order from the server"
    print_row(title, medians_of(measured, "cpu")["ours"], digits=1)


@FIGURES.figure()
def local_files(chosen: Chosen) -> None:
    """Local files against megatron-core's GPTDataset under a DataLoader at its best worker count,
    and what they cost.
    """
    with runner.serving() as bench:

        def theirs(workers: int) -> Result | None:
            options: Result = {"prefix": LOCAL, "num_samples": 500_000, "seconds": SECONDS}
            return bench.side("megatron_loader", workers=workers, **options) or None

        tried = {workers: (theirs(workers) or {}).get("tokens", 0.0) for workers in (0, 1, 2)}
        best = max(tried, key=lambda workers: tried[workers])
        sides: dict[str, Callable[[], Result | None]] = {"theirs": partial(theirs, best)}
        for order in ("megatron", "stream"):
            sides[order] = partial(our_local, bench, order, 1000, num_samples=SAMPLES)
        measured = harness.in_turns(chosen.runs, sides)
    rates = medians_of(measured, "tokens")
    seconds = medians_of(measured, "cpu")
    for order in ("megatron", "stream"):
        title = f"host CPU seconds per 10^9 tokens, int64, {order} order, local files"
        print_row(title, seconds[order], digits=1)
        title = f"local files, int64, M tokens/s, {order} order vs megatron-core + DataLoader"
        ours, other = rates[order] / 1e6, rates.get("theirs", 0.0) / 1e6
        print_row(f"{title} ({best} workers)", ours, other or None, ratio=times)


def our_local(bench: Bench, order: str, warmup: int, **options: Any) -> Result | None:
    """StreamLoader on local files, in its steady state."""
    result = bench.side(
        "ours", prefix=LOCAL, order=order, seconds=SECONDS, warmup=warmup, **options
    )
    return result or None


# --- conversion, blends --------------------------------------------------------------------------


def scale_of(chosen: Chosen, text_mib: int) -> convert.Scale:
    return convert.Scale(runs=chosen.runs, corpus=text_mib, pair=1024)


@FIGURES.figure()
def zstd(chosen: Chosen) -> None:
    """The loader on local zstd shards, compared with plain ones and with decompression alone."""
    scale = scale_of(chosen, 100)
    dataset = scale.shards("zst")
    train = partial(convert.rate_of, convert.side_train, seconds=SECONDS)
    sides = {kind: train(blend=scale.shards(kind)) for kind in ("zst", "bin")}
    sides["frames"] = convert.rate_of(convert.side_frames, dataset=dataset, seconds=SECONDS)
    by_side = {side: rate / 1e6 for side, rate in harness.medians(chosen.runs, sides).items()}
    title = "local .bin.zst, the loader alone, M tokens/s, vs"
    library = "the zstandard library alone on all cores"
    print_row(f"{title} {library}", by_side["zst"], by_side["frames"], ratio=share, goal="60 %")
    print_row(f"{title} plain .bin", by_side["zst"], by_side["bin"], ratio=share)


@FIGURES.figure()
def copies(chosen: Chosen) -> None:
    """Sharding and merging 1 GiB, compared with `cp` and `sync`."""
    scale = scale_of(chosen, 100)
    reshape = partial(convert.rate_of, convert.side_reshape)
    sides = {
        "shard": reshape(dataset=scale.tokens, shard_bytes=256 << 20),
        "merge": reshape(dataset=scale.shards(), shard_bytes=None),
        "cp": convert.rate_of(convert.side_cp, prefix=scale.tokens),
    }
    by_side = {side: rate / 1e6 for side, rate in harness.medians(chosen.runs, sides).items()}
    for side in ("shard", "merge"):
        title = f"{side} 1 GiB, MB/s, vs `cp` and `sync`"
        print_row(title, by_side[side], by_side["cp"], ratio=share, goal="85 %")


@FIGURES.figure()
def tokenize(chosen: Chosen) -> None:
    """JSON lines to tokens, compared with the tokenizer library's batch encoding."""
    text = scale_of(chosen, 30).text
    corpus.tokenizer()
    sides = {
        "ours": convert.rate_of(convert.side_ours, corpus=text),
        "bare": convert.rate_of(convert.side_bare, corpus=text),
    }
    by_side = harness.medians(chosen.runs, sides)
    title = "tokenizing, tokens/s, vs the library's batch encoding, ids not looked at"
    print_row(title, by_side["ours"], by_side["bare"], ratio=share, goal="95 %")


@FIGURES.figure()
def blends(chosen: Chosen) -> None:
    """Building a blend, compared with megatron-core's compiled helper. The results must be equal."""
    count, samples = BLEND
    weights = np.random.default_rng(0).random(count) + 1e-6
    theirs, ours = orders.blend_sides(weights, samples)
    if not orders.equal(theirs(), ours()):
        raise SystemExit("the blend differs from megatron-core's")
    sides = {
        "theirs": partial(harness.seconds_of, theirs),
        "ours": partial(harness.seconds_of, ours),
    }
    by_side = harness.medians(2 * chosen.runs + 1, sides)
    title = f"blend of {count} datasets, random weights, {samples / 1e6:.0f} M samples, seconds"
    inverse = times(by_side["theirs"], by_side["ours"])
    print_row(
        title, by_side["ours"], by_side["theirs"], digits=3, ratio=lambda *_: inverse, goal="12x"
    )


# --- opening, stalls -----------------------------------------------------------------------------


@FIGURES.figure()
def starts(chosen: Chosen) -> None:
    """From the start of a process to its first batch."""
    opening.prepare(opening.FOLDER)
    with running(opening.FOLDER / "objects") as server:
        steps = opening.medians_of(server, chosen.runs, opening.first_batch, settle=0.0)
    title = "first batch, loopback, seconds from the start of the process"
    seconds = opening.from_start(steps)
    print_row(f"{title} (torch's import {steps['torch']:.2f})", seconds, digits=2, goal="2.5 s")


@FIGURES.figure()
def openings(chosen: Chosen) -> None:
    """Blends, manifests and folders of many datasets, cold and from what was kept."""
    opening.prepare(opening.FOLDER)
    with running(opening.FOLDER / "objects") as server:
        opening.write_versions(server, opening.FOLDER)
        for delay, where in ((0.0, "loopback"), (0.02, "20 ms")):
            server.behave(latency=delay, latency_of_all=True)
            for name, what in opening.OPENINGS.items():
                seconds = opening.seconds_to_open(server, what, chosen.runs)
                title = f"opening {name}, {where}, seconds: first; again"
                cells = f"{seconds['cold']:.2f}; {seconds['again']:.2f}"
                goal = {"blend": "1.5 s", "folder": "8 s"}.get(what, "0.5 s")
                harness.row(title, "", cells, "", goal, "")


@FIGURES.figure(by_default=False)
def stalls(chosen: Chosen) -> None:
    """Ten minutes of a consumer at 85 % of what a link gives, 1 % of requests 20 times slower."""
    waits_of(chosen, "stalls")


@FIGURES.figure(by_default=False)
def busy_stalls(chosen: Chosen) -> None:
    """The same with a main thread that computes in Python all the time."""
    for interval in (0.005, 0.0005):  # the first is Python's
        what = f"stalls with a busy main thread, switch interval {1e3 * interval:g} ms"
        waits_of(chosen, what, busy=True, switch_interval=interval)


@FIGURES.figure(by_default=False)
def forked_stalls(chosen: Chosen) -> None:
    """The same by a torch DataLoader with two forked workers."""
    waits_of(chosen, "stalls of a DataLoader with 2 forked workers", workers=2, prefetch=64)


def waits_of(chosen: Chosen, what: str, **options: Any) -> None:
    """Print how long a paced consumer waited."""
    with runner.serving() as bench:
        bench.server.behave(**SHAPES["shaped"], slow_share=0.01, slow_factor=20.0, link=STALL_LINK)
        result = bench.side(
            "paced",
            endpoint=bench.server.endpoint,
            prefix="s3://data/web",
            num_samples=10**9,
            bytes_per_second=STALL_SHARE * STALL_LINK,
            warmup_seconds=STALL_WARM_UP,
            seconds=chosen.stall_seconds,
            **options,
        )
    if not result:
        raise SystemExit("the consumer failed")
    title = (
        f"{what}, {chosen.stall_seconds} s at {result['rate'] / 1e6:.0f} MB/s, 20 ms, "
        "1 % of requests 20x slower: share of the time; longest call, longest overshoot of a sleep"
    )
    longest = f"{1e3 * result['longest']:.0f} ms, {1e3 * result['overslept']:.0f} ms"
    harness.row(
        title, "", f"{100 * result['stall_share']:.3f} %; {longest}", "", "0.1 %; 50 ms apart", ""
    )


# --- figures of runs of their own: named by --figures ----------------------------------------------


@FIGURES.figure(by_default=False)
def scattered(chosen: Chosen) -> None:
    """Megatron order, cold, no cache, against megatron-core's two readers of object storage."""
    readers = {"s3": "S3 reader", "msc": "multi-storage-client reader"}
    with runner.serving() as bench:
        for shape, behaviour in SHAPES.items():
            bench.server.behave(**behaviour)
            sides: dict[str, Callable[[], Result | None]] = {
                scheme: partial(megatron_side, bench, scheme) for scheme in readers
            }
            sides["ours"] = partial(our_megatron_order, bench)
            rates = medians_of(harness.in_turns(chosen.runs, sides), "rate")
            for scheme, reader in readers.items():
                title = f"Megatron order, {shape}, samples/s vs megatron-core's {reader}"
                rounded = partial(times, digits=0)
                print_row(title, rates["ours"], rates.get(scheme), digits=2, ratio=rounded)


@FIGURES.figure(by_default=False)
def cached(chosen: Chosen) -> None:
    """Megatron order with a cache that holds the data, against the same files on the local disk."""
    cache = runner.FOLDER / "cache"
    shutil.rmtree(cache, ignore_errors=True)
    with runner.serving() as bench:
        ours = partial(
            bench.ours,
            order="megatron",
            storage={"cache_dir": str(cache), "cache_max_bytes": 64 << 30},
        )
        ours(seconds=25)
        sides: dict[str, Callable[[], Result | None]] = {
            "local": partial(our_local, bench, "megatron", 2000),
            "cached": lambda: ours(seconds=SECONDS, warmup=2000) or None,
        }
        rates = medians_of(harness.in_turns(chosen.runs, sides), "rate")
    shutil.rmtree(cache, ignore_errors=True)
    title = "Megatron order from a warm cache, samples/s vs local files"
    print_row(title, rates["cached"], rates["local"], ratio=two_digits)


@FIGURES.figure(by_default=False)
def memory(chosen: Chosen) -> None:
    """Peak resident memory beyond the budget and beyond what the imports take."""
    with runner.serving() as bench:
        base = bench.side("imports_only")["peak"]
        for budget in (256 << 20, 1 << 30):
            peak = bench.ours(seconds=SECONDS, storage={"memory_bytes": budget})["peak"]
            title = f"peak memory beyond a budget of {budget >> 20} MiB and the imports, MiB"
            beyond = (peak - base - budget) >> 20
            print_row(f"{title} (imports {base >> 20}, peak {peak >> 20})", beyond)


def main() -> int:
    parser = harness.parser(__doc__, FIGURES)
    parser.add_argument("--peers", nargs="*", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--stall-seconds", type=int, default=600, help="(%(default)s)")
    chosen = parser.parse_args(namespace=Chosen())
    harness.print_head((*runner.PACKAGES, "numba", "tokenizers", "zstandard"), chosen.runs)
    harness.table("figure", "other side", "streammega", "ratio", "goal", "peak memory, MB")
    return harness.print_figures(FIGURES, chosen)


if __name__ == "__main__":
    sys.exit(main())
