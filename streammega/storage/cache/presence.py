"""What a process holds in a cache folder: the pages it fetches, and the objects it uses. Two
descriptors, however many they are.

Both are locks of the kernel, which die with their process. They are record locks: of a process, not
of a descriptor, so that a forked child does not keep those of its parent. A process loses its
record locks on a file when it closes *any* descriptor of that file: nothing but this module opens
these files.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import threading
import weakref
from pathlib import Path

from streammega.storage.cache import layout

NAME_BYTES = 24
CLAIM_BITS = 36
PAGE_BITS = 26
"""A page's place in the file of claims: bits of its object's digest, then of its number. Where two
objects share a place, one waits for the other in vain for a moment, and no more.
"""
BUSY = frozenset({errno.EACCES, errno.EAGAIN})
_lock = threading.Lock()
_present: weakref.WeakValueDictionary[tuple[int, str], Presence] = weakref.WeakValueDictionary()


def presence_in(folder: Path) -> Presence:
    """That of this process in a cache folder; one, whatever number of caches are open there.

    Raises OSError.
    """
    key = (os.getpid(), os.path.realpath(folder))
    with _lock:
        found = _present.get(key)
        if found is None:
            found = _present[key] = Presence(folder)
        return found


class Presence:
    """Locks of this process in one cache folder.

    Raises OSError where the file system has no locks.
    """

    def __init__(self, folder: Path) -> None:
        self.pid = os.getpid()
        self._lock = threading.RLock()  # the collector may call `leave` in the midst of `use`
        self._slots: dict[int, str] = {}
        self._free: list[int] = []
        self._next = 0
        self._claims = layout.open_or_make(folder / "claims")
        # threads may still hold claims while the process ends
        weakref.finalize(self, os.close, self._claims).atexit = False
        self.path = folder / "users" / f"{self.pid}-{secrets.token_hex(8)}"
        self._users = self._open_users()
        weakref.finalize(self, _remove, self.pid, self._users, self.path).atexit = False

    def _open_users(self) -> int:
        self.path.parent.mkdir(exist_ok=True)
        temporary = self.path.with_name(f".{self.path.name}")  # not looked at before it is locked
        descriptor = layout.make(temporary)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.rename(temporary, self.path)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    @property
    def names(self) -> set[str]:
        """The objects that this process uses."""
        with self._lock:
            return set(self._slots.values())

    def use(self, name: str) -> int:
        """Note that an object is used from now on; returns what `leave` takes."""
        with self._lock:
            slot = self._slot()
            self._slots[slot] = name
            if self.pid == os.getpid():
                os.pwrite(self._users, bytes.fromhex(name.replace("-", "")), slot * NAME_BYTES)
            return slot

    def _slot(self) -> int:
        if self._free:
            return self._free.pop()
        self._next += 1
        return self._next - 1

    def leave(self, slot: int) -> None:
        """An object is not used any more.

        Never raises; in a forked child, nothing: the note is its parent's.
        """
        if self.pid != os.getpid():
            return
        with self._lock, contextlib.suppress(OSError):
            self._slots.pop(slot, None)
            self._free.append(slot)
            os.pwrite(self._users, bytes(NAME_BYTES), slot * NAME_BYTES)

    def claim(self, name: str, first: int, last: int) -> bool:
        """Take the right to fetch pages [first, last) of an object; False: another process has it.

        Raises OSError.
        """
        try:
            fcntl.lockf(
                self._claims, fcntl.LOCK_EX | fcntl.LOCK_NB, last - first, _place(name) + first
            )
        except OSError as error:
            if error.errno in BUSY:
                return False
            raise
        return True

    def unclaim(self, name: str, first: int, last: int) -> None:
        """Give it back."""
        with contextlib.suppress(OSError):
            fcntl.lockf(self._claims, fcntl.LOCK_UN, last - first, _place(name) + first)


def names_in_use(folder: Path) -> set[str]:
    """The objects that some process uses. What dead processes have left is removed."""
    own = {
        str(present.path): present
        for (pid, _), present in list(_present.items())
        if pid == os.getpid()
    }
    found: set[str] = set()
    with contextlib.suppress(FileNotFoundError):
        for entry in os.listdir(folder / "users"):
            path = folder / "users" / entry
            if str(path) in own:
                found |= own[str(path)].names
            elif not entry.startswith("."):
                found |= _names_of(path)
    return found


def _names_of(path: Path) -> set[str]:
    """The objects of another process; none if it is dead, or nothing can be known of it: then using
    them is up to luck.
    """
    with contextlib.suppress(OSError), layout.Opened(path, os.O_RDONLY) as descriptor:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in BUSY:
                return set()
            data = os.pread(descriptor, max(0, layout.regular_size(descriptor)), 0).hex()
            width = 2 * NAME_BYTES
            slots = (data[at : at + width] for at in range(0, len(data), width))
            return {f"{slot[: width // 2]}-{slot[width // 2 :]}" for slot in slots}
        os.unlink(path)
    return set()


def _place(name: str) -> int:
    return int(name[-CLAIM_BITS // 4 :], 16) << PAGE_BITS


def _remove(pid: int, descriptor: int, path: Path) -> None:
    if os.getpid() == pid:  # not by a forked child
        with contextlib.suppress(OSError):
            os.unlink(path)
    os.close(descriptor)


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()  # another thread of the parent may have held it


os.register_at_fork(after_in_child=_after_fork)
