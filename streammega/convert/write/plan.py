"""The inputs cut into units: stretches that one worker handles, planned from their sizes alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from streammega.config import StorageConfig
from streammega.convert.options import ConvertOptions
from streammega.convert.read.inputs import Input
from streammega.convert.read.json_values import HEAD_BYTES, holds_lines
from streammega.convert.read.pairs import dataset_name, document_runs
from streammega.convert.read.slices import Slice, open_plain, read_head
from streammega.convert.read.suffixes import is_compressed, may_hold_values
from streammega.dataset.indexed import IndexedDataset

UNIT_BYTES = 64 << 20
"""Input bytes of a unit at most: what a kill undoes, and what a worker may be behind the others."""
LEAST_UNIT_BYTES = 4 << 20
"""At least, however little there is to do: a unit costs a few files and a record."""
UNITS = 128
"""So many units are wanted within these bounds: enough to keep many workers busy to the end."""
UNIT_FILES = 4096
"""Files of a unit at most: very many tiny ones are spread over workers too."""


def plan_units(
    inputs: Sequence[Input], options: ConvertOptions, storage: StorageConfig
) -> list[list[Slice]]:
    """Units in the order of the inputs: large files are cut where their format allows, small ones
    put together.
    """
    units: list[list[Slice]] = []
    unit_bytes = _unit_bytes(inputs)
    room = 0
    for item in inputs:
        for piece, size in _slices(item, unit_bytes, storage):
            has_room = bool(units) and size <= room and len(units[-1]) < UNIT_FILES
            if has_room:
                units[-1].append(piece)
            else:
                units.append([piece])
                room = unit_bytes
            room -= size
    return units


def _unit_bytes(inputs: Sequence[Input]) -> int:
    """Input bytes of a unit."""
    wanted = sum(item.size for item in inputs) // UNITS
    # Who sets UNIT_BYTES below the least means it.
    least = min(UNIT_BYTES, LEAST_UNIT_BYTES)
    return max(least, min(UNIT_BYTES, wanted))


def _slices(item: Input, unit_bytes: int, storage: StorageConfig) -> Iterator[tuple[Slice, int]]:
    """(slice, bytes) of an input. A slice of a file that is cut fills a unit, whatever its size."""
    is_large = item.size > unit_bytes
    if is_large and _may_be_cut_at_lines(item, storage):
        for start in range(0, item.size, unit_bytes):
            stop = min(start + unit_bytes, item.size)
            yield Slice(input=item, start=start, stop=stop, stored_bytes=stop - start), unit_bytes
    elif item.format == "megatron":
        indexed = IndexedDataset(dataset_name(item.path), storage)
        documents = len(indexed.document_indices) - 1
        for first, stop in document_runs(indexed, 0, documents, UNIT_BYTES):
            share = item.size * (stop - first) // documents
            yield Slice(input=item, start=first, stop=stop, stored_bytes=share), unit_bytes
    elif item.format == "parquet" and is_large:
        yield from _row_groups(item, unit_bytes, storage)
    else:
        # Of a folder, only the size of its index is known.
        is_folder = item.format in ("mds", "litdata")
        yield Slice(input=item, stored_bytes=None if is_folder else item.size), item.size


def _may_be_cut_at_lines(item: Input, storage: StorageConfig) -> bool:
    """Whether an input has a document in each line, so that one can begin anywhere."""
    if item.format not in ("lines", "jsonl") or is_compressed(item.path):
        return False
    if item.format == "lines":
        return True
    # Only a look into the file tells `.json` with a record a line from one of values over lines.
    return not may_hold_values(item.path) or holds_lines(read_head(item.url, storage, HEAD_BYTES))


def _row_groups(
    item: Input, unit_bytes: int, storage: StorageConfig
) -> Iterator[tuple[Slice, int]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with open_plain(item.url, storage, item.etag) as file:
        try:
            metadata = pq.ParquetFile(file).metadata
        except (pa.ArrowException, OSError):  # whoever reads it says what is wrong
            yield Slice(input=item), unit_bytes
            return
        last_group = metadata.num_row_groups - 1
        sizes = [metadata.row_group(group).total_byte_size for group in range(last_group + 1)]
        first = 0
        size = 0
        for group in range(metadata.num_row_groups):
            size += sizes[group]
            if size >= unit_bytes or group == last_group:
                share = item.size * size // max(1, sum(sizes))
                piece = Slice(input=item, start=first, stop=group + 1, stored_bytes=share)
                yield piece, unit_bytes
                first = group + 1
                size = 0


def stored_bytes(pieces: Iterable[Slice]) -> int | None:
    """Of slices together; None where that of one is not known."""
    total = 0
    for piece in pieces:
        if piece.stored_bytes is None:
            return None
        total += piece.stored_bytes
    return total
