"""Opening objects of a cache: each once in a process, whoever asks. Nothing is evicted while
somebody uses it.
"""

from __future__ import annotations

import os
import threading
import weakref

from streammega.storage.cache import layout
from streammega.storage.cache.cached_object import CachedObject
from streammega.storage.cache.folder import CacheFolder
from streammega.storage.cache.presence import Presence, presence_in

_open_objects: weakref.WeakValueDictionary[tuple[int, str], CachedObject] = (
    weakref.WeakValueDictionary()
)
_lock = threading.RLock()


class PageCache(CacheFolder):
    """The cache of one folder, which opens objects; its arguments are those of CacheFolder."""

    _presence: Presence | None = None

    def open(self, url: str, etag: str, size: int) -> CachedObject | None:
        """The pages of an object; shared by all that is open in this process.

        None: the disk cannot be used.
        """
        name = layout.object_name(url, etag, size, self.chunk_bytes)
        key = (os.getpid(), str(self.folder / name))
        # Two that open the same object at once are to have one: its claims are told apart by it.
        with _lock:
            cached = _open_objects.get(key)
            if cached is None and self.usable:
                try:
                    cached = CachedObject(self, self._present(), name, url, etag, size)
                    _open_objects[key] = cached
                except OSError as error:
                    self.failed(error)
            return cached

    def _present(self) -> Presence:
        """What this process holds here; another one after a fork."""
        if self._presence is None or self._presence.pid != os.getpid():
            self._presence = presence_in(self.folder)
        return self._presence


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()  # another thread of the parent may have held it


os.register_at_fork(after_in_child=_after_fork)
