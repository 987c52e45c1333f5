"""Duplicates: documents with the same tokens, of which the first is kept."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import xxhash
from numpy.typing import NDArray

from streammega.convert.documents import Tokens
from streammega.convert.write.final_order import DocumentSet
from streammega.convert.write.job import Job
from streammega.convert.write.side_files import read_side
from streammega.storage import join_url, save_bytes

COMPARED_BYTES = 64
"""Memory for each document that is compared: six numbers, its place among the sorted ones, and a
copy of one of them, 8 bytes each.
"""


def document_hashes(batch: Tokens) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """128-bit hashes of the tokens of each document, in two halves."""
    # Of ids, whatever their width: segments of one corpus may be stored in different dtypes.
    data = batch.tokens.astype("<i8", copy=False).view(np.uint8).data
    ends = np.cumsum(batch.document_tokens) * 8
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
    for part, kept in zip(parts, is_kept, strict=True):
        name = part.side.removesuffix(".side") + ".keep"
        bits = np.packbits(kept)
        save_bytes(join_url(job.work, name), bits.tobytes(), job.storage)
        parts_with_keep.append(replace(part, keep=name))
    num_kept = sum(int(kept.sum()) for kept in is_kept)
    return parts_with_keep, total - num_kept


def _first_of_equal_ones(
    job: Job, parts: list[DocumentSet], number: int, passes: int
) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """(number of a part, its documents that are kept), of the documents of one pass."""
    hashes_low = []
    hashes_high = []
    units = []
    document_numbers = []
    part_numbers = []
    documents = []
    for part_number, part in enumerate(parts):
        side = read_side(job, part.side, part.documents)
        # Equal documents have equal hashes, so they meet in the same pass.
        in_pass = np.flatnonzero(side["hash_low"] % np.uint64(passes) == number)
        hashes_low.append(side["hash_low"][in_pass])
        hashes_high.append(side["hash_high"][in_pass])
        units.append(np.full(len(in_pass), part.unit, np.uint64))
        document_numbers.append(side["number"][in_pass])
        part_numbers.append(np.full(len(in_pass), part_number))
        documents.append(in_pass)
    low = np.concatenate(hashes_low)
    high = np.concatenate(hashes_high)
    # Equal ones end up side by side, the first of the corpus before the others.
    order = np.lexsort((np.concatenate(document_numbers), np.concatenate(units), high, low))
    low = low[order]
    high = high[order]
    is_first = np.ones(len(order), np.bool_)
    is_first[1:] = (low[1:] != low[:-1]) | (high[1:] != high[:-1])
    firsts = order[is_first]
    part_of_first = np.concatenate(part_numbers)[firsts]
    document_of_first = np.concatenate(documents)[firsts]
    for part_number in range(len(parts)):
        yield part_number, document_of_first[part_of_first == part_number]
