"""Memory of the loader: the table in which kernels find fetched buffers, and the memory of batches.

A batch may be read after its caller has dropped it: `.to("cuda", non_blocking=True)` from pinned
memory only queues the copy. Only torch knows when such a copy is done: its pinned allocator records
an event on the block, and keeps the block until then. So on machines with CUDA a batch is in torch's
own pinned memory, and this module reuses none of it.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch
import torch.utils.data
from numpy.typing import NDArray
from torch import Tensor

from streammega.kernels.addresses import address_of
from streammega.kernels.plan import count_down
from streammega.samples.host_fields import Allocate, new_memory
from streammega.storage.fetch.buffer_pool import new_buffer, rounded
from streammega.storage.fetch.requests import FetchGroup

Integers = NDArray[np.int64]

ENDLESS = 1 << 60
"""Uses of a slot that is never freed: more rows than any run gathers."""
RECEIVED_BYTES = 64 << 20
"""Most unused memory that is kept for batches from worker processes."""
_thread_memory = threading.local()
"""The recycled memory of each thread. `RecycledMemory` has no lock, so threads do not share it."""


class BufferTable:
    """The table of *slots*, the numbers under which kernels find the bytes of files and buffers.

    File i has slot i. The next slot has address 0. All others are for buffers, and such a slot goes
    through these states:

        | state    | set by          | when                                                        |
        |----------|-----------------|-------------------------------------------------------------|
        | free     |                 | no row refers to the slot                                   |
        | acquired | `acquire`       | the planner chooses a slot for a buffer                     |
        | expected | `expect_rows`   | the number of rows that the buffer serves is known (`uses`) |
        | attached | `attach`        | the reads of the buffer go to the fetcher                   |
        | filled   | `fill`          | the bytes are in memory: kernels may follow `addresses`     |
        | free     | `release_rows`  | the last row of the buffer was gathered                     |
        | free     | `cancel`        | its planned rows were gathered, and no others will follow   |
        | free     | `return_unused` | the planner does not need the slot that it acquired         |

    uses: int64 [slots], the rows that each slot has still to serve. addresses, room: int64 [slots], the
    memory address of its bytes, and how many they are: 0 unless they are there. All are replaced by
    longer arrays when slots run out, so do not keep references to them. Only the thread that plans
    and gathers uses the table, so there is no lock.
    """

    def __init__(self, files: int) -> None:
        self.zero = files
        """The slot with address 0. Rows that use it have their own address as offset."""
        never_freed = files + 1
        self.uses: Integers = np.full(never_freed, ENDLESS, np.int64)
        self.addresses: Integers = np.zeros(never_freed, np.int64)
        self.room: Integers = np.zeros(never_freed, np.int64)
        self._attached: dict[int, FetchGroup] = {}  # by slot
        self._free: list[int] = []

    def map_files(self, contents: Sequence[NDArray[np.uint8] | None]) -> None:
        """Set the memory of each file, by number of the file; None if the file is not mapped."""
        for number, content in enumerate(contents):
            if content is not None:
                self.addresses[number] = address_of(content)
                self.room[number] = len(content)

    def acquire(self, count: int) -> Integers:
        """Take `count` free slots, int64 [count]."""
        if len(self._free) < count:
            self._grow(count)
        kept = len(self._free) - count
        slots = self._free[kept:]
        del self._free[kept:]
        return np.array(slots, np.int64)

    def _grow(self, count: int) -> None:
        """Add `count` slots, or double the table if that is more: so arrays are rarely copied."""
        first = len(self.uses)
        more = max(count, first)
        unused = np.zeros(more, np.int64)
        self.uses = np.concatenate([self.uses, unused])
        self.addresses = np.concatenate([self.addresses, unused])
        self.room = np.concatenate([self.room, unused])
        # the lowest last, so that it is acquired first
        self._free += range(first + more - 1, first - 1, -1)

    def return_unused(self, slots: Integers) -> None:
        """Free slots, given in the order in which they were acquired."""
        self._free += slots[::-1].tolist()

    def expect_rows(self, slots: Integers, rows: Integers) -> None:
        """Set that slot slots[i] will serve rows[i] rows with tokens, in all windows together."""
        self.uses[slots] = rows

    def keep(self, slot: int) -> None:
        """Set that a slot is never freed."""
        self.uses[slot] = ENDLESS

    def attach(self, buffer: FetchGroup) -> None:
        """Keep a buffer whose bytes are being fetched."""
        self._attached[buffer.slot] = buffer

    def fill(self, buffer: FetchGroup) -> None:
        """Set the address of a buffer whose bytes are in memory."""
        assert buffer.buffer is not None
        self.addresses[buffer.slot] = address_of(buffer.buffer)
        self.room[buffer.slot] = len(buffer.buffer)

    def release_rows(self, slot_of_row: Integers, tokens_of_row: Integers) -> list[FetchGroup]:
        """Count these rows as gathered. Free the slots that have no rows left; return their buffers."""
        freed = np.empty(len(self._attached), np.int64)
        count = count_down(self.uses, slot_of_row, tokens_of_row, freed)
        assert count >= 0, "more slots are free than had buffers"
        return self._release(freed[:count].tolist())

    def cancel(self, slots: Integers, rows: Integers) -> list[FetchGroup]:
        """Expect rows[i] fewer rows of slots[i]. Free the slots that have no rows left; return their
        buffers.
        """
        self.uses[slots] -= rows
        return self._release(slots[self.uses[slots] == 0].tolist())

    def _release(self, slots: list[int]) -> list[FetchGroup]:
        self._free += slots
        self.room[slots] = 0
        return [self._attached.pop(slot) for slot in slots]

    def clear(self) -> None:
        """Drop all buffers, because reading has ended."""
        self._attached.clear()

    def unmap(self) -> None:
        """Note that no memory is there any more: rows that are gathered after this are refused."""
        self.room[:] = 0


# Batches


def batch_memory(kept_bytes: int, pinned: bool | None = None) -> Allocate:
    """The function that allocates the tensors of batches in this process.

    Call it in the thread whose current CUDA device will receive the batches.

    kept_bytes: most unused memory that `RecycledMemory` keeps. pinned: None: batches are pinned if
    CUDA can be used. False: they are not, because the host copies them before they go to a device.

    With CUDA, batches are in torch's pinned memory. Worker processes and machines without an
    accelerator reuse memory; workers copy the batches that they send. A forked child of a process
    that uses CUDA, and other accelerators, get new memory each time: their copies cannot be tracked.
    """
    if pinned is False or torch.utils.data.get_worker_info() is not None:
        # does not call CUDA, so a process that only forwards batches opens no context
        return RecycledMemory(kept_bytes).take
    if torch.cuda.is_available() and not torch.cuda._is_in_bad_fork():
        return PinnedMemory().take
    if torch.accelerator.is_available():
        return new_memory
    return RecycledMemory(kept_bytes).take


def recycled_memory() -> Allocate:
    """The function that allocates, in this thread, tensors of batches in worker processes and from them.

    Outside of workers, with an accelerator it allocates new memory each time: torch's DataLoader pins
    it, or makes copies that cannot be tracked.
    """
    known: Allocate | None = getattr(_thread_memory, "memory", None)
    if known is None:
        in_worker = torch.utils.data.get_worker_info() is not None
        alone = in_worker or not torch.accelerator.is_available()
        known = RecycledMemory(RECEIVED_BYTES).take if alone else new_memory
        _thread_memory.memory = known
    return known


class PinnedMemory:
    """Allocates tensors with torch's pinned allocator.

    The allocator reuses a block when no tensor and no copy to a device needs it. So after the first
    few batches it allocates no new block.
    """

    def __init__(self) -> None:
        self._device = torch.cuda.current_device()

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Make a tensor with arbitrary content.

        Hand out only views of it that torch makes: torch does not know of a numpy array that shares
        its memory.
        """
        # a new thread begins on device 0 and would open a context there
        with torch.cuda.device(self._device):
            return torch.empty(shape, dtype=dtype, pin_memory=True)


class RecycledMemory:
    """Allocates tensors in memory that is reused as soon as no tensor, view or array refers to it.

    Reused memory is warm in the CPU cache. At most `kept_bytes` of unused memory are kept.

    It is for processes without an accelerator: there, all code that reads memory refers to it. A
    block returns in whichever thread drops the last reference, so there is no lock. Two threads that
    return blocks at the same time may keep one block too many.
    """

    def __init__(self, kept_bytes: int) -> None:
        self._kept_bytes = kept_bytes
        self._free: dict[int, list[NDArray[np.uint8]]] = defaultdict(list)
        self._in_use: dict[int, _Use] = {}  # Python does not call a weak reference that was dropped

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Make a tensor with arbitrary content."""
        size = math.prod(shape) * dtype.itemsize
        block_size = rounded(size)  # cu_seqlens have any size
        try:
            block = self._free[block_size].pop()
        except IndexError:
            block = new_buffer(block_size)
        # the tensor's storage keeps this object: when it is collected, no reader remains
        array = block[:size]
        use = _Use(array, self._recycle)
        use.block = block
        self._in_use[id(use)] = use
        return torch.from_numpy(array).view(dtype).view(shape)

    def _recycle(self, use: _Use) -> None:
        """Keep an unused block, if there is room."""
        del self._in_use[id(use)]
        size = len(use.block)
        kept = sum(size * len(blocks) for size, blocks in list(self._free.items()))
        if kept + size <= self._kept_bytes:
            self._free[size].append(use.block)


class _Use(weakref.ref[NDArray[np.uint8]]):
    """A weak reference to an array in use. block: the memory that the array is a part of."""

    __slots__ = ("block",)
    block: NDArray[np.uint8]
