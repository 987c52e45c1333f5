"""Copies of a run's state on the host, so that training goes on while they are written.

torch's DefaultStager cannot be used: its copies do not wait for the stream that computes the values,
and it pins each tensor by itself.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from streammega.errors.logs import get_logger
from streammega.gradients.buffers import local_part

log = get_logger(__name__)

ALIGNMENT = 64
"""Bytes. A view as another dtype needs a multiple of its element at least."""
PORTABLE = 1
"""A flag of cudaHostRegister: pinned for all contexts of the process."""


class HostStaging:
    """One copy of the state at a time, in a buffer that is kept from save to save.

    Values on a GPU are copied on a side stream into pinned memory, and the host does not wait. The
    next change of the values waits on the device for the copies (`before_change`).
    """

    def __init__(self, device: torch.device) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._stream: Any = None
        self._copied: Any = None
        """An event of the side stream, after the copies."""
        self._is_change_ordered = True
        """Whether the stream that changes the values waits for the copies already."""
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def stage(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies of this rank's parts of the values. Call `wait` before you read them.

        The copies of the last call must have been written: these take their memory.
        """
        values = {name: local_part(tensor) for name, tensor in state.items()}
        copies = self._places(values)
        if self._stream is None:
            for name, copy in copies.items():
                copy.copy_(values[name])
            return copies
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            for name, copy in copies.items():
                copy.copy_(values[name], non_blocking=True)
            self._copied.record(self._stream)
        self._is_change_ordered = False
        return copies

    def before_change(self) -> None:
        """Call it before the values change. The device changes them after it has copied them."""
        if not self._is_change_ordered:
            torch.cuda.current_stream(self._stream.device).wait_event(self._copied)
            self._is_change_ordered = True

    def wait(self) -> None:
        """Wait for the copies. Any thread may call it."""
        if self._stream is not None:
            # A new thread starts on the first device, and CUDA would make a context there.
            torch.cuda.set_device(self._stream.device)
            self._copied.synchronize()

    def _places(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Memory for each value in the buffer. A buffer of another size is replaced."""
        aligned_bytes = [
            math.ceil(value.nbytes / ALIGNMENT) * ALIGNMENT for value in values.values()
        ]
        total_bytes = sum(aligned_bytes)
        if self._buffer.nbytes != total_bytes:
            # Free the old one first: there may be no room for both.
            self._buffer = torch.empty(0, dtype=torch.uint8)
            self._buffer = torch.empty(total_bytes, dtype=torch.uint8)
            if self._stream is not None:
                _pin(self._buffer)
        pieces = torch.split(self._buffer, aligned_bytes)
        return {
            name: piece[: value.nbytes].view(value.dtype).view(value.shape)
            for (name, value), piece in zip(values.items(), pieces, strict=True)
        }


def _pin(buffer: Tensor) -> None:
    """Pin memory. torch's allocator of pinned memory would round its size up to a power of two."""
    cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address = buffer.data_ptr()
    error = int(cudart.cudaHostRegister(address, buffer.nbytes, PORTABLE)) if buffer.nbytes else 0
    if error:
        log.warning(
            "%.1f GiB of the host's memory cannot be pinned (CUDA error %d): "
            "saves make training wait for their copies",
            buffer.nbytes / 2**30,
            error,
        )
    elif buffer.nbytes:
        # Not at exit: CUDA may have ended by then, and the system frees the memory anyway.
        weakref.finalize(buffer, cudart.cudaHostUnregister, address).atexit = False
