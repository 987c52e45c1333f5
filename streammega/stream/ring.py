"""Arrays for batches that are used again when nobody refers to them any more: warm in cache, pinned where CUDA is."""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

KEPT = 8
"""Arrays of one size that wait to be used again."""


class Ring:
    """Hands out arrays; one that was garbage-collected, with every tensor made from it, is handed out again.

    reuse: False makes every array anew, as worker processes need: what they send is read after they have forgotten it.
    """

    def __init__(self, *, reuse: bool = True) -> None:
        self._reuse = reuse
        self._pinned = reuse and torch.cuda.is_available()
        self._free: dict[int, list[NDArray[np.uint8]]] = defaultdict(list)

    def take(self, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """An array with arbitrary content. The memory is free again when this very object is collected."""
        kind = np.dtype(dtype)
        size = max(1, math.prod(shape)) * kind.itemsize
        if not self._reuse:
            return np.empty(shape, kind)
        free = self._free[size]
        memory = free.pop() if free else self._make(size)
        array: NDArray[Any] = memory[: math.prod(shape) * kind.itemsize].view(kind).reshape(shape)
        weakref.finalize(array, _give_back, free, memory).atexit = False
        return array

    def _make(self, size: int) -> NDArray[np.uint8]:
        if self._pinned:
            return np.frombuffer(torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy(), np.uint8)
        return np.empty(size, np.uint8)


def _give_back(free: list[NDArray[np.uint8]], memory: NDArray[np.uint8]) -> None:
    if len(free) < KEPT:
        free.append(memory)
