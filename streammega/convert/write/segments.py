"""The first half of a conversion: each unit of input becomes segments in the work folder.

A unit is a stretch of the inputs that one worker handles. What it makes depends on nothing else, so
it can be done anywhere, and again. The unit's record, written last, says that all of it is there.
A segment is a `.bin/.idx` pair of at most a few tens of MiB, with a `.side` file where documents
are shuffled or compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streammega.convert.documents import RawDocument, Tokens, concatenate, offsets_of
from streammega.convert.job import (
    ConvertSegment,
    Job,
    UnitRecord,
    length_histogram,
    save_record,
    stored_bytes,
    unit_name,
)
from streammega.convert.read.formats import read_slice
from streammega.convert.read.source import Skipped
from streammega.convert.tokenize.encode import encoder_of, eod_of
from streammega.convert.write.document_order import (
    SIDE,
    SideRows,
    document_hashes,
    save_side,
    shuffle_keys,
)
from streammega.dataset.columns import column_name
from streammega.dataset.idx import CODE_OF_DTYPE, smallest_dtype
from streammega.dataset.provenance import ENDING, ProvenanceWriter
from streammega.dataset.writer import IndexedDatasetWriter
from streammega.errors import ConvertError
from streammega.storage.progress import Progress

BATCH_BYTES = 1 << 20
"""Raw documents that are encoded together."""
BATCH_DOCUMENTS = 4096
"""Raw documents that are encoded together at most, however short."""
PARSED_BYTES = 4096
"""What a record that was parsed already is taken for, where its size is not known."""


def run_unit(job: Job, number: int, progress: Progress) -> UnitRecord:
    """Read, encode and write one unit, and its record. Raises ConvertError, StorageError."""
    record = UnitRecord(digest=job.unit_digest(number))
    skipped = record.skipped
    writer = SegmentWriter(job, number, record)
    stored = stored_bytes(job.units[number])
    bytes_reported = 0
    bytes_done = 0
    """Bytes of the batches before this one: what is read of a batch is not done yet."""

    def report(tokens: int) -> None:
        """Tell how many bytes of the unit are done, each byte once."""
        nonlocal bytes_reported
        progress(bytes_done - bytes_reported, tokens)
        bytes_reported = bytes_done

    for batch in batches_of(job, number, skipped):
        tokens = batch if isinstance(batch, Tokens) else encoder_of(job)(batch, skipped)
        writer.add(tokens)
        record.source_bytes += tokens.source_bytes
        report(len(tokens.tokens))
        # Some bytes are read twice, or belong to the next unit.
        bytes_done = skipped.bytes_read if stored is None else min(stored, skipped.bytes_read)
    writer.flush()
    if stored is not None:  # columns that are not wanted are not read
        skipped.bytes_read = stored
    save_record(job, number, record)
    bytes_done = skipped.bytes_read
    report(0)
    return record


def batches_of(job: Job, number: int, skipped: Skipped) -> Iterator[list[RawDocument] | Tokens]:
    """Documents of a unit in order: raw ones in batches of about a MiB."""
    batch: list[RawDocument] = []
    batch_bytes = 0
    slices = job.units[number]
    for item in chain.from_iterable(
        read_slice(piece, job.options, job.input_storage, skipped) for piece in slices
    ):
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


class SegmentWriter:
    """Selects, shuffles and hashes the documents of a unit, and writes them as segments."""

    def __init__(self, job: Job, unit: int, record: UnitRecord) -> None:
        self._job = job
        self._unit = unit
        self._record = record
        self._held: list[Tokens] = []
        self._numbers: list[NDArray[np.int64]] = []
        """Numbers of the held documents, counted over the unit."""
        self._held_bytes = 0
        self._documents_seen = 0

    def add(self, batch: Tokens) -> None:
        """Take documents in."""
        first = self._documents_seen
        self._documents_seen += len(batch.documents)
        numbers = np.arange(first, self._documents_seen)
        chosen, is_kept = select_documents(batch, self._job, self._record.skipped)
        self._held.append(chosen)
        self._numbers.append(numbers[is_kept])
        self._held_bytes += chosen.tokens.nbytes
        self._held_bytes += sum(values.nbytes for values in chosen.columns.values())
        if self._held_bytes >= self._job.segment_bytes:
            self.flush()

    def flush(self) -> None:
        """Write what is held as a segment."""
        held = [batch for batch in self._held if len(batch.documents)]
        numbers_of_batches = self._numbers
        self._held = []
        self._numbers = []
        self._held_bytes = 0
        if not held:
            return
        job = self._job
        options = job.options
        numbers = np.concatenate(numbers_of_batches)
        if len({batch.modes is None for batch in held}) > 1:
            raise ConvertError("some inputs have modes and others have none; convert them apart")
        dtype = token_dtype([batch.tokens for batch in held], options.dtype)
        batch = concatenate(held, dtype)
        rows: SideRows = {}
        if options.shuffle_seed is not None:
            keys = shuffle_keys(options.shuffle_seed, self._unit, numbers)
            # Sorted here, so that a bucket is one stretch of each segment.
            order = np.argsort(keys, kind="stable")
            batch = batch.take(order)
            numbers = numbers[order]
            rows["shuffle_key"] = keys[order]
        if options.dedup:
            rows["number"] = numbers.astype(np.uint64)
            rows["hash_low"], rows["hash_high"] = document_hashes(batch)
        # The digest keeps it apart from the segments of other inputs and options. The name says
        # too how large segments are, which depends on the machine. Two machines may do the same
        # unit, if one seemed to be dead: they write other files, or the same bytes.
        record = self._record
        number = len(record.segments)
        name = f"{unit_name(self._unit)}-{record.digest}-{job.segment_bytes:x}-{number:04d}"
        if rows:
            record.files[name + SIDE] = save_side(job, name, rows)
        if options.provenance:
            record.files[name + ENDING] = _save_origins(job, name, batch)
        for column, values in batch.columns.items():
            file = column_name(name, column)
            job.work_dir.write(file, values.tobytes())
            record.files[file] = values.nbytes
        multimodal = batch.modes is not None
        prefix = job.work_dir.file(name)
        with IndexedDatasetWriter(prefix, dtype, multimodal, job.work_dir.storage) as writer:
            stored = batch.tokens.view(np.uint8).data
            writer.add_documents(stored, batch.lengths, batch.documents, batch.modes)
        record.files[f"{name}.bin"] = writer.stored.size
        record.files[f"{name}.idx"] = writer.index.size
        sizes = batch.document_tokens
        record.segments.append(ConvertSegment(name=name, documents=len(sizes), unit=self._unit))
        record.documents += len(sizes)
        record.tokens += len(batch.tokens)
        for number, count in enumerate(length_histogram(sizes)):
            record.histogram[number] += count


def token_dtype(arrays: Sequence[NDArray[Any]], wanted: str | None) -> np.dtype[Any]:
    """The stored dtype for some tokens: the wanted one, else theirs if the format has it, else the
    smallest that holds them.

    Raises ConvertError for ids that it cannot hold.
    """
    common = np.result_type(*(array.dtype for array in arrays)).newbyteorder("=")
    with_ids = [array for array in arrays if len(array)]
    low = min((int(array.min()) for array in with_ids), default=0)
    high = max((int(array.max()) for array in with_ids), default=0)
    if wanted is not None:
        dtype = np.dtype(wanted)
    elif common in CODE_OF_DTYPE and common.itemsize <= 4:
        dtype = common
    elif common == np.uint32 or low < 0:
        # The .idx has no uint32; int32 has the same width.
        dtype = np.dtype(np.int32)
    else:
        dtype = smallest_dtype(high + 1)
    limits = np.iinfo(dtype)
    if low < limits.min or high > limits.max:
        raise ConvertError(
            f"token ids run from {low} to {high}, which {dtype} cannot hold; choose a wider --dtype"
        )
    return dtype


def select_documents(batch: Tokens, job: Job, skipped: Skipped) -> tuple[Tokens, NDArray[np.bool_]]:
    """(documents without what the options leave out or cut, which of them are kept). What happened
    to others is counted.
    """
    options = job.options
    kept = np.ones(len(batch.documents), np.bool_)

    def drop(reason: str, which: NDArray[np.bool_]) -> None:
        skipped.leave_out(reason, int(np.count_nonzero(which)))
        kept[which] = False

    learned = options.learned_modes
    if options.chat and batch.modes is not None and learned is not None:
        is_learned = np.isin(batch.modes, learned) & (batch.lengths > 0)
        is_answered = np.diff(offsets_of(is_learned)[offsets_of(batch.documents)]) > 0
        drop("without an answer", ~is_answered & (batch.document_tokens > 0))
    if options.keep_modes is not None:
        modes = np.zeros(len(batch.lengths), np.int8) if batch.modes is None else batch.modes
        is_wanted = np.isin(modes, options.keep_modes)
        skipped.leave_out("sequences of other modes", int(np.count_nonzero(~is_wanted)))
        if not is_wanted.all():
            batch = batch.take_sequences(is_wanted)
    sizes = batch.document_tokens
    drop("empty", kept & (sizes == 0))
    drop("too short", kept & (sizes < options.min_tokens))
    max_tokens = options.max_tokens
    if max_tokens is not None and options.max_tokens_policy == "drop":
        drop("too long", kept & (sizes > max_tokens))
    batch = batch.select(kept)
    if max_tokens is not None and (num_long := int((batch.document_tokens > max_tokens).sum())):
        skipped.leave_out("cut", num_long)
        tokens_before = len(batch.tokens)
        batch = batch.cut(max_tokens, eod_of(job))
        skipped.leave_out("tokens cut off", tokens_before - len(batch.tokens))
    return batch, kept


def _save_origins(job: Job, segment: str, batch: Tokens) -> int:
    """Write where a segment's documents came from, in a file next to it. Returns its bytes.

    Raises ConvertError where that is not known of each: some would get another one's.
    """
    documents = len(batch.documents)
    if batch.origins is None or len(batch.origins) != documents:
        known = 0 if batch.origins is None else len(batch.origins)
        raise ConvertError(
            f"{job.work_dir.file(segment)}: where {documents} documents came from is known of {known}; convert without "
            "--provenance, and report this"
        )
    writer = ProvenanceWriter()
    writer.add(batch.origins)
    data = writer.finish()
    job.work_dir.write(segment + ENDING, data)
    return len(data)
