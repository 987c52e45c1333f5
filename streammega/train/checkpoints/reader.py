"""How the tensors of a checkpoint are read: by ranges of its files, each rank what fills its own
memory.
"""

from __future__ import annotations

import io
import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from streammega.errors import ObjectNotFoundError, ShortReadError
from streammega.train.all_ranks import AllRanks
from streammega.train.checkpoints.integrity import Checksums, DamagedError, Files

PIECE_BYTES = 8 << 20
"""Of one request."""
GAP_BYTES = 64 << 10
"""Items so near to each other are read by one request: another one would cost more than so few
bytes that nobody wants.
"""
BATCH_BYTES = 256 << 20
"""Read at a time by a rank, unless one item is larger: what loading needs beside the tensors."""


class Reader(StorageReader):
    """Reads what this rank needs of a checkpoint's files: what lies near together by one request,
    several requests at a time.
    """

    def __init__(
        self, files: Files, metadata: Metadata, checksums: Checksums, all_ranks: AllRanks
    ) -> None:
        self._files = files
        self._metadata = metadata
        self._all_ranks = all_ranks
        self._checksums = checksums

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing was begun."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Which was read by one rank for all."""
        return self._metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *_: Any, **__: Any
    ) -> None:
        """It is known already."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill this rank's tensors; returns when those of all ranks are filled."""
        self._all_ranks.work(lambda: self._read(plan.items, planner), watched=True)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Ours are always good."""
        return True

    def _read(self, items: Sequence[ReadItem], planner: LoadPlanner) -> None:
        """File by file, and within a file from its begin to its end, some items at a time."""
        # One stored box may fill several of ours: it is read once.
        items_of: dict[MetadataIndex, list[ReadItem]] = {}
        for item in items:
            items_of.setdefault(item.storage_index, []).append(item)
        places = self._metadata.storage_data
        indices_in_file: dict[str, list[MetadataIndex]] = {}
        for index in items_of:
            file_name = places[index].relative_path
            indices_in_file.setdefault(file_name, []).append(index)
        for file_name, indices in indices_in_file.items():
            # Rising: what lies near together is then read by one request.
            indices.sort(key=lambda index: places[index].offset)
            for batch in _batches(indices, places):
                self._fill(file_name, batch, items_of, planner)
                self._all_ranks.progress()

    def _fill(
        self,
        file_name: str,
        batch: Sequence[MetadataIndex],
        items_of: Mapping[MetadataIndex, list[ReadItem]],
        planner: LoadPlanner,
    ) -> None:
        """Read some stored boxes of a file, and copy them to where they are wanted."""
        spans: list[tuple[int, int]] = []
        for index in batch:
            place = self._metadata.storage_data[index]
            spans.append((place.offset, place.offset + place.length))
        bodies = self._fetch(file_name, spans)
        for index, span, data in zip(batch, spans, bodies, strict=True):
            tensor = self._tensor_in(data, file_name, span)
            for item in items_of[index]:
                self._copy(tensor, item, planner, file_name)

    def _tensor_in(self, data: memoryview, file_name: str, span: tuple[int, int]) -> Tensor:
        """The tensor that torch.save wrote to bytes [start, stop) of a file.

        Raises DamagedError.
        """
        start, stop = span
        where = f"{self._files.url(file_name)}: bytes [{start}, {stop}) are damaged"
        if not self._checksums.match(file_name, start, data):
            raise DamagedError(f"{where}: their checksum is another")
        try:
            tensor: Tensor = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except Exception as error:
            # torch.load raises anything for bytes that torch.save did not make.
            lines = str(error).splitlines()
            reason = lines[0] if lines else type(error).__name__
            raise DamagedError(f"{where} ({reason})") from None
        return tensor

    def _copy(self, tensor: Tensor, item: ReadItem, planner: LoadPlanner, file_name: str) -> None:
        """Fill one box of ours from the part of a stored box that lies in it."""
        target = planner.resolve_tensor(item).detach()
        if not _reaches(tensor, item):
            raise DamagedError(
                f"{self._files.url(file_name)}: holds {item.storage_index.fqn} "
                f"in another shape than it says"
            )
        for dim, start in enumerate(item.storage_offsets):
            tensor = tensor.narrow(dim, start, item.lengths[dim])
        target.copy_(tensor)
        planner.commit_tensor(item, target)

    def _fetch(self, file_name: str, spans: Sequence[tuple[int, int]]) -> list[memoryview]:
        """The bytes of spans of a file, which rise."""
        runs = list(_runs(spans))
        bodies_of_runs = self._fetch_runs(file_name, runs)
        run_starts = [start for start, _ in runs]
        bodies: list[memoryview] = []
        for start, stop in spans:
            run = bisect_right(run_starts, start) - 1
            run_start = run_starts[run]
            bodies.append(bodies_of_runs[run][start - run_start : stop - run_start])
        return bodies

    def _fetch_runs(self, file_name: str, runs: Sequence[tuple[int, int]]) -> list[memoryview]:
        """The bytes of runs of a file, long ones by several requests."""
        starts: list[int] = []
        stops: list[int] = []
        for run_start, run_stop in runs:
            for start in range(run_start, run_stop, PIECE_BYTES):
                starts.append(start)
                stops.append(min(start + PIECE_BYTES, run_stop))
        try:
            key = self._files.key(file_name)
            pieces = iter(self._files.store.read(key, list(zip(starts, stops, strict=True))))
        except (ObjectNotFoundError, ShortReadError) as error:
            raise DamagedError(
                f"{self._files.url(file_name)}: is missing or cut short ({error})"
            ) from None
        bodies: list[memoryview] = []
        for run_start, run_stop in runs:
            count = math.ceil((run_stop - run_start) / PIECE_BYTES)
            of_run = list(islice(pieces, count))
            # A copy only where there are several: most runs are one request.
            bodies.append(memoryview(of_run[0] if count == 1 else b"".join(of_run)))
        return bodies


def _reaches(tensor: Tensor, item: ReadItem) -> bool:
    """Whether a stored box is as large as its metadata says, as far as is wanted of it."""
    if tensor.dim() != len(item.lengths):
        return False
    ends = [
        start + length for start, length in zip(item.storage_offsets, item.lengths, strict=True)
    ]
    return all(end <= size for end, size in zip(ends, tensor.shape, strict=True))


def _batches(
    indices: Sequence[MetadataIndex], places: Mapping[MetadataIndex, Any]
) -> Iterator[list[MetadataIndex]]:
    """Some at a time, of no more than BATCH_BYTES unless one is larger."""
    batch: list[MetadataIndex] = []
    batch_bytes = 0
    for index in indices:
        length = places[index].length
        if batch and batch_bytes + length > BATCH_BYTES:
            yield batch
            batch = []
            batch_bytes = 0
        batch.append(index)
        batch_bytes += length
    if batch:
        yield batch


def _runs(spans: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Spans that lie near together as one, of no more than PIECE_BYTES unless one is larger."""
    run_start, run_stop = spans[0]
    for start, stop in spans[1:]:
        is_near = start - run_stop <= GAP_BYTES
        if is_near and stop - run_start <= PIECE_BYTES:
            run_stop = max(run_stop, stop)
        else:
            yield run_start, run_stop
            run_start = start
            run_stop = stop
    yield run_start, run_stop
