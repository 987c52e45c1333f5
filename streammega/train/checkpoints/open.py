"""Which kind of place an out_dir is."""

from __future__ import annotations

from pathlib import Path

from streammega.config import StorageConfig
from streammega.storage import join_url, open_store
from streammega.storage.open import is_remote
from streammega.train.checkpoints.in_bucket import CheckpointBucket
from streammega.train.checkpoints.on_disk import CheckpointFolder
from streammega.train.checkpoints.place import CheckpointPlace


def open_place(out_dir: str, storage: StorageConfig) -> CheckpointPlace:
    """The checkpoints of a run in `out_dir`/checkpoints.

    Raises ConfigError for a URL that cannot work.
    """
    url = join_url(out_dir, "checkpoints")
    if is_remote(out_dir):
        store, key = open_store(url, storage)
        return CheckpointBucket(store, key)
    _, path = open_store(url, storage)
    return CheckpointFolder(Path(path), storage)
