"""How a checkpoint becomes visible, on a disk and in a bucket.

    step-00000100.json            the record: the position of the run, and the folder of the files
    step-00000100-3f09c1a2/       the files

A checkpoint exists when its record does. `CheckpointStore.save` makes one, in the order of this page:

1. `begin` names a folder that no save has had. So files of an earlier save, or of another job, cannot get
   into a checkpoint.
2. Each rank writes its file there, and then the first rank writes the list of all (`write_tensors`). A file
   shows when it is whole: on a disk it is synced and then renamed, in a bucket its upload ends.
3. `publish` writes the record when the first rank sees all files, on the condition that its step has none.
   On a disk the names of the files are synced before: after a power failure there is no record without
   them. In a bucket no lock keeps another job out: of two that save a step, the second ends.
4. `remove_old` removes older checkpoints, each with its record first: a half removed one has no record.

So a kill at any moment leaves whole checkpoints, and files that no record names. `steps` lists the records,
and `find` reads one. The next `begin` removes the files. A damaged checkpoint keeps its record until a newer
one is saved, and takes the place of no sound one.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import filelock
from torch.distributed.checkpoint.metadata import Metadata

from streammega.config import StorageConfig
from streammega.config.validate import parse_json
from streammega.errors import ConfigError, StateError, StorageError
from streammega.errors.logs import get_logger
from streammega.parallel.rank_sync import RankSync
from streammega.storage import Store, join_url, open_store
from streammega.storage.atomic_file import sync_folder
from streammega.storage.backends.local import LocalStore, PreadStore
from streammega.storage.open import is_remote
from streammega.storage.store import ObjectInfo, create_object
from streammega.storage.thread_pool import parallel_map
from streammega.train.checkpoints.files import CheckpointFiles
from streammega.train.checkpoints.integrity import DamagedError, check_version, is_signed, sign
from streammega.train.checkpoints.out_dir import SHARED_SIGN, lock_file, wait_until_visible

log = get_logger(__name__)

RECORD_VERSION = 3
_RECORD = re.compile(r"step-(?P<step>\d{8,})\.json")
_FOLDER = re.compile(r"step-(?P<step>\d{8,})-[0-9a-f]{8}")
"""The folder that a record names."""
_CHECKPOINT = re.compile(r"step-(?P<step>\d+)(?P<folder>-[0-9a-f]{8})?(\.json)?")
"""How a checkpoint may be named: by its step, its record or its folder."""
_POSITION: dict[str, type] = {
    **{"step": int, "data": dict, "model": dict, "record": dict, "loss_scale": dict},
    **{"train": dict, "phases_ahead": list},
}
"""The entries of a position; only the first two are always there."""
MAX_DELETES = 16
"""Deletes at once: each takes a round trip, and there may be a thousand files."""


class SavedCheckpoint(NamedTuple):
    """What the record of a checkpoint says.

    name: of the folder of its files. tensors: the checksum of their list. position: of the run.
    """

    name: str
    tensors: str
    position: dict[str, Any]


class CheckpointStore:
    """The checkpoints of a run by step. Only the first rank calls the methods, but for `save`, `files` and `unlock`.

    Args:
        store: a disk, or a bucket.
        prefix: the key of the folder of checkpoints.
    """

    def __init__(self, store: Store, prefix: str) -> None:
        self.root = CheckpointFiles(store, prefix)
        self.url = store.url(prefix)
        self.folder = Path(prefix) if isinstance(store, LocalStore) else None
        """Where the checkpoints are on a disk; None for a bucket."""
        self.own_folder: str | None = None
        """The folder of the checkpoint that this job has loaded from here, or saved, last."""
        self.damaged: set[int] = set()
        """Steps of checkpoints that this job has skipped."""
        self._lock: filelock.BaseFileLock | None = None

    @classmethod
    def open(cls, out_dir: str, storage: StorageConfig) -> CheckpointStore:
        """The checkpoints of a run in `out_dir`/checkpoints.

        Raises ConfigError for a URL that cannot work.
        """
        return cls.at(join_url(out_dir, "checkpoints"), storage)

    @classmethod
    def at(cls, url: str, storage: StorageConfig) -> CheckpointStore:
        """The checkpoints in a folder. Raises ConfigError for a URL that cannot work."""
        store, key = open_store(url, storage)
        if not is_remote(url):
            # Without maps: an I/O error under a map, on NFS for instance, would kill the process.
            store = PreadStore(storage)
        return cls(store, key)

    def lock(self) -> None:
        """Keep other jobs out of a folder on a disk, and remove what killed processes left there as they
        started. Raises ConfigError where another job is at work.
        """
        if self.folder is not None:
            self._lock = lock_file(self.folder.parent / ".lock")
            self._delete(self.root.list(SHARED_SIGN))
        if self._lock is not None:
            # Before anything is written: the disk may be full of them.
            self._clear()

    def unlock(self) -> None:
        """Let other jobs in again."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def save(
        self,
        step: int,
        position: Mapping[str, Any],
        write: Callable[[CheckpointFiles], tuple[Metadata, str]],
        rank_sync: RankSync,
        keep: int,
    ) -> None:
        """Make a checkpoint, and remove all but the last `keep`. All ranks call it together.

        write: on all ranks, fills a new folder; returns as `files.write_tensors`. Raises DamagedError
        where files do not become visible to the first rank, StorageError, ConfigError as `publish`.
        """
        name = rank_sync.run_on_first(lambda: self.begin(step))
        files = self.files(name)
        metadata, tensors = write(files)

        def publish() -> None:
            wait_until_visible(lambda: files.check(metadata), DamagedError)
            self.publish(step, name, tensors, position)
            self.remove_old(step, keep)

        rank_sync.run_on_first(publish)

    def begin(self, step: int) -> str:
        """The name of a new folder. Removes files of killed saves, which no record names."""
        self._clear()
        return f"{_name(step)}-{secrets.token_hex(4)}"

    def _clear(self) -> None:
        """`_remove_orphans`, with a warning where that fails."""
        try:
            self._remove_orphans()
        except StorageError as error:
            log.warning(
                "%s: what killed saves left there could not be removed: %s", self.url, error
            )

    def files(self, name: str) -> CheckpointFiles:
        """The folder of a save, or of a checkpoint that was found."""
        return CheckpointFiles(self.root.store, self.root.key(name))

    def publish(self, step: int, name: str, tensors: str, position: Mapping[str, Any]) -> None:
        """Make a folder whose files are all there the checkpoint of its step. tensors: the checksum of
        their list.

        It takes the place of one that this job has saved or loaded, and of a damaged one. Raises
        ConfigError where another job has saved the step.
        """
        file_name = f"{_name(step)}.json"
        if step in self.damaged:
            # Only where there is no record is a new one written. The damaged files, which it may not
            # name, go with those that no record names.
            self.root.store.delete(self.root.key(file_name))
            self.damaged.discard(step)
        if self.folder is not None:
            # After a power failure the record may exist: then its files must exist too.
            sync_folder(self.folder)
        record = {
            "version": RECORD_VERSION,
            "files": name,
            "tensors": tensors,
            "position": position,
        }
        data = json.dumps(sign(record), indent=1).encode()
        if not create_object(self.root.store, self.root.key(file_name), data):
            folder_name = self._folder_of(step)
            if folder_name == self.own_folder:
                self.root.put(file_name, data)
            # It may be there by this very call, whose answer was lost.
            elif folder_name != name:
                raise ConfigError(
                    f"{self.root.url(file_name)}: another job has saved step {step} there, and this one "
                    f"ends; give each job a train.out_dir of its own"
                )
        self.own_folder = name

    def remove_old(self, step: int, keep: int) -> None:
        """Remove all but the last `keep` sound checkpoints, and damaged ones before the new one, of `step`.
        What cannot be removed stays, with a warning.
        """
        damaged = [one for one in sorted(self.damaged) if one < step]
        try:
            sound = [one for one in self.steps() if one not in self.damaged]
        except StorageError as error:
            log.warning(
                "%s: older steps cannot be listed (%s); the new one is whole", self.url, error
            )
            return
        for old_step in [*damaged, *sound[:-keep]]:
            try:
                self.remove(old_step)
            except (OSError, StorageError) as error:
                log.warning(
                    "%s: step %d cannot be removed (%s); the new one is whole",
                    self.url,
                    old_step,
                    error,
                )

    def remove(self, step: int) -> None:
        """Remove a checkpoint, its record first. Raises StorageError."""
        folder = self._folder_of(step)
        self.root.store.delete(self.root.key(f"{_name(step)}.json"))
        self._delete(self.root.store.list(self.root.key(folder)))
        self.damaged.discard(step)

    def _remove_orphans(self) -> None:
        """Remove the files that no record names. Without a lock, as in a bucket, another job may still be
        writing them: then only those of a step that has a checkpoint, or is before all that are kept. What
        is published of these does not stay.
        """
        # Before the records: what was published since is not taken for an orphan.
        listed = self.root.store.list(self.root.key("step-"))
        steps = self.steps()
        named = tuple(self._folder_of(step) for step in steps)
        orphans: list[ObjectInfo] = []
        for info in listed:
            folder, _, _ = info.key.removeprefix(self.root.key("")).partition("/")
            match = _FOLDER.fullmatch(folder)
            if match is None or folder.startswith(named):
                continue
            step = int(match["step"])
            if self._lock is not None or step in steps or step < min(steps, default=0):
                orphans.append(info)
        self._delete(orphans)

    def _delete(self, files: Sequence[ObjectInfo]) -> None:
        """Remove files, and folders that are empty then."""
        if files:
            parallel_map(self.root.store.delete, [info.key for info in files], MAX_DELETES)
        if self.folder is not None:
            for path in self.folder.glob("step-*-*"):
                with suppress(OSError):  # it is not empty
                    path.rmdir()

    def steps(self) -> list[int]:
        """Steps that have a record, rising."""
        names = [info.key.rpartition("/")[2] for info in self.root.list("step-")]
        matches = map(_RECORD.fullmatch, names)
        return sorted(int(match["step"]) for match in matches if match is not None)

    def find(self, step: int) -> SavedCheckpoint:
        """What the record of a step says. Raises DamagedError, also where there is none, and StateError for
        one of another release.
        """
        file_name = f"{_name(step)}.json"
        where = self.root.url(file_name)
        try:
            record = parse_json(self.root.read(file_name))
        except ValueError as error:
            raise DamagedError(f"{where}: cannot be read ({error})") from None
        if not isinstance(record, dict) or not is_signed(record):
            raise DamagedError(f"{where}: is damaged: its checksum is missing or another")
        check_version(record.get("version"), RECORD_VERSION, where)
        folder = record.get("files")
        if not isinstance(folder, str) or not _FOLDER.fullmatch(folder):
            raise DamagedError(f"{where}: names {folder!r} as the folder of its files")
        position = record.get("position")
        if not isinstance(position, dict) or not position.keys() >= {"step", "data"}:
            raise DamagedError(f"{where}: holds no position of a run: step or data are missing")
        for entry, kind in _POSITION.items():
            if not isinstance(position.get(entry, kind()), kind):
                raise DamagedError(
                    f"{where}: holds no position of a run: {entry} is no {kind.__name__}"
                )
        if position["step"] != step:
            raise DamagedError(
                f"{where}: is the record of step {position['step']}; name it so again"
            )
        return SavedCheckpoint(folder, str(record.get("tensors")), position)

    def read_metadata(self, step: int) -> tuple[SavedCheckpoint, Metadata]:
        """What a checkpoint holds, after a check of the names and sizes of its files. Raises
        DamagedError.
        """
        saved = self.find(step)
        files = self.files(saved.name)
        metadata = files.read_metadata(saved.tensors)
        files.check(metadata)
        return saved, metadata

    def _folder_of(self, step: int) -> str:
        """The folder that a record names. A damaged one counts as naming all folders of its step, for what
        it says may be wrong.
        """
        try:
            return self.find(step).name
        except StateError:
            return f"{_name(step)}-"


def find_checkpoint(url: str, storage: StorageConfig) -> tuple[CheckpointStore, int]:
    """Where a checkpoint is that is named by its URL, with `step-N` at its end, and its step. It is in that
    folder, or in `checkpoints` there.

    Raises ConfigError where it is in neither, or its folder is another, DamagedError, StorageError.
    """
    folder, _, name = url.rstrip("/").rpartition("/")
    match = _CHECKPOINT.fullmatch(name)
    if match is None:
        raise ConfigError(
            f"{url}: is no checkpoint; it must end in the checkpoint's name, such as "
            f"runs/one/checkpoints/step-1200"
        )
    step = int(match["step"])
    folder = folder or "."
    steps: list[int] = []
    for place in (CheckpointStore.at(folder, storage), CheckpointStore.open(folder, storage)):
        steps = place.steps() or steps
        if step not in steps:
            continue
        if match["folder"] and place.find(step).name != f"{_name(step)}{match['folder']}":
            raise ConfigError(
                f"{url}: is no checkpoint; that of step {step} is {place.find(step).name}"
            )
        return place, step
    there = f"there are those of steps {', '.join(map(str, steps))}" if steps else "there is none"
    raise ConfigError(f"no checkpoint of step {step} in {folder}: {there}; check the name")


def _name(step: int) -> str:
    """How the names of the record and the folder of a step begin."""
    return f"step-{step:08d}"
