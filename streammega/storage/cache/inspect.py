"""What the command line shows of a cache folder, checks in it, and removes.

Looks at all of it: not for the way of the data.
"""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streammega.storage.cache import layout
from streammega.storage.cache.layout import PAGE_BYTES
from streammega.storage.cache.presence import names_in_use
from streammega.storage.cache.room import Busy, Room


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A cached object: pages and bytes that are there, of how many; when it was last used; whether
    somebody uses it now.
    """

    folder: Path
    url: str
    size: int
    chunk_bytes: int
    cached_bytes: int
    used: float
    in_use: bool


def entries(folder: Path) -> list[Entry]:
    """All objects of a cache's `chunks` folder that can be told; those of another layout have no
    bytes.
    """
    used = names_in_use(folder)
    found = []
    for own in sorted(layout.object_folders(folder)):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            about = json.loads((own / "object.json").read_bytes())
            size, chunk_bytes = _sizes(about)
            pages = sum(int((table != 0).sum()) for _, table in _tables(own, size, chunk_bytes))
            found.append(
                Entry(
                    folder=own,
                    url=str(about["url"]),
                    size=size,
                    chunk_bytes=chunk_bytes,
                    cached_bytes=min(pages * PAGE_BYTES, size),
                    used=layout.last_use(own),
                    in_use=own.name in used,
                )
            )
    return found


def damaged_pages(entry: Entry) -> list[tuple[Path, int]]:
    """Pages whose bytes are not those of their checksums: (data file, page of the chunk)."""
    bad = []
    for path, table in _tables(entry.folder, entry.size, entry.chunk_bytes):
        length = _data_bytes(path, entry.size, entry.chunk_bytes)
        with open(path, "rb") as file:
            for page in np.flatnonzero(table).tolist():
                file.seek(page * PAGE_BYTES)
                data = file.read(min(PAGE_BYTES, length - page * PAGE_BYTES))
                if layout.checksum(data) != int(table[page]):
                    bad.append((path, page))
    return bad


def clear(folder: Path) -> tuple[int, int]:
    """Remove all objects that nobody uses, of other layouts too.

    Returns (removed, in use and kept). Raises OSError.
    """
    room = Room(folder, 0)
    folders = layout.object_folders(folder)
    found = [(layout.last_use(own), own) for own in folders]
    used = names_in_use(folder)
    removed = 0
    for when, own in found:
        if own.name not in used:
            removed += _patiently(room, own, when)
    return removed, len(folders) - removed


def recount(folder: Path) -> int:
    """Bytes that all chunk files may grow to, counted anew and noted.

    Raises OSError where the folder cannot be written.
    """
    return Room(folder, 0).recount()


def _patiently(room: Room, folder: Path, when: float) -> bool:
    for _ in range(30):
        try:
            return room.remove(folder, when)
        except Busy:  # others hold the lock for as long as it takes to note a chunk
            time.sleep(0.1)
    return False


def _sizes(about: dict[str, Any]) -> tuple[int, int]:
    size = int(about["size"])
    chunk_bytes = int(about["chunk_bytes"])
    if size < 0 or chunk_bytes < PAGE_BYTES or chunk_bytes % PAGE_BYTES:
        raise ValueError("is no description of a cached object")
    return size, chunk_bytes


def _tables(folder: Path, size: int, chunk_bytes: int) -> list[tuple[Path, NDArray[np.uint64]]]:
    """The checksums of each chunk file that has the size it must have."""
    found = []
    for path in sorted(folder.glob("*.data")):
        length = _data_bytes(path, size, chunk_bytes)
        if length > 0 and path.stat().st_size == layout.file_bytes(length):
            at = layout.table_at(length)
            found.append((path, np.fromfile(path, "<u8", layout.pages_of(length), offset=at)))
    return found


def _data_bytes(path: Path, size: int, chunk_bytes: int) -> int:
    """How many bytes of its object a chunk file is for; 0 or less: none, it is not one of this
    object.
    """
    if not path.stem.isdecimal():
        return 0
    return min(chunk_bytes, size - int(path.stem) * chunk_bytes)
