"""Documents of a unit written as segments: `.bin/.idx` pairs of at most a few tens of MiB in the
work folder, with a `.side` file where documents are shuffled or compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streammega.convert.documents import Tokens, bounds_of, concatenate
from streammega.convert.job import Job, Segment, UnitRecord, length_histogram, unit_name
from streammega.convert.tokenize.encode import eod_of
from streammega.convert.write.dedup import document_hashes
from streammega.convert.write.document_order import SideRows, permuted, save_side, shuffle_keys
from streammega.dataset.idx import CODE_OF_DTYPE, smallest_dtype
from streammega.dataset.provenance import (
    ENDING,
    DocumentOrigins,
    ProvenanceWriter,
)
from streammega.dataset.writer import IndexedDatasetWriter
from streammega.errors import ConvertError
from streammega.storage import join_url, save_bytes


class SegmentWriter:
    """Applies what was asked for to the documents of a unit, and writes them as segments."""

    def __init__(self, job: Job, unit: int, record: UnitRecord) -> None:
        self._job = job
        self._options = job.options
        self._unit = unit
        self._record = record
        self._selection = Selection(job, record)
        self._held: list[Tokens] = []
        self._numbers: list[NDArray[np.int64]] = []
        """Of the documents held, counted over all that the unit has."""
        self._held_bytes = 0
        self._documents_seen = 0

    def add(self, batch: Tokens) -> None:
        """Take documents in."""
        first = self._documents_seen
        self._documents_seen += len(batch.documents)
        numbers = np.arange(first, self._documents_seen)
        chosen, is_kept = self._selection.choose(batch)
        self._held.append(chosen)
        self._numbers.append(numbers[is_kept])
        self._held_bytes += chosen.tokens.nbytes
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
        numbers = np.concatenate(numbers_of_batches)
        if len({batch.modes is None for batch in held}) > 1:
            raise ConvertError("some inputs have modes and others have none; convert them apart")
        dtype = token_dtype([batch.tokens for batch in held], self._options.dtype)
        batch = concatenate(held, dtype)
        keys = self._shuffle_keys(numbers)
        if keys is not None:
            # Sorted here, so that a bucket is one stretch of each segment.
            order = np.argsort(keys, kind="stable")
            batch = permuted(batch, order)
            numbers = numbers[order]
            keys = keys[order]
        hashes = document_hashes(batch) if self._options.dedup else ()
        self._save_side(keys, numbers, hashes)
        _save_origins(self._job, self._next_segment, batch.origins, len(batch.documents))
        multimodal = batch.modes is not None
        with self._writer(dtype, multimodal=multimodal) as writer:
            stored = batch.tokens.view(np.uint8).data
            writer.add_documents(stored, batch.lengths, batch.documents, batch.modes)
        self._note(dtype, batch.document_tokens, multimodal=multimodal)

    @property
    def _next_segment(self) -> str:
        """The name of the segment that is written next.

        It tells how large segments are, which depends on the machine: two that do the same unit at
        once, one of which was thought to be dead, write other files, or the same bytes.
        """
        number = len(self._record.segments)
        return f"{unit_name(self._unit)}-{self._job.segment_bytes:x}-{number:04d}"

    def _shuffle_keys(self, numbers: NDArray[np.int64]) -> NDArray[np.uint64] | None:
        seed = self._options.shuffle_seed
        return None if seed is None else shuffle_keys(seed, self._unit, numbers)

    def _save_side(
        self,
        keys: NDArray[np.uint64] | None,
        numbers: NDArray[np.int64],
        hashes: Sequence[NDArray[np.uint64]],
    ) -> None:
        """What is needed of each document beside its tokens, if anything."""
        rows: SideRows = {}
        if keys is not None:
            rows["shuffle_key"] = keys
        if self._options.dedup:
            low, high = hashes
            rows["number"] = numbers.astype(np.uint64)
            rows["hash_low"] = low
            rows["hash_high"] = high
        save_side(self._job, self._next_segment, rows)

    def _writer(self, dtype: np.dtype[Any], *, multimodal: bool) -> IndexedDatasetWriter:
        prefix = join_url(self._job.work, self._next_segment)
        return IndexedDatasetWriter(prefix, dtype, multimodal, self._job.storage, kind="bin")

    def _note(self, dtype: np.dtype[Any], sizes: NDArray[np.int64], *, multimodal: bool) -> None:
        """A segment that is written. sizes: tokens of its documents."""
        tokens = int(sizes.sum())
        segment = Segment(
            name=self._next_segment,
            dtype=str(dtype),
            multimodal=multimodal,
            documents=len(sizes),
            tokens=tokens,
        )
        record = self._record
        # From here on the next segment has another name.
        record.segments.append(segment)
        record.documents += len(sizes)
        record.tokens += tokens
        for number, count in enumerate(length_histogram(sizes)):
            record.histogram[number] += count


def token_dtype(arrays: Sequence[NDArray[Any]], asked: str | None) -> np.dtype[Any]:
    """The stored dtype for some tokens: the one asked, else theirs if the format has it, else the
    smallest that holds them.

    Raises ConvertError for ids that it cannot hold.
    """
    common = np.result_type(*(array.dtype for array in arrays)).newbyteorder("=")
    with_ids = [array for array in arrays if len(array)]
    low = min((int(array.min()) for array in with_ids), default=0)
    high = max((int(array.max()) for array in with_ids), default=0)
    if asked is not None:
        dtype = np.dtype(asked)
    elif common in CODE_OF_DTYPE and common.itemsize <= 4:
        dtype = common
    elif common == np.uint32 or low < 0:
        # uint32 is no dtype of the .idx; int32 has the same width.
        dtype = np.dtype(np.int32)
    else:
        dtype = smallest_dtype(high + 1)
    limits = np.iinfo(dtype)
    if low < limits.min or high > limits.max:
        raise ConvertError(
            f"token ids run from {low} to {high}, which {dtype} cannot hold; choose a wider --dtype"
        )
    return dtype


class Selection:
    """Leaves out, and cuts, what the options ask; the record counts what happened to documents."""

    def __init__(self, job: Job, record: UnitRecord) -> None:
        self._job = job
        self._options = job.options
        self._record = record

    def choose(self, batch: Tokens) -> tuple[Tokens, NDArray[np.bool_]]:
        """(what is kept of documents, which of them are kept)."""
        options = self._options
        kept = self._answered(batch)
        if options.modes is not None:
            batch = self._sequences_of_modes(batch, options.modes)
        sizes = batch.document_tokens
        self._count("empty", sizes == 0)
        kept &= sizes > 0
        is_short = kept & (sizes < options.min_tokens)
        self._count("too short", is_short)
        kept &= ~is_short
        if options.max_tokens is None:
            return batch.take(kept), kept
        is_long = kept & (sizes > options.max_tokens)
        if options.long == "drop":
            self._count("too long", is_long)
            kept &= ~is_long
            return batch.take(kept), kept
        self._count("cut", is_long)
        batch = batch.take(kept)
        if is_long.any():
            batch = self._cut(batch, options.max_tokens)
        return batch, kept

    def _answered(self, batch: Tokens) -> NDArray[np.bool_]:
        """Which documents have something to learn; all that are not conversations."""
        learned = self._options.learned_modes
        if not self._options.chat or batch.modes is None or learned is None:
            return np.ones(len(batch.documents), np.bool_)
        is_learned = np.isin(batch.modes, learned) & (batch.lengths > 0)
        answered = np.diff(bounds_of(is_learned)[bounds_of(batch.documents)]) > 0
        self._count("without an answer", ~answered & (batch.document_tokens > 0))
        return answered

    def _sequences_of_modes(self, batch: Tokens, wanted: tuple[int, ...]) -> Tokens:
        modes = batch.modes
        if modes is None:
            modes = np.zeros(len(batch.lengths), np.int8)
        kept = np.isin(modes, wanted)
        self._count("sequences of other modes", ~kept)
        return batch if kept.all() else batch.take_sequences(kept)

    def _cut(self, batch: Tokens, most: int) -> Tokens:
        tokens_before = len(batch.tokens)
        batch = batch.cut(most, eod_of(self._job))
        self._record.count("tokens cut off", tokens_before - len(batch.tokens))
        return batch

    def _count(self, reason: str, which: NDArray[np.bool_]) -> None:
        self._record.count(reason, int(np.count_nonzero(which)))


def _save_origins(job: Job, name: str, origins: DocumentOrigins | None, documents: int) -> None:
    """Write those of a segment's documents beside it, if they are kept. Raises ConvertError where
    they are not of as many: each would be told of another one's.
    """
    if not job.options.origins:
        return
    if origins is None or len(origins) != documents:
        known = 0 if origins is None else len(origins)
        raise ConvertError(
            f"{name}: where {documents} documents came from is known of {known}; convert without "
            "--origins, and report this"
        )
    writer = ProvenanceWriter()
    writer.add(origins)
    save_bytes(join_url(job.work, name + ENDING), writer.finish(), job.storage)
