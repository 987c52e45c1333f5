"""A start: which checkpoint a run goes on from, and how it is loaded.

The newest that is sound is the one to resume from. One that is damaged is set aside; one that
cannot be reached ends the run, since an older one would be the wrong answer.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata

from streammega.errors import ConfigError, StateError, StorageError
from streammega.train.all_ranks import AllRanks
from streammega.train.checkpoints.integrity import (
    CHECKSUMS,
    Checksums,
    DamagedError,
    Files,
    check_files,
    first_cause,
    one_line,
    read_metadata,
    without_torch_warning,
)
from streammega.train.checkpoints.reader import Reader
from streammega.train.checkpoints.state import state_to_load
from streammega.train.checkpoints.store import CheckpointStore, SavedCheckpoint
from streammega.train.parallel_model import ParallelModel

log = logging.getLogger(__name__)

Accept = Callable[[dict[str, Any]], None]
"""Takes the position of a checkpoint; raises StateError for one of another run."""


class CheckpointResumer:
    """Loads the checkpoints of a run.

    keep: of those that a rewind sets aside, how many stay.
    """

    def __init__(self, store: CheckpointStore, all_ranks: AllRanks, keep: int) -> None:
        self._store = store
        self._all_ranks = all_ranks
        self._keep = keep

    def resume(
        self,
        model: ParallelModel,
        optimizer: torch.optim.Optimizer,
        accept: Accept,
        rewind: int | None,
    ) -> dict[str, Any] | None:
        """As `Checkpointer.resume`."""
        damaged: list[int] = []
        last_error: DamagedError | None = None
        oldest_first = self._all_ranks.from_first(lambda: self._choose(rewind))
        for step in reversed(oldest_first):
            try:
                position = self._load(step, model, optimizer, accept)
            except DamagedError as error:
                self._warn_of_damage(step, error)
                damaged.append(step)
                last_error = error
                continue
            # Only now: where none can be read, all of them stay as they are for who mends one.
            self._all_ranks.from_first(lambda: self._set_aside(damaged, "damaged"))
            return position
        if damaged:
            steps = ", ".join(str(step) for step in damaged)
            raise StateError(
                f"{self._store.url}: no checkpoint can be read, of steps {steps} ({last_error}); "
                f"restore one, or start anew in another train.out_dir"
            )
        return None

    def _warn_of_damage(self, step: int, error: DamagedError) -> None:
        if self._all_ranks.rank == 0:
            log.warning(
                "the checkpoint of step %d cannot be used, the one before it is taken: %s",
                step,
                error,
            )

    def _choose(self, rewind: int | None) -> list[int]:
        """Steps to resume from, the best last. On the first rank.

        With `rewind`: those up to it, and those that were trained after rewinding to it. The others
        are set aside.
        """
        steps = self._store.steps()
        if rewind is None:
            return steps
        kept: list[int] = []
        left: list[int] = []
        for step in steps:
            if step <= rewind or rewind in self._rewinds_of(step):
                kept.append(step)
            else:
                left.append(step)
        if not kept:
            raise ConfigError(
                f"train.rewind = {rewind}: there is no checkpoint at or before that step "
                f"in {self._store.url}"
            )
        self._set_aside(left, "rewound")
        self._store.clean_aside(self._keep)
        return kept

    def _rewinds_of(self, step: int) -> list[int]:
        try:
            return rewinds_of(self._store.find(step).position)
        except DamagedError:
            return []

    def _set_aside(self, steps: Sequence[int], why: str) -> None:
        for step in steps:
            name = self._store.set_aside(step, why)
            log.warning("the checkpoint of step %d is set aside as %s", step, name)

    def _load(
        self, step: int, model: ParallelModel, optimizer: torch.optim.Optimizer, accept: Accept
    ) -> dict[str, Any]:
        """Raises DamagedError, StateError for one of another model, StorageError."""
        found, metadata = self._all_ranks.from_first(lambda: self._examine(step))
        # First: one of another run is refused by what differs, before any of it is read.
        self._all_ranks.call(lambda: accept(found.position))
        files = self._store.draft(found.name)
        try:
            state = self._all_ranks.call(lambda: state_to_load(model, optimizer, metadata))
            self._read(files, found, metadata, state)
        except (DamagedError, StorageError):
            raise
        except (CheckpointException, StateError) as error:
            cause = first_cause(error)
            if isinstance(cause, DamagedError | StorageError):
                raise cause from None
            raise _unfit(files.url(), cause) from None
        return found.position

    def _examine(self, step: int) -> tuple[SavedCheckpoint, Metadata]:
        """A checkpoint whose files are all there, as far as can be told without reading them.

        On the first rank.
        """
        found = self._store.find(step)
        files = self._store.draft(found.name)
        metadata = read_metadata(files, Checksums(found.position[CHECKSUMS]))
        check_files(files, metadata)
        return found, metadata

    def _read(
        self, files: Files, found: SavedCheckpoint, metadata: Metadata, state: dict[str, Tensor]
    ) -> None:
        """Fill the memory of all ranks."""
        group = self._all_ranks.group
        checksums = Checksums(found.position[CHECKSUMS])
        reader = Reader(files, metadata, checksums, self._all_ranks)
        with without_torch_warning():
            state_dict_loader.load(
                state,
                storage_reader=reader,
                planner=DefaultLoadPlanner(flatten_state_dict=False),
                process_group=group,
                no_dist=group is None,
            )


def rewinds_of(position: Mapping[str, Any]) -> list[int]:
    """The values of train.rewind by which a checkpoint's run, or those it goes back to, have
    rewound.
    """
    return [int(step) for step in position.get("rewinds", ())]


def _unfit(url: str, error: BaseException) -> StateError:
    # Of another rank's error: all ranks say the same, whichever of them found it.
    reason = re.sub(r"^rank \d+: ", "", one_line(error))
    return StateError(
        f"{url}: does not fit this model and optimizer ({reason}); "
        f"restore [model], or start a new out_dir"
    )
