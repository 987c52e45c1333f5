"""The checkpoints of a run: all ranks save together, in the background, and resume from the newest sound
checkpoint.

torch.distributed.checkpoint plans which rank reads and writes which values. The first rank looks which
checkpoints there are, and publishes new ones. An error of one rank is raised on all.
"""

from __future__ import annotations

import re
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import filelock
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from streammega.config import StorageConfig
from streammega.errors import StateError, StorageError
from streammega.errors.logs import get_logger
from streammega.parallel.rank_sync import RankSync
from streammega.train.checkpoints.files import CheckpointReader, CheckpointWriter
from streammega.train.checkpoints.integrity import (
    CHECKSUMS,
    Checksums,
    DamagedError,
    first_cause,
    one_line,
)
from streammega.train.checkpoints.staging import HostStaging
from streammega.train.checkpoints.state import state_to_load, state_to_save
from streammega.train.checkpoints.store import (
    CheckpointStore,
    SavedCheckpoint,
    check_shared_filesystem,
    wait_until_visible,
)
from streammega.train.parallel_model import ParallelModel

log = get_logger(__name__)

Accept = Callable[[dict[str, Any]], None]
"""Is called with the position of a checkpoint. Raises StateError for one of another run."""


class Checkpointer:
    """Saves and loads the checkpoints of a run. All ranks make one and call its methods together.

    Args:
        store: where they are.
        device: on which the run computes.
        keep: how many of the last sound checkpoints are kept, at least 1.
        timeout: seconds that ranks wait for each other.

    Raises ConfigError if the ranks do not share the store, or another job uses it.
    """

    def __init__(
        self,
        store: CheckpointStore,
        device: torch.device,
        keep: int,
        timeout: float = 600.0,
    ) -> None:
        self.store = store
        self._rank_sync = RankSync(_new_group(timeout))
        self._staging = HostStaging(device)
        self._keep = keep
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._own: str | None = None
        """The folder of the checkpoint that was loaded from the store, or saved, last."""
        self._damaged: set[int] = set()
        """Steps of checkpoints that a resume has skipped."""
        self.last_save: tuple[int, float] | None = None
        """The step of the last save, and when it started (time.monotonic)."""
        # A single rank without torchrun is no mistake.
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable")
        # First: a second job must write nothing there. Other ranks have none.
        self._lock: filelock.BaseFileLock | None = None
        self._rank_sync.run_on_first(self._take_lock)
        check_shared_filesystem(store, self._rank_sync)

    @property
    def has_failed(self) -> bool:
        """Whether the save in the background has failed; `wait` raises why."""
        return self._error is not None

    def save(
        self,
        step: int,
        model: ParallelModel,
        optimizer: torch.optim.Optimizer,
        position: Mapping[str, Any],
        *,
        background: bool,
    ) -> None:
        """Write a checkpoint of the values as they are now, and remove all but the last `keep`.

        background: return when the values are copied; a thread writes them.
        """
        self.wait()
        self.last_save = (step, time.monotonic())
        state = state_to_save(model, optimizer)
        planner = _StagedPlanner(self._staging.stage(state))
        if not background:
            self._write_and_publish(step, state, planner, position)
            return

        def save_in_background() -> None:
            try:
                self._write_and_publish(step, state, planner, position)
            except BaseException as error:
                # `wait` raises it. `has_failed` is summed over all ranks every step.
                self._error = error

        self._thread = threading.Thread(
            target=save_in_background, name="streammega-save", daemon=True
        )
        self._thread.start()

    def before_change(self) -> None:
        """Call it before parameters or the optimizer's state change: a GPU may still be copying them."""
        self._staging.before_change()

    def wait(self) -> None:
        """Wait for the save in the background. Raises its error."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error = self._error
        self._error = None
        if error is not None:
            raise error

    def recent_step(self, seconds: float) -> int | None:
        """The step of the last save, if it began at most `seconds` ago; else None. Collective.

        The clock of the first rank decides, since all ranks must agree whether to save once more.
        """
        step, started = self.last_save or (None, 0.0)
        age = time.monotonic() - started
        return self._rank_sync.run_on_first(lambda: step if age <= seconds else None)

    def close(self) -> None:
        """Wait for the save under way, and release the lock."""
        try:
            self.wait()
        finally:
            if self._lock is not None:
                self._lock.release()
                self._lock = None

    def resume(
        self, model: ParallelModel, optimizer: torch.optim.Optimizer, accept: Accept
    ) -> dict[str, Any] | None:
        """Load the newest checkpoint into a model and optimizer of any layout; its position, or None
        where there is no checkpoint.

        A damaged checkpoint is skipped, with a warning, and the one before is loaded. accept: is
        called with the position before anything is loaded.

        Raises StateError if none can be read or it is of another model, and StorageError if the
        storage fails, since the newest one may be sound then.
        """
        last_error: DamagedError | None = None
        for step in reversed(self._rank_sync.run_on_first(self.store.steps)):
            try:
                return self._load(self.store, step, model, optimizer, accept)
            except DamagedError as error:
                if self._rank_sync.rank == 0:
                    log.warning("the checkpoint of step %d is damaged and skipped: %s", step, error)
                self._damaged.add(step)
                last_error = error
        if last_error is not None:
            steps = ", ".join(str(step) for step in sorted(self._damaged, reverse=True))
            raise StateError(
                f"{self.store.url}: no checkpoint can be read, of steps {steps} ({last_error}); "
                f"restore one, or start in another train.out_dir"
            )
        return None

    def load(
        self,
        url: str,
        storage: StorageConfig,
        model: ParallelModel,
        optimizer: torch.optim.Optimizer,
        accept: Accept,
    ) -> dict[str, Any]:
        """Load a checkpoint of any run, as `resume` does; its position.

        Raises ConfigError where there is none, StateError if it is damaged or of another model,
        StorageError.
        """
        place, step = self._rank_sync.run_on_first(
            lambda: CheckpointStore.of_checkpoint(url, storage)
        )
        return self._load(place, step, model, optimizer, accept)

    def _take_lock(self) -> None:
        self._lock = self.store.lock()

    def _write_and_publish(
        self,
        step: int,
        state: dict[str, Tensor],
        planner: DefaultSavePlanner,
        position: Mapping[str, Any],
    ) -> None:
        """All ranks write their files, then the first one publishes. Raises StorageError."""
        group = self._rank_sync.group
        try:
            name = self._rank_sync.run_on_first(lambda: self.store.begin(step))
            writer = CheckpointWriter(self.store.files(name), self._rank_sync)
            self._staging.wait()
            metadata = state_dict_saver.save(
                state,
                storage_writer=writer,
                planner=planner,
                process_group=group,
                no_dist=group is None,
            )
            whole_position = writer.checksums.add_to(position)
            self._rank_sync.run_on_first(
                lambda: self._publish(step, name, metadata, whole_position)
            )
        except (CheckpointException, DamagedError, StorageError, OSError) as error:
            raise StorageError(
                f"{self.store.url}: the checkpoint of step {step} cannot be written "
                f"({one_line(first_cause(error))}); "
                f"free space there, or choose another train.out_dir. "
                f"The checkpoints before it are whole"
            ) from None

    def _publish(
        self, step: int, name: str, metadata: Metadata, position: Mapping[str, Any]
    ) -> None:
        """Publish the files of all ranks as a checkpoint, and remove old ones. The first rank calls it."""
        files = self.store.files(name)
        wait_until_visible(lambda: files.check(metadata), DamagedError)
        if step in self._damaged:
            # Only where there is no record is a new one written.
            self.store.remove(step)
            self._damaged.discard(step)
        self.store.publish(step, name, position, self._own)
        self._own = name
        # What was damaged goes with the next checkpoint, and takes the place of no sound one.
        damaged = [old_step for old_step in sorted(self._damaged) if old_step < step]
        sound = [old_step for old_step in self.store.steps() if old_step not in self._damaged]
        for old_step in [*damaged, *sound[: -self._keep]]:
            try:
                self.store.remove(old_step)
                self._damaged.discard(old_step)
            except (OSError, StorageError) as error:
                log.warning(
                    "%s: step %d cannot be removed (%s); the new one is whole",
                    self.store.url,
                    old_step,
                    one_line(error),
                )

    def _load(
        self,
        place: CheckpointStore,
        step: int,
        model: ParallelModel,
        optimizer: torch.optim.Optimizer,
        accept: Accept,
    ) -> dict[str, Any]:
        """Load a checkpoint into model and optimizer; returns its position. All ranks call it together.

        Raises DamagedError (a StateError), StateError for one of another model, StorageError.
        """
        group = self._rank_sync.group
        saved, metadata = self._rank_sync.run_on_first(lambda: _examine(place, step))
        # Before loading: "another [model]" is a better message than tensors that do not fit.
        self._rank_sync.run(lambda: accept(saved.position))
        files = place.files(saved.name)
        checksums = Checksums(saved.position[CHECKSUMS])
        try:
            state = self._rank_sync.run(lambda: state_to_load(model, optimizer, metadata))
            state_dict_loader.load(
                state,
                storage_reader=CheckpointReader(files, metadata, checksums, self._rank_sync),
                planner=DefaultLoadPlanner(flatten_state_dict=False),
                process_group=group,
                no_dist=group is None,
            )
        except (CheckpointException, StateError, StorageError) as error:
            cause = first_cause(error)
            if isinstance(cause, DamagedError | StorageError):
                raise cause from None
            # All ranks print the same message, so it does not name the rank that found it.
            reason = re.sub(r"^rank \d+: ", "", one_line(cause))
            raise StateError(
                f"{files.url()}: does not fit this model and optimizer ({reason}); "
                f"restore [model], or start a new out_dir"
            ) from None
        if place is self.store:
            self._own = saved.name
        return saved.position


def _examine(place: CheckpointStore, step: int) -> tuple[SavedCheckpoint, Metadata]:
    """A checkpoint, after a check of the names and sizes of its files. The first rank calls it."""
    saved = place.find(step)
    files = place.files(saved.name)
    metadata = files.read_metadata(Checksums(saved.position[CHECKSUMS]))
    files.check(metadata)
    return saved, metadata


class _StagedPlanner(DefaultSavePlanner):
    """Plans with the state of the run, and writes the copies of it on the host."""

    def __init__(self, copies: Mapping[str, Tensor]) -> None:
        super().__init__(flatten_state_dict=False)
        self._copies = copies

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """The copy of this rank's part of a tensor."""
        return self._copies[index.fqn]


def _new_group(timeout: float) -> dist.ProcessGroup | None:
    """A process group for checkpoints alone: collectives of a save in the background must not meet
    those of training, which another thread starts.
    """
    if not dist.is_initialized():
        return None
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
    return group
