"""Copies batches to a device on a separate stream while the device computes with the batch before."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from streammega.samples.fields import Batch


@dataclass(frozen=True)
class CopiedBatch:
    """A batch whose copy to the device was started. event: after the copy; None: the copy is done."""

    batch: Batch
    event: torch.cuda.Event | None = None


class Copier:
    """Copies batches to a device.

    On CUDA it copies on its own stream, and `finish` makes the caller's stream wait for the copy. On
    other devices it waits for each copy.

    The caller may drop a host batch at once: torch's allocator keeps pinned memory until the copies
    from it are done. From memory that is not pinned, `to` returns only after the copy.
    """

    def __init__(self, device: torch.device) -> None:
        """Make it in the thread that takes the batches."""
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._device = self._stream.device  # has the device number, which "cuda" lacks

    def start(self, batch: Batch) -> CopiedBatch:
        """Start to copy a batch. The caller may drop the batch right after."""
        if self._stream is None:
            return CopiedBatch({name: field.to(self._device) for name, field in batch.items()})
        with torch.cuda.stream(self._stream):
            on_device = {
                name: field.to(self._device, non_blocking=True) for name, field in batch.items()
            }
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        return CopiedBatch(on_device, event)

    def finish(self, copied: CopiedBatch) -> Batch:
        """Return the batch, ready for work that the caller queues on its current stream."""
        if copied.event is not None:
            wait_on_stream(copied.batch, copied.event, self._device)
        return copied.batch


def wait_on_stream(
    batch: Mapping[str, Tensor], event: torch.cuda.Event, device: torch.device
) -> None:
    """Make the device's current stream wait for a batch of another stream. This thread does not wait."""
    current = torch.cuda.current_stream(device)
    current.wait_event(event)
    for field in batch.values():
        # The allocator only knows the stream that allocated the memory. Without this it would reuse
        # the memory there while the current stream still reads.
        field.record_stream(current)


class DeviceBatches(Iterator[tuple[int, Batch]]):
    """Iterates (consumed, batch) with each batch on a device.

    Before it returns a batch it starts the copy of the next one, if `is_ready` says that the next one
    needs no waiting. The end of the iterator or its error is raised after the batches before it.

    Args:
        batches: the batches to copy, in this order.
        is_ready: whether the next batch, its error, or the end is there.
        copier: copies them to the device.
    """

    def __init__(
        self,
        batches: Iterator[tuple[int, Batch]],
        is_ready: Callable[[], bool],
        copier: Copier,
    ) -> None:
        self._batches = batches
        self._is_ready = is_ready
        self._copier = copier
        self._under_way: deque[tuple[int, CopiedBatch]] = deque()
        self._ended: Exception | None = None

    def __next__(self) -> tuple[int, Batch]:
        if not self._under_way:
            ended, self._ended = self._ended, None
            if ended is not None:
                try:
                    raise ended
                finally:
                    del ended  # else its traceback and this frame would refer to each other
            self._start()
        consumed, copied = self._under_way.popleft()
        batch = self._copier.finish(copied)
        del copied  # this frame must not keep the batch while the caller computes
        # one copy ahead is enough: if copies take longer than a step, more of them would not help
        if self._ended is None and self._is_ready():
            self._start_ahead()
        return consumed, batch

    def _start(self) -> None:
        consumed, batch = next(self._batches)
        self._under_way.append((consumed, self._copier.start(batch)))

    def _start_ahead(self) -> None:
        """Start the next copy ahead of the caller. Keep its error until that batch is due."""
        try:
            self._start()
        except Exception as error:  # StopIteration too
            self._ended = error
