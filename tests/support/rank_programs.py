"""What tests run as ranks: functions of (rank, ...) that return plain values.

They import nothing slow.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from streammega import (
    DataConfig,
    ParallelLayout,
    RankBatches,
    Ranks,
    get_batch,
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
