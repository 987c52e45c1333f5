"""Buffers that are used again, under one budget."""

from __future__ import annotations

from collections import defaultdict
from functools import lru_cache

import numpy as np

from streammega.storage.store import Bytes

MEMORY_PAGE = 4096
"""Bytes of a page of memory, and of the smallest buffer."""
STEP_BITS = 4
"""Between two powers of two, buffers have 8 sizes: few, so that a freed one soon fits."""


@lru_cache(maxsize=1 << 14)
def rounded(size: int) -> int:
    """The bytes of the buffer for `size` bytes: at most an eighth or a page more."""
    if size <= MEMORY_PAGE:
        return MEMORY_PAGE
    eighth_or_less = 1 << (size.bit_length() - STEP_BITS)
    step = max(MEMORY_PAGE, eighth_or_less)
    steps = -(-size // step)
    return steps * step


class BufferPool:
    """Byte buffers of at most `budget` bytes together: in use, kept for reuse, or reserved for memory
    that comes from elsewhere.

    Buffers are reused because fresh memory costs a page fault for every 4 KiB. Callers hold a lock.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.in_use = 0
        self.peak = 0
        """Most bytes in use at once until now."""
        self._kept = 0  # bytes of buffers that wait for reuse
        # By their size, which is a rounded one.
        self._free: dict[int, list[Bytes]] = defaultdict(list)

    def has_room(self, size: int) -> bool:
        """Whether `take(size)` fits the budget now."""
        return self.in_use + rounded(size) <= self.budget

    def take(self, size: int) -> Bytes:
        """A buffer of at least `size` bytes, with old content. The caller checked `has_room`."""
        buffer_bytes = rounded(size)
        free = self._free[buffer_bytes]
        if free:
            self._kept -= buffer_bytes
            self._use(buffer_bytes)
            return free.pop()
        self._use(buffer_bytes)
        return np.empty(buffer_bytes, np.uint8)

    def reserve(self, size: int) -> None:
        """Count `size` bytes that will arrive in memory of their own. The caller checked
        `has_room`.
        """
        self._use(rounded(size))

    def end_reservation(self, size: int) -> None:
        """That memory was freed."""
        self.in_use -= rounded(size)

    def _use(self, count: int) -> None:
        """Count `count` more bytes as in use, and drop kept buffers to make room for them."""
        self.in_use += count
        self.peak = max(self.peak, self.in_use)
        while self._kept and self.in_use + self._kept > self.budget:
            # The largest first: the fewest are lost until there is room.
            largest = max(size for size, buffers in self._free.items() if buffers)
            self._free[largest].pop()
            self._kept -= largest

    def give_back(self, buffer: Bytes) -> None:
        """Return a buffer that was taken."""
        buffer_bytes = len(buffer)
        self.in_use -= buffer_bytes
        self._kept += buffer_bytes
        self._free[buffer_bytes].append(buffer)

    def clear(self) -> None:
        """Forget the buffers kept for reuse."""
        self._free.clear()
        self._kept = 0
