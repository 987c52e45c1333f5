"""What tests run as ranks: functions of (rank, ...) that return plain values.

They import nothing slow.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist

from streammega import (
    DataConfig,
    IndexedDataset,
    ParallelLayout,
    RankBatches,
    Ranks,
    StorageConfig,
    StreamLoader,
    StreammegaError,
    get_batch,
    open_together,
)
from streammega.parallel import open_loader


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
        stores = [file.store for files in loader.dataset.samples.files for file in files]
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


def error_of_opening(
    rank: int, layout: ParallelLayout, config: DataConfig, sizes: dict[str, Any]
) -> str:
    """The error that a rank gets when it opens."""
    try:
        open_loader(config, Ranks(layout), **sizes).close()
    except StreammegaError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def open_alone(rank: int, config: DataConfig, sizes: dict[str, Any], dp_size: int) -> Any:
    """The identity of what a rank opens without the others."""
    dist.barrier()
    with StreamLoader(config, dp_rank=rank, dp_size=dp_size, **sizes) as loader:
        return loader.state_dict()["order"]


def open_documents_together(rank: int, name: str, storage: StorageConfig) -> int:
    """How many documents a rank sees of a dataset that all ranks open."""
    return len(open_together(lambda: IndexedDataset(name, storage)))
