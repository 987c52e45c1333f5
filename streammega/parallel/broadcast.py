"""One micro-batch, from the rank that reads it to the fields of every rank.

reading rank ─► ids, valid ─► one message to its tensor-parallel group ─► fields on every rank ─►
its parts, its stage's fields
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from streammega.config import DataConfig
from streammega.errors import ConfigError, StreammegaError
from streammega.errors.cached_property import cached_property
from streammega.loading import StreamLoader
from streammega.loading.device_prefetch import wait_on_stream
from streammega.order.sharding import zigzag_bounds
from streammega.parallel.fields import Bounds, DocumentCounts, documents_of, rank_fields
from streammega.parallel.groups import Ranks, has_cpu_backend
from streammega.samples.derived_fields import check_ids, check_mask_is_there, torch_dtype
from streammega.samples.fields import Batch

VALID_BYTES = 4
"""Bytes of an int32. torch views bytes as int32 only if they begin on a multiple of it."""

FIRST_STAGE = ("tokens", "position_ids")
"""Fields of the first pipeline stage."""
LAST_STAGE = ("labels", "loss_mask")
"""Fields of the last pipeline stage."""
BOTH_ENDS = ("cu_seqlens", "cu_seqlens_whole", "attention_mask")
"""Fields of the first and of the last stage, where the config asks for them."""
MIDDLE_STAGES = ("position_ids", *BOTH_ENDS)
"""Fields of the stages between them, with `every_stage`."""


class RankBatch(dict[str, Tensor]):
    """The fields of a micro-batch, by name.

    longest: tokens of its longest document; None if only the device knows it.
    """

    longest: int | None = None


@dataclass(frozen=True, kw_only=True)
class BatchSpec:
    """The shapes of micro-batches of one sequence length, and how their messages are laid out: the same on
    all ranks of a tensor-parallel group. Phases may change the length.
    """

    config: DataConfig
    """The config with this sequence length."""
    bounds: Bounds
    """Tokens [start, stop) of each part of a sample that this rank keeps."""
    rows: int
    width: int
    """Ids of a row."""
    ids_dtype: torch.dtype
    has_modes: bool
    """Whether a message contains which tokens have a loss."""

    @cached_property
    def ids_stop(self) -> int:
        """Bytes of the ids."""
        return self.rows * self.width * self.ids_dtype.itemsize

    @cached_property
    def valid_start(self) -> int:
        """The first multiple of VALID_BYTES after the ids: the number of 16-bit ids may be odd."""
        return -(-self.ids_stop // VALID_BYTES) * VALID_BYTES

    @cached_property
    def learned_start(self) -> int:
        """The byte after the counts."""
        return self.valid_start + VALID_BYTES * self.rows

    @cached_property
    def message_size(self) -> int:
        """Bytes of a message."""
        return self.learned_start + (self.rows * self.width if self.has_modes else 0)

    def unpack(self, message: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """(ids [rows, width], valid int32 [rows], learned [rows, width] or None): views of a message,
        uint8 [message_size].
        """
        ids = message[: self.ids_stop].view(self.ids_dtype).view(self.rows, self.width)
        valid = message[self.valid_start : self.learned_start].view(torch.int32)
        if not self.has_modes:
            return ids, valid, None
        learned = message[self.learned_start :].view(torch.bool).view(self.rows, self.width)
        return ids, valid, learned

    def pack(self, raw: Batch, message: Tensor) -> None:
        """Write a micro-batch of the loader into a message."""
        ids, valid, learned = self.unpack(message)
        ids.copy_(raw["ids"])
        valid.copy_(raw["valid"])
        if learned is not None:
            learned.copy_(raw["learned"])


@dataclass
class PendingBatch:
    """A micro-batch that is being sent or copied.

    On the CPU it has a message, or in a group of one rank the fields. On CUDA it has the fields and
    the event after which they are ready. On a stage that needs no field it has none of them.
    """

    position: int
    """The cursor before this micro-batch."""
    consumed: int
    """The cursor after it."""
    spec: BatchSpec
    message: Tensor | None = None
    work: dist.Work | None = None
    """The broadcast of the message; None: the group has no other rank."""
    may_pad: bool = True
    """False on the rank that has read the ids and found no padding."""
    batch: RankBatch | None = None
    event: Any = None
    error: StreammegaError | None = None
    """Why its fields cannot be made."""


class BatchBroadcast:
    """Reads or receives micro-batches of one loader, and derives their fields."""

    def __init__(
        self, loader: StreamLoader, ranks: Ranks, device: torch.device, every_stage: bool
    ) -> None:
        if not loader.ids_only:
            raise ConfigError(
                "get_batch sends ids in their stored width: make the loader with ids_only=True, "
                "or with open_loader"
            )
        if loader.device is not None:
            raise ConfigError(
                "get_batch reads ids on the host and copies them to the device itself: "
                "leave out prefetch_to"
            )
        dataset = loader.dataset
        if (dataset.dp_rank, dataset.dp_size) != (ranks.at["dp"], ranks.layout.dp):
            raise ConfigError(
                f"the loader reads for dp_rank {dataset.dp_rank} of {dataset.dp_size}, and this rank is "
                f"{ranks.at['dp']} of {ranks.layout.dp}: use open_loader"
            )
        config = dataset.config
        self._loader = loader
        self._ranks = ranks
        self._device = device
        self._reads_parts = bool(loader.bounds)
        self._specs: dict[int, BatchSpec] = {}
        field_names = config.field_names
        self._fields = tuple(
            name
            for name in stage_fields(ranks, every_stage)
            if name.removesuffix("_whole") in field_names
        )
        self._has_dataset_ids = config.return_dataset_ids and "labels" in self._fields
        self._group = ranks.group("tp")
        self._source = ranks.members("tp")[0]
        self._reads = bool(self._fields) and ranks.at["tp"] == 0
        # Called now, to refuse a loader that reads the parts of another rank.
        self._spec_of(loader.dataset.sequence_length_at(loader.consumed_samples))
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = side_stream(device)
        # The shape of cu_seqlens depends on the number of documents. A host that does not know it
        # would have to wait until the device has counted them.
        self._sends_counts = (
            device.type != "cpu" and config.reset_attention_mask and has_cpu_backend(self._group)
        )
        self.broadcast_bytes = 0

    @property
    def is_shared(self) -> bool:
        """Whether messages go to other ranks.

        Then all ranks have to start a micro-batch at the same place of their programs.
        """
        return self._group is not None and bool(self._fields)

    @property
    def is_ready(self) -> bool:
        """Whether `start` would not wait and involves no other rank."""
        return not self.is_shared and (not self._reads or self._loader.ready)

    def start(self) -> PendingBatch:
        """Take the next micro-batch and begin to send it. Raises StopIteration after the last.

        Where its fields cannot be made, `finish` raises the error: the cursor is behind it already.
        """
        raw: Batch | None = None
        if self._reads:
            raw = self._loader.take()
        else:
            self._loader.pass_over()
        dataset = self._loader.dataset
        consumed = dataset.consumed_samples
        # the position of its own samples: the cursor may already be in the next phase
        position = consumed - dataset.step_samples
        spec = self._spec_of(dataset.sequence_length_at(position))
        pending = PendingBatch(position, consumed, spec)
        if self._fields:
            try:
                with dataset.steps.naming_datasets(position):
                    self._begin(pending, raw)
            except StreammegaError as error:
                pending.error = error
        return pending

    def _begin(self, pending: PendingBatch, raw: Batch | None) -> None:
        """Begin to send a micro-batch, or make its fields where no other rank needs it."""
        if self._stream is None and self._group is None:
            assert raw is not None
            ids, valid = raw["ids"], raw["valid"]
            pending.batch = self._derive(pending, ids, valid, raw.get("learned"))
            return
        counts = self._broadcast_document_counts(pending.spec, raw) if self._sends_counts else None
        if self._stream is not None:
            self._start_on_device(pending, raw, counts)
        else:
            pending.message = self._make_message(pending.spec, raw)
            pending.work = self._broadcast(pending.message)

    def finish(self, pending: PendingBatch) -> RankBatch:
        """Wait for a micro-batch and return its fields. May be called again after an error."""
        if pending.error is not None:
            raise pending.error
        if pending.event is not None:
            assert pending.batch is not None
            wait_on_stream(pending.batch, pending.event, self._device)
        if pending.batch is not None:
            return pending.batch
        if pending.message is None:
            return RankBatch()
        if pending.work is not None:
            pending.work.wait()
        with self._loader.dataset.steps.naming_datasets(pending.position):
            return self._derive_message(pending, pending.message)

    def _spec_of(self, length: int) -> BatchSpec:
        """The spec for samples of `length` tokens, made once.

        A row is a sample, or a part of a sample, with the token after it.
        """
        if length not in self._specs:
            bounds = _kept_bounds(self._loader, self._ranks, length)
            rows = self._loader.dataset.micro_batch_size
            row_length = length
            if self._reads_parts:
                start, stop = bounds[0]  # all parts have one length
                rows *= len(bounds)
                row_length = stop - start
            self._specs[length] = BatchSpec(
                config=replace(self._loader.dataset.config, sequence_length=length),
                bounds=bounds,
                rows=rows,
                width=row_length + 1,
                ids_dtype=torch_dtype(self._loader.ids_dtype),
                has_modes=self._loader.has_modes,
            )
        return self._specs[length]

    def _broadcast_document_counts(self, spec: BatchSpec, raw: Batch | None) -> DocumentCounts:
        """Count documents on the rank that reads the ids, and send the counts from host to host.

        So no host waits for a device.
        """
        if raw is None:
            numbers = torch.zeros(len(DocumentCounts._fields), dtype=torch.int64)
        else:
            counts = documents_of(raw["ids"], raw["valid"], spec.config, spec.bounds)
            numbers = torch.tensor(counts)
        if self._group is not None:
            dist.broadcast(numbers, self._source, group=self._group)
        return DocumentCounts(*numbers.tolist())

    def _start_on_device(
        self, pending: PendingBatch, raw: Batch | None, counts: DocumentCounts | None
    ) -> None:
        """Copy, broadcast and derive on the side stream.

        The message is allocated on this stream too. Memory that host code has freed on the computing
        stream may still be read by work that is queued there.
        """
        if raw is not None:
            # checked here, because the host would have to wait for a check on the device
            pending.may_pad = check_ids(raw["ids"].numpy(), pending.spec.config, self._fields)
            if (raw["valid"].numpy() < raw["ids"].shape[1]).any():
                check_mask_is_there(self._fields)
                pending.may_pad = True
        with torch.cuda.stream(self._stream):
            message = self._make_message(pending.spec, raw).to(self._device, non_blocking=True)
            work = self._broadcast(message)
            if work is not None:
                work.wait()  # with NCCL the stream waits, not this thread
            pending.batch = self._derive_message(pending, message, counts)
            pending.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            pending.event.record()

    def _make_message(self, spec: BatchSpec, raw: Batch | None) -> Tensor:
        """The message of a micro-batch; without one, an empty message to receive."""
        size = spec.message_size
        on_device = self._stream is not None
        if raw is None and on_device:
            # the broadcast fills it on the device, so nothing is copied
            return torch.empty(size, dtype=torch.uint8, device=self._device)
        # the copy to the device is asynchronous only from pinned memory
        message = torch.empty(size, dtype=torch.uint8, pin_memory=on_device)
        if raw is not None:
            spec.pack(raw, message)
        return message

    def _broadcast(self, message: Tensor) -> dist.Work | None:
        if self._group is None:
            return None
        self.broadcast_bytes += message.numel()
        work: dist.Work = dist.broadcast(message, self._source, group=self._group, async_op=True)
        return work

    def _derive_message(
        self, pending: PendingBatch, message: Tensor, counts: DocumentCounts | None = None
    ) -> RankBatch:
        ids, valid, learned = pending.spec.unpack(message)
        return self._derive(pending, ids, valid, learned, counts)

    def _derive(
        self,
        pending: PendingBatch,
        ids: Tensor,
        valid: Tensor,
        learned: Tensor | None,
        counts: DocumentCounts | None = None,
    ) -> RankBatch:
        """The fields of this rank's stage, of the tokens that it keeps."""
        fields = rank_fields(
            ids,
            valid,
            pending.spec.config,
            pending.spec.bounds,
            parts=self._reads_parts,
            names=self._fields,
            documents=counts,
            may_pad=pending.may_pad,
            learned=learned,
        )
        batch = RankBatch({name: fields[name] for name in fields if name in self._fields})
        if self._has_dataset_ids:  # each rank knows them without a message
            dataset_ids = torch.from_numpy(self._loader.dataset.dataset_ids(pending.position))
            batch["dataset_id"] = dataset_ids.to(ids.device, non_blocking=True)
        if counts is not None:
            batch.longest = counts.longest
        return batch


@functools.cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream on which the next micro-batch is made while the device computes with this one.

    Each device has one, because torch's allocator reuses memory only on the stream that freed it.
    """
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _kept_bounds(loader: StreamLoader, ranks: Ranks, length: int) -> Bounds:
    """Tokens [start, stop) of each part of a sample that a rank keeps. length: tokens of a sample.

    Raises ConfigError if the loader reads the parts of another rank.
    """
    kept = zigzag_bounds(length, ranks.at["cp"], ranks.layout.cp)
    # with each part the loader reads the token after it, which is the part's last label
    read = [(start, stop - 1) for start, stop in loader.bounds_of(length)]
    if read and read != kept:
        raise ConfigError(
            f"the loader reads tokens {list(loader.bounds_of(length))}, this rank keeps {kept}: "
            f"use open_loader"
        )
    return kept


def rank_device(device: torch.device | str | None, ranks: Ranks) -> torch.device:
    """The given device; without one, the current CUDA device if only there the ranks can communicate,
    else the CPU.
    """
    if device is None and not has_cpu_backend(ranks.group("tp")):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(device or "cpu")


def stage_fields(ranks: Ranks, every_stage: bool) -> tuple[str, ...]:
    """The fields that this rank's pipeline stage needs. A middle stage needs some with `every_stage`."""
    fields: list[str] = []
    if ranks.is_first_stage:
        fields += [*FIRST_STAGE, *BOTH_ENDS]
    if ranks.is_last_stage:
        fields += [*LAST_STAGE, *BOTH_ENDS]
    if every_stage:
        fields += MIDDLE_STAGES
    # without duplicates: one stage may be the first and the last
    return tuple(dict.fromkeys(fields))
