"""Where the checkpoints of a run are, and how they appear there whole: a folder of a disk, or a prefix
of a bucket.

    step-00000100.json            the record: the position of the run, and the folder of the files
    step-00000100-3f09c1a2/       the files

The record makes a checkpoint. It is written at once, when all files are there, and removed before
them. Every save writes to a folder of a new name, so that nothing which an earlier save left
behind, or still sends, gets among its files.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streammega.config import StorageConfig
from streammega.errors import ConfigError, ObjectNotFoundError, StorageError
from streammega.storage import Store, join_url, open_store
from streammega.storage.backends.local import LocalStore, PreadStore
from streammega.storage.open import is_remote
from streammega.storage.store import atomic_writer
from streammega.storage.thread_pool import parallel_map
from streammega.train.all_ranks import AllRanks
from streammega.train.checkpoints.integrity import DamagedError, Files, is_as_written
from streammega.train.checkpoints.lock import FileLock, JobLock, ObjectLock

log = logging.getLogger(__name__)

SIGN = ".shared-"
"""How the names of small files begin by which ranks see whether they share the store."""
_RECORD = re.compile(r"step-(?P<step>\d{8})")
_SET_ASIDE = re.compile(r"step-\d{8}\.(rewound|damaged)(-\d+)?")
"""The record of a checkpoint that is kept, and resumed from no more."""
_FOLDER = re.compile(r"step-\d{8}-[0-9a-f]{8}")
_NAMED_FILES = re.compile(r"step-\d{8}-([0-9a-f]{8})?")
"""The folder that a record names, or how the names of all folders of a step begin."""
DELETED_AT_ONCE = 16
"""Requests: each takes a round trip of tens of milliseconds, and there may be a thousand files."""
SEEN_WITHIN = 60.0
"""Seconds after which what one rank wrote must be seen by the others: clients of NFS look again
after up to a minute.
"""

LOOK_EVERY = 0.2
"""Seconds between two looks: on a disk the first sees it, and a file system of the network is not
to be asked all the time.
"""


@dataclass(frozen=True, kw_only=True)
class SavedCheckpoint:
    """A whole checkpoint.

    step: after which it was saved. name: of the folder of its files. position: what was written
    beside the tensors.
    """

    step: int
    name: str
    position: dict[str, Any]


class CheckpointStore:
    """Checkpoints by step.

    Methods are called on the first rank alone, but for `draft` and `sees`.

    Args:
        store: a disk, or a bucket.
        prefix: the key of the folder of checkpoints.
    """

    def __init__(self, store: Store, prefix: str) -> None:
        self._store = store
        self._prefix = prefix
        self.url = store.url(prefix)
        self.folder = Path(prefix) if isinstance(store, LocalStore) else None
        """Where the checkpoints are on a disk; None for a bucket."""

    @classmethod
    def open(cls, out_dir: str, storage: StorageConfig) -> CheckpointStore:
        """The checkpoints of a run in `out_dir`/checkpoints.

        Raises ConfigError for a URL that cannot work.
        """
        store, key = open_store(join_url(out_dir, "checkpoints"), storage)
        if not is_remote(out_dir):
            # By reads: an I/O error under a map, of NFS for instance, would end the process.
            store = PreadStore(storage)
        return cls(store, key)

    def prepare(self) -> None:
        """Remove what killed starts left. Call it once, under the lock."""
        self._delete([item.key for item in self._store.list(self._key(SIGN), recursive=False)])

    def steps(self) -> list[int]:
        """Steps of whole checkpoints, rising."""
        matches = [_RECORD.fullmatch(name) for name in self._records()]
        return sorted(int(match["step"]) for match in matches if match is not None)

    def find(self, step: int) -> SavedCheckpoint:
        """A whole checkpoint. Raises DamagedError."""
        name = record_name(step)
        record = self._record(name)
        position = _position_in(record.get("position"), self._url(name))
        return SavedCheckpoint(step=step, name=record["files"], position=position)

    def begin(self, step: int) -> str:
        """The name of a new draft. Removes files that no record names, which killed saves left."""
        try:
            self._remove_orphans("step-")
        except (StorageError, DamagedError) as error:
            log.warning(
                "%s: what killed saves left there could not be removed: %s", self.url, error
            )
        return f"{record_name(step)}-{secrets.token_hex(4)}"

    def draft(self, name: str) -> Files:
        """The files of a draft, or of a checkpoint that was found."""
        return Files(store=self._store, prefix=self._key(name))

    def publish(self, step: int, name: str, position: Mapping[str, Any]) -> None:
        """Make a draft, whose files are all there, the checkpoint of its step."""
        if self.folder is not None:
            # After a loss of power the record may be there: what it names must be too.
            _sync_folder(self.folder / name)
            _sync_folder(self.folder)
        record = {"version": 2, "step": step, "files": name, "position": dict(position)}
        self._put_record(record_name(step), record)

    def remove(self, step: int) -> None:
        """Remove a checkpoint, its record first.

        Raises StorageError; it is gone from `steps` nevertheless, unless its record stays.
        """
        self._remove(record_name(step))

    def set_aside(self, step: int, why: str) -> str:
        """Take a checkpoint out of `steps` and keep it; the URL of its new record."""
        name = record_name(step)
        aside = self._free_name(f"{name}.{why}")
        try:
            record = self._record(name)
        except DamagedError:
            # all that were ever written for the step
            record = {"version": 2, "step": step, "files": f"{name}-"}
        record["set_aside"] = time.time()
        # In this order: what is killed between the two leaves the checkpoint, under both names.
        self._put_record(aside, record)
        self._store.delete(self._record_key(name))
        return self._url(aside)

    def clean_aside(self, keep: int) -> None:
        """Remove what was set aside, but for the last `keep` of them."""
        aside = [name for name in self._records() if _SET_ASIDE.fullmatch(name)]
        time_of = {name: float(self._record(name).get("set_aside", 0.0)) for name in aside}
        aside.sort(key=lambda name: time_of[name])
        for name in aside[:-keep]:
            self._remove(name)

    def lock(self) -> JobLock:
        """Keep other jobs out. Raises ConfigError where one is at work."""
        if self.folder is not None:
            return FileLock(self.folder.parent / ".lock")
        parent, _, _ = self._prefix.rpartition("/")
        # A run at the root of a bucket has no parent, and keys begin with no slash.
        return ObjectLock(self._store, f"{parent}/lock.json".lstrip("/"))

    def leave_sign(self, name: str) -> None:
        """Write a small file."""
        self._put(name, b"seen by all ranks\n")

    def sees(self, name: str) -> bool:
        """Whether such a file is there."""
        try:
            self._store.info(self._key(name))
        except ObjectNotFoundError:
            return False
        return True

    def remove_sign(self, name: str) -> None:
        """Remove it."""
        self._store.delete(self._key(name))

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}"

    def _record_key(self, name: str) -> str:
        return self._key(f"{name}.json")

    def _url(self, name: str) -> str:
        """Of a record, for messages."""
        return self._store.url(self._record_key(name))

    def _records(self) -> list[str]:
        """Names of all records, without their suffix."""
        names: list[str] = []
        for item in self._store.list(self._key("step-"), recursive=False):
            _, _, file_name = item.key.rpartition("/")
            if file_name.endswith(".json"):
                names.append(file_name.removesuffix(".json"))
        return names

    def _free_name(self, name: str) -> str:
        """A name of a record, with a number where it is taken."""
        taken = set(self._records())
        free = name
        number = 2
        while free in taken:
            free = f"{name}-{number}"
            number += 1
        return free

    def _record(self, name: str) -> dict[str, Any]:
        """What a record says.

        Raises DamagedError where it is missing, or names no folder of files that is one of ours:
        what it names is removed with it.
        """
        url = self._url(name)
        text = Files(store=self._store, prefix=self._prefix).read(f"{name}.json")
        try:
            record = json.loads(text)
        except ValueError as error:
            raise DamagedError(f"{url}: cannot be read ({error})") from None
        folder = record.get("files") if isinstance(record, dict) else None
        if not isinstance(folder, str) or not _NAMED_FILES.fullmatch(folder):
            raise DamagedError(f"{url}: names {folder!r} as the folder of its files")
        return dict(record)

    def _put_record(self, name: str, record: Mapping[str, Any]) -> None:
        text = json.dumps(record, indent=1)
        self._put(f"{name}.json", text.encode())
        if self.folder is not None:
            _sync_folder(self.folder)

    def _put(self, name: str, data: bytes) -> None:
        with atomic_writer(self._store, self._key(name)) as writer:
            writer.write(data)

    def _remove(self, name: str) -> None:
        """A record, and of the files that it names those that no other one does."""
        folder = self._record(name)["files"]
        self._store.delete(self._record_key(name))
        self._remove_orphans(folder)

    def _remove_orphans(self, begin: str) -> None:
        """Remove the files that no record names, of folders whose names begin so.

        One folder may be named twice, by what was killed while it set a checkpoint aside. A record
        of all that was written for a step names the files of later checkpoints of it too.
        """
        named = tuple(self._record(name)["files"] for name in self._records())
        orphans: list[str] = []
        for item in self._store.list(self._key(begin)):
            folder, _, _ = item.key.removeprefix(f"{self._prefix}/").partition("/")
            if _FOLDER.fullmatch(folder) and not folder.startswith(named):
                orphans.append(item.key)
        self._delete(orphans)
        if self.folder is not None:
            for path in self.folder.glob("step-*-*"):
                # Of empty folders alone.
                with suppress(OSError):
                    path.rmdir()

    def _delete(self, keys: list[str]) -> None:
        """As many files as the run that wrote them had ranks: some at a time."""
        if keys:
            parallel_map(self._store.delete, keys, DELETED_AT_ONCE)


def record_name(step: int) -> str:
    """The name of the record of a step's checkpoint, without its suffix."""
    return f"step-{step:08d}"


def checkpoint_records(folder: Path) -> list[Path]:
    """The records of whole checkpoints in a folder on a disk, oldest first."""
    return sorted(path for path in folder.glob("step-*.json") if _RECORD.fullmatch(path.stem))


def read_position(record: Path) -> dict[str, Any]:
    """The step and the loader's state of a checkpoint on a disk, and what else was kept with them.

    Raises StateError.
    """
    store = CheckpointStore(PreadStore(StorageConfig()), str(record.parent))
    return store.find(int(record.stem.removeprefix("step-"))).position


def check_shared(store: CheckpointStore, all_ranks: AllRanks) -> None:
    """Raise ConfigError unless all ranks see what the first one writes: else each would keep a part
    of every checkpoint.
    """
    if all_ranks.group is None:
        return

    def leave_sign() -> tuple[str, str]:
        """(name of the sign, the host that left it), of the first rank."""
        # A new name every time: one that an earlier start left would be seen by all.
        sign = f"{SIGN}{secrets.token_hex(6)}"
        store.leave_sign(sign)
        return sign, socket.gethostname()

    sign, first_host = all_ranks.from_first(leave_sign)
    all_ranks.work(lambda: _look_for(store, sign, first_host))
    all_ranks.from_first(lambda: store.remove_sign(sign))


def until_seen(look: Callable[[], None], unseen: type[Exception]) -> None:
    """`look()` until it raises nothing; its error after SEEN_WITHIN seconds."""
    deadline = time.monotonic() + SEEN_WITHIN
    while True:
        try:
            return look()
        except unseen:
            if time.monotonic() > deadline:
                raise
        time.sleep(LOOK_EVERY)


def _look_for(store: CheckpointStore, sign: str, first_host: str) -> None:
    def look() -> None:
        """Raise while the sign is not seen."""
        if not store.sees(sign):
            raise ConfigError(
                f"{store.url}: {socket.gethostname()} does not see what rank 0 wrote there "
                f"on {first_host}; train.out_dir must be one folder for all ranks: "
                f"on a shared file system, or a URL such as s3://bucket/run"
            )

    until_seen(look, ConfigError)


def _position_in(position: Any, url: str) -> dict[str, Any]:
    """What was written beside the tensors, which `url` holds.

    Raises DamagedError where a run's step or state is not there.
    """
    if not isinstance(position, dict) or not is_as_written(position):
        raise DamagedError(f"{url}: is damaged: its checksum is missing or another")
    try:
        step = int(position["step"])
        data = dict(position["data"])
        return {**position, "step": step, "data": data}
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedError(f"{url}: holds no position of a run ({error})") from None


def _sync_folder(path: Path) -> None:
    """The names in a folder reach the disk as well as the files do."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:  # some network file systems sync no folders
        log.debug("%s: cannot be synced: %s", path, error)
    finally:
        os.close(fd)
