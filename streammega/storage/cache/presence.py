"""What a process holds in a cache folder: the pages it fetches, and the objects it uses.

Two descriptors, however many they are. Both are locks of the kernel, which die with their process.
They are record locks: of a process, not of a descriptor, so that a forked child does not keep those
of its parent. A process loses its record locks on a file when it closes *any* descriptor of that
file: nothing but this module opens these files.
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
"""Of the name of an object: two digests of 12 bytes, with a dash between them where it is text."""
CLAIM_DIGITS = 9
PAGE_BITS = 26
"""A page's place in the file of claims: the last hexadecimal digits of its object's name, then so
many bits of its own number; together 62 bits, for which an offset has room.

Where two objects share a place, one waits for the other in vain for a moment, and no more.
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
        presence = _present.get(key)
        if presence is None:
            presence = Presence(folder)
            _present[key] = presence
        return presence


class Presence:
    """Locks of this process in one cache folder.

    Raises OSError where the file system has no locks.
    """

    def __init__(self, folder: Path) -> None:
        self.pid = os.getpid()
        self._lock = threading.RLock()  # the collector may call `leave` in the midst of `use`
        # Objects by the number of their note in this process's file; numbers that are free again.
        self._notes: dict[int, str] = {}
        self._free: list[int] = []
        self._next = 0
        self._claims = layout.open_or_make(folder / "claims")
        close_claims = weakref.finalize(self, os.close, self._claims)
        # A number of a process may be used again on another node, or later.
        users_name = f"{self.pid}-{secrets.token_hex(8)}"
        self.path = folder / "users" / users_name
        self._users = self._open_users()
        remove_users = weakref.finalize(self, _remove, self.pid, self._users, self.path)
        # Not at exit: threads may still hold claims while the process ends, and read.
        close_claims.atexit = False
        remove_users.atexit = False

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
            return set(self._notes.values())

    def use(self, name: str) -> int:
        """Note that an object is used from now on; returns what `leave` takes."""
        with self._lock:
            note = self._free_note()
            self._notes[note] = name
            if self.pid == os.getpid():
                os.pwrite(self._users, _packed(name), note * NAME_BYTES)
            return note

    def _free_note(self) -> int:
        if self._free:
            return self._free.pop()
        note = self._next
        self._next += 1
        return note

    def leave(self, note: int) -> None:
        """An object is not used any more.

        Never raises; in a forked child, nothing: the note is its parent's.
        """
        if self.pid != os.getpid():
            return
        nothing = bytes(NAME_BYTES)
        with self._lock, contextlib.suppress(OSError):
            self._notes.pop(note, None)
            self._free.append(note)
            os.pwrite(self._users, nothing, note * NAME_BYTES)

    def claim(self, name: str, first: int, last: int) -> bool:
        """Take the right to fetch pages [first, last) of an object; False: another process has it.

        Raises OSError.
        """
        place = _place(name) + first
        try:
            fcntl.lockf(self._claims, fcntl.LOCK_EX | fcntl.LOCK_NB, last - first, place)
        except OSError as error:
            if error.errno in BUSY:
                return False
            raise
        return True

    def unclaim(self, name: str, first: int, last: int) -> None:
        """Give it back."""
        place = _place(name) + first
        with contextlib.suppress(OSError):
            fcntl.lockf(self._claims, fcntl.LOCK_UN, last - first, place)


def names_in_use(folder: Path) -> set[str]:
    """The objects that some process uses. What dead processes have left is removed."""
    # Of this process's own files nothing is opened: closing them would end its locks.
    presence_of_path = {}
    for (pid, _), presence in list(_present.items()):
        if pid == os.getpid():
            presence_of_path[str(presence.path)] = presence
    names: set[str] = set()
    with contextlib.suppress(FileNotFoundError):
        for entry in os.listdir(folder / "users"):
            path = folder / "users" / entry
            if str(path) in presence_of_path:
                names |= presence_of_path[str(path)].names
            elif not entry.startswith("."):
                names |= _names_of(path)
    return names


def _names_of(path: Path) -> set[str]:
    """The objects of another process; none if it is dead.

    Nor where nothing can be known of it: then using them is up to luck.
    """
    with contextlib.suppress(OSError), layout.Opened(path, os.O_RDONLY) as descriptor:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in BUSY:
                return set()
            size = max(0, layout.regular_size(descriptor))
            data = os.pread(descriptor, size, 0)
            return {
                _unpacked(data[begin : begin + NAME_BYTES])
                for begin in range(0, len(data), NAME_BYTES)
            }
        # The lock was to be had: its process is dead.
        os.unlink(path)
    return set()


def _packed(name: str) -> bytes:
    return bytes.fromhex(name.replace("-", ""))


def _unpacked(note: bytes) -> str:
    half = NAME_BYTES // 2
    return f"{note[:half].hex()}-{note[half:].hex()}"


def _place(name: str) -> int:
    digits = name[-CLAIM_DIGITS:]
    return int(digits, 16) << PAGE_BITS


def _remove(pid: int, descriptor: int, path: Path) -> None:
    if os.getpid() == pid:  # not by a forked child
        with contextlib.suppress(OSError):
            os.unlink(path)
    os.close(descriptor)


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()  # another thread of the parent may have held it


os.register_at_fork(after_in_child=_after_fork)
