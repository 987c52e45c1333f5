"""The start of a dataset's next iteration, in memory that it shares with its DataLoader workers.

The first iteration after `put` begins at the sample of `put`, every other one at the first sample.
Worker 0 reads in another process than the dataset, so it records its iterations in shared memory.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import get_worker_info

from streammega.errors import StateError

POSITION = np.dtype(
    [
        # how often `put` was called
        ("generation", np.int64),
        # arguments of the last `put`: global sample, lanes (0: as in the config), and the sample from
        # which global batches are counted
        ("start", np.int64),
        ("lanes", np.int64),
        ("origin", np.int64),
        # the generation whose iteration began at `start`; -1: no iteration did
        ("taken", np.int64),
        # the start of the latest iteration, and whether a worker runs it (1 or 0)
        ("running", np.int64),
        ("in_worker", np.int64),
    ]
)
NOT_TAKEN = -1


class IterationStart(NamedTuple):
    """The start of an iteration, as a global sample.

    lanes: lanes of the order; 0: as in the config. origin: the sample from which global batches are
    counted.
    """

    generation: int
    start: int
    lanes: int
    origin: int


class IterationState:
    """The position that `put` set, and the latest iteration.

    Forked and spawned workers share the state with the dataset. Any other copy has its own.
    """

    def __init__(self) -> None:
        self._memory = torch.zeros(POSITION.itemsize // 8, dtype=torch.int64)
        self._share_memory()
        self._shared["taken"] = NOT_TAKEN
        self._owner = os.getpid()
        self._known: int | None = 0
        """The generation that this copy knows; None: this worker has begun once and accepts any."""
        self._latest: IterationStart | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_shared"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        # a spawned worker gets shared memory; a copy made by pickle or deepcopy has its own
        self._share_memory()

    @property
    def generation(self) -> int:
        """How often `put` was called."""
        self._leave_parent()
        return self._get("generation")

    @property
    def in_worker(self) -> bool:
        """Whether a worker runs the iteration that began last."""
        return bool(self._get("in_worker"))

    @property
    def running(self) -> tuple[int, int]:
        """(start, origin) of the latest iteration; after `put`, of the iteration that comes next."""
        start = self._get("running")
        # an iteration from the first sample counts its global batches from there
        return start, self._get("origin") if start else 0

    def put(self, start: int, lanes: int, origin: int) -> None:
        """Set that the next iteration begins at `start`."""
        self._leave_parent()
        shared = self._shared
        shared["start"] = start
        shared["lanes"] = lanes
        shared["origin"] = origin
        shared["running"] = start
        shared["taken"] = NOT_TAKEN
        shared["in_worker"] = 0
        if get_worker_info() is None:
            self._known = self.generation + 1
            shared["generation"] = self._known  # last, so that a reader of it reads the new values

    def begin(self) -> IterationStart:
        """Begin an iteration, in worker 0 or without workers.

        Raises StateError if `put` was called while the worker started.
        """
        generation = self.generation
        in_worker = get_worker_info() is not None
        if in_worker:
            if self._known not in (None, generation):
                raise StateError(
                    "the dataset was given another position while the workers of a DataLoader "
                    "started; iterate it again"
                )
            self._known = None
        is_first = self._get("taken") != generation
        start = self._get("start") if is_first else 0
        begun = IterationStart(
            generation, start, self._get("lanes"), self._get("origin") if start else 0
        )
        self._shared["taken"] = generation
        self._shared["running"] = start
        self._shared["in_worker"] = int(in_worker)
        self._latest = begun
        return begun

    def is_latest(self, begun: IterationStart) -> bool:
        """Whether no other iteration began in this process after this one."""
        return self._latest is begun

    def check(self, begun: IterationStart) -> None:
        """Raise StateError if `put` was called after an iteration began."""
        if self.generation != begun.generation:
            raise StateError(
                "the dataset was given another position, by seek or load_state_dict, "
                "after this iteration began; "
                "batches of both places would be mixed: begin another iteration"
            )

    def finish(self) -> None:
        """Record that the latest iteration of this process has reached the end of the data."""
        self._shared["running"] = 0

    def _leave_parent(self) -> None:
        """Stop sharing memory in a forked process that is not a worker, such as a forked rank."""
        process = os.getpid()
        if process == self._owner or get_worker_info() is not None:
            return
        self._owner = process
        self._memory = self._memory.clone()
        self._share_memory()

    def _share_memory(self) -> None:
        """Move the numbers into shared memory, if they are not there yet."""
        self._memory.share_memory_()  # type: ignore[no-untyped-call]
        # a numpy view, because it is faster to read for every batch
        self._shared: NDArray[np.void] = self._memory.numpy().view(POSITION)

    def _get(self, name: str) -> int:
        return int(self._shared[name][0])
