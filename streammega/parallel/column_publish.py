"""From the pieces of columns to columns of a dataset: an object for each shard, and their entries in the
manifest, which is put last.
"""

from __future__ import annotations

import fcntl
import os
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from streammega.config import StorageConfig
from streammega.dataset.checksums import ChecksummedWriter
from streammega.dataset.columns import ColumnFile, StoredColumn, column_name
from streammega.dataset.manifest import (
    Manifest,
    Shard,
    columns_at,
    manifest_url,
    parse_manifest,
    shards_at,
)
from streammega.dataset.opening import place_of
from streammega.errors import ObjectChangedError, ObjectNotFoundError, StorageError
from streammega.order.extents import cut_extents
from streammega.parallel.column_pieces import StoredPieces
from streammega.samples.gpt import GPTDataset
from streammega.storage import open_store
from streammega.storage.backends.remote import with_part_bytes_for
from streammega.storage.object_ops import read_object, sync_names
from streammega.storage.open import is_remote, local_path
from streammega.storage.store import atomic_writer, create_object, replace_object, write_again

READ_BYTES = 32 << 20
"""Bytes of pieces that are in memory at once, twice: as they are stored, and in the order of samples."""
TOKENS_AT_ONCE = 1 << 20
"""Tokens whose places are in memory at once."""
FILL_BYTES = 1 << 20
"""Bytes of a write where many tokens have no value."""
MAX_PUTS = 100
"""Times that a manifest is put, each after another writer has put one."""
Values = NDArray[np.void]
"""An item a token: the bytes of its values."""


class Joined(NamedTuple):
    """The object of one shard. filled: its tokens that are in no sample and have the fill."""

    file: ColumnFile
    filled: int


class ColumnJoiner:
    """Joins pieces to objects of shards.

    Args:
        samples: of the dataset, in the sequential order.
        columns: those of the job.
        pieces: all of them.
        digest: in the names of the objects.
    """

    def __init__(
        self,
        samples: GPTDataset,
        columns: Sequence[StoredColumn],
        pieces: StoredPieces,
        digest: str,
    ) -> None:
        self._samples = samples
        self._columns = columns
        self._pieces = pieces
        self._digest = digest
        self._length = samples.config.sequence_length
        self._storage = samples.config.storage
        self._shards = samples.indexed.manifest.shards
        self._bounds = np.cumsum([0, *(shard.tokens for shard in self._shards)]).tolist()

    def join(self, number: int, shard: int) -> Joined:
        """Write the object of a shard for the column of this number. Raises StorageError."""
        column = self._columns[number]
        begin, end = self._bounds[shard : shard + 2]
        url = column_name(self._shards[shard].name, column.name, self._digest)
        size = (end - begin) * column.token_bytes
        store, key = open_store(url, with_part_bytes_for(self._storage, size))

        fill = column.token_of(column.fill)

        def write() -> Joined:
            in_samples = 0
            with atomic_writer(store, key) as inner:
                writer = ChecksummedWriter(inner)
                token = begin
                for start, values, used in self._stretches(number, begin, end, fill):
                    write_fill(writer, fill, start - token)
                    writer.write(values.view(np.uint8).data)
                    token = start + len(values)
                    in_samples += used
                write_fill(writer, fill, end - token)
            return Joined(ColumnFile(url, checksums=writer.checksums), end - begin - in_samples)

        joined = write_again(store, key, write)
        return joined._replace(file=joined.file._replace(etag=store.info(key).etag))

    def _stretches(
        self, number: int, begin: int, end: int, fill: Values
    ) -> Iterator[tuple[int, Values, int]]:
        """The values of a column within tokens [begin, end) of all shards, a stretch at a time: (its first
        token, void [tokens], how many of them are in a sample).
        """
        column = self._columns[number]
        length = self._length
        # Value i of a sample belongs to its token i, or to that which is label i.
        first = int(column.align == "labels")
        at_once = max(1, min(READ_BYTES // (length * column.token_bytes), TOKENS_AT_ONCE // length))
        num_samples = len(self._samples)
        first_sample = bisect_left(range(num_samples), begin + 1, key=self._end_of)
        for sample in range(first_sample, num_samples, at_once):
            stop = min(sample + at_once, num_samples)
            extents = self._samples.locate(np.arange(sample, stop))
            if extents.start[0] >= end:
                return
            runs = cut_extents(extents, [(first, first + length)])
            size = runs.stop - runs.start
            tokens_before = np.append(0, np.cumsum(size))
            # The token of each value that is one, in ascending order.
            token = np.repeat(runs.start - tokens_before[:-1], size) + np.arange(tokens_before[-1])
            tokens_of_sample = np.diff(tokens_before[runs.row_splits])
            # One item a token: numpy moves rows of bytes fifty times slower.
            values = self._pieces.read(number, sample, stop).view(fill.dtype)
            values = values[np.arange(length) < tokens_of_sample[:, None]]
            here = slice(*np.searchsorted(token, [begin, end]))
            token, values = token[here], values[here]
            # Short gaps, as after the documents of bins, are filled here.
            cuts = np.flatnonzero(np.diff(token) > length) + 1
            for low, high in pairwise([0, *cuts.tolist(), len(token)]):
                if low == high:
                    continue
                start = int(token[low])
                tokens = int(token[high - 1]) + 1 - start
                part = values[low:high]
                if tokens > high - low:
                    part = np.repeat(fill, tokens)
                    part[token[low:high] - start] = values[low:high]
                yield start, part, high - low

    def _end_of(self, sample: int) -> int:
        """The token after those of a sample."""
        return int(self._samples.locate(np.array([sample])).stop[-1])


def write_fill(writer: ChecksummedWriter, fill: Values, tokens: int) -> None:
    """Append the fill of so many tokens."""
    at_once = max(1, FILL_BYTES // fill.nbytes)
    for first in range(0, tokens, at_once):
        writer.write(np.repeat(fill, min(at_once, tokens - first)).view(np.uint8).data)


class ColumnManifest:
    """The manifest of a dataset that gets columns.

    opened: what it was when its samples were opened, with full names.
    """

    def __init__(self, name: str, opened: Manifest, storage: StorageConfig) -> None:
        self.url = manifest_url(name)
        self._opened = opened
        self._storage = storage
        self._store, self._key = open_store(self.url, storage)

    def check(self) -> None:
        """Raise ObjectChangedError if it lists other shards than those that were opened."""
        self._read()

    def lists(self, columns: Sequence[StoredColumn], digest: str) -> bool:
        """Whether it has these columns, of objects with this digest."""
        manifest, _ = self._read()
        return _lists(manifest, columns, digest)

    def add(self, columns: Sequence[StoredColumn], digest: str) -> None:
        """Put it with these columns, which replace those of their names. Others stay, also those that
        another writer puts meanwhile. columns: with full names of files.

        Raises ObjectChangedError, StorageError.
        """
        for _ in range(MAX_PUTS):
            with locked_folder(self.url):
                manifest, version = self._read()
                if _lists(manifest, columns, digest):
                    return
                data = self._with(manifest, columns).to_json()
                sync_names(self.url)
                if version:
                    is_put = replace_object(self._store, self._key, data, version)
                else:
                    is_put = create_object(self._store, self._key, data)
            # It may be this one that is there: the answer to a first try was lost.
            if is_put:
                return
        raise StorageError(f"{self.url}: others change it again and again; publish once more")

    def _read(self) -> tuple[Manifest, str]:
        """The manifest with full names, and its ETag: without one that of the pair, and "".

        Raises ObjectChangedError.
        """
        try:
            data, version = read_object(self._store, self._key)
        except ObjectNotFoundError:
            return self._of_pair(), ""
        manifest = parse_manifest(data, self.url)
        shards = shards_at(manifest, self.url)
        if list(map(_content, shards)) != list(map(_content, self._opened.shards)):
            raise ObjectChangedError(
                f"{self.url}: lists other shards than those that were read; was the dataset replaced? "
                "Write the columns again"
            )
        return replace(manifest, shards=shards, columns=columns_at(manifest, self.url)), version

    def _of_pair(self) -> Manifest:
        """The manifest of a pair that has none."""
        opened = self._opened
        shards = opened.shards
        if not is_remote(self.url):
            shards = [shard._replace(etag="", index_etag="") for shard in shards]
        return replace(opened, shards=shards, folder_labels=None, pointers=(), columns=())

    def _with(self, manifest: Manifest, columns: Sequence[StoredColumn]) -> Manifest:
        """The manifest with more columns. ETags count where those of its shards do."""
        place = place_of(self.url, self._storage)
        if not place or manifest.seen_at != place:
            columns = [
                column._replace(files=[file and file._replace(etag="") for file in column.files])
                for column in columns
            ]
        names = {column.name for column in columns}
        others = [column for column in manifest.columns if column.name not in names]
        return replace(manifest, columns=(*others, *columns))


def _content(shard: Shard) -> tuple[object, ...]:
    """What tells a shard from another one, in every manifest."""
    name = shard.name.rpartition("/")[2]
    return name, shard.documents, shard.sequences, shard.tokens, shard.bytes, shard.index_bytes


def _lists(manifest: Manifest, columns: Sequence[StoredColumn], digest: str) -> bool:
    listed = {(column.name, column.kind): column.files for column in manifest.columns}
    for column in columns:
        files = listed.get((column.name, column.kind), ())
        names = [column_name(shard.name, column.name, digest) for shard in manifest.shards]
        if [file and file.name for file in files] != names:
            return False
    return True


@contextmanager
def locked_folder(url: str) -> Iterator[None]:
    """Hold a lock of the folder of a local file: a disk has no conditional writes. Buckets have, and some
    network file systems lock no folders: there the last of two writers stays.
    """
    if is_remote(url):
        yield
        return
    folder = os.open(os.path.dirname(local_path(url)), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)
