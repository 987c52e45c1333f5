"""What tests run as ranks: functions of (rank, ...) that return plain values.

They import nothing slow.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import time
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from streammega import (
    DataConfig,
    ParallelLayout,
    RankBatches,
    Ranks,
    StreamLoader,
    StreammegaError,
    get_batch,
    open_together,
)
from streammega.parallel import open_loader
from streammega.storage.derived_stores import ConcatStore


def read_batches(
    rank: int,
    layout: ParallelLayout,
    config: DataConfig,
    sizes: dict[str, Any],
    steps: int,
    ahead: int,
    every_stage: bool,
) -> dict[str, Any]:
    """The first micro-batches of a rank, its state after them, and what was sent
    and read for them.
    """
    ranks = Ranks(layout)
    with open_loader(config, ranks, **sizes) as loader:
        if ahead:
            batches = RankBatches(loader, ranks, every_stage=every_stage, ahead=ahead)
            got = list(itertools.islice(batches, steps))
            state = batches.state_dict()
            sent = batches.broadcast_bytes
            batches.close()
        else:
            got = [get_batch(loader, ranks, every_stage=every_stage) for _ in range(steps)]
            state = loader.state_dict()
            sent = 0
        return {
            "at": ranks.at,
            "batches": [
                {name: field.clone().numpy() for name, field in batch.items()} for batch in got
            ],
            "state": state,
            "sent": sent,
            "planned": loader.stats()["batches"],
        }


def open_and_read(
    rank: int, layout: ParallelLayout, config: DataConfig, sizes: dict[str, Any], steps: int
) -> dict[str, Any]:
    """The identity of what a rank opened, and whether it has a client to the bucket after so many
    micro-batches.
    """
    ranks = Ranks(layout)
    with open_loader(config, ranks, **sizes) as loader:
        for _ in range(steps):
            get_batch(loader, ranks)
        files = [file for files in loader.dataset.samples.files for file in files]
        stores = [file.store for file in files if not isinstance(file.store, ConcatStore)]
        return {
            "identity": loader.state_dict()["order"],
            "stores_used": any(store.inner._opened for store in stores),  # type: ignore[attr-defined]
        }


def train(
    rank: int, run_file: str, overrides: list[str], steps: int | None, device: str = "cpu"
) -> list[dict[str, Any]]:
    """Train (or resume) a run on this world's ranks to its end, or for some steps; the records of
    rank 0. device: ranks may share one.
    """
    from streammega.train.config import load_run
    from streammega.train.trainer import Trainer

    trainer = Trainer(load_run(run_file, overrides), torch.device(device))
    trainer.resume()
    if steps is None:
        trainer.run()
        return []
    records = []
    for _ in range(steps):
        record, _stop = trainer.train_step()
        trainer.step += 1
        records.append(record)
    trainer.save()
    trainer.close()
    return records if rank == 0 else []


def free_ports(count: int) -> int:
    """The first of so many ports in a row, below those that connections get."""
    for first in range(20_000 + os.getpid() % 1000, 32_000, count):
        with contextlib.ExitStack() as reserved, contextlib.suppress(OSError):
            for port in range(first, first + count):
                reserved.enter_context(socket.create_server(("127.0.0.1", port)))
            return first
    raise AssertionError("no ports are free")


def watch_slow_forward(
    rank: int, run_file: str, overrides: list[str], slow_rank: int, device: str = "cpu"
) -> dict[str, Any]:
    """What `top` reports on rank 0 after some steps in which one rank computes a tenth of a second longer
    in each forward.
    """
    from streammega.apps.metrics import Watch
    from streammega.train.config import load_run
    from streammega.train.trainer import Trainer

    size = dist.get_world_size()
    ports = [free_ports(size) if rank == 0 else 0]
    dist.broadcast_object_list(ports)
    config = load_run(run_file, [*overrides, f"train.metrics_port={ports[0]}"])
    with mock.patch.dict(os.environ, RANK=str(rank)):  # each rank has a port of its own
        trainer = Trainer(config, torch.device(device))
    watch = Watch([f"127.0.0.1:{ports[0]}-{ports[0] + size - 1}"])

    def slow_down(*_: Any) -> None:
        if device == "cpu":
            time.sleep(0.1)
        else:
            torch.cuda._sleep(200_000_000)

    if rank == slow_rank:
        trainer.model.chunks[0].register_forward_pre_hook(slow_down)
    trainer.train_step()
    watch.look()
    dist.barrier()
    for _ in range(4):
        trainer.train_step()
    watch.look()
    dist.barrier()
    trainer.close()
    return watch.report()


def error_of_opening(
    rank: int, layout: ParallelLayout, config: DataConfig, sizes: dict[str, Any]
) -> str:
    """The error that a rank gets when it opens."""
    try:
        open_loader(config, Ranks(layout), **sizes).close()
    except StreammegaError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def open_loaders_together(rank: int, config: DataConfig, sizes: dict[str, Any]) -> Any:
    """The identity of what a rank opens with the config that all ranks opened."""
    with StreamLoader(open_together(config), dp_size=1, **sizes) as loader:
        return loader.state_dict()["order"]
