"""Buffers that are used again, under one budget."""

from __future__ import annotations

from functools import lru_cache
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap

import numpy as np

from streammega.storage.fork_lock import process_lock
from streammega.storage.store import Bytes

MEMORY_PAGE = 4096
"""Bytes of a page of memory, and of the smallest buffer."""
STEP_BITS = 5
"""Between two powers of two, buffers have 16 sizes: few, so that a freed one soon fits."""

MAX_WASTE = 5 / 4
"""A kept buffer is used for a read if it is at most so many times as large."""


@lru_cache(maxsize=1 << 14)
def rounded(size: int) -> int:
    """The bytes of the buffer for `size` bytes: at most a sixteenth or a page more."""
    if size <= MEMORY_PAGE:
        return MEMORY_PAGE
    sixteenth_or_less = 1 << (size.bit_length() - STEP_BITS)
    step = max(MEMORY_PAGE, sixteenth_or_less)
    steps = -(-size // step)
    return steps * step


def new_buffer(size: int) -> Bytes:
    """Zeros, in a mapping of their own: malloc would keep the memory of dropped buffers."""
    return np.frombuffer(mmap(-1, size, MAP_PRIVATE | MAP_ANONYMOUS), np.uint8)


class BufferPool:
    """Byte buffers under one budget.

    A reader reserves memory before it sends a request, and takes the buffer when the answer is
    there: until then the bytes are in the memory of the transport. Buffers are reused, because fresh
    memory costs a page fault for every 4 KiB. Huge pages were tried, and were no faster.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        """Most bytes. It may change: a smaller one holds as soon as enough memory is freed."""
        self.in_use = 0
        """Bytes that are reserved, with and without a buffer."""
        self.peak = 0
        """Most bytes in use at once until now."""
        self._awaited = 0  # bytes that are reserved and have no buffer yet
        self._allocated = 0  # bytes of all buffers, in use and kept
        # Buffers kept for reuse, by size, the size first that was not used for the longest time.
        self._free: dict[int, list[Bytes]] = {}
        self.lock = process_lock()

    def has_room(self, size: int) -> bool:
        """Whether `reserve(size)` fits the budget now."""
        return self.in_use + rounded(size) <= self.budget

    def reserve(self, size: int) -> None:
        """Count `size` bytes as in use. The caller checked `has_room`."""
        with self.lock:
            self.in_use += rounded(size)
            self.peak = max(self.peak, self.in_use)
            self._awaited += rounded(size)

    def take(self, size: int) -> Bytes:
        """A buffer for `size` reserved bytes, with old content. The caller holds `lock`."""
        buffer_bytes = rounded(size)
        self._awaited -= buffer_bytes
        largest = MAX_WASTE * buffer_bytes
        fitting = [kept for kept in self._free if buffer_bytes <= kept <= largest]
        if fitting:
            return self._pop(min(fitting))
        self._allocated += buffer_bytes
        # the answers under way need buffers too
        while self._free and self._allocated + self._awaited > self.budget:
            self._allocated -= len(self._pop(next(iter(self._free))))
        return new_buffer(buffer_bytes)

    def free(self, size: int, buffer: Bytes | None) -> None:
        """End the reservation of `size` bytes. buffer: None if it was not taken."""
        with self.lock:
            self.in_use -= rounded(size)
            if buffer is None:
                self._awaited -= rounded(size)
            else:
                kept = self._free.pop(len(buffer), [])
                kept.append(buffer)
                self._free[len(buffer)] = kept

    def _pop(self, size: int) -> Bytes:
        """Take a kept buffer of this size, which is then the size used last."""
        kept = self._free.pop(size)
        buffer = kept.pop()
        if kept:
            self._free[size] = kept
        return buffer

    def clear(self) -> None:
        """Drop the buffers kept for reuse."""
        with self.lock:
            self._allocated -= sum(size * len(buffers) for size, buffers in self._free.items())
            self._free.clear()
