"""What goes into which shard, and one shard written.

The plan is a function of the parts and the options, made before a token is moved, so that every
shard can be written by any worker.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import xxhash

from streammega.config import StorageConfig
from streammega.convert.digests import digest_of_json
from streammega.convert.documents import bounds_of
from streammega.convert.job import Job, UnitRecord, load_json, save_json
from streammega.convert.read.inputs import Input
from streammega.convert.read.megatron import dataset_name
from streammega.convert.tokenize.encode import eod_of
from streammega.convert.write.copy import copy_in_order, copy_shuffled
from streammega.convert.write.destination import Destination
from streammega.convert.write.document_order import (
    DocumentSet,
    Integers,
    OrderedDocuments,
    row_names,
    side_name,
)
from streammega.convert.write.packing import PackCounts, copy_packed
from streammega.dataset.indexed import IndexedDataset
from streammega.dataset.manifest import ShardEntry
from streammega.dataset.provenance import (
    ENDING,
    DocumentOrigins,
    ProvenanceWriter,
    concat_origins,
    open_provenance,
)
from streammega.dataset.shard import shard_name
from streammega.dataset.writer import IndexedDatasetWriter
from streammega.errors import ConvertError
from streammega.storage import join_url, parent_url, save_bytes
from streammega.storage.backends.obstore_writer import sized_for
from streammega.storage.progress import Progress

Place = tuple[int, int]
"""(portion, document of it) in the final order."""


@dataclass(frozen=True, kw_only=True)
class ShardLayout:
    """What goes into the shards. bounds: for each shard where it begins, (portion, document of it),
    and where the last ends.

    A portion is a part, or with `buckets` one of so many ranges of shuffle keys.
    """

    parts: list[DocumentSet]
    dtype: str
    tokens: int
    """Of all parts, duplicates too."""
    multimodal: bool
    buckets: int
    bounds: list[Place]
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


def plan_bounds(documents: OrderedDocuments, itemsize: int, shard_bytes: int | None) -> list[Place]:
    """Where shards begin, and where the last one ends: as many documents as `shard_bytes` hold, at
    least one.
    """
    bounds = [(0, 0)]
    end = (documents.num_portions, 0)
    if shard_bytes is None:
        return [*bounds, end]
    room = shard_bytes
    for portion in range(documents.num_portions):
        parts, chosen = documents.order(portion)
        ends = np.cumsum(documents.sizes(parts, chosen) * itemsize)
        first = 0
        while first < len(ends):
            bytes_before = int(ends[first - 1]) if first else 0
            last = int(np.searchsorted(ends, bytes_before + room, "right"))
            # A shard that is still empty takes a document that is larger than it.
            least = first + 1 if room == shard_bytes else first
            last = max(last, least)
            if last < len(ends):
                bounds.append((portion, last))
                room = shard_bytes
            else:
                room -= int(ends[-1]) - bytes_before
            first = last
    return [*bounds, end]


def number_sequences(documents: OrderedDocuments, bounds: Sequence[Place]) -> list[int]:
    """The number of the first sequence of each shard, counted over all shards."""
    first_sequences = [0]
    later_shards = deque(bounds[1:-1])
    sequences_before = 0
    for portion in range(documents.num_portions):
        if not later_shards:
            break
        parts, chosen = documents.order(portion)
        sequence_bounds = bounds_of(documents.sequences(parts, chosen))
        while later_shards and later_shards[0][0] == portion:
            _, document = later_shards.popleft()
            first_sequences.append(sequences_before + int(sequence_bounds[document]))
        sequences_before += int(sequence_bounds[-1])
    return first_sequences


BUCKETS_IN_MEMORY = 8
"""A bucket is an eighth of the memory, so that the shards which are written at once fit it twice
over (`MAX_SHUFFLED_SHARDS`).
"""


def parts_of_datasets(inputs: Sequence[Input], storage: StorageConfig) -> list[DocumentSet]:
    """Inputs that pass as they are."""
    parts = []
    for item in inputs:
        name = dataset_name(item.path)
        indexed = IndexedDataset(name, storage)
        documents = len(indexed.document_indices) - 1
        parts.append(DocumentSet(dataset=name, documents=documents, is_input=True))
    return parts


def parts_of_units(job: Job, records: Sequence[UnitRecord]) -> list[DocumentSet]:
    """The segments that units made."""
    has_side = bool(row_names(job.options))
    parts = []
    for unit, record in enumerate(records):
        for segment in record.segments:
            part = DocumentSet(
                dataset=join_url(job.work, segment.name),
                documents=segment.documents,
                side=side_name(segment.name) if has_side else "",
                unit=unit,
            )
            parts.append(part)
    return parts


def plan_shards(
    job: Job,
    parts: list[DocumentSet],
    sources: Sequence[str],
    destination: Destination,
    memory_bytes: int,
) -> ShardLayout:
    """What goes into which shard, under plain names.

    parts: with a document each. sources: digests of what they were made of. Raises ConvertError
    where some parts have modes and others have none.
    """
    options = job.options
    dtypes = []
    has_modes = set()
    tokens = 0
    for part in parts:
        indexed = part.open(job)
        dtypes.append(indexed.dtype)
        has_modes.add(indexed.sequence_modes is not None)
        tokens += int(indexed.sequence_lengths.sum(dtype=np.int64))
    if len(has_modes) > 1:
        raise ConvertError("some inputs have modes and others have none; convert them apart")
    dtype = np.dtype(options.dtype or np.result_type(*dtypes))
    buckets = 0
    if options.shuffle_seed is not None:
        buckets = max(1, -(-tokens * dtype.itemsize * BUCKETS_IN_MEMORY // memory_bytes))
    documents = OrderedDocuments(job, parts, buckets)
    bounds = plan_bounds(documents, dtype.itemsize, options.shard_bytes)
    num_shards = len(bounds) - 1
    names = [destination.stem]
    if options.shard_bytes is not None:
        names = [shard_name(destination.stem, number, num_shards) for number in range(num_shards)]
    # Where files can be renamed, they are written to the work folder first.
    folder = parent_url(destination.prefix) if destination.is_remote else join_url(job.work, "out")
    first_sequences = [0] * num_shards
    if options.kind == "tar":
        first_sequences = number_sequences(documents, bounds)
    layout = ShardLayout(
        parts=parts,
        dtype=str(dtype),
        tokens=tokens,
        multimodal=has_modes == {True},
        buckets=buckets,
        bounds=bounds,
        names=names,
        targets=[join_url(folder, name) for name in names],
        first_sequences=first_sequences,
    )
    digest = digest_of_json([options.digest(), asdict(layout), list(sources)])
    return replace(layout, digest=digest)


def read_shard(job: Job, layout: ShardLayout, number: int) -> ShardEntry | None:
    """What was written of a shard, if it is done and belongs to this layout."""
    stored = load_json(_record_url(job.work, number), job.storage)
    if stored is None or stored.get("digest") != layout.digest:
        return None
    return ShardEntry(**stored["shard"])


def read_provenance_checksums(
    work: str, layout: ShardLayout, storage: StorageConfig
) -> tuple[list[str], int]:
    """The checksums of the origins of all shards, and how many documents have an id.

    Raises ConvertError where a record is gone.
    """
    checksums = []
    num_ids = 0
    for number in range(layout.num_shards):
        record = load_json(_record_url(work, number), storage)
        if record is None or "origins" not in record:
            raise ConvertError(
                f"{_record_url(work, number)}: is gone; run the same command again with --restart"
            )
        checksums.append(str(record["origins"]))
        num_ids += int(record["ids"])
    return checksums, num_ids


def read_pack_counts(job: Job, number: int) -> PackCounts:
    """What packing made of the documents of a shard that is done."""
    stored = load_json(_record_url(job.work, number), job.storage)
    assert stored is not None
    return PackCounts(**stored["packing"])


def write_shard(
    job: Job, layout: ShardLayout, number: int, progress: Progress, threads: int = 1
) -> ShardEntry:
    """Write one shard's tokens to its target and its `.idx` to the work folder, then its record.

    threads: that may copy into it at once.
    """
    itemsize = np.dtype(layout.dtype).itemsize
    documents = OrderedDocuments(job, layout.parts, layout.buckets)
    counts = PackCounts()
    placed: list[tuple[Integers, Integers]] = []
    with _writer(job, layout, number, documents) as writer:
        copied = _copy_documents(job, documents, layout, number, writer, threads, counts, placed)
        # Closed before the writer, whatever happens: threads may be writing into its file.
        with closing(copied):
            for written in copied:
                progress(written, written // itemsize)
    shard = ShardEntry(
        name=layout.names[number],
        documents=writer.num_documents,
        sequences=writer.num_sequences,
        tokens=writer.num_tokens,
        bytes=writer.stored.size,
        checksums=writer.stored.checksums,
        index_bytes=writer.index.size,
        index_checksums=writer.index.checksums,
    )
    record: dict[str, Any] = {"digest": layout.digest, "shard": asdict(shard)}
    if job.options.pack is not None:
        record["packing"] = asdict(counts)
    if job.options.origins:
        portions = _documents_of_portions(documents, layout, number)
        in_order = portions if job.options.pack is None else placed
        record["origins"], record["ids"] = _write_origins(
            job, documents, in_order, layout.names[number]
        )
    save_json(_record_url(job.work, number), record, job.storage)
    return shard


def _writer(
    job: Job, layout: ShardLayout, number: int, documents: OrderedDocuments
) -> IndexedDatasetWriter:
    options = job.options
    return IndexedDatasetWriter(
        layout.targets[number],
        np.dtype(layout.dtype),
        layout.multimodal,
        sized_for(job.storage, _expected_bytes(job, layout, documents)),
        kind=options.kind,
        level=options.level,
        frame_bytes=options.frame_bytes,
        index_prefix=join_url(job.work, f"out/{layout.names[number]}"),
        first_sequence=layout.first_sequences[number],
    )


def _expected_bytes(job: Job, layout: ShardLayout, documents: OrderedDocuments) -> int:
    shard_bytes = job.options.shard_bytes
    if shard_bytes is None:
        dtype = np.dtype(layout.dtype)
        # Twice as much where bins may be half empty.
        packed = 1 if job.options.pack is None else 2
        return documents.num_tokens * dtype.itemsize * packed
    # Half as much again: one document may be larger than a shard, and a tar has headers.
    return shard_bytes * 3 // 2


def _copy_documents(
    job: Job,
    documents: OrderedDocuments,
    layout: ShardLayout,
    number: int,
    writer: IndexedDatasetWriter,
    threads: int,
    counts: PackCounts,
    placed: list[tuple[Integers, Integers]],
) -> Generator[int, None, None]:
    """Copy the documents of a shard. Yields bytes as they are written. Where they are packed, adds
    to `counts`, and to `placed` what is stored in which order, as portions.
    """
    portions = _documents_of_portions(documents, layout, number)
    if job.options.pack is not None:
        pad_id = eod_of(job) or 0
        for portion, written in copy_packed(
            documents, portions, job.options, pad_id, writer, counts
        ):
            if job.options.origins:
                placed.append(portion)
            yield written
        return
    if not layout.buckets:
        # A portion is a part, so all documents of one are of the same.
        yield from copy_in_order(documents, portions, writer, threads)
        return
    for parts, chosen in portions:
        yield from copy_shuffled(documents, parts, chosen, writer)


def _documents_of_portions(
    documents: OrderedDocuments, layout: ShardLayout, number: int
) -> Iterator[tuple[Integers, Integers]]:
    """(part, document of it) of a shard's documents, a portion at a time."""
    first_portion, first_document = layout.bounds[number]
    last_portion, end_in_last_portion = layout.bounds[number + 1]
    # The last shard ends at the beginning of a portion that is none.
    for portion in range(first_portion, min(last_portion + 1, documents.num_portions)):
        parts, chosen = documents.order(portion)
        start = first_document if portion == first_portion else 0
        stop = end_in_last_portion if portion == last_portion else len(chosen)
        if stop > start:
            yield parts[start:stop], chosen[start:stop]


def _record_url(work: str, number: int) -> str:
    return join_url(work, f"shard-{number:06d}.json")


def _write_origins(
    job: Job,
    documents: OrderedDocuments,
    portions: Iterable[tuple[Integers, Integers]],
    name: str,
) -> tuple[str, int]:
    """Write the origins of a shard to the work folder, from where they are published; returns their
    xxh3-128, and how many of them have an id. portions: (part, document of it) of its documents, in
    their order.
    """
    writer = ProvenanceWriter()
    for parts, chosen in portions:
        writer.add(_origins_of(job, documents, parts, chosen))
    stored = writer.finish()
    save_bytes(join_url(job.work, f"out/{name}{ENDING}"), stored, job.storage)
    return xxhash.xxh3_128_hexdigest(stored), writer.num_ids


def _origins_of(
    job: Job, documents: OrderedDocuments, parts: Integers, chosen: Integers
) -> DocumentOrigins:
    """The origins of documents of some parts, in the order asked."""
    found = []
    rows = []
    for part in np.unique(parts):
        of_part = np.flatnonzero(parts == part)
        prefix = documents.name(int(part))
        stored = open_provenance(prefix, job.storage)
        if stored is None:
            raise ConvertError(
                f"{prefix}{ENDING}: is gone; run the same command again with --restart"
            )
        first = int(chosen[of_part].min())
        stretch = stored.between(first, int(chosen[of_part].max()) + 1)
        found.append(stretch.take(chosen[of_part] - first))
        rows.append(of_part)
    in_order = np.argsort(np.concatenate(rows))
    return concat_origins(found).take(in_order)
