"""What one DataLoader worker gives of an iteration, and its state: where the iteration began, and
how much of it was given.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.utils.data

from streammega.errors import StateError

KEYS = ("worker", "workers", "batches", "step_samples", "reached")


@dataclass(frozen=True, kw_only=True)
class Share:
    """Micro-batches worker, worker + workers, ... of an iteration from global sample `start`, with
    steps from `origin`.

    batches: how many of them were given. reached: the position after the last of those.
    """

    start: int = 0
    origin: int = 0
    worker: int = 0
    workers: int = 1
    batches: int = 0
    reached: int = 0

    @property
    def next_batch(self) -> int:
        """Which micro-batch of the iteration comes next."""
        return self.worker + self.batches * self.workers

    @property
    def is_first_batch(self) -> bool:
        """Whether that is the first of all."""
        return self.next_batch == 0


def write_share(share: Share, step_samples: int) -> dict[str, int]:
    """What the state of a worker has beside that of a dataset."""
    values = (share.worker, share.workers, share.batches, step_samples, share.reached)
    return dict(zip(KEYS, values, strict=True))


def read_share(state: Mapping[str, Any], step_samples: int) -> Share | None:
    """The share in a state that was asked of a worker; None for a state of a whole dataset.

    Raises StateError for that of another worker, of another number of workers, or of other
    micro-steps.
    """
    if not any(name in state for name in KEYS):
        return None
    counts = []
    for name in KEYS:
        value = state.get(name)
        if type(value) is not int or value < 0:
            values = [state.get(key) for key in KEYS]
            raise StateError(
                f"{', '.join(KEYS)} of a DataLoader worker's state are counts, not {values}; "
                "the checkpoint is damaged"
            )
        counts.append(value)
    worker, workers, batches, step, reached = counts
    here = torch.utils.data.get_worker_info()
    if here is None:
        raise StateError(
            f"this is the state of DataLoader worker {worker} of {workers}; "
            "load it through the StatefulDataLoader that made it"
        )
    # workers take micro-batches in turn: with another number each would go on elsewhere
    if (here.id, here.num_workers) != (worker, workers):
        raise StateError(
            f"the state is that of DataLoader worker {worker} of {workers}, "
            f"this is worker {here.id} of {here.num_workers}; "
            f"resume with num_workers={workers}, or use StreamLoader, whose state knows no workers"
        )
    # what was given is counted in micro-steps, and means other samples when those are others
    if step != step_samples:
        raise StateError(
            f"the state of a DataLoader worker counts micro-steps of {step} samples, "
            f"this run's have {step_samples}; "
            "resume with the former micro_batch_size and dp_size, or use StreamLoader, "
            "whose state counts samples"
        )
    return Share(worker=worker, workers=workers, batches=batches, reached=reached)
