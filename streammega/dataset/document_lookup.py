"""Which documents the tokens of a shard belong to, and where the tokens of a document are. Both follow
from the `.idx` alone.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streammega.config import StorageConfig
from streammega.dataset.idx import IndexArrays
from streammega.dataset.manifest import Shard
from streammega.dataset.names import with_suffix
from streammega.dataset.opening import open_manifests
from streammega.dataset.provenance import ProvenanceReader, open_provenance
from streammega.dataset.shard import index_arrays, open_tokens
from streammega.errors import FormatError
from streammega.errors.cached_property import cached_property
from streammega.errors.redaction import redact_urls
from streammega.storage import ObjectInfo, Store

Integers = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class DocumentRun:
    """Consecutive tokens of one document in a shard.

    document: its number in the `.idx`. start, stop: its tokens, of `document_tokens` in all.
    file_start: the token of the shard at which they begin.
    """

    document: int
    start: int
    stop: int
    document_tokens: int
    file_start: int


class ShardDocuments:
    """The documents of one shard.

    A document is found by a binary search over the mapped `.idx` (of a remote shard, this node's
    copy). Methods raise FormatError for an `.idx` that contradicts itself, and StorageError.
    """

    def __init__(self, shard: Shard, storage: StorageConfig) -> None:
        self.shard = shard
        self.storage = storage

    @property
    def name(self) -> str:
        """The shard's name, as its dataset has it: a prefix, or with the suffix of its kind."""
        return with_suffix(self.shard.name, self.shard.kind)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of its tokens, as they are stored."""
        return self.shard.token_dtype

    @property
    def num_documents(self) -> int:
        """How many documents it has."""
        return self.shard.documents

    @property
    def num_sequences(self) -> int:
        """How many sequences it has."""
        return self.shard.sequences

    @property
    def num_tokens(self) -> int:
        """How many tokens it has."""
        return self.shard.tokens

    def open_tokens(self) -> tuple[Store, ObjectInfo]:
        """The store of its tokens, and their one array."""
        return open_tokens(self.shard, self.storage)

    @cached_property
    def origins(self) -> ProvenanceReader | None:
        """Where its documents came from; None where that was not kept. Raises FormatError for a file
        of another shard.
        """
        reader = open_provenance(self.shard.name, self.storage)
        if reader is not None and reader.documents != self.num_documents:
            raise FormatError(
                f"{reader.url}: has the origins of {reader.documents} documents, and its .idx "
                f"has {self.num_documents}; it belongs to another dataset: remove it, or convert again"
            )
        return reader

    def runs(self, start: int, stop: int) -> list[DocumentRun]:
        """The documents of tokens [start, stop) of the shard, in the order of their tokens.

        Empty sequences are left out, and so are tokens of no sequence, which foreign pairs may have.
        """
        itemsize = self._arrays.dtype.itemsize
        runs: list[DocumentRun] = []
        for sequence in self._sequences(start * itemsize, stop * itemsize).tolist():
            first = int(self._arrays.sequence_offsets[sequence]) // itemsize
            low = max(start, first)
            high = min(stop, first + int(self._arrays.sequence_lengths[sequence]))
            if low < high:
                run = self._run(sequence, low, high - low, low - first)
                _append(runs, run)
        return runs

    def tokens_of(self, document: int) -> list[DocumentRun]:
        """All tokens of a document: one run, or several where its sequences are apart.

        Raises IndexError for a number that no document has.
        """
        if not 0 <= document < self.num_documents:
            raise IndexError(
                f"document {document} of {redact_urls(self.shard.index_url)}, which has {self.num_documents}"
            )
        itemsize = self._arrays.dtype.itemsize
        runs: list[DocumentRun] = []
        for sequence in self.sequences_of(document):
            size = int(self._arrays.sequence_lengths[sequence])
            begin = int(self._arrays.sequence_offsets[sequence]) // itemsize
            if size:
                _append(runs, self._run(sequence, begin, size, 0))
        return runs

    def tokens_of_all(self, documents: Integers) -> tuple[Integers, Integers]:
        """(start, stop) of each sequence of many documents, in tokens of the shard.

        Raises FormatError for a number that no document has.
        """
        bounds = self._arrays.document_indices
        unknown = documents[(documents < 0) | (documents >= self.num_documents)]
        if len(unknown):
            raise FormatError(
                f"{self.shard.index_url}: has {self.num_documents} documents, and no number "
                f"{unknown[0]}; does the list of documents belong to it?"
            )
        first = bounds[documents].astype(np.int64)
        count = bounds[documents + 1] - first
        if len(documents) and (count.min() < 0 or (first + count).max() > self.num_sequences):
            raise FormatError(
                f"{self.shard.index_url}: its documents overlap; copy it again, or convert again"
            )
        before = np.cumsum(count) - count
        # the sequences of all documents, one after the other
        sequences = np.repeat(first - before, count) + np.arange(count.sum())
        start = self._arrays.sequence_offsets[sequences] // self._arrays.dtype.itemsize
        return start, start + self._arrays.sequence_lengths[sequences]

    def sequences_of(self, document: int) -> range:
        """The numbers of a document's sequences (Megatron's order calls these documents).

        Raises FormatError for numbers that no sequence has.
        """
        bounds = self._arrays.document_indices
        first = int(bounds[document])
        last = int(bounds[document + 1])
        if not 0 <= first <= last <= self._arrays.num_sequences:
            raise FormatError(
                f"{self.shard.index_url}: document {document} has the sequences [{first}, {last}) "
                f"of {self._arrays.num_sequences}; copy it again, or convert again"
            )
        return range(first, last)

    def document_of(self, sequence: int) -> int:
        """The document of a sequence. Raises FormatError where it has none."""
        bounds = self._arrays.document_indices
        # numpy's search would copy all of an array of a mapped `.idx`, which is not aligned
        document = bisect_right(bounds, sequence) - 1
        is_one = 0 <= document < self._arrays.num_documents
        if not is_one or not bounds[document] <= sequence < bounds[document + 1]:
            raise FormatError(
                f"{self.shard.index_url}: sequence {sequence} belongs to no document; copy it again, or convert again"
            )
        return document

    def _run(self, sequence: int, file_start: int, size: int, offset: int) -> DocumentRun:
        """`size` tokens of a sequence from `offset` on, by their places in its document."""
        document = self.document_of(sequence)
        sequences = self.sequences_of(document)
        lengths = self._arrays.sequence_lengths
        start = int(lengths[sequences.start : sequence].sum(dtype=np.int64)) + offset
        return DocumentRun(
            document=document,
            start=start,
            stop=start + size,
            document_tokens=int(lengths[sequences.start : sequences.stop].sum(dtype=np.int64)),
            file_start=file_start,
        )

    def _sequences(self, begin: int, end: int) -> Integers:
        """The sequences that have bytes of [begin, end), in the order of their bytes."""
        first, last = _overlapping(self._arrays.sequence_offsets, begin, end)
        lengths = self._arrays.sequence_lengths[first:last].astype(np.int64)
        starts = self._arrays.sequence_offsets[first:last]
        ends = starts + lengths * self._arrays.dtype.itemsize
        # If these are end to end and have all bytes, no other sequences can have any.
        is_proof = len(starts) > 0 and np.array_equal(starts[1:], ends[:-1])
        if is_proof and starts[0] <= begin and end <= ends[-1]:
            return np.arange(first, last)
        # In a foreign pair sequences may have any order: a binary search needs a sorted one.
        in_order = self._by_offset
        first, last = _overlapping(self._arrays.sequence_offsets[in_order], begin, end)
        return in_order[first:last]

    @cached_property
    def _arrays(self) -> IndexArrays:
        return index_arrays(self.shard, self.storage)

    @cached_property
    def _by_offset(self) -> Integers:
        order: Integers = np.argsort(self._arrays.sequence_offsets, kind="stable")
        return order


def _overlapping(offsets: Integers, begin: int, end: int) -> tuple[int, int]:
    """[first, last) of the sequences, by rising offsets, that may have bytes of [begin, end)."""
    return max(0, bisect_right(offsets, begin) - 1), bisect_left(offsets, end)


def open_documents(name: str, storage: StorageConfig) -> list[ShardDocuments]:
    """The shards of a dataset, in their order. Raises ObjectNotFoundError, FormatError,
    StorageError.
    """
    (manifest,) = open_manifests([name], storage)
    return [ShardDocuments(shard, storage) for shard in manifest.shards]


def _append(runs: list[DocumentRun], run: DocumentRun) -> None:
    """Add a run. It extends the last one where it continues that."""
    last = runs[-1] if runs else None
    if (
        last is not None
        and (last.document, last.stop) == (run.document, run.start)
        and last.file_start + last.stop - last.start == run.file_start
    ):
        runs[-1] = replace(last, stop=run.stop)
    else:
        runs.append(run)
