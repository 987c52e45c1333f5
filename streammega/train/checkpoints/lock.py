"""The lock of an out_dir, for one job at a time: two would remove each other's files and mix their
metrics.

On a disk this is a file lock, which ends with its process. In a bucket it is a small object that names
the job, which renews it. Another job takes over if that process has exited on this machine, or if
the object is not renewed for a while.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import secrets
import socket
import threading
import time
from pathlib import Path
from typing import Any

import filelock

from streammega.config.validate import parse_json
from streammega.errors import ConfigError, ObjectNotFoundError, StorageError
from streammega.storage import Store
from streammega.storage.object_ops import read_object
from streammega.storage.store import create_object, replace_object

log = logging.getLogger(__name__)

WAIT_SECONDS = 10.0
"""How long to wait for a file lock: a job that ends may hold it a little longer."""
RENEW_SECONDS = 10.0
"""Between two renewals. The owner sees at a renewal that another job took over."""
PATIENCE_SECONDS = 35.0
"""How long to watch an object that may be abandoned: three renewals may fail or be late."""
LOOK_SECONDS = 1.0
"""Between two reads of an object that is watched. A job that ends removes its object."""
SETTLE_SECONDS = 0.5
"""After this a new owner checks whether another job wrote at the same time: some stores do not refuse
the second write.
"""

_CANNOT_LOCK = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Errors of file systems without locks."""
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)
"""Errors of a path that was moved or removed, and on NFS of an open file that was removed."""
_STAT_STATE = 0
_STAT_STARTTIME = 19
"""Fields of /proc/PID/stat after the name: numbers 3 and 22 in proc_pid_stat(5)."""
_ENDED_STATES = ("Z", "X")
"""Zombie and dead."""


class LostLockError(StorageError):
    """Another job may write in the out_dir now, so this one must not."""


class FileLock:
    """The lock of a job on a disk. Raises ConfigError while another job has it, OSError where the
    file cannot be made.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._fd: int | None = None
        """The file that is locked, whatever the path names later. None where there are no locks."""
        # All threads and runs of this process share one lock.
        self._lock = filelock.FileLock(path, thread_local=False, is_singleton=True)
        try:
            self._lock.acquire(timeout=WAIT_SECONDS)
        except filelock.Timeout:
            owner = path.read_text(errors="replace").strip()
            raise _locked_error(str(path.parent), owner) from None
        except OSError as error:
            if error.errno not in _CANNOT_LOCK:
                raise
            log.warning(
                "%s: this file system has no locks (%s); let only one job at a time train there",
                path,
                error.strerror,
            )
            return
        # Where there are no locks, filelock has its own text in the file.
        if isinstance(self._lock, filelock.UnixFileLock):
            path.write_text(f"{_process_name(_process_record())}\n")
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def check(self) -> None:
        """Raise LostLockError if the folder was moved or removed: another job can train there then."""
        if self._fd is None:
            return
        try:
            if os.path.samestat(os.fstat(self._fd), os.stat(self._path)):
                return
            owner = self._path.read_text(errors="replace").strip() or "another job"
        except OSError as error:
            if error.errno not in _GONE:
                raise
            raise LostLockError(
                f"{self._path}: is gone, so {self._path.parent} was moved or removed; "
                f"this job writes no more there"
            ) from None
        raise LostLockError(
            f"{self._path}: {owner} has taken over, since {self._path.parent} was replaced; "
            f"this job writes no more there: end one of the two"
        )

    def release(self) -> None:
        """Let other jobs in."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
        self._lock.release()


class ObjectLock:
    """The lock of a job in a bucket, which a thread renews.

    Raises ConfigError while another job has it, StorageError.
    """

    def __init__(self, store: Store, key: str) -> None:
        self._store = store
        self._key = key
        self._url = store.url(key)
        self._owner = _process_record()
        self._renewals = 0
        self._etag = ""
        """The ETag that was read last; empty: there was no object."""
        self._next_owner: str | None = None
        """The job that has taken over, if any."""
        self._wait_until_abandoned()
        if not self._put():
            record = self._read()
            # It may be ours, if the answer to the write was lost.
            if record is not None and not self._is_ours(record) and not _is_over(record):
                raise _locked_error(self._url, _process_name(record))
            self._put()
        time.sleep(SETTLE_SECONDS)
        self._look_for_next_owner()
        self.check()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="streammega-lock", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise LostLockError if another job had taken over by the last renewal."""
        if self._next_owner is not None:
            raise LostLockError(
                f"{self._url}: {self._next_owner} has taken over, since this job did not renew its "
                f"lock in time; this job writes no more there: end one of the two"
            )

    def release(self) -> None:
        """Remove the object, unless another job has taken over."""
        self._ended.set()
        self._thread.join()
        try:
            self._look_for_next_owner()
            if self._next_owner is None:
                self._store.delete(self._key)
        except StorageError as error:
            log.warning("%s: cannot be removed: %s", self._url, error)

    def _wait_until_abandoned(self) -> None:
        """Raise ConfigError if the job of the object is alive."""
        first = self._read()
        if first is None or _is_over(first):
            return
        log.warning(
            "%s: is the lock of %s; watching it for %.0f s, in case that job has ended",
            self._url,
            _process_name(first),
            PATIENCE_SECONDS,
        )
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)
            record = self._read()
            if record is None:
                return
            if record != first:
                raise _locked_error(self._url, _process_name(record))

    def _renew(self) -> None:
        while not self._ended.wait(RENEW_SECONDS):
            try:
                self._look_for_next_owner()
                if self._next_owner is None and not self._put():
                    self._look_for_next_owner()
                if self._next_owner is not None:
                    log.error("%s: %s has taken over", self._url, self._next_owner)
                    return
            except StorageError as error:
                # The next turn tries again. Other jobs wait for more than three turns.
                log.warning("%s: cannot be renewed: %s", self._url, error)

    def _look_for_next_owner(self) -> None:
        record = self._read()
        if record is not None and not self._is_ours(record):
            self._next_owner = _process_name(record)

    def _is_ours(self, record: dict[str, Any]) -> bool:
        return bool(record.get("owner") == self._owner["owner"])

    def _put(self) -> bool:
        """Replace the object that was read last. False where another job has written since, or an
        answer was lost.
        """
        # The text differs every time, so that other jobs see the renewal.
        self._renewals += 1
        data = json.dumps(self._owner | {"renewals": self._renewals}).encode()
        if self._etag:
            return replace_object(self._store, self._key, data, self._etag)
        return create_object(self._store, self._key, data)

    def _read(self) -> dict[str, Any] | None:
        """The record in the object; None where there is no object, or no record in it."""
        try:
            data, self._etag = read_object(self._store, self._key)
            record = parse_json(data)
        except ObjectNotFoundError:
            self._etag = ""
            return None
        except ValueError:
            return None
        return record if isinstance(record, dict) else None


JobLock = FileLock | ObjectLock


def _locked_error(url: str, owner: str) -> ConfigError:
    return ConfigError(
        f"{url}: another job trains there ({owner or 'unknown process'}); "
        f"end it, or choose another train.out_dir"
    )


def _process_record() -> dict[str, Any]:
    """This process, as other jobs can find it."""
    pid = os.getpid()
    return {
        "owner": secrets.token_hex(8),
        "host": socket.gethostname(),
        "pid": pid,
        "started": _start_time(pid),
        "system": _system(),
    }


def _process_name(record: dict[str, Any]) -> str:
    return f"process {record.get('pid')} on {record.get('host')}"


def _is_over(record: dict[str, Any]) -> bool:
    """Whether the process of a record is this one, or has exited on this machine."""
    system = _system()
    if not system or record.get("system") != system:
        return False
    pid = record.get("pid")
    if type(pid) is not int:
        return False
    return pid == os.getpid() or _start_time(pid) != record.get("started")


def _system() -> str:
    """An id of this boot of the machine and of the container, within which PIDs are unique; empty
    without /proc.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        container = os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
    return f"{boot} {container}"


def _start_time(pid: int) -> str:
    """When a process started, in ticks of the kernel: PIDs are used again. Empty where there is no such
    process.
    """
    try:
        line = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    # "pid (name) state ...": the name may have any characters.
    _, _, after_name = line.rpartition(")")
    fields = after_name.split()
    # A zombie has ended, and waits for its parent.
    return "" if fields[_STAT_STATE] in _ENDED_STATES else fields[_STAT_STARTTIME]
