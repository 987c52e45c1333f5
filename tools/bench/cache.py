#!/usr/bin/env python3
"""The page cache with 1,000 and with 100,000 objects: a look-up, a new entry, an eviction, and the list
of unused objects that evictions take from.

    .venv/bin/python tools/bench/cache.py      # a minute; needs 300,000 inodes in the temporary folder

Objects have a page each. Times are medians over calls, of a disk cache that holds all names.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from streammega.storage.cache import PageCache, cache_folder, open_cached
from streammega.storage.cache.chunk_file import file_bytes
from tools.bench import harness

SIZE = 1000
CHUNK_BYTES = 1 << 20
CALLS = 500
LISTS = 5


def read(cache: PageCache, number: int) -> None:
    """Read an object through the cache, and close it."""
    cached = open_cached(cache, f"s3://bucket/{number:06d}", "etag", SIZE)
    assert cached is not None
    cached.read(0, SIZE, np.empty(SIZE, np.uint8), lambda start, stop, out: out.fill(1))


def milliseconds(action: Callable[[int], object], calls: int = CALLS) -> float:
    """The median time of a call."""
    seconds = []
    for number in range(calls):
        began = time.perf_counter()
        action(number)
        seconds.append(time.perf_counter() - began)
    return 1000 * statistics.median(seconds)


def measure(folder: Path, objects: int) -> list[float]:
    """Milliseconds of a look-up, a new entry, an eviction with its entry, and a list per 1,000."""
    cache = PageCache(folder, 1 << 40, CHUNK_BYTES)
    for number in range(objects):
        read(cache, number)
    step = objects // CALLS
    look_up = milliseconds(lambda number: read(cache, number * step))
    new = milliseconds(lambda number: read(cache, objects + number))
    earlier = time.time() - cache_folder.GRACE - 10
    for used in cache.folder.glob("*/used"):
        os.utime(used, (earlier, earlier))
    unused = milliseconds(lambda _: cache_folder.unused_objects(cache.folder), LISTS)
    full = PageCache(folder, (objects + CALLS) * file_bytes(SIZE), CHUNK_BYTES)
    read(full, 2 * objects)  # takes the list
    evict = milliseconds(lambda number: read(full, 2 * objects + 1 + number))
    return [look_up, new, evict, unused / ((objects + CALLS) / 1000)]


def main() -> int:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--objects", type=int, nargs="+", default=[1000, 100_000])
    chosen = options.parse_args()
    print(f"{harness.machine()}; milliseconds, medians\n")
    columns = ("look-up", "new entry", "new entry that evicts one", "list of 1,000 unused ones")
    harness.table("objects", *columns)
    for objects in chosen.objects:
        with tempfile.TemporaryDirectory(prefix="streammega-cache-") as folder:
            cells = measure(Path(folder), objects)
            harness.row(f"{objects:,}", *(f"{cell:.3f}" for cell in cells))
    return 0


if __name__ == "__main__":
    sys.exit(main())
