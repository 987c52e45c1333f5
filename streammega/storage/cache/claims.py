"""The right to fetch pages of an object: one on the node has it, and it dies with its holder."""

from __future__ import annotations

import threading
from collections.abc import Callable

from streammega.storage.cache.presence import Presence


class Claims:
    """Of one object, in this process.

    Among this process's threads by a set, for locks of the kernel are those of a process; among
    processes by such a lock.

    Args: presence: what this process holds. name: of the object. failed: told of a file system
        without locks, where threads alone take turns.
    """

    def __init__(self, presence: Presence, name: str, failed: Callable[[OSError], None]) -> None:
        self._presence = presence
        self._name = name
        self._failed = failed
        self._taken: set[int] = set()
        """Pages that threads of this process fetch."""
        self._released = threading.Condition()

    def take(self, first: int, last: int) -> bool:
        """Take the right to fetch pages [first, last); False: somebody has it for one of them."""
        pages = range(first, last)
        with self._released:
            if any(page in self._taken for page in pages):
                return False
            try:
                if not self._presence.claim(self._name, first, last):
                    return False
            except OSError as error:
                self._failed(error)
            self._taken.update(pages)
            return True

    def release(self, first: int, last: int) -> None:
        """Give it back, and wake the threads that wait."""
        pages = range(first, last)
        with self._released:
            self._taken.difference_update(pages)
            self._presence.unclaim(self._name, first, last)
            self._released.notify_all()

    def wait(self, seconds: float) -> None:
        """Until a thread of this process releases some, or so long: other processes have to be
        looked at.
        """
        with self._released:
            self._released.wait(seconds)
