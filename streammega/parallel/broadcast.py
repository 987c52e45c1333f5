"""One micro-batch, from the rank that reads it to the fields of every rank.

reading rank ─► ids, columns ─► one message to its tensor-parallel group ─► fields on every rank ─►
its parts, its stage's fields
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from streammega.config import FieldsConfig
from streammega.config.fields import FIELDS, FIRST, LAST, MIDDLE
from streammega.errors import ConfigError, StreammegaError
from streammega.loading import StreamLoader
from streammega.loading.device_prefetch import wait_on_stream
from streammega.order.sharding import zigzag_bounds
from streammega.parallel.fields import Bounds, DocumentCounts, documents_of, rank_fields
from streammega.parallel.groups import Ranks, has_cpu_backend
from streammega.samples.field_inputs import Batch, Samples, check_mask_is_there
from streammega.samples.host_fields import scan_padding, torch_dtype

ALIGNED = 16
"""Each array of a message begins at a multiple of it: torch views bytes only so as wider values."""


class RankBatch(dict[str, Tensor]):
    """The fields of a micro-batch, by name.

    longest: tokens of its longest document; None if only the device knows it.
    """

    longest: int | None = None


class Array(NamedTuple):
    """An array of a message, from byte `start` on."""

    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def stop(self) -> int:
        """The byte after it."""
        return self.start + math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class BatchSpec:
    """The shapes of micro-batches of one sequence length, and how their messages are laid out: the same on
    all ranks of a tensor-parallel group. Phases may change the length.
    """

    config: FieldsConfig
    """Settings of fields with this sequence length."""
    bounds: Bounds
    """Tokens [start, stop) of each part of a sample that this rank keeps."""
    arrays: Mapping[str, Array]
    """What a message has, by the names that batches of the loader have."""
    message_size: int
    """Bytes of a message."""

    def views(self, message: Tensor) -> Batch:
        """The arrays of a message, uint8 [message_size]."""
        return {
            name: message[array.start : array.stop].view(array.dtype).view(array.shape)
            for name, array in self.arrays.items()
        }

    def pack(self, raw: Batch, message: Tensor) -> None:
        """Write a micro-batch of the loader into a message."""
        for name, array in self.views(message).items():
            array.copy_(raw[name])


def samples_of(raw: Batch) -> Samples:
    """A micro-batch as ids: `ready.ids_batches` the other way round."""
    others = ("ids", "valid", "dataset_id")
    columns = {name: array for name, array in raw.items() if name not in others}
    return Samples(raw["ids"], raw["valid"], columns, raw.get("dataset_id"))


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
        self._specs: dict[int, BatchSpec] = {}
        stages = stages_of(ranks, every_stage)
        self._fields = [name for name in config.field_names if stages & {*FIELDS[name].stages}]
        columns = dataset.samples.segments[0].column_fields
        self._column_fields = {
            name: field for name, field in columns.items() if stages & {*field.stages}
        }
        self._group = ranks.group("tp")
        self._source = ranks.members("tp")[0]
        self._needs_batches = bool(self._fields or self._column_fields)
        self._reads = self._needs_batches and ranks.at["tp"] == 0
        # Called now, to refuse a loader that reads the parts of another rank.
        self._spec_of(loader.dataset.sequence_length_at(loader.consumed_samples))
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = side_stream(device)
        # The shape of cu_seqlens depends on the number of documents. A host that does not know it
        # would have to wait until the device has counted them.
        self._sends_counts = (
            device.type != "cpu" and "cu_seqlens" in self._fields and has_cpu_backend(self._group)
        )
        self.broadcast_bytes = 0

    @property
    def is_shared(self) -> bool:
        """Whether messages go to other ranks.

        Then all ranks have to start a micro-batch at the same place of their programs.
        """
        return self._group is not None and self._needs_batches

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
        if self._needs_batches:
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
            pending.batch = self._derive(pending, raw)
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
            return self._derive(pending, pending.spec.views(pending.message))

    def _spec_of(self, length: int) -> BatchSpec:
        """The spec for samples of `length` tokens, made once.

        A row is a sample, or a part of a sample, with the token after it.
        """
        if length not in self._specs:
            loader = self._loader
            bounds = _kept_bounds(loader, self._ranks, length)
            config = replace(loader.dataset.config, sequence_length=length)
            samples = loader.dataset.micro_batch_size
            start, stop = bounds[0]  # all parts have one length
            parts = samples * len(bounds), stop - start + 1
            uncut = samples, length + 1
            of_columns = parts if loader.bounds else uncut
            ids = uncut if config.needs_whole_samples else of_columns
            shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
                "ids": (ids, torch_dtype(loader.ids_dtype)),
                "valid": (ids[:1], torch.int64),
            }
            needed = {column for name in self._fields for column in FIELDS[name].columns}
            for name, column in loader.columns.items():
                if name in needed or name in self._column_fields:
                    shapes[name] = (*of_columns, *column.token_shape), column.dtype
            if "dataset_id" in self._fields:
                shapes["dataset_id"] = (samples,), torch.int64
            arrays = {}
            size = 0
            for name, (shape, dtype) in shapes.items():
                array = arrays[name] = Array(size, shape, dtype)
                size = -(-array.stop // ALIGNED) * ALIGNED
            self._specs[length] = BatchSpec(
                config=config.alone(), bounds=bounds, arrays=arrays, message_size=size
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
            try:
                with self._loader.dataset.steps.naming_datasets(pending.position):
                    self._check(pending, raw)
            except StreammegaError as error:
                pending.error = error  # raised by `finish`: other ranks wait for the message
        with torch.cuda.stream(self._stream):
            message = self._make_message(pending.spec, raw).to(self._device, non_blocking=True)
            work = self._broadcast(message)
            if work is not None:
                work.wait()  # with NCCL the stream waits, not this thread
            pending.batch = self._derive(pending, pending.spec.views(message), counts)
            pending.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            pending.event.record()

    def _check(self, pending: PendingBatch, raw: Batch) -> None:
        """Check ids, and note whether some are padding: the host would have to wait for a device."""
        pending.may_pad = scan_padding(raw["ids"].numpy(), pending.spec.config, self._fields)
        if (raw["valid"].numpy() < raw["ids"].shape[1]).any():
            check_mask_is_there(self._fields)
            pending.may_pad = True

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

    def _derive(
        self, pending: PendingBatch, raw: Batch, counts: DocumentCounts | None = None
    ) -> RankBatch:
        """The fields of this rank's stage, of the tokens that it keeps."""
        batch = RankBatch(
            rank_fields(
                samples_of(raw),
                pending.spec.config,
                pending.spec.bounds,
                names=self._fields,
                columns=self._column_fields,
                documents=counts,
                may_pad=pending.may_pad,
            )
        )
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


def stages_of(ranks: Ranks, every_stage: bool) -> set[str]:
    """What this rank's pipeline stage is to fields. A middle stage needs some with `every_stage`."""
    is_stage = {FIRST: ranks.is_first_stage, LAST: ranks.is_last_stage, MIDDLE: every_stage}
    return {stage for stage, is_it in is_stage.items() if is_it}
