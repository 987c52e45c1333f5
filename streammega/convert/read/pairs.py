"""`.bin/.idx` pairs, zstd and tar shards, manifests: documents of tokens, by runs of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streammega.config import StorageConfig
from streammega.convert.documents import Tokens
from streammega.convert.options import ConvertOptions
from streammega.convert.read.slices import Item, Skipped, Slice
from streammega.dataset.indexed import IndexedDataset
from streammega.storage.open import is_remote

RUN_BYTES = 8 << 20
WINDOW = 1024
"""Documents looked at together, at first."""


def read_pair(
    piece: Slice, options: ConvertOptions, storage: StorageConfig, skipped: Skipped
) -> Iterator[Item]:
    """Documents [start, stop)."""
    indexed = IndexedDataset(dataset_name(piece.input.path), storage)
    documents = indexed.document_indices
    lengths = indexed.sequence_lengths
    stop = len(documents) - 1 if piece.stop < 0 else piece.stop
    for low, high in document_runs(indexed, piece.start, stop, RUN_BYTES):
        first = int(documents[low])
        last = int(documents[high])
        modes = indexed.sequence_modes
        yield Tokens(
            tokens=sequence_tokens(indexed, first, last),
            lengths=np.asarray(lengths[first:last]),
            documents=np.diff(documents[low : high + 1]),
            modes=None if modes is None else np.asarray(modes[first:last]),
            source_bytes=int(lengths[first:last].sum(dtype=np.int64)) * indexed.dtype.itemsize,
        )


def dataset_name(path: str) -> str:
    """The name under which IndexedDataset opens a `megatron` input."""
    if not path.endswith(".idx") or is_remote(path):
        return path.removesuffix(".idx")
    prefix = path.removesuffix(".idx")
    for suffix in (".bin.zst", ".tar"):
        if os.path.exists(prefix + suffix) and not os.path.exists(f"{prefix}.bin"):
            return prefix + suffix
    return prefix


def document_runs(
    indexed: IndexedDataset, start: int, stop: int, most: int
) -> Iterator[tuple[int, int]]:
    """[first, last) of documents of at most `most` bytes together, at least one; the sequences of
    several lie end to end.
    """
    itemsize = indexed.dtype.itemsize
    documents = indexed.document_indices
    window = WINDOW
    low = start
    while low < stop:
        bounds = documents[low : min(stop, low + window) + 1]
        first = int(bounds[0])
        last = int(bounds[-1])
        sizes = indexed.sequence_lengths[first:last].astype(np.int64) * itemsize
        ends = np.cumsum(sizes)
        offsets = indexed.sequence_offsets[first:last]
        broken = np.flatnonzero(offsets[1:] != offsets[:-1] + sizes[:-1])
        straight = int(broken[0]) + 1 if len(broken) else len(sizes)
        fits = min(straight, int(np.searchsorted(ends, most, "right")))
        high = low + max(1, int(np.searchsorted(bounds, first + fits, "right")) - 1)
        window = WINDOW if len(broken) else 2 * window if high == low + window else window
        yield low, high
        low = high


def sequence_tokens(indexed: IndexedDataset, first: int, last: int) -> NDArray[Any]:
    """Tokens of sequences [first, last), end to end."""
    if first == last:
        return np.empty(0, indexed.dtype)
    sizes = indexed.sequence_lengths[first:last].astype(np.int64) * indexed.dtype.itemsize
    offsets = indexed.sequence_offsets[first:last]
    if (offsets[1:] == offsets[:-1] + sizes[:-1]).all():
        start = int(offsets[0])
        stop = start + int(sizes.sum())
        body = indexed.store.read_ranges(indexed.bin_key, [start], [stop], indexed.bin_info.etag)[0]
        return np.frombuffer(body, indexed.dtype.newbyteorder("<"))
    stops = (offsets + sizes).tolist()
    bodies = indexed.store.read_ranges(
        indexed.bin_key, offsets.tolist(), stops, indexed.bin_info.etag
    )
    return np.concatenate([np.frombuffer(body, indexed.dtype.newbyteorder("<")) for body in bodies])
