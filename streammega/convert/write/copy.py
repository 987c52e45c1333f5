"""Tokens of parts copied into a shard: stretches that stay in their order as they are, shuffled
documents by a kernel.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from streammega.convert.documents import concat_ranges, gather, offsets_of
from streammega.convert.read.megatron import document_runs, sequence_spans
from streammega.convert.write.document_order import DocumentOrder, Integers, Portion
from streammega.dataset.indexed import IndexedDataset
from streammega.dataset.writer import IndexedDatasetWriter, runs_within
from streammega.errors import ConvertError
from streammega.storage.backends.local import FileRange, copy_buffer, read_files
from streammega.storage.derived_stores import file_ranges
from streammega.storage.store import Bytes

CHUNK_BYTES = 32 << 20
"""Read of a remote object, and gathered, at a time."""
MAX_STRETCHES = 1 << 14
"""Stretches of local files that threads share out among them: half a TiB, where no document was
left out. What is known of each takes a few hundred bytes of memory.
"""
REQUESTS_OF_A_CHUNK = 4
"""Requests that read a chunk of a remote object at the same time."""


def copy_in_order(
    documents: DocumentOrder,
    portions: Iterable[Portion],
    writer: IndexedDatasetWriter,
    threads: int,
) -> Generator[int, None, None]:
    """Documents of parts in their order. Those stored end to end are copied together, those in
    local files by several threads. portions: (part of each, document of it), of one part each.

    Yields bytes as they are written.
    """
    stretches: list[_FileStretch] = []
    for parts, chosen in portions:
        indexed = documents.dataset(int(parts[0]))
        for first, last in _runs_of(indexed, chosen):
            ranges = _files_of(indexed, first, last, writer)
            if ranges is None:
                yield from _copy_files(stretches, writer, threads)
                yield _copy_stretch(indexed, first, last, writer)
                continue
            stretches.append(_FileStretch(ranges, *_sequences_of(indexed, first, last)))
            if len(stretches) >= MAX_STRETCHES:
                yield from _copy_files(stretches, writer, threads)
    yield from _copy_files(stretches, writer, threads)


class _FileStretch(NamedTuple):
    """Documents in local files: the lengths of their sequences, how many each has, and modes."""

    ranges: list[FileRange]
    lengths: NDArray[np.int32]
    documents: NDArray[np.int64]
    modes: NDArray[np.int8] | None


def _copy_files(
    stretches: list[_FileStretch], writer: IndexedDatasetWriter, threads: int
) -> Iterator[int]:
    """Copy stretches, and empty the list of them."""
    if not stretches:
        return
    has_modes = stretches[0].modes is not None
    copied = writer.copy_from(
        [wanted for stretch in stretches for wanted in stretch.ranges],
        np.concatenate([stretch.lengths for stretch in stretches]),
        np.concatenate([stretch.documents for stretch in stretches]),
        np.concatenate([stretch.modes for stretch in stretches]) if has_modes else None,
        threads,
    )
    stretches.clear()
    yield from copied


def _runs_of(indexed: IndexedDataset, chosen: Integers) -> Iterator[tuple[int, int]]:
    """[first, last) of documents of a part that are stored end to end."""
    # Documents that were left out cut the part into stretches.
    # A document begins a stretch where the one before it ended one.
    is_last = np.append(np.diff(chosen) != 1, True)
    is_first = np.roll(is_last, 1)
    starts = chosen[is_first].tolist()
    stops = (chosen[is_last] + 1).tolist()
    for start, stop in zip(starts, stops, strict=True):
        yield from document_runs(indexed, start, stop, CHUNK_BYTES)


def _files_of(
    indexed: IndexedDataset, start: int, stop: int, writer: IndexedDatasetWriter
) -> list[FileRange] | None:
    """The places of documents [start, stop) of a part in local files that hold them as the writer
    wants them; None if there are no such files.
    """
    if not writer.stores_plain_bytes or writer.dtype != indexed.dtype:
        return None
    first = int(indexed.document_indices[start])
    last = int(indexed.document_indices[stop])
    spans = sequence_spans(indexed, first, last)
    # Sequences that are scattered over their .bin would be millions of ranges.
    if len(spans) > 1:
        return None
    if not spans:
        return []
    low, high = spans[0]
    return file_ranges(indexed.store, indexed.bin_key, low, high, indexed.bin_info.etag)


def copy_shuffled(
    documents: DocumentOrder, portions: Iterable[Portion], writer: IndexedDatasetWriter
) -> Generator[int, None, None]:
    """Documents of many parts in a shuffled order: each part's bytes are read at once, then
    gathered. Yields as `copy_in_order`.
    """
    for portion in portions:
        held = load_documents(documents, portion, writer.dtype)
        for low, high in runs_within(held.sizes, CHUNK_BYTES):
            sizes = held.sizes[low:high]
            bounds = offsets_of(sizes)
            gathered = np.empty(int(bounds[-1]), np.uint8)
            numbers = held.part[low:high]
            gather(held.tokens, numbers, held.start[low:high], sizes, gathered, bounds[:-1])
            num_sequences = held.num_sequences[low:high]
            sequences = concat_ranges(held.first_sequences[low:high], num_sequences)
            modes = None if held.modes is None else held.modes[sequences]
            writer.add_documents(gathered.data, held.lengths[sequences], num_sequences, modes)
            yield len(gathered)
        del held  # before the next portion is in memory


@dataclass(frozen=True, kw_only=True)
class LoadedDocuments:
    """Documents of many parts, in memory. tokens: of each part. part, start, sizes, first_sequences,
    num_sequences: of each document, which begins at a byte of its part; lengths, modes: of each
    sequence.
    """

    tokens: list[Bytes]
    part: Integers
    start: Integers
    sizes: Integers
    first_sequences: Integers
    num_sequences: Integers
    lengths: NDArray[np.int32]
    modes: NDArray[np.int8] | None


def load_documents(
    documents: DocumentOrder, portion: Portion, dtype: np.dtype[Any]
) -> LoadedDocuments:
    """Documents in their order, wherever they are in memory.

    Of each part, all is read from the first of its documents to the last. There are few others
    between: a segment's documents are sorted by their keys, as are those of a bucket.
    """
    num_documents = len(portion[1])
    part_of_document = np.empty(num_documents, np.int64)
    starts = np.empty(num_documents, np.int64)
    sizes = np.empty(num_documents, np.int64)
    first_sequences = np.empty(num_documents, np.int64)
    num_sequences = np.empty(num_documents, np.int64)
    tokens: list[Bytes] = []
    lengths = []
    modes = []
    sequences_before = 0
    for part, rows, numbers in documents.by_part(portion):
        indexed = documents.dataset(part)
        start = int(indexed.document_indices[int(numbers.min())])
        stop = int(indexed.document_indices[int(numbers.max()) + 1])
        lengths_of_part = np.asarray(indexed.sequence_lengths[start:stop])
        byte_bounds = offsets_of(lengths_of_part) * dtype.itemsize
        start_byte = int(indexed.sequence_offsets[start]) if len(lengths_of_part) else 0
        num_bytes = int(lengths_of_part.sum(dtype=np.int64)) * indexed.dtype.itemsize
        # Copies, since local files are read into one buffer again and again.
        pieces = [piece.copy() for piece in _stored_bytes(indexed, start_byte, num_bytes)]
        stored = np.concatenate([np.empty(0, np.uint8), *pieces])
        if indexed.dtype != dtype:
            stored = _cast(stored, indexed, dtype)
        if len(stored) != int(byte_bounds[-1]):
            raise ConvertError(
                f"{indexed.prefix}: {len(stored)} bytes were read of {int(byte_bounds[-1])}; "
                f"convert again with --no-resume"
            )
        first = indexed.document_indices[numbers] - start
        last = indexed.document_indices[numbers + 1] - start
        part_of_document[rows] = len(tokens)
        starts[rows] = byte_bounds[first]
        sizes[rows] = byte_bounds[last] - byte_bounds[first]
        first_sequences[rows] = sequences_before + first
        num_sequences[rows] = last - first
        sequences_before += len(lengths_of_part)
        tokens.append(stored)
        lengths.append(lengths_of_part)
        if indexed.sequence_modes is not None:
            modes.append(np.asarray(indexed.sequence_modes[start:stop]))
    return LoadedDocuments(
        tokens=tokens,
        part=part_of_document,
        start=starts,
        sizes=sizes,
        first_sequences=first_sequences,
        num_sequences=num_sequences,
        lengths=np.concatenate(lengths),
        modes=np.concatenate(modes) if modes else None,
    )


def _copy_stretch(
    indexed: IndexedDataset, start: int, stop: int, writer: IndexedDatasetWriter
) -> int:
    """Documents [start, stop) of a part, as they are. Returns the bytes written."""
    first = int(indexed.document_indices[start])
    last = int(indexed.document_indices[stop])
    lengths, documents, modes = _sequences_of(indexed, start, stop)
    spans = sequence_spans(indexed, first, last)
    pieces = chain.from_iterable(_stored_bytes(indexed, low, high - low) for low, high in spans)
    if writer.dtype == indexed.dtype:
        stored = (piece.data for piece in pieces)
    else:
        stored = (_cast(piece, indexed, writer.dtype).data for piece in pieces)
    writer.add_documents(stored, lengths, documents, modes)
    return int(lengths.sum(dtype=np.int64)) * writer.dtype.itemsize


def _sequences_of(
    indexed: IndexedDataset, start: int, stop: int
) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int8] | None]:
    """(lengths of the sequences, sequences of each document, modes) of documents [start, stop)."""
    bounds = indexed.document_indices[start : stop + 1]
    first = int(bounds[0])
    last = int(bounds[-1])
    modes = indexed.sequence_modes
    modes_of_run = None if modes is None else modes[first:last]
    return indexed.sequence_lengths[first:last], np.diff(bounds), modes_of_run


def _stored_bytes(indexed: IndexedDataset, start: int, size: int) -> Iterator[Bytes]:
    """Bytes of a dataset's tokens, a little at a time; local files are read, not mapped, so that
    memory stays flat.

    What was yielded is overwritten by what comes next.
    """
    stop = start + size
    etag = indexed.bin_info.etag
    files = file_ranges(indexed.store, indexed.bin_key, start, stop, etag)
    if files is not None:
        yield from read_files(files, copy_buffer(size))
        return
    for chunk_start in range(start, stop, CHUNK_BYTES):
        chunk_stop = min(chunk_start + CHUNK_BYTES, stop)
        starts = list(range(chunk_start, chunk_stop, CHUNK_BYTES // REQUESTS_OF_A_CHUNK))
        stops = [*starts[1:], chunk_stop]
        for body in indexed.store.read(
            indexed.bin_key, list(zip(starts, stops, strict=True)), etag
        ):
            yield np.frombuffer(body, np.uint8)


def _cast(stored: Bytes, indexed: IndexedDataset, dtype: np.dtype[Any]) -> Bytes:
    """Stored tokens as bytes of another dtype. Raises ConvertError where it cannot hold an id."""
    ids = stored.view(indexed.dtype.newbyteorder("<"))
    if len(ids):
        low = int(ids.min())
        high = int(ids.max())
        limits = np.iinfo(dtype)
        if low < limits.min or high > limits.max:
            raise ConvertError(
                f"{indexed.prefix}: holds ids from {low} to {high}, which {dtype} cannot hold; "
                f"choose a wider --dtype"
            )
    return ids.astype(dtype).view(np.uint8)
