"""The checkpoints of a run, as its loop uses them: saved by all ranks together, in the background.

Where they are, and how they appear there whole, is `store`; what a start does is `resume`.
torch.distributed.checkpoint plans which rank writes which values. The first rank decides what there
is; whatever fails on a rank is raised on all.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from streammega.errors import StateError, StorageError
from streammega.train.all_ranks import AllRanks
from streammega.train.checkpoints.integrity import (
    DamagedError,
    check_files,
    first_cause,
    one_line,
    without_torch_warning,
)
from streammega.train.checkpoints.lock import JobLock
from streammega.train.checkpoints.resume import CheckpointResumer
from streammega.train.checkpoints.staging import HostStaging
from streammega.train.checkpoints.state import state_to_save
from streammega.train.checkpoints.store import CheckpointStore, check_shared, until_seen
from streammega.train.checkpoints.writer import Writer
from streammega.train.parallel_model import ParallelModel

log = logging.getLogger(__name__)


class Checkpointer:
    """The checkpoints of a run. Made by all ranks together; saving is collective, and may go on in
    the background.

    Args:
        store: where they are.
        device: on which the run computes.
        keep: how many of the last ones are kept.
        timeout: seconds that ranks wait for each other, and for a save or load of which nothing
            moves.
        before_publish: called on the first rank before a checkpoint appears.

    Raises ConfigError if the store is not one for all ranks, or another job uses it.
    """

    def __init__(
        self,
        store: CheckpointStore,
        device: torch.device,
        keep: int,
        timeout: float = 600.0,
        before_publish: Callable[[], None] | None = None,
    ) -> None:
        self.store = store
        self._lock: JobLock | None = None
        self._all_ranks = AllRanks(_new_group(timeout), timeout)
        self._staging = HostStaging(device)
        self._resumer = CheckpointResumer(store, self._all_ranks, keep)
        self._keep = keep
        self._before_publish = before_publish
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.last: tuple[int, float] | None = None
        """The step of the last save that was begun, and when (time.monotonic)."""
        # First: a second job must write nothing there, not even a sign.
        self._all_ranks.from_first(self._take_lock)
        check_shared(store, self._all_ranks)

    @property
    def failed(self) -> bool:
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
        """Write one checkpoint, and drop all but the last `keep`.

        In the background: of what is true now.
        """
        self.wait()
        self.last = (step, time.monotonic())
        state = state_to_save(model, optimizer)
        planner = _StagedPlanner(self._staging.stage(state))
        if not background:
            self._write_and_publish(step, state, planner, position)
            return
        self._thread = threading.Thread(
            target=self._save_in_background,
            args=(step, state, planner, dict(position)),
            name="streammega-save",
            daemon=True,
        )
        self._thread.start()

    def before_change(self) -> None:
        """Call it before parameters or the optimizer's state change: what is being saved is copied
        from a GPU meanwhile.
        """
        self._staging.before_change()

    def wait(self) -> None:
        """Until what is being written is whole. Raises what went wrong with it."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error = self._error
        self._error = None
        if error is not None:
            raise error

    def recent(self, seconds: float) -> int | None:
        """The step of the last save, if its values were taken no more than `seconds` ago.

        By the clock of the first rank: all ranks must agree whether to save once more.
        """

        def look() -> int | None:
            """The step of the last checkpoint on this rank, if it is recent."""
            if self.last is None:
                return None
            step, began = self.last
            age = time.monotonic() - began
            return step if age <= seconds else None

        return self._all_ranks.from_first(look)

    def close(self) -> None:
        """Wait, and let another job in."""
        try:
            self.wait()
        finally:
            if self._lock is not None:
                self._lock.release()
                self._lock = None

    def found(self) -> list[int]:
        """Steps of whole checkpoints, rising, as the first rank sees them."""
        return self._all_ranks.from_first(self.store.steps)

    def resume(
        self,
        model: ParallelModel,
        optimizer: torch.optim.Optimizer,
        accept: Callable[[dict[str, Any]], None],
        rewind: int | None = None,
    ) -> dict[str, Any] | None:
        """Load the newest checkpoint into a model and optimizer of any layout; its position, or
        None where there is none.

        One that is damaged is set aside, with a warning, and the one before is taken. `accept` is
        given each position first, and raises StateError for one of another run. `rewind`: the
        newest up to this step, or of those that were trained after rewinding to it.

        Raises ConfigError if there is none to rewind to, StateError if none can be read or it is
        another model's, and StorageError if the storage fails: then an older one would be the wrong
        answer.
        """
        return self._resumer.resume(model, optimizer, accept, rewind)

    def _save_in_background(
        self,
        step: int,
        state: Mapping[str, Tensor],
        planner: _StagedPlanner,
        position: Mapping[str, Any],
    ) -> None:
        try:
            self._write_and_publish(step, state, planner, position)
        except BaseException as error:
            # Of a thread: `wait` raises it, and all ranks are told by `failed`.
            self._error = error

    def _write_and_publish(
        self,
        step: int,
        state: Mapping[str, Tensor],
        planner: _StagedPlanner,
        position: Mapping[str, Any],
    ) -> None:
        """All ranks write their files, then the first one publishes. Raises StorageError."""
        try:
            draft = self._all_ranks.from_first(lambda: self._begin(step))
            metadata, writer = self._write(draft, state, planner)

            def publish() -> None:
                self._publish(step, draft, metadata, writer.checksums.add_to(position))

            self._all_ranks.from_first(publish)
        except (CheckpointException, DamagedError, StorageError, OSError) as error:
            reason = one_line(first_cause(error))
            raise StorageError(
                f"{self.store.url}: the checkpoint of step {step} cannot be written ({reason}); "
                f"free space there, or choose another train.out_dir. "
                f"The checkpoints before it are whole"
            ) from None

    def _begin(self, step: int) -> str:
        """Room for a draft; its name."""
        # What others may be writing is not to be removed as left over.
        self._check_lock()
        return self.store.begin(step)

    def _write(
        self, draft: str, state: Mapping[str, Tensor], planner: _StagedPlanner
    ) -> tuple[Metadata, Writer]:
        """Every rank's file of a draft, and on the first rank what says what lies where."""
        group = self._all_ranks.group
        writer = Writer(self.store.draft(draft), self._all_ranks)
        self._staging.wait()
        with without_torch_warning():
            metadata = state_dict_saver.save(
                dict(state),
                storage_writer=writer,
                planner=planner,
                process_group=group,
                no_dist=group is None,
            )
        return metadata, writer

    def _publish(
        self, step: int, draft: str, metadata: Metadata, position: Mapping[str, Any]
    ) -> None:
        """Make a draft that all ranks have written a checkpoint; then old ones go.

        On the first rank.
        """
        files = self.store.draft(draft)
        until_seen(lambda: check_files(files, metadata), DamagedError)
        if self._before_publish is not None:
            self._before_publish()
        # Again: writing may have taken minutes, in which another job could take over.
        self._check_lock()
        self.store.publish(step, draft, position)
        self._remove_old()

    def _remove_old(self) -> None:
        old_steps = self.store.steps()[: -self._keep]
        for step in old_steps:
            try:
                self.store.remove(step)
            except (OSError, StateError, StorageError) as error:
                log.warning(
                    "%s: step %d cannot be removed (%s); the new one is whole",
                    self.store.url,
                    step,
                    one_line(error),
                )

    def _take_lock(self) -> None:
        self._lock = self.store.lock()
        self.store.prepare()

    def _check_lock(self) -> None:
        if self._lock is not None:
            self._lock.check()


class _StagedPlanner(DefaultSavePlanner):
    """Plans by the state of the run, and writes its copies on the host."""

    def __init__(self, copies: Mapping[str, Tensor]) -> None:
        super().__init__(flatten_state_dict=False)
        self._copies = copies

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """The copy of this rank's part of a tensor."""
        return self._copies[index.fqn]


def _new_group(timeout: float) -> dist.ProcessGroup | None:
    """A process group for checkpoints alone: messages of a save in the background must never meet
    those of training, which other threads send in another order.
    """
    if not dist.is_initialized():
        return None
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
    return group
