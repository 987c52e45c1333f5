"""What resumes a conversion: units and shards that are done have a record in the work folder, and
what has one is not done again.

A record is believed if its digest is that of what would be made now (`Job.unit_digest`,
`ShardLayout.digest`), so that after a change of inputs or options only what depends on them is done
again.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from streammega.config import StorageConfig
from streammega.convert.job import Job, UnitRecord, read_record
from streammega.convert.read.pipes import KEPT as KEPT_PIPE
from streammega.convert.work_folder import LOCK, remove_folder
from streammega.convert.write.publish import RECORD, Publisher
from streammega.convert.write.shards import ShardLayout, read_shard
from streammega.dataset.manifest import Shard
from streammega.storage import open_store
from streammega.storage.open import is_remote

KEPT = (LOCK, RECORD)
"""What a restart leaves in the work folder: its lock, and what it publishes."""


def units_done(job: Job, numbers: Iterable[int]) -> dict[int, UnitRecord]:
    """Those of some units that need not be done again, by their numbers."""
    done = {}
    for number in numbers:
        record = read_record(job, number)
        if record is not None:
            done[number] = record
    return done


def shards_done(job: Job, layout: ShardLayout, publisher: Publisher) -> dict[int, Shard]:
    """The shards that need not be written again, by their numbers."""
    done = {}
    for number in range(layout.num_shards):
        shard = read_shard(job, layout, number)
        if shard is not None:
            done[number] = shard
    for number in publisher.missing_shards(layout, done):
        del done[number]
    return done


def can_resume(work: str) -> bool:
    """Whether a work folder of this machine holds what a second run can use."""
    records = [name for name in os.listdir(work) if name.endswith(".json")]
    return any(name.startswith(("unit-", "shard-")) for name in records)


def forget(work: str, storage: StorageConfig) -> None:
    """Remove what an interrupted run has done; the lock is held, and what is noted of the
    output's names stays true.
    """
    keys = _keys_below(work, storage)
    store, folder = open_store(f"{work}/" if is_remote(work) else work, storage)
    folder = folder.rstrip("/")
    kept = {f"{folder}/{name}" for name in KEPT}
    # Records go before what they speak of.
    for key in sorted(keys, key=_is_no_record):
        name = os.path.basename(key)
        if key not in kept and not name.startswith(KEPT_PIPE):
            store.delete(key)


def remove(work: str, storage: StorageConfig) -> None:
    """Remove the work folder of a conversion of which nothing is left to be done."""
    if not is_remote(work):
        if os.path.isdir(work):
            remove_folder(work)
        return
    store, _ = open_store(f"{work}/", storage)
    # What is noted of the output goes last: as long as anything is here, it says whose the output
    # is.
    for key in sorted(_keys_below(work, storage), key=lambda key: key.endswith(KEPT)):
        store.delete(key)


def _is_no_record(key: str) -> bool:
    return not key.endswith(".json")


def _keys_below(work: str, storage: StorageConfig) -> list[str]:
    """Every file of a work folder, by its store's key."""
    if is_remote(work):
        store, folder = open_store(f"{work}/", storage)
        return [info.key for info in store.list(folder)]
    _, folder = open_store(work, storage)
    keys = []
    for root, _, names in os.walk(folder):
        keys += [os.path.join(root, name) for name in names]
    return keys
