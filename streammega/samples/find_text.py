"""Where some token ids lie in the data of a split: all of its tokens are looked through."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streammega.dataset.document_lookup import ShardDocuments
from streammega.samples.provenance import Provenance
from streammega.samples.traced import DocumentName

Ids = NDArray[Any]
LOOKED_AT = 16 << 20
"""Bytes of a shard that are held at once."""


def documents_with(
    provenance: Provenance, patterns: Sequence[Sequence[int]]
) -> Iterator[tuple[DocumentName, int, Ids]]:
    """(document, the token of the shard at which it begins, ids there) for every place at which one
    of some runs of ids lies, in the order of datasets and shards.

    The ids are a few more on both sides, as context. Cost: every byte of the datasets is read, once
    however often the blend has them. Raises StorageError.
    """
    searched: set[str] = set()
    for dataset, prefix in enumerate(provenance.datasets):
        if prefix in searched:
            continue
        searched.add(prefix)
        for shard, documents in enumerate(provenance.shards(dataset)):
            for start, size, ids in _places(documents, patterns):
                for run in documents.runs(start, start + size)[:1]:
                    name = DocumentName(dataset=dataset, shard=shard, document=run.document)
                    yield name, start, ids


def _places(
    documents: ShardDocuments, patterns: Sequence[Sequence[int]]
) -> Iterator[tuple[int, int, Ids]]:
    """(token of a shard, how many are found there, ids around them)."""
    longest = max(len(pattern) for pattern in patterns)
    at_once = LOOKED_AT // documents.dtype.itemsize
    for first, ids in _stretches(documents, at_once, longest):
        for pattern in patterns:
            # Those behind are found in the next stretch, which begins with them.
            for place in _starts(ids, pattern).tolist():
                if place < at_once:
                    around = ids[max(0, place - longest) : place + len(pattern) + longest]
                    yield first + place, len(pattern), around


def _stretches(documents: ShardDocuments, at_once: int, longest: int) -> Iterator[tuple[int, Ids]]:
    """(first token, ids) of a shard's stretches, each with the beginning of the next, so that what
    lies in both is found.
    """
    store, info = documents.files.tokens()
    dtype = documents.dtype
    itemsize = dtype.itemsize
    tokens = info.size // itemsize
    part = documents.files.storage.part_bytes
    for first in range(0, tokens, at_once):
        stop = min(tokens, first + at_once + longest - 1)
        starts = list(range(first * itemsize, stop * itemsize, part))
        stops = [*starts[1:], stop * itemsize]
        bodies = store.read(info.key, list(zip(starts, stops, strict=True)), info.etag)
        yield first, np.frombuffer(b"".join(bytes(body) for body in bodies), dtype)


def _starts(ids: Ids, pattern: Sequence[int]) -> NDArray[np.int64]:
    """Where a run of ids begins in an array, ascending."""
    if len(pattern) > len(ids):
        return np.empty(0, np.int64)
    found = np.flatnonzero(ids[: len(ids) - len(pattern) + 1] == pattern[0])
    for offset, token in enumerate(pattern[1:], 1):
        found = found[ids[found + offset] == token]
    return found
