"""The first half of a conversion: units of input, each of which becomes segments of tokens in the
work folder.

A unit is a stretch of the inputs that one worker handles. What it makes depends on nothing else, so
it can be done anywhere, and again. The unit's record, written last, says that all of it is there.
"""

from __future__ import annotations

from collections.abc import Iterator

from streammega.convert.documents import RawDocument, Tokens
from streammega.convert.job import Job, UnitRecord, save_record, stored_bytes
from streammega.convert.read.open import Item, Skipped
from streammega.convert.read.provenance import of_file
from streammega.convert.read.readers import read_slice
from streammega.convert.tokenize.encode import encoder_of
from streammega.convert.write.segments import SegmentWriter
from streammega.storage.progress import Progress

BATCH_BYTES = 1 << 20
"""Raw documents that are encoded together."""
BATCH_DOCUMENTS = 4096
"""At most so many of them, however short."""
PARSED_BYTES = 4096
"""What a record that was parsed already is taken for, where nobody knows its size."""


def run_unit(job: Job, number: int, progress: Progress) -> UnitRecord:
    """Read, encode and write one unit, and its record. Raises ConvertError, StorageError."""
    record = UnitRecord(digest=job.unit_digest(number))
    skipped = Skipped()
    writer = SegmentWriter(job, number, record)
    stored = stored_bytes(job.units[number])
    bytes_told = 0

    def note(source_bytes: int, tokens: int) -> None:
        """Count what was made of the unit, and tell how much of it was read, each byte once."""
        nonlocal bytes_told
        record.source_bytes += source_bytes
        # Some bytes are read twice, or belong to the next unit.
        bytes_read = skipped.bytes_read if stored is None else min(stored, skipped.bytes_read)
        progress(bytes_read - bytes_told, tokens)
        bytes_told = bytes_read

    for batch in batches_of(job, number, skipped):
        tokens = batch if isinstance(batch, Tokens) else encoder_of(job)(batch, skipped)
        record.read += len(batch.documents if isinstance(batch, Tokens) else batch)
        writer.add(tokens)
        note(tokens.source_bytes, len(tokens.tokens))
    writer.flush()
    if stored is not None:  # columns that are not wanted are not read
        skipped.bytes_read = stored
    note(0, 0)
    for reason, count in skipped.counts.items():
        record.count(reason, count)
    record.members = skipped.members
    record.messages = skipped.messages
    record.errors = skipped.errors
    save_record(job, number, record)
    return record


def batches_of(job: Job, number: int, skipped: Skipped) -> Iterator[list[RawDocument] | Tokens]:
    """Documents of a unit in order: raw ones in batches of about a MiB."""
    batch: list[RawDocument] = []
    batch_bytes = 0
    for item in _documents_of(job, number, skipped):
        if isinstance(item, RawDocument):
            batch.append(item)
            batch_bytes += len(item.data) or item.size or PARSED_BYTES
            if batch_bytes < BATCH_BYTES and len(batch) < BATCH_DOCUMENTS:
                continue
        if batch:
            yield batch
            batch = []
            batch_bytes = 0
        if not isinstance(item, RawDocument):
            yield item
    if batch:
        yield batch


def _documents_of(job: Job, number: int, skipped: Skipped) -> Iterator[Item]:
    for piece in job.units[number]:
        for item in read_slice(piece, job.options, job.input_storage, skipped):
            if isinstance(item, Tokens) and job.options.origins and item.origins is None:
                yield of_file(item, piece.input.path)
            else:
                yield item
