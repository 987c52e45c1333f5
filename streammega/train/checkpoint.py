"""The checkpoints of a run: saved by all ranks together, in the background; the newest that is
sound is the one to resume from.

torch.distributed.checkpoint plans who writes and reads which values. Where they lie, and how they
appear there whole, is `checkpoint_place`. The first rank decides what there is; whatever fails on a
rank is raised on all.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from streammega.errors import ConfigError, StateError, StorageError, StreammegaError
from streammega.gradients.boxes import Boxes
from streammega.train.checkpoint_files import DamagedError, check_files, checksums_in, read_metadata
from streammega.train.checkpoint_folder import CheckpointFolder, checkpoints
from streammega.train.checkpoint_hold import Hold
from streammega.train.checkpoint_place import CheckpointPlace, Found
from streammega.train.checkpoint_reader import Reader
from streammega.train.checkpoint_writer import Writer
from streammega.train.host_copies import HostCopies
from streammega.train.parallel import Optimizer, ParallelModel
from streammega.train.state import (
    LoadPlanner,
    SavePlanner,
    after_load,
    state_to_load,
    state_to_save,
)
from streammega.train.together import Together

__all__ = ["Checkpoints", "DamagedError", "checkpoints", "load_position", "step_of"]

log = logging.getLogger(__name__)

SEEN_WITHIN = 60.0
"""Seconds after which what one rank wrote must be seen by the others: clients of NFS look again
after up to a minute.
"""

LOOK_EVERY = 0.2
"""Seconds between two looks: on a disk the first sees it, and a file system of the network is not
to be asked all the time.
"""


class Checkpoints:
    """The checkpoints of a run. Made by all ranks together; saving is collective, and may go on in
    the background.

    Background writing has a process group of its own, so that its messages never meet those of
    training.

    Args: place: where they lie; see `open_place`. keep: how many of the last ones are kept.
        timeout: seconds that ranks wait for each other, and for a save or load of which nothing
        moves. before_publish: called on the first rank before a checkpoint appears.

    Raises ConfigError if the place is not one for all ranks, or another job uses it.
    """

    def __init__(
        self,
        place: CheckpointPlace,
        keep: int,
        timeout: float = 600.0,
        before_publish: Callable[[], None] | None = None,
    ) -> None:
        self.place = place
        self.keep = keep
        self._before_publish = before_publish
        wait = timedelta(seconds=timeout)
        self._group = (
            dist.new_group(backend="gloo", timeout=wait) if dist.is_initialized() else None
        )
        self._together = Together(self._group, timeout)
        self._rank = self._together.rank
        self._copies = HostCopies()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._hold: Hold | None = None
        self.last: tuple[int, float] | None = None
        """The step of the last save that was begun, and when (time.monotonic)."""
        self._together.from_first(self._take_hold)
        self._check_shared()

    @property
    def folder(self) -> Path:
        """Where they lie on a disk."""
        assert isinstance(self.place, CheckpointFolder)
        return self.place.path

    @property
    def failed(self) -> bool:
        """Whether the save in the background has failed; `wait` raises why."""
        return self._error is not None

    def save(
        self,
        step: int,
        model: ParallelModel,
        optimizer: Optimizer,
        position: Mapping[str, Any],
        *,
        background: bool,
    ) -> None:
        """Write one checkpoint, and drop all but the last `keep`.

        In the background: of what is true now.
        """
        self.wait()
        self.last = (step, time.monotonic())
        state = self._copies.take(state_to_save(model, optimizer), background=background)
        if not background:
            return self._write(step, state, position)
        self._thread = threading.Thread(
            target=self._run,
            args=(step, state, dict(position)),
            name="streammega-save",
            daemon=True,
        )
        self._thread.start()

    def before_change(self) -> None:
        """Call it before parameters or the optimizer's state change: what is being saved is copied
        from a GPU meanwhile.
        """
        self._copies.before_change()

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
        """The step of the last save, if its values were taken no more than `seconds` ago; by the
        clock of the first rank.
        """

        def look() -> int | None:
            return (
                self.last[0]
                if self.last is not None and time.monotonic() - self.last[1] <= seconds
                else None
            )

        return self._together.from_first(look)

    def close(self) -> None:
        """Wait, and let another job in."""
        try:
            self.wait()
        finally:
            if self._hold is not None:
                self._hold.release()

    def found(self) -> list[int]:
        """Steps of whole checkpoints, rising, as the first rank sees them."""
        return self._together.from_first(self.place.steps)

    def resume(
        self,
        model: ParallelModel,
        optimizer: Optimizer,
        accept: Callable[[dict[str, Any]], None],
        rewind: int | None = None,
    ) -> dict[str, Any] | None:
        """Load the newest checkpoint into a model and optimizer of any layout; its position, or
        None where there is none.

        One that is damaged is set aside, with a warning, and the one before is taken. `accept` is
        given each position first, and raises StateError for one of another run. `rewind`: see
        `_choose`.

        Raises ConfigError if there is none to rewind to, StateError if none can be read or it is
        another model's, and StorageError if the storage fails: then an older one would be the wrong
        answer.
        """
        damaged: list[int] = []
        for step in reversed(self._together.from_first(lambda: self._choose(rewind))):
            try:
                position = self._load(step, model, optimizer, accept)
            except DamagedError as error:
                damaged.append(step)
                if self._rank == 0:
                    log.warning(
                        "the checkpoint of step %d cannot be used, the one before it is taken: %s",
                        step,
                        error,
                    )
                reason = error
                continue
            self._together.from_first(lambda: self._set_aside(damaged, "damaged"))
            return position
        if damaged:
            raise StateError(
                f"{self.place.url}: no checkpoint can be read, of steps {', '.join(map(str, damaged))} ({reason}); restore one, "
                f"or start anew in another train.out_dir"
            )
        return None

    def _choose(self, rewind: int | None) -> list[int]:
        """Steps to resume from, the best last. On the first rank.

        With `rewind`: those up to it, and those that were trained after rewinding to it. The others
        are set aside.
        """
        steps = self.place.steps()
        if rewind is None:
            return steps
        kept = [step for step in steps if step <= rewind or rewind in self._rewinds_of(step)]
        if not kept:
            raise ConfigError(
                f"train.rewind = {rewind}: there is no checkpoint at or before that step in {self.place.url}"
            )
        self._set_aside([step for step in steps if step not in kept], "rewound")
        self.place.clean_aside(self.keep)
        return kept

    def _rewinds_of(self, step: int) -> list[int]:
        try:
            return rewinds_of(self.place.find(step).position)
        except DamagedError:
            return []

    def _set_aside(self, steps: Sequence[int], why: str) -> None:
        for step in steps:
            log.warning(
                "the checkpoint of step %d is set aside as %s",
                step,
                self.place.set_aside(step, why),
            )

    def _load(
        self,
        step: int,
        model: ParallelModel,
        optimizer: Optimizer,
        accept: Callable[[dict[str, Any]], None],
    ) -> dict[str, Any]:
        found, metadata = self._together.from_first(lambda: self._examine(step))
        checksums = checksums_in(found.position)
        self._together.call(lambda: accept(found.position))
        files = self.place.draft(found.name)
        try:
            state = self._together.call(lambda: state_to_load(model, optimizer, metadata))
            reader = Reader(files, metadata, checksums, self._together)
            with _quiet():
                state_dict_loader.load(
                    state,
                    storage_reader=reader,
                    planner=LoadPlanner(),
                    process_group=self._group,
                    no_dist=self._group is None,
                )
        except CheckpointException as error:
            cause = _cause(error)
            if isinstance(cause, (DamagedError, StorageError)):
                raise cause from None
            raise _unfit(files.url(), cause) from None
        except (DamagedError, StorageError):
            raise
        except StateError as error:
            raise _unfit(files.url(), error) from None
        after_load(model, optimizer, state, metadata)
        return found.position

    def _examine(self, step: int) -> tuple[Found, Metadata]:
        """A checkpoint whose files are all there, as far as can be told without reading them.

        On the first rank.
        """
        found = self.place.find(step)
        files = self.place.draft(found.name)
        metadata = read_metadata(files, checksums_in(found.position))
        check_files(files, metadata)
        return found, metadata

    def _run(self, step: int, state: Mapping[str, Boxes], position: Mapping[str, Any]) -> None:
        try:
            self._write(step, state, position)
        except (
            BaseException
        ) as error:  # of a thread: `wait` raises it, and all ranks are told by `failed`
            self._error = error

    def _write(self, step: int, state: Mapping[str, Boxes], position: Mapping[str, Any]) -> None:
        try:
            name = self._together.from_first(lambda: self._begin(step))
            writer = Writer(self.place.draft(name), self._together, on_disk=self.place.on_disk)
            self._copies.wait()
            with _quiet():
                metadata = state_dict_saver.save(
                    dict(state),
                    storage_writer=writer,
                    planner=SavePlanner(),
                    process_group=self._group,
                    no_dist=self._group is None,
                )
            self._together.from_first(
                lambda: self._publish(step, name, metadata, writer.checksums.beside(position))
            )
        except (CheckpointException, DamagedError, StorageError, OSError) as error:
            cause = _cause(error)
            raise StorageError(
                f"{self.place.url}: the checkpoint of step {step} cannot be written ({_reason(cause)}); free space there, "
                f"or choose another train.out_dir. The checkpoints before it are whole"
            ) from None

    def _begin(self, step: int) -> str:
        self._check_hold()
        return self.place.begin(step)

    def _publish(
        self, step: int, name: str, metadata: Metadata, position: Mapping[str, Any]
    ) -> None:
        """Of a draft that all ranks have written; then old ones go. On the first rank."""
        _until_seen(lambda: check_files(self.place.draft(name), metadata), DamagedError)
        if self._before_publish is not None:
            self._before_publish()
        self._check_hold()
        self.place.publish(step, name, position)
        for old in self.place.steps()[: -self.keep]:
            try:
                self.place.remove(old)
            except (OSError, StateError, StorageError) as error:
                log.warning(
                    "%s: step %d cannot be removed (%s); the new one is whole",
                    self.place.url,
                    old,
                    _reason(error),
                )

    def _take_hold(self) -> None:
        self._hold = self.place.hold()
        self.place.prepare()

    def _check_hold(self) -> None:
        if self._hold is not None:
            self._hold.check()

    def _check_shared(self) -> None:
        """Raise ConfigError unless all ranks see what the first one writes: else each would keep a
        part of every checkpoint.
        """
        if self._group is None:
            return
        sign, host = self._together.from_first(self._leave_sign)
        self._together.work(lambda: self._look_for(sign, host))
        self._together.from_first(lambda: self.place.remove_sign(sign))

    def _leave_sign(self) -> tuple[str, str]:
        sign = f".shared-{secrets.token_hex(6)}"
        self.place.leave_sign(sign)
        return sign, socket.gethostname()

    def _look_for(self, sign: str, host: str) -> None:
        def look() -> None:
            if not self.place.sees(sign):
                raise ConfigError(
                    f"{self.place.url}: {socket.gethostname()} does not see what rank 0 wrote there on {host}; train.out_dir "
                    f"must be one folder for all ranks: on a shared file system, or a URL such as s3://bucket/run"
                )

        _until_seen(look, ConfigError)


def step_of(path: Path) -> int:
    """The step of a checkpoint's folder."""
    return int(path.name.removeprefix("step-"))


def load_position(path: Path) -> dict[str, Any]:
    """The step and the loader's state of a checkpoint on a disk, and what else was kept with them.

    Raises StateError.
    """
    return CheckpointFolder(path.parent).find(step_of(path)).position


def rewinds_of(position: Mapping[str, Any]) -> list[int]:
    """The values of train.rewind by which a checkpoint's run, or those it goes back to, have
    rewound.
    """
    rewinds = [int(step) for step in position.get("rewinds", ())]
    if position.get("rewind") is not None:  # as earlier versions wrote it
        rewinds.append(int(position["rewind"]))
    return rewinds


def _until_seen(look: Callable[[], None], unseen: type[Exception]) -> None:
    """`look()` until it raises nothing; its error after SEEN_WITHIN seconds."""
    until = time.monotonic() + SEEN_WITHIN
    while True:
        try:
            return look()
        except unseen:
            if time.monotonic() > until:
                raise
        time.sleep(LOOK_EVERY)


def _cause(error: BaseException) -> BaseException:
    """The first rank's error, of those that torch has collected."""
    if isinstance(error, CheckpointException) and error.failures:
        return error.failures[min(error.failures)][0]
    return error


def _reason(error: BaseException) -> str:
    """In one line."""
    if isinstance(error, StreammegaError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return (
            f"{os.fspath(error.filename)}: {error.strerror}" if error.filename else error.strerror
        )
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


def _unfit(url: str, error: BaseException) -> StateError:
    reason = re.sub(r"^rank \d+: ", "", _reason(error))
    return StateError(
        f"{url}: does not fit this model and optimizer ({reason}); restore [model], or start a new out_dir"
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """torch warns when one process saves by itself, which one rank without torchrun
    rightly does.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "torch.distributed is disabled, unavailable or uninitialized"
        )
        yield
