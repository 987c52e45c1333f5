"""Duplicates: documents with the same tokens, of which the first is kept."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from streammega.convert.documents import Tokens
from streammega.convert.job import Job
from streammega.convert.write.document_order import DocumentSet, read_side
from streammega.storage import join_url, save_bytes

COMPARED_BYTES = 64
"""Memory for each document that is compared: six numbers, its place among the sorted ones, and a
copy of one of them, 8 bytes each.
"""


def document_hashes(batch: Tokens) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """128-bit hashes of the tokens of each document, in two halves."""
    # Of ids, whatever their width: segments of one corpus may be stored in different dtypes.
    ids = batch.tokens.astype("<i8", copy=False)
    data = ids.view(np.uint8).data
    ends = np.cumsum(batch.document_tokens) * ids.itemsize
    digests = bytearray()
    start = 0
    for end in ends.tolist():
        digests += xxhash.xxh3_128_digest(data[start:end])
        start = end
    halves = np.frombuffer(digests, "<u8").reshape(-1, 2)
    return halves[:, 0], halves[:, 1]


def remove_duplicates(
    job: Job, parts: list[DocumentSet], memory_bytes: int
) -> tuple[list[DocumentSet], int]:
    """The parts with a `.keep` file each, and how many documents are not kept: all but the first of
    equal ones.

    Hashes are compared in as many passes as memory asks for. The first is that of the smallest
    (part's unit, document).
    """
    total = sum(part.documents for part in parts)
    passes = max(1, -(-total * COMPARED_BYTES // memory_bytes))
    is_kept = [np.zeros(part.documents, np.bool_) for part in parts]
    for number in range(passes):
        for part_number, documents in _first_of_equal_ones(job, parts, number, passes):
            is_kept[part_number][documents] = True
    parts_with_keep = []
    num_kept = 0
    for part, flags in zip(parts, is_kept, strict=True):
        name = part.side.removesuffix(".side") + ".keep"
        bits = np.packbits(flags)
        save_bytes(join_url(job.work, name), bits.tobytes(), job.storage)
        parts_with_keep.append(replace(part, keep=name))
        num_kept += int(np.count_nonzero(flags))
    return parts_with_keep, total - num_kept


def _first_of_equal_ones(
    job: Job, parts: list[DocumentSet], number: int, passes: int
) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """(number of a part, its documents that are kept), of the documents of one pass."""
    columns: dict[str, list[NDArray[Any]]] = {}
    for part_number, part in enumerate(parts):
        side = read_side(job, part.side, part.documents)
        # Equal documents have equal hashes, so they meet in the same pass.
        documents = np.flatnonzero(side["hash_low"] % np.uint64(passes) == number)
        rows = {
            "low": side["hash_low"][documents],
            "high": side["hash_high"][documents],
            "unit": np.full(len(documents), part.unit, np.uint64),
            "number": side["number"][documents],
            "part": np.full(len(documents), part_number),
            "document": documents,
        }
        for name, values in rows.items():
            columns.setdefault(name, []).append(values)
    compared = {name: np.concatenate(arrays) for name, arrays in columns.items()}
    # Equal ones end up side by side, the first of the corpus before the others.
    order = np.lexsort([compared[name] for name in ("number", "unit", "high", "low")])
    low = compared["low"][order]
    high = compared["high"][order]
    is_first = np.ones(len(order), np.bool_)
    is_first[1:] = (low[1:] != low[:-1]) | (high[1:] != high[:-1])
    firsts = order[is_first]
    for part_number in range(len(parts)):
        yield part_number, compared["document"][firsts][compared["part"][firsts] == part_number]
