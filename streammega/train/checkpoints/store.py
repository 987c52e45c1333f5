"""Where the checkpoints of a run are: a folder on a disk, or a prefix in a bucket.

    step-00000100.json            the record: the position of the run, and the folder of the files
    step-00000100-3f09c1a2/       the files

A checkpoint exists when its record does. The record is written after all files, on the condition that
there is none of its step, and removed before them. Every save writes to a folder with a new name, so that
files of an earlier save, or of another job, cannot get into it. On a disk a file lock keeps other jobs out.
In a bucket, of two jobs the second to save a step ends.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import filelock

from streammega.config import StorageConfig
from streammega.config.validate import parse_json
from streammega.errors import ConfigError, ObjectNotFoundError, StorageError
from streammega.errors.logs import get_logger
from streammega.parallel.rank_sync import RankSync
from streammega.storage import Store, join_url, open_store
from streammega.storage.atomic_file import sync_folder
from streammega.storage.backends.local import LocalStore, PreadStore
from streammega.storage.open import is_remote
from streammega.storage.store import create_object
from streammega.storage.thread_pool import parallel_map
from streammega.train.checkpoints.files import CheckpointFiles
from streammega.train.checkpoints.integrity import CHECKSUMS, DamagedError, checksum_matches

log = get_logger(__name__)

SHARED_SIGN = ".shared-"
"""The prefix of the small files by which ranks check that they share the store."""
_RECORD = re.compile(r"step-(?P<step>\d{8,})\.json")
_POSITION: dict[str, type] = {
    **{"step": int, "data": dict, "model": dict, "record": dict, "loss_scale": dict},
    **{"train": dict, "phases_ahead": list, CHECKSUMS: dict},
}
"""The entries of a position; only the first two and the checksums are always there."""
_FOLDER = re.compile(r"step-(?P<step>\d{8,})-[0-9a-f]{8}")
"""The folder that a record names."""
_CHECKPOINT = re.compile(r"step-(?P<step>\d+)(-[0-9a-f]{8})?(\.json)?")
"""How a checkpoint may be named: by its step, its record or its folder."""
MAX_DELETES = 16
"""Deletes at once: each takes a round trip, and there may be a thousand files."""
VISIBLE_SECONDS = 60.0
"""How long until all ranks must see what one has written: NFS clients may cache for a minute."""
LOOK_SECONDS = 0.2
"""Between two looks, for the sake of network file systems."""
LOCK_SECONDS = 10.0
"""How long to wait for a file lock: a job that ends may hold it a little longer."""
_CANNOT_LOCK = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Errors of file systems without locks."""


class SavedCheckpoint(NamedTuple):
    """A whole checkpoint. name: of the folder of its files. position: of the run, with checksums."""

    name: str
    position: dict[str, Any]


class CheckpointStore:
    """Checkpoints by step. Only the first rank calls the methods; all ranks may call `files`, `exists`.

    Args:
        store: a disk, or a bucket.
        prefix: the key of the folder of checkpoints.
    """

    def __init__(self, store: Store, prefix: str) -> None:
        self._store = store
        self._prefix = prefix
        self._files = CheckpointFiles(store, prefix)
        self.url = store.url(prefix)
        self.folder = Path(prefix) if isinstance(store, LocalStore) else None
        """Where the checkpoints are on a disk; None for a bucket."""

    @classmethod
    def open(cls, out_dir: str, storage: StorageConfig) -> CheckpointStore:
        """The checkpoints of a run in `out_dir`/checkpoints.

        Raises ConfigError for a URL that cannot work.
        """
        return cls._at(join_url(out_dir, "checkpoints"), storage)

    @classmethod
    def _at(cls, url: str, storage: StorageConfig) -> CheckpointStore:
        store, key = open_store(url, storage)
        if not is_remote(url):
            # Without maps: an I/O error under a map, on NFS for instance, would kill the process.
            store = PreadStore(storage)
        return cls(store, key)

    @classmethod
    def of_checkpoint(cls, url: str, storage: StorageConfig) -> tuple[CheckpointStore, int]:
        """Where a checkpoint is that is named by its URL, with `step-N` at its end, and its step. It is in
        that folder, or in `checkpoints` there.

        Raises ConfigError where it is in neither, StorageError.
        """
        folder, _, name = url.rstrip("/").rpartition("/")
        match = _CHECKPOINT.fullmatch(name)
        if match is None:
            raise ConfigError(
                f"train.resume_from is {url!r}; it must end in the checkpoint's name, such as "
                f"runs/one/checkpoints/step-1200"
            )
        step = int(match["step"])
        steps: list[int] = []
        for place in (cls._at(folder or ".", storage), cls.open(folder or ".", storage)):
            steps = place.steps() or steps
            if step in steps:
                return place, step
        there = (
            f"there are those of steps {', '.join(map(str, steps))}" if steps else "there is none"
        )
        raise ConfigError(
            f"train.resume_from: no checkpoint of step {step} in {folder or '.'}: {there}; "
            f"check the name"
        )

    def lock(self) -> filelock.BaseFileLock | None:
        """Keep other jobs out of a folder on a disk, and remove what killed processes left there as they
        started. Raises ConfigError where another job is at work.
        """
        if self.folder is None:
            return None
        lock = lock_file(self.folder.parent / ".lock")
        signs = self._store.list(self._files.key(SHARED_SIGN), recursive=False)
        self._delete([sign.key for sign in signs])
        return lock

    def steps(self) -> list[int]:
        """Steps of whole checkpoints, rising."""
        names = [
            info.key.rpartition("/")[2]
            for info in self._store.list(self._files.key("step-"), recursive=False)
        ]
        matches = [_RECORD.fullmatch(name) for name in names]
        return sorted(int(match["step"]) for match in matches if match is not None)

    def find(self, step: int) -> SavedCheckpoint:
        """A whole checkpoint. Raises DamagedError."""
        name = _record_name(step)
        url = self._record_url(name)
        record = self._read_record(name)
        position = record.get("position")
        if not isinstance(position, dict) or not checksum_matches(position):
            raise DamagedError(f"{url}: is damaged: its checksum is missing or another")
        for entry, kind in _POSITION.items():
            if not isinstance(position.get(entry, kind()), kind):
                raise DamagedError(
                    f"{url}: holds no position of a run: {entry} is no {kind.__name__}"
                )
        if not position.keys() >= {"step", "data", CHECKSUMS}:
            raise DamagedError(
                f"{url}: holds no position of a run: step, data or {CHECKSUMS} are missing"
            )
        if position["step"] != step:
            raise DamagedError(f"{url}: is the record of step {position['step']}; name it so again")
        return SavedCheckpoint(record["files"], position)

    def begin(self, step: int) -> str:
        """The name of a new folder. Removes files of killed saves, which no record names."""
        try:
            self._remove_orphans("step-")
        except StorageError as error:
            log.warning(
                "%s: what killed saves left there could not be removed: %s", self.url, error
            )
        return f"{_record_name(step)}-{secrets.token_hex(4)}"

    def files(self, name: str) -> CheckpointFiles:
        """The folder of a save, or of a checkpoint that was found."""
        return CheckpointFiles(self._store, self._files.key(name))

    def publish(
        self, step: int, name: str, position: Mapping[str, Any], replaced: str | None = None
    ) -> None:
        """Make a folder whose files are all there the checkpoint of its step.

        replaced: the folder of a checkpoint of this job, in whose place it may be. Raises ConfigError
        where another job has saved the step.
        """
        if self.folder is not None:
            # After a power failure the record may exist: then its files must exist too.
            sync_folder(self.folder)
        record = {"version": 2, "step": step, "files": name, "position": dict(position)}
        file_name = f"{_record_name(step)}.json"
        data = json.dumps(record, indent=1).encode()
        if create_object(self._store, self._files.key(file_name), data):
            return
        folder_name = self._folder_of(_record_name(step))
        if folder_name == replaced:
            self._files.put(file_name, data)
        # It may be there by this very call, whose answer was lost.
        elif folder_name != name:
            raise ConfigError(
                f"{self._files.url(file_name)}: another job has saved step {step} there, and this one ends; "
                f"give each job a train.out_dir of its own"
            )

    def remove(self, step: int) -> None:
        """Remove a checkpoint, its record first. Raises StorageError."""
        name = _record_name(step)
        folder = self._folder_of(name)
        self.delete(f"{name}.json")
        self._remove_orphans(folder, was_published=True)

    def touch(self, name: str) -> None:
        """Write a small file."""
        self._files.put(name, b"all ranks see this\n")

    def exists(self, name: str) -> bool:
        """Whether a file is there."""
        try:
            self._store.info(self._files.key(name))
        except ObjectNotFoundError:
            return False
        return True

    def delete(self, name: str) -> None:
        """Remove a file."""
        self._store.delete(self._files.key(name))

    def _record_url(self, name: str) -> str:
        return self._files.url(f"{name}.json")

    def _read_record(self, name: str) -> dict[str, Any]:
        """Raises DamagedError for a record that is missing or broken, or that names a folder which is
        not a checkpoint's: the folder is removed with the record.
        """
        url = self._record_url(name)
        try:
            record = parse_json(self._files.read(f"{name}.json"))
        except ValueError as error:
            raise DamagedError(f"{url}: cannot be read ({error})") from None
        folder = record.get("files") if isinstance(record, dict) else None
        if not isinstance(folder, str) or not _FOLDER.fullmatch(folder):
            raise DamagedError(f"{url}: names {folder!r} as the folder of its files")
        return dict(record)

    def _folder_of(self, name: str) -> str:
        """The folder that a record names. A damaged one counts as naming all folders of its step."""
        try:
            folder: str = self._read_record(name)["files"]
            return folder
        except DamagedError:
            return f"{name}-"

    def _remove_orphans(self, folder_prefix: str, *, was_published: bool = False) -> None:
        """Remove the files that no record names, of folders whose names start so.

        was_published: a record has named them until now. Other files another job may still be writing in
        a bucket, where none is locked out. But of a step that has a checkpoint, or is before all that are
        kept, nothing can be published any more that stays.
        """
        # Before the records: what was published since is not taken for an orphan.
        listed = self._store.list(self._files.key(folder_prefix))
        steps = self.steps()
        named = tuple(self._folder_of(_record_name(step)) for step in steps)
        orphans: list[str] = []
        for info in listed:
            folder, _, _ = info.key.removeprefix(f"{self._prefix}/").partition("/")
            match = _FOLDER.fullmatch(folder)
            if match is None or folder.startswith(named):
                continue
            step = int(match["step"])
            is_over = step in steps or step < min(steps, default=0)
            if was_published or is_over or self.folder is not None:
                orphans.append(info.key)
        self._delete(orphans)
        if self.folder is not None:
            for path in self.folder.glob("step-*-*"):
                with suppress(OSError):  # it is not empty
                    path.rmdir()

    def _delete(self, keys: list[str]) -> None:
        if keys:
            parallel_map(self._store.delete, keys, MAX_DELETES)


def check_shared_filesystem(store: CheckpointStore, rank_sync: RankSync) -> None:
    """Raise ConfigError unless all ranks see what the first one writes: else each would keep a part
    of every checkpoint. Raises StorageError where it cannot write.
    """
    # A new name every time: all would see one that an earlier start left.
    sign, first_host = rank_sync.run_on_first(
        lambda: (f"{SHARED_SIGN}{secrets.token_hex(6)}", socket.gethostname())
    )

    def look() -> None:
        """Raise while the sign is not seen."""
        if not store.exists(sign):
            raise ConfigError(
                f"{store.url}: {socket.gethostname()} does not see what rank 0 wrote there "
                f"on {first_host}; train.out_dir must be one folder for all ranks: "
                f"on a shared file system, or a URL such as s3://bucket/run"
            )

    rank_sync.run_on_first(lambda: store.touch(sign))
    rank_sync.run_long(lambda: wait_until_visible(look, ConfigError))
    rank_sync.run_on_first(lambda: store.delete(sign))


def wait_until_visible(look: Callable[[], None], invisible: type[Exception]) -> None:
    """`look()` until it raises nothing; its error after VISIBLE_SECONDS."""
    deadline = time.monotonic() + VISIBLE_SECONDS
    while True:
        try:
            return look()
        except invisible:
            if time.monotonic() > deadline:
                raise
        time.sleep(LOOK_SECONDS)


def lock_file(path: Path) -> filelock.BaseFileLock | None:
    """Lock a file for this process, all of whose runs and threads share the lock. None where the file
    system has no locks.

    Raises ConfigError while another process has it, OSError where the file cannot be made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(path, thread_local=False, is_singleton=True)
    try:
        lock.acquire(timeout=LOCK_SECONDS)
    except filelock.Timeout:
        owner = path.read_text(errors="replace").strip()
        raise ConfigError(
            f"{path.parent}: another job trains there ({owner or 'unknown process'}); "
            f"end it, or choose another train.out_dir"
        ) from None
    except OSError as error:
        if error.errno not in _CANNOT_LOCK:
            raise
        log.warning(
            "%s: this file system has no locks (%s); let only one job at a time train there",
            path,
            error.strerror,
        )
        return None
    # Where there are no locks, filelock has its own text in the file.
    if isinstance(lock, filelock.UnixFileLock):
        path.write_text(f"process {os.getpid()} on {socket.gethostname()}\n")
    return lock


def _record_name(step: int) -> str:
    """The name of the record of a step's checkpoint, without its suffix."""
    return f"step-{step:08d}"
