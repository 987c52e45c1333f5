"""Where the iterations of a dataset begin: a few numbers in memory that it shares with its
DataLoader workers.

The first iteration after `put` begins there, every other at the first sample. Workers begin by
themselves, in processes that the dataset does not see, before or after each other; so the workers
of one iteration must come to the same answer, and those of the next to another one.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import get_worker_info
from torch.utils.data._utils.worker import WorkerInfo

from streammega.errors import StateError

# The numbers, by their places.
GENERATION = 0
"""How often the dataset was put somewhere."""
BASE = 1
LANES = 2
ORIGIN = 3
"""Where it was put: a global sample, and in which order and steps it is counted."""
CLAIM = 4
"""Which iteration of workers took BASE; -1: none."""
START = 5
"""Where the last iteration began."""
BY_WORKERS = 6
"""Whether it runs in workers: 1 or 0."""
TAKEN = 7
"""And after: for each worker number, the generation whose BASE it took, plus one."""
MOST_WORKERS = 1024
"""Workers beyond these cannot be told apart from those of a second iteration with the same seed;
nobody has so many.
"""
NOBODY = -1
"""Has claimed BASE."""
_POSITIVE = (1 << 62) - 1
"""The bits of a claim: never negative, as NOBODY is."""


@dataclass(frozen=True, kw_only=True)
class Begun:
    """An iteration that began: at global sample `start`, of the order of `lanes` (0: as it is),
    with steps from `origin`.

    number: which of the iterations of this process.
    """

    generation: int
    number: int
    start: int
    lanes: int
    origin: int


class Places:
    """The numbers of one dataset.

    Forked and spawned workers share them; any other copy has its own.
    """

    def __init__(self) -> None:
        self._cells = torch.zeros(TAKEN + MOST_WORKERS, dtype=torch.int64)
        self._cells[CLAIM] = NOBODY
        self._share_cells()
        self._put_here = 0  # the generation that was put in this process last
        self._claimed = -1  # the generation whose BASE an iteration of this process took
        self._owner = os.getpid()
        # iterations are numbered from 1 in each process
        self._counted_in = self._owner
        self._number = 0

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_numbers"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        # of a spawned worker they are shared already; a copy made by pickle or deepcopy has its own
        self._share_cells()

    @property
    def generation(self) -> int:
        """How often the dataset was put somewhere."""
        self._leave_parent()
        return self._get(GENERATION)

    @property
    def by_workers(self) -> bool:
        """Whether the iteration that began last runs in worker processes."""
        return bool(self._get(BY_WORKERS))

    @property
    def running(self) -> tuple[int, int]:
        """(start, origin) of the iteration that began last, or that would begin now if none did
        since `put`.
        """
        if self._claimed != self.generation and self._get(CLAIM) == NOBODY:
            return self._get(BASE), self._get(ORIGIN)
        start = self._get(START)
        # a pass from the first sample counts its steps from there
        origin = self._get(ORIGIN) if start else 0
        return start, origin

    def put(self, base: int, lanes: int, origin: int) -> None:
        """The next iteration begins at `base`.

        Called where the dataset lives, never in a worker.
        """
        self._leave_parent()
        self._numbers[CLAIM] = NOBODY
        self._numbers[BASE] = base
        self._numbers[LANES] = lanes
        self._numbers[ORIGIN] = origin
        self._numbers[BY_WORKERS] = 0
        self._put_here = self.generation + 1
        self._numbers[GENERATION] = self._put_here  # last: who sees it sees the others

    def adopt_lanes(self, lanes: int) -> None:
        """A worker loaded a state: the iterations after its own are of that order too."""
        self._numbers[LANES] = lanes

    def finished(self) -> None:
        """The iteration that began last, in this process, gave all it had."""
        self._numbers[START] = 0

    def begin(self, worker: WorkerInfo | None) -> Begun:
        """Begin an iteration, or a worker's share of one.

        Raises StateError if the dataset was moved while workers started.
        """
        is_first_here = self._count_iteration()
        generation = self.generation
        # A worker that starts has what the dataset was when its process began; if the dataset was
        # put elsewhere meanwhile, other workers have begun there.
        if worker is not None and is_first_here and generation != self._put_here:
            raise StateError(
                "the dataset was given another position while the workers of a DataLoader started; "
                "iterate it again"
            )
        base = self._get(BASE)
        lanes = self._get(LANES)
        origin = self._get(ORIGIN)
        # read once more after the others, as `put` writes it after the others
        if generation != self.generation:
            raise StateError(
                "the dataset was given another position while an iteration of it began; "
                "iterate it again"
            )
        start = base if self._takes_base(worker, generation) else 0
        self._numbers[START] = start
        self._numbers[BY_WORKERS] = int(worker is not None)
        return Begun(
            generation=generation,
            number=self._number,
            start=start,
            lanes=lanes,
            origin=origin if start else 0,
        )

    def _count_iteration(self) -> bool:
        """Count one more iteration of this process; whether it is the first."""
        process = os.getpid()
        is_first = process != self._counted_in
        if is_first:
            self._counted_in = process
            self._number = 0
        self._number += 1
        return is_first

    def is_latest(self, begun: Begun) -> bool:
        """Whether no other iteration began in this process since."""
        return begun.number == self._number

    def check(self, begun: Begun) -> None:
        """Raise StateError if the dataset was moved since an iteration began."""
        if self.generation != begun.generation:
            raise StateError(
                "the dataset was given another position, by seek or load_state_dict, "
                "after this iteration began; "
                "batches of both places would be mixed: begin another iteration"
            )

    def _takes_base(self, worker: WorkerInfo | None, generation: int) -> bool:
        """Whether the iteration that begins is the first since `put`, and hence begins there.

        The workers of one iteration have seeds that differ by their numbers alone; persistent ones
        keep them, and count. A caller that seeds torch anew gives a later iteration the same ones:
        then a worker knows that it was here before.
        """
        if self._claimed == generation:
            return False
        if worker is None:
            self._claimed = generation
            return self._get(CLAIM) == NOBODY
        seed_of_all = worker.seed - worker.id
        claim = hash((seed_of_all, worker.num_workers, self._number)) & _POSITIVE
        claimed = self._get(CLAIM)
        if claimed == NOBODY:
            # several workers of an iteration may: it is the same number
            self._numbers[CLAIM] = claim
        elif claimed != claim:
            return False
        if worker.id >= MOST_WORKERS:
            return True
        taken = generation + 1
        was_here = self._get(TAKEN + worker.id) == taken
        self._numbers[TAKEN + worker.id] = taken
        return not was_here

    def _leave_parent(self) -> None:
        """In a fork that is no worker, such as a rank that was forked with its loader: numbers of
        its own from now on.
        """
        process = os.getpid()
        if process == self._owner or get_worker_info() is not None:
            return
        self._owner = process
        self._cells = self._cells.clone()
        self._share_cells()

    def _share_cells(self) -> None:
        """Put the numbers into shared memory, if they are not there; as numpy, since they are
        looked at for every batch.
        """
        self._cells.share_memory_()  # type: ignore[no-untyped-call]
        self._numbers: NDArray[np.int64] = self._cells.numpy()

    def _get(self, name: int) -> int:
        return int(self._numbers[name])
