"""How the tensors of a checkpoint are written: by torch's writer, one file a rank, into a
store.

Each item that it writes gets a checksum on its way. They go with torch's own messages to the first
rank.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import xxhash
from torch.distributed.checkpoint.filesystem import FileSystemBase, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from streammega.storage import Store
from streammega.storage.store import atomic_writer
from streammega.train.all_ranks import AllRanks
from streammega.train.checkpoints.integrity import Checksums, Files, root_failure

PIECE_BYTES = 8 << 20
"""Of one write: small enough to see that something moves."""


@dataclass(frozen=True)
class _Written(WriteResult):
    """What torch is told of an item that was written, with its checksum."""

    checksum: str


class _Stream(io.RawIOBase):
    """A file being written, in pieces, each of which says that the save goes on.

    Args:
        write: takes one piece.
        hexes: takes the checksum of every item, by the offset at which it begins, as text.
    """

    def __init__(self, write: Any, all_ranks: AllRanks, hexes: dict[str, str]) -> None:
        super().__init__()
        self._write = write
        self._all_ranks = all_ranks
        self._hexes = hexes
        self._hash = xxhash.xxh3_64()
        self._written_bytes = 0
        self._item_start = 0

    def writable(self) -> bool:
        """Always."""
        return True

    def tell(self) -> int:
        """Bytes written so far. torch asks before and after each item, and so its checksum ends
        here.
        """
        self._end_item()
        return self._written_bytes

    def close(self) -> None:
        """All is written."""
        self._end_item()
        super().close()

    def write(self, data: Any) -> int:
        """All of it."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), PIECE_BYTES):
            piece = view[start : start + PIECE_BYTES]
            self._hash.update(piece)
            self._write(piece)
            self._all_ranks.progress()
        self._written_bytes += len(view)
        return len(view)

    def _end_item(self) -> None:
        """Note the checksum of what was written since the last item, if that is anything."""
        if self._written_bytes > self._item_start:
            self._hexes[str(self._item_start)] = self._hash.hexdigest()
            self._item_start = self._written_bytes
            self._hash.reset()


class _StoreFiles(FileSystemBase):
    """The files of a store, for torch.

    Each appears whole, when all of it was written: so the metadata needs no name to be renamed
    from.
    """

    def __init__(self, store: Store, all_ranks: AllRanks) -> None:
        self._store = store
        self._all_ranks = all_ranks
        self.checksums = Checksums()

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        """Send it while it is written; what fails half-way leaves nothing."""
        hexes = self.checksums.hexes.setdefault(_final_name(path), {})
        with (
            atomic_writer(self._store, path) as writer,
            _Stream(writer.write, self._all_ranks, hexes) as stream,
        ):
            yield stream

    def concat_path(self, path: Any, suffix: str) -> str:
        """The key of a file."""
        return f"{path}/{_final_name(suffix)}"

    def init_path(self, path: Any) -> str:
        """As it is."""
        return str(path)

    def rename(self, path: Any, new_path: Any) -> None:
        """It has its final name."""

    def mkdir(self, path: Any) -> None:
        """The store makes folders where it has them."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Ours are always good."""
        return True

    def exists(self, path: Any) -> bool:
        """Never: every save writes to a folder of its own."""
        return False

    def rm_file(self, path: Any) -> None:
        """Nothing is there."""


class Writer(FileSystemWriter):
    """torch's writer of one file a rank.

    Args:
        files: where to.

    On the first rank `checksums` are those of all ranks when a save has ended.
    """

    def __init__(self, files: Files, all_ranks: AllRanks) -> None:
        # The store syncs its files. Nothing is copied ahead: values are on the host, and torch would make a context on the
        # first GPU for it.
        super().__init__(files.prefix, sync_files=False, per_thread_copy_ahead=0)
        self.fs: Any = _StoreFiles(files.store, all_ranks)
        self.path = self.fs.init_path(files.prefix)
        self._all_ranks = all_ranks

    @property
    def checksums(self) -> Checksums:
        """Of what this rank has written, and those that others have told it."""
        return self.fs.checksums  # type: ignore[no-any-return]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """This rank's file; returns when those of all ranks are written."""
        torch_write = super().write_data

        def write() -> Future[list[WriteResult]]:
            try:
                return torch_write(plan, planner)
            except Exception as error:
                raise root_failure(error) from None

        written = self._all_ranks.work(write, watched=True)
        results: list[WriteResult] = [self._with_checksum(result) for result in written.value()]
        told: Future[list[WriteResult]] = Future()
        told.set_result(results)
        return told

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the first rank: write what says which items there are and where they lie."""
        for results_of_rank in results:
            for result in results_of_rank:
                self._note_checksum(result)
        super().finish(metadata, results)

    def _note_checksum(self, result: WriteResult) -> None:
        """Of an item that any rank has written."""
        if isinstance(result, _Written):
            place = result.storage_data
            hexes = self.checksums.hexes.setdefault(place.relative_path, {})
            hexes[str(place.offset)] = result.checksum

    def _with_checksum(self, result: WriteResult) -> _Written:
        place = result.storage_data
        checksum = self.checksums.hexes[place.relative_path][str(place.offset)]
        return _Written(result.index, result.size_in_bytes, place, checksum)


def _final_name(path: Any) -> str:
    """Of a file: torch writes one of them under another name first, and renames it."""
    _, _, name = str(path).rpartition("/")
    return name.removesuffix(".tmp")
