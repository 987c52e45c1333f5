"""Buffers that are used again, under one budget."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from streammega.storage.store import Bytes


def rounded(size: int) -> int:
    """The bytes that a buffer of `size` takes: an eighth more at most, so that freed ones fit the
    next request.
    """
    if size <= 4096:
        return 4096
    step = 1 << max(12, size.bit_length() - 4)
    return -(-size // step) * step


class BufferPool:
    """Byte buffers, of which no more than `budget` bytes exist at any time, in use or kept for
    reuse.

    Buffers are reused because fresh memory costs a page fault for every 4 KiB. Not locked: its user
    holds a lock.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.in_use = self.most = 0
        self._kept = 0
        self._free: dict[int, list[Bytes]] = defaultdict(list)

    def has_room(self, size: int) -> bool:
        """Whether `take(size)` fits the budget now."""
        return self.in_use + rounded(size) <= self.budget

    def take(self, size: int) -> Bytes:
        """A buffer of at least `size` bytes, its content left over from before.

        The caller has asked `has_room`.
        """
        whole = rounded(size)
        self.in_use += whole
        self.most = max(self.most, self.in_use)
        if self._free[whole]:
            self._kept -= whole
            return self._free[whole].pop()
        while self._kept and self.in_use + self._kept > self.budget:
            self._drop_one()
        return np.empty(whole, np.uint8)

    def give_back(self, buffer: Bytes) -> None:
        """Return a buffer that was taken."""
        self.in_use -= len(buffer)
        self._kept += len(buffer)
        self._free[len(buffer)].append(buffer)

    def _drop_one(self) -> None:
        size = max(size for size, buffers in self._free.items() if buffers)
        self._free[size].pop()
        self._kept -= size

    def clear(self) -> None:
        """Forget the buffers kept for reuse."""
        self._free.clear()
        self._kept = 0
