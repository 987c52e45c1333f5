"""What all cached objects of one folder share: its room, and how long others are waited for. A disk
that fails turns the cache off, with one warning.
"""

from __future__ import annotations

import errno
import logging
import time
from pathlib import Path

from streammega.storage.cache import layout
from streammega.storage.cache.room import Room
from streammega.storage.fd_limit import TOO_MANY, limit_reached, raise_limit

log = logging.getLogger(__name__)

TIMEOUT = 60.0
"""Seconds that a claim of another process is waited for."""
LATE_PATIENCE = 1.0
LATE_FOR = 600.0
"""Once a claim was waited for in vain: seconds that claims are waited for, and how long that holds.

Whoever was stopped may hold hundreds of them.
"""


class CacheFolder:
    """The folder of a cache, as this process knows it.

    Its methods never raise for a disk that fails: `usable` turns false, and nothing is kept.

    Args:
        folder: `cache_dir`; made when it is not there.
        budget: bytes that all chunks may take.
        chunk_bytes: bytes of an object in one file.
        timeout: seconds that a page is waited for that another process fetches.
    """

    def __init__(
        self, folder: str | Path, budget: int, chunk_bytes: int, timeout: float = TIMEOUT
    ) -> None:
        raise_limit()
        self.folder = Path(folder) / "chunks"
        self.chunk_bytes = layout.whole_pages(chunk_bytes)
        self.room = Room(self.folder, budget)
        self.usable = True
        self._timeout = timeout
        self._late_until = 0.0
        self._said: set[str] = set()

    def failed(self, error: OSError) -> None:
        """Go on after an error: without the cache, unless it is one that passes."""
        if error.errno in (errno.ENOENT, errno.ESTALE):
            log.debug("%s: %s: was removed meanwhile", self.folder, error.filename)
        elif error.errno in TOO_MANY:
            self._say(f"{limit_reached()}; what needs a file of the cache is read without it")
        elif error.errno == errno.ENOMEM:
            self._say(
                "no more files can be mapped (vm.max_map_count); further ones are read without the "
                "cache"
            )
        elif self.usable:
            self.usable = False
            remedy = "free some space"
            if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
                remedy = "let this user write there, by a common group and umask 002 for instance"
            reason = error.strerror or str(error)
            self._say(f"{reason}; going on without a cache ({remedy}, or name another cache_dir)")

    @property
    def patience(self) -> float:
        """Seconds that a claim is waited for now."""
        if time.monotonic() < self._late_until:
            return min(self._timeout, LATE_PATIENCE)
        return self._timeout

    def late(self, url: str) -> None:
        """A claim was waited for in vain."""
        self._late_until = time.monotonic() + LATE_FOR
        self._say(
            f"pages of {url} were held by another process for longer than {self._timeout:g} s, "
            f"which fetches them or was stopped; they are fetched without waiting for it"
        )

    def _say(self, text: str) -> None:
        """Once for each text."""
        if text not in self._said:
            self._said.add(text)
            log.warning("%s: %s", self.folder, text)
