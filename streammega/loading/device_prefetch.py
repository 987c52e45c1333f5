"""Batches on a device: while it computes with one, the next is copied there on a stream of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from streammega.samples.fields import Batch


@dataclass(frozen=True)
class CopiedBatch:
    """A batch whose copy to the device was asked for, and the event after it; None: it is there."""

    batch: Batch
    event: torch.cuda.Event | None = None


class Copier(Protocol):
    """Puts batches on one device."""

    def start(self, batch: Batch) -> CopiedBatch:
        """Ask for the copy of a batch, which may be dropped right after."""

    def finish(self, copied: CopiedBatch) -> Batch:
        """The batch, for what the caller now asks of its current stream."""


class BlockingCopier:
    """For the CPU, where batches stay what they are, and for devices of whose streams nothing is
    known here.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def start(self, batch: Batch) -> CopiedBatch:
        """Copy and wait."""
        return CopiedBatch({name: field.to(self._device) for name, field in batch.items()})

    def finish(self, copied: CopiedBatch) -> Batch:
        """What was copied."""
        return copied.batch


class CudaCopier:
    """Copies on a side stream, which the caller's stream waits for when it is given the batch.

    The host's memory needs no keeping: torch's pinned allocator holds a block until the copies from
    it are done, and of memory that is not pinned the copy is made before `to` returns.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._device = self._stream.device  # with its number, which "cuda" has not

    def start(self, batch: Batch) -> CopiedBatch:
        """Queue the copies, without waiting for what the device computes."""
        with torch.cuda.stream(self._stream):
            on_device = {
                name: field.to(self._device, non_blocking=True) for name, field in batch.items()
            }
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        return CopiedBatch(on_device, event)

    def finish(self, copied: CopiedBatch) -> Batch:
        """The batch, after which the current stream of the device has to wait: not this thread."""
        current = torch.cuda.current_stream(self._device)
        assert copied.event is not None
        current.wait_event(copied.event)
        for field in copied.batch.values():
            # The allocator knows the side stream only, on which the memory was asked for: it would
            # give the memory away there while this stream still reads.
            field.record_stream(current)
        return copied.batch


def copier_to(device: torch.device) -> Copier:
    """What copies to a device. Call it in the thread that will take the batches."""
    if device.type == "cuda":
        return CudaCopier(device)
    return BlockingCopier(device)


class DeviceBatches(Iterator[tuple[int, Batch]]):
    """(consumed, batch) of an iterator, each batch on a device, the next one under way already.

    The next one is begun before a batch is handed out, if `is_ready` says that it need not be
    waited for. What ends the iterator, its end or an error, is raised where it is due.

    Args:
        batches: what is copied, in this order.
        is_ready: whether the next of them, their end, or an error is there.
        copier: to where.
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
        del copied  # not referred to here while the caller computes
        # one is enough: its copy takes less than a step, or the copies are what limits the run
        if self._ended is None and self._is_ready():
            self._start_ahead()
        return consumed, batch

    def _start(self) -> None:
        consumed, batch = next(self._batches)
        self._under_way.append((consumed, self._copier.start(batch)))

    def _start_ahead(self) -> None:
        """As `_start`, for a batch that nobody asked for yet: what it fails of is kept for then."""
        try:
            self._start()
        except Exception as error:  # StopIteration too
            self._ended = error
