"""Independent chunks of a nogil kernel on a few threads."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def num_threads() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def chunk_bounds(size: int, least: int) -> list[tuple[int, int]]:
    """[start, stop) of nearly equal parts of range(size): a few per core, none (but a lone one) under `least`."""
    count = max(1, min(4 * num_threads(), size // least))
    edges = [size * i // count for i in range(count + 1)]
    return list(zip(edges[:-1], edges[1:], strict=True))


def map_in_threads(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """[work(item) for item in items], on as many threads as there are cores; a lone item runs here."""
    threads = min(num_threads(), len(items))
    if threads <= 1:
        return [work(item) for item in items]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, items))
