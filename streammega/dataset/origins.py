"""Where the documents of a shard came from: a file beside it, `NAME.origins`, of a few bytes a
document.

    chunks        zstd, of CHUNK_DOCUMENTS documents each: the paths that occur, and of every
                  document its path, the kind of its place, the place, and its id
    footer        JSON: version, documents, and of each chunk its bytes and their xxh3-64
    trailer       bytes of the footer (u64), their xxh3-64 (u64), magic (8 bytes)

Numbers are differences to the document before, by byte planes: in an order that was not shuffled
nearly all of them are the same, and take next to nothing. A document is found by reading the footer
and one chunk. Everything little-endian.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
import zstandard
from numpy.typing import NDArray

from streammega.config import StorageConfig
from streammega.dataset.origin_names import FILE, SIGNS, OriginNames
from streammega.errors import AccessDeniedError, FormatError, ObjectNotFoundError
from streammega.storage import Store, open_store

ENDING = ".origins"
VERSION = 1
MAGIC = b"SMORIGIN"
TRAILER = struct.Struct("<QQ8s")
LENGTH = struct.Struct("<I")
CHUNK_DOCUMENTS = 1 << 12
"""Documents of a chunk, which is read as a whole to find one of them: more would compress no better,
and take longer to look into.
"""
HELD_CHUNKS = 256
"""Chunks of a file that are kept when they were read."""
MOST_CHUNK_BYTES = 1 << 28
"""Of a chunk, decompressed: a damaged one that asks for more memory is refused."""
MOST_ID = 1024
"""Characters of an id that are kept."""
LEVEL = 3
"""Of zstd: more costs time, and saves little of what byte planes have left."""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where one document came from. kind: what `place` is; id: its id or URL, "" where it has
    none.
    """

    path: str
    kind: int
    place: int
    id: str

    @property
    def where(self) -> str:
        """For people: `corpus.jsonl:12`, `corpus.jsonl@52428800`, `web#7`, or the file alone."""
        sign = SIGNS.get(self.kind)
        return self.path if sign is None else f"{self.path}{sign}{self.place}"


@dataclass(frozen=True, kw_only=True)
class Origins:
    """Where some documents came from, in their order.

    paths: those that occur. path int32, kind uint8, place int64 [documents] each: as in `Origin`,
    the path by its number. ids: one of each document.
    """

    paths: tuple[str, ...]
    path: NDArray[np.int32]
    kind: NDArray[np.uint8]
    place: NDArray[np.int64]
    ids: list[str]

    def __len__(self) -> int:
        return len(self.place)

    def __getitem__(self, row: int) -> Origin:
        return Origin(
            path=self.paths[self.path[row]],
            kind=int(self.kind[row]),
            place=int(self.place[row]),
            id=self.ids[row],
        )

    def rows_with(self, words: str) -> list[int]:
        """The rows that have an id, or a place as `Origin.where` writes it."""
        if not words:  # what stands where a document has no id
            return []
        rows = {row for row, text in enumerate(self.ids) if text == words}
        for number, path in enumerate(self.paths):
            if not words.startswith(path):
                continue
            # Few paths begin a name, so the rows of those alone are looked at.
            for row in np.flatnonzero(self.path == number).tolist():
                if self[row].where == words:
                    rows.add(row)
        return sorted(rows)

    def rows_named(self, names: OriginNames) -> Iterator[tuple[str, int]]:
        """(name, row) of each row that has one of many names as its id, or as its place."""
        for row, text in enumerate(self.ids):
            if text in names.words:
                yield text, row
        for number, path in enumerate(self.paths):
            for kind, words in names.places.get(path, {}).items():
                rows = np.flatnonzero((self.path == number) & (self.kind == kind))
                # a file that is one document has no place
                places = self.place[rows] if kind != FILE else np.zeros(len(rows), np.int64)
                for row, place in zip(rows.tolist(), places.tolist(), strict=True):
                    if place in words:
                        yield words[place], row

    def take(self, rows: NDArray[Any]) -> Origins:
        """Some of them, int [rows], in that order."""
        return Origins(
            paths=self.paths,
            path=self.path[rows],
            kind=self.kind[rows],
            place=self.place[rows],
            ids=[self.ids[row] for row in rows.tolist()],
        )


def origins_of(origins: Iterable[Origin]) -> Origins:
    """The columns of single ones."""
    rows = list(origins)
    number_of: dict[str, int] = {}
    path = [number_of.setdefault(row.path, len(number_of)) for row in rows]
    return Origins(
        paths=tuple(number_of),
        path=np.array(path, np.int32),
        kind=np.array([row.kind for row in rows], np.uint8),
        place=np.array([row.place for row in rows], np.int64),
        ids=[row.id for row in rows],
    )


def join_origins(parts: Sequence[Origins]) -> Origins:
    """Those of all parts, in order."""
    if len(parts) == 1:
        return parts[0]
    number_of: dict[str, int] = {}
    path = [np.empty(0, np.int32)]
    kind = [np.empty(0, np.uint8)]
    place = [np.empty(0, np.int64)]
    ids: list[str] = []
    for part in parts:
        numbers = [number_of.setdefault(name, len(number_of)) for name in part.paths]
        path.append(np.array(numbers, np.int32)[part.path])
        kind.append(part.kind)
        place.append(part.place)
        ids += part.ids
    return Origins(
        paths=tuple(number_of),
        path=np.concatenate(path),
        kind=np.concatenate(kind),
        place=np.concatenate(place),
        ids=ids,
    )


# --- writing --------------------------------------------------------------------------------------


class OriginsWriter:
    """Makes the file of documents that are added in their order. Its bytes depend on the documents
    alone, and not on how many are added at once.
    """

    def __init__(self) -> None:
        self._held: list[Origins] = []
        self._num_held = 0
        self._chunks: list[bytes] = []
        self._documents = 0
        self.num_ids = 0
        """Documents so far that have an id."""

    def add(self, origins: Origins) -> None:
        """Take documents in."""
        self._held.append(origins)
        self._num_held += len(origins)
        self._documents += len(origins)
        self.num_ids += len(origins.ids) - origins.ids.count("")
        if self._num_held >= CHUNK_DOCUMENTS:
            self._end_chunks(CHUNK_DOCUMENTS)

    def finish(self) -> bytes:
        """The whole file."""
        self._end_chunks(1)
        entries = [[len(chunk), xxhash.xxh3_64_intdigest(chunk)] for chunk in self._chunks]
        footer = {"version": VERSION, "documents": self._documents, "chunks": entries}
        stored = json.dumps(footer).encode()
        trailer = TRAILER.pack(len(stored), xxhash.xxh3_64_intdigest(stored), MAGIC)
        return b"".join([*self._chunks, stored, trailer])

    def _end_chunks(self, least: int) -> None:
        """Encode what is held, a chunk at a time, while there are `least` documents."""
        if self._num_held < least:
            return
        held = join_origins(self._held)
        start = 0
        while len(held) - start >= least:
            stop = min(start + CHUNK_DOCUMENTS, len(held))
            self._chunks.append(_encoded(held.take(np.arange(start, stop))))
            start = stop
        rest = held.take(np.arange(start, len(held)))
        self._held = [rest] if len(rest) else []
        self._num_held = len(rest)


def _encoded(origins: Origins) -> bytes:
    """A chunk. Its paths are those that occur, in the order in which they do."""
    used, first_rows, numbers = np.unique(origins.path, return_index=True, return_inverse=True)
    by_appearance = np.argsort(first_rows)
    new_number = np.empty(len(used), np.int64)
    new_number[by_appearance] = np.arange(len(used))
    paths = [origins.paths[used[row]] for row in by_appearance]
    texts = [text.encode("utf-8", "replace") for text in origins.ids]
    head = json.dumps({"documents": len(origins), "paths": paths}).encode()
    parts = [
        LENGTH.pack(len(head)),
        head,
        _planes(new_number[numbers.reshape(-1)], "<i4"),
        origins.kind.tobytes(),
        _planes(origins.place, "<i8"),
        _planes(np.array([len(text) for text in texts], np.int64), "<i4"),
        *texts,
    ]
    compressor = zstandard.ZstdCompressor(level=LEVEL)
    return compressor.compress(b"".join(parts))


def _planes(values: NDArray[np.int64], dtype: str) -> bytes:
    """Differences of numbers, all their lowest bytes first, then the next ones."""
    differences = np.diff(values, prepend=0).astype(dtype)
    itemsize = differences.itemsize
    return differences.view(np.uint8).reshape(-1, itemsize).T.tobytes()


# --- reading --------------------------------------------------------------------------------------


class OriginsFile:
    """The origins of a shard, as they are stored: only the chunks that are asked for are read.

    Raises FormatError for a file that is damaged, or of a later version; StorageError.
    """

    def __init__(self, store: Store, key: str) -> None:
        self._store = store
        self._key = key
        self._info = store.info(key)
        self.url = store.url(key)
        footer = self._footer()
        self.documents: int = footer["documents"]
        self._bounds = np.cumsum([0, *(size for size, _ in footer["chunks"])])
        self._checksums = [checksum for _, checksum in footer["chunks"]]
        self._held: dict[int, _Chunk] = {}

    def __getitem__(self, document: int) -> Origin:
        if not 0 <= document < self.documents:
            raise FormatError(
                f"{self.url}: speaks of {self.documents} documents, and not of number {document}; "
                "it is another dataset's: convert again"
            )
        number, row = divmod(document, CHUNK_DOCUMENTS)
        return self._chunk(number).origin(row)

    def between(self, first: int, stop: int) -> Origins:
        """Those of documents [first, stop)."""
        parts = [origins_of([])]
        for number in range(first // CHUNK_DOCUMENTS, -(-stop // CHUNK_DOCUMENTS)):
            chunk = self._chunk(number).origins()
            begin = number * CHUNK_DOCUMENTS
            low = max(0, first - begin)
            high = min(len(chunk), stop - begin)
            parts.append(chunk.take(np.arange(low, high)))
        joined = join_origins(parts)
        if len(joined) != stop - first:
            raise self._damaged(f"has {len(joined)} of documents [{first}, {stop})")
        return joined

    def search(self, words: str) -> Iterator[int]:
        """The documents that have an id, or came from a place, in their order."""
        for number in range(len(self._checksums)):
            chunk = self._chunk(number).origins()
            for row in chunk.rows_with(words):
                yield number * CHUNK_DOCUMENTS + row

    def named(self, names: OriginNames) -> Iterator[tuple[str, int]]:
        """(name, document) of each document that has one of many names, in one pass over all."""
        for number in range(len(self._checksums)):
            chunk = self._chunk(number).origins()
            for name, row in chunk.rows_named(names):
                yield name, number * CHUNK_DOCUMENTS + row

    def _chunk(self, number: int) -> _Chunk:
        held = self._held.get(number)
        if held is not None:
            return held
        if number >= len(self._checksums):
            raise self._damaged(f"has no chunk {number}")
        stored = self._read(int(self._bounds[number]), int(self._bounds[number + 1]))
        if xxhash.xxh3_64_intdigest(stored) != self._checksums[number]:
            raise self._damaged(f"chunk {number} is not what was written")
        # Before anything of that size is allocated.
        if not 0 <= zstandard.frame_content_size(stored) <= MOST_CHUNK_BYTES:
            raise self._damaged(f"chunk {number} says that it is larger than any is")
        if len(self._held) == HELD_CHUNKS:
            del self._held[next(iter(self._held))]
        data = zstandard.ZstdDecompressor().decompress(stored)
        try:
            self._held[number] = _decoded(memoryview(data))
        except (ValueError, KeyError, TypeError, struct.error) as error:
            raise self._damaged(f"chunk {number} cannot be read ({error})") from None
        return self._held[number]

    def _footer(self) -> dict[str, Any]:
        size = self._info.size
        if size < TRAILER.size:
            raise self._damaged("is cut short")
        stored = self._read(size - TRAILER.size, size)
        footer_bytes, checksum, magic = TRAILER.unpack(stored)
        if magic != MAGIC or footer_bytes > size - TRAILER.size:
            raise self._damaged("does not end as such a file does")
        footer = self._read(size - TRAILER.size - footer_bytes, size - TRAILER.size)
        if xxhash.xxh3_64_intdigest(footer) != checksum:
            raise self._damaged("its footer is not what was written")
        said: dict[str, Any] = json.loads(footer)
        if said["version"] != VERSION:
            raise FormatError(
                f"{self.url}: is of version {said['version']}, and this library reads {VERSION}; "
                "update it"
            )
        return said

    def _read(self, start: int, stop: int) -> bytes:
        (body,) = self._store.read_ranges(self._key, [start], [stop], self._info.etag)
        return bytes(body)

    def _damaged(self, what: str) -> FormatError:
        return FormatError(f"{self.url}: {what}; remove it, or convert again with --origins")


@dataclass(frozen=True, kw_only=True)
class _Chunk:
    """A chunk whose ids are still bytes: of one document, one is made text. id_ends, id_lengths
    [documents]: where in `data` they lie.
    """

    data: memoryview
    paths: tuple[str, ...]
    path: NDArray[np.int32]
    kind: NDArray[np.uint8]
    place: NDArray[np.int64]
    id_ends: NDArray[np.int64]
    id_lengths: NDArray[np.int64]

    def origin(self, row: int) -> Origin:
        """That of one document, by its place in the chunk."""
        end = int(self.id_ends[row])
        start = end - int(self.id_lengths[row])
        return Origin(
            path=self.paths[self.path[row]],
            kind=int(self.kind[row]),
            place=int(self.place[row]),
            id=bytes(self.data[start:end]).decode(),
        )

    def origins(self) -> Origins:
        """Those of all documents of the chunk."""
        starts = (self.id_ends - self.id_lengths).tolist()
        ends = self.id_ends.tolist()
        data = bytes(self.data)
        ids = [data[start:end].decode() for start, end in zip(starts, ends, strict=True)]
        return Origins(paths=self.paths, path=self.path, kind=self.kind, place=self.place, ids=ids)


def _decoded(data: memoryview) -> _Chunk:
    (head_bytes,) = LENGTH.unpack(data[: LENGTH.size])
    at = LENGTH.size + head_bytes
    head = json.loads(bytes(data[LENGTH.size : at]))
    documents = int(head["documents"])
    paths = tuple(head["paths"])
    path, at = _values(data, at, documents, "<i4")
    kind = np.frombuffer(data, np.uint8, documents, at)
    place, at = _values(data, at + documents, documents, "<i8")
    id_lengths, at = _values(data, at, documents, "<i4")
    id_ends = at + np.cumsum(id_lengths)
    if documents and not 0 <= path.min() <= path.max() < len(paths):
        raise ValueError("a path that is not listed")
    if documents and (id_lengths.min() < 0 or id_ends[-1] != len(data)):
        raise ValueError("ids of other lengths than there are bytes")
    return _Chunk(
        data=data,
        paths=paths,
        path=path.astype(np.int32),
        kind=kind,
        place=place,
        id_ends=id_ends,
        id_lengths=id_lengths,
    )


def _values(data: memoryview, at: int, count: int, dtype: str) -> tuple[NDArray[np.int64], int]:
    """(numbers, where the bytes behind them begin): the inverse of `_planes`."""
    itemsize = np.dtype(dtype).itemsize
    planes = np.frombuffer(data, np.uint8, count * itemsize, at).reshape(itemsize, count)
    differences = np.ascontiguousarray(planes.T).view(dtype).reshape(-1)
    return np.cumsum(differences, dtype=np.int64), at + count * itemsize


def open_origins(prefix: str, storage: StorageConfig) -> OriginsFile | None:
    """The origins beside a shard; None where there are none."""
    store, key = open_store(prefix + ENDING, storage)
    # Without the right to list, S3 answers 403 for what is not there.
    try:
        return OriginsFile(store, key)
    except (ObjectNotFoundError, AccessDeniedError):
        return None


def has_origins(prefix: str, storage: StorageConfig) -> bool:
    """Whether there are origins beside a shard, as far as one may know. Raises StorageError."""
    store, key = open_store(prefix + ENDING, storage)
    try:
        store.info(key)
    except (ObjectNotFoundError, AccessDeniedError):
        return False
    return True
