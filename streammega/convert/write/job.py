"""What workers are told of a conversion, and what they note of each unit that is done."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

import numpy as np
from numpy.typing import NDArray

from streammega.config import StorageConfig
from streammega.convert.digests import digest_of_json
from streammega.convert.options import ConvertOptions
from streammega.convert.read.slices import Slice
from streammega.convert.write.records import load_json, save_json
from streammega.storage import join_url

SEGMENT_BYTES = 32 << 20
"""Token bytes after which a segment is written, where there is memory for it."""
LEAST_SEGMENT_BYTES = 1 << 20
"""However little memory there is: each segment is up to three files."""
HISTOGRAM_BINS = 48
"""Of the histogram of document lengths: bin b counts documents of [2^b, 2^(b+1)) tokens."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """All that a worker has to know. Plain data, so that it can be sent anywhere."""

    options: ConvertOptions
    storage: StorageConfig
    """Of the output and the work folder."""
    work: str
    units: list[list[Slice]]
    input_storage: StorageConfig = field(default_factory=StorageConfig)
    """Of the inputs."""
    tokenizer_digest: str = ""
    segment_bytes: int = SEGMENT_BYTES
    """Token bytes after which a segment is written; what comes out in the end does not depend on
    it.
    """

    def unit_digest(self, number: int) -> str:
        """Changes with the inputs of a unit and with every setting."""
        slices = [asdict(piece) for piece in self.units[number]]
        for piece in slices:
            # Signatures of one object differ, and its ETag says whether it is the same.
            piece["input"].pop("query")
            piece.pop("stored_bytes")
        return digest_of_json([self.options.digest(), self.tokenizer_digest, slices])


@dataclass(frozen=True, kw_only=True)
class Segment:
    """One written segment. `name`: its prefix in the work folder."""

    name: str
    dtype: str
    multimodal: bool
    documents: int
    tokens: int


@dataclass(kw_only=True)
class UnitRecord:
    """What a unit made.

    `counts`: documents by what happened to them; `members`: of archives, those that are no
    documents, by what they are; `histogram`: of those kept.
    """

    digest: str
    segments: list[Segment] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    members: dict[str, int] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    errors: int = 0
    """Records that were skipped because something was wrong with them."""
    read: int = 0
    """All records, with those that were left out."""
    source_bytes: int = 0
    documents: int = 0
    tokens: int = 0
    histogram: list[int] = field(default_factory=lambda: [0] * HISTOGRAM_BINS)

    def count(self, reason: str, documents: int) -> None:
        """Count documents to which something happened."""
        if documents:
            self.counts[reason] = self.counts.get(reason, 0) + documents


def segment_bytes_within(memory_bytes: int, units_at_once: int) -> int:
    """Token bytes of a segment, so that all units that are worked on at once fit the memory."""
    # A sixteenth of what a unit may take: while a segment is written, its tokens are there up to
    # seven times (as read, put together, sorted, and widened to int64 for their hashes, which is
    # four times 16-bit ids), beside the batches and the tokenizer's memory.
    share = memory_bytes // (16 * units_at_once)
    return min(SEGMENT_BYTES, max(LEAST_SEGMENT_BYTES, share))


def length_histogram(sizes: NDArray[np.int64]) -> list[int]:
    """How many documents have [2^b, 2^(b+1)) tokens, for each bin b; empty ones are in the
    first.
    """
    at_least_one = np.maximum(sizes, 1)
    bins = np.log2(at_least_one).astype(np.int64)
    counts = np.bincount(bins, minlength=HISTOGRAM_BINS)
    histogram: list[int] = counts[:HISTOGRAM_BINS].tolist()
    return histogram


def unit_name(number: int) -> str:
    """Of a unit's files in the work folder."""
    return f"unit-{number:06d}"


def read_record(job: Job, number: int) -> UnitRecord | None:
    """What a unit made, if it is done and was made from the same."""
    stored = load_json(_record_url(job, number), job.storage)
    if stored is None or stored.get("digest") != job.unit_digest(number):
        return None
    segments = [Segment(**segment) for segment in stored.pop("segments")]
    return UnitRecord(segments=segments, **stored)


def save_record(job: Job, number: int, record: UnitRecord) -> None:
    """Say that a unit is done: after all that it made is written."""
    save_json(_record_url(job, number), asdict(record), job.storage)


def _record_url(job: Job, number: int) -> str:
    return join_url(job.work, f"{unit_name(number)}.json")
