"""Copies of a checkpoint's values on the host, so that training goes on while they are written.

From a GPU they are made on a side stream into one pinned buffer, which is kept from save to save:
the host waits for nothing, and the device copies while it computes. Whatever changes the values
next waits for the copies, on the device (`before_change`).
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from streammega.train.checkpoints.state import Chunk

log = logging.getLogger(__name__)

ALIGNED = 64
"""Bytes: each value begins at a multiple of them in the buffer, as torch's own memory does; a view
as another dtype needs a multiple of its element at least.
"""


@dataclass(frozen=True)
class _ChunkInBuffer:
    """One chunk of a state, as it lies in the buffer."""

    name: str
    shape: torch.Size
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


PORTABLE = 1
"""Of cudaHostRegister: pinned for all contexts of the process."""


class Device(Protocol):
    """What is needed of torch.cuda."""

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor lies on such a device."""

    def buffer(self, size: int) -> Tensor:
        """Pinned memory of the host, uint8 [size]."""

    def stream(self) -> Any:
        """A new stream, for copies."""

    def current(self) -> Any:
        """The stream that computes."""

    def using(self, stream: Any) -> Any:
        """A context in which copies are made on a stream."""

    def event(self) -> Any:
        """Something that can be waited for, by streams and by the host."""

    def choose(self, stream: Any) -> None:
        """Let this thread use the device of a stream."""


class HostCopies:
    """Made by `take`, one set at a time: the former one must have been written.

    Args:
        device: whose tensors are copied asynchronously; None: torch.cuda.
    """

    def __init__(self, device: Device | None = None) -> None:
        self._device: Device = device or _Cuda()
        self._layout: list[_ChunkInBuffer] = []
        self._buffer: Tensor | None = None
        self._stream: Any = None
        self._event: Any = None
        self._unordered = False
        """Whether a change of the values would not wait for the copies yet."""

    def take(self, state: Mapping[str, Chunk], *, background: bool) -> dict[str, Chunk]:
        """The values on the host.

        What lies there already is copied for the background only; `wait` before they are used.
        """
        on_device: dict[str, Chunk] = {}
        copies: dict[str, Chunk] = {}
        for name, chunk in state.items():
            if self._device.holds(chunk.values):
                on_device[name] = chunk
            elif background:
                copies[name] = replace(chunk, values=chunk.values.clone())
            else:
                copies[name] = chunk
        if not on_device:
            return copies
        copies |= self._copy_from_device(on_device)
        # In the order of the state, which is that of the items in the file.
        return {name: copies[name] for name in state}

    def _copy_from_device(self, state: Mapping[str, Chunk]) -> dict[str, Chunk]:
        """Begin the copies; `wait` says when they are there."""
        places = self._places(state)
        if self._stream is None:
            self._stream = self._device.stream()
        # The values are those that were computed until now.
        self._stream.wait_stream(self._device.current())
        copies: dict[str, Chunk] = {}
        with self._device.using(self._stream):
            for name, chunk in state.items():
                place = places[name]
                place.copy_(chunk.values, non_blocking=True)
                copies[name] = replace(chunk, values=place)
            self._event = self._device.event()
            self._event.record(self._stream)
        self._unordered = True
        return copies

    def before_change(self) -> None:
        """Call it before the values change: the device then changes them after they were copied."""
        if self._unordered:
            self._device.current().wait_event(self._event)
            self._unordered = False

    def wait(self) -> None:
        """Until the copies are there. A thread of its own may wait for them."""
        if self._event is not None:
            # A new thread has the first device, on which CUDA would make a context for it.
            self._device.choose(self._stream)
            self._event.synchronize()

    def _places(self, state: Mapping[str, Chunk]) -> dict[str, Tensor]:
        """Memory for each chunk, in the kept buffer.

        That is made anew where the layout is another one than before.
        """
        layout = _layout_of(state)
        if self._buffer is None or self._layout != layout:
            # Let go before the next one is made: there may be no room for both.
            self._buffer = None
            total_bytes = sum(_aligned(item.num_bytes) for item in layout)
            self._buffer = self._device.buffer(total_bytes)
            self._layout = layout
        places: dict[str, Tensor] = {}
        start_byte = 0
        for item in layout:
            stop_byte = start_byte + item.num_bytes
            place = self._buffer[start_byte:stop_byte].view(item.dtype).view(item.shape)
            places[item.name] = place
            start_byte += _aligned(item.num_bytes)
        return places


class _Cuda:
    """torch.cuda, on the current device."""

    def holds(self, tensor: Tensor) -> bool:
        """Whether it is on a GPU."""
        return tensor.is_cuda

    def buffer(self, size: int) -> Tensor:
        """Pinned as it is: torch's own allocator would round it up to a power of two, and this is
        as large as the state.
        """
        buffer = torch.empty(size, dtype=torch.uint8)
        cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        if size == 0:
            return buffer
        address = buffer.data_ptr()
        error = int(cudart.cudaHostRegister(address, size, PORTABLE))
        if error:
            log.warning(
                "%.1f GiB of the host's memory cannot be pinned (CUDA error %d): "
                "saves make training wait for their copies",
                size / 2**30,
                error,
            )
            return buffer
        storage = buffer.untyped_storage()
        # Not at exit: CUDA may be gone by then, and the system lets go of the memory anyway.
        weakref.finalize(storage, _unpin, cudart, address).atexit = False
        # Kept by the tensor: else it would be let go at once, and the memory unpinned.
        buffer.pinned = storage  # type: ignore[attr-defined]
        return buffer

    def stream(self) -> Any:
        """On the current device."""
        return torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def current(self) -> Any:
        """Of the current device."""
        return torch.cuda.current_stream()

    def using(self, stream: Any) -> Any:
        """torch.cuda.stream."""
        return torch.cuda.stream(stream)

    def event(self) -> Any:
        """Without timing, which would cost."""
        return torch.cuda.Event()  # type: ignore[no-untyped-call]

    def choose(self, stream: Any) -> None:
        """Not by a context: its end would go back to the first device."""
        torch.cuda.set_device(stream.device)


def _unpin(cudart: Any, address: int) -> None:
    cudart.cudaHostUnregister(address)


def _layout_of(state: Mapping[str, Chunk]) -> list[_ChunkInBuffer]:
    """All chunks of a state, in its order."""
    return [
        _ChunkInBuffer(name, chunk.values.shape, chunk.values.dtype)
        for name, chunk in state.items()
    ]


def _aligned(num_bytes: int) -> int:
    return math.ceil(num_bytes / ALIGNED) * ALIGNED
