"""The memory that batches lie in, and who owns it.

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

from streammega.samples.derived_fields import Allocate, new_memory
from streammega.storage.fetch.buffer_pool import rounded

_of_thread = threading.local()
"""Memory that is used again is taken and given back without a lock: each thread has its own."""
KEPT = 12
"""Arrays of one size that wait to be used again: tokens and labels of the slabs that are ready
(`lookahead.READY_SLABS`), of one that is gathered and of one that is handed out. A caller that
catches up lets go of all of them, and with fewer kept the next ones would be new: huge pages, which
the kernel clears.
"""


def batch_memory(pinned: bool | None = None) -> Allocate:
    """What makes the tensors of batches in this process. Call it in the thread whose CUDA device is
    meant.

    pinned: None: where CUDA can be used. False: nowhere, since batches are copied on the host
    before any device is told of them.

    Torch's pinned memory where CUDA can be used. Arrays that are used again in worker processes,
    which copy what they send, and where there is no accelerator at all. Memory that is new every
    time serves children of processes that use CUDA, and other accelerators, of whose copies nothing
    is known here.
    """
    if pinned is False or torch.utils.data.get_worker_info() is not None:
        # asks nothing of CUDA: a process that only passes batches on opens no context
        return ReusedMemory().take
    if torch.cuda.is_available() and not torch.cuda._is_in_bad_fork():
        return PinnedMemory().take
    if torch.accelerator.is_available():
        return new_memory
    return ReusedMemory().take


def received_memory() -> Allocate:
    """What makes the tensors of batches that come from worker processes, in this thread.

    With an accelerator ordinary memory that is new every time: torch's DataLoader pins it, or
    copies are made of which nothing is known here.
    """
    known: Allocate | None = getattr(_of_thread, "memory", None)
    if known is None:
        alone = not torch.accelerator.is_available()
        known = ReusedMemory().take if alone else new_memory
        _of_thread.memory = known
    return known


class PinnedMemory:
    """Tensors in blocks of torch's pinned allocator, which uses a block again when no tensor and no
    copy on a device needs it.

    Blocks are powers of two, which slabs nearly fill (see `reading_plan.SLAB_BYTES`), and after the
    first few none is new.
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


class ReusedMemory:
    """Tensors in memory that is used again, warm in cache, as soon as no tensor, view or array
    refers to it.

    For processes without an accelerator: there, whatever reads memory refers to it.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[NDArray[np.uint8]]] = defaultdict(list)

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor with arbitrary content."""
        size = math.prod(shape) * dtype.itemsize
        block_size = rounded(size)  # cu_seqlens have any size: of each there would be some to keep
        free = self._free[block_size]
        block = free.pop() if free else np.empty(block_size, np.uint8)
        # the tensor's storage keeps this very object; when it is collected, nothing is left that
        # reads
        array = block[:size]
        given_back = weakref.finalize(array, _give_back, free, block)
        given_back.atexit = False  # the process ends: nobody takes it again
        return torch.from_numpy(array).view(dtype).view(shape)


def _give_back(free: list[NDArray[np.uint8]], block: NDArray[np.uint8]) -> None:
    if len(free) < KEPT:
        free.append(block)
