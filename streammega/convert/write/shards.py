"""What goes into which shard, and one shard written.

The plan is a function of the parts and the options, made before a token is moved, so that every
shard can be written by any worker.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace

import numpy as np
import xxhash

from streammega.config import StorageConfig
from streammega.convert.documents import offsets_of
from streammega.convert.job import ConvertSegment, Job
from streammega.convert.options import digest_of_json
from streammega.convert.read.megatron import dataset_name
from streammega.convert.read.source import Input
from streammega.convert.tokenize.encode import eod_of
from streammega.convert.write.columns import stretches_of, write_column
from streammega.convert.write.copy import copy_in_order, copy_shuffled
from streammega.convert.write.destination import Destination
from streammega.convert.write.document_order import DocumentOrder, Portion
from streammega.convert.write.packing import PackingStats, write_packed
from streammega.dataset.checksums import ChecksummedWriter
from streammega.dataset.columns import ColumnFile, StoredColumn, column_name
from streammega.dataset.indexed import IndexedDataset
from streammega.dataset.manifest import Shard
from streammega.dataset.names import SUFFIXES, shard_name
from streammega.dataset.provenance import (
    ENDING,
    ProvenanceWriter,
    concat_origins,
    open_provenance,
)
from streammega.dataset.writer import IndexedDatasetWriter
from streammega.errors import ConvertError
from streammega.storage import open_store
from streammega.storage.backends.remote import with_part_bytes_for
from streammega.storage.progress import Progress
from streammega.storage.store import atomic_writer, write_again

Place = tuple[int, int]
"""(portion, document of it) in the final order."""


@dataclass(frozen=True, kw_only=True)
class ShardLayout:
    """What goes into the shards. bounds: for each shard where it begins, (portion, document of it),
    and where the last ends.

    A portion is a part, or with `buckets` one of so many ranges of shuffle keys.
    """

    parts: list[ConvertSegment]
    dtype: str
    tokens: int
    """Tokens of all parts, without duplicates."""
    multimodal: bool
    buckets: int
    bounds: list[Place]
    names: list[str]
    first_sequences: list[int]
    """The number of the first sequence of each shard, counted over the dataset, by which members of
    tars are named; 0 in other formats.
    """
    digest: str = ""
    targets: list[str] = field(default_factory=list)
    """Where the tokens of each shard are written: in the work folder, or under their final names
    where nothing can be renamed. The publisher chooses.
    """

    def work_names(self) -> list[str]:
        """The prefix of each shard's files in the work folder, which no other layout has."""
        return [f"out-{self.digest}/{name}" for name in self.names]

    @property
    def num_shards(self) -> int:
        """How many there are."""
        return len(self.bounds) - 1


def plan_bounds(documents: DocumentOrder, itemsize: int, shard_bytes: int | None) -> list[Place]:
    """Where shards begin, and where the last one ends: as many documents as `shard_bytes` hold, at
    least one.
    """
    bounds = [(0, 0)]
    end = (documents.num_portions, 0)
    if shard_bytes is None:
        return [*bounds, end]
    room = shard_bytes
    for portion in range(documents.num_portions):
        ends = np.cumsum(documents.sizes(documents.order(portion)) * itemsize)
        first = 0
        while first < len(ends):
            bytes_before = int(ends[first - 1]) if first else 0
            last = int(np.searchsorted(ends, bytes_before + room, "right"))
            # A shard that is still empty takes a document that is larger than it.
            min_last = first + 1 if room == shard_bytes else first
            last = max(last, min_last)
            if last < len(ends):
                bounds.append((portion, last))
                room = shard_bytes
            else:
                room -= int(ends[-1]) - bytes_before
            first = last
    return [*bounds, end]


def number_sequences(documents: DocumentOrder, bounds: Sequence[Place]) -> list[int]:
    """The number of the first sequence of each shard, counted over all shards."""
    first_sequences = [0]
    later_shards = deque(bounds[1:-1])
    sequences_before = 0
    for portion in range(documents.num_portions):
        if not later_shards:
            break
        sequence_bounds = offsets_of(documents.sequences(documents.order(portion)))
        while later_shards and later_shards[0][0] == portion:
            _, document = later_shards.popleft()
            first_sequences.append(sequences_before + int(sequence_bounds[document]))
        sequences_before += int(sequence_bounds[-1])
    return first_sequences


BUCKETS_IN_MEMORY = 8
"""A bucket is an eighth of the memory, so that the shards which are written at once fit it twice
over (`MAX_SHUFFLED_SHARDS`).
"""


def segments_of_inputs(inputs: Sequence[Input], storage: StorageConfig) -> list[ConvertSegment]:
    """Inputs that pass as they are."""
    segments = []
    for item in inputs:
        name = dataset_name(item.path)
        indexed = IndexedDataset(name, storage)
        documents = len(indexed.document_indices) - 1
        segments.append(
            ConvertSegment(
                name=name,
                documents=documents,
                is_input=True,
                version=indexed.version,
                columns=item.columns,
            )
        )
    return segments


def plan_shards(
    job: Job,
    parts: list[ConvertSegment],
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
    if any(part.has_keep for part in parts):  # duplicates are not written
        kept = DocumentOrder(job, parts, buckets=0)
        sizes = [kept.sizes(kept.order(portion)).sum() for portion in range(kept.num_portions)]
        tokens = int(sum(sizes))
    documents = DocumentOrder(job, parts, buckets)
    bounds = plan_bounds(documents, dtype.itemsize, options.shard_bytes)
    num_shards = len(bounds) - 1
    names = [destination.stem]
    if options.shard_bytes is not None:
        names = [shard_name(destination.stem, number, num_shards) for number in range(num_shards)]
    first_sequences = [0] * num_shards
    if options.format == "tar":
        first_sequences = number_sequences(documents, bounds)
    layout = ShardLayout(
        parts=parts,
        dtype=str(dtype),
        tokens=tokens,
        multimodal=has_modes == {True},
        buckets=buckets,
        bounds=bounds,
        names=names,
        first_sequences=first_sequences,
    )
    digest = digest_of_json([options.digest(), asdict(layout), list(sources)])
    return replace(layout, digest=digest)


@dataclass(frozen=True, kw_only=True)
class ShardRecord:
    """What is noted in the work folder of a shard that is written.

    digest: that of its layout. files: those in the work folder, and their sizes. packing: what
    packing made of its documents. origins: the checksum of its provenance; ids: how many of its
    documents have an id. columns: the bytes and checksums of the object of each column, by its name.
    """

    digest: str
    shard: Shard
    files: dict[str, int]
    packing: PackingStats | None = None
    origins: str = ""
    ids: int = 0
    columns: Mapping[str, tuple[int, Sequence[str]]] = field(default_factory=dict)

    def sizes(self, suffix: str) -> dict[str, int]:
        """The bytes of all its files by their endings. suffix: that of the tokens."""
        names = {os.path.basename(name): size for name, size in self.files.items()}
        endings = {name.removeprefix(self.shard.name): size for name, size in names.items()}
        of_columns = {column_name("", name): size for name, (size, _) in self.columns.items()}
        return endings | of_columns | {suffix: self.shard.bytes}


def column_of_shards(column: StoredColumn, shards: Sequence[ShardRecord]) -> StoredColumn:
    """A column with its objects, which have the plain names of their shards."""
    files = []
    for record in shards:
        _, checksums = record.columns[column.name]
        name = column_name(record.shard.name, column.name)
        files.append(ColumnFile(name, checksums=checksums))
    return column._replace(files=files)


def read_shards(job: Job, layout: ShardLayout) -> dict[int, ShardRecord]:
    """The records of shards that are done and belong to this layout, by their numbers."""
    records = {}
    for number in range(layout.num_shards):
        stored = job.work_dir.read_record(_record_name(number))
        if stored is not None and stored.get("digest") == layout.digest:
            packing = stored.pop("packing")
            records[number] = ShardRecord(
                **stored | {"shard": Shard(**stored["shard"])},
                packing=None if packing is None else PackingStats(**packing),
            )
    return records


def write_shard(
    job: Job, layout: ShardLayout, number: int, progress: Progress, threads: int = 1
) -> ShardRecord:
    """Write one shard's tokens to its target and its `.idx` to the work folder, then its record.

    threads: that may copy into it at once.
    """
    options = job.options
    itemsize = np.dtype(layout.dtype).itemsize
    documents = DocumentOrder(job, layout.parts, layout.buckets)
    reported = copied = 0

    def report(done: int) -> None:
        """Tell of the bytes of tokens so far, but for the last piece, which may not be stored yet.
        Of those that are written again nothing is said.
        """
        nonlocal reported, copied
        if copied > reported:
            progress(copied - reported, (copied - reported) // itemsize)
            reported = copied
        copied = max(copied, done)

    store, key = open_store(layout.targets[number] + SUFFIXES[options.format], job.storage)
    writer, packing, stored_order = write_again(
        store, key, lambda: _write_tokens(job, layout, number, documents, report, threads)
    )
    work_name = layout.work_names()[number]
    files = {f"{work_name}.idx": writer.index.size}
    if layout.targets[number] == job.work_dir.file(work_name):
        files[work_name + SUFFIXES[options.format]] = writer.stored.size
    columns = {}
    for column, kind in enumerate(job.columns):
        url = column_name(layout.targets[number], kind.name)
        stored = _write_column(job, layout, number, documents, column, writer.num_tokens, progress)
        columns[kind.name] = (stored.size, stored.checksums)
        if url == job.work_dir.file(column_name(work_name, kind.name)):
            files[column_name(work_name, kind.name)] = stored.size
    origins = ""
    ids = 0
    if options.provenance:
        as_planned = _portions_of_shard(documents, layout, number)
        in_order = as_planned if packing is None else stored_order
        data, ids = _read_origins(job, documents, in_order)
        job.work_dir.write(work_name + ENDING, data)
        files[work_name + ENDING] = len(data)
        origins = xxhash.xxh3_128_hexdigest(data)
    record = ShardRecord(
        digest=layout.digest,
        shard=Shard(
            name=layout.names[number],
            documents=writer.num_documents,
            sequences=writer.num_sequences,
            tokens=writer.num_tokens,
            bytes=writer.stored.size,
            checksums=writer.stored.checksums,
            index_bytes=writer.index.size,
            index_checksums=writer.index.checksums,
            ends=writer.ends,
            kind=options.format,
            dtype=layout.dtype,
        ),
        files=files,
        packing=packing,
        origins=origins,
        ids=ids,
        columns=columns,
    )
    job.work_dir.replace_record(
        _record_name(number), asdict(record) | {"shard": record.shard._asdict()}
    )
    report(copied)
    return record


def _write_column(
    job: Job,
    layout: ShardLayout,
    number: int,
    documents: DocumentOrder,
    column: int,
    tokens: int,
    progress: Progress,
) -> ChecksummedWriter:
    """The writer of the object of a column for a shard of so many tokens, which is written."""
    kind = job.columns[column]
    storage = with_part_bytes_for(job.storage, tokens * kind.token_bytes)
    store, key = open_store(column_name(layout.targets[number], kind.name), storage)
    reported = 0

    def write() -> ChecksummedWriter:
        """Progress hears nothing about what is written again."""
        nonlocal reported
        portions = _portions_of_shard(documents, layout, number)
        stretches = stretches_of(documents, portions, job.options)
        with atomic_writer(store, key) as inner:
            writer = ChecksummedWriter(inner)
            for _ in write_column(job, column, documents, stretches, writer):
                if writer.size > reported:
                    progress(writer.size - reported, 0)
                    reported = writer.size
        return writer

    return write_again(store, key, write)


def _write_tokens(
    job: Job,
    layout: ShardLayout,
    number: int,
    documents: DocumentOrder,
    report: Callable[[int], None],
    threads: int,
) -> tuple[IndexedDatasetWriter, PackingStats | None, list[Portion]]:
    """(the writer of a shard that is written, what packing did, the documents as they are stored)."""
    options = job.options
    portions = _portions_of_shard(documents, layout, number)
    packing = None if options.pack_length is None else PackingStats()
    stored_order: list[Portion] = []
    done = 0
    # `write_packed` fills `packing` and `stored_order` while `copied` is read.
    with _writer(job, layout, number) as writer:
        if packing is not None:
            pad_id = eod_of(job) or 0
            copied = write_packed(
                documents, portions, options, pad_id, writer, packing, stored_order
            )
        elif layout.buckets:
            copied = copy_shuffled(documents, portions, writer)
        else:
            # A portion is a part, so all documents of one are of the same.
            copied = copy_in_order(documents, portions, writer, threads)
        # Closed before the writer, whatever happens: threads may be writing into its file.
        with closing(copied):
            for token_bytes in copied:
                done += token_bytes
                report(done)
    return writer, packing, stored_order


def _writer(job: Job, layout: ShardLayout, number: int) -> IndexedDatasetWriter:
    options = job.options
    dtype = np.dtype(layout.dtype)
    if options.shard_bytes is not None:
        # Half as much again: one document may be larger than a shard, and a tar has headers.
        expected_bytes = options.shard_bytes * 3 // 2
    else:
        # Twice as much where bins may be half empty.
        packed = 1 if options.pack_length is None else 2
        expected_bytes = layout.tokens * dtype.itemsize * packed
    return IndexedDatasetWriter(
        layout.targets[number],
        dtype,
        layout.multimodal,
        with_part_bytes_for(job.storage, expected_bytes),
        kind=options.format,
        level=options.zstd_level,
        index_prefix=job.work_dir.file(layout.work_names()[number]),
        first_sequence=layout.first_sequences[number],
    )


def _portions_of_shard(
    documents: DocumentOrder, layout: ShardLayout, number: int
) -> Iterator[Portion]:
    """The documents of a shard, a portion at a time."""
    first_portion, first_document = layout.bounds[number]
    last_portion, end_in_last_portion = layout.bounds[number + 1]
    # The last shard ends at the beginning of a portion that does not exist.
    for portion in range(first_portion, min(last_portion + 1, documents.num_portions)):
        parts, chosen = documents.order(portion)
        start = first_document if portion == first_portion else 0
        stop = end_in_last_portion if portion == last_portion else len(chosen)
        if stop > start:
            yield parts[start:stop], chosen[start:stop]


def _record_name(number: int) -> str:
    return f"shard-{number:06d}.json"


def _read_origins(
    job: Job, documents: DocumentOrder, portions: Iterable[Portion]
) -> tuple[bytes, int]:
    """The origins of a shard, as they are stored, and how many of them have an id.

    portions: its documents in their order.
    """
    writer = ProvenanceWriter()
    for portion in portions:
        origins = []
        rows_of_parts = []
        for part, rows, numbers in documents.by_part(portion):
            prefix = documents.name(part)
            stored = open_provenance(prefix, job.work_dir.storage)
            if stored is None:
                raise ConvertError(
                    f"{prefix}{ENDING}: is gone; run the same command again with --no-resume"
                )
            first = int(numbers.min())
            origins.append(stored.between(first, int(numbers.max()) + 1).take(numbers - first))
            rows_of_parts.append(rows)
        in_order = np.argsort(np.concatenate(rows_of_parts))
        writer.add(concat_origins(origins).take(in_order))
    return writer.finish(), writer.num_ids
