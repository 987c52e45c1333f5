"""What goes into which shard: a function of the parts and the options, planned before a token is
moved, so that every shard can be written by any worker.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from streammega.convert.digests import digest_of_json
from streammega.convert.documents import bounds_of
from streammega.convert.write.final_order import DocumentSet, OrderedDocuments
from streammega.convert.write.job import Job

Place = tuple[int, int]
"""(block, document of it) in the final order."""


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
    end = (documents.num_blocks, 0)
    if shard_bytes is None:
        return [*bounds, end]
    room = shard_bytes
    for block in range(documents.num_blocks):
        sizes = documents.sizes(*documents.order(block)) * itemsize
        ends = np.cumsum(sizes)
        document = 0
        while document < len(sizes):
            bytes_before = int(ends[document - 1]) if document else 0
            next_shard = int(np.searchsorted(ends, bytes_before + room, "right"))
            # A shard that is still empty takes a document that is larger than it.
            least = document + 1 if room == shard_bytes else document
            next_shard = max(next_shard, least)
            if next_shard < len(sizes):
                bounds.append((block, next_shard))
                room = shard_bytes
            else:
                room -= int(ends[-1]) - bytes_before
            document = next_shard
    return [*bounds, end]


def number_sequences(documents: OrderedDocuments, bounds: Sequence[Place]) -> list[int]:
    """The number of the first sequence of each shard, counted over all shards."""
    first_sequences = [0]
    later_shards = deque(bounds[1:-1])
    sequences_before = 0
    for block in range(documents.num_blocks):
        if not later_shards:
            break
        counts = documents.sequences(*documents.order(block))
        bounds_of_documents = bounds_of(counts)
        while later_shards and later_shards[0][0] == block:
            _, document = later_shards.popleft()
            first_sequences.append(sequences_before + int(bounds_of_documents[document]))
        sequences_before += int(counts.sum())
    return first_sequences


def layout_digest(job: Job, layout: Layout, sources: Sequence[str]) -> str:
    """Changes with everything that a shard depends on; `sources`: digests of what the parts were
    made of.
    """
    return digest_of_json([job.options.digest(), asdict(layout), list(sources)])
