"""Micro-batches for every rank of a layout: read once, sent once as ids in their stored width,
derived where they are used (`broadcast.py`), and prepared ahead of the caller.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from streammega.config import DataConfig
from streammega.errors import ConfigError, StateError, StreammegaError
from streammega.loading import StreamLoader
from streammega.order.sharding import zigzag_bounds
from streammega.parallel.broadcast import BatchBroadcast, PendingBatch, rank_device
from streammega.parallel.groups import WORLD, Ranks
from streammega.parallel.layout import ParallelLayout
from streammega.parallel.opening import open_together
from streammega.samples.field_inputs import Batch


def open_loader(config: DataConfig, ranks: Ranks, **options: Any) -> StreamLoader:
    """Open the StreamLoader of a rank for its data-parallel share.

    It reads only the parts of each sample that the rank keeps; all ids if a field needs whole samples.

    `options` are those of StreamLoader (split, micro_batch_size, global_batch_size, rampup_batch_size, ...).
    Open one on every rank, since all ranks move the same cursor. Only ranks that read fetch tokens. This
    is a collective: the first rank asks what remote datasets are (see `open_together`).
    """
    if not hasattr(ranks, "layout"):
        raise ConfigError(
            f"open_loader: ranks is {ranks!r}; give Ranks(layout), or for one process and plain data "
            "parallelism use StreamLoader with dp_rank and dp_size"
        )
    layout = ranks.layout
    dp_rank = ranks.at["dp"]
    cp_rank = ranks.at["cp"]
    # every rank raises the error for a length that cannot be cut
    for segment in config.segments(options.get("split", "train")):
        zigzag_bounds(segment.sequence_length, cp_rank, layout.cp)
    if layout.cp > 1:
        options |= {"cp_rank": cp_rank, "cp_size": layout.cp}
    # ids are copied into a message on the host, and only the message is pinned
    options.setdefault("pin_memory", False)

    group = ranks.group(WORLD)
    if group is not None:
        config = open_together(config, group, split=options.get("split", "train"))
    if not ranks.is_last_stage:  # what only the last one uses is not read by others
        columns = config.column_settings.items()
        both = {name: column for name, column in columns if column.stage == "both"}
        config = replace(config, columns=both)
    return StreamLoader(config, dp_rank=dp_rank, dp_size=layout.dp, ids_only=True, **options)


def get_batch(
    loader: StreamLoader,
    ranks: Ranks,
    device: torch.device | str | None = None,
    *,
    every_stage: bool = False,
) -> Batch:
    """Take the next micro-batch of this rank: the fields that its pipeline stage needs, for the tokens
    that it keeps.

    Collective over the tensor-parallel group, whose rank 0 reads and sends the ids as one message.
    First stage: tokens, position_ids; last stage: labels, loss_mask, and dataset_id if `fields` has
    it; both also what the config adds (cu_seqlens, attention_mask); middle stages: nothing, or with
    `every_stage` position_ids and what the config adds. Those of Megatron are there in
    every order. Stored columns are there on the last stage, or on all that have fields. Shapes as in
    StreamingDataset, [micro_batch_size, kept].

    Context-parallel rank r keeps parts r and 2 * cp - 1 - r of each sample, with their "cu_seqlens";
    "cu_seqlens_whole" is that of the sample.

    Args:
        loader: with ids_only, made on every rank (see `open_loader`). Its cursor moves on every
            rank: save its state on any.
        ranks: this rank's place and groups.
        device: the device of the fields; None: the CPU, or the current CUDA device if the group can
            only communicate there.
        every_stage: also fields for the stages in the middle.

    Raises StopIteration after the last micro-batch, on every rank.
    """
    broadcast = BatchBroadcast(loader, ranks, rank_device(device, ranks), every_stage)
    return broadcast.finish(broadcast.start())


def read_factor(layout: ParallelLayout, config: DataConfig, *, every_stage: bool = False) -> int:
    """How often all ranks together read each token.

    Each stage that needs it reads it. If fields need whole samples, each cp rank reads it too.
    """
    reading_stages = layout.pp if every_stage else min(layout.pp, 2)
    reading_cp_ranks = layout.cp if config.needs_whole_samples else 1
    return reading_stages * reading_cp_ranks


class RankBatches:
    """Iterates the micro-batches of `get_batch`, and prepares each while the one before it is used.

    On CUDA a side stream copies the next micro-batch and makes its fields while the device computes.
    `next` waits for the micro-batch that it returns, never for a later one. It starts later ones if
    their bytes have been read already. Ranks that share messages cannot decide that alone: they start
    a micro-batch in its own `next`, or all of them in `prepare`. The state counts micro-batches that
    were handed out.

    `next` goes on from the cursor and raises StopIteration after the last micro-batch. `iter` then
    begins the next pass. With a loader for evaluation `iter` begins at the first sample, by the rule
    of StreamLoader. An error is raised when its micro-batch is due, and the following `next` tries
    again. If the loader itself is moved, `next` raises StateError.

    Args:
        loader, ranks, device, every_stage: as in get_batch.
        ahead: most micro-batches to prepare ahead of the caller.
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
        """Micro-batches that were started and not handed out, the next one first."""
        self._exhausted = False
        """Whether the loader has no more micro-batches in this pass."""
        self._failed: StreammegaError | None = None
        """The error of a micro-batch that was started ahead, until it is due."""
        # weak references, so that batches of unused handles are freed
        self._handles: weakref.WeakSet[_Handle] = weakref.WeakSet()
        self._last_seek: int
        """The sample to which the loader was last moved."""
        self._consumed: int
        """Samples handed out. The loader is ahead of it by the pending micro-batches."""
        self._generation: int
        """The dataset's generation when the loader was last moved here; another one is an error."""
        self._record_position()

    def __iter__(self) -> Iterator[Batch]:
        ended = self._exhausted and not self._pending
        evaluated = self.loader.evaluation and self._consumed != self._last_seek
        if ended or evaluated:
            self._move(lambda: self.loader.seek(0), "another pass began")
        return self

    def __next__(self) -> Batch:
        if self.loader.dataset.generation != self._generation:
            raise StateError(
                "the loader of these RankBatches was moved directly; use load_state_dict of "
                "RankBatches, or make new RankBatches"
            )
        # Pending micro-batches are those before the one that failed.
        if self._failed is not None and not self._pending:
            error = self._failed
            self._failed = None
            raise error
        self._start(1)
        if not self._pending:
            raise StopIteration
        pending = self._pending[0]
        batch = self._broadcast.finish(pending)
        self._pending.popleft()
        self._consumed = pending.consumed
        self._start_ready()
        return batch

    def prepare(self) -> None:
        """Start the next micro-batches, and wait for their bytes if necessary.

        It is for ranks that share messages (tensor-parallel ranks). Call it on all of them at the same
        place of their programs, where they wait anyway: for instance before reading a norm back from
        the device. An error is raised by the `next` whose micro-batch failed.
        """
        if self._broadcast.is_shared and self._ahead and self._failed is None:
            self._start_ahead(self._ahead)

    def handles(self, count: int) -> list[Iterator[Batch]]:
        """Make iterators that each yield every micro-batch, on one cursor: one for each virtual
        pipeline stage of this rank.

        A micro-batch counts as handed out when the first iterator takes it, and is kept until the
        last has taken it. After `load_state_dict`, `close` or the start of another pass, older
        iterators raise StateError, because they keep micro-batches of another position.
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
    def num_micro_batches(self) -> int:
        """As of StreamLoader, for what was handed out."""
        last = self._consumed - (self._consumed != self._last_seek)
        return self.loader.dataset.steps.num_micro_batches(last)

    @property
    def is_step_end(self) -> bool:
        """As of StreamLoader, for what was handed out."""
        return self.loader.dataset.steps.is_step_end(self._consumed)

    @property
    def broadcast_bytes(self) -> int:
        """Bytes of the messages so far, as their sender counts them."""
        return self._broadcast.broadcast_bytes

    def state_dict(self) -> dict[str, Any]:
        """The resumable state, the same on every rank: see StreamingDataset.state_dict."""
        return self.loader.dataset.state_at(self._consumed)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the last micro-batch that was handed out, on any layout.

        Raises StateError for a state of another order, and then changes nothing.
        """
        self._move(lambda: self.loader.load_state_dict(state), "load_state_dict moved them")

    def close(self) -> None:
        """End reading ahead. Micro-batches that were prepared and not handed out are read again later."""
        self._move(lambda: self.loader.seek(self._consumed), "they were closed")

    def _move(self, move: Callable[[], None], reason: str) -> None:
        """Move the loader. If that raises no error, drop the pending micro-batches."""
        move()
        for pending in self._pending:
            # every rank has started its message, so this rank has to receive it
            with suppress(StreammegaError):
                self._broadcast.finish(pending)
        self._pending.clear()
        self._exhausted = False
        self._failed = None
        for handle in self._handles:
            handle.stop(reason)
        self._handles.clear()
        self._record_position()

    def _record_position(self) -> None:
        """Begin to count at the loader's cursor."""
        self._last_seek = self.loader.consumed_samples
        self._consumed = self._last_seek
        self._generation = self.loader.dataset.generation

    def _start_ready(self) -> None:
        """Start later micro-batches, as long as this needs no waiting."""
        while len(self._pending) < self._ahead:
            if self._exhausted or self._failed is not None or not self._broadcast.is_ready:
                return
            self._start_ahead(len(self._pending) + 1)

    def _start_ahead(self, count: int) -> None:
        """Start micro-batches ahead of the caller. Keep an error until its micro-batch is due."""
        try:
            self._start(count)
        except StreammegaError as error:
            self._failed = error

    def _start(self, count: int) -> None:
        """Start micro-batches until `count` are pending, or the data ends."""
        while len(self._pending) < count and not self._exhausted:
            try:
                self._pending.append(self._broadcast.start())
            except StopIteration:
                self._exhausted = True


class _Handle(Iterator[Batch]):
    """One of several iterators over the same micro-batches.

    queue: micro-batches that another handle took and this one did not yet. queues: the queues of all
    handles, including this one.
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
                f"the batches of this handle are gone: {self._reason}; make new handles by handles()"
            )
        if not self._queue:
            batch = next(self._batches)
            for queue in self._queues:
                queue.append(batch)
        return self._queue.popleft()

    def stop(self, reason: str) -> None:
        """Drop the kept micro-batches. `next` then raises StateError with the reason."""
        self._reason = reason
        self._queue.clear()
