"""`.bin/.idx` pairs, zstd and tar shards, manifests: documents of tokens, by runs of them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from streammega.config import StorageConfig
from streammega.convert.documents import Tokens, origins_in
from streammega.convert.read.source import Input, Slice, Source
from streammega.dataset.column_reader import ColumnReader
from streammega.dataset.document_lookup import ShardDocuments, open_documents
from streammega.dataset.indexed import IndexedDataset
from streammega.dataset.provenance import DOCUMENT, DocumentOrigins, concat_origins
from streammega.storage.etags import check_version
from streammega.storage.open import is_remote
from streammega.storage.store import Span

_Bytes: TypeAlias = "NDArray[np.int64]"
RUN_BYTES = 8 << 20
"""Bytes of tokens that one request reads: its latency is small compared with its transfer."""
WINDOW = 1024
"""Documents that are measured together at first. While all of a window fits one run, the next
window is twice as large: short documents then cost few steps.
"""


def read_pair(source: Source) -> Iterator[Tokens]:
    """Documents [start, stop). Raises ObjectChangedError if a file of the pair changed meanwhile."""
    piece = source.piece
    name = dataset_name(piece.input.path)
    indexed = IndexedDataset(name, source.storage)
    check_version(name, piece.version, indexed.version)
    shards = open_documents(name, source.storage) if source.options.provenance else None
    documents = indexed.document_indices
    stop = len(documents) - 1 if piece.stop < 0 else piece.stop
    readers = [indexed.read_column(column) for column in piece.input.columns]
    token_bytes = indexed.dtype.itemsize
    all_bytes = token_bytes + sum(column.token_bytes for column in piece.input.columns)
    run_bytes = RUN_BYTES * token_bytes // all_bytes
    for first_document, end_document in document_runs(indexed, piece.start, stop, run_bytes):
        first = int(documents[first_document])
        end = int(documents[end_document])
        lengths = np.asarray(indexed.sequence_lengths[first:end])
        modes = indexed.sequence_modes
        if modes is not None:
            modes = np.asarray(modes[first:end])
        tokens = sequence_tokens(indexed, first, end)
        source.skipped.note_read(tokens.nbytes)
        yield Tokens(
            tokens=tokens,
            lengths=lengths,
            documents=np.diff(documents[first_document : end_document + 1]),
            modes=modes,
            columns=_values_of(readers, sequence_spans(indexed, first, end), token_bytes),
            source_bytes=tokens.nbytes,
            origins=None if shards is None else _origins(shards, first_document, end_document),
        )
    check_local_version(name, piece.version, source.storage)


def _values_of(
    readers: Sequence[ColumnReader], spans: Sequence[Span], token_bytes: int
) -> dict[str, NDArray[np.void]]:
    """What columns have for tokens, by their names. spans: the bytes of these in the .bin."""
    of_tokens = [(start // token_bytes, stop // token_bytes) for start, stop in spans]
    values = {}
    for reader in readers:
        size = reader.column.token_bytes
        stored = np.concatenate([np.empty((0, size), np.uint8), *reader.read(of_tokens)])
        values[reader.column.name] = stored.view(f"V{size}")[:, 0]
    return values


def check_local_version(name: str, version: str, storage: StorageConfig) -> None:
    """Raise ObjectChangedError if a local pair was written over while it was read. Each read of a
    remote one was compared.
    """
    if not is_remote(name):
        check_version(name, version, IndexedDataset(name, storage).version)


def cut_documents(
    item: Input, _bytes: int, max_bytes: int, storage: StorageConfig
) -> Iterator[Slice]:
    """Slices of documents that are stored end to end."""
    indexed = IndexedDataset(dataset_name(item.path), storage)
    documents = len(indexed.document_indices) - 1
    version = indexed.version
    for first, stop in document_runs(indexed, 0, documents, max_bytes):
        stored = item.size * (stop - first) // documents
        yield Slice(input=item, start=first, stop=stop, version=version, stored_bytes=stored)


def _origins(shards: Sequence[ShardDocuments], first: int, stop: int) -> DocumentOrigins:
    """Those of documents [first, stop): as kept with the shards, else the shard and the document's
    number there.
    """
    parts = [origins_in("", DOCUMENT, 0, 0)]
    documents_before = 0
    for shard in shards:
        low = max(0, first - documents_before)
        high = min(shard.num_documents, stop - documents_before)
        documents_before += shard.num_documents
        if low < high and shard.origins is not None:
            parts.append(shard.origins.between(low, high))
        elif low < high:
            parts.append(origins_in(shard.name, DOCUMENT, low, high - low))
    return concat_origins(parts)


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
    indexed: IndexedDataset, start: int, stop: int, max_bytes: int
) -> Iterator[tuple[int, int]]:
    """[first, last) of documents of at most `max_bytes` together, at least one; the sequences of
    several are stored end to end.
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
        fits = int(np.searchsorted(sizes_so_far, max_bytes, "right"))
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
    spans = sequence_spans(indexed, first, last)
    bodies = indexed.store.read(indexed.bin_key, spans, indexed.bin_info.etag)
    stored = indexed.dtype.newbyteorder("<")
    arrays = [np.frombuffer(body, stored) for body in bodies]
    # of one body a view, as it is a copy already, or the mapped file
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def sequence_spans(indexed: IndexedDataset, first: int, last: int) -> list[Span]:
    """The bytes of sequences [first, last) in the .bin: one span if they are end to end."""
    if first == last:
        return []
    sizes, starts = _places(indexed, first, last)
    stops = starts + sizes
    if not len(_gaps(sizes, starts)):
        return [(int(starts[0]), int(stops[-1]))]
    return list(zip(starts.tolist(), stops.tolist(), strict=True))


def _places(indexed: IndexedDataset, first: int, last: int) -> tuple[_Bytes, _Bytes]:
    """Sizes and first bytes of sequences [first, last) in the .bin."""
    lengths = indexed.sequence_lengths[first:last].astype(np.int64)
    return lengths * indexed.dtype.itemsize, indexed.sequence_offsets[first:last]


def _gaps(sizes: _Bytes, offsets: _Bytes) -> _Bytes:
    """The sequences behind which the next one does not begin at once."""
    return np.flatnonzero(offsets[1:] != offsets[:-1] + sizes[:-1])
