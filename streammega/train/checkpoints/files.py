"""The files of a checkpoint: one of each rank's tensors, and a list of all tensors, in a folder of any store.

torch.distributed.checkpoint can read them too: files of tensors are those of its FileSystemWriter, and its
own list, `.metadata`, is written as well. Each rank reads the ranges of files that it needs, and checks
them.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from streammega.errors import ObjectNotFoundError, ShortReadError
from streammega.parallel.rank_sync import RankSync
from streammega.storage import Store
from streammega.storage.object_ops import read_object
from streammega.storage.store import Buffer, Span, atomic_writer, write_again
from streammega.train.checkpoints.integrity import (
    Checksums,
    DamagedError,
    checksum_of,
    list_tensors,
    load_part,
    parse_tensors,
)

TENSORS = "tensors.json"
METADATA = ".metadata"
"""The list of torch.distributed.checkpoint, a pickle: it is written for other programs, and never read."""
REQUEST_BYTES = 8 << 20
"""The size of one request or write. Between two of them a rank checks whether another one failed."""
MAX_GAP_BYTES = 64 << 10
"""A gap between two items that one request reads: it takes less time than another request."""
BATCH_BYTES = 256 << 20
"""A rank reads so much at a time, or one larger item. So much memory loading needs."""


class CheckpointFiles(NamedTuple):
    """A folder of files in a store. prefix: its key, without a slash at the end."""

    store: Store
    prefix: str

    def key(self, name: str) -> str:
        """The key of a file."""
        return f"{self.prefix}/{name}"

    def url(self, name: str = "") -> str:
        """For messages."""
        return self.store.url(self.key(name) if name else self.prefix)

    def put(self, name: str, data: bytes) -> None:
        """Write a small file, which appears whole."""
        with atomic_writer(self.store, self.key(name)) as writer:
            writer.write(data)

    def read(self, name: str) -> bytes:
        """A small file. Raises DamagedError where it is missing."""
        try:
            data, _ = read_object(self.store, self.key(name))
            return data
        except (ObjectNotFoundError, ShortReadError) as error:
            raise self._missing(name, error) from None

    def read_spans(self, name: str, spans: Sequence[Span]) -> list[Buffer]:
        """Bytes [start, stop) of a file. Raises DamagedError where they are missing."""
        try:
            return self.store.read(self.key(name), spans)
        except (ObjectNotFoundError, ShortReadError) as error:
            raise self._missing(name, error) from None

    def read_metadata(self, checksums: Checksums) -> Metadata:
        """What the checkpoint holds, and where. Raises DamagedError."""
        data = self.read(TENSORS)
        if not checksums.match(TENSORS, 0, data):
            raise DamagedError(f"{self.url(TENSORS)}: is damaged: its checksum is another")
        return parse_tensors(data, self.url(TENSORS))

    def check(self, metadata: Metadata) -> None:
        """Raise DamagedError unless every file that the metadata names is there, and long enough."""
        needed_bytes: dict[str, int] = {}
        for item in metadata.storage_data.values():
            name, stop = item.relative_path, item.offset + item.length
            needed_bytes[name] = max(needed_bytes.get(name, 0), stop)
        stored_bytes: dict[str, int] = {}
        for info in self.store.list(f"{self.prefix}/", recursive=False):
            stored_bytes[info.key.rpartition("/")[2]] = info.size
        for name, needed in sorted(needed_bytes.items()):
            # A name with a slash would lead out of the folder.
            if "/" in name or name not in stored_bytes:
                raise DamagedError(f"{self.url(name)}: is missing")
            if stored_bytes[name] < needed:
                raise DamagedError(
                    f"{self.url(name)}: is cut short: {stored_bytes[name]} bytes, "
                    f"and {needed} were written"
                )

    def _missing(self, name: str, error: Exception) -> DamagedError:
        return DamagedError(f"{self.url(name)}: is missing or cut short ({error})")


@dataclass(frozen=True)
class _Written(WriteResult):
    """An item that a rank has written, as the first rank receives it."""

    checksum: str


class CheckpointWriter(StorageWriter):
    """Writes this rank's file.

    When a save has ended, `checksums` has those of all ranks on the first rank.
    """

    def __init__(self, files: CheckpointFiles, rank_sync: RankSync) -> None:
        self.checksums = Checksums()
        self._files = files
        self._rank_sync = rank_sync

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """This rank's file; returns when those of all ranks are written."""
        written: Future[list[WriteResult]] = Future()
        written.set_result(self._rank_sync.run_long(lambda: self._write(plan, planner)))
        return written

    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        if not plan.items:
            return []
        store, key = self._files.store, self._files.key(plan.storage_data)
        return write_again(store, key, lambda: self._write_file(plan, planner))

    def _write_file(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        name: str = plan.storage_data
        results: list[WriteResult] = []
        start = 0
        with atomic_writer(self._files.store, self._files.key(name)) as writer:
            for item in plan.items:
                serialized = io.BytesIO()
                tensor = planner.resolve_data(item)
                assert isinstance(tensor, Tensor)
                # Of a view, torch would write the whole buffer; `load_part` reads no strides.
                copy = tensor.clone(memory_format=torch.contiguous_format)
                torch.save(copy, serialized)
                # Not getbuffer(): where an error keeps both alive, collecting them ends CPython 3.12.
                data = memoryview(serialized.getvalue())
                for piece_start in range(0, len(data), REQUEST_BYTES):
                    writer.write(data[piece_start : piece_start + REQUEST_BYTES])
                    self._rank_sync.check()
                place = _StorageInfo(name, start, len(data))
                results.append(_Written(item.index, len(data), place, checksum_of(data)))
                start += len(data)
        return results

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the first rank: name the file of each rank."""
        return [replace(plan, storage_data=f"__{rank}_0.distcp") for rank, plan in enumerate(plans)]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the first rank: write the metadata, which says where each item is."""
        metadata.version = CURRENT_DCP_VERSION
        metadata.storage_data = {}
        for results_of_rank in results:
            for result in results_of_rank:
                assert isinstance(result, _Written)
                place = result.storage_data
                metadata.storage_data[result.index] = place
                self.checksums.add(place.relative_path, place.offset, result.checksum)
        self._files.put(METADATA, pickle.dumps(metadata))
        data = list_tensors(metadata)
        self.checksums.add(TENSORS, 0, checksum_of(data))
        self._files.put(TENSORS, data)

    def reset(self, checkpoint_id: Any = None) -> None:
        """Every save has a writer of its own."""

    def set_up_storage_writer(self, is_coordinator: bool, *_: Any, **__: Any) -> None:
        """Nothing: the store makes folders, if it has any."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Unchanged."""
        return plan

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Always valid."""
        return True


class _Stored(NamedTuple):
    """One part of a tensor in a file: bytes [start, stop)."""

    name: str
    start: int
    stop: int
    item: MetadataIndex


class CheckpointReader(StorageReader):
    """Reads what this rank needs of a checkpoint's files."""

    def __init__(
        self,
        files: CheckpointFiles,
        metadata: Metadata,
        checksums: Checksums,
        rank_sync: RankSync,
    ) -> None:
        self._files = files
        self._metadata = metadata
        self._checksums = checksums
        self._rank_sync = rank_sync
        self._form_of: dict[MetadataIndex, tuple[torch.dtype, torch.Size]] = {}
        """The dtype and the size of each part."""
        for name, stored in metadata.state_dict_metadata.items():
            assert isinstance(stored, TensorStorageMetadata)
            for chunk in stored.chunks:
                form = stored.properties.dtype, chunk.sizes
                self._form_of[MetadataIndex(name, chunk.offsets)] = form

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """The metadata, which one rank has read for all."""
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill this rank's tensors; returns when those of all ranks are filled."""
        self._rank_sync.run_long(lambda: self._read(plan.items, planner))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, items: Sequence[ReadItem], planner: LoadPlanner) -> None:
        """File by file, from start to end, some items at a time."""
        # One stored part may fill several of this rank's. It is read once.
        items_of: dict[MetadataIndex, list[ReadItem]] = {}
        for item in items:
            items_of.setdefault(item.storage_index, []).append(item)
        stored: list[_Stored] = []
        for index in items_of:
            place = self._metadata.storage_data[index]
            stop = place.offset + place.length
            stored.append(_Stored(place.relative_path, place.offset, stop, index))
        stored.sort(key=lambda part: (part.name, part.start))
        for batch in _batches(stored):
            for part, data in self._fetch(batch):
                tensor = self._load(part, data)
                for item in items_of[part.item]:
                    self._copy(part, tensor, item, planner)
            self._rank_sync.check()

    def _fetch(self, batch: Sequence[_Stored]) -> Iterator[tuple[_Stored, memoryview]]:
        """The bytes of parts of one file. Parts near each other share a request; a long part takes
        several.
        """
        runs = _runs(batch)
        requests: list[Span] = []
        for run in runs:
            for start in range(run[0].start, run[-1].stop, REQUEST_BYTES):
                requests.append((start, min(start + REQUEST_BYTES, run[-1].stop)))
        bodies = iter(self._files.read_spans(batch[0].name, requests))
        for run in runs:
            run_start = run[0].start
            count = math.ceil((run[-1].stop - run_start) / REQUEST_BYTES)
            of_run = list(islice(bodies, count))
            # Joining copies the bytes, but most runs are one request.
            body = memoryview(of_run[0] if count == 1 else b"".join(of_run))
            for part in run:
                yield part, body[part.start - run_start : part.stop - run_start]

    def _load(self, part: _Stored, data: memoryview) -> Tensor:
        """The tensor that torch.save wrote. Raises DamagedError."""
        url = self._files.url(part.name)
        where = f"{url}: bytes [{part.start}, {part.stop}) are damaged"
        if not self._checksums.match(part.name, part.start, data):
            raise DamagedError(f"{where}: their checksum is another")
        dtype, sizes = self._form_of[part.item]
        try:
            return load_part(data, dtype, sizes)
        except Exception as error:  # zipfile raises anything for what is no archive
            raise DamagedError(f"{where} ({type(error).__name__}: {error})") from None

    def _copy(self, part: _Stored, tensor: Tensor, item: ReadItem, planner: LoadPlanner) -> None:
        """Fill a part of this rank from a stored part."""
        target = planner.resolve_tensor(item).detach()
        stops = [a + b for a, b in zip(item.storage_offsets, item.lengths, strict=True)]
        is_large_enough = tensor.dim() == len(stops) and all(
            stop <= size for stop, size in zip(stops, tensor.shape, strict=True)
        )
        if not is_large_enough:
            raise DamagedError(
                f"{self._files.url(part.name)}: holds {part.item.fqn} in another shape than it says"
            )
        for dim, start in enumerate(item.storage_offsets):
            tensor = tensor.narrow(dim, start, item.lengths[dim])
        target.copy_(tensor)
        planner.commit_tensor(item, target)

    def reset(self, checkpoint_id: Any = None) -> None:
        """Every load has a reader of its own."""

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *_: Any, **__: Any
    ) -> None:
        """Nothing: the metadata are known."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Unchanged."""
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Always valid."""
        return True


def _batches(stored: Sequence[_Stored]) -> Iterator[list[_Stored]]:
    """Batches of parts of one file, of at most BATCH_BYTES or one larger part."""
    batch: list[_Stored] = []
    batch_bytes = 0
    for part in stored:
        part_bytes = part.stop - part.start
        if batch and (part.name != batch[0].name or batch_bytes + part_bytes > BATCH_BYTES):
            yield batch
            batch = []
            batch_bytes = 0
        batch.append(part)
        batch_bytes += part_bytes
    if batch:
        yield batch


def _runs(batch: Sequence[_Stored]) -> list[list[_Stored]]:
    """Groups of parts that one request reads. A long part is a group, and takes several requests."""
    runs = [[batch[0]]]
    for part in batch[1:]:
        run = runs[-1]
        is_near = part.start - run[-1].stop <= MAX_GAP_BYTES
        if is_near and part.stop - run[0].start <= REQUEST_BYTES:
            run.append(part)
        else:
            runs.append([part])
    return runs
