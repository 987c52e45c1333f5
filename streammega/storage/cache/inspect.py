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

MOST_TRIES = 30
TRY_AGAIN = 0.1
"""Seconds between tries to remove an object whose cache is busy.

Others hold its lock for as long as it takes to note a chunk.
"""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A cached object: how many of its bytes are there, when it was last used, and whether somebody
    uses it now.

    `used`: seconds since 1970.
    """

    folder: Path
    url: str
    size: int
    chunk_bytes: int
    cached_bytes: int
    used: float
    in_use: bool


def entries(folder: Path) -> list[Entry]:
    """All objects of a cache's `chunks` folder that can be told.

    Those of another layout have no bytes.
    """
    used_names = names_in_use(folder)
    objects = []
    for object_folder in sorted(layout.object_folders(folder)):
        # Halfway made, being removed, or of somebody else: it cannot be told.
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            objects.append(_entry(object_folder, object_folder.name in used_names))
    return objects


def _entry(folder: Path, in_use: bool) -> Entry:
    about = json.loads((folder / "object.json").read_bytes())
    size, chunk_bytes = _sizes(about)
    pages = 0
    for _, table in _tables(folder, size, chunk_bytes):
        pages += int(np.count_nonzero(table))
    return Entry(
        folder=folder,
        url=str(about["url"]),
        size=size,
        chunk_bytes=chunk_bytes,
        # The last page of an object is a short one.
        cached_bytes=min(pages * PAGE_BYTES, size),
        used=layout.last_use(folder),
        in_use=in_use,
    )


def damaged_pages(entry: Entry) -> list[tuple[Path, int]]:
    """Pages whose bytes are not those of their checksums: (data file, page of the chunk)."""
    damaged = []
    for path, table in _tables(entry.folder, entry.size, entry.chunk_bytes):
        data_bytes = _data_bytes(path, entry.size, entry.chunk_bytes)
        with open(path, "rb") as file:
            for page in np.flatnonzero(table).tolist():
                begin = page * PAGE_BYTES
                file.seek(begin)
                data = file.read(min(PAGE_BYTES, data_bytes - begin))
                if layout.checksum(data) != int(table[page]):
                    damaged.append((path, page))
    return damaged


def clear(folder: Path) -> tuple[int, int]:
    """Remove all objects that nobody uses, of other layouts too.

    Returns (removed, in use and kept). Raises OSError.
    """
    room = Room(folder, 0)
    objects = layout.object_folders(folder)
    uses = [(layout.last_use(object_folder), object_folder) for object_folder in objects]
    # Afterwards: whoever comes between changes the time of last use, by which it is kept.
    used_names = names_in_use(folder)
    removed = 0
    for when, object_folder in uses:
        if object_folder.name not in used_names:
            removed += _remove_patiently(room, object_folder, when)
    return removed, len(objects) - removed


def recount(folder: Path) -> int:
    """Bytes that all chunk files may grow to, counted anew and noted.

    Raises OSError where the folder cannot be written.
    """
    return Room(folder, 0).recount()


def _remove_patiently(room: Room, folder: Path, when: float) -> bool:
    for _ in range(MOST_TRIES):
        try:
            return room.remove(folder, when)
        except Busy:
            time.sleep(TRY_AGAIN)
    return False


def _sizes(about: dict[str, Any]) -> tuple[int, int]:
    size = int(about["size"])
    chunk_bytes = int(about["chunk_bytes"])
    if size < 0 or chunk_bytes < PAGE_BYTES or chunk_bytes % PAGE_BYTES:
        raise ValueError("is no description of a cached object")
    return size, chunk_bytes


def _tables(folder: Path, size: int, chunk_bytes: int) -> list[tuple[Path, NDArray[np.uint64]]]:
    """(chunk file, checksums of its pages) of each file that has the size it must have."""
    tables = []
    for path in sorted(folder.glob("*.data")):
        data_bytes = _data_bytes(path, size, chunk_bytes)
        if data_bytes > 0 and path.stat().st_size == layout.file_bytes(data_bytes):
            pages = layout.pages_of(data_bytes)
            offset = layout.table_at(data_bytes)
            tables.append((path, np.fromfile(path, "<u8", pages, offset=offset)))
    return tables


def _data_bytes(path: Path, size: int, chunk_bytes: int) -> int:
    """How many bytes of its object a chunk file is for, which is named by the number of its chunk.

    0 or less: none, it is not one of this object.
    """
    if not path.stem.isdecimal():
        return 0
    start = int(path.stem) * chunk_bytes
    return min(chunk_bytes, size - start)
