"""Writing a token shard (`.bin`, `.bin.zst` or `.tar`, and its `.idx`) to a local path or an object
store.
"""

from __future__ import annotations

import contextlib
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from streammega.config import StorageConfig
from streammega.dataset.checksums import ChecksummedWriter
from streammega.dataset.idx import MAX_TOKENS, dtype_code, encode_index
from streammega.dataset.indexed import IndexedDataset
from streammega.dataset.names import SUFFIXES, Kind, split_name, strip_suffix
from streammega.dataset.tar import END, encode_members
from streammega.dataset.token_ends import TokenEnds
from streammega.errors import FormatError
from streammega.kernels import num_threads
from streammega.storage import open_store
from streammega.storage.backends.local import FileRange
from streammega.storage.derived_stores import file_ranges
from streammega.storage.object_ops import sync_names
from streammega.storage.seekable_zstd import FRAME_BYTES, LEVEL, FrameWriter, check_frame_bytes
from streammega.storage.store import as_bytes, atomic_writer

Number = TypeVar("Number", bound=np.generic)

COPY_BYTES = 32 << 20
"""What a merge reads at once, and holds in memory."""
_NO_DOCUMENTS = np.empty(0, np.int64)


class IndexedDatasetWriter:
    """Streams sequences into `prefix.bin` (or `.bin.zst`, `.tar`), and writes `prefix.idx` at the
    end.

    Nothing appears under the final names before `finalize`: a writer that is interrupted (an
    exception in its `with`, a kill) leaves no half-written pair. An earlier `.idx` is removed
    first, then the `.bin` is published, then the `.idx`: so no `.idx` ever describes another
    `.bin`.

    Args:
        prefix: path or URL without `.bin` / `.idx`.
        dtype: token dtype, one of the eight of the format.
        multimodal: store a mode (int8) with each sequence.
        storage: credentials, transport and limits.
        kind: "bin"; "zst", seekable zstd frames; "tar", a WebDataset sample for each sequence.
            Default: by the prefix's suffix.
        level, frame_bytes: of the zstd frames.
        index_prefix: where the `.idx` goes, for a caller that publishes it when several shards are
            done. Default: in the folder of the tokens.
        first_sequence: the number in the dataset of the first sequence of this shard, by which the
            members of a tar are named.
    """

    def __init__(
        self,
        prefix: str,
        dtype: DTypeLike = np.int32,
        multimodal: bool = False,
        storage: StorageConfig | None = None,
        *,
        kind: Kind | None = None,
        level: int = LEVEL,
        frame_bytes: int = FRAME_BYTES,
        index_prefix: str | None = None,
        first_sequence: int = 0,
    ) -> None:
        self.prefix, kind_of_name = split_name(str(prefix))
        self.kind: Kind = kind or kind_of_name
        self.dtype: np.dtype[Any] = np.dtype(dtype)
        self.multimodal = multimodal
        # Both raise before anything is opened.
        dtype_code(self.dtype)
        check_frame_bytes(frame_bytes)
        self._storage = storage or StorageConfig()
        self._index_prefix = index_prefix or self.prefix
        # Arrays, not lists: an int in a list takes 36 bytes, and there may be millions of sequences.
        self._lengths = array("i")
        self._modes = array("b")
        self._documents = array("q", [0])
        self._starts: array[int] | None = None
        """The token at which each sequence begins, if documents are packed."""
        self._token_bytes = 0
        """Bytes of all tokens so far, as one array."""
        self._ends = TokenEnds()
        self._first_number = first_sequence
        self._open = True
        store, key = open_store(self.prefix + SUFFIXES[self.kind], self._storage)
        self.stored = ChecksummedWriter(store.open_writer(key))
        """Size and checksums of the stored tokens so far."""
        self.index: ChecksummedWriter
        """Size and checksums of the `.idx`. Set when it is published."""
        self._tokens: FrameWriter | ChecksummedWriter = self.stored
        if self.kind == "zst":
            self._tokens = FrameWriter(self.stored, level, frame_bytes)

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
            with self._abort_on_error():
                self.finalize()

    def __del__(self) -> None:
        # A constructor that raised has nothing to discard.
        if getattr(self, "_tokens", None) is not None:
            self.abort()

    def add_item(self, tokens: Any, mode: int = 0) -> None:
        """Append one sequence (array, tensor or list of token ids, shape [length]).

        Raises FormatError if a value does not fit the dtype.
        """
        data = self._cast(tokens)
        lengths = self._to_lengths([data.size])
        self._append([as_bytes(data.data)], lengths, _NO_DOCUMENTS, np.array([mode], np.int8))

    def add_document(
        self, tokens: Any, lengths: Sequence[int], modes: Sequence[int] | None = None
    ) -> None:
        """Append one document of several sequences: their tokens end to end, and the length of
        each.
        """
        data = self._cast(tokens)
        if sum(lengths) != data.size or min(lengths, default=0) < 0:
            raise FormatError(
                f"{self.prefix}: lengths add up to {sum(lengths)}, the document has {data.size} "
                "tokens"
            )
        documents = np.array([len(lengths)])
        modes_array = None if modes is None else np.array(modes, np.int8)
        self._append([as_bytes(data.data)], self._to_lengths(lengths), documents, modes_array)

    def add_documents(
        self,
        data: bytes | bytearray | memoryview | Iterable[memoryview],
        lengths: NDArray[np.int32],
        documents: NDArray[np.int64],
        modes: NDArray[np.int8] | None = None,
        *,
        starts: NDArray[np.int64] | None = None,
    ) -> None:
        """Append many documents at once.

        Args:
            data: the bytes of their tokens end to end, in the writer's dtype; as a whole, or in
                pieces of any size, each valid until the next one.
            lengths: tokens of each sequence.
            documents: sequences of each document.
            modes: of each sequence, in multimodal files.
            starts: the token of `data` at which each sequence begins, if the tokens are packed:
                padding belongs to no sequence then. A writer of packed tokens takes no others.
        """
        self._check_open()
        if isinstance(data, bytes | bytearray | memoryview):
            self._check_fits(len(data), lengths, documents, starts)
            data = [memoryview(data)]
        self._append(data, lengths, documents, modes, starts)

    @property
    def stores_plain_bytes(self) -> bool:
        """Whether tokens are stored as they are, so that `copy_from` can copy files."""
        return self.kind == "bin"

    def copy_from(
        self,
        ranges: Sequence[FileRange],
        lengths: NDArray[np.int32],
        documents: NDArray[np.int64],
        modes: NDArray[np.int8] | None = None,
        threads: int = 1,
    ) -> Iterator[int]:
        """As `add_documents`, but several threads copy the bytes from local files. Yields the number
        of bytes as they are written.

        If it fails or is closed before its end, everything that was written is discarded. Raises
        FormatError where `stores_plain_bytes` is False; ObjectChangedError, StorageError.
        """
        self._check_open()
        size = sum(wanted.size for wanted in ranges)
        if not self.stores_plain_bytes or size != self._size_of(lengths):
            raise FormatError(
                f"{self.prefix}: {size} bytes of files do not belong to these lengths, or not to a "
                f"{self.kind}"
            )
        self._check_modes(lengths, modes)
        with self._abort_on_error():
            yield from self.stored.write_files(ranges, threads)
            self._ends.add_files(ranges)
        self._token_bytes += size
        self._note(lengths, documents, modes)

    def end_document(self) -> None:
        """End the document of the last sequences."""
        self._check_open()
        self._documents.append(len(self._lengths))

    def add_index(self, prefix: str) -> None:
        """Append all sequences and documents of another dataset of the same dtype (a merge).

        As many threads as cores read local files, without maps. If it fails after it has begun to
        copy, everything that was written is discarded. Raises FormatError for another dtype, or
        where only one of the two has modes; ObjectChangedError, StorageError.
        """
        self._check_open()
        other = IndexedDataset(prefix, self._storage)
        etag = other.bin_info.etag
        lengths = other.sequence_lengths
        modes = other.sequence_modes
        documents = np.diff(other.document_indices)
        if other.dtype != self.dtype or (modes is not None) != self.multimodal:
            raise FormatError(
                f"{prefix}: {other.dtype} tokens cannot be appended to the {self.dtype} of "
                f"{self.prefix}"
            )
        sizes = lengths.astype(np.int64) * other.dtype.itemsize
        end_to_end = np.array_equal(other.sequence_offsets, np.cumsum(sizes) - sizes)
        if end_to_end and self.stores_plain_bytes:
            ranges = file_ranges(other.store, other.bin_key, 0, int(sizes.sum()), etag)
            if ranges is not None:
                copied = self.copy_from(ranges, lengths, documents, modes, num_threads())
                deque(copied, maxlen=0)
                return

        def read() -> Iterator[memoryview]:
            max_bytes = COPY_BYTES if end_to_end else -1  # else one sequence at a time
            for first, last in runs_within(sizes, max_bytes):
                start = int(other.sequence_offsets[first])
                stop = int(other.sequence_offsets[last - 1] + sizes[last - 1])
                (data,) = other.store.read(other.bin_key, [(start, stop)], etag)
                yield memoryview(data)

        self._append(read(), lengths, documents, modes)

    def finalize(self, idx_path: str | None = None) -> None:
        """Publish the `.bin`, then the `.idx` in the same folder, or at `idx_path`.

        The writer cannot be used afterwards. Raises FormatError, before anything is written, where
        the last sequences belong to no document: no reader would open such a pair.
        """
        if idx_path is not None:
            self._index_prefix = strip_suffix(str(idx_path))
        self._check_open()
        ended = self._documents[-1]
        if ended != len(self._lengths):
            raise FormatError(
                f"{self.prefix}: sequences from {ended:,} on belong to no document, and no reader "
                "would open the pair; call end_document() after the last sequence of each document"
            )
        index_store, index_key = open_store(f"{self._index_prefix}.idx", self._storage)
        self._open = False
        # In this order no `.idx` ever describes another `.bin`, wherever it is interrupted.
        try:
            index_store.delete(index_key)
            sync_names(f"{self._index_prefix}.idx")
            if self.kind == "tar":
                self._tokens.write(END)
            self._tokens.commit()
        except BaseException:
            self._tokens.abort()  # the caller cannot: this writer is closed
            raise
        with atomic_writer(index_store, index_key) as writer:
            self.index = ChecksummedWriter(writer)
            for chunk in self._index_chunks():
                self.index.write(chunk)

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
        """Tokens so far, padding too."""
        return self._token_bytes // self.dtype.itemsize

    @property
    def ends(self) -> str:
        """A digest of the first and the last tokens so far, for the manifest."""
        return self._ends.digest

    def abort(self) -> None:
        """Discard what was written. Does nothing after `finalize`."""
        if self._open:
            self._open = False
            self._tokens.abort()

    def _check_open(self) -> None:
        if not self._open:
            raise FormatError(
                f"{self.prefix}: this writer is closed: it was finalized, or it failed and discarded what "
                "it had written; use a new writer"
            )

    @contextlib.contextmanager
    def _abort_on_error(self) -> Iterator[None]:
        """Discard everything where a write ends in the middle: the tokens of the next sequence would
        not be where the `.idx` says.
        """
        try:
            yield
        except BaseException:
            self.abort()
            raise

    def _append(
        self,
        pieces: Iterable[memoryview],
        lengths: NDArray[np.int32],
        documents: NDArray[np.int64],
        modes: NDArray[np.int8] | None,
        starts: NDArray[np.int64] | None = None,
    ) -> None:
        """Append sequences, whose bytes come in pieces. The other arguments are those of
        `add_documents`.
        """
        self._check_open()
        self._check_modes(lengths, modes)
        bytes_before = self._token_bytes
        counted = self._counted(pieces)
        stored: Iterator[bytes | memoryview] = counted
        if self.kind == "tar":
            first = self._first_number + len(self._lengths)
            modes_or_none = modes if self.multimodal else None
            stored = encode_members(counted, lengths, modes_or_none, self.dtype, first)
        with self._abort_on_error():
            for data in stored:
                self._tokens.write(data)
            for _ in counted:
                pass  # count what members have no place for
            num_bytes = self._token_bytes - bytes_before
            if starts is None and num_bytes != self._size_of(lengths):
                raise FormatError(
                    f"{self.prefix}: {num_bytes} bytes do not belong to these lengths"
                )
        if starts is not None:
            if self._starts is None:
                self._starts = array("q")
            tokens_before = bytes_before // self.dtype.itemsize
            self._starts.frombytes(as_bytes((starts + tokens_before).data))
        self._note(lengths, documents, modes)

    def _counted(self, pieces: Iterable[memoryview]) -> Iterator[memoryview]:
        for piece in pieces:
            self._token_bytes += len(piece)
            self._ends.add(piece)
            yield piece

    def _check_fits(
        self,
        num_bytes: int,
        lengths: NDArray[np.int32],
        documents: NDArray[np.int64],
        starts: NDArray[np.int64] | None,
    ) -> None:
        """Raise FormatError for bytes that do not hold documents of these lengths."""
        fits = int(documents.sum()) == len(lengths)
        if starts is None:
            fits = fits and self._starts is None and num_bytes == self._size_of(lengths)
        else:
            if self.kind == "tar" or (self._starts is None and len(self._lengths)):
                raise FormatError(
                    f"{self.prefix}: packed tokens cannot follow others, nor be a tar"
                )
            num_tokens, rest = divmod(num_bytes, self.dtype.itemsize)
            fits = fits and not rest and len(starts) == len(lengths)
            if fits and len(lengths):
                fits = int(starts.min()) >= 0 and int((starts + lengths).max()) <= num_tokens
        if not fits:
            raise FormatError(
                f"{self.prefix}: {num_bytes} bytes do not belong to these lengths and documents"
            )

    def _check_modes(self, lengths: NDArray[np.int32], modes: NDArray[np.int8] | None) -> None:
        num_modes = 0 if modes is None else len(modes)
        if self.multimodal and num_modes != len(lengths):
            raise FormatError(
                f"{self.prefix}: {len(lengths)} sequences need as many modes, got {num_modes}"
            )

    def _note(
        self,
        lengths: NDArray[np.int32],
        documents: NDArray[np.int64],
        modes: NDArray[np.int8] | None,
    ) -> None:
        """Keep sequences and documents for the `.idx`."""
        document_ends = len(self._lengths) + np.cumsum(documents, dtype=np.int64)
        self._documents.frombytes(document_ends.tobytes())
        self._lengths.frombytes(as_bytes(np.ascontiguousarray(lengths, np.int32).data))
        if self.multimodal and modes is not None:
            self._modes.frombytes(as_bytes(np.ascontiguousarray(modes, np.int8).data))

    def _to_lengths(self, lengths: Sequence[int]) -> NDArray[np.int32]:
        """Lengths as the `.idx` holds them. Raises FormatError for one that it cannot."""
        longest = max(lengths, default=0)
        if longest > MAX_TOKENS:
            raise FormatError(
                f"{self.prefix}: a sequence has {longest:,} tokens; an .idx can hold {MAX_TOKENS:,}: cut it "
                "first"
            )
        return np.array(lengths, np.int32)

    def _size_of(self, lengths: NDArray[np.int32]) -> int:
        """Bytes of sequences of these lengths."""
        return int(lengths.sum(dtype=np.int64)) * self.dtype.itemsize

    def _index_chunks(self) -> Iterator[bytes]:
        lengths = _viewed(self._lengths, np.int32)
        documents = _viewed(self._documents, np.int64)
        modes = _viewed(self._modes, np.int8) if self.multimodal else None
        offsets = None
        if self._starts is not None:
            offsets = _viewed(self._starts, np.int64) * self.dtype.itemsize
        return encode_index(self.dtype, lengths, documents, modes, offsets)

    def _cast(self, tokens: Any) -> NDArray[Any]:
        """Tokens in the writer's dtype. Raises FormatError for values that it cannot hold."""
        data = np.asarray(tokens).reshape(-1)
        if data.dtype == self.dtype or data.size == 0:
            return np.ascontiguousarray(data, self.dtype)
        if not np.issubdtype(self.dtype, np.integer):
            return np.ascontiguousarray(data, self.dtype)
        limits = np.iinfo(self.dtype)
        lowest = data.min()
        highest = data.max()
        fits = limits.min <= lowest and highest <= limits.max
        if not fits or not np.issubdtype(data.dtype, np.integer):
            raise FormatError(
                f"{self.prefix}: sequence {self.num_sequences} holds {data.dtype} values from "
                f"{lowest} to {highest}, which {self.dtype} cannot hold; choose a wider dtype "
                "(int32 for vocabularies of 65500 and more)"
            )
        return np.ascontiguousarray(data, self.dtype)


def _viewed(values: array[int], dtype: type[Number]) -> NDArray[Number]:
    """The values of an array without a copy. While there is such a view, the array cannot grow."""
    return np.frombuffer(values, dtype)


def runs_within(sizes: NDArray[np.int64], max_bytes: int) -> Iterator[tuple[int, int]]:
    """[first, last) of what is copied together: at most `max_bytes`, or one.

    sizes: of sequences or documents. With -1 it is one even where some are empty.
    """
    ends = np.cumsum(sizes)
    first = 0
    while first < len(sizes):
        start = int(ends[first] - sizes[first])
        fit = int(np.searchsorted(ends, start + max_bytes, "right"))
        last = max(first + 1, fit)
        yield first, last
        first = last
