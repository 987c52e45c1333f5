"""Which documents the output has, in which order: without duplicates, by shuffle keys or in the order
of the inputs. All of it is known before a token is moved.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from streammega.convert.documents import Tokens, offsets_of
from streammega.convert.job import ConvertSegment, Job
from streammega.convert.options import ConvertOptions
from streammega.dataset.column_reader import ColumnReader
from streammega.dataset.indexed import IndexedDataset, document_tokens
from streammega.errors.cached_property import cached_property
from streammega.kernels.keyed import GOLDEN, mix
from streammega.storage import open_store
from streammega.storage.progress import ProgressObserver

Integers = NDArray[np.int64]
Portion = tuple[Integers, Integers]
"""Some documents in their order: the part of each, and its number there."""
SIDE = ".side"
KEEP = ".keep"
"""Endings of the files of a segment."""
OPENED_PARTS = 64
"""Parts that are kept open where one is read after the other: a corpus may have thousands."""


class DocumentOrder:
    """The documents of some parts in their final order, portion by portion.

    A portion is a part, in the order of its documents; with `buckets`, one of so many ranges of
    shuffle keys, in the order of these. buckets: 0: documents are not shuffled. Keys are hashes, so
    no permutation of a corpus is held in memory.
    """

    def __init__(self, job: Job, parts: Sequence[ConvertSegment], buckets: int) -> None:
        self._job = job
        self._parts = parts
        self._buckets = buckets
        self._opened: dict[int, IndexedDataset] = {}

    @property
    def num_portions(self) -> int:
        """Parts, or buckets."""
        return self._buckets or len(self._parts)

    def name(self, part: int) -> str:
        """The prefix of a part."""
        return self._parts[part].prefix(self._job)

    def dataset(self, part: int) -> IndexedDataset:
        """A part, opened; without buckets only the last few stay open."""
        opened = self._opened.get(part)
        if opened is not None:
            return opened
        # Every bucket needs all parts, so there all of them stay open.
        while len(self._opened) >= OPENED_PARTS and not self._buckets:
            first_opened = next(iter(self._opened))
            del self._opened[first_opened]
        opened = self._parts[part].open(self._job)
        self._opened[part] = opened
        return opened

    def open_column(self, part: int, number: int) -> ColumnReader:
        """The values of a part for the column of a number."""
        return self._parts[part].open_column(self._job, number, self.dataset(part))

    def order(self, portion: int) -> Portion:
        """Every document of a portion, in order."""
        if self._buckets:
            return self._order_of_bucket(portion)
        documents = np.arange(self._parts[portion].documents)
        is_kept = self._is_kept(portion)
        if is_kept is not None:
            documents = documents[is_kept]
        return np.full(len(documents), portion), documents

    def by_part(self, portion: Portion) -> Iterator[tuple[int, Integers, Integers]]:
        """(part, rows of the portion that are of it, their documents) for each of its parts."""
        parts, documents = portion
        for part in np.unique(parts):
            rows = np.flatnonzero(parts == part)
            yield int(part), rows, documents[rows]

    def sizes(self, portion: Portion) -> Integers:
        """Tokens of documents; of each part, only the stretch that holds them is looked at."""
        sizes = np.empty(len(portion[1]), np.int64)
        for part, rows, numbers in self.by_part(portion):
            start = int(numbers.min())
            tokens = document_tokens(self.dataset(part), start, int(numbers.max()) + 1)
            sizes[rows] = tokens[numbers - start]
        return sizes

    def sequences(self, portion: Portion) -> Integers:
        """How many sequences documents have."""
        counts = np.empty(len(portion[1]), np.int64)
        for part, rows, numbers in self.by_part(portion):
            bounds = self.dataset(part).document_indices
            counts[rows] = bounds[numbers + 1] - bounds[numbers]
        return counts

    def _order_of_bucket(self, bucket: int) -> Portion:
        parts = []
        documents = []
        keys = []
        for part, keys_of_part in enumerate(self._shuffle_keys):
            chosen = self._documents_in(bucket, part, keys_of_part)
            parts.append(np.full(len(chosen), part))
            documents.append(chosen)
            keys.append(keys_of_part[chosen])
        # Stable: of equal keys (a 64-bit hash), the earlier part and document come first, however
        # many buckets there are.
        order = np.argsort(np.concatenate(keys), kind="stable")
        return np.concatenate(parts)[order], np.concatenate(documents)[order]

    def _documents_in(self, bucket: int, part: int, keys: NDArray[np.uint64]) -> Integers:
        """Documents of a part whose keys are in a bucket; those of a segment were sorted by key."""
        keys_per_bucket = (1 << 64) // self._buckets
        low = np.uint64(keys_per_bucket * bucket)
        first = int(np.searchsorted(keys, low))
        # The last bucket also has the few keys that a division by the number of buckets leaves.
        stop = len(keys)
        if bucket < self._buckets - 1:
            high = np.uint64(keys_per_bucket * (bucket + 1))
            stop = int(np.searchsorted(keys, high))
        documents = np.arange(first, stop)
        is_kept = self._is_kept(part)
        return documents if is_kept is None else documents[is_kept[first:stop]]

    @cached_property
    def _shuffle_keys(self) -> list[NDArray[np.uint64]]:
        """The keys of the documents of each part, ascending."""
        return [read_side(self._job, part)["shuffle_key"] for part in self._parts]

    def _is_kept(self, number: int) -> NDArray[np.bool_] | None:
        """Which documents of a part are no duplicates; None where duplicates were not removed."""
        part = self._parts[number]
        if not part.has_keep:
            return None
        bits = self._job.work_dir.read(part.name + KEEP)
        return np.unpackbits(bits, count=part.documents).astype(np.bool_)


def shuffle_keys(seed: int, unit: int, numbers: NDArray[np.int64]) -> NDArray[np.uint64]:
    """A keyed hash of each document, by which documents are sorted: SplitMix64 rounds over (seed,
    unit, document). numbers: those of the documents in their unit.
    """
    units = np.full(len(numbers), unit, np.uint64)
    with np.errstate(over="ignore"):
        state = np.full(len(numbers), seed, np.uint64)
        for word in (units, numbers.astype(np.uint64)):
            state = mix(state + GOLDEN + word)
    return state


SideRows = dict[str, NDArray[np.uint64]]


def side_rows(options: ConvertOptions) -> list[str]:
    """The rows of every `.side` file of a conversion, in their order; without any, no files.

    number: that of the document in its unit, the stretch of the inputs that one worker handled.
    """
    names = []
    if options.shuffle_seed is not None:
        names.append("shuffle_key")
    if options.dedup:
        names += ["number", "hash_low", "hash_high"]
    return names


def save_side(job: Job, segment: str, rows: SideRows) -> int:
    """Write what shuffling and deduplication need of a segment's documents. Returns the bytes."""
    in_order = [rows[name].astype("<u8", copy=False) for name in side_rows(job.options)]
    data = np.stack(in_order).tobytes()
    job.work_dir.write(segment + SIDE, data)
    return len(data)


def read_side(job: Job, part: ConvertSegment) -> SideRows:
    """The rows of a part's file, each uint64 [documents]; mapped where it is local."""
    name = part.name + SIDE
    store, key = open_store(job.work_dir.file(name), job.work_dir.storage)
    if store.local_path(key) is not None:
        # Mapped, since a bucket needs a stretch of every file.
        values: NDArray[np.uint64] = np.frombuffer(store.view(key), "<u8")
    else:
        values = job.work_dir.read(name).view("<u8")
    return dict(zip(side_rows(job.options), values.reshape(-1, part.documents), strict=True))


# --- duplicates ---

COMPARED_BYTES = 64
"""Memory for each document that is compared: five numbers, its place among the sorted ones, a copy of
one of them, 8 bytes each, and a few flags. A test measures it.
"""


def document_hashes(batch: Tokens) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """128-bit hashes of the tokens of each document, in two halves."""
    # Of ids, whatever their width: segments of one corpus may be stored in different dtypes.
    ids = batch.tokens.astype("<i8", copy=False)
    data = ids.view(np.uint8).data
    ends = np.cumsum(batch.document_tokens) * ids.itemsize
    digests = bytearray()
    start = 0
    for end in ends.tolist():
        digests += xxhash.xxh3_128_digest(data[start:end])
        start = end
    halves = np.frombuffer(digests, "<u8").reshape(-1, 2)
    return halves[:, 0], halves[:, 1]


def remove_duplicates(
    job: Job, parts: list[ConvertSegment], memory_bytes: int, progress: ProgressObserver
) -> tuple[list[ConvertSegment], int]:
    """The parts with a `.keep` file each, and how many documents are not kept: all but the first of
    equal ones. parts: at least one.

    Hashes are compared in as many passes as memory asks for. The first of equal ones has the
    smallest (unit of its part, `number` of its row). progress: receives the documents that were
    compared, and then of those whose part was noted.
    """
    bounds = offsets_of(np.array([part.documents for part in parts], np.int64)).tolist()
    passes = max(1, -(-bounds[-1] * COMPARED_BYTES // memory_bytes))
    is_kept = np.zeros(bounds[-1], np.bool_)
    progress.begin("looking for duplicates", bounds[-1], " documents")
    progress.part("hashes read", 0, passes * bounds[-1], unit="")  # in each pass all of them
    for pass_number in range(passes):
        kept = _first_of_equal_ones(job, parts, bounds, pass_number, passes, progress)
        is_kept[kept] = True
    progress.begin("noting duplicates", bounds[-1], " documents")
    parts_with_keep = []
    for part, start, stop in zip(parts, bounds, bounds[1:], strict=False):
        job.work_dir.write(part.name + KEEP, np.packbits(is_kept[start:stop]).tobytes())
        parts_with_keep.append(replace(part, has_keep=True))
        progress.advance(stop - start)
    return parts_with_keep, len(is_kept) - int(np.count_nonzero(is_kept))


def _first_of_equal_ones(
    job: Job,
    parts: list[ConvertSegment],
    bounds: list[int],
    pass_number: int,
    passes: int,
    progress: ProgressObserver,
) -> Integers:
    """The documents of one pass that are kept, counted over all parts.

    bounds: documents before each part.
    """
    columns: dict[str, list[NDArray[Any]]] = {}
    for name in ("number", "unit", "high", "low", "document"):
        columns[name] = []
    for part, documents_before in zip(parts, bounds, strict=False):
        side = read_side(job, part)
        # Equal documents have equal hashes, so they meet in the same pass.
        documents = np.flatnonzero(side["hash_low"] % np.uint64(passes) == pass_number)
        columns["number"].append(side["number"][documents])
        columns["unit"].append(np.full(len(documents), part.unit, np.uint64))
        columns["high"].append(side["hash_high"][documents])
        columns["low"].append(side["hash_low"][documents])
        columns["document"].append(documents + documents_before)
        progress.part("hashes read", part.documents)
    del documents
    # The parts of a column are freed before the next one is joined.
    compared = {name: np.concatenate(columns.pop(name)) for name in list(columns)}
    # Equal ones end up side by side, the first of the corpus before the others.
    order = np.lexsort([compared[name] for name in ("number", "unit", "high", "low")])
    is_first = np.zeros(len(order), np.bool_)
    is_first[:1] = True
    for name in ("low", "high"):
        values = compared.pop(name)[order]
        is_first[1:] |= values[1:] != values[:-1]
    progress.advance(len(order))
    kept: Integers = compared["document"][order[is_first]]
    return kept
