"""Memory of the loader: the table in which kernels find fetched buffers, and what batches lie in.

A batch may be read after its caller has dropped it: `.to("cuda", non_blocking=True)` from pinned
memory only queues the copy. Only torch knows when such a copy is done: its pinned allocator notes
an event on a block that is copied from, and keeps the block until then. So where CUDA is, all of a
batch is torch's own pinned memory, and nothing here uses any of it again.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections import defaultdict

import numpy as np
import torch
import torch.utils.data
from numpy.typing import NDArray
from torch import Tensor

from streammega.kernels.plan import count_down
from streammega.samples.derived_fields import Allocate, new_memory
from streammega.storage.fetch.buffer_pool import rounded
from streammega.storage.fetch.requests import FetchGroup
from streammega.storage.store import address_of

Integers = NDArray[np.int64]

ENDLESS = 1 << 60
"""Uses of a slot that is never freed: more rows than any run gathers."""
RECEIVED_BYTES = 64 << 20
"""Memory of batches from worker processes that is kept to be used again."""
_of_thread = threading.local()
"""Memory that is used again is taken and given back without a lock: each thread has its own."""


class BufferTable:
    """The number (*slot*) under which kernels find the bytes of each buffer: slots of `files` files,
    numbered as they are, one of address 0, and those of buffers. A slot of a buffer goes one way:

        | state    | by              | when                                                        |
        |----------|-----------------|-------------------------------------------------------------|
        | free     |                 | nothing refers to it                                        |
        | acquired | `acquire`       | the planner numbers a buffer                                |
        | expected | `expect`        | it is known how many rows the buffer serves (`uses`)        |
        | attached | `attach`        | its reads go to the fetcher                                 |
        | filled   | `fill`          | its bytes are there: kernels may follow `addresses`         |
        | free     | `release_rows`  | the last of its rows was gathered                           |
        | free     | `cancel`        | its other rows will not come, and those planned were        |
        |          |                 | gathered                                                    |
        | free     | `return_unused` | it was acquired, and not needed after all                   |

    uses, addresses: int64 [slots]: the rows that each has still to serve, and where its bytes lie.
    Both are replaced by longer arrays when slots run out: do not keep them. Everything here runs in
    the thread that plans and gathers, so there is no lock.
    """

    def __init__(self, files: int) -> None:
        self.zero = files
        """The slot of address 0: rows that refer to it have their address as offset."""
        never_freed = files + 1
        self.uses: Integers = np.full(never_freed, ENDLESS, np.int64)
        self.addresses: Integers = np.zeros(never_freed, np.int64)
        self._attached: dict[int, FetchGroup] = {}  # by slot
        self._free: list[int] = []

    def map_files(self, addresses: list[int]) -> None:
        """The addresses of mapped files, 0 where one is not mapped, by number of the file."""
        self.addresses[: len(addresses)] = addresses

    def acquire(self, count: int) -> Integers:
        """That many free slots."""
        if len(self._free) < count:
            self._grow(count)
        kept = len(self._free) - count
        slots = self._free[kept:]
        del self._free[kept:]
        return np.array(slots, np.int64)

    def _grow(self, count: int) -> None:
        """Add at least `count` slots, and as many as there are: arrays are copied seldom."""
        first = len(self.uses)
        more = max(count, first)
        unused = np.zeros(more, np.int64)
        self.uses = np.concatenate([self.uses, unused])
        self.addresses = np.concatenate([self.addresses, unused])
        # the lowest last, so that it is acquired first
        self._free += range(first + more - 1, first - 1, -1)

    def return_unused(self, slots: Integers) -> None:
        """Free slots, given in the order in which they were acquired."""
        self._free += slots[::-1].tolist()

    def expect(self, slots: Integers, rows: Integers) -> None:
        """Slot slots[i] will serve rows[i] rows."""
        self.uses[slots] = rows

    def attach(self, buffer: FetchGroup) -> None:
        """Keep a buffer whose bytes will come."""
        self._attached[buffer.slot] = buffer

    def fill(self, buffer: FetchGroup) -> None:
        """The bytes of a buffer are there."""
        assert buffer.buffer is not None
        self.addresses[buffer.slot] = address_of(buffer.buffer)

    def release_rows(self, slot_of_row: Integers, tokens_of_row: Integers) -> list[FetchGroup]:
        """These rows were gathered: frees the slots that serve no other, and returns their buffers."""
        freed = np.empty(len(self._attached), np.int64)
        count = count_down(self.uses, slot_of_row, tokens_of_row, freed)
        return self._release(freed[:count].tolist())

    def cancel(self, slots: Integers, rows: Integers) -> list[FetchGroup]:
        """Rows[i] of the rows that slots[i] was to serve will not come: frees the slots that serve no
        other, and returns their buffers.
        """
        self.uses[slots] -= rows
        return self._release(slots[self.uses[slots] == 0].tolist())

    def _release(self, slots: list[int]) -> list[FetchGroup]:
        self._free += slots
        return [self._attached.pop(slot) for slot in slots]

    def clear(self) -> None:
        """Reading has ended: refer to no buffer any more."""
        self._attached.clear()


# Batches


def batch_memory(kept_bytes: int, pinned: bool | None = None) -> Allocate:
    """What makes the tensors of batches in this process. Call it in the thread whose CUDA device is
    meant.

    kept_bytes: of what was given back, for `RecycledMemory`. pinned: None: where CUDA can be used.
    False: nowhere, because batches are copied on the host before they go to a device.

    Torch's pinned memory where CUDA can be used. Arrays that are used again in worker processes,
    which copy what they send, and where there is no accelerator at all. Memory that is new every
    time serves children of processes that use CUDA, and other accelerators, of whose copies nothing
    is known here.
    """
    if pinned is False or torch.utils.data.get_worker_info() is not None:
        # asks nothing of CUDA: a process that only passes batches on opens no context
        return RecycledMemory(kept_bytes).take
    if torch.cuda.is_available() and not torch.cuda._is_in_bad_fork():
        return PinnedMemory().take
    if torch.accelerator.is_available():
        return new_memory
    return RecycledMemory(kept_bytes).take


def recycled_memory() -> Allocate:
    """What makes the tensors of batches that come from worker processes, in this thread.

    With an accelerator ordinary memory that is new every time: torch's DataLoader pins it, or
    makes copies that are not known here.
    """
    known: Allocate | None = getattr(_of_thread, "memory", None)
    if known is None:
        alone = not torch.accelerator.is_available()
        known = RecycledMemory(RECEIVED_BYTES).take if alone else new_memory
        _of_thread.memory = known
    return known


class PinnedMemory:
    """Tensors in blocks of torch's pinned allocator, which uses a block again when no tensor and no
    copy on a device needs it. After the first few none is new.
    """

    def __init__(self) -> None:
        self._device = torch.cuda.current_device()

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor with arbitrary content.

        Only views of it may leave here: an alias, as of numpy, is not known to torch.
        """
        # a thread of its own begins on device 0, and would make a context there
        with torch.cuda.device(self._device):
            return torch.empty(shape, dtype=dtype, pin_memory=True)


class RecycledMemory:
    """Tensors in memory that is used again, warm in cache, as soon as no tensor, view or array
    refers to it. Of unused memory at most `kept_bytes` are kept.

    For processes without an accelerator: there, whatever reads memory refers to it. Without a lock,
    since blocks are given back wherever the last reference goes: of two threads that do so at once,
    both may find room for one.
    """

    def __init__(self, kept_bytes: int) -> None:
        self._kept_bytes = kept_bytes
        self._free: dict[int, list[NDArray[np.uint8]]] = defaultdict(list)
        self._in_use: dict[int, _Use] = {}  # a weak reference that is dropped is not called

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor with arbitrary content."""
        size = math.prod(shape) * dtype.itemsize
        block_size = rounded(size)  # cu_seqlens have any size
        try:
            block = self._free[block_size].pop()
        except IndexError:
            block = np.empty(block_size, np.uint8)
        # the tensor's storage keeps this very object; when it is collected, nothing is left that
        # reads
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
    """An array that is in use, and the block that it lies in."""

    __slots__ = ("block",)
    block: NDArray[np.uint8]
