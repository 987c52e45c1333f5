"""How the tensors of a checkpoint are read: by ranges of its files, each rank what fills its own
memory.
"""

from __future__ import annotations

import io
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from streammega.errors import ObjectNotFoundError, ShortReadError
from streammega.train.all_ranks import AllRanks
from streammega.train.checkpoints.files import Checksums, DamagedError, Files

PIECE_BYTES = 8 << 20
"""Of one request."""
GAP_BYTES = 64 << 10
"""Items so near to each other are read by one request."""
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
        wanted: dict[MetadataIndex, list[ReadItem]] = {}  # one stored box may fill several of ours
        for item in items:
            wanted.setdefault(item.storage_index, []).append(item)
        places = self._metadata.storage_data
        by_file: dict[str, list[MetadataIndex]] = {}
        for index in wanted:
            by_file.setdefault(places[index].relative_path, []).append(index)
        for name, indices in by_file.items():
            indices.sort(key=lambda index: places[index].offset)
            for batch in _batches(indices, places):
                self._fill(name, batch, wanted, planner)
                self._all_ranks.progress()

    def _fill(
        self,
        name: str,
        batch: Sequence[MetadataIndex],
        wanted: Mapping[MetadataIndex, list[ReadItem]],
        planner: LoadPlanner,
    ) -> None:
        places = [self._metadata.storage_data[index] for index in batch]
        spans = [(place.offset, place.offset + place.length) for place in places]
        for index, (start, stop), data in zip(batch, spans, self._fetch(name, spans), strict=True):
            if not self._checksums.match(name, start, data):
                raise DamagedError(
                    f"{self._files.url(name)}: bytes [{start}, {stop}) are damaged: their checksum is another"
                )
            try:
                tensor = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
            except (
                Exception
            ) as error:  # torch.load raises anything for bytes that torch.save did not make
                reason = (str(error).splitlines() or [type(error).__name__])[0]
                raise DamagedError(
                    f"{self._files.url(name)}: bytes [{start}, {stop}) are damaged ({reason})"
                ) from None
            for item in wanted[index]:
                self._copy(tensor, item, planner, name)

    def _copy(self, tensor: Tensor, item: ReadItem, planner: LoadPlanner, name: str) -> None:
        target = planner.resolve_tensor(item).detach()
        for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            if tensor.dim() != len(item.lengths) or start + length > tensor.shape[dim]:
                raise DamagedError(
                    f"{self._files.url(name)}: holds {item.storage_index.fqn} in another shape than it says"
                )
            tensor = tensor.narrow(dim, start, length)
        target.copy_(tensor)
        planner.commit_tensor(item, target)

    def _fetch(self, name: str, spans: Sequence[tuple[int, int]]) -> list[memoryview]:
        """The bytes of spans of a file, which rise."""
        runs = list(_runs(spans))
        pieces = [
            (at, min(at + PIECE_BYTES, stop))
            for start, stop in runs
            for at in range(start, stop, PIECE_BYTES)
        ]
        key = self._files.key(name)
        try:
            bodies = self._files.store.read_ranges(
                key, [start for start, _ in pieces], [stop for _, stop in pieces]
            )
        except (ObjectNotFoundError, ShortReadError) as error:
            raise DamagedError(
                f"{self._files.url(name)}: is missing or cut short ({error})"
            ) from None
        whole: list[memoryview] = []
        at = 0
        for start, stop in runs:
            count = -(-(stop - start) // PIECE_BYTES)
            whole.append(
                memoryview(bodies[at] if count == 1 else b"".join(bodies[at : at + count]))
            )
            at += count
        firsts = [start for start, _ in runs]
        found = []
        for start, stop in spans:
            run = bisect_right(firsts, start) - 1
            found.append(whole[run][start - firsts[run] : stop - firsts[run]])
        return found


def _batches(
    indices: Sequence[MetadataIndex], places: Mapping[MetadataIndex, Any]
) -> Iterator[list[MetadataIndex]]:
    """Some at a time, of no more than BATCH_BYTES unless one is larger."""
    batch: list[MetadataIndex] = []
    size = 0
    for index in indices:
        if batch and size + places[index].length > BATCH_BYTES:
            yield batch
            batch = []
            size = 0
        batch.append(index)
        size += places[index].length
    if batch:
        yield batch


def _runs(spans: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Spans that lie near together as one, of no more than PIECE_BYTES unless one is larger."""
    start, stop = spans[0]
    for low, high in spans[1:]:
        if low - stop <= GAP_BYTES and high - start <= PIECE_BYTES:
            stop = max(stop, high)
        else:
            yield start, stop
            start = low
            stop = high
    yield start, stop
