"""Writing a token shard (`.bin`, `.bin.zst` or `.tar`, and its `.idx`) to a local path or an object
store.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from streammega.config import StorageConfig
from streammega.dataset.checksums import HashingWriter
from streammega.dataset.idx import dtype_code, encode_index
from streammega.dataset.indexed import IndexedDataset
from streammega.dataset.shards import SUFFIXES, Kind, split_name, strip_suffix
from streammega.dataset.tar import TarWriter
from streammega.errors import FormatError
from streammega.storage import open_store
from streammega.storage.frames import FRAME_BYTES, LEVEL, FrameWriter

COPY_BYTES = 32 << 20


class IndexedDatasetWriter:
    """Streams sequences into `prefix.bin` (or `.bin.zst`, `.tar`), and writes `prefix.idx` at the
    end.

    Nothing shows under the final names before `finalize`: a writer that is interrupted (an
    exception in its `with`, a kill) leaves no half-written pair. The `.bin` is published first and
    a former `.idx` removed before it, so that no `.idx` ever describes another `.bin`.

    Args: prefix: path or URL without `.bin` / `.idx`. dtype: token dtype, one of the eight of the
        format. multimodal: store a mode (int8) with each sequence. storage: credentials, transport
        and limits. kind: "bin"; "zst", seekable zstd frames; "tar", a WebDataset sample for each
        sequence. Default: by the prefix's suffix. level, frame_bytes: of the zstd frames.
        index_prefix: write the `.idx` elsewhere, for a caller that publishes it when several shards
        are done. first_sequence: of a dataset of several shards, the number of this one's first
        sequence: a tar's members are named by it.
    """

    def __init__(
        self, prefix: str, dtype: DTypeLike = np.int32, multimodal: bool = False, storage: StorageConfig | None = None,
        *, kind: Kind | None = None, level: int = LEVEL, frame_bytes: int = FRAME_BYTES, index_prefix: str | None = None,
        first_sequence: int = 0,
    ) -> None:  # fmt: skip
        self.prefix, named = split_name(str(prefix))
        self.kind: Kind = kind or named
        self.dtype: np.dtype[Any] = np.dtype(dtype)
        self.multimodal = multimodal
        dtype_code(self.dtype)
        self._storage = storage or StorageConfig()
        self._index_prefix = index_prefix or self.prefix
        self._store, self._key = open_store(self.prefix + SUFFIXES[self.kind], self._storage)
        self._lengths, self._modes, self._documents = array("i"), array("b"), array("q", [0])
        self._open = True
        self.stored = HashingWriter(self._store.open_writer(self._key))
        """Counts and checksums of what was written so far, as stored."""
        self.index = HashingWriter(None)
        self._tar = (
            TarWriter(self.stored, self.dtype, multimodal, first_sequence)
            if self.kind == "tar"
            else None
        )
        self._bin = self._tar or (
            FrameWriter(self.stored, level, frame_bytes) if self.kind == "zst" else self.stored
        )

    def __enter__(self) -> IndexedDatasetWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
        self._put(_bytes(data), np.array([data.size], np.int32), np.array([mode], np.int8))

    def add_document(
        self, tokens: Any, lengths: Sequence[int], modes: Sequence[int] | None = None
    ) -> None:
        """Append one document of several sequences: their tokens end to end, and the length of
        each.
        """
        data = self._cast(tokens)
        if sum(lengths) != data.size or min(lengths, default=0) < 0:
            raise FormatError(
                f"{self.prefix}: lengths add up to {sum(lengths)}, the document has {data.size} tokens"
            )
        if self.multimodal and len(modes or ()) != len(lengths):
            raise FormatError(
                f"{self.prefix}: {len(lengths)} sequences need as many modes, got {len(modes or ())}"
            )
        self._put(
            _bytes(data),
            np.array(lengths, np.int32),
            np.array(modes or [0] * len(lengths), np.int8),
        )
        self.end_document()

    def add_documents(
        self, data: bytes | memoryview, lengths: NDArray[np.int32], documents: NDArray[np.int64],
        modes: NDArray[np.int8] | None = None,
    ) -> None:  # fmt: skip
        """Append many documents at once, without a look at each.

        Args:
            data: the bytes of their tokens end to end, in the writer's dtype.
            lengths: tokens of each sequence.
            documents: sequences of each document.
            modes: of each sequence, in multimodal files.
        """
        if len(data) != int(lengths.sum(dtype=np.int64)) * self.dtype.itemsize or int(
            documents.sum()
        ) != len(lengths):
            raise FormatError(
                f"{self.prefix}: {len(data)} bytes do not belong to these lengths and documents"
            )
        first = len(self._lengths)
        self._put(memoryview(data), lengths, modes)
        self._documents.frombytes((first + np.cumsum(documents, dtype=np.int64)).tobytes())

    def add_stream(
        self, pieces: Iterator[memoryview], lengths: NDArray[np.int32], documents: NDArray[np.int64],
        modes: NDArray[np.int8] | None = None,
    ) -> None:  # fmt: skip
        """As `add_documents`, with their bytes in pieces of any size."""
        if self._tar is not None:
            return self.add_documents(b"".join(pieces), lengths, documents, modes)
        first = len(self._lengths)
        self._put_stream(pieces, lambda: (lengths, modes))
        self._documents.frombytes((first + np.cumsum(documents, dtype=np.int64)).tobytes())
        return None

    def add_document_stream(
        self,
        pieces: Iterator[memoryview],
        sequences: Callable[[], tuple[NDArray[np.int32], NDArray[np.int8]]],
    ) -> None:
        """One document whose bytes come in pieces; not for tar. sequences: asked behind the last,
        their lengths and modes.
        """
        self._put_stream(pieces, sequences)
        self.end_document()

    def _put_stream(
        self,
        pieces: Iterator[memoryview],
        sequences: Callable[[], tuple[NDArray[np.int32], NDArray[np.int8] | None]],
    ) -> None:
        written = 0
        for piece in pieces:
            self._bin.write(piece)  # type: ignore[union-attr]
            written += len(piece)
        lengths, modes = sequences()
        if written != int(lengths.sum(dtype=np.int64)) * self.dtype.itemsize:
            raise FormatError(f"{self.prefix}: {written} bytes do not belong to these lengths")
        self._note(lengths, modes)

    def _put(
        self, data: memoryview, lengths: NDArray[np.int32], modes: NDArray[np.int8] | None
    ) -> None:
        if self._tar is not None:
            self._tar.add(data, lengths, modes)
        elif isinstance(self._bin, (HashingWriter, FrameWriter)):
            self._bin.write(data)
        self._note(lengths, modes)

    def _note(self, lengths: NDArray[np.int32], modes: NDArray[np.int8] | None) -> None:
        self._lengths.frombytes(np.ascontiguousarray(lengths, np.int32).tobytes())
        if self.multimodal:
            self._modes.frombytes(np.ascontiguousarray(modes, np.int8).tobytes())

    def end_document(self) -> None:
        """Close the document that the last sequences belong to."""
        self._documents.append(len(self._lengths))

    def add_index(self, prefix: str) -> None:
        """Append all sequences and documents of another dataset of the same dtype (a merge)."""
        other = IndexedDataset(prefix, self._storage)
        if other.dtype != self.dtype or (other.sequence_modes is not None) != self.multimodal:
            raise FormatError(
                f"{prefix}: {other.dtype} tokens cannot be appended to the {self.dtype} of {self.prefix}"
            )
        sizes = other.sequence_lengths.astype(np.int64) * other.dtype.itemsize
        end_to_end = np.array_equal(other.sequence_offsets, np.cumsum(sizes) - sizes)
        limit = COPY_BYTES if end_to_end else 0
        shift = len(self._lengths)
        documents = other.document_indices
        modes = other.sequence_modes
        for first, last in _runs(sizes, limit):
            start = int(other.sequence_offsets[first])
            stop = int(other.sequence_offsets[last - 1] + sizes[last - 1])
            data = other.store.read_ranges(other.bin_key, [start], [stop], other.bin_info.etag)[0]
            self._put(
                data,
                other.sequence_lengths[first:last],
                None if modes is None else modes[first:last],
            )
        self._documents.frombytes((documents[1:] + shift).tobytes())

    def finalize(self, idx_path: str | None = None) -> None:
        """Publish the `.bin`, then the `.idx`, beside it or at `idx_path`.

        The writer cannot be used afterwards.
        """
        if idx_path is not None:
            self._index_prefix = strip_suffix(str(idx_path))
        if not self._open:
            raise FormatError(f"{self.prefix}: this writer is closed already")
        self._open = False
        index_store, index_key = open_store(f"{self._index_prefix}.idx", self._storage)
        index_store.delete(index_key)
        self._bin.commit()
        self.index = HashingWriter(index_store.open_writer(index_key))
        try:
            for chunk in self._index_chunks():
                self.index.write(chunk)
            self.index.commit()
        except BaseException:
            self.index.abort()
            raise

    @property
    def num_documents(self) -> int:
        """Documents so far."""
        return len(self._documents) - 1

    @property
    def num_sequences(self) -> int:
        """Sequences so far."""
        return len(self._lengths)

    @property
    def num_tokens(self) -> int:
        """Tokens so far; a pass over the lengths."""
        return (
            int(np.frombuffer(self._lengths, np.int32).sum(dtype=np.int64))
            if len(self._lengths)
            else 0
        )

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
            low = data.min()
            high = data.max()
            if low < limits.min or high > limits.max or not np.issubdtype(data.dtype, np.integer):
                raise FormatError(
                    f"{self.prefix}: sequence {len(self._lengths)} holds {data.dtype} values from {low} to {high}, which "
                    f"{self.dtype} cannot hold; choose a wider dtype (int32 for vocabularies of 65500 and more)"
                )
        return np.ascontiguousarray(data, self.dtype)


def _bytes(data: NDArray[Any]) -> memoryview:
    return data.data.cast("B") if data.size else memoryview(b"")


def _runs(sizes: NDArray[np.int64], limit: int) -> Iterator[tuple[int, int]]:
    """[first, last) of sequences to be copied together: up to `limit` bytes, at least one."""
    ends = np.cumsum(sizes)
    first = 0
    while first < len(sizes):
        before = int(ends[first] - sizes[first])
        last = max(first + 1, int(np.searchsorted(ends, before + limit, "right")))
        yield first, last
        first = last
