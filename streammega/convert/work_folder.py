"""Where a conversion keeps what is unfinished, and the lock that gives the folder to one of them."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import filelock

from streammega.config import StorageConfig
from streammega.convert.preflight import make_work_folder
from streammega.dataset.manifest import MANIFEST
from streammega.dataset.node_cache import default_cache_dir
from streammega.dataset.shards import split_name
from streammega.errors import ConvertError
from streammega.storage import join_url, open_store
from streammega.storage.open import is_remote

LOCK = "lock"
"""The name of the lock in a work folder of this machine."""
FREE_WITHIN = 10.0
"""Seconds in which a task finds the lock free: other tasks hold it for the moment of a look."""


def work_folder(prefix: str, given: str | None) -> str:
    """A folder of this conversion alone, removed in the end: within the one given, beside a local
    output, or in the cache.
    """
    stem = prefix.rpartition("/")[2]
    # Of the whole prefix: outputs of one name may share a folder given, and share the cache.
    digest = hashlib.blake2b(prefix.encode(), digest_size=6).hexdigest()
    if given:
        return join_url(given, f"{stem}.convert-{digest}")
    if not is_remote(prefix):
        _, path = open_store(prefix, StorageConfig())
        folder, name = os.path.split(path)
        return os.path.join(folder, f".{name}.convert")
    return str(default_cache_dir() / "convert" / f"{stem}-{digest}")


@contextmanager
def held_output(prefix: str, work: str) -> Iterator[None]:
    """One conversion at a time to an output of this machine, and in a work folder.

    The folder of conversions that name none is locked too, so that two to one output do not meet
    whatever their folders are. Raises ConvertError where another is running.
    """
    unnamed = work_folder(prefix, None)
    if work == unnamed:
        with held_folder(work):
            yield
        return
    with held_folder(unnamed, is_needed=False), held_folder(work):
        yield


@contextmanager
def held_folder(work: str, *, is_needed: bool = True) -> Iterator[None]:
    """One conversion at a time in a work folder of this machine; one in a bucket has no lock.

    Raises ConvertError if it cannot be made and `is_needed`, or if another is running.
    """
    if is_remote(work):
        yield
        return
    try:
        make_work_folder(work)
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
        shutil.rmtree(_removed(work), ignore_errors=True)


def look_whether_free(work: str) -> None:
    """Raise ConvertError if a conversion holds a work folder: it may be removed by the next moment.

    Tasks do not hold it, for they share it.
    """
    if is_remote(work):
        return
    make_work_folder(work)
    try:
        with filelock.FileLock(os.path.join(work, LOCK), timeout=FREE_WITHIN):
            return
    except filelock.Timeout:
        raise ConvertError(
            f"{work}: another conversion to this output is running, perhaps the one that merges "
            f"what tasks did; wait for it"
        ) from None


def held_by_another(output: str) -> bool:
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


def remove_folder(work: str) -> None:
    """Remove a work folder of this machine at once, so that a kill leaves all of it or nothing."""
    removed = _removed(work)
    shutil.rmtree(removed, ignore_errors=True)
    os.rename(work, removed)
    shutil.rmtree(removed, ignore_errors=True)


def _removed(work: str) -> str:
    """What a folder is called while it is being removed."""
    return f"{work}.removed"
