"""Pieces of columns while they are written: what each rank stored of a range of samples, in a folder next
to the dataset.

A piece is the values of every dp_size-th sample of a range, which are those of one rank; of each column
one after the other, and of each sample as many as it could have tokens. So any number of ranks can go on
writing, and each place in a piece follows from its name.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from streammega.config import StorageConfig
from streammega.dataset.columns import StoredColumn
from streammega.errors import ObjectNotFoundError, StateError
from streammega.storage import ObjectInfo, Store, open_store
from streammega.storage.object_ops import read_object, sync_names
from streammega.storage.store import atomic_writer, write_again
from streammega.storage.thread_pool import parallel_map

CLAIM = "writer"
"""The object that says who writes the pieces of a folder."""
MAX_REQUESTS = 32
"""Pieces that are read or removed at once."""
_NAME = re.compile(r"(?P<first>\d+)-(?P<stop>\d+)-(?P<rank>\d+)of(?P<size>\d+)-(?P<run>\w*)")


class Piece(NamedTuple):
    """What rank `rank` of `size` has of samples [first, stop).

    run: its id, so that a late rank of an earlier run replaces nothing of a later one.
    """

    first: int
    stop: int
    rank: int
    size: int
    run: str = ""

    @property
    def name(self) -> str:
        """That of its object. Names sort as samples do."""
        ranks = f"{self.rank:05d}of{self.size:05d}"
        return f"{self.first:016d}-{self.stop:016d}-{ranks}-{self.run}"

    def samples(self, start: int, stop: int) -> range:
        """Those of samples [start, stop) that it has: a rank takes each whose remainder is its own, as
        in `rank_samples`.
        """
        start = max(start, self.first)
        return range(start + (self.rank - start) % self.size, min(stop, self.stop), self.size)


def piece_of(name: str) -> Piece | None:
    """The piece of that name; None for another object."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    first, stop, rank, size = map(int, match.group("first", "stop", "rank", "size"))
    return Piece(first, stop, rank, size, match["run"])


class PieceFolder:
    """The folder of the pieces of a job. Keys are those of its store."""

    def __init__(self, url: str, storage: StorageConfig) -> None:
        self.url = url
        self._store: Store
        self._store, self._key = open_store(url, storage)

    def pieces(self, run: str | None = None) -> dict[Piece, ObjectInfo]:
        """The pieces that are stored by a run; None: by any."""
        stored = {}
        for info in self._store.list(f"{self._key}/", recursive=False):
            piece = piece_of(info.key.rpartition("/")[2])
            if piece is not None and run in (None, piece.run):
                stored[piece] = info
        return stored

    def put(self, piece: Piece, parts: Sequence[NDArray[np.uint8]]) -> None:
        """Store a piece, which appears whole."""
        key = self._key_of(piece.name)

        def write() -> None:
            with atomic_writer(self._store, key) as writer:
                for part in parts:
                    writer.write(np.ascontiguousarray(part).data)

        write_again(self._store, key, write)
        # A state that is saved next counts on these names, also after a power failure.
        sync_names(f"{self.url}/{piece.name}")
        sync_names(self.url)

    def read(self, info: ObjectInfo, start: int, stop: int) -> NDArray[np.uint8]:
        """Bytes [start, stop) of a piece."""
        (body,) = self._store.read(info.key, [(start, stop)], info.etag)
        return np.frombuffer(body, np.uint8)

    def map(self, function: Any, items: Iterable[Any]) -> list[Any]:
        """`function` of each item, several at once where each waits for a server."""
        return parallel_map(function, items, MAX_REQUESTS, is_local=self._store.is_local)

    def claim(self) -> str:
        """Who writes here: the id of a run and that of its last start, of `put_claim`; empty for none."""
        try:
            data, _ = read_object(self._store, self._key_of(CLAIM))
        except ObjectNotFoundError:
            return ""
        return data.decode()

    def put_claim(self, run: str) -> str:
        """Say that a run writes here from now on. Writers that began before notice it and end."""
        claim = f"{run} {secrets.token_hex(8)}"
        self._store.put(self._key_of(CLAIM), claim.encode())
        return claim

    def remove(self, pieces: Iterable[Piece]) -> None:
        """Remove pieces. None is read any more."""
        self.release()
        self.map(self._store.delete, [self._key_of(piece.name) for piece in pieces])

    def clear(self) -> None:
        """Remove all objects, also what killed writers left of some, and the folder of a disk."""
        self.release()
        objects = self._store.list(f"{self._key}/", recursive=False)
        self.map(self._store.delete, [info.key for info in objects])
        path = self._store.local_path(self._key)
        if path is not None:
            with suppress(OSError):  # it is not there, or something else is in it
                os.rmdir(path)

    def release(self) -> None:
        """Unmap what was read."""
        self._store.unmap()

    def _key_of(self, name: str) -> str:
        return f"{self._key}/{name}"


class StoredPieces:
    """The pieces of all samples of a dataset, to read.

    Args:
        folder: where they are.
        run: whose they are; those of others are left out.
        columns: those of the job, in the order in which pieces have them.
        num_samples: of the dataset. Later samples are padding, and in no piece.
        length: values of a sample.

    Raises StateError unless every sample is in one piece, as long as it must be.
    """

    def __init__(
        self,
        folder: PieceFolder,
        run: str,
        columns: Sequence[StoredColumn],
        num_samples: int,
        length: int,
    ) -> None:
        self._folder = folder
        self._stored: Mapping[Piece, ObjectInfo] = folder.pieces(run)
        self._num_samples = num_samples
        self._sizes = [column.token_bytes * length for column in columns]
        """Bytes of a sample in each column."""
        check_tiling(self._stored, num_samples, folder.url)
        for piece, info in self._stored.items():
            needed = sum(self._sizes) * len(piece.samples(0, num_samples))
            if info.size != needed:
                raise StateError(
                    f"{folder.url}/{piece.name}: has {info.size:,} bytes, and its samples need {needed:,}; "
                    "remove it, and go on from a state before it, or begin with restart=True"
                )
        self._sorted = sorted(self._stored)
        self._firsts = np.array([piece.first for piece in self._sorted], np.int64)
        self._stops = np.array([piece.stop for piece in self._sorted], np.int64)

    def read(self, column: int, start: int, stop: int) -> NDArray[np.uint8]:
        """The values of samples [start, stop) in a column of this number, uint8 [samples, bytes]."""
        size = self._sizes[column]
        before = sum(self._sizes[:column])
        values = np.empty((stop - start, size), np.uint8)
        wanted = []
        for number in np.flatnonzero((self._firsts < stop) & (self._stops > start)).tolist():
            piece = self._sorted[number]
            samples = piece.samples(start, stop)
            if samples:
                wanted.append((piece, samples))

        def read(one: tuple[Piece, range]) -> None:
            piece, samples = one
            of_piece = piece.samples(0, self._num_samples)
            begin = before * len(of_piece) + of_piece.index(samples[0]) * size
            body = self._folder.read(self._stored[piece], begin, begin + len(samples) * size)
            values[samples[0] - start :: samples.step][: len(samples)] = body.reshape(-1, size)
            # After each: a process has no room for a map of each of many thousands.
            self._folder.release()

        self._folder.map(read, wanted)
        return values


def check_tiling(pieces: Iterable[Piece], num_samples: int, url: str) -> None:
    """Raise StateError that names the first samples below `num_samples` that are in no piece, or in two.

    url: of the folder, for messages.
    """
    # A rank's pieces follow each other, with ranges of their own: a rank that could not store has a longer
    # one then. Ranks of another number begin where all of these end.
    size, ends = 1, [0]
    for piece in [*sorted(pieces), Piece(num_samples, num_samples, 0, 1)]:
        is_same = piece.size == size
        for rank in [piece.rank] if is_same else range(size):
            end, first = min(ends[rank], num_samples), min(piece.first, num_samples)
            if end < first:
                is_of_all = min(ends) == max(ends)
                who = "nothing is" if is_of_all else f"rank {rank} of {size} has nothing"
                raise _not_tiled(url, f"{who} stored", (end, first))
            if end > first:
                raise _not_tiled(url, "values are stored twice", (first, end))
        if not is_same:
            size, ends = piece.size, [piece.first] * piece.size
        ends[piece.rank] = piece.stop


def _not_tiled(url: str, problem: str, samples: Sequence[int]) -> StateError:
    first, stop = samples
    return StateError(
        f"{url}: {problem} of samples [{first}, {stop}); go on from the state of a checkpoint before them, "
        "or begin with restart=True"
    )
