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


def layout_digest(job: Job, layout: ShardLayout, sources: Sequence[str]) -> str:
    """Changes with everything that a shard depends on; `sources`: digests of what the parts were
    made of.
    """
    return digest_of_json([job.options.digest(), asdict(layout), list(sources)])
