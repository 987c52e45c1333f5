"""The work folder of a conversion: its place, its lock, and what a restart finds there.

Units and shards that are done have a record there and are not done again. A record is valid if its
digest is that of what would be made now (`Job.unit_digest`, `ShardLayout.digest`). After a change of
inputs or options only what depends on them is done again.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import filelock

from streammega.config import StorageConfig
from streammega.convert.options import digest_of_bytes
from streammega.convert.read.stdin import KEPT as KEPT_PIPE
from streammega.convert.write.publish import RECORD
from streammega.dataset.local_cache import default_cache_dir
from streammega.dataset.names import MANIFEST, split_name
from streammega.errors import ConvertError
from streammega.storage import Store, join_url, open_store
from streammega.storage.open import is_remote

LOCK = "lock"
"""The name of the lock in a work folder of this machine."""
REMOVED = ".removed"
"""Ends the name of a work folder that is being removed."""
FREE_WITHIN = 10.0
"""Seconds in which a task finds the lock free: other tasks hold it for the moment of a look."""


def work_folder(prefix: str, given: str | None) -> str:
    """A folder of this conversion alone, removed in the end: within the one given, beside a local
    output, or in the cache.
    """
    stem = prefix.rpartition("/")[2]
    # Of the whole prefix: outputs of one name may share a folder given, and share the cache.
    digest = digest_of_bytes(prefix.encode(), 6)
    if given:
        return join_url(given, f"{stem}.convert-{digest}")
    if not is_remote(prefix):
        _, path = open_store(prefix, StorageConfig())
        folder, name = os.path.split(path)
        return os.path.join(folder, f".{name}.convert")
    return str(default_cache_dir() / "convert" / f"{stem}-{digest}")


@contextmanager
def output_lock(prefix: str, work: str) -> Iterator[None]:
    """One conversion at a time to an output of this machine, and in a work folder.

    The folder of conversions that name none is locked too, so that two to one output do not meet
    whatever their folders are. Raises ConvertError where another is running.
    """
    unnamed = work_folder(prefix, None)
    if work == unnamed:
        with work_dir_lock(work):
            yield
        return
    with work_dir_lock(unnamed, is_needed=False), work_dir_lock(work):
        yield


@contextmanager
def work_dir_lock(work: str, *, is_needed: bool = True) -> Iterator[None]:
    """One conversion at a time in a work folder of this machine; one in a bucket has no lock.

    Raises ConvertError if it cannot be made and `is_needed`, or if another is running.
    """
    if is_remote(work):
        yield
        return
    try:
        _make(work)
    except ConvertError:
        if is_needed:
            raise
        yield
        return
    lock = filelock.FileLock(os.path.join(work, LOCK))
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        raise ConvertError(
            f"{work}: another conversion to this output is running; wait for it, or choose another "
            f"output"
        ) from None
    try:
        yield
    finally:
        lock.release()
        if os.path.isdir(work) and set(os.listdir(work)) <= {LOCK}:
            shutil.rmtree(work, ignore_errors=True)
        # Of a run that was killed at its very end.
        shutil.rmtree(f"{work}{REMOVED}", ignore_errors=True)


def check_unlocked(work: str) -> None:
    """Raise ConvertError if a conversion holds a work folder: it may be removed by the next moment.

    Tasks do not hold it, for they share it.
    """
    if is_remote(work):
        return
    _make(work)
    try:
        with filelock.FileLock(os.path.join(work, LOCK), timeout=FREE_WITHIN):
            return
    except filelock.Timeout:
        raise ConvertError(
            f"{work}: another conversion to this output is running, perhaps the one that merges "
            f"what tasks did; wait for it"
        ) from None


def is_locked(output: str) -> bool:
    """Whether a conversion to this output is running on this machine, in a work folder that was not
    named.
    """
    prefix, _ = split_name(output.removesuffix(MANIFEST))
    lock = os.path.join(work_folder(prefix, None), LOCK)
    if not os.path.exists(lock):
        return False
    try:
        with filelock.FileLock(lock, timeout=0):
            return False
    except filelock.Timeout:
        return True


def _make(work: str) -> None:
    """Raise ConvertError if the work folder cannot be made."""
    try:
        os.makedirs(work, exist_ok=True)
    except OSError as error:
        raise ConvertError(
            f"{work}: the work folder cannot be made ({error.strerror}); name another by --work-dir, "
            f"a folder or a URL"
        ) from None


def can_resume(work: str) -> bool:
    """Whether a work folder of this machine holds what a second run can use."""
    if is_remote(work) or not os.path.isdir(work):
        return False
    records = [name for name in os.listdir(work) if name.endswith(".json")]
    return any(name.startswith(("unit-", "shard-")) for name in records)


def clear_work_dir(work: str, storage: StorageConfig) -> None:
    """Remove what an interrupted run has done; the lock is held, and what is noted of the
    output's names stays true.
    """
    store, keys = _files_of(work, storage)
    # Records go before what they speak of.
    for key in sorted(keys, key=lambda key: not key.endswith(".json")):
        name = os.path.basename(key)
        if name not in (LOCK, RECORD) and not name.startswith(KEPT_PIPE):
            store.delete(key)


def remove_work_dir(work: str, storage: StorageConfig) -> None:
    """Remove the work folder of a conversion that is done."""
    if not is_remote(work):
        if os.path.isdir(work):
            # Renamed first, so that a kill leaves all of it or nothing.
            removed = f"{work}{REMOVED}"
            shutil.rmtree(removed, ignore_errors=True)
            os.rename(work, removed)
            shutil.rmtree(removed, ignore_errors=True)
        return
    store, keys = _files_of(work, storage)
    # What is noted of the output goes last: as long as anything is here, it says whose the output
    # is.
    for key in sorted(keys, key=lambda key: os.path.basename(key) == RECORD):
        store.delete(key)


def _files_of(work: str, storage: StorageConfig) -> tuple[Store, list[str]]:
    """The store of a work folder, and the keys of its files."""
    store, folder = open_store(f"{work}/", storage)
    return store, [info.key for info in store.list(f"{folder.rstrip('/')}/")]
