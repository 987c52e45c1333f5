#!/usr/bin/env python3
"""Several nodes on one machine: each has a network namespace, cache folders and ranks (gloo) of its
own. One object server counts what they ask for.

    .venv/bin/python tools/bench/nodes.py      # two minutes; --figures egress for one table

opening: requests by which ranks open datasets, by node. egress: bytes that the server sends for each
byte of an epoch. vanishing: two epochs over nodes that are killed, come back with damaged or lost
caches, or join; each goes on from the last checkpoint. The samples are compared with those of one
process.

Namespaces need root, or user namespaces, and `ip`. Without them all nodes share one network, which the
first line says. Reads are not hedged, so that each byte that is sent was missing.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import logging
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tools.bench import harness
from tools.bench.object_server import Running, running
from tools.bench.simulate import write_data, write_versions

WITHIN = "STREAMMEGA_BENCH_NETWORK"
"""Set where this program runs in a network of its own."""
HUB = "10.77.0.254"
CLONE_NEWNET = 0x40000000
LENGTH = 1024
GLOBAL_BATCH = 12
"""Samples of a step: three nodes and four share them alike."""
LANES = 2 * GLOBAL_BATCH
OPENED_DATASETS = 10
OPENED_SHARDS = 20
STEP_SECONDS = 0.002
SAVE_STEPS = 20
DAMAGE_EVERY = 50_000
TIMEOUT = 120.0


class Size(NamedTuple):
    """How much is done. epoch, training: tokens of the data of both. nodes: of the runs of epochs."""

    epoch: int
    training: int
    nodes: tuple[int, ...]
    ranks_per_node: int


SIZES = {
    "full": Size(256 << 20, 8 << 20, (1, 2, 4), 2),
    "small": Size(12 << 20, 1 << 20, (2,), 1),
}


# --- nodes and their ranks


class Node(NamedTuple):
    """A node. holder: the process that keeps its network namespace; None: it has none."""

    number: int
    address: str
    holder: subprocess.Popen[bytes] | None


class Cluster:
    """Nodes, their folders, and the server that they read from."""

    def __init__(self, folder: Path, nodes: Sequence[Node], server: Running) -> None:
        self.folder = folder
        self.nodes = nodes
        self.server = server
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["torch.distributed", "streammega.parallel"])
        self._runs = 0

    def cache(self, node: int) -> Path:
        """The folder of a node's caches."""
        return self.folder / f"node-{node}"

    def clear(self) -> None:
        """Empty the caches of all nodes."""
        for node in self.nodes:
            shutil.rmtree(self.cache(node.number), ignore_errors=True)

    def start(
        self, nodes: Sequence[int], ranks_per_node: int, side: Callable[..., Any], *arguments: Any
    ) -> Ranks:
        """Start `side(rank of all, size, cache folder, *arguments)` on the ranks of some nodes."""
        self._runs += 1
        folder = self.folder / f"run-{self._runs}"
        folder.mkdir()
        size = len(nodes) * ranks_per_node
        members = []
        for rank in range(size):
            node = self.nodes[nodes[rank // ranks_per_node]]
            namespace = node.holder and f"/proc/{node.holder.pid}/ns/net"
            words = (namespace, folder, rank, size, side, self.cache(node.number), arguments)
            process = self._context.Process(target=_run_rank, args=words, daemon=True)
            process.start()
            members.append(process)
        return Ranks(folder, members)

    def run(
        self, nodes: Sequence[int], ranks_per_node: int, side: Callable[..., Any], *arguments: Any
    ) -> list[Any]:
        """What all ranks of some nodes return."""
        return self.start(nodes, ranks_per_node, side, *arguments).results()

    def requests_by_node(self) -> list[float]:
        """Requests and listings so far; without namespaces, an equal part of all for each node."""
        clients = self.server.clients()
        if self.nodes[0].holder is None:
            return [sum(clients.values()) / len(self.nodes)] * len(self.nodes)
        return [clients.get(node.address, 0) for node in self.nodes]


class Ranks:
    """Ranks that run. Each leaves its result in a file of `folder`."""

    def __init__(self, folder: Path, members: Sequence[Any]) -> None:
        self.folder = folder
        self.members = members

    def results(self) -> list[Any]:
        """What each returns. Raises SystemExit if one fails or takes too long."""
        deadline = time.monotonic() + TIMEOUT
        for rank, member in enumerate(self.members):
            member.join(max(0.0, deadline - time.monotonic()))
            if member.exitcode != 0:
                self.kill(range(len(self.members)))
                raise SystemExit(f"rank {rank} ended with {member.exitcode}")
        paths = [self.folder / f"{rank}.json" for rank in range(len(self.members))]
        return [json.loads(path.read_text()) for path in paths]

    def kill(self, ranks: Sequence[int]) -> None:
        """End some by SIGKILL."""
        for rank in ranks:
            self.members[rank].kill()
        for rank in ranks:
            self.members[rank].join()


def _run_rank(
    namespace: str | None,
    folder: Path,
    rank: int,
    size: int,
    side: Callable[..., Any],
    cache: Path,
    arguments: tuple[Any, ...],
) -> None:
    """What a process of a rank does."""
    if namespace is not None:
        with open(namespace, "rb") as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    logging.getLogger("streammega").setLevel(logging.ERROR)  # hundreds of pages are damaged
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=size
    )
    try:
        result = side(rank, size, cache, *arguments)
    except RuntimeError as error:
        if "gloo" not in str(error):
            raise
        sys.exit("another rank is gone")  # the run is ended by then
    (folder / f"{rank}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


@contextlib.contextmanager
def nodes_of(count: int) -> Iterator[list[Node]]:
    """Nodes, each with a namespace that is connected to this one if this program has its own."""
    holders: list[subprocess.Popen[bytes]] = []
    try:
        if WITHIN not in os.environ:
            yield [Node(number, "127.0.0.1", None) for number in range(count)]
            return
        _ip("link set lo up")
        _ip("link add hub type bridge")
        _ip(f"addr add {HUB}/24 dev hub")
        _ip("link set hub up")
        nodes = []
        for number in range(count):
            # It ends with its input, so also if this process is killed.
            holder = subprocess.Popen(["unshare", "--net", "cat"], stdin=subprocess.PIPE)
            holders.append(holder)
            nodes.append(Node(number, f"10.77.0.{number + 1}", holder))
            _wait_for_namespace(holder.pid)
            _ip(f"link add node{number} type veth peer name eth0 netns {holder.pid}")
            _ip(f"link set node{number} master hub up")
            for words in (
                f"addr add {nodes[-1].address}/24 dev eth0",
                "link set eth0 up",
                "link set lo up",
            ):
                _ip(words, holder.pid)
        yield nodes
    finally:
        for holder in holders:
            holder.kill()
            holder.wait()


def _wait_for_namespace(pid: int) -> None:
    """Until `unshare` has done its work."""
    own = os.readlink("/proc/self/ns/net")
    while os.readlink(f"/proc/{pid}/ns/net") == own:
        time.sleep(0.01)


def _ip(words: str, pid: int | None = None) -> None:
    within = ["nsenter", f"--net=/proc/{pid}/ns/net"] if pid else []
    subprocess.run([*within, "ip", *words.split()], check=True)


def enter_own_network() -> str:
    """Start this program again in a network namespace. Returns why that is not possible."""
    if WITHIN in os.environ:
        return ""
    command = ["unshare", "--net"]
    if os.geteuid():
        command += ["--user", "--map-root-user"]
    try:
        probe = "ip link add probe type bridge && unshare --net true"
        done = subprocess.run(
            [*command, "sh", "-c", probe], capture_output=True, text=True, check=False
        )
    except OSError as error:
        return str(error)
    if done.returncode:
        return done.stderr.strip()
    os.execvpe(command[0], [*command, sys.executable, *sys.argv], {**os.environ, WITHIN: "1"})


# --- opening


def open_all(rank: int, size: int, cache: Path, options: dict[str, Any], way: str) -> int:
    """Open ten datasets in one of the ways; returns how many there are."""
    from streammega import DataConfig, ParallelLayout, Ranks, StorageConfig, StreamLoader
    from streammega.parallel import open_loader

    config = DataConfig(
        blend=[f"s3://opened/d{number}" for number in range(OPENED_DATASETS)],
        sequence_length=LENGTH,
        storage=StorageConfig(storage_options=options, cache_dir=cache).tuned(
            hedge_requests=False, resident_bytes=0
        ),
    )
    sizes: dict[str, Any] = {"micro_batch_size": 1, "global_batch_size": size}
    if way == "together":
        with open_loader(config, Ranks(ParallelLayout(dp=size)), **sizes) as loader:
            return len(loader.dataset.samples.files)
    with StreamLoader(config, dp_rank=rank, dp_size=size, **sizes) as loader:
        return len(loader.dataset.samples.files)


def opening(cluster: Cluster, size: Size) -> dict[str, Any]:
    """Requests of nodes until all ranks are open, for each way to open."""
    nodes = range(max(size.nodes))
    ranks = max(2, size.ranks_per_node)
    harness.table(
        f"{len(nodes)} nodes of {ranks} ranks open {OPENED_DATASETS} datasets",
        "requests",
        "by node",
    )
    results = {}
    for way in ("each", "together"):
        cluster.clear()
        before = cluster.requests_by_node()
        cluster.run(nodes, ranks, open_all, cluster.server.storage_options, way)
        after = cluster.requests_by_node()
        sent = [int(last - first) for last, first in zip(after, before, strict=True)][: len(nodes)]
        results[way] = sent
        title = {"each": "each rank asks", "together": "one for all"}
        harness.row(title[way], sum(sent), ", ".join(map(str, sent)))
    cluster.server.behave()
    print(flush=True)
    return results


# --- epochs


def config_of(
    bucket: str, options: dict[str, Any], cache: Path, samples: int, *, has_pages: bool
) -> Any:
    """The data of epochs: blocks of the default size."""
    from streammega import DataConfig, StorageConfig

    return DataConfig(
        blend=[f"s3://{bucket}/web", f"s3://{bucket}/code"],
        sequence_length=LENGTH,
        order="stream",
        shuffle_lanes=LANES,
        shuffle_block_bytes=256 << 10,
        split="1,0,0",
        num_samples=(samples, 0, 0),
        storage=StorageConfig(
            storage_options=options, cache_dir=cache, cache_max_bytes=64 << 30 if has_pages else 0
        ).tuned(hedge_requests=False, resident_bytes=0),
    )


def read_epoch(
    rank: int, size: int, cache: Path, options: dict[str, Any], samples: int, has_pages: bool
) -> int:
    """Read an epoch; returns its micro-batches."""
    from streammega import ParallelLayout, Ranks
    from streammega.parallel import open_loader

    config = config_of("epoch", options, cache, samples, has_pages=has_pages)
    sizes = {"micro_batch_size": 1, "global_batch_size": 2 * GLOBAL_BATCH}
    with open_loader(config, Ranks(ParallelLayout(dp=size)), **sizes) as loader:
        return sum(1 for _ in loader)


def samples_of(tokens: int, batch: int) -> int:
    """The samples of an epoch, in whole global batches."""
    return (tokens - 1) // LENGTH // batch * batch


def egress(cluster: Cluster, size: Size) -> dict[str, Any]:
    """Bytes sent for each byte of an epoch."""
    server = cluster.server
    samples = samples_of(size.epoch, 2 * GLOBAL_BATCH)
    columns = ("without page caches", "with page caches", "again, filled")
    harness.table(f"an epoch of {2 * size.epoch / 1e6:.0f} MB", *columns)
    results = {}
    for nodes in size.nodes:
        cluster.clear()
        ratios = []
        for has_pages in (False, True, True):
            before = server.counts()["bytes"]
            cluster.run(
                range(nodes),
                size.ranks_per_node,
                read_epoch,
                server.storage_options,
                samples,
                has_pages,
            )
            sent = server.counts()["bytes"] - before
            ratios.append(sent / (2 * LENGTH * samples))
        results[str(nodes)] = ratios
        title = f"nodes: {nodes}, ranks of each: {size.ranks_per_node}"
        harness.row(title, *(f"{ratio:.3f}" for ratio in ratios))
    print(flush=True)
    return results


# --- nodes that vanish


def train(
    rank: int,
    size: int,
    cache: Path,
    options: dict[str, Any],
    samples: int,
    folder: Path,
    part: int,
) -> int:
    """Take steps from the last checkpoint to the end, and save every few steps. Returns the samples
    at the end. Digests of samples are in a file of each part and rank, with their places.
    """
    import torch
    import torch.distributed as dist

    from streammega import ParallelLayout, Ranks, get_batch
    from streammega.parallel import open_loader

    config = config_of("training", options, cache, samples, has_pages=True)
    ranks = Ranks(ParallelLayout(dp=size))
    sizes = {"micro_batch_size": 1, "global_batch_size": GLOBAL_BATCH}
    checkpoint = folder / "checkpoint.json"
    consumed = 0
    with (
        open_loader(config, ranks, **sizes) as loader,
        open(folder / f"{part}-{rank}.digests", "wb", buffering=0) as file,
    ):
        if checkpoint.exists():
            saved = json.loads(checkpoint.read_text())
            loader.load_state_dict(saved["loader"])
            consumed = saved["consumed"]
        while consumed < samples:
            for _ in range(GLOBAL_BATCH // size):
                tokens = get_batch(loader, ranks)["tokens"]
                digest = xxhash.xxh3_64_intdigest(tokens.numpy().tobytes())
                file.write(np.array([consumed + rank, digest], np.uint64).tobytes())
                consumed += size
            time.sleep(STEP_SECONDS)
            dist.all_reduce(torch.zeros(1))  # as for gradients
            if rank == 0 and consumed % (SAVE_STEPS * GLOBAL_BATCH) == 0:
                text = json.dumps({"consumed": consumed, "loader": loader.state_dict()})
                (folder / "new").write_text(text)
                os.replace(folder / "new", checkpoint)
    return consumed


def read_alone(
    rank: int, size: int, cache: Path, options: dict[str, Any], samples: int
) -> list[int]:
    """Digests of all samples, read by one process."""
    from streammega import StreamLoader

    config = config_of("training", options, cache, samples, has_pages=False)
    with StreamLoader(config, micro_batch_size=1, global_batch_size=GLOBAL_BATCH) as loader:
        return [xxhash.xxh3_64_intdigest(batch["tokens"].numpy().tobytes()) for batch in loader]


def damage(cache: Path) -> int:
    """Write over some bytes of each file of a page cache; returns how many files there were."""
    paths = list(cache.glob("chunks/*/*.data"))
    for path in paths:
        with open(path, "r+b") as file:
            for at in range(0, path.stat().st_size - 64, DAMAGE_EVERY):
                file.seek(at)
                file.write(bytes(64))
    return len(paths)


def vanishing(cluster: Cluster, size: Size) -> dict[str, Any]:
    """Two epochs over 4, 3, 4 and 4 nodes. Nodes are killed after a quarter, the half and three
    quarters of all samples.
    """
    options = cluster.server.storage_options
    samples = 2 * samples_of(size.training, GLOBAL_BATCH)
    folder = cluster.folder / "training"
    folder.mkdir()
    cluster.clear()
    expected = cluster.run([0], 1, read_alone, options, samples)[0]
    harness.table(f"two epochs, {samples:,} samples", "nodes", "from sample", "after that")
    events = (
        ([0, 1, 2, 3], "node 3 is killed"),
        ([0, 1, 2], "node 1 is killed; its cache is damaged, that of node 3 lost"),
        ([0, 1, 2, 3], "all are killed"),
        ([0, 1, 2, 3], "the end"),
    )
    found: dict[int, int] = {}
    for part, (nodes, event) in enumerate(events):
        began = _consumed(folder)
        ranks = cluster.start(nodes, 1, train, options, samples, folder, part)
        if part == len(events) - 1:
            ranks.results()
        else:
            _wait_for_samples(folder, (part + 1) * samples // 4, ranks)
            killed = {0: [3], 1: [1], 2: [0, 1, 2, 3]}[part]
            ranks.kill([nodes.index(node) for node in killed])
            ranks.kill(range(len(nodes)))  # as a launcher ends the others
        if part == 1:
            if not damage(cluster.cache(1)):
                raise SystemExit("node 1 has no cache to damage")
            shutil.rmtree(cluster.cache(3))
        # What was read after the checkpoint is read again: both times it must be the same.
        for path in sorted(folder.glob(f"{part}-*.digests")):
            pairs = np.fromfile(path, np.uint64)
            for place, digest in pairs[: len(pairs) // 2 * 2].reshape(-1, 2).tolist():
                if found.setdefault(place, digest) != digest:
                    raise SystemExit(f"sample {place} of part {part} is another one than before")
        harness.row(f"part {part + 1}", ", ".join(map(str, nodes)), f"{began:,}", event)
    same = sum(found.get(place) == digest for place, digest in enumerate(expected))
    print(f"\n{same:,} of {len(expected):,} samples are those of one process, in their order\n")
    return {"samples": len(expected), "same": same, "places": len(found)}


def _consumed(folder: Path) -> int:
    checkpoint = folder / "checkpoint.json"
    return int(json.loads(checkpoint.read_text())["consumed"]) if checkpoint.exists() else 0


def _wait_for_samples(folder: Path, samples: int, ranks: Ranks) -> None:
    """Until a checkpoint has so many samples, or the ranks have ended."""
    deadline = time.monotonic() + TIMEOUT
    while _consumed(folder) < samples and any(member.is_alive() for member in ranks.members):
        if time.monotonic() > deadline:
            raise SystemExit("the ranks do not go on")
        time.sleep(0.01)


FIGURES = {"opening": opening, "egress": egress, "vanishing": vanishing}


def write_random_data(root: Path, tokens: int) -> None:
    """Two datasets of random tokens, one three times as large as the other."""
    from streammega import IndexedDatasetWriter

    root.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for name, part in (("web", 3 * tokens // 4), ("code", tokens // 4)):
        with IndexedDatasetWriter(str(root / name), np.uint16) as writer:
            for _ in range(16):
                document = rng.integers(0, 1 << 16, part // 16, np.uint16)
                writer.add_document(document, [len(document)])


def main() -> int:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--figures", nargs="+", choices=FIGURES, default=list(FIGURES))
    options.add_argument("--size", choices=SIZES, default="full", help="of the data (%(default)s)")
    options.add_argument("--json", action="store_true", help="print the figures as JSON too")
    chosen = options.parse_args()
    reason = enter_own_network()
    size = SIZES[chosen.size]
    folder = Path(tempfile.mkdtemp(prefix="streammega-nodes-"))
    results: dict[str, Any] = {"network": reason or "namespaces"}
    try:
        shards = {f"d{number}": 100_000 for number in range(OPENED_DATASETS)}
        write_data(folder / "objects" / "opened", shards, OPENED_SHARDS)
        write_random_data(folder / "objects" / "epoch", size.epoch)
        write_random_data(folder / "objects" / "training", size.training)
        network = f"no namespaces ({reason})" if reason else "a network namespace for each node"
        print(f"{harness.machine()}; {network}\n", flush=True)
        host = "127.0.0.1" if reason else HUB
        with nodes_of(4) as nodes, running(folder / "objects", host) as server:
            write_versions(folder / "objects" / "opened", "s3://opened", server.storage_options)
            cluster = Cluster(folder, nodes, server)
            for name in chosen.figures:
                results[name] = FIGURES[name](cluster, size)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if chosen.json:
        harness.print_result(results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
