"""Files of a dataset from one place to another: moved, copied, removed.

Each may be interrupted and repeated.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from functools import partial

from streammega.config import StorageConfig
from streammega.errors import ObjectChangedError, ObjectNotFoundError
from streammega.storage import open_store
from streammega.storage.atomic_file import sync_folder
from streammega.storage.backends.local import local_error
from streammega.storage.backends.remote import with_part_bytes_for
from streammega.storage.open import is_remote
from streammega.storage.store import Store, atomic_writer

COPY_BYTES = 16 << 20
"""Bytes of an object that a copy holds in memory, without the parts of its upload."""
READ_TRIES = 3


def sync_names(url: str) -> None:
    """Return when files of the local folder of `url` that were renamed or removed are so on the disk.

    What is written next says that they are. A bucket needs nothing. Raises StorageError.
    """
    if is_remote(url):
        return
    _, path = open_store(url, StorageConfig())
    try:
        sync_folder(os.path.dirname(path))
    except FileNotFoundError:
        pass  # nothing was there
    except OSError as error:
        raise local_error(path, error) from None


def find_etag(url: str, storage: StorageConfig) -> str:
    """The ETag of an object; empty where there is no object."""
    store, key = open_store(url, storage)
    try:
        return store.info(key).etag
    except ObjectNotFoundError:
        return ""


def read_if_exists(url: str, storage: StorageConfig) -> bytes | None:
    """The bytes of a small object; None where it does not exist. Raises StorageError."""
    store, key = open_store(url, storage)
    try:
        data, _ = read_object(store, key)
        return data
    except ObjectNotFoundError:
        return None


def read_object(store: Store, key: str) -> tuple[bytes, str]:
    """A small object and its ETag. One that changes meanwhile is read again, a few times.

    Raises ObjectNotFoundError and other StorageErrors.
    """
    for _ in range(READ_TRIES):
        info = store.info(key)
        if info.size == 0:  # stores have no empty ranges
            return b"", info.etag
        try:
            (body,) = store.read(key, [(0, info.size)], info.etag)
            return bytes(body), info.etag
        except ObjectChangedError as error:
            changed = error
    raise changed


def exists(url: str, storage: StorageConfig) -> bool:
    """Whether there is such an object. Raises StorageError."""
    store, key = open_store(url, storage)
    try:
        store.info(key)
    except ObjectNotFoundError:
        return False
    return True


def delete(url: str, storage: StorageConfig) -> None:
    """Remove an object; one that is not there is no error."""
    store, key = open_store(url, storage)
    store.delete(key)


def move_or_copy(source: str, target: str, storage: StorageConfig) -> None:
    """Rename a local file; from or to a bucket copy it, and leave the source to the caller.

    Does nothing if the source is gone, after an earlier call. Raises StorageError.
    """
    if not is_remote(source) and not is_remote(target):
        # The keys of local stores are absolute paths.
        _, source_path = open_store(source, storage)
        _, target_path = open_store(target, storage)
        _move_file(source_path, target_path, storage)
        return
    store, key = open_store(source, storage)
    try:
        info = store.info(key)
    except ObjectNotFoundError:
        return
    spans = [
        (start, min(start + COPY_BYTES, info.size)) for start in range(0, info.size, COPY_BYTES)
    ]
    chunks = (store.read(key, [span], info.etag)[0] for span in spans)
    _write(target, chunks, with_part_bytes_for(storage, info.size))


def _move_file(source: str, target: str, storage: StorageConfig) -> None:
    if not os.path.exists(source):
        return
    try:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        try:
            os.replace(source, target)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            # Another file system: a copy, which appears whole.
            with open(source, "rb", buffering=0) as file:
                _write(target, iter(partial(file.read, COPY_BYTES), b""), storage)
            os.unlink(source)
    except OSError as error:
        raise local_error(error.filename or target, error) from None


def _write(target: str, chunks: Iterable[bytes | memoryview], storage: StorageConfig) -> None:
    store, key = open_store(target, storage)
    with atomic_writer(store, key) as writer:
        for chunk in chunks:
            writer.write(chunk)
