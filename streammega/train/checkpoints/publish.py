"""A save: all ranks write their files, then the first one publishes the checkpoint; old ones go.

torch.distributed.checkpoint plans which rank writes which values.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from streammega.errors import StateError, StorageError
from streammega.train.all_ranks import AllRanks
from streammega.train.checkpoints.chunks import Chunk, SavePlanner
from streammega.train.checkpoints.failures import first_cause, one_line, without_torch_warning
from streammega.train.checkpoints.files import DamagedError, check_files
from streammega.train.checkpoints.shared_store import until_seen
from streammega.train.checkpoints.store import CheckpointStore
from streammega.train.checkpoints.writer import Writer

log = logging.getLogger(__name__)


class CheckpointPublisher:
    """Writes and publishes the checkpoints of a run.

    Args:
        store: where to.
        all_ranks: who writes.
        keep: how many of the last checkpoints are kept.
        wait_for_values: called before values are read: copies from a device may be under way.
        check_hold: raises StorageError where another job has taken over.
        before_publish: called on the first rank before a checkpoint appears.
    """

    def __init__(
        self,
        store: CheckpointStore,
        all_ranks: AllRanks,
        keep: int,
        *,
        wait_for_values: Callable[[], None],
        check_hold: Callable[[], None],
        before_publish: Callable[[], None] | None,
    ) -> None:
        self.store = store
        self._all_ranks = all_ranks
        self._keep = keep
        self._wait_for_values = wait_for_values
        self._check_hold = check_hold
        self._before_publish = before_publish

    def save(self, step: int, state: Mapping[str, Chunk], position: Mapping[str, Any]) -> None:
        """One checkpoint, on all ranks at once. Raises StorageError."""
        try:
            self._save(step, state, position)
        except (CheckpointException, DamagedError, StorageError, OSError) as error:
            reason = one_line(first_cause(error))
            raise StorageError(
                f"{self.store.url}: the checkpoint of step {step} cannot be written ({reason}); "
                f"free space there, or choose another train.out_dir. "
                f"The checkpoints before it are whole"
            ) from None

    def _save(self, step: int, state: Mapping[str, Chunk], position: Mapping[str, Any]) -> None:
        draft = self._all_ranks.from_first(lambda: self._begin(step))
        metadata, writer = self._write(draft, state)

        def publish() -> None:
            self._publish(step, draft, metadata, writer.checksums.add_to(position))

        self._all_ranks.from_first(publish)

    def _begin(self, step: int) -> str:
        """Room for a draft; its name."""
        # What others may be writing is not to be removed as left over.
        self._check_hold()
        return self.store.begin(step)

    def _write(self, draft: str, state: Mapping[str, Chunk]) -> tuple[Metadata, Writer]:
        """Every rank's file of a draft, and on the first rank what says what lies where."""
        group = self._all_ranks.group
        writer = Writer(self.store.draft(draft), self._all_ranks)
        self._wait_for_values()
        with without_torch_warning():
            metadata = state_dict_saver.save(
                dict(state),
                storage_writer=writer,
                planner=SavePlanner(),
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
        self._check_hold()
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
