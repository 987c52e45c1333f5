"""From the parts of a conversion, which are datasets or what units made, to the layout of its shards."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from streammega.config import StorageConfig
from streammega.convert.read.inputs import Input
from streammega.convert.read.pairs import dataset_name
from streammega.convert.report import count_parts
from streammega.convert.write.destination import Destination
from streammega.convert.write.final_order import DocumentSet, OrderedDocuments
from streammega.convert.write.job import Job, UnitRecord
from streammega.convert.write.layout import ShardLayout, number_sequences, plan_bounds
from streammega.convert.write.side_files import row_names, side_name
from streammega.dataset.indexed import IndexedDataset
from streammega.dataset.shards import shard_name
from streammega.errors import ConvertError
from streammega.storage import join_url, parent_url

BUCKETS_IN_MEMORY = 8
"""A bucket is an eighth of the memory, so that the shards which are written at once fit it twice
over (`SHUFFLED_AT_ONCE`).
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


def lay_out(
    job: Job, parts: list[DocumentSet], destination: Destination, memory_bytes: int
) -> ShardLayout:
    """What goes into which shard, under plain names and without a digest.

    parts: with a document each. Raises ConvertError where modes are there and not there.
    """
    options = job.options
    kinds = count_parts(parts, job)
    if len(kinds.multimodal) > 1:
        raise ConvertError("some inputs have modes and others have none; convert them apart")
    dtype = np.dtype(options.dtype or np.result_type(*kinds.dtypes))
    buckets = 0
    if options.shuffle_seed is not None:
        buckets = _num_buckets(kinds.tokens * dtype.itemsize, memory_bytes)
    documents = OrderedDocuments(job, parts, buckets)
    bounds = plan_bounds(documents, dtype.itemsize, options.shard_bytes)
    num_shards = len(bounds) - 1
    names = [destination.stem]
    if options.shard_bytes is not None:
        names = [shard_name(destination.stem, number, num_shards) for number in range(num_shards)]
    # Where files can be renamed, nothing is written beside the output before all is done.
    folder = parent_url(destination.prefix) if destination.is_remote else join_url(job.work, "out")
    first_sequences = [0] * num_shards
    if options.kind == "tar":
        first_sequences = number_sequences(documents, bounds)
    return ShardLayout(
        parts=parts,
        dtype=str(dtype),
        tokens=kinds.tokens,
        multimodal=kinds.multimodal == {True},
        buckets=buckets,
        bounds=bounds,
        names=names,
        targets=[join_url(folder, name) for name in names],
        first_sequences=first_sequences,
    )


def _num_buckets(token_bytes: int, memory_bytes: int) -> int:
    """Ranges of shuffle keys, each of which fits the memory."""
    return max(1, -(-token_bytes * BUCKETS_IN_MEMORY // memory_bytes))
