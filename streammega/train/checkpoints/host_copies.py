"""Copies of a checkpoint's values on the host, so that training goes on while they are written.

From a GPU they are made on a side stream into one pinned buffer, which is kept from save to save:
the host waits for nothing, and the device copies while it computes. Whatever changes the values
next waits for the copies, on the device (`before_change`).
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from streammega.gradients.boxes import Boxes

log = logging.getLogger(__name__)

ALIGNED = 64
"""Bytes: where each value begins in the buffer."""
Layout = tuple[tuple[str, int, torch.Size, torch.dtype], ...]


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


class HostCopies:
    """Made by `take`, one set at a time: the former one must have been written.

    Args:
        device: whose tensors are copied asynchronously; None: torch.cuda.
    """

    def __init__(self, device: Device | None = None) -> None:
        self._device: Device = device or _Cuda()
        self._layout: Layout = ()
        self._buffer: Tensor | None = None
        self._stream: Any = None
        self._event: Any = None
        self._unordered = False

    def take(self, state: Mapping[str, Boxes], *, background: bool) -> dict[str, Boxes]:
        """The values on the host.

        What lies there already is copied for the background only; `wait` before they are used.
        """
        there = {
            name: boxes
            for name, boxes in state.items()
            if any(self._device.holds(box) for _, box in boxes.boxes)
        }
        copies = {
            name: boxes.copied() if background else boxes
            for name, boxes in state.items()
            if name not in there
        }
        if not there:
            return copies
        places = self._places(there)
        if self._stream is None:
            self._stream = self._device.stream()
        # the values are those that were computed until now
        self._stream.wait_stream(self._device.current())
        with self._device.using(self._stream):
            for name, boxes in there.items():
                held = []
                for (offsets, box), place in zip(boxes.boxes, places[name], strict=True):
                    place.copy_(box.detach(), non_blocking=True)
                    held.append((offsets, place))
                copies[name] = Boxes(boxes.shape, held)
            self._event = self._device.event()
            self._event.record(self._stream)
        self._unordered = True
        return {name: copies[name] for name in state}

    def before_change(self) -> None:
        """Call it before the values change: the device then changes them after they were copied."""
        if self._unordered:
            self._device.current().wait_event(self._event)
            self._unordered = False

    def wait(self) -> None:
        """Until the copies are there."""
        if self._event is not None:
            self._event.synchronize()

    def _places(self, state: Mapping[str, Boxes]) -> dict[str, list[Tensor]]:
        """Memory for each box, in the kept buffer.

        That is made anew where the layout is another one than before.
        """
        boxes = [
            (name, n, box.shape, box.dtype)
            for name, own in state.items()
            for n, (_, box) in enumerate(own.boxes)
        ]
        sizes = [shape.numel() * dtype.itemsize for _, _, shape, dtype in boxes]
        if self._buffer is None or self._layout != tuple(boxes):
            self._buffer = None  # before the next one is made: there may be no room for both
            self._buffer = self._device.buffer(sum(_aligned(size) for size in sizes))
            self._layout = tuple(boxes)
        places: dict[str, list[Tensor]] = {}
        start = 0
        for (name, _, shape, dtype), size in zip(boxes, sizes, strict=True):
            places.setdefault(name, []).append(
                self._buffer[start : start + size].view(dtype).view(shape)
            )
            start += _aligned(size)
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
        # 1: pinned for all contexts of the process.
        error = int(cudart.cudaHostRegister(buffer.data_ptr(), size, 1))
        if error:
            log.warning(
                "%.1f GiB of the host's memory cannot be pinned (CUDA error %d): saves make training wait for their copies",
                size / 2**30, error,
            )  # fmt: skip
            return buffer
        storage = buffer.untyped_storage()
        weakref.finalize(storage, _unpin, cudart, buffer.data_ptr()).atexit = False
        buffer.pinned = storage  # type: ignore[attr-defined]  # kept by the tensor: else it would be let go at once
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


def _unpin(cudart: Any, address: int) -> None:
    cudart.cudaHostUnregister(address)


def _aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED
