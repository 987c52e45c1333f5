"""A conversion's job as workers get it: its units, and the record of each unit that is done.

A unit is a stretch of the inputs that one worker handles, planned from their sizes alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np
from numpy.typing import NDArray

from streammega.config import StorageConfig
from streammega.convert.options import ConvertOptions, digest_of_json
from streammega.convert.read.formats import FORMATS
from streammega.convert.read.source import Input, Skipped, Slice
from streammega.convert.work_dir import WorkDir
from streammega.dataset.column_reader import ColumnReader
from streammega.dataset.columns import ColumnFile, StoredColumn, column_name
from streammega.dataset.indexed import IndexedDataset
from streammega.storage.etags import check_version

SEGMENT_BYTES = 32 << 20
"""Token bytes after which a segment is written, where there is memory for it."""
MIN_SEGMENT_BYTES = 1 << 20
"""However little memory there is: each segment is up to three files."""
HISTOGRAM_BINS = 48
"""Bins of the histogram of document lengths: bin b counts documents of [2^b, 2^(b+1)) tokens."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """All that a worker has to know. Plain data, so that it can be sent anywhere."""

    options: ConvertOptions
    storage: StorageConfig
    """The storage of the output."""
    work_dir: WorkDir
    units: list[list[Slice]]
    input_storage: StorageConfig = field(default_factory=StorageConfig)
    """The storage of the inputs."""
    tokenizer_digest: str = ""
    columns: tuple[StoredColumn, ...] = ()
    """What all inputs have for each token, without their objects."""
    segment_bytes: int = SEGMENT_BYTES
    """Token bytes after which a segment is written; what comes out in the end does not depend on
    it.
    """

    def unit_digest(self, number: int) -> str:
        """Changes with the inputs of a unit and with every setting."""
        # Signatures of one object differ, and its ETag says whether it is the same.
        slices = []
        for piece in self.units[number]:
            item = piece.input
            of_item = [item.path, item.format, item.size, item.etag]
            slices.append([*of_item, piece.start, piece.stop, piece.version])
        return digest_of_json([self.options.digest(), self.tokenizer_digest, slices])


@dataclass(frozen=True, kw_only=True)
class ConvertSegment:
    """Documents of one pair: a segment that a unit wrote, or an input that passes as it is.

    name: of the pair in the work folder, or the input's. has_keep: whether a `.keep` file says which
    documents are no duplicates. version: that of an input when the work was planned. columns: those of
    an input, with their objects.
    """

    name: str
    documents: int
    unit: int = 0
    has_keep: bool = False
    is_input: bool = False
    version: str = ""
    columns: Sequence[StoredColumn] = ()

    def prefix(self, job: Job) -> str:
        """The prefix of its pair."""
        return self.name if self.is_input else job.work_dir.file(self.name)

    def open(self, job: Job) -> IndexedDataset:
        """Its pair. Raises ObjectChangedError for an input that changed since then."""
        storage = job.input_storage if self.is_input else job.work_dir.storage
        indexed = IndexedDataset(self.prefix(job), storage)
        if self.is_input:
            check_version(self.name, self.version, indexed.version)
        return indexed

    def open_column(self, job: Job, number: int, indexed: IndexedDataset) -> ColumnReader:
        """The values of the column of a number. indexed: its pair, opened."""
        column = job.columns[number]
        if self.is_input:
            of_name = {column.name: column for column in self.columns}
            return indexed.read_column(of_name[column.name])
        file = ColumnFile(job.work_dir.file(column_name(self.name, column.name)))
        return indexed.read_column(column._replace(files=[file]))


@dataclass(kw_only=True)
class UnitRecord:
    """What a unit made.

    digest: that of the unit. files: those of its segments in the work folder, and their sizes.
    skipped: what happened to documents that were not stored as they are. histogram: of the lengths
    of those kept.
    """

    digest: str
    segments: list[ConvertSegment] = field(default_factory=list)
    files: dict[str, int] = field(default_factory=dict)
    skipped: Skipped = field(default_factory=Skipped)
    source_bytes: int = 0
    documents: int = 0
    tokens: int = 0
    histogram: list[int] = field(default_factory=lambda: [0] * HISTOGRAM_BINS)


def segment_bytes_within(memory_bytes: int, units_at_once: int) -> int:
    """Token bytes of a segment, so that all units that are worked on at once fit the memory."""
    # A sixteenth of what a unit may take: while a segment is written, its tokens are there up to
    # seven times (as read, put together, sorted, and widened to int64 for their hashes, which is
    # four times 16-bit ids), in addition to the batches and the tokenizer's memory.
    share = memory_bytes // (16 * units_at_once)
    return min(SEGMENT_BYTES, max(MIN_SEGMENT_BYTES, share))


def length_histogram(sizes: NDArray[np.int64]) -> list[int]:
    """How many documents have [2^b, 2^(b+1)) tokens, for each bin b; empty ones are in the
    first.
    """
    bins = np.log2(np.maximum(sizes, 1)).astype(np.int64)
    histogram: list[int] = np.bincount(bins, minlength=HISTOGRAM_BINS)[:HISTOGRAM_BINS].tolist()
    return histogram


def unit_name(number: int) -> str:
    """Begins the names of a unit's files in the work folder."""
    return f"unit-{number:06d}"


def read_records(job: Job, numbers: Iterable[int]) -> dict[int, UnitRecord]:
    """The records of units that are done and were made from the same, by their numbers. Those that
    have lost a file are done again.
    """
    records = {}
    for number in numbers:
        stored = job.work_dir.read_record(f"{unit_name(number)}.json")
        if stored is not None and stored.get("digest") == job.unit_digest(number):
            segments = [ConvertSegment(**segment) for segment in stored.pop("segments")]
            skipped = Skipped(**stored.pop("skipped"))
            records[number] = UnitRecord(segments=segments, skipped=skipped, **stored)
    there = job.work_dir.sizes("unit-") if records else {}
    return {
        number: record
        for number, record in records.items()
        if record.files.items() <= there.items()
    }


def save_record(job: Job, number: int, record: UnitRecord) -> None:
    """Say that a unit is done: after all that it made is written."""
    job.work_dir.replace_record(f"{unit_name(number)}.json", asdict(record))


MAX_UNIT_BYTES = 64 << 20
"""Input bytes of a unit at most: what a kill undoes, and what a worker may be behind the others."""
MIN_UNIT_BYTES = 4 << 20
"""Input bytes of a unit at least: each unit costs a few files and a record."""
TARGET_UNITS = 128
"""So many units are wanted within these bounds: enough to keep many workers busy to the end."""
MAX_UNIT_FILES = 4096
"""Files of a unit at most: very many tiny ones are spread over workers too."""


def plan_units(
    inputs: Sequence[Input], options: ConvertOptions, storage: StorageConfig
) -> list[list[Slice]]:
    """Units in the order of the inputs: large files are cut where their format allows, small ones
    put together.
    """
    units: list[list[Slice]] = []
    wanted = sum(item.size for item in inputs) // TARGET_UNITS
    # Tests set MAX_UNIT_BYTES below MIN_UNIT_BYTES.
    unit_bytes = min(MAX_UNIT_BYTES, max(MIN_UNIT_BYTES, wanted))
    room = 0
    for item in inputs:
        for piece in FORMATS[item.format].cut(item, unit_bytes, MAX_UNIT_BYTES, storage):
            # a slice of a file that is cut fills a unit, whatever its size
            size = item.size if piece.stop < 0 else unit_bytes
            has_room = bool(units) and size <= room and len(units[-1]) < MAX_UNIT_FILES
            if has_room:
                units[-1].append(piece)
            else:
                units.append([piece])
                room = unit_bytes
            room -= size
    return units


def stored_bytes(pieces: Iterable[Slice]) -> int | None:
    """Stored bytes of slices together; None if one is not known."""
    sizes = [piece.stored_bytes for piece in pieces]
    known = [size for size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) else None
