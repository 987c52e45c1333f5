"""Locks that are free in a forked child, even if a thread of the parent held them."""

from __future__ import annotations

import os
import threading
import weakref

_locks: weakref.WeakSet[threading.Lock] = weakref.WeakSet()


def process_lock() -> threading.Lock:
    """A lock for objects that a forked child uses too.

    A fork copies a lock in its present state, but not the thread that would release it.
    """
    lock = threading.Lock()
    _locks.add(lock)
    return lock


def _free_all() -> None:
    for lock in list(_locks):
        lock._at_fork_reinit()  # type: ignore[attr-defined]  # as the standard library does


os.register_at_fork(after_in_child=_free_all)
