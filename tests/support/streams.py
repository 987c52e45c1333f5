"""Two local datasets, the streams that are drawn from them, and what a server does wrong meanwhile."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from streammega import DataConfig, StorageConfig, StreamLoader
from tests.support.builders import write_dataset
from tests.support.oss_server import Oss
from tools.bench.object_server import Running

LENGTH = 64
FAULTS: dict[str, dict[str, Any]] = {
    "503 bursts": {"error_share": 0.02, "error_burst": 6},
    "resets": {"reset_share": 0.15},
    "truncation": {"truncate_share": 0.2},
    "stalls": {"stall_share": 0.04},
    "over-long bodies": {"overlong_share": 0.2},
    "slow first byte": {"slow_share": 0.05, "latency": 0.005, "slow_factor": 60.0},
    "mixture": {
        "error_share": 0.01, "reset_share": 0.01, "truncate_share": 0.01, "overlong_share": 0.01, "stall_share": 0.005,
        "slow_share": 0.005, "latency": 0.002,
    },
}  # fmt: skip


def write_data(root: Path) -> None:
    rng = np.random.default_rng(5)
    for name in ("web", "code"):
        write_dataset(
            root / "data" / name,
            [rng.integers(0, 60_000, rng.integers(1, 600)).astype(np.uint16) for _ in range(400)],
        )


def config_of(
    order: str, root: str, cache: Path, storage: StorageConfig, samples: int = 3000
) -> DataConfig:
    return DataConfig(
        blend=[(f"{root}/data/web", 0.7), (f"{root}/data/code", 0.3)],
        sequence_length=LENGTH,
        order=order,  # type: ignore[arg-type]
        num_samples=(samples, 0, 0),
        shuffle_lanes=16 if order == "stream" else None,
        shuffle_block_bytes=2048,
        storage=storage if storage.cache_dir else storage.changed(cache_dir=cache),
    )


def storage_of(server: Running, transport: str) -> StorageConfig:
    """How to reach a server for benches: see impatient."""
    return impatient(server.storage_options, transport)


def impatient(options: dict[str, Any], transport: str, read_timeout: float = 0.4) -> StorageConfig:
    """Small requests that are tried again soon: so that each fault happens, and none is waited for.
    No dataset stays in memory, however small.

    read_timeout: in seconds; what a server needs for an answer on a machine with much to do.
    """
    return StorageConfig(
        transport=transport,  # type: ignore[arg-type]
        storage_options=options,
        request_timeout=20,
        max_concurrent_requests=16,
        memory_bytes=400_000,
    ).tuned(
        max_request_bytes=4096,
        read_timeout=read_timeout,
        max_retries=12,
        coalesce_gap_bytes=512,
        resident_bytes=0,
    )


def blend_of(root: Path) -> list[tuple[str, float]]:
    """What config_of draws from, in a local folder."""
    return [(f"{root}/data/web", 0.7), (f"{root}/data/code", 0.3)]


def rows_of(batches: Iterable[dict[str, torch.Tensor]]) -> torch.Tensor:
    """Tokens beside labels of all batches, a sample a row."""
    rows = [torch.cat([batch["tokens"], batch["labels"]], 1) for batch in batches]
    return torch.cat(rows)


def stream(config: DataConfig) -> torch.Tensor:
    """All samples of a run of one rank."""
    with StreamLoader(config, micro_batch_size=4, global_batch_size=8) as loader:
        return rows_of(loader)


def check_that_faults_change_no_token(
    server: Running | Oss, remote: DataConfig, local: Path, fault: str
) -> None:
    """Read `remote` from a server that has the fault of this name, and the same from `local`."""
    expected = stream(replace(remote, blend=blend_of(local)))
    loader = StreamLoader(remote, micro_batch_size=4, global_batch_size=8)
    server.behave(**FAULTS[fault])
    before = server.counts()["faults"]
    with loader:
        got = rows_of(loader)
    assert torch.equal(got, expected)
    assert server.counts()["faults"] > before, "the fault did not happen: the test shows nothing"


def rank_loaders(
    config: DataConfig, ranks: int, micro_batch_size: int, global_batch_size: int
) -> list[StreamLoader]:
    """One of each rank."""
    return [
        StreamLoader(
            config,
            micro_batch_size=micro_batch_size,
            global_batch_size=global_batch_size,
            dp_rank=rank,
            dp_size=ranks,
            prefetch=1,
        )
        for rank in range(ranks)
    ]
