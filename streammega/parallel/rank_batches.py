"""Micro-batches for every rank of a layout: read once, sent once as ids in their stored width,
derived where they are used (`broadcast.py`), and prepared ahead of the caller.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from streammega.config import DataConfig
from streammega.errors import StateError, StreammegaError
from streammega.loading import StreamLoader
from streammega.order.sharding import zigzag_bounds
from streammega.parallel.broadcast import BatchBroadcast, PendingBatch, rank_device
from streammega.parallel.fields import needs_whole_samples
from streammega.parallel.groups import Ranks
from streammega.parallel.layout import ParallelLayout
from streammega.samples.fields import Batch


def open_loader(config: DataConfig, ranks: Ranks, **options: Any) -> StreamLoader:
    """The StreamLoader of a rank: its data-parallel share, and of each sample only the parts it
    keeps, if no field needs more.

    `options` are those of StreamLoader (split, micro_batch_size, global_batch_size, rampup_batch_size, ...).
    Every rank opens one, since the cursor is the same everywhere; only ranks that read will fetch
    tokens.
    """
    layout = ranks.layout
    dp_rank = ranks.at["dp"]
    cp_rank = ranks.at["cp"]
    # a length that cannot be cut is named on every rank
    for segment in config.segments(options.get("split", "train")):
        zigzag_bounds(segment.sequence_length, cp_rank, layout.cp)
    if layout.cp > 1 and not needs_whole_samples(config):
        options |= {"cp_rank": cp_rank, "cp_size": layout.cp}
    # ids are copied into a message on the host, which is pinned where that serves
    options.setdefault("pin_memory", False)
    return StreamLoader(config, dp_rank=dp_rank, dp_size=layout.dp, ids_only=True, **options)


def get_batch(
    loader: StreamLoader,
    ranks: Ranks,
    device: torch.device | str | None = None,
    *,
    every_stage: bool = False,
) -> Batch:
    """The next micro-batch of this rank: the fields that its pipeline stage needs, of the tokens
    that it keeps.

    Collective over the tensor-parallel group, whose rank 0 reads and sends the ids as one message.
    First stage: tokens, position_ids; last stage: labels, loss_mask; both also what the config adds
    (cu_seqlens, attention_mask); middle stages: nothing, or with `every_stage` position_ids and
    what the config adds. Shapes as in StreamingDataset, [micro_batch_size, kept].

    Args:
        loader: with ids_only, made on every rank (see `open_loader`). Its cursor moves on every
            rank: save its state on any.
        ranks: this rank's place and groups.
        device: where the fields are wanted; None: the CPU, or the current CUDA device where the
            group can only talk there.
        every_stage: also fields for the stages in the middle.

    Raises StopIteration after the last micro-batch, on every rank.
    """
    broadcast = BatchBroadcast(loader, ranks, rank_device(device, ranks), every_stage)
    return broadcast.finish(broadcast.start())


def read_factor(layout: ParallelLayout, config: DataConfig, *, every_stage: bool = False) -> int:
    """How often each token is read, over all ranks: by each stage that needs it, and by each cp
    rank where whole samples are.
    """
    reading_stages = layout.pp if every_stage else min(layout.pp, 2)
    reading_cp_ranks = layout.cp if needs_whole_samples(config) else 1
    return reading_stages * reading_cp_ranks


class RankBatches:
    """Iterates the micro-batches that `get_batch` would give, each prepared while the one before is
    used.

    On CUDA the next micro-batch's copy to the device and its fields are made on a side stream,
    while the device computes. `next` waits for the micro-batch that it returns, never for a later
    one. It begins with the next ones if they are there already; ranks that share messages cannot
    each decide that, and begin where they are asked, or all of them in `prepare`. The state counts
    what was handed out.

    `next` goes on from the cursor and raises StopIteration after the last micro-batch. `iter` then
    begins the next pass, and with a loader for evaluation it always begins at the first sample, by
    the rule of StreamLoader. An error of storage is raised where its micro-batch is due; `next`
    then tries it again. After moving the loader itself: StateError.

    Args:
        loader, ranks, device, every_stage: as in get_batch.
        ahead: micro-batches prepared ahead of the caller, at most.
    """

    def __init__(
        self,
        loader: StreamLoader,
        ranks: Ranks,
        device: torch.device | str | None = None,
        *,
        every_stage: bool = False,
        ahead: int = 1,
    ) -> None:
        self.loader = loader
        self.ranks = ranks
        self._broadcast = BatchBroadcast(loader, ranks, rank_device(device, ranks), every_stage)
        self._ahead = ahead
        self._pending: deque[PendingBatch] = deque()
        """Micro-batches under way, the next one first."""
        self._exhausted = False
        """Whether the loader has no more in this pass."""
        self._failed: StreammegaError | None = None
        """What a micro-batch failed of that was begun ahead, until it is due."""
        # weak: batches of handles that are gone must not be kept
        self._handles: weakref.WeakSet[_Handle] = weakref.WeakSet()
        self._placed: int
        """Where the loader was put last, in samples."""
        self._consumed: int
        """Samples handed out: the loader is ahead of it by what is under way."""
        self._generation: int
        """Of the dataset's cursor, to notice when it was moved elsewhere."""
        self._record_position()

    def __iter__(self) -> Iterator[Batch]:
        ended = self._exhausted and not self._pending
        evaluated = self.loader.evaluation and self._consumed != self._placed
        if ended or evaluated:
            self._move(lambda: self.loader.seek(0), "another pass began")
        return self

    def __next__(self) -> Batch:
        if self.loader.dataset.generation != self._generation:
            raise StateError(
                "the loader was moved under its RankBatches; use load_state_dict of RankBatches, "
                "or make another"
            )
        error = self._failed
        self._failed = None
        if error is not None:
            raise error
        self._start(1)
        if not self._pending:
            raise StopIteration
        pending = self._pending.popleft()
        batch = self._broadcast.finish(pending)
        self._consumed = pending.consumed
        self._start_ready()
        return batch

    def prepare(self) -> None:
        """Begin with the micro-batches after those handed out, also if that takes waiting for them.

        For ranks whose messages are shared (tensor-parallel ones), where they would wait anyway,
        for instance before reading a norm back from the device: all of them, at the same place of
        their programs. What fails is raised by the `next` that is due.
        """
        if self._broadcast.is_shared and self._ahead and self._failed is None:
            self._start_ahead(self._ahead)

    def handles(self, count: int) -> list[Iterator[Batch]]:
        """Iterators that each give every micro-batch: one for each virtual pipeline stage of this
        rank, on one cursor.

        A micro-batch counts as handed out when the first of them takes it; it is kept until the
        last has. Handles made before `load_state_dict`, `close` or another pass raise StateError:
        what they kept is of another place.
        """
        queues: list[deque[Batch]] = [deque() for _ in range(count)]
        handles = [_Handle(self, queue, queues) for queue in queues]
        self._handles.update(handles)
        return list(handles)

    @property
    def consumed_samples(self) -> int:
        """Samples handed out so far, over all ranks."""
        return self._consumed

    @property
    def broadcast_bytes(self) -> int:
        """Bytes of the messages so far, as their sender counts them."""
        return self._broadcast.broadcast_bytes

    def state_dict(self) -> dict[str, Any]:
        """The resumable state, the same on every rank: see StreamingDataset.state_dict."""
        return self.loader.dataset.state_at(self._consumed)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the last micro-batch that was handed out, on any layout.

        A state that is refused changes nothing.
        """
        self._move(lambda: self.loader.load_state_dict(state), "load_state_dict moved them")

    def close(self) -> None:
        """End reading ahead. What was prepared and not handed out will be read again."""
        self._move(lambda: self.loader.seek(self._consumed), "they were closed")

    def _move(self, move: Callable[[], None], reason: str) -> None:
        """Move the loader; if that is not refused, forget what was prepared."""
        move()
        for pending in self._pending:
            # its message is under way on every rank, and must be received on this one too
            self._broadcast.finish(pending)
        self._pending.clear()
        self._exhausted = False
        self._failed = None
        for handle in self._handles:
            handle.stop(reason)
        self._handles.clear()
        self._record_position()

    def _record_position(self) -> None:
        """Begin to count where the loader was put."""
        self._placed = self.loader.consumed_samples
        self._consumed = self._placed
        self._generation = self.loader.dataset.generation

    def _start_ready(self) -> None:
        """Begin with later micro-batches, as long as none has to be waited for."""
        while len(self._pending) < self._ahead:
            if self._exhausted or self._failed is not None or not self._broadcast.is_ready:
                return
            self._start_ahead(len(self._pending) + 1)

    def _start_ahead(self, count: int) -> None:
        """As `_start`, for micro-batches that were not asked for yet: an error is kept until one
        is due.
        """
        try:
            self._start(count)
        except StreammegaError as error:
            self._failed = error

    def _start(self, count: int) -> None:
        """Begin with micro-batches until `count` are under way, or the stream ends."""
        while len(self._pending) < count and not self._exhausted:
            try:
                self._pending.append(self._broadcast.start())
            except StopIteration:
                self._exhausted = True


class _Handle(Iterator[Batch]):
    """One of several iterators over the same micro-batches.

    queue: what others took and this one did not yet; it is among `queues`, those of all of them.
    """

    def __init__(
        self, batches: RankBatches, queue: deque[Batch], queues: Sequence[deque[Batch]]
    ) -> None:
        self._batches = batches
        self._queue = queue
        self._queues = queues
        self._reason: str | None = None

    def __next__(self) -> Batch:
        if self._reason is not None:
            raise StateError(
                f"this handle is of batches that are gone: {self._reason}; make others by handles()"
            )
        if not self._queue:
            batch = next(self._batches)
            for queue in self._queues:
                queue.append(batch)
        return self._queue.popleft()

    def stop(self, reason: str) -> None:
        """Forget what was kept; `next` then raises the reason."""
        self._reason = reason
        self._queue.clear()
