"""The files of one checkpoint, written and read through any store.

__0_0.distcp     the tensors that rank 0 writes, each as `torch.save` writes it; __1_0.distcp, ...
.metadata        where they are, for torch's own programs
tensors.json     where they are, and their checksums: what is read here

torch's planners say which rank writes and reads which parts, whatever the layouts of both runs.
"""

from __future__ import annotations

import io
import pickle
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from streammega.errors import ObjectNotFoundError, ShortReadError
from streammega.parallel.rank_sync import RankSync
from streammega.storage import Store
from streammega.storage.object_ops import read_object
from streammega.storage.store import ObjectInfo, atomic_writer, write_again
from streammega.train.checkpoints.integrity import (
    DamagedError,
    StoredPart,
    checksum_of,
    list_tensors,
    load_part,
    parse_tensors,
)

TENSORS = "tensors.json"
METADATA = ".metadata"
"""The list of torch.distributed.checkpoint, a pickle: it is written for other programs, and never read."""
REQUEST_BYTES = 8 << 20
"""The size of one request or write. Between two writes a rank checks whether another one failed."""
MAX_GAP_BYTES = 64 << 10
"""A gap between two parts that are read together: it takes less time than another request."""
RUN_BYTES = 128 << 20
"""A rank reads so much at a time, or one larger part. Loading needs twice as much memory."""


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

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        """Files whose names begin so, without those of folders in this one."""
        return self.store.list(self.key(prefix), recursive=False)

    def read(self, name: str) -> bytes:
        """A small file. Raises DamagedError where it is missing."""
        try:
            data, _ = read_object(self.store, self.key(name))
            return data
        except (ObjectNotFoundError, ShortReadError) as error:
            raise self._missing(name, error) from None

    def read_span(self, name: str, start: int, stop: int) -> memoryview:
        """Bytes [start, stop) of a file. Raises DamagedError where they are missing."""
        spans = [
            (first, min(first + REQUEST_BYTES, stop)) for first in range(start, stop, REQUEST_BYTES)
        ]
        try:
            return memoryview(b"".join(self.store.read(self.key(name), spans)))
        except (ObjectNotFoundError, ShortReadError) as error:
            raise self._missing(name, error) from None

    def _missing(self, name: str, error: Exception) -> DamagedError:
        return DamagedError(f"{self.url(name)}: is missing or cut short ({error})")

    def read_metadata(self, checksum: str) -> Metadata:
        """What the checkpoint holds, and where. checksum: of the list. Raises DamagedError."""
        data = self.read(TENSORS)
        if checksum_of(data) != checksum:
            raise DamagedError(f"{self.url(TENSORS)}: is damaged: its checksum is another")
        return parse_tensors(data, self.url(TENSORS))

    def check(self, metadata: Metadata) -> None:
        """Raise DamagedError unless every file that the metadata names is there, and long enough."""
        stored_bytes: dict[str, int] = {}
        for info in self.list():
            stored_bytes[info.key.rpartition("/")[2]] = info.size
        for part in metadata.storage_data.values():
            # So are those whose name has a slash, and would lead out of the folder.
            if part.file not in stored_bytes:
                raise DamagedError(f"{self.url(part.file)}: is missing")
            if stored_bytes[part.file] < part.stop:
                raise DamagedError(
                    f"{self.url(part.file)}: is cut short: {stored_bytes[part.file]} bytes, "
                    f"and {part.stop} were written"
                )


# --- writing --------------------------------------------------------------------------------------


def write_tensors(
    files: CheckpointFiles,
    state: dict[str, Tensor],
    copies: Mapping[str, Tensor],
    rank_sync: RankSync,
) -> tuple[Metadata, str]:
    """(what was written and where, the checksum of its list). All ranks call it together.

    Args:
        state: the tensors that this rank could write, by which torch plans who writes which parts.
        copies: their values on the host.

    Raises StorageError, CheckpointException.
    """
    writer = CheckpointWriter(files, copies, rank_sync)
    metadata = state_dict_saver.save(
        state,
        storage_writer=writer,
        planner=DefaultSavePlanner(flatten_state_dict=False),
        process_group=rank_sync.group,
        no_dist=rank_sync.group is None,
    )
    # Not in `finish`, while other ranks wait in a collective: a full disk may be waited for longer.
    return metadata, rank_sync.run_on_first(lambda: _write_lists(files, metadata))


def _write_lists(files: CheckpointFiles, metadata: Metadata) -> str:
    """Write the metadata for torch's programs and for us; the checksum of ours."""
    of_torch = {
        index: _StorageInfo(part.file, part.start, part.stop - part.start)
        for index, part in metadata.storage_data.items()
    }
    files.put(METADATA, pickle.dumps(replace(metadata, storage_data=of_torch)))
    data = list_tensors(metadata)
    files.put(TENSORS, data)
    return checksum_of(data)


class CheckpointWriter(StorageWriter):
    """Writes this rank's file."""

    def __init__(
        self, files: CheckpointFiles, copies: Mapping[str, Tensor], rank_sync: RankSync
    ) -> None:
        self._files = files
        self._copies = copies
        self._rank_sync = rank_sync

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """This rank's file; returns when those of all ranks are written."""
        written: Future[list[WriteResult]] = Future()
        written.set_result(self._rank_sync.run_long(lambda: self._write(plan.items)))
        return written

    def _write(self, items: Sequence[WriteItem]) -> list[WriteResult]:
        if not items:
            return []
        name = f"__{self._rank_sync.rank}_0.distcp"
        key = self._files.key(name)
        return write_again(self._files.store, key, lambda: self._write_file(name, items))

    def _write_file(self, name: str, items: Sequence[WriteItem]) -> list[WriteResult]:
        results: list[WriteResult] = []
        start = 0
        with atomic_writer(self._files.store, self._files.key(name)) as writer:
            for item in items:
                serialized = io.BytesIO()
                # Of a view, torch would write the whole buffer; `load_part` reads no strides.
                tensor = self._copies[item.index.fqn]
                torch.save(tensor.clone(memory_format=torch.contiguous_format), serialized)
                # Not getbuffer(): where an error keeps both alive, collecting them ends CPython 3.12.
                data = memoryview(serialized.getvalue())
                for piece_start in range(0, len(data), REQUEST_BYTES):
                    writer.write(data[piece_start : piece_start + REQUEST_BYTES])
                    self._rank_sync.check()
                part = StoredPart(name, start, start + len(data), checksum_of(data))
                results.append(WriteResult(item.index, len(data), part))
                start = part.stop
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the first rank: add to the metadata where everything is."""
        metadata.version = CURRENT_DCP_VERSION
        metadata.storage_data = {
            result.index: result.storage_data for of_rank in results for result in of_rank
        }

    def reset(self, checkpoint_id: Any = None) -> None:
        """Every save has a writer of its own."""

    def set_up_storage_writer(self, is_coordinator: bool, *_: Any, **__: Any) -> None:
        """Nothing: the store makes folders, if it has any."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Unchanged."""
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Always valid."""
        return True


# --- reading --------------------------------------------------------------------------------------


def read_tensors(
    files: CheckpointFiles, metadata: Metadata, state: dict[str, Tensor], rank_sync: RankSync
) -> None:
    """Fill this rank's tensors from those of a checkpoint. All ranks call it together.

    Each reads what it needs, and returns when all have. Raises DamagedError, StorageError.
    """

    def read() -> None:
        planner = DefaultLoadPlanner(flatten_state_dict=False)
        planner.set_up_planner(state, metadata)
        # One stored part may fill several of this rank's. It is read once.
        items_of: defaultdict[MetadataIndex, list[ReadItem]] = defaultdict(list)
        for item in planner.create_local_plan().items:
            items_of[item.storage_index].append(item)
        for run in _runs(metadata, list(items_of)):
            for index, tensor in _read_run(files, metadata, run):
                for item in items_of[index]:
                    source = tensor
                    for dim, start in enumerate(item.storage_offsets):
                        source = source.narrow(dim, start, item.lengths[dim])
                    planner.resolve_tensor(item).detach().copy_(source)
            rank_sync.check()

    rank_sync.run_long(read)


def _runs(metadata: Metadata, wanted: Sequence[MetadataIndex]) -> Iterator[list[MetadataIndex]]:
    """The parts that are wanted, file by file, from start to end: groups that are near each other, of at
    most RUN_BYTES or one larger part.
    """
    run: list[MetadataIndex] = []
    first = last = StoredPart("", 0, 0, "")
    for index in sorted(wanted, key=lambda one: metadata.storage_data[one][:2]):
        part = metadata.storage_data[index]
        is_near = part.file == last.file and part.start - last.stop <= MAX_GAP_BYTES
        if not is_near or part.stop - first.start > RUN_BYTES:
            if run:
                yield run
            run = []
            first = part
        run.append(index)
        last = part
    if run:
        yield run


def _read_run(
    files: CheckpointFiles, metadata: Metadata, run: Sequence[MetadataIndex]
) -> Iterator[tuple[MetadataIndex, Tensor]]:
    """The parts that `torch.save` wrote next to each other. Raises DamagedError."""
    first, last = metadata.storage_data[run[0]], metadata.storage_data[run[-1]]
    body = files.read_span(first.file, first.start, last.stop)
    for index in run:
        part = metadata.storage_data[index]
        data = body[part.start - first.start : part.stop - first.start]
        where = f"{files.url(part.file)}: bytes [{part.start}, {part.stop}) are damaged"
        if checksum_of(data) != part.checksum:
            raise DamagedError(f"{where}: their checksum is another")
        stored = metadata.state_dict_metadata[index.fqn]
        assert isinstance(stored, TensorStorageMetadata)
        assert index.index is not None
        sizes = stored.chunks[index.index].sizes
        try:
            tensor = load_part(data, stored.properties.dtype, sizes)
        except Exception as error:  # zipfile raises anything for what is no archive
            raise DamagedError(f"{where} ({type(error).__name__}: {error})") from None
        yield index, tensor
