"""Atomic checkpoints: torch.distributed.checkpoint for tensors, JSON for the position.

A checkpoint is a folder `step-00000100`. It is written as `step-00000100.partial` and renamed when every rank is done,
so what bears the final name is whole. The loader's state lies inside as `position.json`: readable, the same on every rank.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader

from streammega.errors import StateError, StorageError
from streammega.train.parallel import Optimizer, ParallelModel
from streammega.train.state import Boxes, LoadPlanner, SavePlanner, after_load, state_to_load, state_to_save

log = logging.getLogger(__name__)

_NAME = re.compile(r"step-(\d{8})")


class Checkpoints:
    """The checkpoints of a run. Made by all ranks together; saving is collective, and may go on in the background.

    Background writing has a process group of its own, so that its messages never meet those of training.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder, self.keep = folder, keep
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(
        self, step: int, model: ParallelModel, optimizer: Optimizer, position: Mapping[str, Any], *, background: bool
    ) -> None:
        """Write one checkpoint, and drop all but the last `keep`. In the background: of what is true now."""
        self.wait()
        state = {name: boxes.copied() if background else boxes for name, boxes in state_to_save(model, optimizer).items()}
        if not background:
            return self._write(step, state, position)
        self._thread = threading.Thread(target=self._run, args=(step, state, dict(position)), name="streammega-save", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until what is being written is whole. Raises what went wrong with it."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def found(self) -> list[Path]:
        """Whole checkpoints, oldest first."""
        return checkpoints(self.folder)

    def set_aside_all_but(self, kept: Sequence[Path]) -> None:
        """Rename all other checkpoints to `step-*.rewound`, when every rank has looked at them."""
        self._barrier()
        if self._rank == 0:
            for path in self.found():
                if path not in kept:
                    aside = path.with_suffix(".rewound")
                    shutil.rmtree(aside, ignore_errors=True)
                    os.replace(path, aside)
        self._barrier()

    def load(self, path: Path, model: ParallelModel, optimizer: Optimizer) -> None:
        """Load tensors into a model and optimizer of any layout. Raises StateError for another model's."""
        try:
            with _quiet():
                metadata = FileSystemReader(path).read_metadata()
                state = state_to_load(model, optimizer, metadata)
                state_dict_loader.load(
                    state, checkpoint_id=path, planner=LoadPlanner(), process_group=self._group, no_dist=self._group is None
                )
        except (CheckpointException, Exception) as error:  # the first is no Exception; all kinds mean the same here
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise StateError(
                f"{path}: does not fit this model and optimizer ({reason[-1]}); restore [model], or start a new out_dir"
            ) from None
        after_load(model, optimizer, state, metadata)

    def _run(self, step: int, state: Mapping[str, Boxes], position: Mapping[str, Any]) -> None:
        try:
            self._write(step, state, position)
        except BaseException as error:
            self._error = error

    def _write(self, step: int, state: Mapping[str, Boxes], position: Mapping[str, Any]) -> None:
        final = self.folder / f"step-{step:08d}"
        partial = final.with_suffix(".partial")
        try:
            if self._rank == 0:
                for stale in self.folder.glob("step-*.partial"):  # of runs that were killed while saving
                    shutil.rmtree(stale)
                partial.mkdir(parents=True)
            self._barrier()
            with _quiet():
                state_dict_saver.save(
                    dict(state),
                    checkpoint_id=partial,
                    planner=SavePlanner(),
                    process_group=self._group,
                    no_dist=self._group is None,
                )
            if self._rank == 0:
                self._publish(partial, final, position)
            self._barrier()
        except (CheckpointException, OSError) as error:
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise StorageError(
                f"{partial}: cannot be written ({reason[-1]}); free space there, or choose another train.out_dir. The "
                f"checkpoints before it are whole"
            ) from None

    def _publish(self, partial: Path, final: Path, position: Mapping[str, Any]) -> None:
        with open(partial / "position.json", "w", encoding="utf-8") as file:
            json.dump(position, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        if final.exists():
            shutil.rmtree(final)
        os.replace(partial, final)
        for old in self.found()[: -self.keep]:
            shutil.rmtree(old)

    def _barrier(self) -> None:
        if self._group is not None:
            dist.barrier(self._group)


def checkpoints(folder: Path) -> list[Path]:
    """Whole checkpoints of a folder, oldest first."""
    return sorted(path for path in folder.glob("step-*") if _NAME.fullmatch(path.name))


def step_of(path: Path) -> int:
    """The step of a checkpoint's folder."""
    return int(path.name.removeprefix("step-"))


def load_position(path: Path) -> dict[str, Any]:
    """The step and the loader's state of a checkpoint, and what else was kept with them."""
    try:
        position = json.loads((path / "position.json").read_text(encoding="utf-8"))
        return dict(position) | {"step": int(position["step"]), "data": dict(position["data"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StateError(
            f"{path}/position.json: cannot be read ({error}); remove this checkpoint to resume from the one before"
        ) from None


@contextmanager
def _quiet() -> Iterator[None]:
    """torch warns when one process saves by itself, which one rank without torchrun rightly does."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        yield
