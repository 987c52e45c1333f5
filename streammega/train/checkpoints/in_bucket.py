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
from streammega.storage.fetch.threads import each
from streammega.storage.store import written_whole
from streammega.train.checkpoints.files import DamagedError, Files
from streammega.train.checkpoints.hold import Hold, hold_object
from streammega.train.checkpoints.place import (
    NAME,
    SET_ASIDE,
    Found,
    folder_of,
    free_name,
    parsed,
    position_in,
)

log = logging.getLogger(__name__)

_FILES = re.compile(r"step-\d{8}(/[0-9a-f]{8})?")


class CheckpointBucket:
    """Checkpoints under a prefix of an object store. Implements `CheckpointPlace`."""

    on_disk = False

    def __init__(self, store: Store, prefix: str) -> None:
        self._store = store
        self._prefix = prefix
        self.url = store.url(prefix)

    def prepare(self) -> None:
        """Nothing is ever half done: the small object is there or not."""

    def steps(self) -> list[int]:
        """Of the small objects."""
        return sorted(
            int(name.removeprefix("step-")) for name in self._records() if NAME.fullmatch(name)
        )

    def find(self, step: int) -> Found:
        """By its small object."""
        record = self._record(folder_of(step))
        return Found(
            step=step,
            name=record["files"],
            position=position_in(record.get("position"), self._url(folder_of(step))),
        )

    def begin(self, step: int) -> str:
        """A new name.

        Files that no small object names are of saves that were killed, or of checkpoints that are
        gone.
        """
        try:
            self._remove_orphans()
        except (StorageError, DamagedError) as error:
            log.warning(
                "%s: what killed saves left there could not be removed: %s", self.url, error
            )
        return f"{folder_of(step)}/{secrets.token_hex(4)}"

    def draft(self, name: str) -> Files:
        """A prefix below the prefix."""
        return Files(store=self._store, prefix=f"{self._prefix}/{name}")

    def publish(self, step: int, name: str, position: Mapping[str, Any]) -> None:
        """Write the small object."""
        record = {"version": 1, "step": step, "files": name, "position": dict(position)}
        self._put(f"{folder_of(step)}.json", json.dumps(record, indent=1).encode())

    def remove(self, step: int) -> None:
        """The small object first: without it there is no checkpoint."""
        self._remove(folder_of(step))

    def set_aside(self, step: int, why: str) -> str:
        """Another small object names the files; then the first one goes."""
        name = free_name(f"{folder_of(step)}.{why}", set(self._records()))
        try:
            record = self._record(folder_of(step))
        except DamagedError:
            # all that were ever written for the step
            record = {"version": 1, "step": step, "files": folder_of(step)}
        self._put(
            f"{name}.json", json.dumps(record | {"set_aside": time.time()}, indent=1).encode()
        )
        self._store.delete(f"{self._prefix}/{folder_of(step)}.json")
        return self._url(name)

    def clean_aside(self, keep: int) -> None:
        """By the times in their small objects."""
        aside = [name for name in self._records() if SET_ASIDE.fullmatch(name)]
        times = {name: float(self._record(name).get("set_aside", 0.0)) for name in aside}
        for name in sorted(aside, key=lambda name: times[name])[:-keep]:
            self._remove(name)

    def leave_sign(self, name: str) -> None:
        """An object."""
        self._put(name, b"seen by all ranks\n")

    def sees(self, name: str) -> bool:
        """Whether the object is there."""
        try:
            self._store.info(f"{self._prefix}/{name}")
        except ObjectNotFoundError:
            return False
        return True

    def remove_sign(self, name: str) -> None:
        """The object goes."""
        self._store.delete(f"{self._prefix}/{name}")

    def hold(self) -> Hold:
        """By a small object beside the checkpoints that is renewed all the time."""
        return hold_object(self._store, f"{self._prefix.rpartition('/')[0]}/lock.json".lstrip("/"))

    def _records(self) -> list[str]:
        """Names of all small objects, without their suffix."""
        listed = self._store.list(f"{self._prefix}/step-", recursive=False)
        names = [item.key.rpartition("/")[2] for item in listed]
        return [name.removesuffix(".json") for name in names if name.endswith(".json")]

    def _url(self, name: str) -> str:
        return self._store.url(f"{self._prefix}/{name}.json")

    def _record(self, name: str) -> dict[str, Any]:
        record = parsed(
            Files(store=self._store, prefix=self._prefix).read(f"{name}.json"), self._url(name)
        )
        folder = record.get("files") if isinstance(record, dict) else None
        # What it names is removed with it: it must be a folder of ours.
        if not isinstance(folder, str) or not _FILES.fullmatch(folder):
            raise DamagedError(f"{self._url(name)}: names {folder!r} as the folder of its files")
        return dict(record)

    def _put(self, name: str, data: bytes) -> None:
        with written_whole(self._store, f"{self._prefix}/{name}") as writer:
            writer.write(data)

    def _remove(self, name: str) -> None:
        folder = self._record(name)["files"]
        self._store.delete(f"{self._prefix}/{name}.json")
        self._delete([item.key for item in self._store.list(f"{self._prefix}/{folder}/")])

    def _remove_orphans(self) -> None:
        kept = [f"/{self._record(name)['files']}/" for name in self._records()]
        stored = [
            item.key
            for item in self._store.list(f"{self._prefix}/step-")
            if not item.key.endswith(".json")
        ]
        self._delete([key for key in stored if not any(folder in key for folder in kept)])

    def _delete(self, keys: list[str]) -> None:
        """As many files as the run that wrote them had ranks: some at a time."""
        if keys:
            each(self._store.delete, keys, 16)
