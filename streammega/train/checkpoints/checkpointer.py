"""The checkpoints of a run: all ranks save together, in the background, and resume from the newest sound
checkpoint.

torch.distributed.checkpoint plans which rank reads and writes which values. The first rank looks which
checkpoints there are, and publishes new ones. An error of one rank is raised on all.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from streammega.config import StorageConfig
from streammega.errors import StateError, StorageError, StreammegaError
from streammega.errors.logs import get_logger
from streammega.parallel.rank_sync import RankSync
from streammega.train.checkpoints.files import CheckpointFiles, read_tensors, write_tensors
from streammega.train.checkpoints.integrity import DamagedError
from streammega.train.checkpoints.out_dir import check_shared_filesystem
from streammega.train.checkpoints.staging import HostStaging
from streammega.train.checkpoints.state import state_to_load, state_to_save
from streammega.train.checkpoints.store import CheckpointStore, find_checkpoint
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
        self.is_waiting = False
        """Whether `wait` waits: for a full disk it may take long."""
        self.last_save: tuple[int, float] | None = None
        """The step of the last save, and when it started (time.monotonic)."""
        # A single rank without torchrun is no mistake.
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable")
        # First: a second job must write nothing there.
        self._rank_sync.run_on_first(store.lock)
        check_shared_filesystem(store.root, self._rank_sync)

    @property
    def has_failed(self) -> bool:
        """Whether the save in the background has failed; `wait` raises why."""
        return self._error is not None

    @property
    def is_saving(self) -> bool:
        """Whether a save is under way in the background."""
        return self._thread is not None and self._thread.is_alive()

    def save(
        self,
        step: int,
        model: ParallelModel,
        optimizer: torch.optim.Optimizer,
        position: Mapping[str, Any],
        *,
        background: bool,
    ) -> None:
        """Write a checkpoint of the values as they are now, and remove all but the last `keep`. A thread
        writes it: signals reach the main thread while it waits.

        background: return when the copies of the values are under way (see `before_change`).
        """
        self.wait()
        self.last_save = (step, time.monotonic())
        state = state_to_save(model, optimizer)
        copies = self._staging.stage(state)

        def write() -> None:
            try:
                self._write(step, state, copies, position)
            except BaseException as error:
                # `wait` raises it. `has_failed` is summed over all ranks every step.
                self._error = error

        self._thread = threading.Thread(target=write, name="streammega-save", daemon=True)
        self._thread.start()
        if not background:
            self.wait()

    def before_change(self) -> None:
        """Call it before parameters or the optimizer's state change: a GPU may still be copying them."""
        self._staging.before_change()

    def wait(self) -> None:
        """Wait for the save in the background. Raises its error."""
        if self._thread is not None:
            self.is_waiting = True
            try:
                self._thread.join()
            finally:
                self.is_waiting = False
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
            self.store.unlock()

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
                self.store.damaged.add(step)
                last_error = error
        if last_error is not None:
            steps = ", ".join(str(step) for step in sorted(self.store.damaged, reverse=True))
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
        place, step = self._rank_sync.run_on_first(lambda: find_checkpoint(url, storage))
        return self._load(place, step, model, optimizer, accept)

    def _write(
        self,
        step: int,
        state: dict[str, Tensor],
        copies: Mapping[str, Tensor],
        position: Mapping[str, Any],
    ) -> None:
        """Write and publish a checkpoint. All ranks call it together. Raises StorageError."""

        def write(files: CheckpointFiles) -> tuple[Metadata, str]:
            self._staging.wait()
            return write_tensors(files, state, copies, self._rank_sync)

        try:
            self.store.save(step, position, write, self._rank_sync, self._keep)
        except (CheckpointException, DamagedError, StorageError, OSError) as error:
            raise StorageError(
                f"{self.store.url}: the checkpoint of step {step} cannot be written "
                f"({one_line(error)}); "
                f"free space there, or choose another train.out_dir. "
                f"The checkpoints before it are whole"
            ) from None

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
        saved, metadata = self._rank_sync.run_on_first(lambda: place.read_metadata(step))
        files = place.files(saved.name)
        # Before loading: "another [model]" is a better message than tensors that do not fit.
        self._rank_sync.run(lambda: accept(saved.position))
        try:
            state = self._rank_sync.run(lambda: state_to_load(model, optimizer, metadata))
        except StateError as error:
            raise StateError(
                f"{files.url()}: does not fit this model and optimizer ({error}); "
                f"restore [model], or start a new out_dir"
            ) from None
        read_tensors(files, metadata, state, self._rank_sync)
        place.own_folder = saved.name
        return saved.position


def one_line(error: BaseException) -> str:
    """The message of an error in one line; of the first rank's, among those that torch has collected."""
    if isinstance(error, CheckpointException) and error.failures:
        error, _ = error.failures[min(error.failures)]
    if isinstance(error, StreammegaError):
        return str(error)
    # Messages of torch are tracebacks, whose last line says what went wrong.
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__


def _new_group(timeout: float) -> dist.ProcessGroup | None:
    """A process group for checkpoints alone: collectives of a save in the background must not meet
    those of training, which another thread starts.
    """
    if not dist.is_initialized():
        return None
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
    return group
