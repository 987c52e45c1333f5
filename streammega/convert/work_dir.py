"""The work folder of a conversion: its place, its files, its lock, and what a restart finds there.

| name | what |
|---|---|
| `unit-N.json` | the record of a unit that is done; `unit-N-DIGEST-*` are its segments |
| `shard-N.json` | the record of a shard that is written |
| `out-DIGEST/` | finished files that wait to be published |
| `publishing.json` | what is being published |
| `input-*` | what came by a pipe |
| `lock` | held while a conversion of this machine runs |

A record is valid if its digest is that of what would be made now (`Job.unit_digest`,
`ShardLayout.digest`), and if all files that it speaks of are there with their sizes. After a change
of inputs or options only what depends on them is done again. These files have the digest in their
names, so no other unit or shard writes them.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import filelock
import numpy as np

from streammega.config import StorageConfig
from streammega.config.validate import parse_json
from streammega.convert.options import digest_of_bytes
from streammega.dataset.local_cache import cache_folder
from streammega.dataset.names import MANIFEST, split_name
from streammega.errors import ConvertError, StorageError
from streammega.storage import Store, join_url, open_store, save_bytes
from streammega.storage.object_ops import delete, sync_names
from streammega.storage.open import is_remote, local_path
from streammega.storage.store import Bytes

PUBLISHING = "publishing.json"
KEPT_INPUT = "input-"
LOCK = "lock"
REMOVED = ".removed"
"""Ends the name of a work folder that is being removed."""
LOCK_TIMEOUT = 10.0
"""Seconds that a task waits for the lock: others hold it only while they look whether it is free."""
LOOK_SECONDS = 1.0
"""Seconds in which a conversion gets a lock that a task holds for the moment of a look."""


@dataclass(frozen=True)
class WorkDir:
    """The work folder of one conversion, which is removed in the end. url: a path, or a URL."""

    url: str
    storage: StorageConfig

    @classmethod
    def of(cls, prefix: str, parent: str | None, storage: StorageConfig) -> WorkDir:
        """The work folder of an output: within a parent, else in the folder of a local output,
        else in the cache.
        """
        stem = prefix.rpartition("/")[2]
        # Of the whole prefix: outputs of one name may share a parent, and share the cache. A local
        # one may be relative to the folder in which the command runs.
        full_name = prefix if is_remote(prefix) else local_path(prefix)
        digest = digest_of_bytes(full_name.encode(), 6)
        if parent:
            parent = parent if is_remote(parent) else local_path(parent)
            return cls(join_url(parent, f"{stem}.convert-{digest}"), storage)
        if not is_remote(prefix):
            _, path = open_store(prefix, StorageConfig())
            folder, name = os.path.split(path)
            return cls(os.path.join(folder, f".{name}.convert"), storage)
        # That of this user, whatever `cache_dir` says: all conversions to an output meet there.
        cache = cache_folder(StorageConfig())
        return cls(str(cache / "convert" / f"{stem}-{digest}"), storage)

    @property
    def is_remote(self) -> bool:
        """Whether it is in a bucket, where it has no lock."""
        return is_remote(self.url)

    def file(self, name: str) -> str:
        """The URL of a file in it."""
        return join_url(self.url, name)

    def read(self, name: str) -> Bytes:
        """A small file. Raises StorageError."""
        store, key = open_store(self.file(name), self.storage)
        info = store.info(key)
        (stored,) = store.read(key, [(0, info.size)], info.etag)
        return np.frombuffer(stored, np.uint8)

    def write(self, name: str, data: bytes) -> None:
        """Write a file, at once."""
        save_bytes(self.file(name), data, self.storage)

    def read_record(self, name: str) -> dict[str, Any] | None:
        """A JSON file; None if it is missing or damaged. Raises StorageError where storage fails."""
        try:
            record: Any = parse_json(bytes(self.read(name)))
        except ValueError:
            return None
        except StorageError as error:
            # Without the right to list, a missing object is refused too.
            if error.transient:
                raise
            return None
        return record if isinstance(record, dict) else None

    def write_record(self, name: str, record: dict[str, Any]) -> None:
        """Write a JSON file, at once."""
        self.write(name, json.dumps(record, indent=1).encode())

    def replace_record(self, name: str, record: dict[str, Any]) -> None:
        """Write the record of a unit or shard. The files that a former one of another digest speaks
        of are removed.
        """
        former_record = self.read_record(name) or {}
        self.write_record(name, record)
        # Those of the same digest may be another machine's, and in use.
        if former_record.get("digest") != record["digest"]:
            for file in former_record.get("files", ()):
                delete(self.file(file), self.storage)

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """The bytes of its files whose names begin so, by their names. Raises StorageError."""
        store, folder = self._open()
        infos = store.list(folder + prefix)
        return {info.key.removeprefix(folder): info.size for info in infos}

    def can_resume(self) -> bool:
        """Whether it is on this machine and holds what a second run can use."""
        if self.is_remote or not os.path.isdir(self.url):
            return False
        records = [name for name in os.listdir(self.url) if name.endswith(".json")]
        return any(name.startswith(("unit-", "shard-")) for name in records)

    def clear(self) -> None:
        """Remove what an interrupted run has done, but not what came by a pipe, the lock, and the
        record of what is being published.
        """
        store, folder = self._open()
        # Records go before what they speak of.
        names = {info.key: os.path.basename(info.key) for info in store.list(folder)}
        kept = (LOCK, PUBLISHING)
        removed = [
            key
            for key, name in names.items()
            if name not in kept and not name.startswith(KEPT_INPUT)
        ]
        for turn in (0, 1):
            for key in removed:
                if _removal_turn(key) == turn:
                    store.delete(key)
            sync_names(self.file(LOCK))

    def remove(self) -> None:
        """Remove it, at the end of the conversion."""
        if not self.is_remote:
            if os.path.isdir(self.url):
                # Renamed first, so that a kill leaves all of it or nothing.
                removed = f"{self.url}{REMOVED}"
                shutil.rmtree(removed, ignore_errors=True)
                os.rename(self.url, removed)
                shutil.rmtree(removed, ignore_errors=True)
            return
        store, folder = self._open()
        keys = [info.key for info in store.list(folder)]
        # Records go before what they speak of, and last the record that says whose the output is.
        for key in sorted(keys, key=_removal_turn):
            store.delete(key)

    @contextmanager
    def lock(self, *, is_needed: bool = True) -> Iterator[None]:
        """One conversion at a time in it; one in a bucket has no lock.

        Raises ConvertError if it cannot be made and `is_needed`, or if another is running.
        """
        if self.is_remote:
            yield
            return
        try:
            self.make()
        except ConvertError:
            if is_needed:
                raise
            yield
            return
        path = os.path.join(self.url, LOCK)
        lock = filelock.FileLock(path)
        try:
            lock.acquire(timeout=LOOK_SECONDS)
            held = os.stat(path).st_ino
        except filelock.Timeout:
            raise ConvertError(
                f"{self.url}: another conversion to this output is running; wait for it, or choose "
                f"another output"
            ) from None
        try:
            yield
        finally:
            # Removed while it is locked, and only if it is not the next job's, made after `remove`.
            with suppress(OSError):
                if os.stat(path).st_ino == held and os.listdir(self.url) == [LOCK]:
                    shutil.rmtree(self.url, ignore_errors=True)
            lock.release()
            # Of a run that was killed at its very end.
            shutil.rmtree(f"{self.url}{REMOVED}", ignore_errors=True)

    def check_unlocked(self) -> None:
        """Raise ConvertError if a conversion holds the lock, since it removes the folder in the end.

        Tasks share the folder, and do not hold the lock.
        """
        if self.is_remote:
            return
        self.make()
        try:
            with filelock.FileLock(os.path.join(self.url, LOCK), timeout=LOCK_TIMEOUT):
                return
        except filelock.Timeout:
            raise ConvertError(
                f"{self.url}: another conversion to this output is running, perhaps the one that "
                f"merges what tasks did; wait for it"
            ) from None

    def make(self) -> None:
        """Make it on this machine. Raises ConvertError if it cannot be made."""
        try:
            os.makedirs(self.url, exist_ok=True)
        except OSError as error:
            raise ConvertError(
                f"{self.url}: the work folder cannot be made ({error.strerror}); name another by "
                f"--work-dir, a folder or a URL"
            ) from None

    def _open(self) -> tuple[Store, str]:
        """The store of its files, and how their keys begin."""
        store, folder = open_store(f"{self.url}/", self.storage)
        return store, f"{folder.rstrip('/')}/"


def _removal_turn(key: str) -> int:
    """0 for records, which go before what they speak of; 2 for the last of them; 1 for all else."""
    if os.path.basename(key) == PUBLISHING:
        return 2
    return 0 if key.endswith(".json") else 1


@contextmanager
def output_lock(prefix: str, work_dir: WorkDir) -> Iterator[None]:
    """One conversion at a time to an output of this machine, and in a work folder.

    The folder of conversions that name none is locked too, so that two to one output do not meet
    whatever their folders are. Raises ConvertError where another is running.
    """
    unnamed = WorkDir.of(prefix, None, work_dir.storage)
    if work_dir.url == unnamed.url:
        with work_dir.lock():
            yield
        return
    with unnamed.lock(is_needed=False), work_dir.lock():
        yield


def is_locked(output: str) -> bool:
    """Whether a conversion to this output is running on this machine, in a work folder that was not
    named.
    """
    prefix, _ = split_name(output.removesuffix(MANIFEST))
    lock = WorkDir.of(prefix, None, StorageConfig()).file(LOCK)
    if not os.path.exists(lock):
        return False
    try:
        with filelock.FileLock(lock, timeout=LOOK_SECONDS):
            return False
    except filelock.Timeout:
        return True
