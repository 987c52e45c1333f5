"""The order of documents in the output: by shuffle keys, or that of the inputs. It is known before a
token is moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from streammega.config import StorageConfig
from streammega.convert.documents import Tokens, bounds_of
from streammega.convert.job import Job, load_bytes
from streammega.convert.options import ConvertOptions
from streammega.dataset.indexed import IndexedDataset
from streammega.errors import ConvertError
from streammega.kernels.mix import GOLDEN, mix
from streammega.kernels.plan import copy_bytes
from streammega.storage import join_url, open_store, save_bytes
from streammega.storage.store import address_of

Integers = NDArray[np.int64]
OPENED_PARTS = 64
"""Parts that are kept open where one is read after the other: a corpus may have thousands."""


@dataclass(frozen=True, kw_only=True)
class DocumentSet:
    """Documents that are there: a dataset's name, the names of its `.side` and `.keep` files or "",
    the unit that made it.
    """

    dataset: str
    documents: int
    side: str = ""
    keep: str = ""
    unit: int = 0
    is_input: bool = False
    """Whether it is an input, and no segment in the work folder."""

    def open(self, job: Job) -> IndexedDataset:
        """The dataset, from where it is stored."""
        return IndexedDataset(self.dataset, job.input_storage if self.is_input else job.storage)


class OrderedDocuments:
    """The documents of some parts in their final order, portion by portion.

    A portion is a part, in the order of its documents; with `buckets`, one of so many ranges of
    shuffle keys, in the order of these.
    """

    def __init__(self, job: Job, parts: Sequence[DocumentSet], buckets: int) -> None:
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
        return self._parts[part].dataset

    def dataset(self, part: int) -> IndexedDataset:
        """A part, opened; only the last few are kept so."""
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

    @property
    def num_tokens(self) -> int:
        """In all parts, kept or not."""
        total = 0
        for part in range(len(self._parts)):
            lengths = self.dataset(part).sequence_lengths
            total += int(lengths.sum(dtype=np.int64))
        return total

    def order(self, portion: int) -> tuple[Integers, Integers]:
        """(part, document of it) of every document of a portion, in order."""
        if self._buckets:
            return self._order_of_bucket(portion)
        documents = np.arange(self._parts[portion].documents)
        is_kept = self._is_kept(portion)
        if is_kept is not None:
            documents = documents[is_kept]
        return np.full(len(documents), portion), documents

    def sizes(self, parts: Integers, documents: Integers) -> Integers:
        """Tokens of documents; of each part, only the stretch that holds them is looked at."""
        sizes = np.empty(len(documents), np.int64)
        for part in np.unique(parts):
            rows = np.flatnonzero(parts == part)
            numbers = documents[rows]
            start = int(numbers.min())
            stop = int(numbers.max()) + 1
            tokens = document_tokens(self.dataset(int(part)), start, stop)
            sizes[rows] = tokens[numbers - start]
        return sizes

    def sequences(self, parts: Integers, documents: Integers) -> Integers:
        """How many sequences documents have."""
        counts = np.empty(len(documents), np.int64)
        for part in np.unique(parts):
            rows = np.flatnonzero(parts == part)
            numbers = documents[rows]
            bounds = self.dataset(int(part)).document_indices
            counts[rows] = bounds[numbers + 1] - bounds[numbers]
        return counts

    def _order_of_bucket(self, bucket: int) -> tuple[Integers, Integers]:
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
        """Documents of a part whose keys lie in a bucket; those of a segment were sorted by key."""
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
        """Of each part, the keys of its documents, ascending."""
        keys = []
        for part in self._parts:
            side = read_side(self._job, part.side, part.documents)
            keys.append(side["shuffle_key"])
        return keys

    def _is_kept(self, part: int) -> NDArray[np.bool_] | None:
        """Which documents of a part are no duplicates; None: nobody has looked."""
        name = self._parts[part].keep
        if not name:
            return None
        bits = load_bytes(join_url(self._job.work, name), self._job.storage)
        flags = np.unpackbits(bits, count=self._parts[part].documents)
        return flags.astype(np.bool_)


def document_tokens(indexed: IndexedDataset, start: int = 0, stop: int | None = None) -> Integers:
    """Tokens of each of the documents [start, stop), int64."""
    last_bound = None if stop is None else stop + 1
    sequence_bounds = indexed.document_indices[start:last_bound]
    first = int(sequence_bounds[0])
    last = int(sequence_bounds[-1])
    token_bounds = bounds_of(indexed.sequence_lengths[first:last])
    tokens: Integers = np.diff(token_bounds[sequence_bounds - first])
    return tokens


_NOTHING = np.empty(0, np.uint8)


def shuffle_keys(seed: int, unit: int, numbers: NDArray[np.int64]) -> NDArray[np.uint64]:
    """A keyed hash of each document, by which documents are sorted: SplitMix64 rounds over (seed,
    unit, document).
    """
    units = np.full(len(numbers), unit, np.uint64)
    with np.errstate(over="ignore"):
        state = np.full(len(numbers), seed, np.uint64)
        for word in (units, numbers.astype(np.uint64)):
            state = mix(state + GOLDEN + word)
    return state


def permuted(batch: Tokens, order: NDArray[np.int64]) -> Tokens:
    """The documents in another order."""
    tokens = np.ascontiguousarray(batch.tokens)
    sizes = batch.document_tokens * tokens.itemsize
    bounds = bounds_of(sizes)
    total = int(bounds[-1])
    # Addresses go to a kernel, which looks no further.
    if total != tokens.nbytes or len(order) != len(sizes):
        raise ConvertError(f"documents of {total} bytes are to be cut out of {tokens.nbytes}")
    starts = bounds[:-1]
    new_sizes = sizes[order]
    new_starts = bounds_of(new_sizes)[:-1]
    new_tokens = np.empty_like(tokens)
    source = address_of(tokens.view(np.uint8))
    target = address_of(new_tokens.view(np.uint8))
    copy_bytes(_NOTHING, source + starts[order], new_sizes, target + new_starts)
    num_sequences = batch.documents[order]
    first_sequences = bounds_of(batch.documents)[:-1]
    sequences = ragged(first_sequences[order], num_sequences)
    return Tokens(
        tokens=new_tokens,
        lengths=batch.lengths[sequences],
        documents=num_sequences,
        modes=None if batch.modes is None else batch.modes[sequences],
        origins=None if batch.origins is None else batch.origins.take(order),
    )


def ragged(starts: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """starts[0], starts[0] + 1, ... (counts[0] of them), then those of starts[1], and so on."""
    bounds = bounds_of(counts)
    total = int(bounds[-1])
    # What a number of the result is more than its place in it.
    shifts = starts - bounds[:-1]
    return np.repeat(shifts, counts) + np.arange(total)


SideRows = dict[str, NDArray[np.uint64]]


def row_names(options: ConvertOptions) -> list[str]:
    """The rows of every `.side` file of a conversion, in their order; none: there are no files."""
    names = []
    if options.shuffle_seed is not None:
        names.append("shuffle_key")
    if options.dedup:
        names += ["number", "hash_low", "hash_high"]
    return names


def side_name(segment: str) -> str:
    """The name of a segment's file."""
    return f"{segment}.side"


def save_side(job: Job, segment: str, rows: SideRows) -> None:
    """Write what was asked for of a segment's documents, if anything was."""
    names = row_names(job.options)
    if not names:
        return
    in_order = [rows[name].astype("<u8", copy=False) for name in names]
    url = join_url(job.work, side_name(segment))
    save_bytes(url, np.stack(in_order).tobytes(), job.storage)


def read_side(job: Job, name: str, documents: int) -> SideRows:
    """The rows of a file, each uint64 [documents]; mapped where it is local."""
    values = _stored_values(join_url(job.work, name), job.storage)
    rows = values.reshape(-1, documents)
    return dict(zip(row_names(job.options), rows, strict=True))


def _stored_values(url: str, storage: StorageConfig) -> NDArray[np.uint64]:
    store, key = open_store(url, storage)
    path = store.local_path(key)
    if path is not None:
        # Mapped, since a bucket needs a stretch of every file.
        return np.memmap(path, "<u8", "r")
    return load_bytes(url, storage).view("<u8")
