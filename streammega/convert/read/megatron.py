"""`.bin/.idx` pairs, zstd and tar shards, manifests: documents of tokens, by runs of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from streammega.config import StorageConfig
from streammega.convert.documents import Tokens
from streammega.convert.options import ConvertOptions
from streammega.convert.read.open import Item, Skipped, Slice
from streammega.convert.read.provenance import of_shards
from streammega.dataset.document_lookup import open_documents
from streammega.dataset.indexed import IndexedDataset
from streammega.storage.open import is_remote

_Bytes: TypeAlias = "NDArray[np.int64]"
RUN_BYTES = 8 << 20
"""Of tokens that are read and held at once, by one request: enough that its latency is small beside
the time that it takes.
"""
WINDOW = 1024
"""Documents looked at together, at first. While all of a window fits one run the next one is twice
as large, so that short documents cost few looks, and long ones none in vain.
"""


def read_pair(
    piece: Slice, options: ConvertOptions, storage: StorageConfig, skipped: Skipped
) -> Iterator[Item]:
    """Documents [start, stop)."""
    name = dataset_name(piece.input.path)
    indexed = IndexedDataset(name, storage)
    shards = open_documents(name, storage) if options.origins else None
    documents = indexed.document_indices
    stop = piece.stop
    if stop < 0:
        stop = len(documents) - 1
    for first_document, end_document in document_runs(indexed, piece.start, stop, RUN_BYTES):
        first = int(documents[first_document])
        end = int(documents[end_document])
        lengths = np.asarray(indexed.sequence_lengths[first:end])
        modes = indexed.sequence_modes
        if modes is not None:
            modes = np.asarray(modes[first:end])
        tokens = sequence_tokens(indexed, first, end)
        skipped.note_read(tokens.nbytes)
        yield Tokens(
            tokens=tokens,
            lengths=lengths,
            documents=np.diff(documents[first_document : end_document + 1]),
            modes=modes,
            source_bytes=tokens.nbytes,
            origins=None if shards is None else of_shards(shards, first_document, end_document),
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
    documents = indexed.document_indices
    window = WINDOW
    low = start
    while low < stop:
        # sequences at which the documents of the window begin, and where the last of them ends
        bounds = documents[low : min(stop, low + window) + 1]
        first = int(bounds[0])
        end = int(bounds[-1])
        sizes, offsets = _places(indexed, first, end)
        sizes_so_far = np.cumsum(sizes)
        fits = int(np.searchsorted(sizes_so_far, most, "right"))
        gaps = _gaps(sizes, offsets)
        if len(gaps):
            fits = min(fits, int(gaps[0]) + 1)
        whole_documents = int(np.searchsorted(bounds, first + fits, "right")) - 1
        high = low + max(1, whole_documents)
        if len(gaps):
            window = WINDOW
        elif high == low + window:
            window *= 2
        yield low, high
        low = high


def sequence_tokens(indexed: IndexedDataset, first: int, last: int) -> NDArray[Any]:
    """Tokens of sequences [first, last), end to end."""
    if first == last:
        return np.empty(0, indexed.dtype)
    sizes, offsets = _places(indexed, first, last)
    starts = offsets
    stops = offsets + sizes
    if not len(_gaps(sizes, offsets)):  # one request brings them all
        starts = starts[:1]
        stops = stops[-1:]
    bodies = indexed.store.read(
        indexed.bin_key,
        list(zip(starts.tolist(), stops.tolist(), strict=True)),
        indexed.bin_info.etag,
    )
    stored = indexed.dtype.newbyteorder("<")
    arrays = [np.frombuffer(body, stored) for body in bodies]
    # of one body a view, as it is a copy already, or the mapped file
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _places(indexed: IndexedDataset, first: int, last: int) -> tuple[_Bytes, _Bytes]:
    """Sizes and first bytes of sequences [first, last) in the .bin."""
    lengths = indexed.sequence_lengths[first:last].astype(np.int64)
    return lengths * indexed.dtype.itemsize, indexed.sequence_offsets[first:last]


def _gaps(sizes: _Bytes, offsets: _Bytes) -> _Bytes:
    """The sequences behind which the next one does not begin at once."""
    return np.flatnonzero(offsets[1:] != offsets[:-1] + sizes[:-1])
