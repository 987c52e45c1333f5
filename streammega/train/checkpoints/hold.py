"""One job to an out_dir: two would remove each other's drafts and mix their metrics.

On a disk, a lock of the kernel's on a file: it ends with its process, however that ends. Object
stores have no locks: there a small object says who is at work, and is renewed all the time. One
that is renewed no more is taken over; at once where its process can be seen to be gone, else after
a while of watching it.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from streammega.errors import ConfigError, ObjectNotFoundError, StorageError
from streammega.storage import Store
from streammega.storage.fork_lock import process_lock
from streammega.storage.store import atomic_writer, create_object, replace_object
from streammega.train.small_objects import read_version

log = logging.getLogger(__name__)

WAIT_SECONDS = 10.0
"""For which a lock is asked again: a job that is being ended holds it a little longer."""
ASK_EVERY = 0.1
"""Seconds between two tries for a lock; not by waiting for it in the kernel, which over NFS no
signal ends.
"""
RENEW_SECONDS = 10.0
"""Between two writes of the object.

Also the time in which a holder sees that another has taken over.
"""
PATIENCE_SECONDS = 35.0
"""For which an object that nobody renews is watched: three renewals may fail or be late."""
LOOK_EVERY = 1.0
"""Seconds between two looks at an object that may be renewed.

A holder that ends removes it, which lets this job in within a second.
"""
SETTLE_SECONDS = 0.5
"""After which a new holder looks whether another one wrote at the same time."""
MOST_WRITTEN = 200
"""Bytes that are read of a lock's file: a process and a host, and not all of a file of others."""

STAT_STATE = 0
STAT_STARTTIME = 19
"""Fields of /proc/PID/stat behind the name. Source: proc_pid_stat(5), where the state is the third
field and the start time the 22nd.
"""
ENDED_STATES = ("Z", "X")
"""Zombie, and dead."""


class Hold(Protocol):
    """What keeps other jobs out."""

    def check(self) -> None:
        """Raise StorageError if another job has taken over."""

    def release(self) -> None:
        """Let others in."""


class _Shared:
    """One hold of this process, by how many it is used: a process does not keep itself out."""

    def __init__(self, hold: Hold) -> None:
        self.hold = hold
        self.users = 0
        self.process = os.getpid()


_held: dict[str, _Shared] = {}
_lock = process_lock()
"""Of `_held`, and over making and releasing a hold: of two threads that ask for one at once, one
makes it for both.
"""


def hold_file(path: Path) -> Hold:
    """Hold a file on a disk.

    Raises ConfigError while another process does, OSError where no file can be made.
    """
    return _of_process(os.path.realpath(path), lambda: _FileHold(path))


def hold_object(store: Store, key: str) -> Hold:
    """Hold an object. Raises ConfigError while another process does, StorageError."""
    return _of_process(store.url(key), lambda: _ObjectHold(store, key))


def _of_process(name: str, make: Callable[[], Hold]) -> Hold:
    """One more use of the hold that this process has of a place, or of one that is made now."""
    with _lock:
        shared = _held.get(name)
        # A forked child has a copy of what its parent held, and holds nothing itself.
        if shared is None or shared.process != os.getpid():
            shared = _Shared(make())
            _held[name] = shared
        shared.users += 1
        return _Use(name, shared)


class _Use:
    """One user's part of a hold."""

    def __init__(self, name: str, shared: _Shared) -> None:
        self._name = name
        self._shared = shared
        self._released = False

    def check(self) -> None:
        """Raise StorageError if another job has taken over."""
        self._shared.hold.check()

    def release(self) -> None:
        """The last user lets others in."""
        with _lock:
            if self._released:
                return
            self._released = True
            self._shared.users -= 1
            # In a forked child the name may stand for a hold that the child has made since.
            is_current = _held.get(self._name) is self._shared
            if self._shared.users == 0 and is_current:
                del _held[self._name]
                self._shared.hold.release()


class _FileHold:
    """POSIX locks, not flock's: they work over NFS, and are not inherited by the workers that a
    process forks.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            self._take(path)
        except BaseException:
            os.close(self._fd)
            raise

    def _take(self, path: Path) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            try:
                fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except (BlockingIOError, PermissionError):
                if time.monotonic() > deadline:
                    raise _occupied(str(path.parent), self._holder()) from None
            except OSError as error:  # a file system without locks
                log.warning(
                    "%s: cannot be locked (%s): see to it that one job at a time trains there",
                    path,
                    error.strerror,
                )
                return
            time.sleep(ASK_EVERY)
        me = f"process {os.getpid()} on {socket.gethostname()}\n"
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, me.encode(), 0)

    def _holder(self) -> str:
        """What the process that has the lock wrote of itself."""
        written = os.pread(self._fd, MOST_WRITTEN, 0)
        return written.decode("utf-8", "replace").strip()

    def check(self) -> None:
        """The kernel sees to it."""

    def release(self) -> None:
        """Closing the file ends the lock."""
        os.close(self._fd)


class _ObjectHold:
    """Renewed by a thread."""

    def __init__(self, store: Store, key: str) -> None:
        self._store = store
        self._key = key
        self._me = _myself()
        self._renewals = 0
        self._lost: str | None = None
        self._seen_etag = ""
        """Of what was read last; empty: nothing was there."""
        self._ended = threading.Event()
        other = self._read()
        self._wait_for_other(other)
        self._take(other)
        # Where the store creates nothing by itself, or two take over from one that is gone, both
        # have written by now: the later keeps it.
        time.sleep(SETTLE_SECONDS)
        self._look()
        self.check()
        self._thread = threading.Thread(target=self._renew, name="streammega-hold", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """By what the last renewal saw."""
        if self._lost is not None:
            url = self._store.url(self._key)
            raise StorageError(f"{url}: {self._lost} has taken over; this job writes no more there")

    def release(self) -> None:
        """Remove the object, unless it is another's by now."""
        self._ended.set()
        self._thread.join()
        try:
            self._look()
            if self._lost is None:
                self._store.delete(self._key)
        except StorageError as error:
            log.warning("%s: cannot be removed: %s", self._store.url(self._key), error)

    def _wait_for_other(self, other: dict[str, Any] | None) -> None:
        if other is None or _is_gone(other):
            return
        url = self._store.url(self._key)
        log.warning(
            "%s: was held by %s; waiting %.0f s to see whether it still is",
            url,
            _who(other),
            PATIENCE_SECONDS,
        )
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            time.sleep(LOOK_EVERY)
            now = self._read()
            if now is None:
                return
            if now != other:
                raise _occupied(self._folder_url(), _who(now))

    def _take(self, other: dict[str, Any] | None) -> None:
        """Write the object, which was `other`'s until now.

        Raises ConfigError where another job has written it meanwhile.
        """
        if create_object(self._store, self._key, self._next_record()):
            return
        # One is there: the other's, this job's own after a lost answer, or that of a third.
        now = self._read()
        if now is not None and self._is_third(now, other):
            raise _occupied(self._folder_url(), _who(now))
        self._write()

    def _is_third(self, now: dict[str, Any], other: dict[str, Any] | None) -> bool:
        """Whether a record is neither this job's nor the one waited for, and its job is alive."""
        if now == other or now.get("owner") == self._me["owner"]:
            return False
        return not _is_gone(now)

    def _folder_url(self) -> str:
        return self._store.url(self._key).rpartition("/")[0]

    def _renew(self) -> None:
        url = self._store.url(self._key)
        while not self._ended.wait(RENEW_SECONDS):
            try:
                self._look()
                if self._lost is None and not self._replace():
                    self._look()
                if self._lost is not None:
                    log.error("%s: %s has taken over", url, self._lost)
                    return
            except StorageError as error:
                # Tried again at the next turn: the others' patience is longer than three of them.
                log.warning("%s: cannot be renewed: %s", url, error)

    def _look(self) -> None:
        now = self._read()
        if now is not None and now.get("owner") != self._me["owner"]:
            self._lost = _who(now)

    def _replace(self) -> bool:
        """Renew what was seen; False where another has written since, or an answer was lost."""
        record = self._next_record()
        if not self._seen_etag:
            return create_object(self._store, self._key, record)
        return replace_object(self._store, self._key, record, self._seen_etag)

    def _write(self) -> None:
        with atomic_writer(self._store, self._key) as writer:
            writer.write(self._next_record())

    def _next_record(self) -> bytes:
        """What is to be written: another text every time, so that others see that it is renewed."""
        self._renewals += 1
        return json.dumps(self._me | {"renewals": self._renewals}).encode()

    def _read(self) -> dict[str, Any] | None:
        """What the object says; None where there is none, or none that says anything."""
        try:
            data, self._seen_etag = read_version(self._store, self._key)
            record = json.loads(data)
        except ObjectNotFoundError:
            self._seen_etag = ""
            return None
        except ValueError:
            return None
        return record if isinstance(record, dict) else None


def _occupied(where: str, who: str) -> ConfigError:
    holder = who or "it does not say which"
    return ConfigError(
        f"{where}: another job trains there ({holder}); "
        f"end it, or give this one another train.out_dir"
    )


def _myself() -> dict[str, Any]:
    """Which process this is, by what others can look for."""
    pid = os.getpid()
    return {
        "owner": secrets.token_hex(8),
        "host": socket.gethostname(),
        "pid": pid,
        "started": _started(pid),
        "system": _system(),
    }


def _who(record: dict[str, Any]) -> str:
    return f"process {record.get('pid')} on {record.get('host')}"


def _system() -> str:
    """Where process numbers have one meaning: a boot of a machine, and a container of it.

    Empty where the system has no /proc.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        container = os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
    return f"{boot} {container}"


def _started(pid: int) -> str:
    """When a process started, in the kernel's ticks: numbers of processes are given again.

    Empty: there is none.
    """
    try:
        line = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    # "pid (name) state ...": the name may have any characters, so fields are counted behind it.
    _, _, after_name = line.rpartition(")")
    fields = after_name.split()
    state = fields[STAT_STATE]
    # A zombie has ended, and only waits for its parent.
    return "" if state in ENDED_STATES else fields[STAT_STARTTIME]


def _is_gone(record: dict[str, Any]) -> bool:
    """Whether the process of a record can be seen to have ended: on this machine only."""
    system = _system()
    if not system or record.get("system") != system:
        return False
    pid = int(record.get("pid") or 0)
    return _started(pid) != record.get("started")
