"""One micro-batch, from the rank that reads it to the fields of every rank.

reading rank ─► ids, valid ─► one message to its tensor-parallel group ─► fields on every rank ─►
its parts, its stage's fields
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from streammega.config import DataConfig
from streammega.errors import ConfigError
from streammega.loading import StreamLoader
from streammega.order.sharding import zigzag_bounds
from streammega.parallel.derive import DocumentCounts, documents_of, rank_fields, torch_dtype
from streammega.parallel.groups import Ranks, talks_on_cpu
from streammega.samples.derived_fields import check_ids
from streammega.samples.fields import Batch
from streammega.samples.loss_masks import Seams, as_asked

VALID_BYTES = 4
"""Of an int32. torch views bytes as int32 only where they begin on a multiple of it."""


@dataclass(frozen=True, kw_only=True)
class MessageFormat:
    """Where the values of a micro-batch lie in its message: the same on all ranks of a group."""

    rows: int
    width: int
    """Ids of a row."""
    ids_dtype: torch.dtype
    has_learned: bool

    @cached_property
    def ids_stop(self) -> int:
        """Bytes of the ids."""
        return self.rows * self.width * self.ids_dtype.itemsize

    @cached_property
    def valid_start(self) -> int:
        """The first multiple of VALID_BYTES after the ids: of 16 bits, their number may be odd."""
        return -(-self.ids_stop // VALID_BYTES) * VALID_BYTES

    @cached_property
    def learned_start(self) -> int:
        """Where the counts end."""
        return self.valid_start + VALID_BYTES * self.rows

    @cached_property
    def size(self) -> int:
        """Bytes of the message."""
        learned_bytes = self.rows * self.width if self.has_learned else 0
        return self.learned_start + learned_bytes

    def pack(self, message: Tensor, ids: Tensor, valid: Tensor, learned: Tensor | None) -> None:
        """Write ids [rows, width], valid [rows] and, where the data has it, learned [rows, width]
        into a message, uint8 [size].
        """
        self._ids(message).copy_(ids)
        self._valid(message).copy_(valid)
        if self.has_learned:
            assert learned is not None
            self._learned(message).copy_(learned)

    def unpack(self, message: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """(ids, valid as int64, learned) of a message; ids and learned are views of it."""
        valid = self._valid(message).to(torch.int64)
        learned = self._learned(message) if self.has_learned else None
        return self._ids(message), valid, learned

    def _ids(self, message: Tensor) -> Tensor:
        return message[: self.ids_stop].view(self.ids_dtype).view(self.rows, self.width)

    def _valid(self, message: Tensor) -> Tensor:
        return message[self.valid_start : self.learned_start].view(torch.int32)

    def _learned(self, message: Tensor) -> Tensor:
        return message[self.learned_start :].view(torch.bool).view(self.rows, self.width)


FIRST = ("tokens", "position_ids")
"""Fields of the first pipeline stage."""
LAST = ("labels", "loss_mask")
"""Fields of the last pipeline stage."""
BOTH = ("cu_seqlens", "cu_seqlens_whole", "attention_mask")
"""Fields of the first and of the last stage, where the config asks for them."""
MIDDLE = ("position_ids", *BOTH)
"""Fields of stages between them, where they are asked for."""


class RankBatch(dict[str, Tensor]):
    """The fields of a micro-batch, by name.

    longest: tokens of its longest document, where the host knows it without asking the device; else
    None.
    """

    longest: int | None = None


@dataclass(frozen=True, kw_only=True)
class BatchForm:
    """What micro-batches of samples of one length are like: phases may change it."""

    config: DataConfig
    """With this length."""
    bounds: Sequence[tuple[int, int]]
    """Tokens [start, stop) of each sample that this rank keeps."""
    message: MessageFormat


@dataclass(frozen=True, kw_only=True)
class StartedBatch:
    """A micro-batch under way.

    On the CPU that is its message, or in a group of one its fields; on CUDA its fields, and the
    event after which they are there. A stage that needs no field has neither.
    """

    consumed: int
    """The cursor after it."""
    form: BatchForm
    seams: Seams | None = None
    """Of its samples, as the config asks for them."""
    message: Tensor | None = None
    work: dist.Work | None = None
    """The broadcast of the message; None: nobody else is in the group."""
    batch: RankBatch | None = None
    event: Any = None


class Exchange:
    """Reads or receives micro-batches of one loader, and derives their fields."""

    def __init__(
        self, loader: StreamLoader, ranks: Ranks, device: torch.device, every_stage: bool
    ) -> None:
        if not loader.ids_only:
            raise ConfigError(
                "get_batch sends ids in their stored width: make the loader with ids_only=True, "
                "or by open_loader"
            )
        if loader.device is not None:
            raise ConfigError(
                "get_batch brings ids to the device itself, and reads them on the host before: "
                "leave out prefetch_to"
            )
        config = loader.dataset.config
        self._loader = loader
        self._ranks = ranks
        self._device = device
        self._reads_parts = bool(loader.bounds)
        self._forms: dict[int, BatchForm] = {}
        self._fields = stage_fields(ranks, every_stage)
        self._group = ranks.group("tp")
        self._source = ranks.members("tp")[0]
        self._reads = bool(self._fields) and ranks.at["tp"] == 0
        # now, since a loader of another rank's parts is refused here
        self._form_of(loader.dataset.sequence_length_at(loader.consumed_samples))
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = side_stream(device)
        # The shape of cu_seqlens depends on the ids. A host that is not told how many documents
        # there are would have to wait for the device to count them.
        self._tells_documents = (
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

    def start(self) -> StartedBatch:
        """Take the next micro-batch and send it on its way. Raises StopIteration after the last."""
        raw: Batch | None = None
        if self._reads:
            raw = self._loader.take()
        else:
            self._loader.pass_over()
        dataset = self._loader.dataset
        consumed = dataset.consumed_samples
        # of its own samples: those after it may be of the next phase
        position = consumed - dataset.step_samples
        started = StartedBatch(
            consumed=consumed, form=self._form_of(dataset.sequence_length_at(position))
        )
        if not self._fields:
            return started
        # every rank knows the order, so no message has to tell it
        if dataset.config.seams != "joined":
            started = replace(started, seams=as_asked(dataset.seams(position), dataset.config))
        if self._stream is None and self._group is None:
            assert raw is not None
            batch = self._derive(started, raw["ids"], raw["valid"], raw.get("learned"))
            return replace(started, batch=batch)
        documents = self._tell_documents(started, raw) if self._tells_documents else None
        if self._stream is not None:
            return self._start_on_device(started, raw, documents)
        message = self._message(started.form, raw)
        return replace(started, message=message, work=self._broadcast(message))

    def finish(self, started: StartedBatch) -> RankBatch:
        """The fields of a micro-batch, ready for use."""
        if started.event is not None:
            assert started.batch is not None
            current = torch.cuda.current_stream(self._device)
            current.wait_event(started.event)
            for field in started.batch.values():
                # The allocator knows the side stream only, on which the memory was asked for: it
                # would give the memory away there while this stream still reads.
                field.record_stream(current)
        if started.batch is not None:
            return started.batch
        if started.message is None:
            return RankBatch()
        if started.work is not None:
            started.work.wait()
        return self._derive(started, *started.form.message.unpack(started.message))

    def _form_of(self, length: int) -> BatchForm:
        """That of samples of so many tokens, made once."""
        form = self._forms.get(length)
        if form is None:
            form = self._make_form(length)
            self._forms[length] = form
        return form

    def _make_form(self, length: int) -> BatchForm:
        """Rows are samples with the token after them, or parts of samples, each with its next."""
        bounds = _kept_bounds(self._loader, self._ranks, length)
        rows = self._loader.dataset.micro_batch_size
        row_length = length
        if self._reads_parts:
            start, stop = bounds[0]  # parts are of one length
            rows *= len(bounds)
            row_length = stop - start
        message = MessageFormat(
            rows=rows,
            width=row_length + 1,
            ids_dtype=torch_dtype(self._loader.ids_dtype),
            has_learned=self._loader.has_modes,
        )
        config = self._loader.dataset.config
        if length != config.sequence_length:
            config = replace(config, sequence_length=length)
        return BatchForm(config=config, bounds=bounds, message=message)

    def _tell_documents(self, started: StartedBatch, raw: Batch | None) -> DocumentCounts:
        """Counted where the ids are, and told to the other ranks by the host's transport: no host
        waits for a device.
        """
        if raw is None:
            numbers = torch.zeros(len(DocumentCounts._fields), dtype=torch.int64)
        else:
            form = started.form
            counts = documents_of(raw["ids"], raw["valid"], form.config, form.bounds, started.seams)
            numbers = torch.tensor(counts)
        if self._group is not None:
            dist.broadcast(numbers, self._source, group=self._group)
        return DocumentCounts(*numbers.tolist())

    def _start_on_device(
        self, started: StartedBatch, raw: Batch | None, documents: DocumentCounts | None
    ) -> StartedBatch:
        """Copy, broadcast and derive on the side stream.

        The message has memory of this stream too: what the computing stream's host code has let go
        may still be read by what that stream has to do.
        """
        with torch.cuda.stream(self._stream):
            message = self._message(started.form, raw).to(self._device, non_blocking=True)
            work = self._broadcast(message)
            if work is not None:
                work.wait()  # of NCCL: the stream waits, not this thread
            batch = self._derive(started, *started.form.message.unpack(message), documents)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        return replace(started, batch=batch, event=event)

    def _message(self, form: BatchForm, raw: Batch | None) -> Tensor:
        """A micro-batch as bytes; without one, room for it."""
        size = form.message.size
        on_device = self._stream is not None
        if raw is None and on_device:
            # the broadcast fills it: nothing to copy there
            return torch.empty(size, dtype=torch.uint8, device=self._device)
        # only from pinned memory is the copy to the device asynchronous
        message = torch.empty(size, dtype=torch.uint8, pin_memory=on_device)
        if raw is None:
            return message
        if on_device:
            # Fields made on a device are not checked there, since the host would wait for that.
            check_ids(raw["ids"].numpy(), form.config)
        form.message.pack(message, raw["ids"], raw["valid"], raw.get("learned"))
        return message

    def _broadcast(self, message: Tensor) -> dist.Work | None:
        if self._group is None:
            return None
        self.broadcast_bytes += message.numel()
        work: dist.Work = dist.broadcast(message, self._source, group=self._group, async_op=True)
        return work

    def _derive(
        self,
        started: StartedBatch,
        ids: Tensor,
        valid: Tensor,
        learned: Tensor | None,
        documents: DocumentCounts | None = None,
    ) -> RankBatch:
        """The fields of this rank's stage, of the tokens that it keeps."""
        fields = rank_fields(
            ids,
            valid,
            started.form.config,
            started.form.bounds,
            parts=self._reads_parts,
            documents=documents,
            learned=learned,
            seams=started.seams,
        )
        batch = RankBatch()
        for name, field in fields.items():
            if name in self._fields:
                batch[name] = field
        if documents is not None:
            batch.longest = documents.longest
        return batch


@functools.cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """On which the next micro-batch is made while this one is computed: one for a device, since the
    allocator keeps what was freed on a stream for that stream.
    """
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _kept_bounds(loader: StreamLoader, ranks: Ranks, length: int) -> Sequence[tuple[int, int]]:
    """Tokens [start, stop) of the parts of a sample of so many tokens that a rank keeps.

    Raises ConfigError where the loader reads the parts of another rank.
    """
    kept = zigzag_bounds(length, ranks.at["cp"], ranks.layout.cp)
    # with each part a loader reads the token after it, the label of the last
    read = [(start, stop - 1) for start, stop in loader.bounds_of(length)]
    if read and read != kept:
        raise ConfigError(
            f"the loader reads tokens {list(loader.bounds_of(length))}, this rank keeps {kept}: "
            f"use open_loader"
        )
    return kept


def rank_device(device: torch.device | str | None, ranks: Ranks) -> torch.device:
    """The device that is meant: where nothing says so, one on which the ranks can talk."""
    if device is None and not talks_on_cpu(ranks.group("tp")):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(device or "cpu")


def stage_fields(ranks: Ranks, every_stage: bool) -> tuple[str, ...]:
    """The fields that this rank's pipeline stage needs; none in the middle, unless every stage is
    asked for its positions.
    """
    fields: list[str] = []
    if ranks.is_first_stage:
        fields += [*FIRST, *BOTH]
    if ranks.is_last_stage:
        fields += [*LAST, *BOTH]
    if every_stage:
        fields += MIDDLE
    # each once: a stage may be the first and the last
    return tuple(dict.fromkeys(fields))
