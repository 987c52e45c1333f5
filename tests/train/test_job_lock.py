"""One job at a time to an out_dir: who is refused, who takes over, and who stops."""

from __future__ import annotations

import errno
import json
import logging
import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import filelock
import pytest

from streammega import StorageConfig
from streammega.errors import ConfigError, StorageError
from streammega.storage import open_store
from streammega.storage.store import ObjectInfo, Store, WrapperStore, create_object
from streammega.train.checkpoints import lock as checkpoint_lock
from streammega.train.checkpoints.lock import FileLock, ObjectLock
from tests.support.servers import S3, Objects

KEY = "run/lock.json"
OTHER = {"owner": "x", "host": "elsewhere", "pid": 7, "system": "another", "started": "1"}
"""What the lock of another job says."""


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WAIT", "RENEW", "SETTLE", "LOOK"):
        monkeypatch.setattr(checkpoint_lock, f"{name}_SECONDS", 0.1)
    monkeypatch.setattr(checkpoint_lock, "PATIENCE_SECONDS", 0.5)


@pytest.fixture
def bucket(moto: S3) -> tuple[Store, Objects]:
    name = moto.new_bucket()
    store, _ = open_store(f"s3://{name}/{KEY}", StorageConfig(storage_options=moto.options))
    return store, moto.objects(name)


def put_other(objects: Objects, **changes: Any) -> None:
    objects[KEY] = json.dumps(OTHER | changes).encode()


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def check_that_another_takes_over(lock: ObjectLock, objects: Objects) -> None:
    def is_over() -> bool:
        lock.check()
        return False

    with pytest.raises(StorageError, match="process 7 on elsewhere has taken over"):
        wait_until(is_over)
    lock.release()
    assert json.loads(objects[KEY]) == OTHER


class OvertakenStore(WrapperStore):
    """Another job writes its lock after the n-th answer of a method, and before what follows it."""

    def __init__(self, inner: Store, objects: Objects, method: str, answer: int) -> None:
        super().__init__(inner)
        self._objects = objects
        self._answers_left = {method: answer}

    def info(self, key: str) -> ObjectInfo:
        try:
            return super().info(key)
        finally:
            self._answered("info")

    def read(self, key: str, *arguments: Any, **options: Any) -> Any:
        try:
            return super().read(key, *arguments, **options)
        finally:
            self._answered("read")

    def _answered(self, method: str) -> None:
        left = self._answers_left.get(method, 0)
        self._answers_left[method] = left - 1
        if left == 1:
            put_other(self._objects)


@pytest.mark.guarantee("job-time-trains")
def test_an_object_that_nobody_renews_is_taken_over_and_its_owner_stops_writing(
    bucket: tuple[Store, Objects],
) -> None:
    store, objects = bucket
    put_other(objects, pid=8)
    lock = ObjectLock(store, KEY)
    lock.check()
    put_other(objects)
    check_that_another_takes_over(lock, objects)


@pytest.mark.guarantee("job-time-trains")
def test_an_object_that_is_renewed_is_another_jobs(bucket: tuple[Store, Objects]) -> None:
    store, objects = bucket
    put_other(objects, pid=8)
    with pytest.raises(ConfigError, match=r"another job trains there \(process 7"):
        ObjectLock(OvertakenStore(store, objects, "read", 2), KEY)


@pytest.mark.parametrize("pid", ["7", "x", "self\0", [7], None, 1e400])
def test_a_lock_whose_process_is_no_number_is_watched_as_any_other(
    bucket: tuple[Store, Objects], pid: Any, caplog: pytest.LogCaptureFixture
) -> None:
    store, objects = bucket
    first = ObjectLock(store, KEY)
    record = json.loads(objects[KEY])
    first.release()
    objects[KEY] = json.dumps(record | {"pid": pid}).encode()
    ObjectLock(store, KEY).release()
    assert "watching it for" in caplog.text


def test_a_lock_that_is_no_record_is_taken_over(bucket: tuple[Store, Objects]) -> None:
    store, objects = bucket
    for text in ("[" * 100_000, "[]", "\xff"):
        objects[KEY] = text.encode("latin-1")
        ObjectLock(store, KEY).release()


@pytest.mark.guarantee("job-time-trains")
@pytest.mark.parametrize("is_gone", [False, True], ids=["this-process", "gone"])
def test_a_job_that_has_ended_on_this_machine_is_not_waited_for(
    bucket: tuple[Store, Objects], monkeypatch: pytest.MonkeyPatch, is_gone: bool
) -> None:
    store, objects = bucket
    first = ObjectLock(store, KEY)
    record = json.loads(objects[KEY])
    first.release()
    if is_gone:
        child = multiprocessing.get_context("fork").Process(target=os.getpid)
        child.start()
        child.join()
        record["pid"] = child.pid
    objects[KEY] = json.dumps(record).encode()
    monkeypatch.setattr(checkpoint_lock, "PATIENCE_SECONDS", 1000.0)
    second = ObjectLock(store, KEY)
    second.check()
    second.release()
    assert KEY not in objects


def test_a_renewal_does_not_overwrite_who_took_over_since_the_look(
    bucket: tuple[Store, Objects],
) -> None:
    store, objects = bucket
    lock = ObjectLock(OvertakenStore(store, objects, "read", 2), KEY)
    check_that_another_takes_over(lock, objects)


def test_a_lock_whose_object_was_removed_writes_it_again(bucket: tuple[Store, Objects]) -> None:
    store, objects = bucket
    lock = ObjectLock(store, KEY)
    del objects[KEY]
    wait_until(lambda: KEY in objects)
    lock.check()
    lock.release()
    assert KEY not in objects


@pytest.mark.guarantee("job-time-trains")
def test_of_two_jobs_that_find_nobody_the_second_to_write_is_refused(
    bucket: tuple[Store, Objects],
) -> None:
    store, objects = bucket
    with pytest.raises(ConfigError, match=r"another job trains there \(process 7"):
        ObjectLock(OvertakenStore(store, objects, "info", 1), KEY)
    assert json.loads(objects[KEY]) == OTHER


def test_a_job_that_was_first_to_write_and_has_ended_since_is_not_in_the_way(
    bucket: tuple[Store, Objects], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, objects = bucket
    refusals = [False]

    def create(store: Store, key: str, data: bytes) -> bool:
        return refusals.pop() if refusals else create_object(store, key, data)

    monkeypatch.setattr(checkpoint_lock, "create_object", create)
    lock = ObjectLock(store, KEY)
    lock.check()
    assert KEY in objects
    lock.release()


def is_free(path: Path) -> bool:
    """Whether another process could lock a file."""
    try:
        with filelock.FileLock(path, timeout=0):
            return True
    except filelock.Timeout:
        return False


@pytest.mark.guarantee("job-time-trains")
def test_runs_of_one_process_share_its_lock_on_a_disk(tmp_path: Path) -> None:
    path = tmp_path / "run" / ".lock"
    first = FileLock(path)
    second = FileLock(path)
    first.release()
    assert not is_free(path)
    second.release()
    assert is_free(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("replaced", r"process 7 on elsewhere has taken over, since .*run was replaced"),
        ("moved", r"lock: is gone, so .*run was moved or removed"),
    ],
)
def test_a_job_whose_folder_was_moved_away_writes_no_more(
    tmp_path: Path, change: str, message: str
) -> None:
    folder = tmp_path / "run"
    lock = FileLock(folder / ".lock")
    lock.check()
    folder.rename(tmp_path / "moved")
    if change == "replaced":
        folder.mkdir()
        (folder / ".lock").write_text("process 7 on elsewhere\n")
    with pytest.raises(StorageError, match=message):
        lock.check()
    lock.release()


def test_a_file_system_without_locks_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(filelock.FileLock, "acquire", fail)
    with caplog.at_level(logging.WARNING):
        lock = FileLock(tmp_path / ".lock")
    lock.check()
    lock.release()
    assert "has no locks (No locks available); let only one job at a time" in caplog.text
