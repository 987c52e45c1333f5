"""Writing a `.bin/.idx` pair to a local path or an object store."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from streammega.config import StorageConfig
from streammega.errors import FormatError
from streammega.index.format import dtype_code, encode_index
from streammega.index.reader import IndexedDataset, strip_suffix
from streammega.storage import open_store

COPY_BYTES = 32 << 20


class IndexedDatasetWriter:
    """Streams sequences into `prefix.bin`, and writes `prefix.idx` at the end.

    Nothing shows under the final names before `finalize`: a writer that is interrupted (an exception in its
    `with`, a kill) leaves no half-written pair. The `.bin` is published first and a former `.idx` removed before
    it, so that no `.idx` ever describes another `.bin`.

    Args:
        prefix: path or URL without `.bin` / `.idx`.
        dtype: token dtype, one of the eight of the format.
        multimodal: store a mode (int8) with each sequence.
        storage: credentials, transport and limits.
    """

    def __init__(
        self, prefix: str, dtype: DTypeLike = np.int32, multimodal: bool = False, storage: StorageConfig | None = None
    ) -> None:
        self.prefix = strip_suffix(str(prefix))
        self.dtype: np.dtype[Any] = np.dtype(dtype)
        self.multimodal = multimodal
        dtype_code(self.dtype)
        self._storage = storage or StorageConfig()
        self._store, self._key = open_store(f"{self.prefix}.bin", self._storage)
        self._lengths, self._modes, self._documents = array("i"), array("b"), array("q", [0])
        self._open = True
        self._bin = self._store.open_writer(self._key)

    def __enter__(self) -> IndexedDatasetWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            self.abort()
        elif self._open:
            self.finalize()

    def __del__(self) -> None:
        if getattr(self, "_bin", None) is not None:
            self.abort()

    def add_item(self, tokens: Any, mode: int = 0) -> None:
        """Append one sequence (array, tensor or list of token ids, shape [length]).

        Raises FormatError if a value does not fit the dtype: it would wrap around silently.
        """
        data = self._cast(tokens)
        self._bin.write(data.data.cast("B") if data.size else b"")
        self._lengths.append(data.size)
        if self.multimodal:
            self._modes.append(mode)

    def add_document(self, tokens: Any, lengths: Sequence[int], modes: Sequence[int] | None = None) -> None:
        """Append one document of several sequences: their tokens end to end, and the length of each."""
        data = self._cast(tokens)
        if sum(lengths) != data.size or min(lengths, default=0) < 0:
            raise FormatError(f"{self.prefix}: lengths add up to {sum(lengths)}, the document has {data.size} tokens")
        if self.multimodal and len(modes or ()) != len(lengths):
            raise FormatError(f"{self.prefix}: {len(lengths)} sequences need as many modes, got {len(modes or ())}")
        self._bin.write(data.data.cast("B") if data.size else b"")
        self._lengths.extend(lengths)
        if self.multimodal:
            self._modes.extend(modes or ())
        self.end_document()

    def end_document(self) -> None:
        """Close the document that the last sequences belong to."""
        self._documents.append(len(self._lengths))

    def add_index(self, prefix: str) -> None:
        """Append all sequences and documents of another pair of the same dtype (a merge)."""
        other = IndexedDataset(prefix, self._storage)
        if other.dtype != self.dtype or (other.sequence_modes is not None) != self.multimodal:
            raise FormatError(f"{prefix}: {other.dtype} tokens cannot be appended to the {self.dtype} of {self.prefix}")
        shift = len(self._lengths)
        sizes = other.sequence_lengths.astype(np.int64) * other.dtype.itemsize
        if np.array_equal(other.sequence_offsets, np.cumsum(sizes) - sizes):
            self._copy(other, 0, int(sizes.sum()))
        else:  # sequences not laid end to end: ours will be
            for start, size in zip(other.sequence_offsets.tolist(), sizes.tolist(), strict=True):
                self._copy(other, start, start + size)
        self._lengths.frombytes(other.sequence_lengths.astype(np.int32).tobytes())
        if other.sequence_modes is not None:
            self._modes.frombytes(other.sequence_modes.tobytes())
        self._documents.frombytes((other.document_indices[1:] + shift).tobytes())

    def _copy(self, other: IndexedDataset, start: int, stop: int) -> None:
        for at in range(start, stop, COPY_BYTES):
            self._bin.write(other.store.read_ranges(other.bin_key, [at], [min(at + COPY_BYTES, stop)])[0])

    def finalize(self) -> None:
        """Publish the `.bin`, then the `.idx`. The writer cannot be used afterwards."""
        if not self._open:
            raise FormatError(f"{self.prefix}: this writer is closed already")
        self._open = False
        index_store, index_key = open_store(f"{self.prefix}.idx", self._storage)
        index_store.delete(index_key)
        self._bin.commit()
        index = index_store.open_writer(index_key)
        try:
            for chunk in self._index_chunks():
                index.write(chunk)
            index.commit()
        except BaseException:
            index.abort()
            raise

    def abort(self) -> None:
        """Throw away what was written. Does nothing after `finalize`."""
        if self._open:
            self._open = False
            self._bin.abort()

    def _index_chunks(self) -> Any:
        lengths = np.frombuffer(self._lengths, np.int32)
        documents = np.frombuffer(self._documents, np.int64)
        modes = np.frombuffer(self._modes, np.int8) if self.multimodal else None
        return encode_index(self.dtype, lengths, documents, modes)

    def _cast(self, tokens: Any) -> NDArray[Any]:
        data = np.asarray(tokens).reshape(-1)
        if data.dtype == self.dtype or data.size == 0:
            return np.ascontiguousarray(data, self.dtype)
        if np.issubdtype(self.dtype, np.integer):
            limits = np.iinfo(self.dtype)
            low, high = data.min(), data.max()
            if low < limits.min or high > limits.max or not np.issubdtype(data.dtype, np.integer):
                raise FormatError(
                    f"{self.prefix}: sequence {len(self._lengths)} holds {data.dtype} values from {low} to {high}, which "
                    f"{self.dtype} cannot hold; choose a wider dtype (int32 for vocabularies of 65500 and more)"
                )
        return np.ascontiguousarray(data, self.dtype)
