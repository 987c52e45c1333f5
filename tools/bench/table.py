#!/usr/bin/env python3
"""The table of docs/benchmarks.md: what the library is measured by, both sides by one command.

    make bench-peers        # once: .venv-bench, with the other loaders
    make bench              # the whole table; --figures names some, --stalls adds ten minutes

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
from tools.bench.runner import SHAPES, WHOLE_EPOCH, WIDE, Bench

PEERS = {
    "litdata": "litdata",
    "s3torch": "s3torchconnector",
    "mosaic": "mosaicml-streaming",
}
"""Other loaders, by the name of their side."""
WELL_SHUFFLED = "mosaic"
"""The one that shuffles over everything; the others shuffle within a shard or a buffer."""
WORKERS = (0, 2)
PEER_SECONDS = 15
"""Of an epoch of another loader, if that takes longer: the slowest would take minutes for it."""
LONGER_SECONDS = 90
"""Of one that shuffles over everything, with workers: it fetches most of the data for its first
batch, and its rate counts from there.
"""
SECONDS = 4.0
"""Of what is measured in its steady state."""
SAMPLES = 10**7
"""More than are read of local files in that time."""
BLEND = (256, 2_000_000)
"""Datasets of the blend that is built, and its samples."""
STALL_SECONDS = 600
STALL_WARM_UP = 30
STALL_RATE = 0.85 * 400e6
"""Bytes a second that are asked for: 85 % of a link of 400 MB/s, so that bandwidth, and not these
cores, is what is asked for.
"""
Result = dict[str, Any]


class Chosen(argparse.Namespace):
    """What is measured: runs of each side, the other loaders, and where files lie."""

    runs: int
    peers: Sequence[str]
    folder = runner.FOLDER


FIGURES = harness.Figures()


def tell(figure: str, ours: str, *, theirs: str = "", ratio: str = "", goal: str = "") -> None:
    """A line of the table. goal: what the ratio, or ours alone, is to reach."""
    harness.row(figure, theirs, ours, ratio, goal)


def times(ours: float, theirs: float, digits: int = 1) -> str:
    """A ratio."""
    return f"{ours / theirs:.{digits}f}x"


def share(ours: float, theirs: float) -> str:
    """A ratio of what cannot be passed."""
    return f"{100 * ours / theirs:.0f} %"


def medians_of(measured: Mapping[str, Sequence[Result]], key: str) -> dict[str, float]:
    """The median of one result of each side."""
    found = {}
    for side, results in measured.items():
        values = [float(result[key]) for result in results if key in result]
        if values:
            found[side] = statistics.median(values)
    return found


# --- the stream order beside the transport alone -------------------------------------------------


@FIGURES.figure()
def transport(chosen: Chosen) -> None:
    """As many bytes, by requests of the same size, as many in flight."""
    runner.prepare(chosen.folder, peers=False)
    goals = {"ids": "85 %", "int64": "75 %"}
    with running(chosen.folder / "objects") as server:
        for mode, goal in goals.items():
            loader, obstore = costs.measure(
                server.endpoint, chosen.folder, mode, chosen.runs, SECONDS
            )
            ours = statistics.median(map(costs.rate, loader))
            alone = statistics.median(map(costs.rate, obstore))
            tell(
                f"stream order, {mode}, MB/s, vs obstore alone, same requests in flight",
                theirs=f"{alone:,.0f}",
                ours=f"{ours:,.0f}",
                ratio=share(ours, alone),
                goal=goal,
            )


# --- whole epochs --------------------------------------------------------------------------------


@FIGURES.figure()
def epochs(chosen: Chosen) -> None:
    """On loopback: whole epochs, workers, host CPU, the first batch."""
    measured = epochs_of(chosen, "unshaped")
    rates = medians_of(measured, "rate")
    tell_epochs(rates, "loopback", goals=("2x", "15x"))
    tell_workers(rates)
    tell_cpu(medians_of(measured, "cpu"))
    tell_first(medians_of(measured, "first"), "loopback")


@FIGURES.figure()
def far_epochs(chosen: Chosen) -> None:
    """With 20 ms: whole epochs, the first batch."""
    measured = epochs_of(chosen, "shaped")
    tell_epochs(medians_of(measured, "rate"), "20 ms", goals=("3x", "50x"))
    tell_first(medians_of(measured, "first"), "20 ms")


def epochs_of(chosen: Chosen, shape: str) -> dict[str, list[Result]]:
    """Results of each side: tokens/s with the first batch, CPU seconds per 10^9 tokens, seconds to
    the first batch.
    """
    runner.prepare(chosen.folder, peers=True)
    with running(chosen.folder / "objects") as server:
        server.behave(**SHAPES[shape])
        bench = Bench(server, chosen.folder, chosen.runs, SECONDS)
        sides: dict[str, Callable[[], Result | None]] = {}
        for peer in chosen.peers:
            for workers in WORKERS:
                sides[f"{peer} {workers}"] = partial(peer_epoch, bench, peer, workers)
        sides["ours"] = partial(our_epoch, bench)
        sides["ours, 1 MiB blocks"] = partial(our_epoch, bench, data=WIDE)
        if shape == "unshaped":  # what does not depend on the distance
            sides["ours, ids"] = partial(our_epoch, bench, ids_only=True)
            for name, options in runner.OUR_WORKERS.items():
                sides[f"ours, {name}"] = partial(our_workers, bench, **options)
        return harness.in_turns(chosen.runs, sides)


def peer_epoch(bench: Bench, peer: str, workers: int) -> Result | None:
    """Another loader; None if it failed."""
    endpoint = bench.server.endpoint
    seconds = LONGER_SECONDS if peer == WELL_SHUFFLED and workers else PEER_SECONDS
    result = bench.side(
        peer, endpoint=endpoint, batch=16, workers=workers, seconds=seconds, shards=1
    )
    if not result:
        return None
    found = {"rate": result["tokens"], "first": result["first"]}
    # of workers that have not ended, nobody knows yet what they spent
    return found if workers else found | {"cpu": result["cpu"]}


def our_epoch(bench: Bench, **arguments: Any) -> Result | None:
    """StreamLoader."""
    result = bench.ours(**WHOLE_EPOCH, **arguments)
    if not result:
        return None
    return {"rate": result["whole_rate"], "first": result["first"], "cpu": result["whole_cpu"]}


def our_workers(bench: Bench, **options: Any) -> Result | None:
    """A torch DataLoader with two workers."""
    result = bench.side(
        "ours_workers", endpoint=bench.server.endpoint, workers=2, **WHOLE_EPOCH, **options
    )
    return {"rate": result["tokens"], "cpu": result["cpu"]} if result else None


def of_peers(found: Mapping[str, float]) -> dict[str, float]:
    """Without our sides."""
    return {side: value for side, value in found.items() if not side.startswith("ours")}


def named(side: str) -> str:
    """A side of another loader, for people."""
    peer, workers = side.rsplit(" ", 1)
    return PEERS[peer] if workers == "0" else f"{PEERS[peer]}, {workers} workers"


def rivals_of(found: Mapping[str, float], choose: Callable[..., str]) -> list[str]:
    """The best side of all other loaders, and the best of those that shuffle over everything."""
    peers = of_peers(found)
    shuffled = [side for side in peers if side.startswith(WELL_SHUFFLED)]
    rivals = [choose(peers, key=lambda side: peers[side])] if peers else []
    if shuffled:
        rivals.append(choose(shuffled, key=lambda side: peers[side]))
    return rivals


def tell_epochs(rates: Mapping[str, float], where: str, goals: Sequence[str]) -> None:
    for ours in ("ours", "ours, 1 MiB blocks"):
        for rival, goal in zip(rivals_of(rates, max), goals, strict=False):
            blocks = "default blocks" if ours == "ours" else "1 MiB blocks"
            tell(
                f"whole shuffled epoch, {where}, {blocks}, M tokens/s, vs {named(rival)}",
                theirs=f"{rates[rival] / 1e6:.0f}",
                ours=f"{rates[ours] / 1e6:.0f}",
                ratio=times(rates[ours], rates[rival]),
                goal=goal if ours == "ours" else "",
            )


def tell_workers(rates: Mapping[str, float]) -> None:
    """Beside each other loader with as many workers."""
    with_workers = [side for side in of_peers(rates) if side.endswith(" 2")]
    for method in runner.OUR_WORKERS:
        for rival in with_workers:
            ours = rates[f"ours, {method}"]
            tell(
                f"torch DataLoader, 2 workers {method}, M tokens/s, vs {named(rival)}",
                theirs=f"{rates[rival] / 1e6:.0f}",
                ours=f"{ours / 1e6:.0f}",
                ratio=times(ours, rates[rival]),
                goal="1.0x",
            )


def tell_cpu(seconds: Mapping[str, float]) -> None:
    """Every mode of ours, beside the least of the others and those that shuffle well."""
    modes = {
        "ours": "int64",
        "ours, ids": "ids",
        "ours, 1 MiB blocks": "int64, 1 MiB blocks",
        "ours, forked": "int64, DataLoader with 2 forked workers",
        "ours, spawned": "int64, DataLoader with 2 spawned workers",
    }
    for ours, mode in modes.items():
        for rival, goal in zip(rivals_of(seconds, min), ("0.8x", "0.3x"), strict=False):
            tell(
                f"host CPU seconds per 10^9 tokens, {mode}, vs {named(rival)}",
                theirs=f"{seconds[rival]:.1f}",
                ours=f"{seconds[ours]:.1f}",
                ratio=times(seconds[ours], seconds[rival], digits=2),
                goal=goal,
            )


def tell_first(seconds: Mapping[str, float], where: str) -> None:
    """Of the others, those without workers: theirs have to be started."""
    peers = {side: value for side, value in of_peers(seconds).items() if side.endswith(" 0")}
    rival = min(peers, key=lambda side: peers[side])
    tell(
        f"first batch, {where}, seconds from construction, imports warm, vs {named(rival)}",
        theirs=f"{peers[rival]:.2f}",
        ours=f"{seconds['ours']:.2f}",
        ratio=times(seconds["ours"], peers[rival], digits=2),
        goal="0.2 s and the round trips",
    )


# --- the Megatron order, and what other modes cost -----------------------------------------------


@FIGURES.figure()
def megatron(chosen: Chosen) -> None:
    """Cold, no cache, beside megatron-core's faster reader of object storage."""
    runner.prepare(chosen.folder, peers=False)
    with running(chosen.folder / "objects") as server:
        bench = Bench(server, chosen.folder, chosen.runs, SECONDS)
        theirs = partial(
            bench.side, "megatron", prefix="msc://data/web", num_samples=500_000, seconds=SECONDS
        )
        ours = partial(bench.ours, order="megatron", seconds=SECONDS, warmup=100)
        sides = {"theirs": lambda: theirs() or None, "ours": lambda: ours() or None}
        measured = harness.in_turns(chosen.runs, sides)
    rates = medians_of(measured, "rate")
    fetched = statistics.median(
        result["stats"]["amplification"] for result in measured.get("ours", [])
    )
    tell(
        "Megatron order, loopback, samples/s, vs megatron-core's multi-storage-client reader",
        theirs=f"{rates['theirs']:,.0f}",
        ours=f"{rates['ours']:,.0f}",
        ratio=times(rates["ours"], rates["theirs"]),
        goal="20x",
    )
    tell("bytes fetched for each byte used", f"{fetched:.2f}", goal="1.15")
    of_cpu = medians_of(measured, "cpu")
    tell(
        "host CPU seconds per 10^9 tokens, int64, Megatron order from the server",
        ours=f"{of_cpu['ours']:.1f}",
    )


@FIGURES.figure()
def local(chosen: Chosen) -> None:
    """What reading local files costs."""
    runner.prepare(chosen.folder, peers=False)
    prefix = str(chosen.folder / "objects" / "data" / "web")
    with running(chosen.folder / "objects") as server:
        bench = Bench(server, chosen.folder, chosen.runs, SECONDS)
        options: Result = {
            "prefix": prefix,
            "seconds": SECONDS,
            "warmup": 1000,
            "num_samples": SAMPLES,
        }
        sides = {
            order: lambda order=order: bench.side("ours", order=order, **options) or None
            for order in ("megatron", "stream")
        }
        measured = harness.in_turns(chosen.runs, sides)
    seconds = medians_of(measured, "cpu")
    rates = medians_of(measured, "tokens")
    for order in sides:
        tell(
            f"host CPU seconds per 10^9 tokens, int64, {order} order, local files "
            f"({rates[order] / 1e6:,.0f} M tokens/s)",
            ours=f"{seconds[order]:.1f}",
        )


# --- conversion, blends --------------------------------------------------------------------------


def scale_of(chosen: Chosen, text_mib: int) -> convert.Scale:
    return convert.Scale(runs=chosen.runs, corpus=text_mib, pair=1024)


@FIGURES.figure()
def zstd(chosen: Chosen) -> None:
    """The loader on local zstd shards, beside plain ones and what the cores can decompress."""
    scale = scale_of(chosen, 100)
    dataset = scale.shards("zst")
    sides = {
        kind: convert.rate_of(
            convert.side_train, blend=scale.shards(kind), options={}, seconds=SECONDS
        )
        for kind in ("zst", "bin")
    }
    sides["frames"] = convert.rate_of(convert.side_frames, dataset=dataset, seconds=SECONDS)
    found = harness.medians(chosen.runs, sides)
    titles = {"frames": "the zstandard library alone on all cores", "bin": "plain .bin"}
    for theirs, title in titles.items():
        tell(
            f"local .bin.zst, the loader alone, M tokens/s, vs {title}",
            theirs=f"{found[theirs] / 1e6:,.0f}",
            ours=f"{found['zst'] / 1e6:,.0f}",
            ratio=share(found["zst"], found[theirs]),
            goal="60 %" if theirs == "frames" else "",
        )


@FIGURES.figure()
def copies(chosen: Chosen) -> None:
    """Sharding and merging 1 GiB, beside `cp` and `sync`."""
    scale = scale_of(chosen, 100)
    sides = {
        "shard": convert.rate_of(convert.side_reshape, dataset=scale.tokens, shard_bytes=256 << 20),
        "merge": convert.rate_of(convert.side_reshape, dataset=scale.shards(), shard_bytes=None),
        "cp": convert.rate_of(convert.side_cp, prefix=scale.tokens),
    }
    found = harness.medians(chosen.runs, sides)
    for title in ("shard", "merge"):
        tell(
            f"{title} 1 GiB, MB/s, vs `cp` and `sync`",
            theirs=f"{found['cp'] / 1e6:,.0f}",
            ours=f"{found[title] / 1e6:,.0f}",
            ratio=share(found[title], found["cp"]),
            goal="85 %",
        )


@FIGURES.figure()
def tokenize(chosen: Chosen) -> None:
    """JSON lines to tokens, beside the tokenizer library's batch encoding."""
    text = scale_of(chosen, 30).text
    corpus.tokenizer()
    sides = {
        name: convert.rate_of(side, corpus=text)
        for name, side in (("ours", convert.side_ours), ("bare", convert.side_bare))
    }
    found = harness.medians(chosen.runs, sides)
    tell(
        "tokenizing, tokens/s, vs the library's batch encoding, ids not looked at",
        theirs=f"{found['bare']:,.0f}",
        ours=f"{found['ours']:,.0f}",
        ratio=share(found["ours"], found["bare"]),
        goal="95 %",
    )


@FIGURES.figure()
def blends(chosen: Chosen) -> None:
    """Building a blend, beside megatron-core's compiled helper, bits compared."""
    count, samples = BLEND
    weights = np.random.default_rng(0).random(count) + 1e-6
    theirs, ours = orders.blend_sides(weights, samples)
    if not orders.equal(theirs(), ours()):
        raise SystemExit("the blend differs from megatron-core's")
    sides = {
        "theirs": partial(harness.seconds_of, theirs),
        "ours": partial(harness.seconds_of, ours),
    }
    seconds = harness.medians(2 * chosen.runs + 1, sides)
    tell(
        f"blend of {count} datasets, random weights, {samples / 1e6:.0f} M samples, seconds",
        theirs=f"{seconds['theirs']:.3f}",
        ours=f"{seconds['ours']:.3f}",
        ratio=times(seconds["theirs"], seconds["ours"]),
        goal="12x",
    )


# --- opening, stalls -----------------------------------------------------------------------------


@FIGURES.figure()
def starts(chosen: Chosen) -> None:
    """From the start of a process to its first batch."""
    opening.prepare(opening.FOLDER)
    with running(opening.FOLDER / "objects") as server:
        found = opening.medians_of(server, chosen.runs, opening.first_batch, settle=0.0)
    tell(
        f"first batch, loopback, seconds from the start of the process "
        f"(torch's import {found['torch']:.2f})",
        ours=f"{opening.from_start(found):.2f}",
        goal="2.5 s",
    )


@FIGURES.figure()
def openings(chosen: Chosen) -> None:
    """Blends, manifests and folders of many datasets, cold and from what was kept."""
    opening.prepare(opening.FOLDER)
    goals = {"blend": "1 s; 0.3 s", "manifest": "2 s; 0.3 s", "folder": "2 s; 0.3 s"}
    with running(opening.FOLDER / "objects") as server:
        for delay, where in ((0.0, "loopback"), (0.02, "20 ms")):
            server.behave(latency=delay, latency_of_all=True)
            for name, what in opening.OPENINGS.items():
                seconds = opening.seconds_to_open(server, what, chosen.runs)
                tell(
                    f"opening {name}, {where}, seconds: cold; from the local cache",
                    ours=f"{seconds['cold']:.2f}; {seconds['again']:.2f}",
                    goal=goals[what],
                )


@FIGURES.figure(by_default=False)
def stalls(chosen: Chosen) -> None:
    """Ten minutes of a consumer at 85 % of what a link gives, 1 % of requests 20 times slower."""
    runner.prepare(chosen.folder, peers=False)
    with running(chosen.folder / "objects") as server:
        server.behave(**SHAPES["shaped"], slow_share=0.01, slow_factor=20.0)
        bench = Bench(server, chosen.folder, chosen.runs, SECONDS)
        result = bench.side(
            "paced",
            endpoint=server.endpoint,
            prefix="s3://data/web",
            num_samples=10**9,
            bytes_per_second=STALL_RATE,
            warmup_seconds=STALL_WARM_UP,
            seconds=STALL_SECONDS,
        )
    if not result:
        raise SystemExit("the consumer failed")
    tell(
        f"stalls of {STALL_SECONDS // 60} minutes at {STALL_RATE / 1e6:.0f} MB/s, 20 ms, "
        "1 % of requests 20x slower: share of the time; longest wait",
        ours=f"{100 * result['stall_share']:.3f} %; {1e3 * result['worst']:.0f} ms",
        goal="0.1 %; 50 ms",
    )


# --- figures of runs of their own: named by --figures ----------------------------------------------


@FIGURES.figure(by_default=False)
def scattered(chosen: Chosen) -> None:
    """Megatron order, cold, no cache, against megatron-core's two readers of object storage."""
    runner.prepare(chosen.folder, peers=False)
    readers = {"s3": "S3 reader", "msc": "multi-storage-client reader"}
    with running(chosen.folder / "objects") as server:
        bench = Bench(server, chosen.folder, chosen.runs, SECONDS)
        for shape, behaviour in SHAPES.items():
            server.behave(**behaviour)
            sides: dict[str, Callable[[], float | None]] = {
                scheme: lambda scheme=scheme: bench.side(  # type: ignore[misc]
                    "megatron", prefix=f"{scheme}://data/web", num_samples=500_000, seconds=SECONDS
                ).get("rate")
                for scheme in readers
            }
            sides["ours"] = lambda: bench.ours(order="megatron", seconds=SECONDS, warmup=100).get(
                "rate"
            )
            rates = harness.medians(chosen.runs, sides)
            for scheme, name in readers.items():
                if scheme in rates:
                    tell(
                        f"Megatron order, {shape}, samples/s vs megatron-core's {name}",
                        f"{rates['ours']:.0f}",
                        theirs=f"{rates[scheme]:.2f}",
                        ratio=times(rates["ours"], rates[scheme], digits=0),
                    )


@FIGURES.figure(by_default=False)
def cached(chosen: Chosen) -> None:
    """Megatron order with a cache that holds the data, against the same files on the local disk."""
    runner.prepare(chosen.folder, peers=False)
    cache = chosen.folder / "cache"
    shutil.rmtree(cache, ignore_errors=True)
    arguments: Result = {"order": "megatron", "storage": {"cache_dir": str(cache)}}
    prefix = str(chosen.folder / "objects" / "data" / "web")
    with running(chosen.folder / "objects") as server:
        bench = Bench(server, chosen.folder, chosen.runs, SECONDS)
        bench.ours(seconds=25, **arguments)
        sides = {
            "local": lambda: bench.side(
                "ours", prefix=prefix, order="megatron", seconds=SECONDS, warmup=2000
            ).get("rate"),
            "cached": lambda: bench.ours(seconds=SECONDS, warmup=2000, **arguments).get("rate"),
        }
        rates = harness.medians(chosen.runs, sides)
    shutil.rmtree(cache, ignore_errors=True)
    tell(
        "Megatron order from a warm cache, samples/s vs local files",
        f"{rates['cached']:,.0f}",
        theirs=f"{rates['local']:,.0f}",
        ratio=times(rates["cached"], rates["local"], digits=2),
    )


@FIGURES.figure(by_default=False)
def local_files(chosen: Chosen) -> None:
    """Local files against megatron-core's GPTDataset under a DataLoader at its best worker count."""
    runner.prepare(chosen.folder, peers=False)
    prefix = str(chosen.folder / "objects" / "data" / "web")
    with running(chosen.folder / "objects") as server:
        bench = Bench(server, chosen.folder, chosen.runs, SECONDS)

        def theirs(workers: int) -> float | None:
            options: Result = {"prefix": prefix, "num_samples": 500_000, "seconds": SECONDS}
            return bench.side("megatron_loader", workers=workers, **options).get("tokens")

        def ours(order: str) -> float | None:
            options: Result = {"prefix": prefix, "num_samples": SAMPLES, "seconds": SECONDS}
            return bench.side("ours", order=order, warmup=1000, **options).get("tokens")

        tried = {workers: theirs(workers) or 0.0 for workers in (0, 1, 2)}
        best = max(tried, key=lambda workers: tried[workers])
        sides = {
            "theirs": partial(theirs, best),
            "megatron": partial(ours, "megatron"),
            "stream": partial(ours, "stream"),
        }
        rates = harness.medians(chosen.runs, sides)
    for order in ("megatron", "stream"):
        tell(
            f"local files, int64, M tokens/s, {order} order vs megatron-core + DataLoader ({best} workers)",
            f"{rates[order] / 1e6:.0f}",
            theirs=f"{rates['theirs'] / 1e6:.0f}",
            ratio=times(rates[order], rates["theirs"]),
        )


@FIGURES.figure(by_default=False)
def memory(chosen: Chosen) -> None:
    """Peak resident memory beyond the budget and beyond what the imports take."""
    runner.prepare(chosen.folder, peers=False)
    with running(chosen.folder / "objects") as server:
        bench = Bench(server, chosen.folder, chosen.runs, SECONDS)
        base = bench.side("imports_only").get("peak", 0)
        for budget in (256 << 20, 1 << 30):
            peak = bench.ours(seconds=SECONDS, storage={"memory_bytes": budget}).get("peak", 0)
            tell(
                f"peak memory beyond a budget of {budget >> 20} MiB and the imports, MiB "
                f"(imports {base >> 20}, peak {peak >> 20})",
                f"{(peak - base - budget) >> 20}",
            )


def main() -> int:
    parser = harness.parser(__doc__, FIGURES)
    parser.add_argument("--stalls", action="store_true", help="ten minutes of waits, too")
    parser.add_argument("--peers", nargs="*", choices=list(PEERS), default=list(PEERS))
    chosen = parser.parse_args(namespace=Chosen())
    if chosen.stalls and "stalls" not in chosen.figures:
        chosen.figures = [*chosen.figures, "stalls"]
    harness.print_head((*runner.PACKAGES, "numba", "tokenizers", "zstandard"), chosen.runs)
    harness.table("figure", "other side", "streammega", "ratio", "goal")
    return harness.print_figures(FIGURES, chosen)


if __name__ == "__main__":
    sys.exit(main())
