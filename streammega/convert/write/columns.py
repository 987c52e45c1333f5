"""Columns of a shard: what is stored for each of its tokens, wherever these come from.

They are written when the tokens are, from the same order of documents, so a value is always that of its
token. What belongs to no document, the padding of bins, gets the fill.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from streammega.convert.documents import concat_ranges, gather, offsets_of
from streammega.convert.job import Job
from streammega.convert.options import ConvertOptions
from streammega.convert.write.copy import CHUNK_BYTES
from streammega.convert.write.document_order import (
    OPENED_PARTS,
    DocumentOrder,
    Integers,
    Portion,
)
from streammega.convert.write.packing import pack, windows_of
from streammega.dataset.checksums import ChecksummedWriter
from streammega.dataset.column_reader import ColumnReader


class Stretches(NamedTuple):
    """Where some tokens of a shard come from, and how many these are with padding. part: of each stretch;
    start: its first token there; size: its tokens; target: the first of them here, rising.
    """

    part: Integers
    start: Integers
    size: Integers
    target: Integers
    tokens: int


def stretches_of(
    documents: DocumentOrder, portions: Iterable[Portion], options: ConvertOptions
) -> Iterator[Stretches]:
    """All tokens of a shard, as its documents are stored: one after the other, or in bins."""
    if options.pack_length is None:
        for portion in portions:
            yield _end_to_end(documents, portion)
        return
    capacity = options.pack_length
    for parts, chosen in windows_of(documents, portions, capacity):
        packed, _ = pack(documents.sizes((parts, chosen)), options)
        # What is packed are segments, whose documents are stored end to end.
        first = np.empty(len(chosen), np.int64)
        for part, rows, numbers in documents.by_part((parts, chosen)):
            indexed = documents.dataset(part)
            offsets = indexed.sequence_offsets[indexed.document_indices[numbers]]
            first[rows] = offsets // indexed.dtype.itemsize
        start = first[packed.document] + packed.start
        tokens = packed.num_bins * capacity
        yield Stretches(parts[packed.document], start, packed.size, packed.target, tokens)
    nothing = np.empty(0, np.int64)
    yield Stretches(nothing, nothing, nothing, nothing, 1)  # the token after the last bin


def _end_to_end(documents: DocumentOrder, portion: Portion) -> Stretches:
    """The sequences of documents, one after the other. Those that are so in their part are one stretch."""
    counts = documents.sequences(portion)
    bounds = offsets_of(counts)
    part = np.repeat(portion[0], counts)
    start = np.empty(int(bounds[-1]), np.int64)
    size = np.empty(int(bounds[-1]), np.int64)
    for number, rows, numbers in documents.by_part(portion):
        indexed = documents.dataset(number)
        taken = concat_ranges(indexed.document_indices[numbers], counts[rows])
        places = concat_ranges(bounds[:-1][rows], counts[rows])
        start[places] = indexed.sequence_offsets[taken] // indexed.dtype.itemsize
        size[places] = indexed.sequence_lengths[taken]
    has_tokens = size > 0
    part, start, size = part[has_tokens], start[has_tokens], size[has_tokens]
    target = offsets_of(size)
    goes_on = (part[1:] == part[:-1]) & (start[1:] == start[:-1] + size[:-1])
    first = np.flatnonzero(np.append(True, ~goes_on)[: len(part)])
    ends = np.append(target[first][1:], target[-1])
    merged = target[first]
    return Stretches(part[first], start[first], ends - merged, merged, int(target[-1]))


def write_column(
    job: Job,
    number: int,
    documents: DocumentOrder,
    stretches: Iterable[Stretches],
    writer: ChecksummedWriter,
) -> Iterator[int]:
    """Write the object of a shard for the column of a number. Yields bytes as they are written."""
    column = job.columns[number]
    fill = column.token_of(column.fill)
    tokens_at_once = max(1, CHUNK_BYTES // column.token_bytes)
    opened: dict[int, ColumnReader] = {}

    def reader_of(part: int) -> ColumnReader:
        """The column of a part; the last few stay open."""
        if part not in opened:
            if len(opened) >= OPENED_PARTS:
                opened.clear()
            opened[part] = documents.open_column(part, number)
        return opened[part]

    for group in stretches:
        for chunk in _chunks(group, tokens_at_once):
            values = np.repeat(fill, chunk.tokens)
            _fill(values, chunk, reader_of)
            writer.write(values.view(np.uint8).data)
            yield values.nbytes


def _chunks(stretches: Stretches, tokens_at_once: int) -> Iterator[Stretches]:
    """Stretches cut into chunks of the shard."""
    part, start, size, target, tokens = stretches
    ends = target + size
    for low in range(0, tokens, tokens_at_once):
        high = min(low + tokens_at_once, tokens)
        here = slice(np.searchsorted(ends, low, "right"), np.searchsorted(target, high))
        begin = np.maximum(target[here], low)
        left_out = begin - target[here]
        sizes = np.minimum(ends[here], high) - begin
        yield Stretches(part[here], start[here] + left_out, sizes, begin - low, high - low)


def _fill(
    out: NDArray[np.void], chunk: Stretches, reader_of: Callable[[int], ColumnReader]
) -> None:
    """Read the values of stretches to their places. What is end to end in a part is read together:
    shuffled documents are nearly so, since those of a segment are sorted by their keys.
    """
    sources: list[NDArray[np.uint8]] = []
    numbers = np.empty(len(chunk.part), np.int64)
    starts = np.empty(len(chunk.part), np.int64)
    for part in np.unique(chunk.part).tolist():
        rows = np.flatnonzero(chunk.part == part)
        rows = rows[np.argsort(chunk.start[rows])]
        start, end = chunk.start[rows], chunk.start[rows] + chunk.size[rows]
        is_first = np.append(True, start[1:] != end[:-1])
        is_last = np.append(is_first[1:], True)
        span_of_row = np.cumsum(is_first) - 1
        spans = list(zip(start[is_first].tolist(), end[is_last].tolist(), strict=True))
        numbers[rows] = len(sources) + span_of_row
        starts[rows] = start - start[is_first][span_of_row]
        sources += [values.reshape(-1) for values in reader_of(part).read(spans)]
    sizes = chunk.size * out.itemsize
    gather(sources, numbers, starts * out.itemsize, sizes, out, chunk.target)
