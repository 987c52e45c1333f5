"""Checkpoints on a disk: folders that are written under another name and renamed when they are
whole.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from streammega.config import StorageConfig
from streammega.storage.backends.local import PreadStore
from streammega.train.checkpoints.files import Files
from streammega.train.checkpoints.hold import Hold, hold_file
from streammega.train.checkpoints.place import (
    SET_ASIDE,
    SIGN,
    Found,
    folder_of,
    free_name,
    parsed,
    position_in,
    step_in,
)

log = logging.getLogger(__name__)

POSITION_FILE = "position.json"


class CheckpointFolder:
    """Checkpoints in a folder of a disk that all ranks share. Implements `CheckpointPlace`."""

    on_disk = True

    def __init__(self, path: Path, storage: StorageConfig | None = None) -> None:
        self.path = path
        self.url = str(path)
        # By reads: an I/O error under a map, of NFS for instance, would end the process.
        self._store = PreadStore(storage or StorageConfig())

    def prepare(self) -> None:
        """A step that was being replaced gets its old checkpoint back, unless the
        new one is there. Signs of killed starts go.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        for sign in self.path.glob(f"{SIGN}*"):
            _remove_tree(sign)
        for old in self.path.glob("step-*.replaced*"):
            final = old.with_suffix("")
            if final.exists():
                _remove_tree(old)
            else:
                os.replace(old, final)

    def steps(self) -> list[int]:
        """Of the folders that bear a final name."""
        steps = [step_in(path.name) for path in self.path.glob("step-*")]
        return sorted(step for step in steps if step is not None)

    def find(self, step: int) -> Found:
        """By its position.json."""
        files = self.draft(folder_of(step))
        url = files.url(POSITION_FILE)
        written = parsed(files.read(POSITION_FILE), url)
        return Found(step=step, name=folder_of(step), position=position_in(written, url))

    def begin(self, step: int) -> str:
        """Remove what runs left that were killed while they saved."""
        draft = self.path / f"{folder_of(step)}.partial"
        for pattern in ("step-*.partial", "step-*.removed*"):
            for stale in self.path.glob(pattern):
                if stale != draft:
                    _remove_tree(stale)
        # This one must go, or its files would be taken for those of the save that begins.
        if draft.exists():
            shutil.rmtree(draft)
        draft.mkdir(parents=True)
        return draft.name

    def draft(self, name: str) -> Files:
        """A folder in the folder."""
        return Files(store=self._store, prefix=str(self.path / name))

    def publish(self, step: int, name: str, position: Mapping[str, Any]) -> None:
        """Rename.

        Of a step that is there already, the old folder is kept beside it until the new one bears
        its name.
        """
        draft = self.path / name
        final = self.path / folder_of(step)
        # On the disk before it bears a final name: after a loss of power the name may be there, and
        # what was written before it not.
        with open(draft / POSITION_FILE, "w", encoding="utf-8") as file:
            json.dump(position, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        _sync_folder(draft)
        old = self._free(f"{folder_of(step)}.replaced")
        if final.exists():
            os.replace(final, old)
        os.replace(draft, final)
        _sync_folder(self.path)
        if old.exists():
            _remove_tree(old)

    def remove(self, step: int) -> None:
        """Rename, then remove: what bears a final name stays whole, whatever happens meanwhile."""
        removed = self._free(f"{folder_of(step)}.removed")
        os.replace(self.path / folder_of(step), removed)
        shutil.rmtree(removed)

    def set_aside(self, step: int, why: str) -> str:
        """Rename; a name that is taken gets a number."""
        aside = self._free(f"{folder_of(step)}.{why}")
        os.replace(self.path / folder_of(step), aside)
        os.utime(aside)  # when it was set aside, for clean_aside
        return str(aside)

    def clean_aside(self, keep: int) -> None:
        """By the time of their folders."""
        aside: list[tuple[float, Path]] = []
        for path in self.path.iterdir():
            if SET_ASIDE.fullmatch(path.name):
                aside.append((path.stat().st_mtime, path))
        aside.sort()
        for _, path in aside[:-keep]:
            _remove_tree(path)

    def leave_sign(self, name: str) -> None:
        """A file."""
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / name).write_text("seen by all ranks\n", encoding="utf-8")

    def sees(self, name: str) -> bool:
        """Whether the file is there."""
        return (self.path / name).exists()

    def remove_sign(self, name: str) -> None:
        """The file goes."""
        (self.path / name).unlink(missing_ok=True)

    def hold(self) -> Hold:
        """By a lock of the kernel's on a file beside the checkpoints."""
        return hold_file(self.path.parent / ".lock")

    def _free(self, name: str) -> Path:
        taken = {path.name for path in self.path.iterdir()}
        return self.path / free_name(name, taken)


def checkpoints(folder: Path) -> list[Path]:
    """Whole checkpoints of a folder on a disk, oldest first."""
    whole = [path for path in folder.glob("step-*") if step_in(path.name) is not None]
    return sorted(whole)


def _remove_tree(path: Path) -> None:
    """What nobody needs any more: one that cannot be removed is no reason to end a run, and is
    tried again at later saves.
    """
    try:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    except OSError as error:
        log.warning(
            "%s: cannot be removed (%s); it is not used any more, remove it by hand",
            path,
            error.strerror or error,
        )


def _sync_folder(path: Path) -> None:
    """The names in a folder reach the disk as well as the files do."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:  # some network file systems sync no folders
        log.debug("%s: cannot be synced: %s", path, error)
    finally:
        os.close(fd)
