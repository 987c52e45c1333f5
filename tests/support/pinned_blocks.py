"""Stands for torch's pinned memory and a device that is behind with its copies, where there is none."""

from __future__ import annotations

import ctypes
import weakref
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass
class Copy:
    address: int
    size: int
    block: np.ndarray | None
    meant: bytes


class PinnedBlocks:
    """Stands for torch's pinned allocator, and for a device that is behind with its copies.

    As there: a block is handed out again at once when its storage is gone and no copy of it is
    waiting; a copy is known only from the very storage that was handed out (its context in torch),
    not from an alias of its memory.
    """

    def __init__(self) -> None:
        self.empty = torch.empty
        self.free: dict[int, list[np.ndarray]] = defaultdict(list)
        self.block_of: dict[int, np.ndarray] = {}
        self.copying: Counter[int] = Counter()
        self.given_up: dict[int, np.ndarray] = {}
        self.every_block: list[np.ndarray] = []

    def allocate(
        self,
        *shape: Any,
        dtype: torch.dtype = torch.float32,
        pin_memory: bool = False,
        **options: Any,
    ) -> torch.Tensor:
        if not pin_memory:
            return self.empty(*shape, dtype=dtype, **options)
        size = int(np.prod(shape[0] if len(shape) == 1 else shape)) * dtype.itemsize
        whole = 1 << max(size - 1, 0).bit_length()
        if not self.free[whole]:
            self.every_block.append(np.empty(whole, np.uint8))
            self.free[whole].append(self.every_block[-1])
        block = self.free[whole].pop()
        view = block[:size]
        storage = torch.from_numpy(view)
        key = storage.untyped_storage()._cdata
        self.block_of[key] = block
        weakref.finalize(view, self._gone, key, block).atexit = False
        return storage.view(dtype).view(*shape)

    def _gone(self, key: int, block: np.ndarray) -> None:
        self.block_of.pop(key, None)
        if self.copying[id(block)]:
            self.given_up[id(block)] = block
        else:
            self.free[len(block)].append(block)

    def copy_later(self, tensor: torch.Tensor) -> Copy:
        """What `tensor.to("cuda", non_blocking=True)` does on the host."""
        assert tensor.is_contiguous(), "torch would copy it into pageable memory first, and wait"
        block = self.block_of.get(tensor.untyped_storage()._cdata)
        if block is not None:
            self.copying[id(block)] += 1
        return Copy(
            tensor.data_ptr(),
            tensor.numel() * tensor.element_size(),
            block,
            tensor.clone().numpy().tobytes(),
        )

    def arrive(self, copy: Copy) -> bool:
        """Make a copy that was waiting; whether it has the bytes that were meant."""
        same = ctypes.string_at(copy.address, copy.size) == copy.meant
        if copy.block is not None:
            self.copying[id(copy.block)] -= 1
            if not self.copying[id(copy.block)] and id(copy.block) in self.given_up:
                self.free[len(copy.block)].append(self.given_up.pop(id(copy.block)))
        return same
