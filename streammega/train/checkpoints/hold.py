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
from streammega.storage.store import written_whole

log = logging.getLogger(__name__)

WAIT_SECONDS = 10.0
"""For which a lock is asked again: a job that is being ended holds it a little longer."""
ASK_EVERY = 0.1
"""Seconds between two tries for a lock; not by waiting for it in the kernel, which over NFS no
signal ends.
"""
RENEW_SECONDS = 10.0
"""Between two writes of the object, and so the time in which a holder sees that another has taken
over.
"""
PATIENCE_SECONDS = 35.0
"""For which an object that nobody renews is watched: three renewals may fail or be late."""
LOOK_EVERY = 1.0
"""Seconds between two looks at an object that may be renewed: one that goes lets this job in within
a second.
"""
SETTLE_SECONDS = 0.5
"""After which a new holder looks whether another one wrote at the same time."""


class Hold(Protocol):
    """What keeps other jobs out."""

    def check(self) -> None:
        """Raise StorageError if another job has taken over."""

    def release(self) -> None:
        """Let others in."""


class _Shared:
    """One hold of this process, by how many it is used: a process does not keep itself out."""

    def __init__(self, hold: Hold) -> None:
        self.hold, self.users, self.process = hold, 0, os.getpid()


_held: dict[str, _Shared] = {}
_lock = threading.Lock()
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
    with _lock:
        shared = _held.get(name)
        if shared is None or shared.process != os.getpid():  # a forked child holds nothing
            shared = _held[name] = _Shared(make())
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
            if not self._shared.users and _held.get(self._name) is self._shared:
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
        until = time.monotonic() + WAIT_SECONDS
        while True:
            try:
                fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except (BlockingIOError, PermissionError):
                if time.monotonic() > until:
                    who = os.pread(self._fd, 200, 0).decode("utf-8", "replace").strip()
                    raise _occupied(str(path.parent), who) from None
            except OSError as error:  # a file system without locks
                log.warning(
                    "%s: cannot be locked (%s): see to it that one job at a time trains there",
                    path,
                    error.strerror,
                )
                return
            time.sleep(ASK_EVERY)
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

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
        self._ended = threading.Event()
        self._wait_for_other(self._read())
        self._write()
        # one that found nobody a moment ago has written by now: of two, the later keeps it
        time.sleep(SETTLE_SECONDS)
        self._look()
        self.check()
        self._thread = threading.Thread(target=self._renew, name="streammega-hold", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """By what the last renewal saw."""
        if self._lost is not None:
            raise StorageError(
                f"{self._store.url(self._key)}: {self._lost} has taken over; this job writes no more there"
            )

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
        until = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < until:
            time.sleep(min(LOOK_EVERY, PATIENCE_SECONDS / 10))
            now = self._read()
            if now is None:
                return
            if now != other:
                raise _occupied(url.rpartition("/")[0], _who(now))

    def _renew(self) -> None:
        while not self._ended.wait(RENEW_SECONDS):
            try:
                self._look()
                if self._lost is not None:
                    log.error("%s", f"{self._store.url(self._key)}: {self._lost} has taken over")
                    return
                self._write()
            except StorageError as error:
                log.warning("%s: cannot be renewed: %s", self._store.url(self._key), error)

    def _look(self) -> None:
        now = self._read()
        if now is not None and now.get("owner") != self._me["owner"]:
            self._lost = _who(now)

    def _write(self) -> None:
        self._renewals += 1
        with written_whole(self._store, self._key) as writer:
            writer.write(json.dumps(self._me | {"renewals": self._renewals}).encode())

    def _read(self) -> dict[str, Any] | None:
        try:
            size = self._store.info(self._key).size
            record = json.loads(bytes(self._store.read_ranges(self._key, [0], [size])[0]))
        except (ObjectNotFoundError, ValueError):
            return None
        return record if isinstance(record, dict) else None


def _occupied(where: str, who: str) -> ConfigError:
    return ConfigError(
        f"{where}: another job trains there ({who or 'it does not say which'}); end it, or give this one another train.out_dir"
    )


def _myself() -> dict[str, Any]:
    pid = os.getpid()
    return {
        "owner": secrets.token_hex(8), "host": socket.gethostname(), "pid": pid, "started": _started(pid), "system": _system(),
    }  # fmt: skip


def _who(record: dict[str, Any]) -> str:
    return f"process {record.get('pid')} on {record.get('host')}"


def _system() -> str:
    """Where process numbers have one meaning: a boot of a machine, and a container of it."""
    try:
        return (
            Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            + " "
            + os.readlink("/proc/self/ns/pid")
        )
    except OSError:
        return ""


def _started(pid: int) -> str:
    """When a process started, in the kernel's ticks: numbers of processes are given again.

    Empty: there is none.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    # a zombie has ended, and only waits for its parent
    return "" if fields[0] in "ZX" else fields[19]


def _is_gone(record: dict[str, Any]) -> bool:
    """Whether the process of a record can be seen to have ended."""
    system = _system()
    return (
        bool(system)
        and record.get("system") == system
        and _started(int(record.get("pid") or 0)) != record.get("started")
    )
