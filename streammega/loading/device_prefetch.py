"""Batches on a device: while it computes with one, the next is copied there on a stream of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from streammega.samples.fields import Batch


@dataclass(frozen=True)
class CopiedBatch:
    """A batch whose copy to the device was asked for, and the event after it; None: it is there."""

    batch: Batch
    event: torch.cuda.Event | None = None


class Copier:
    """Puts batches on a device. On CUDA it copies on a stream of its own, which the caller's stream waits
    for when it is given the batch; elsewhere, where nothing is known of streams, it waits for each copy.

    Pinned memory of the host needs no keeping: torch's allocator holds a block until the copies from
    it are done. Of memory that is not pinned the copy is made before `to` returns.
    """

    def __init__(self, device: torch.device) -> None:
        """In the thread that will take the batches."""
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._device = self._stream.device  # with its number, which "cuda" has not

    def start(self, batch: Batch) -> CopiedBatch:
        """Ask for the copy of a batch, which may be dropped right after."""
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
        """The batch, for what the caller now asks of its current stream."""
        if copied.event is not None:
            wait_on_stream(copied.batch, copied.event, self._device)
        return copied.batch


def wait_on_stream(
    batch: Mapping[str, Tensor], event: torch.cuda.Event, device: torch.device
) -> None:
    """Have the current stream of a device, not this thread, wait for a batch that another stream made."""
    current = torch.cuda.current_stream(device)
    current.wait_event(event)
    for field in batch.values():
        # The allocator knows the other stream only, on which the memory was asked for: it would give
        # the memory away there while this stream still reads.
        field.record_stream(current)


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
        """As `_start`, for a batch that was not asked for yet: its error is kept until then."""
        try:
            self._start()
        except Exception as error:  # StopIteration too
            self._ended = error
