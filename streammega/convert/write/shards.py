"""One shard: its documents copied to where it is to be published from, and a record that it is
done.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import asdict
from typing import Any

import numpy as np

from streammega.config import StorageConfig
from streammega.convert.write.bins import copy_packed
from streammega.convert.write.copying import copy_in_order, copy_shuffled
from streammega.convert.write.encoders import eod_of
from streammega.convert.write.final_order import Integers, OrderedDocuments
from streammega.convert.write.job import Job
from streammega.convert.write.layout import ShardLayout
from streammega.convert.write.origins import write_origins
from streammega.convert.write.packing import PackCounts
from streammega.convert.write.records import load_json, save_json
from streammega.dataset.manifest import Shard
from streammega.dataset.writer import IndexedDatasetWriter
from streammega.errors import ConvertError
from streammega.storage import join_url
from streammega.storage.backends.s3_writer import sized_for
from streammega.storage.progress import Progress


def read_shard(job: Job, layout: ShardLayout, number: int) -> Shard | None:
    """What was written of a shard, if it is done and belongs to this layout."""
    stored = load_json(_record_url(job.work, number), job.storage)
    if stored is None or stored.get("digest") != layout.digest:
        return None
    return Shard(**stored["shard"])


def origins_written(
    work: str, layout: ShardLayout, storage: StorageConfig
) -> tuple[list[str], int]:
    """The checksums of the origins beside all shards, which are written, and how many of them have
    an id. Raises ConvertError where a record of one is gone.
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
        num_ids += int(record.get("ids", 1))  # not known of a shard that an earlier release wrote
    return checksums, num_ids


def read_pack_counts(job: Job, number: int) -> PackCounts:
    """What packing made of the documents of a shard that is done."""
    stored = load_json(_record_url(job.work, number), job.storage)
    assert stored is not None
    return PackCounts(**stored["packing"])


def write_shard(
    job: Job, layout: ShardLayout, number: int, progress: Progress, threads: int = 1
) -> Shard:
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
    record: dict[str, Any] = {"digest": layout.digest, "shard": asdict(shard)}
    if job.options.pack is not None:
        record["packing"] = asdict(counts)
    if job.options.origins:
        portions = _documents_of_portions(documents, layout, number)
        in_order = portions if job.options.pack is None else placed
        record["origins"], record["ids"] = write_origins(
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
