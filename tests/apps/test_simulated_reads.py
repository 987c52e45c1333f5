"""Simulated reads against those of a loader on a server."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streammega import (
    DataConfig,
    StorageConfig,
    StreamLoader,
    StreammegaError,
)
from streammega.apps.simulated_reads import (
    DOCUMENT_TOKENS,
    SimulatedReads,
    make_manifest,
    simulate_reads,
)
from streammega.dataset.names import MANIFEST
from streammega.dataset.opening import open_manifests
from streammega.storage.backends.obstore import ObstoreStore
from tests.support.builders import write_dataset, write_lengths, write_manifest
from tools.bench.object_server import running

LENGTH = 64
SHARDS = 10
"""More than are looked up one by one, so that they are listed."""
RANKS = 2
BATCHES = 60


def write_sharded(root: Path, name: str, documents: int) -> None:
    rng = np.random.default_rng(len(name))
    names = [f"{name}-{number}" for number in range(SHARDS)]
    for shard in names:
        lengths = rng.integers(1, 400, documents)
        write_dataset(
            root / shard, [rng.integers(0, 60_000, size).astype(np.uint16) for size in lengths]
        )
    write_manifest(root / name, names)


def config_of(storage: StorageConfig, folder: str, **settings: Any) -> DataConfig:
    return DataConfig(
        blend=[(f"{folder}/web", 0.7), (f"{folder}/code", 0.3)],
        sequence_length=LENGTH,
        order="stream",
        shuffle_lanes=16,
        shuffle_block_bytes=2048,
        storage=storage,
        **settings,
    )


def simulate(config: DataConfig, datasets: Any, **changes: Any) -> SimulatedReads:
    settings: dict[str, Any] = {
        "latency": 0.002,
        "connection_rate": 90e6,
        "rank_rate": 1e9,
        "request_rate": 1e6,
        "micro_batch_size": 2,
        "global_batch_size": 8,
        "dp_size": RANKS,
        "dp_ranks": range(RANKS),
        "num_batches": BATCHES,
        "batch_seconds": 0.01,
    }
    return simulate_reads(datasets, config, **settings | changes)


def sizes(config: DataConfig, tokens: int) -> dict[str, list[int]]:
    assert not isinstance(config.blend, str)
    return {entry[0]: [tokens] * SHARDS for entry in config.blend or ()}


@pytest.mark.guarantee("simulate-same-requests")
def test_ranks_send_the_requests_that_were_simulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = count_requests(monkeypatch)
    folder = tmp_path / "bucket"
    folder.mkdir()
    write_sharded(folder, "web", 60)
    write_sharded(folder, "code", 30)
    with running(tmp_path) as server:
        storage = StorageConfig(storage_options=server.storage_options).tuned(hedge_requests=False)
        for name in ("web", "code"):  # as it is where convert wrote into the bucket
            (manifest,) = open_manifests([f"s3://bucket/{name}"], storage)
            (folder / f"{name}{MANIFEST}").write_bytes(manifest.to_json())
        config = config_of(storage, "s3://bucket", num_samples=(BATCHES * 2 * RANKS, 0, 0))
        counted = [read_rank(config, rank, sent, tmp_path) for rank in range(RANKS)]
    datasets = {
        f"s3://bucket/{name}": (folder / f"{name}.manifest.json").read_bytes()
        for name in ("web", "code")
    }
    simulated = simulate(config, datasets)
    for (opening, requests, nbytes, useful), rank in zip(counted, simulated.ranks, strict=True):
        assert opening == simulated.opening.requests.sum()
        assert requests == len(rank.nbytes)
        assert nbytes == rank.nbytes.sum()
        assert useful == rank.useful_bytes


def count_requests(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list to which each request of obstore's clients adds the name of its call."""
    sent: list[str] = []
    open_client = ObstoreStore._open_client

    class Counted:
        def __init__(self, client: Any) -> None:
            self.client = client

        def __getattr__(self, name: str) -> Any:
            call = getattr(self.client, name)

            def counted(*arguments: Any, **options: Any) -> Any:
                sent.extend([name] * len(options.get("starts", "1")))
                return call(*arguments, **options)

            return counted

    monkeypatch.setattr(
        ObstoreStore, "_open_client", lambda *arguments: Counted(open_client(*arguments))
    )
    return sent


def read_rank(
    config: DataConfig, rank: int, sent: list[str], tmp_path: Path
) -> tuple[int, int, int, int]:
    """Requests to open, and requests and bytes of all batches of a rank."""
    config = replace(config, storage=config.storage.changed(cache_dir=tmp_path / f"cache-{rank}"))
    before = len(sent)
    with StreamLoader(
        config, micro_batch_size=2, global_batch_size=8, dp_rank=rank, dp_size=RANKS
    ) as loader:
        opening = len(sent) - before
        assert sum(1 for _ in loader) == BATCHES
        stats = loader.stats()
    return opening, stats["requests"], stats["fetched_bytes"], stats["useful_bytes"]


def test_the_memory_that_was_simulated_is_held(tmp_path: Path) -> None:
    """Of one micro-batch: no thread is ahead of another."""
    folder = tmp_path / "bucket"
    folder.mkdir()
    datasets = {}
    for name in ("web", "code"):
        write_sharded(folder, name, 30)
        datasets[f"s3://bucket/{name}"] = (folder / f"{name}.manifest.json").read_bytes()
    sizes: dict[str, Any] = {"micro_batch_size": 2, "global_batch_size": 4, "dp_size": RANKS}
    with running(tmp_path) as server:
        storage = StorageConfig(storage_options=server.storage_options).tuned(hedge_requests=False)
        config = config_of(storage, "s3://bucket", num_samples=(4, 0, 0))
        with StreamLoader(config, **sizes, dp_rank=0) as loader:
            assert sum(1 for _ in loader) == 1
            held = loader.stats()["most_held_bytes"]
    (rank,) = simulate(config, datasets, **sizes, dp_ranks=[0], num_batches=1).ranks
    assert rank.memory_bytes == held


@pytest.mark.guarantee("simulate-limits")
def test_slow_storage_makes_the_first_batch_late_and_steps_wait() -> None:
    config = config_of(StorageConfig(), "s3://bucket")
    quick = simulate(config, sizes(config, 20_000))
    for change in ({"request_rate": 20.0}, {"rank_rate": 1e4}, {"latency": 0.05}):
        slow = simulate(config, sizes(config, 20_000), num_batches=900, **change)
        assert slow.ranks[0].first_batch > 5 * quick.ranks[0].first_batch
        is_bound = "latency" not in change  # which reading ahead hides
        assert (slow.ranks[0].waited[1:].sum() > 0) == is_bound
        assert slow.ranks[0].first_batch == slow.ranks[0].waited[0]
    assert quick.ranks[0].waited[1:].sum() == 0


def test_the_opening_and_the_first_batch_wait_for_the_processor_that_requests_need() -> None:
    config = config_of(StorageConfig(), "s3://bucket")
    busy = 0.02
    slow = simulate(config, sizes(config, 20_000), request_seconds=busy)
    assert slow.opening.seconds >= busy * slow.opening.requests.sum()
    first = slow.ranks[0]
    assert first.sent.tolist()[:3] == pytest.approx([0, busy, 2 * busy])


def test_requests_of_the_opening_are_those_of_each_dataset() -> None:
    config = config_of(StorageConfig(), "s3://bucket")
    web, code = simulate(config, sizes(config, 20_000)).opening.requests.tolist()
    assert web == code > 0


def test_a_dataset_of_which_only_the_size_is_known_has_the_manifest_of_a_converted_one(
    tmp_path: Path,
) -> None:
    write_lengths(str(tmp_path / "web-00000"), [DOCUMENT_TOKENS] * 20)
    write_manifest(tmp_path / "web", ["web-00000"])
    stored = json.loads((tmp_path / "web.manifest.json").read_bytes())
    (shard,) = json.loads(make_manifest("web", [20 * DOCUMENT_TOKENS], "uint16"))["shards"]
    for name, value in stored["shards"][0].items():
        assert shard[name] == value or "checksums" in name
        assert np.shape(shard[name]) == np.shape(value)


def test_memory_that_is_too_small_is_named_with_what_is_enough() -> None:
    config = config_of(StorageConfig(memory_bytes=100_000), "s3://bucket")
    (rank,) = simulate(config, sizes(config, 20_000), dp_ranks=[0]).ranks
    assert rank.enough_bytes > 100_000
    assert rank.memory_bytes <= 100_000
    more = replace(config, storage=StorageConfig(memory_bytes=rank.enough_bytes))
    assert simulate(more, sizes(config, 20_000), dp_ranks=[0]).ranks[0].enough_bytes == 0


def test_a_simulation_is_the_same_again() -> None:
    config = config_of(StorageConfig(), "s3://bucket")
    first, second = [simulate(config, sizes(config, 20_000)) for _ in range(2)]
    for one, other in zip(first.ranks, second.ranks, strict=True):
        np.testing.assert_array_equal(one.sent, other.sent)
        np.testing.assert_array_equal(one.step_end, other.step_end)
        assert one.memory_bytes == other.memory_bytes


WRONG: list[tuple[dict[str, Any], Any, str]] = [
    ({"order": "megatron"}, None, "stream order"),
    ({}, {"s3://bucket/web": [10_000]}, "code of the blend has no size"),
    ({}, {"s3://bucket/web": b"{}", "s3://bucket/code": [10_000]}, "not a manifest"),
    ({}, {"s3://bucket/web": [10], "s3://bucket/code": [10_000]}, "holds no sample"),
]


@pytest.mark.parametrize(("settings", "datasets", "message"), WRONG)
def test_what_cannot_be_simulated_is_refused(
    settings: dict[str, Any], datasets: Any, message: str
) -> None:
    config = replace(config_of(StorageConfig(), "s3://bucket"), **settings)
    if settings:
        config = replace(config, shuffle_lanes=None, shuffle_block_bytes=None)
    with pytest.raises(StreammegaError, match=message):
        simulate(config, datasets or sizes(config, 20_000))


@pytest.mark.parametrize(
    "wrong",
    [
        {"latency": -1.0},
        {"connection_rate": 0.0},
        {"rank_rate": -1.0},
        {"request_rate": 0.0},
        {"batch_seconds": 0.0},
        {"num_batches": 0},
        {"dp_ranks": []},
        {"dp_ranks": [0, 99]},
    ],
)
def test_arguments_that_no_cluster_has_are_refused(wrong: dict[str, Any]) -> None:
    config = config_of(StorageConfig(), "s3://bucket")
    with pytest.raises(StreammegaError, match=r"dp_ranks|positive"):
        simulate(config, sizes(config, 20_000), **wrong)


def test_compressed_shards_are_refused_with_what_to_do(tmp_path: Path) -> None:
    write_dataset(tmp_path / "web", [np.arange(100, dtype=np.uint16)])
    write_manifest(tmp_path / "web", ["web"])
    stored = (tmp_path / "web.manifest.json").read_bytes()
    body = stored.replace(b'"kind": "bin"', b'"kind": "zst"')
    config = replace(config_of(StorageConfig(), "s3://bucket"), blend=["s3://bucket/web"])
    with pytest.raises(StreammegaError, match="give its size in tokens"):
        simulate(config, {"s3://bucket/web": body})
