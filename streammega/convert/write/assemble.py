"""The second half of a conversion: documents of segments (or of datasets as they are) laid into
shards.

Everything here is a function of the parts and the options: which document comes where is known
before a token is moved, so every shard can be written by any worker.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streammega.convert.read.pairs import document_runs
from streammega.convert.write.units import Job, Progress, load_json, ragged, save_json
from streammega.dataset.indexed import IndexedDataset
from streammega.dataset.manifest import Shard
from streammega.dataset.writer import IndexedDatasetWriter
from streammega.errors import ConvertError
from streammega.kernels.plan import copy_bytes
from streammega.storage import join_url, open_store, save_bytes
from streammega.storage.backends.local import LocalStore
from streammega.storage.parts import sized_for
from streammega.storage.store import Bytes, address_of

COPY_BYTES = 1 << 20
"""Copied at a time: it stays in the processor's cache while its checksum is taken."""
CHUNK_BYTES = 32 << 20
_NOTHING = np.empty(0, np.uint8)
Integers = NDArray[np.int64]


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


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What goes into the shards. bounds: for each shard where it begins, (block, document of it),
    and where the last ends.

    A block is a part, or with `buckets` one of so many ranges of shuffle keys.
    """

    parts: list[DocumentSet]
    dtype: str
    multimodal: bool
    buckets: int
    bounds: list[tuple[int, int]]
    names: list[str]
    targets: list[str]
    """Where the tokens of each shard are written: in the work folder, or under their final names
    where nothing can be renamed.
    """
    first_sequences: list[int]
    """Of each shard, the number of its first sequence in the dataset, where members are named by it
    (tars); else 0.
    """
    digest: str = ""

    @property
    def num_shards(self) -> int:
        """How many there are."""
        return len(self.bounds) - 1


class OrderedDocuments:
    """The documents of some parts in their final order, block by block."""

    def __init__(self, job: Job, parts: Sequence[DocumentSet], buckets: int) -> None:
        self._job = job
        self._parts = parts
        self._buckets = buckets
        self._opened: dict[int, IndexedDataset] = {}

    @property
    def num_blocks(self) -> int:
        """Parts, or buckets."""
        return self._buckets or len(self._parts)

    def dataset(self, part: int) -> IndexedDataset:
        """A part, opened; only the last few are kept so."""
        if part not in self._opened:
            while len(self._opened) >= 64 and not self._buckets:
                self._opened.pop(next(iter(self._opened)))
            self._opened[part] = IndexedDataset(self._parts[part].dataset, self._job.storage)
        return self._opened[part]

    @property
    def num_tokens(self) -> int:
        """In all parts, kept or not."""
        return sum(
            int(self.dataset(part).sequence_lengths.sum(dtype=np.int64))
            for part in range(len(self._parts))
        )

    def order(self, block: int) -> tuple[Integers, Integers]:
        """(part, document of it) of every document of a block, in order."""
        if not self._buckets:
            all_of_it = np.arange(self._parts[block].documents)
            kept = self._keep(block)
            own = all_of_it if kept is None else all_of_it[kept]
            return np.full(len(own), block), own
        low, high = self._key_range(block)
        parts = []
        documents = []
        keys = []
        for part in range(len(self._parts)):
            by_key = self._keys[part]
            first = int(np.searchsorted(by_key, low))
            last = len(by_key) if high is None else int(np.searchsorted(by_key, high))
            chosen = np.arange(first, last)
            if (keep := self._keep(part)) is not None:
                chosen = chosen[keep[first:last]]
            parts.append(np.full(len(chosen), part))
            documents.append(chosen)
            keys.append(by_key[chosen])
        order = np.argsort(np.concatenate(keys), kind="stable")
        return np.concatenate(parts)[order], np.concatenate(documents)[order]

    def sizes(self, parts: Integers, documents: Integers) -> Integers:
        """Tokens of documents; of each part, only the stretch that holds them is looked at."""
        found = np.empty(len(documents), np.int64)
        for part in np.unique(parts):
            own = np.flatnonzero(parts == part)
            low = int(documents[own].min())
            high = int(documents[own].max()) + 1
            found[own] = document_tokens(self.dataset(int(part)), low, high)[documents[own] - low]
        return found

    def sequences(self, parts: Integers, documents: Integers) -> Integers:
        """How many sequences documents have."""
        found = np.empty(len(documents), np.int64)
        for part in np.unique(parts):
            own = np.flatnonzero(parts == part)
            bounds = self.dataset(int(part)).document_indices
            found[own] = bounds[documents[own] + 1] - bounds[documents[own]]
        return found

    def _key_range(self, block: int) -> tuple[np.uint64, np.uint64 | None]:
        step = (1 << 64) // self._buckets
        return np.uint64(step * block), None if block == self._buckets - 1 else np.uint64(
            step * (block + 1)
        )

    @cached_property
    def _keys(self) -> list[NDArray[np.uint64]]:
        return [side_arrays(self._job, part)[0] for part in self._parts]

    def _keep(self, part: int) -> NDArray[np.bool_] | None:
        name = self._parts[part].keep
        if not name:
            return None
        store, key = open_store(join_url(self._job.work, name), self._job.storage)
        info = store.info(key)
        packed = store.read_ranges(key, [0], [info.size], info.etag)[0]
        return np.unpackbits(
            np.frombuffer(packed, np.uint8), count=self._parts[part].documents
        ).astype(np.bool_)


def document_tokens(indexed: IndexedDataset, start: int = 0, stop: int | None = None) -> Integers:
    """Tokens of each of the documents [start, stop), int64."""
    bounds = indexed.document_indices[start : None if stop is None else stop + 1]
    lengths = indexed.sequence_lengths[int(bounds[0]) : int(bounds[-1])]
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
    tokens: Integers = np.diff(ends[bounds - bounds[0]])
    return tokens


def side_arrays(job: Job, part: DocumentSet) -> NDArray[np.uint64]:
    """What a unit noted of each document of a segment, uint64 [arrays, documents]; mapped where it
    is local.
    """
    store, key = open_store(join_url(job.work, part.side), job.storage)
    if isinstance(store, LocalStore):
        return np.memmap(key, "<u8", "r").reshape(-1, part.documents)
    info = store.info(key)
    data = store.read_ranges(key, [0], [info.size], info.etag)[0]
    return np.frombuffer(data, "<u8").reshape(-1, part.documents)


def plan_bounds(
    documents: OrderedDocuments, itemsize: int, shard_bytes: int | None
) -> list[tuple[int, int]]:
    """Where shards begin, and where the last one ends: as many documents as `shard_bytes` hold, at
    least one.
    """
    bounds = [(0, 0)]
    room = shard_bytes or 0
    if shard_bytes is not None:
        for block in range(documents.num_blocks):
            sizes = documents.sizes(*documents.order(block)) * itemsize
            ends = np.cumsum(sizes)
            at = 0
            while at < len(sizes):
                before = int(ends[at - 1]) if at else 0
                fits = int(np.searchsorted(ends, before + room, "right"))
                fits = max(fits, at + 1) if room == shard_bytes else max(fits, at)
                if fits < len(sizes):
                    bounds.append((block, fits))
                    room = shard_bytes
                else:
                    room -= int(ends[-1]) - before
                at = fits
    bounds.append((documents.num_blocks, 0))
    return bounds


def number_sequences(documents: OrderedDocuments, bounds: Sequence[tuple[int, int]]) -> list[int]:
    """The number of the first sequence of each shard, counted over all shards."""
    firsts = [0]
    before = 0
    left = list(bounds[1:-1])
    for block in range(documents.num_blocks if left else 0):
        ends = np.concatenate(
            [np.zeros(1, np.int64), np.cumsum(documents.sequences(*documents.order(block)))]
        )
        while left and left[0][0] == block:
            firsts.append(before + int(ends[left.pop(0)[1]]))
        before += int(ends[-1])
    return firsts


def remove_duplicates(
    job: Job, parts: list[DocumentSet], memory_bytes: int
) -> tuple[list[DocumentSet], int]:
    """The parts with a `.keep` file each, and how many documents are not kept: all but the first of
    equal ones.

    Hashes are compared in as many passes as memory asks for. The first is that of the smallest
    (part's unit, document).
    """
    total = sum(part.documents for part in parts)
    passes = max(1, -(-total * 64 // memory_bytes))
    keeps = [np.zeros(part.documents, np.bool_) for part in parts]
    for number in range(passes):
        rows = []
        where = []
        for index, part in enumerate(parts):
            side = side_arrays(job, part)[-3:]
            chosen = np.flatnonzero(side[1] % np.uint64(passes) == number)
            units_of = np.full(len(chosen), part.unit, np.uint64)
            rows.append(np.stack([side[1][chosen], side[2][chosen], units_of, side[0][chosen]]))
            where.append(np.stack([np.full(len(chosen), index), chosen]))
        low, high, units, numbers = np.concatenate(rows, axis=1)
        order = np.lexsort((numbers, units, high, low))
        first = np.ones(len(order), np.bool_)
        first[1:] = (low[order][1:] != low[order][:-1]) | (high[order][1:] != high[order][:-1])
        kept = np.concatenate(where, axis=1)[:, order[first]]
        for index in range(len(parts)):
            keeps[index][kept[1][kept[0] == index]] = True
    named = []
    for part, keep in zip(parts, keeps, strict=True):
        name = part.side.removesuffix(".side") + ".keep"
        save_bytes(join_url(job.work, name), np.packbits(keep).tobytes(), job.storage)
        named.append(replace(part, keep=name))
    return named, total - int(sum(keep.sum() for keep in keeps))


def layout_digest(job: Job, layout: Layout, sources: Sequence[str]) -> str:
    """Changes with everything that a shard depends on; `sources`: digests of what the parts were
    made of.
    """
    what = json.dumps([job.options.digest(), asdict(layout), list(sources)], sort_keys=True)
    return hashlib.blake2b(what.encode(), digest_size=12).hexdigest()


def read_shard(job: Job, layout: Layout, number: int) -> Shard | None:
    """What was written of a shard, if it is done and belongs to this layout."""
    found = load_json(join_url(job.work, f"shard-{number:06d}.json"), job.storage)
    return (
        Shard(**found["shard"])
        if found is not None and found.get("digest") == layout.digest
        else None
    )


def write_shard(job: Job, layout: Layout, number: int, progress: Progress) -> Shard:
    """Write one shard's tokens to its target and its `.idx` to the work folder, then its record."""
    options = job.options
    dtype = np.dtype(layout.dtype)
    documents = OrderedDocuments(job, layout.parts, layout.buckets)
    index = join_url(job.work, f"out/{layout.names[number]}")
    storage = sized_for(
        job.storage,
        options.shard_bytes * 3 // 2
        if options.shard_bytes
        else documents.num_tokens * dtype.itemsize,
    )
    writer = IndexedDatasetWriter(
        layout.targets[number], dtype, layout.multimodal, storage, kind=options.kind, level=options.level,
        frame_bytes=options.frame_bytes, index_prefix=index, first_sequence=layout.first_sequences[number],
    )  # fmt: skip
    with writer:
        for parts, chosen in _chunks(
            documents, layout.bounds[number], layout.bounds[number + 1], dtype.itemsize
        ):
            copied = (_copy_bucket if layout.buckets else _copy_runs)(
                documents, parts, chosen, writer
            )
            for size in copied:
                progress(size, size // dtype.itemsize)
    shard = Shard(
        name=layout.names[number],
        documents=writer.num_documents,
        sequences=writer.num_sequences,
        tokens=writer.num_tokens,
        bytes=writer.stored.size,
        checksums=writer.stored.checksums,
        index_bytes=writer.index.size,
        index_checksums=writer.index.checksums,
    )
    save_json(
        join_url(job.work, f"shard-{number:06d}.json"),
        {"digest": layout.digest, "shard": asdict(shard)},
        job.storage,
    )
    return shard


def _chunks(
    documents: OrderedDocuments, start: tuple[int, int], stop: tuple[int, int], itemsize: int
) -> Iterator[tuple[Integers, Integers]]:
    """(part, document) of the documents between two bounds; with buckets, at most a bucket at a
    time.
    """
    for block in range(start[0], min(stop[0] + 1, documents.num_blocks)):
        parts, chosen = documents.order(block)
        low = start[1] if block == start[0] else 0
        high = stop[1] if block == stop[0] else len(chosen)
        if high > low:
            yield parts[low:high], chosen[low:high]


def _copy_runs(
    documents: OrderedDocuments, parts: Integers, chosen: Integers, writer: IndexedDatasetWriter
) -> Iterator[int]:
    """Documents of one part in their order: what lies end to end is copied as it is.

    Yields bytes as they are written.
    """
    indexed = documents.dataset(int(parts[0]))
    cuts = np.flatnonzero(np.diff(chosen) != 1) + 1
    for low, high in zip(
        np.concatenate([[0], cuts]), np.concatenate([cuts, [len(chosen)]]), strict=True
    ):
        for first, last in document_runs(
            indexed, int(chosen[low]), int(chosen[high - 1]) + 1, CHUNK_BYTES
        ):
            yield _copy_run(indexed, first, last, writer)


def _copy_run(indexed: IndexedDataset, start: int, stop: int, writer: IndexedDatasetWriter) -> int:
    bounds = indexed.document_indices
    itemsize = indexed.dtype.itemsize
    first = int(bounds[start])
    last = int(bounds[stop])
    lengths = indexed.sequence_lengths[first:last]
    modes = indexed.sequence_modes
    sizes = lengths.astype(np.int64) * itemsize
    offsets = indexed.sequence_offsets[first:last]
    own_modes = None if modes is None else modes[first:last]
    pieces: Iterator[Bytes]
    if len(offsets) == 0 or (offsets[1:] == offsets[:-1] + sizes[:-1]).all():
        pieces = _stream(indexed, int(offsets[0]) if len(offsets) else 0, int(sizes.sum()))
    else:
        spans = zip(offsets.tolist(), sizes.tolist(), strict=True)
        pieces = (piece for at, size in spans for piece in _stream(indexed, at, size))
    out = writer.dtype
    if out != indexed.dtype:
        pieces = (
            _cast(piece, indexed.dtype, out, indexed.prefix).view(np.uint8) for piece in pieces
        )
    writer.add_stream(
        (piece.data for piece in pieces), lengths, np.diff(bounds[start : stop + 1]), own_modes
    )
    return int(sizes.sum()) // itemsize * out.itemsize


def _stream(indexed: IndexedDataset, start: int, size: int) -> Iterator[Bytes]:
    """Bytes of a dataset's tokens, a little at a time; local files are read, not mapped, so that
    memory stays flat.
    """
    store = indexed.store
    key = indexed.bin_key
    if isinstance(store, LocalStore):
        buffer = np.empty(min(COPY_BYTES, size), np.uint8)
        with open(key, "rb", buffering=0) as file:
            file.seek(start)
            while size:
                got = file.readinto(buffer.data[: min(len(buffer), size)])
                if not got:
                    raise ConvertError(f"{key}: ends before its .idx says; copy it again")
                yield buffer[:got]
                size -= got
        return
    for at in range(start, start + size, CHUNK_BYTES):
        starts = list(range(at, min(at + CHUNK_BYTES, start + size), CHUNK_BYTES // 4))
        stops = [min(low + CHUNK_BYTES // 4, start + size) for low in starts]
        for body in store.read_ranges(key, starts, stops, indexed.bin_info.etag):
            yield np.frombuffer(body, np.uint8)


def _cast(data: Bytes, dtype: np.dtype[Any], out: np.dtype[Any], name: str) -> NDArray[Any]:
    ids = data.view(dtype.newbyteorder("<"))
    if len(ids) and (int(ids.min()) < np.iinfo(out).min or int(ids.max()) > np.iinfo(out).max):
        raise ConvertError(
            f"{name}: holds ids from {ids.min()} to {ids.max()}, which {out} cannot hold; choose a wider --dtype"
        )
    return ids.astype(out)


def _copy_bucket(
    documents: OrderedDocuments, parts: Integers, chosen: Integers, writer: IndexedDatasetWriter
) -> Iterator[int]:
    """Documents of many parts in a shuffled order: each part's bytes are read at once, then
    gathered. Yields as `_copy_runs`.
    """
    count = len(chosen)
    out = writer.dtype
    address, sizes, sequences = (np.empty(count, np.int64) for _ in range(3))
    firsts = np.empty(count, np.int64)
    held: list[Bytes] = []
    lengths = []
    modes = []
    before = 0
    for part in np.unique(parts):
        indexed = documents.dataset(int(part))
        own = np.flatnonzero(parts == part)
        bounds = indexed.document_indices
        low = int(chosen[own].min())
        high = int(chosen[own].max()) + 1
        first = int(bounds[low])
        last = int(bounds[high])
        start = int(indexed.sequence_offsets[first]) if last > first else 0
        own_lengths = np.asarray(indexed.sequence_lengths[first:last])
        pieces = list(
            _stream_copy(
                indexed, start, int(own_lengths.sum(dtype=np.int64)) * indexed.dtype.itemsize
            )
        )
        data = np.concatenate(pieces) if pieces else _NOTHING
        data = (
            data
            if indexed.dtype == out
            else _cast(data, indexed.dtype, out, indexed.prefix).view(np.uint8)
        )
        held.append(data)
        ends = (
            np.concatenate([np.zeros(1, np.int64), np.cumsum(own_lengths, dtype=np.int64)])
            * out.itemsize
        )
        if int(ends[-1]) != len(data):  # addresses go to a kernel, which looks no further
            raise ConvertError(
                f"{indexed.prefix}: {len(data)} bytes were read of {int(ends[-1])}; convert again with --restart"
            )
        begin = bounds[chosen[own]] - first
        end = bounds[chosen[own] + 1] - first
        address[own], sizes[own] = address_of(data) + ends[begin], ends[end] - ends[begin]
        firsts[own], sequences[own] = before + begin, end - begin
        lengths.append(own_lengths)
        if indexed.sequence_modes is not None:
            modes.append(np.asarray(indexed.sequence_modes[first:last]))
        before += last - first
    all_lengths = np.concatenate(lengths)
    all_modes = np.concatenate(modes) if modes else None
    ends = np.cumsum(sizes)
    low = 0
    while low < count:
        already = int(ends[low - 1]) if low else 0
        high = max(low + 1, int(np.searchsorted(ends, already + CHUNK_BYTES, "right")))
        buffer = np.empty(int(ends[high - 1]) - already, np.uint8)
        copy_bytes(
            _NOTHING,
            address[low:high],
            sizes[low:high],
            address_of(buffer) + ends[low:high] - sizes[low:high] - already,
        )
        which = ragged(firsts[low:high], sequences[low:high])
        own_modes = None if all_modes is None else all_modes[which]
        writer.add_documents(buffer.data, all_lengths[which], sequences[low:high], own_modes)
        yield len(buffer)
        low = high


def _stream_copy(indexed: IndexedDataset, start: int, size: int) -> Iterator[Bytes]:
    for piece in _stream(indexed, start, size):
        yield piece.copy()
