"""Checkpoints in an object store: files under names of their own, and a small object that makes
them a checkpoint.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
import time
from collections.abc import Mapping
from typing import Any

from streammega.errors import ObjectNotFoundError, StorageError
from streammega.storage import Store
from streammega.storage.store import atomic_writer
from streammega.storage.thread_pool import parallel_map
from streammega.train.checkpoints.files import DamagedError, Files
from streammega.train.checkpoints.hold import Hold, hold_object
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

_FILES = re.compile(r"step-\d{8}(/[0-9a-f]{8})?")
"""A folder of files; without its second part, all that were ever written for a step."""
DELETED_AT_ONCE = 16
"""Requests: each takes a round trip of tens of milliseconds, and there may be a thousand files."""


class CheckpointBucket:
    """Checkpoints under a prefix of an object store. Implements `CheckpointPlace`."""

    on_disk = False

    def __init__(self, store: Store, prefix: str) -> None:
        self._store = store
        self._prefix = prefix
        self.url = store.url(prefix)

    def prepare(self) -> None:
        """Signs of killed starts go. No checkpoint is ever half done: its small object is there or
        not.
        """
        self._delete([item.key for item in self._store.list(self._key(SIGN), recursive=False)])

    def steps(self) -> list[int]:
        """Of the small objects."""
        steps = [step_in(name) for name in self._records()]
        return sorted(step for step in steps if step is not None)

    def find(self, step: int) -> Found:
        """By its small object."""
        name = folder_of(step)
        record = self._record(name)
        position = position_in(record.get("position"), self._url(name))
        return Found(step=step, name=record["files"], position=position)

    def begin(self, step: int) -> str:
        """A new name.

        Files that no small object names are of saves that were killed, or of checkpoints that are
        gone.
        """
        try:
            self._remove_orphans("step-")
        except (StorageError, DamagedError) as error:
            log.warning(
                "%s: what killed saves left there could not be removed: %s", self.url, error
            )
        return f"{folder_of(step)}/{secrets.token_hex(4)}"

    def draft(self, name: str) -> Files:
        """A prefix below the prefix."""
        return Files(store=self._store, prefix=self._key(name))

    def publish(self, step: int, name: str, position: Mapping[str, Any]) -> None:
        """Write the small object."""
        record = {"version": 1, "step": step, "files": name, "position": dict(position)}
        self._put_record(folder_of(step), record)

    def remove(self, step: int) -> None:
        """The small object first: without it there is no checkpoint."""
        self._remove(folder_of(step))

    def set_aside(self, step: int, why: str) -> str:
        """Another small object names the files; then the first one goes."""
        final = folder_of(step)
        aside = free_name(f"{final}.{why}", set(self._records()))
        try:
            record = self._record(final)
        except DamagedError:
            # all that were ever written for the step
            record = {"version": 1, "step": step, "files": final}
        record["set_aside"] = time.time()
        # In this order: what is killed between the two leaves the checkpoint, under both names.
        self._put_record(aside, record)
        self._store.delete(self._record_key(final))
        return self._url(aside)

    def clean_aside(self, keep: int) -> None:
        """By the times in their small objects."""
        aside = [name for name in self._records() if SET_ASIDE.fullmatch(name)]
        time_of = {name: self._set_aside_at(name) for name in aside}
        aside.sort(key=lambda name: time_of[name])
        for name in aside[:-keep]:
            self._remove(name)

    def _set_aside_at(self, name: str) -> float:
        return float(self._record(name).get("set_aside", 0.0))

    def leave_sign(self, name: str) -> None:
        """An object."""
        self._put(name, b"seen by all ranks\n")

    def sees(self, name: str) -> bool:
        """Whether the object is there."""
        try:
            self._store.info(self._key(name))
        except ObjectNotFoundError:
            return False
        return True

    def remove_sign(self, name: str) -> None:
        """The object goes."""
        self._store.delete(self._key(name))

    def hold(self) -> Hold:
        """By a small object beside the checkpoints that is renewed all the time."""
        parent, _, _ = self._prefix.rpartition("/")
        # Of a run at the root of a bucket there is no parent, and keys begin with no slash.
        key = f"{parent}/lock.json".lstrip("/")
        return hold_object(self._store, key)

    def _key(self, name: str) -> str:
        """Of an object, or of a folder."""
        return f"{self._prefix}/{name}"

    def _record_key(self, name: str) -> str:
        return self._key(f"{name}.json")

    def _url(self, name: str) -> str:
        """Of a small object, for messages."""
        return self._store.url(self._record_key(name))

    def _records(self) -> list[str]:
        """Names of all small objects, without their suffix."""
        names: list[str] = []
        for item in self._store.list(self._key("step-"), recursive=False):
            _, _, file_name = item.key.rpartition("/")
            if file_name.endswith(".json"):
                names.append(file_name.removesuffix(".json"))
        return names

    def _record(self, name: str) -> dict[str, Any]:
        """A small object.

        Raises DamagedError where it is missing, or names no folder of files that is one of ours:
        what it names is removed with it.
        """
        url = self._url(name)
        records = Files(store=self._store, prefix=self._prefix)
        record = parsed(records.read(f"{name}.json"), url)
        folder = record.get("files") if isinstance(record, dict) else None
        if not isinstance(folder, str) or not _FILES.fullmatch(folder):
            raise DamagedError(f"{url}: names {folder!r} as the folder of its files")
        return dict(record)

    def _put_record(self, name: str, record: Mapping[str, Any]) -> None:
        text = json.dumps(record, indent=1)
        self._put(f"{name}.json", text.encode())

    def _put(self, name: str, data: bytes) -> None:
        with atomic_writer(self._store, self._key(name)) as writer:
            writer.write(data)

    def _remove(self, name: str) -> None:
        """A small object, and of the files that it names those that no other one does."""
        folder = self._record(name)["files"]
        self._store.delete(self._record_key(name))
        self._remove_orphans(f"{folder}/")

    def _remove_orphans(self, begin: str) -> None:
        """Remove the files that no small object names, of those whose names begin so.

        One folder may be named twice, by what was killed while it set a checkpoint aside; and a
        folder of all that was written for a step has those of later checkpoints of it.
        """
        named = [f"/{self._record(name)['files']}/" for name in self._records()]
        orphans: list[str] = []
        for item in self._store.list(self._key(begin)):
            if item.key.endswith(".json"):
                continue
            if not any(folder in item.key for folder in named):
                orphans.append(item.key)
        self._delete(orphans)

    def _delete(self, keys: list[str]) -> None:
        """As many files as the run that wrote them had ranks: some at a time."""
        if keys:
            parallel_map(self._store.delete, keys, DELETED_AT_ONCE)
