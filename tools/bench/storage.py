#!/usr/bin/env python3
"""From a bucket to a batch, side by side with other loaders and with the transport's own ceiling,
on a local object server.

    make bench-peers                                   # once: .venv-bench, with the other loaders
    .venv-bench/bin/python tools/bench/storage.py      # all figures; --figures names some, --plot draws them

Every side runs in a process of its own. The sides of a figure alternate, `--runs` times each; a
ratio is that of the medians. The server is tools/bench/object_server.py, on the same two cores as
everything else: "unshaped" is as fast as loopback goes, "shaped" sends the first byte after 20 ms
and 90 MB/s per connection. Files are made under --folder (about 10 GB).
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from streammega.dataset.idx import encode_index
from streammega.order.quality import places_of, shuffle_quality
from streammega.samples.lanes import StreamSource
from tools.bench import harness
from tools.bench.object_server import Running, running

HERE = Path(__file__).resolve().parents[2]
S = 4096
CORPUS = 4 << 30
EQUAL_CORPUS = 1 << 30
"""Bytes of what is read by us and by the other loaders: the same tokens, each side in its format."""
EQUAL_TOKENS = EQUAL_CORPUS // 2 // (S + 1) // 256 * 256 * (S + 1)
EPOCH = EQUAL_TOKENS // S // 256 * 256
"""Samples of an epoch of it, whole global batches."""
SHAPES: dict[str, dict[str, float]] = {
    "unshaped": {},
    "shaped": {"latency": 0.02, "bandwidth": 90e6},
}
IN_FLIGHT = 96 << 20
PEERS = ("litdata", "mosaic", "webdataset", "s3torch")
PACKAGES = (
    "numpy", "torch", "obstore", "megatron-core", "multi-storage-client", "litdata", "mosaicml-streaming", "webdataset",
    "s3torchconnector",
)  # fmt: skip
WIDE = {"block_bytes": 1 << 20, "lanes": 256}
WHOLE_EPOCH: dict[str, Any] = {"prefix": "s3://data/equal", "num_samples": EPOCH, "seconds": 0}
OUR_WORKERS: dict[str, dict[str, Any]] = {
    "forked": {"method": "fork"},
    "spawned": {"method": "spawn"},
}
Result = dict[str, Any]


class Bench:
    """A server, and the two Pythons that sides run in."""

    def __init__(
        self,
        server: Running,
        folder: Path,
        runs: int,
        seconds: float,
        peers: Sequence[str] = PEERS,
    ) -> None:
        self.server = server
        self.folder = folder
        self.runs = runs
        self.seconds = seconds
        self.peers = peers
        self.rows: list[Result] = []

    def side(self, name: str, checkout: Path = HERE, **arguments: Any) -> Result:
        """Run one side in a process of its own, with the library of a checkout.

        A side that fails is {} and says why on stderr.
        """
        arguments = {"index_cache": str(self.folder / "idx"), **arguments}
        environment = os.environ | {
            "AWS_ENDPOINT_URL": self.server.endpoint, "S3_ENDPOINT_URL": self.server.endpoint, "AWS_ACCESS_KEY_ID": "bench",
            "AWS_SECRET_ACCESS_KEY": "bench-secret", "AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true",
            "MSC_CONFIG": str(self.folder / "msc.json"), "TMPDIR": str(self.folder / "tmp"),
        }  # fmt: skip
        script = str(checkout / "tools" / "bench" / "sides.py")
        try:
            done = subprocess.run(
                [sys.executable, script, name, json.dumps(arguments)],
                env=environment, capture_output=True, text=True, timeout=arguments.get("seconds", 0) + 180,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            print(f"{name} {arguments}: no result in time", file=sys.stderr)
            return {}
        finally:
            shutil.rmtree(self.folder / "tmp", ignore_errors=True)
            (self.folder / "tmp").mkdir()
        lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        if not lines:
            print(
                f"{name}: {(done.stderr.strip().splitlines() or ['no output'])[-1][:200]}",
                file=sys.stderr,
            )
            return {}
        result: Result = json.loads(lines[-1][7:])
        return result

    def ours(self, **arguments: Any) -> Result:
        """streammega from the server."""
        return self.side(
            "ours", **{"endpoint": self.server.endpoint, "prefix": "s3://data/web", **arguments}
        )

    def peer(self, name: str, workers: int, result: str = "tokens") -> float | None:
        """Tokens/s of an epoch of another loader, from before its first batch; or another of its
        results.
        """
        shards = len(list((self.folder / "objects" / "data" / "wds").glob("*.tar")))
        options: Result = {"batch": 16, "workers": workers, "seconds": 60, "shards": shards}
        return self.side(name, endpoint=self.server.endpoint, **options).get(result)

    def workers(self, result: str = "tokens", **arguments: Any) -> float | None:
        """The same of streammega under a torch DataLoader with two workers."""
        arguments = {"endpoint": self.server.endpoint, "workers": 2, **WHOLE_EPOCH, **arguments}
        return self.side("ours_workers", **arguments).get(result)

    def row(self, figure: str, **columns: Any) -> None:
        """One line of the table, printed at once."""
        self.rows.append({"figure": figure, **columns})
        harness.row(figure, *columns.values())


# --- figures -------------------------------------------------------------------------------------------------------------------


def scattered(bench: Bench) -> None:
    """Megatron order, cold, no cache: samples/s against megatron-core's two readers of object
    storage.
    """
    for shape, behaviour in SHAPES.items():
        bench.server.behave(**behaviour)
        stats: Result = {}

        def ours() -> float | None:
            result = bench.ours(order="megatron", seconds=bench.seconds, warmup=100)
            stats.update(result.get("stats", {}))  # noqa: B023
            return result.get("rate")

        medians = harness.medians(
            bench.runs,
            {
                "s3": lambda: bench.side(
                    "megatron", prefix="s3://data/web", num_samples=500_000, seconds=bench.seconds
                ).get("rate"),
                "msc": lambda: bench.side(
                    "megatron", prefix="msc://data/web", num_samples=500_000, seconds=bench.seconds
                ).get("rate"),
                "ours": ours,
            },
        )
        for peer in ("s3", "msc"):
            if peer in medians:
                name = {"s3": "S3 reader", "msc": "multi-storage-client reader"}[peer]
                bench.row(
                    f"Megatron order, {shape}, samples/s vs megatron-core's {name}",
                    theirs=f"{medians[peer]:.2f}", ours=f"{medians['ours']:.0f}", ratio=f"{medians['ours'] / medians[peer]:.0f}x",
                    notes=f"fetched/useful {stats.get('amplification', 0):.2f}, up to 384 requests in flight",
                )  # fmt: skip


def cached(bench: Bench) -> None:
    """Megatron order with a cache that holds the data, against the same files on the local disk."""
    bench.server.behave()
    cache = bench.folder / "cache"
    shutil.rmtree(cache, ignore_errors=True)
    storage = {"cache_dir": str(cache)}
    cold = bench.ours(order="megatron", seconds=25, storage=storage)
    local = str(bench.folder / "objects" / "data" / "web")
    medians = harness.medians(
        bench.runs,
        {
            "local": lambda: bench.side(
                "ours", prefix=local, order="megatron", seconds=bench.seconds, warmup=2000
            ).get("rate"),
            "cached": lambda: bench.ours(
                order="megatron", seconds=bench.seconds, warmup=2000, storage=storage
            ).get("rate"),
        },
    )
    bench.row(
        "Megatron order from a warm cache, samples/s vs local files",
        theirs=f"{medians['local']:.0f}", ours=f"{medians['cached']:.0f}", ratio=f"{medians['cached'] / medians['local']:.2f}x",
        notes=f"first batch of the cold run after {cold.get('first', 0):.1f} s, order built included",
    )  # fmt: skip
    shutil.rmtree(cache, ignore_errors=True)


def stream(bench: Bench) -> None:
    """Stream order into batches against obstore by itself, at equal bytes in flight."""
    for shape, behaviour in SHAPES.items():
        bench.server.behave(**behaviour)
        grid = [
            (size, max(1, min(384, IN_FLIGHT // size)))
            for size in (1 << 18, 1 << 19, 1 << 20, 1 << 21, 1 << 22, 1 << 23)
        ]
        grid += [(size, max(1, at_once // 4)) for size, at_once in grid]

        def ceiling(size: int, at_once: int) -> float | None:
            endpoint = bench.server.endpoint
            result = bench.side(
                "ceiling",
                endpoint=endpoint,
                key="web.bin",
                size=size,
                at_once=at_once,
                bytes=3 << 30,
            )
            return result.get("bytes_per_second")

        first = {choice: ceiling(*choice) or 0.0 for choice in grid}
        best = max(first, key=lambda choice: first[choice])
        stats: dict[str, Result] = {}

        def ours(name: str, **arguments: Any) -> float | None:
            result = bench.ours(warmup=8000, num_samples=520_000, **arguments)
            stats[name] = result.get("stats", {})  # noqa: B023
            return result["tokens"] * 2 if "tokens" in result else None

        medians = harness.medians(
            bench.runs,
            {
                "ceiling": lambda: ceiling(*best),  # noqa: B023
                "ids": lambda: ours("ids", ids_only=True),
                "int64": lambda: ours("int64"),
                "ids, 1 MiB blocks": lambda: ours("ids, 1 MiB blocks", ids_only=True, data=WIDE),
                "int64, 1 MiB blocks": lambda: ours("int64, 1 MiB blocks", data=WIDE),
            },
        )
        for name in stats:
            bench.row(
                f"stream order, {shape}, {name}: MB/s vs obstore's best ({best[0] >> 10} KiB x {best[1]})",
                theirs=f"{medians['ceiling'] / 1e6:.0f}", ours=f"{medians[name] / 1e6:.0f}",
                ratio=f"{100 * medians[name] / medians['ceiling']:.0f} %",
                notes=f"fetched/useful {stats[name].get('amplification', 0):.4f}; {quality(bench, WIDE if 'MiB' in name else {})}",
            )  # fmt: skip


def epoch(bench: Bench) -> None:
    """A whole shuffled epoch from nothing, the first batch included, against other loaders at their
    best worker count.
    """
    for shape, behaviour in SHAPES.items():
        bench.server.behave(**behaviour)
        best: dict[str, tuple[float, int]] = {}
        for name in bench.peers:
            rates = {workers: bench.peer(name, workers) or 0.0 for workers in (0, 2)}
            workers = max(rates, key=lambda number: rates[number])
            if rates[workers]:
                best[name] = (rates[workers], workers)
        leader = max(best, key=lambda name: best[name][0])
        medians = harness.medians(
            bench.runs,
            {
                "peer": lambda: bench.peer(leader, best[leader][1]),  # noqa: B023
                "ours": lambda: bench.ours(**WHOLE_EPOCH).get("whole_rate"),
                "ours, 1 MiB blocks": lambda: bench.ours(**WHOLE_EPOCH, data=WIDE).get(
                    "whole_rate"
                ),
            },
        )
        others = ", ".join(
            f"{name} {rate / 1e6:.0f} ({workers} workers)" for name, (rate, workers) in best.items()
        )
        for name in ("ours", "ours, 1 MiB blocks"):
            bench.row(
                f"whole shuffled epoch, {shape}, M tokens/s, {name} vs {leader}",
                theirs=f"{medians['peer'] / 1e6:.0f}", ours=f"{medians[name] / 1e6:.0f}",
                ratio=f"{medians[name] / medians['peer']:.1f}x", notes=f"{others}; {quality(bench, WIDE if 'MiB' in name else {})}",
            )  # fmt: skip


def cpu(bench: Bench) -> None:
    """Host CPU seconds per 10^9 tokens, of all processes of a side, imports and the server apart,
    over an epoch or the minute of it that a slow loader gets.
    """
    bench.server.behave()
    sides: dict[str, Callable[[], float | None]] = {
        # no workers: every process more costs more
        name: partial(bench.peer, name, 0, "cpu")
        for name in bench.peers
    }
    sides["ids"] = lambda: bench.ours(**WHOLE_EPOCH, ids_only=True).get("whole_cpu")
    sides["int64"] = lambda: bench.ours(**WHOLE_EPOCH).get("whole_cpu")
    sides["int64, 2 workers"] = partial(bench.workers, result="cpu")
    medians = harness.medians(bench.runs, sides)
    peers = {name: medians[name] for name in bench.peers if name in medians}
    least = min(peers, key=lambda name: peers[name])
    for name in ("ids", "int64", "int64, 2 workers"):
        bench.row(
            f"host CPU seconds per 10^9 tokens, {name}, vs {least}",
            theirs=f"{peers[least]:.1f}",
            ours=f"{medians[name]:.1f}",
            ratio=f"{medians[name] / peers[least]:.2f}x",
            notes=", ".join(f"{peer} {seconds:.1f}" for peer, seconds in peers.items()),
        )


def local(bench: Bench) -> None:
    """Local files, int64 batches, against megatron-core's GPTDataset under a DataLoader at its best
    worker count.
    """
    prefix = str(bench.folder / "objects" / "data" / "web")

    def theirs(workers: int) -> float | None:
        return bench.side(
            "megatron_loader",
            prefix=prefix,
            num_samples=500_000,
            workers=workers,
            seconds=bench.seconds,
        ).get("tokens")

    rates = {workers: theirs(workers) or 0.0 for workers in (0, 1, 2)}
    workers = max(rates, key=lambda number: rates[number])

    def ours(order: str) -> float | None:
        return bench.side(
            "ours",
            prefix=prefix,
            order=order,
            seconds=bench.seconds,
            warmup=1000,
            num_samples=10**7,
        ).get("tokens")

    medians = harness.medians(
        bench.runs,
        {
            "peer": lambda: theirs(workers),
            "megatron": lambda: ours("megatron"),
            "stream": lambda: ours("stream"),
        },
    )
    for order in ("megatron", "stream"):
        bench.row(
            f"local files, int64, M tokens/s, {order} order vs megatron-core + DataLoader ({workers} workers)",
            theirs=f"{medians['peer'] / 1e6:.0f}", ours=f"{medians[order] / 1e6:.0f}",
            ratio=f"{medians[order] / medians['peer']:.1f}x", notes="",
        )  # fmt: skip


def workers(bench: Bench) -> None:
    """A whole epoch under a torch DataLoader with two workers, their start and the first batch
    included, against each of the others with two workers; and by StreamLoader, without any.
    """
    bench.server.behave()
    sides: dict[str, Callable[[], float | None]] = {
        name: partial(bench.peer, name, 2) for name in bench.peers
    }
    for name, options in OUR_WORKERS.items():
        sides[name] = partial(bench.workers, **options)
    sides["none"] = lambda: bench.ours(**WHOLE_EPOCH).get("whole_rate")
    medians = harness.medians(bench.runs, sides)
    peers = {name: medians[name] for name in bench.peers if name in medians}
    leader = max(peers, key=lambda name: peers[name])
    for name in [*OUR_WORKERS, "none"]:
        how = "StreamLoader, no workers" if name == "none" else f"DataLoader, 2 workers, {name}"
        bench.row(
            f"{how}, M tokens/s vs {leader} with 2 workers", theirs=f"{peers[leader] / 1e6:.0f}",
            ours=f"{medians[name] / 1e6:.0f}", ratio=f"{medians[name] / peers[leader]:.1f}x",
            notes=", ".join(f"{peer} {rate / 1e6:.0f}" for peer, rate in peers.items()),
        )  # fmt: skip


def first(bench: Bench) -> None:
    """Seconds from creating the loader to its first batch: cold data; resumed at 90 %."""
    for shape, behaviour in SHAPES.items():
        bench.server.behave(**behaviour)
        medians = harness.medians(
            max(3, bench.runs),
            {
                "cold": lambda: bench.ours(first_only=True).get("first"),
                "resumed": lambda: bench.ours(first_only=True, resume=0.9, num_samples=500_000).get(
                    "first"
                ),
            },
        )
        bench.row(
            f"first batch, {shape}, seconds: cold, then resumed at 90 %", theirs=f"{medians['cold']:.2f}",
            ours=f"{medians['resumed']:.2f}", ratio=f"{medians['resumed'] / medians['cold']:.2f}x", notes="from the constructor on, kernels compiled by an earlier run",
        )  # fmt: skip


def memory(bench: Bench) -> None:
    """Peak resident memory beyond the budget and beyond what the imports take."""
    bench.server.behave()
    base = bench.side("imports_only").get("peak", 0)
    for budget in (256 << 20, 1 << 30):
        peak = bench.ours(seconds=bench.seconds, storage={"memory_bytes": budget}).get("peak", 0)
        bench.row(
            f"peak memory beyond a budget of {budget >> 20} MiB and the imports, MiB", theirs=f"{base >> 20}", ours=f"{peak >> 20}",
            ratio=f"{(peak - base - budget) >> 20}", notes="imports, peak, beyond",
        )  # fmt: skip


def stalls(bench: Bench) -> None:
    """A consumer that asks at 85 % of what the shaped server gives, one request in a hundred at
    twenty times the latency.
    """
    slow = {"slow_share": 0.01, "slow_factor": 20.0}
    bench.server.behave(**SHAPES["shaped"])
    # A link of 400 MB/s, so that bandwidth, and not these two cores, is what is asked for.
    rate = 400e6
    bench.server.behave(**SHAPES["shaped"], **slow)
    result = bench.side(
        "paced", endpoint=bench.server.endpoint, prefix="s3://data/web", num_samples=10**9, bytes_per_second=0.85 * rate,
        warmup_seconds=30, seconds=bench.seconds * 30,
    )  # fmt: skip
    stats = result.get("stats", {})
    bench.row(
        "stall share at 340 MB/s, shaped, 1 % of requests at 20x latency", theirs="", ours=f"{100 * result.get('stall_share', 1):.4f} %",
        ratio="", notes=f"{waits_beside_control(result)}; {stats.get('hedges')} hedges of {stats.get('requests')}",
    )  # fmt: skip


def waits_beside_control(result: Result) -> str:
    """The longest wait of a paced consumer, and how late a process was that only sleeps."""
    control = result.get("control", {})
    return (
        f"longest wait {1e3 * result.get('worst', 0):.0f} ms, {result.get('long')} over 20 ms; "
        f"a process that only sleeps was up to {1e3 * control.get('longest', 0):.0f} ms late, "
        f"{control.get('long')} times over 20 ms"
    )


FIGURES: dict[str, Callable[[Bench], None]] = {
    function.__name__: function
    for function in (scattered, cached, stream, epoch, cpu, local, workers, first, memory, stalls)
}


def quality(bench: Bench, data: Mapping[str, int]) -> str:
    """The order's quality over 200,000 samples."""
    import streammega as sm

    prefix = str(bench.folder / "objects" / "data" / "web")
    config = sm.DataConfig(
        blend=[prefix],
        sequence_length=S,
        order="stream",
        index_cache_dir=bench.folder / "idx",
        **data,  # type: ignore[arg-type]
    )
    source = StreamSource(config, "train", 256)
    total = int(source.order.sizes.sum())
    places = places_of(source.locate(np.arange(200_000)), [np.zeros(1, np.int64)], S)
    found = shuffle_quality(places, total, 256)
    return f"{found.places_per_256:.0f} places per 256 samples, {100 * found.adjacent_share:.2f} % adjacent"


# --- the files ------------------------------------------------------------------------------------------------------------------


def prepare(folder: Path, peers: bool) -> None:
    """A corpus of 4 GiB in documents of a lognormal length; with `peers` one of 1 GiB, in our format
    and in those of the other loaders.
    """
    data = folder / "objects" / "data"
    data.mkdir(parents=True, exist_ok=True)
    (folder / "tmp").mkdir(exist_ok=True)
    if not (data / "web.idx").exists():
        write_pair(data / "web", CORPUS // 2)
    options = {"base_path": "data", "region_name": "us-east-1"}
    profile = {"storage_provider": {"type": "s3", "options": options}}
    (folder / "msc.json").write_text(json.dumps({"profiles": {"data": profile}}))
    if peers:
        if not (data / "equal.idx").exists():
            write_pair(data / "equal", EQUAL_TOKENS)
        rows = np.memmap(data / "equal.bin", np.uint16, "r").reshape(-1, S + 1)
        for name, write in (
            ("raw", write_raw),
            ("wds", write_tars),
            ("mds", write_mds),
            ("litdata", write_litdata),
        ):
            if not (data / name).exists():
                print(f"writing {name} ...", file=sys.stderr)
                write(rows, data / name)


def write_pair(prefix: Path, tokens: int) -> None:
    """So many random tokens as `.bin` and `.idx`."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(7.0, 1.0, 4_000_000), 16, 200_000).astype(np.int32)
    ends = np.cumsum(lengths, dtype=np.int64)
    lengths = lengths[: int(np.searchsorted(ends, tokens)) + 1]
    lengths[-1] -= ends[len(lengths) - 1] - tokens  # the last document is what is left
    with prefix.with_suffix(".bin").open("wb") as file:
        for at in range(0, tokens, 1 << 25):
            rng.integers(0, 65_535, min(1 << 25, tokens - at), dtype=np.uint16).tofile(file)
    with prefix.with_suffix(".idx").open("wb") as file:
        for piece in encode_index(np.dtype(np.uint16), lengths, np.arange(len(lengths) + 1), None):
            file.write(piece)


def write_raw(rows: Any, folder: Path) -> None:
    folder.mkdir()
    for at in range(0, len(rows), 8192):
        rows[at : at + 8192].tofile(folder / f"{at // 8192:05d}.bin")


def write_tars(rows: Any, folder: Path) -> None:
    folder.mkdir()
    for at in range(0, len(rows), 8192):
        with tarfile.open(folder / f"{at // 8192:06d}.tar", "w") as tar:
            for number in range(at, min(at + 8192, len(rows))):
                body = rows[number].tobytes()
                member = tarfile.TarInfo(f"{number:08d}.bin")
                member.size = len(body)
                tar.addfile(member, io.BytesIO(body))


def write_mds(rows: Any, folder: Path) -> None:
    from tools.bench.sides import stub_torchvision

    stub_torchvision()
    from streaming import MDSWriter

    with MDSWriter(
        out=str(folder), columns={"tokens": f"ndarray:uint16:{S + 1}"}, size_limit=64 << 20
    ) as writer:
        for row in rows:
            writer.write({"tokens": np.array(row)})


def write_litdata(rows: Any, folder: Path) -> None:
    code = (
        "import sys, numpy as np, torch, litdata as ld\n"
        "path, out, count, width = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])\n"
        "rows = np.memmap(path, np.uint16, 'r')[: count * width].reshape(count, width)\n"
        "def some(n):\n    return torch.from_numpy(np.array(rows[n * 256 : n * 256 + 256]).reshape(-1))\n"
        "if __name__ == '__main__':\n"
        "    ld.optimize(fn=some, inputs=list(range(count // 256)), output_dir=out, chunk_bytes='64MB', num_workers=2,\n"
        "                item_loader=ld.TokensLoader(block_size=width))\n"
    )
    script = folder.with_name("litdata_write.py")
    script.write_text(code)
    arguments = [str(folder.with_name("equal.bin")), str(folder), str(len(rows)), str(S + 1)]
    subprocess.run([sys.executable, str(script), *arguments], check=True, capture_output=True)
    script.unlink()


def plot(rows: Sequence[Result], path: Path) -> None:
    """The ratios that have one as bars, on a logarithmic scale."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    found = [
        (row["figure"], float(row["ratio"][:-1]))
        for row in rows
        if str(row.get("ratio", "")).endswith("x")
    ]
    figure, axes = plt.subplots(figsize=(10, 0.4 * len(found) + 1))
    axes.barh(
        [name for name, _ in found][::-1], [value for _, value in found][::-1], color="#3b7dd8"
    )
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xlabel("streammega / the other side")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--figures", nargs="*", choices=list(FIGURES), default=list(FIGURES))
    parser.add_argument(
        "--peers", nargs="*", choices=PEERS, default=list(PEERS), help="the other loaders"
    )
    parser.add_argument("--folder", type=Path, default=Path("/tmp/streammega-bench"))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--plot", type=Path, help="write a PNG")
    chosen = parser.parse_args()
    prepare(chosen.folder, peers=bool({"epoch", "cpu", "workers"} & set(chosen.figures)))
    print(f"{harness.machine()}; {harness.versions(PACKAGES)}; {chosen.runs} runs, medians\n")
    harness.table("figure", "other side", "streammega", "ratio", "notes")
    with running(chosen.folder / "objects") as server:
        bench = Bench(server, chosen.folder, chosen.runs, chosen.seconds, chosen.peers)
        for name in chosen.figures:
            FIGURES[name](bench)
    if chosen.plot:
        plot(bench.rows, chosen.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
