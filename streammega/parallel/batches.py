"""Micro-batches for every rank of a layout: read once, sent once as ids in their stored width,
derived where they are used.

reading rank ─► ids, valid ─► one message to its tensor-parallel group ─► fields on every rank ─►
its parts, its stage's fields
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from streammega.config import DataConfig
from streammega.errors import ConfigError, StateError, StreammegaError
from streammega.loading import StreamLoader
from streammega.order.rank_samples import zigzag_bounds
from streammega.parallel.derive import (
    DocumentCounts,
    documents_of,
    needs_whole_samples,
    rank_fields,
    torch_dtype,
)
from streammega.parallel.groups import Ranks
from streammega.parallel.layout import ParallelLayout
from streammega.samples.fields import Batch, check_ids

FIRST = ("tokens", "position_ids")
LAST = ("labels", "loss_mask")
BOTH = ("cu_seqlens", "cu_seqlens_whole", "attention_mask")
MIDDLE = ("position_ids", *BOTH)


class RankBatch(dict[str, Tensor]):
    """The fields of a micro-batch, by name.

    longest: tokens of its longest document, where the host knows it without asking the device; else
    None.
    """

    longest: int | None = None


def open_loader(config: DataConfig, ranks: Ranks, **options: Any) -> StreamLoader:
    """The StreamLoader of a rank: its data-parallel share, and of each sample only the parts it
    keeps, if no field needs more.

    `options` are those of StreamLoader (split, micro_batch_size, global_batch_size, rampup, ...).
    Every rank opens one, since the cursor is the same everywhere; only ranks that read will fetch
    tokens.
    """
    layout = ranks.layout
    at = ranks.at
    # a length that cannot be cut is named on every rank
    zigzag_bounds(config.sequence_length, at["cp"], layout.cp)
    if layout.cp > 1 and not needs_whole_samples(config):
        options |= {"cp_rank": at["cp"], "cp_size": layout.cp}
    # ids are copied into a message on the host, which is pinned where that serves
    options.setdefault("pin_memory", False)
    return StreamLoader(config, dp_rank=at["dp"], dp_size=layout.dp, ids_only=True, **options)


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

    Args: loader: with ids_only, made on every rank (see `open_loader`). Its cursor moves on every
        rank: save its state on any. ranks: this rank's place and groups. device: where the fields
        are wanted; None: the CPU, or the current CUDA device where the group can only talk there.

    Raises StopIteration after the last micro-batch, on every rank.
    """
    exchange = _Exchange(loader, ranks, rank_device(device, ranks), every_stage)
    return exchange.finish(exchange.start())


def read_factor(layout: ParallelLayout, config: DataConfig, *, every_stage: bool = False) -> int:
    """How often each token is read, over all ranks: by each stage that needs it, and by each cp
    rank where whole samples are.
    """
    stages = layout.pp if every_stage else min(layout.pp, 2)
    return stages * (layout.cp if needs_whole_samples(config) else 1)


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
        self._exchange = _Exchange(loader, ranks, rank_device(device, ranks), every_stage)
        self._ahead, self._started = ahead, deque[_Started]()
        self._exhausted = False
        self._failed: StreammegaError | None = None
        self._handles: weakref.WeakSet[_Handle] = weakref.WeakSet()
        self._generation = self._placed = self._consumed = 0
        self._settle()

    def __iter__(self) -> Iterator[Batch]:
        ended = self._exhausted and not self._started
        if ended or (self.loader.evaluation and self._consumed != self._placed):
            self._move(lambda: self.loader.seek(0), "another pass began")
        return self

    def __next__(self) -> Batch:
        if self.loader.dataset.generation != self._generation:
            raise StateError(
                "the loader was moved under its RankBatches; use load_state_dict of RankBatches, or make another"
            )
        error = self._failed
        self._failed = None
        if error is not None:
            raise error
        self._start(1)
        if not self._started:
            raise StopIteration
        started = self._started.popleft()
        batch = self._exchange.finish(started)
        self._consumed = started.consumed
        while (
            len(self._started) < self._ahead
            and not self._exhausted
            and self._failed is None
            and self._exchange.ready
        ):
            self._start_later(len(self._started) + 1)
        return batch

    def prepare(self) -> None:
        """Begin with the micro-batches after those handed out, also if that takes waiting for them.

        For ranks whose messages are shared (tensor-parallel ones), where they would wait anyway,
        for instance before reading a norm back from the device: all of them, at the same place of
        their programs. What fails is raised by the `next` that is due.
        """
        if self._exchange.shared and self._ahead and self._failed is None:
            self._start_later(self._ahead)

    def handles(self, count: int) -> list[Iterator[Batch]]:
        """Iterators that each give every micro-batch: one for each virtual pipeline stage of this
        rank, on one cursor.

        A micro-batch counts as handed out when the first of them takes it; it is kept until the
        last has. Handles made before `load_state_dict`, `close` or another pass raise StateError:
        what they kept is of another place.
        """
        queues: list[deque[Batch]] = [deque() for _ in range(count)]
        made = [_Handle(self, queue, queues) for queue in queues]
        self._handles.update(made)
        return list(made)

    @property
    def consumed_samples(self) -> int:
        """Samples handed out so far, over all ranks."""
        return self._consumed

    @property
    def broadcast_bytes(self) -> int:
        """Bytes of the messages so far, as their sender counts them."""
        return self._exchange.broadcast_bytes

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
        for started in self._started:
            self._exchange.finish(started)  # its message is under way on every rank
        self._started.clear()
        self._exhausted = False
        self._failed = None
        for handle in self._handles:
            handle.stop(reason)
        self._handles.clear()
        self._settle()

    def _settle(self) -> None:
        """Note where the loader was put."""
        self._consumed = self._placed = self.loader.consumed_samples
        self._generation = self.loader.dataset.generation

    def _start_later(self, count: int) -> None:
        try:
            self._start(count)
        except StreammegaError as error:
            self._failed = error  # of a micro-batch that nobody has asked for yet

    def _start(self, count: int) -> None:
        while len(self._started) < count and not self._exhausted:
            try:
                self._started.append(self._exchange.start())
            except StopIteration:
                self._exhausted = True


class _Handle(Iterator[Batch]):
    """One of several iterators over the same micro-batches: what others took and this one did not
    is kept in `own`.
    """

    def __init__(
        self, batches: RankBatches, own: deque[Batch], queues: Sequence[deque[Batch]]
    ) -> None:
        self._batches = batches
        self._own = own
        self._queues = queues
        self._reason: str | None = None

    def __next__(self) -> Batch:
        if self._reason is not None:
            raise StateError(
                f"this handle is of batches that are gone: {self._reason}; make others by handles()"
            )
        if not self._own:
            batch = next(self._batches)
            for queue in self._queues:
                queue.append(batch)
        return self._own.popleft()

    def stop(self, reason: str) -> None:
        """Forget what was kept."""
        self._reason = reason
        self._own.clear()


@dataclass(frozen=True, kw_only=True)
class _Started:
    """A micro-batch under way: its message, or on CUDA its fields and when they are there.

    `consumed`: the cursor after it.
    """

    consumed: int
    message: Tensor | None = None
    work: dist.Work | None = None
    batch: RankBatch | None = None
    event: Any = None


class _Exchange:
    """Reads or receives micro-batches of one loader, and derives their fields."""

    def __init__(
        self, loader: StreamLoader, ranks: Ranks, device: torch.device, every_stage: bool
    ) -> None:
        if not loader.ids_only:
            raise ConfigError(
                "get_batch sends ids in their stored width: make the loader with ids_only=True, or by open_loader"
            )
        config = loader.dataset.config
        layout = ranks.layout
        whole = zigzag_bounds(config.sequence_length, ranks.at["cp"], layout.cp)
        self._loader = loader
        self._config = config
        self._device = device
        self._parts = bool(loader.bounds)
        self._bounds: Sequence[tuple[int, int]] = (
            [(a, b - 1) for a, b in loader.bounds] if self._parts else whole
        )
        if list(self._bounds) != whole:
            raise ConfigError(
                f"the loader reads tokens {list(loader.bounds)}, this rank keeps {whole}: use open_loader"
            )
        self._fields = stage_fields(ranks, every_stage)
        self._group, self._source = ranks.group("tp"), ranks.members("tp")[0]
        self._reads = bool(self._fields) and ranks.at["tp"] == 0
        rows = loader.dataset.micro_batch_size * (len(self._bounds) if self._parts else 1)
        width = (
            self._bounds[0][1] + 1 - self._bounds[0][0]
            if self._parts
            else config.sequence_length + 1
        )
        self._shape, self._dtype = (rows, width), torch_dtype(loader.ids_dtype)
        self._ids_bytes = rows * width * self._dtype.itemsize
        self._valid_at = -(-self._ids_bytes // 4) * 4
        self._learned_at = self._valid_at + 4 * rows
        self._learned_bytes = rows * width if loader.has_modes else 0
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._told = (
            device.type != "cpu" and config.reset_attention_mask and talks_on_cpu(self._group)
        )
        self.broadcast_bytes = 0

    @property
    def shared(self) -> bool:
        """Whether messages go to other ranks: all of them begin with a micro-batch at the same
        place of their programs.
        """
        return self._group is not None and bool(self._fields)

    @property
    def ready(self) -> bool:
        """Whether `start` would not wait, and no other rank has to know."""
        return not self.shared and (not self._reads or self._loader.ready)

    def start(self) -> _Started:
        """Take the next micro-batch and send it on its way. Raises StopIteration after the last."""
        if not self._reads:
            self._loader.pass_over()
            raw = None
        else:
            raw = self._loader.take()
        consumed = self._loader.consumed_samples
        if not self._fields:
            return _Started(consumed=consumed)
        if self._stream is None and self._group is None:
            assert raw is not None
            return _Started(
                consumed=consumed, batch=self._derive(raw["ids"], raw["valid"], raw.get("learned"))
            )
        documents = self._documents(raw) if self._told else None
        message = self._message(raw)
        if self._stream is not None:
            return self._start_on_device(consumed, message, documents)
        return _Started(consumed=consumed, message=message, work=self._broadcast(message))

    def finish(self, started: _Started) -> RankBatch:
        """The fields of a micro-batch, ready for use."""
        if started.event is not None:
            assert started.batch is not None
            current = torch.cuda.current_stream(self._device)
            current.wait_event(started.event)
            for field in started.batch.values():
                field.record_stream(current)
        if started.batch is not None or started.message is None:
            return RankBatch() if started.batch is None else started.batch
        if started.work is not None:
            started.work.wait()
        return self._derive(*self._unpack(started.message))

    def _documents(self, raw: Batch | None) -> DocumentCounts:
        """Counted where the ids are, and told to the other ranks by the host's transport: no host
        waits for a device.
        """
        numbers = torch.zeros(len(DocumentCounts._fields), dtype=torch.int64)
        if raw is not None:
            numbers = torch.tensor(
                documents_of(raw["ids"], raw["valid"], self._config, self._bounds)
            )
        if self._group is not None:
            dist.broadcast(numbers, self._source, group=self._group)
        return DocumentCounts(*numbers.tolist())

    def _start_on_device(
        self, consumed: int, message: Tensor, documents: DocumentCounts | None
    ) -> _Started:
        """Copy, broadcast and derive on the side stream."""
        with torch.cuda.stream(self._stream):
            message = message.to(self._device, non_blocking=True)
            work = self._broadcast(message)
            if work is not None:
                work.wait()  # of NCCL: the stream waits, not this thread
            batch = self._derive(*self._unpack(message), documents)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        return _Started(consumed=consumed, batch=batch, event=event)

    def _message(self, raw: Batch | None) -> Tensor:
        """Ids, as int32 how many each row has, and which are learned if that is asked: bytes.

        Without a batch, room for one.
        """
        size = self._learned_at + self._learned_bytes
        if raw is None and self._stream is not None:
            # the broadcast fills it: nothing to copy there
            return torch.empty(size, dtype=torch.uint8, device=self._device)
        message = torch.empty(size, dtype=torch.uint8, pin_memory=self._stream is not None)
        if raw is not None:
            if self._stream is not None:
                check_ids(raw["ids"].numpy(), self._config)
            message[: self._ids_bytes].view(self._dtype).view(self._shape).copy_(raw["ids"])
            message[self._valid_at : self._learned_at].view(torch.int32).copy_(raw["valid"])
            if self._learned_bytes:
                message[self._learned_at :].view(torch.bool).view(self._shape).copy_(raw["learned"])
        return message

    def _broadcast(self, message: Tensor) -> dist.Work | None:
        if self._group is None:
            return None
        self.broadcast_bytes += message.numel()
        work: dist.Work = dist.broadcast(message, self._source, group=self._group, async_op=True)
        return work

    def _unpack(self, message: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        ids = message[: self._ids_bytes].view(self._dtype).view(self._shape)
        learned = (
            message[self._learned_at :].view(torch.bool).view(self._shape)
            if self._learned_bytes
            else None
        )
        return (
            ids,
            message[self._valid_at : self._learned_at].view(torch.int32).to(torch.int64),
            learned,
        )

    def _derive(
        self,
        ids: Tensor,
        valid: Tensor,
        learned: Tensor | None,
        documents: DocumentCounts | None = None,
    ) -> RankBatch:
        fields = rank_fields(
            ids,
            valid,
            self._config,
            self._bounds,
            parts=self._parts,
            documents=documents,
            learned=learned,
        )
        batch = RankBatch({name: field for name, field in fields.items() if name in self._fields})
        batch.longest = None if documents is None else documents.longest
        return batch


def talks_on_cpu(group: dist.ProcessGroup | None) -> bool:
    """Whether tensors of the CPU can be sent in a group: not with NCCL alone.

    True where there is nobody to send to.
    """
    if group is None:
        return True
    try:
        group._get_backend(torch.device("cpu"))
    except RuntimeError:
        return False
    return True


def rank_device(device: torch.device | str | None, ranks: Ranks) -> torch.device:
    """The device that is meant: where nothing says so, one on which the ranks can talk."""
    if device is None and not talks_on_cpu(ranks.group("tp")):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(device or "cpu")


def stage_fields(ranks: Ranks, every_stage: bool) -> tuple[str, ...]:
    """The fields that this rank's pipeline stage needs; none in the middle, unless every stage is
    asked for its positions.
    """
    fields = ((*FIRST, *BOTH) if ranks.is_first_stage else ()) + (
        (*LAST, *BOTH) if ranks.is_last_stage else ()
    )
    return tuple(dict.fromkeys(fields + (MIDDLE if every_stage else ())))
