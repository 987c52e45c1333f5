"""What the command line shows of a cache folder, checks in it, and removes.

It looks at all files, so that it is not for the way of the data.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from streammega.storage.cache.cache_folder import (
    CacheFolder,
    LockedError,
    is_in_use,
    last_use,
    object_folders,
    unused_objects,
)
from streammega.storage.cache.chunk_file import (
    PAGE_BYTES,
    checksum,
    file_bytes,
    pages_of,
    table_at,
)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A cached object: how many of its bytes are there, and when it was last used.

    `used`: seconds since 1970. `in_use`: whether that was within the last ten minutes.
    """

    folder: Path
    url: str
    size: int
    chunk_bytes: int
    cached_bytes: int
    used: float
    in_use: bool


def entries(folder: Path) -> list[Entry]:
    """All objects of a cache's `chunks` folder. Those of another layout have no bytes."""
    found = []
    for object_folder in sorted(object_folders(folder)):
        # Halfway made, being removed, or of somebody else: it is left out.
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            found.append(_entry(object_folder))
    return found


def _entry(folder: Path) -> Entry:
    about = json.loads((folder / "object.json").read_bytes())
    size = int(about["size"])
    chunk_bytes = int(about["chunk_bytes"])
    if size < 0 or chunk_bytes < PAGE_BYTES or chunk_bytes % PAGE_BYTES:
        raise ValueError("is no description of a cached object")
    pages = sum(np.count_nonzero(table) for _, _, table in _tables(folder, size, chunk_bytes))
    used = last_use(folder)
    return Entry(
        folder=folder,
        url=str(about["url"]),
        size=size,
        chunk_bytes=chunk_bytes,
        cached_bytes=min(int(pages) * PAGE_BYTES, size),  # the last page is a short one
        used=used,
        in_use=is_in_use(used),
    )


def damaged_pages(entry: Entry) -> list[tuple[Path, int]]:
    """Pages whose bytes do not have their checksums: (file of the chunk, page of the chunk)."""
    damaged = []
    for path, data_bytes, table in _tables(entry.folder, entry.size, entry.chunk_bytes):
        with open(path, "rb") as file:
            for page in np.flatnonzero(table).tolist():
                begin = page * PAGE_BYTES
                file.seek(begin)
                data = file.read(min(PAGE_BYTES, data_bytes - begin))
                if checksum(data) != int(table[page]):
                    damaged.append((path, page))
    return damaged


def clear(folder: Path) -> tuple[int, int]:
    """Remove all objects that are not in use, of other layouts too.

    Returns (removed, kept). Raises OSError.
    """
    cache = CacheFolder(folder.parent, 0, PAGE_BYTES)
    count = len(object_folders(folder))
    removed = 0
    for last_used, object_folder in unused_objects(folder):
        with contextlib.suppress(LockedError):
            removed += cache.remove(object_folder, last_used)
    return removed, count - removed


def recount(folder: Path) -> int:
    """Count and note the bytes that all chunk files may grow to. Raises OSError."""
    return CacheFolder(folder.parent, 0, PAGE_BYTES).recount()


def _tables(
    folder: Path, size: int, chunk_bytes: int
) -> Iterator[tuple[Path, int, NDArray[np.uint64]]]:
    """(file, bytes of data, checksums of its pages) of each chunk file of the right size."""
    for path in sorted(folder.glob("*.data")):
        if path.stem.isdecimal():
            data_bytes = min(chunk_bytes, size - int(path.stem) * chunk_bytes)
            if data_bytes > 0 and path.stat().st_size == file_bytes(data_bytes):
                count = pages_of(data_bytes)
                yield path, data_bytes, np.fromfile(path, "<u8", count, offset=table_at(data_bytes))
