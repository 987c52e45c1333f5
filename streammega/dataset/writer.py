"""Writing a token shard (`.bin`, `.bin.zst` or `.tar`, and its `.idx`) to a local path or an object
store.
"""

from __future__ import annotations

import contextlib
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from streammega.config import StorageConfig
from streammega.dataset.checksums import HashingWriter
from streammega.dataset.idx import MOST_TOKENS, dtype_code, encode_index
from streammega.dataset.indexed import IndexedDataset
from streammega.dataset.shards import SUFFIXES, Kind, split_name, strip_suffix
from streammega.dataset.tar import TarWriter
from streammega.errors import FormatError
from streammega.kernels.parallel import num_threads
from streammega.storage import open_store
from streammega.storage.copies import FileRange, file_ranges
from streammega.storage.seekable_zstd import FRAME_BYTES, LEVEL, FrameWriter
from streammega.storage.store import written_whole

Number = TypeVar("Number", bound=np.generic)

COPY_BYTES = 32 << 20
"""What a merge reads at once, and holds in memory."""


class IndexedDatasetWriter:
    """Streams sequences into `prefix.bin` (or `.bin.zst`, `.tar`), and writes `prefix.idx` at the
    end.

    Nothing shows under the final names before `finalize`: a writer that is interrupted (an
    exception in its `with`, a kill) leaves no half-written pair. The `.bin` is published first and
    a former `.idx` removed before it, so that no `.idx` ever describes another `.bin`.

    Args:
        prefix: path or URL without `.bin` / `.idx`.
        dtype: token dtype, one of the eight of the format.
        multimodal: store a mode (int8) with each sequence.
        storage: credentials, transport and limits.
        kind: "bin"; "zst", seekable zstd frames; "tar", a WebDataset sample for each sequence.
            Default: by the prefix's suffix.
        level, frame_bytes: of the zstd frames.
        index_prefix: write the `.idx` elsewhere, for a caller that publishes it when several shards
            are done.
        first_sequence: of a dataset of several shards, the number of this one's first sequence: a
            tar's members are named by it.
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
        dtype_code(self.dtype)  # one that the format lacks is refused before anything is opened
        self._storage = storage or StorageConfig()
        self._index_prefix = index_prefix or self.prefix
        # Not lists: an int of a list takes 36 bytes, and there are as many as sequences.
        self._lengths = array("i")
        self._modes = array("b")
        self._documents = array("q", [0])
        self._starts: array[int] | None = None
        """Of packed documents, the token at which each sequence begins."""
        self._packed_tokens = 0
        self._open = True
        self.files: list[FileRange] = []
        """What `add_files` named and `copy_files` has not copied yet."""
        store, key = open_store(self.prefix + SUFFIXES[self.kind], self._storage)
        self.stored = HashingWriter(store.open_writer(key))
        """Counts and checksums of what was written so far, as stored."""
        self.index = HashingWriter(None)
        """The same of the `.idx`, once it is published."""
        self._tar: TarWriter | None = None
        self._tokens: TarWriter | FrameWriter | HashingWriter = self.stored
        if self.kind == "tar":
            self._tar = TarWriter(self.stored, self.dtype, multimodal, first_sequence)
            self._tokens = self._tar
        elif self.kind == "zst":
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
            with self._or_nothing():
                self.finalize()

    def __del__(self) -> None:
        # A constructor that raised has nothing to throw away.
        if getattr(self, "_tokens", None) is not None:
            self.abort()

    def add_item(self, tokens: Any, mode: int = 0) -> None:
        """Append one sequence (array, tensor or list of token ids, shape [length]).

        Raises FormatError if a value does not fit the dtype: it would wrap around silently.
        """
        data = self._cast(tokens)
        modes = np.array([mode], np.int8)
        self._put(_bytes(data), self._lengths_of([data.size]), modes)

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
        num_modes = len(modes or ())
        if self.multimodal and num_modes != len(lengths):
            raise FormatError(
                f"{self.prefix}: {len(lengths)} sequences need as many modes, got {num_modes}"
            )
        modes = modes or [0] * len(lengths)
        self._put(_bytes(data), self._lengths_of(lengths), np.array(modes, np.int8))
        self.end_document()

    def add_documents(
        self,
        data: bytes | bytearray | memoryview,
        lengths: NDArray[np.int32],
        documents: NDArray[np.int64],
        modes: NDArray[np.int8] | None = None,
    ) -> None:
        """Append many documents at once, without a look at each.

        Args:
            data: the bytes of their tokens end to end, in the writer's dtype.
            lengths: tokens of each sequence.
            documents: sequences of each document.
            modes: of each sequence, in multimodal files.
        """
        num_sequences = int(documents.sum())
        if len(data) != self._size_of(lengths) or num_sequences != len(lengths):
            raise FormatError(
                f"{self.prefix}: {len(data)} bytes do not belong to these lengths and documents"
            )
        first_sequence = len(self._lengths)
        self._put(memoryview(data), lengths, modes)
        self._end_documents(first_sequence, documents)

    def add_packed(
        self,
        data: bytes | memoryview,
        lengths: NDArray[np.int32],
        documents: NDArray[np.int64],
        starts: NDArray[np.int64],
        modes: NDArray[np.int8] | None = None,
    ) -> None:
        """Append tokens of which not all belong to sequences; a writer that is given some takes
        nothing else, and no tar.

        Args: as of `add_documents`, and starts: the token of `data` at which each sequence begins.
        """
        if self._tar is not None or (self._starts is None and len(self._lengths)):
            raise FormatError(f"{self.prefix}: packed tokens cannot follow others, nor be a tar")
        num_tokens, rest = divmod(len(data), self.dtype.itemsize)
        fits = len(starts) == len(lengths) == int(documents.sum())
        if len(lengths):
            fits = fits and int(starts.min()) >= 0 and int((starts + lengths).max()) <= num_tokens
        if rest or not fits:
            raise FormatError(f"{self.prefix}: {len(data)} bytes do not hold these sequences")
        if self._starts is None:
            self._starts = array("q")
        first_sequence = len(self._lengths)
        self._starts.frombytes(_bytes(np.ascontiguousarray(starts + self._packed_tokens)))
        self._packed_tokens += num_tokens
        self._put(memoryview(data), lengths, modes if len(lengths) else np.empty(0, np.int8))
        self._end_documents(first_sequence, documents)

    def add_stream(
        self,
        pieces: Iterator[memoryview],
        lengths: NDArray[np.int32],
        documents: NDArray[np.int64],
        modes: NDArray[np.int8] | None = None,
    ) -> None:
        """As `add_documents`, with their bytes in pieces of any size, each good until the next one
        is asked for.
        """
        if self._tar is not None:
            # Every member of a tar begins with its length.
            data = bytearray()
            for piece in pieces:
                data += piece  # a copy: what was yielded is overwritten by what comes next
            self.add_documents(data, lengths, documents, modes)
            return
        first_sequence = len(self._lengths)
        self._put_stream(pieces, lengths, modes)
        self._end_documents(first_sequence, documents)

    @property
    def takes_files(self) -> bool:
        """Whether bytes are stored as they are, so that `add_files` can copy them."""
        return self.kind == "bin"

    def add_files(
        self,
        ranges: Sequence[FileRange],
        lengths: NDArray[np.int32],
        documents: NDArray[np.int64],
        modes: NDArray[np.int8] | None = None,
    ) -> None:
        """As `add_documents`, with their bytes in local files, which `copy_files` copies.

        Raises FormatError where `takes_files` is False.
        """
        self._check_open()
        size = sum(wanted.size for wanted in ranges)
        if not self.takes_files or size != self._size_of(lengths):
            raise FormatError(
                f"{self.prefix}: {size} bytes of files do not belong to these lengths, or not to a "
                f"{self.kind}"
            )
        first_sequence = len(self._lengths)
        self.files += ranges
        self._note(lengths, modes)
        self._end_documents(first_sequence, documents)

    def copy_files(self, threads: int = 1) -> Iterator[int]:
        """Copy what `add_files` named, by so many threads at most. Yields bytes as they are
        written.

        What is added otherwise, and `finalize`, do so before, by one. If it is given up in the
        middle, or fails, all is thrown away. Raises ObjectChangedError, StorageError.
        """
        self._check_open()
        ranges = self.files
        self.files = []
        with self._or_nothing():
            yield from self.stored.write_files(ranges, threads)

    def end_document(self) -> None:
        """Close the document that the last sequences belong to."""
        self._check_open()
        self._documents.append(len(self._lengths))

    def add_index(self, prefix: str) -> None:
        """Append all sequences and documents of another dataset of the same dtype (a merge).

        Local files are read by as many threads as cores, and not mapped. Raises FormatError for
        another dtype, or where only one of the two has modes; ObjectChangedError, StorageError. If it
        fails after it has begun to copy, all that was written is thrown away.
        """
        self._check_open()
        other = IndexedDataset(prefix, self._storage)
        read_ranges = other.store.read_ranges
        etag = other.bin_info.etag
        lengths = other.sequence_lengths
        offsets = other.sequence_offsets
        modes = other.sequence_modes
        if other.dtype != self.dtype or (modes is not None) != self.multimodal:
            raise FormatError(
                f"{prefix}: {other.dtype} tokens cannot be appended to the {self.dtype} of "
                f"{self.prefix}"
            )
        sizes = lengths.astype(np.int64) * other.dtype.itemsize
        end_to_end = np.array_equal(offsets, np.cumsum(sizes) - sizes)
        if end_to_end and self.takes_files:
            size = int(sizes.sum())
            ranges = file_ranges(other.store, other.bin_key, 0, size, etag)
            if ranges is not None:
                self.add_files(ranges, lengths, np.diff(other.document_indices), modes)
                # Now, and not with the next files: the caller may remove these.
                deque(self.copy_files(num_threads()), maxlen=0)
                return
        most_bytes = COPY_BYTES if end_to_end else 0  # else one sequence at a time
        first_sequence = len(self._lengths)
        with self._or_nothing():
            for first, last in _runs(sizes, most_bytes):
                start = int(offsets[first])
                stop = int(offsets[last - 1] + sizes[last - 1])
                data = read_ranges(other.bin_key, [start], [stop], etag)[0]
                modes_of_run = modes[first:last] if modes is not None else None
                self._put(data, lengths[first:last], modes_of_run)
        bounds = first_sequence + other.document_indices[1:]
        self._documents.frombytes(bounds.tobytes())

    def finalize(self, idx_path: str | None = None) -> None:
        """Publish the `.bin`, then the `.idx`, beside it or at `idx_path`.

        The writer cannot be used afterwards. Raises FormatError for sequences that belong to no
        document yet, before anything is written: no reader would open such a pair.
        """
        if idx_path is not None:
            self._index_prefix = strip_suffix(str(idx_path))
        self._check_open()
        self._check_ended()
        index_store, index_key = open_store(f"{self._index_prefix}.idx", self._storage)
        self._copy_rest()
        self._open = False
        # In this order no `.idx` ever describes another `.bin`, wherever it is interrupted.
        try:
            index_store.delete(index_key)
            self._tokens.commit()
        except BaseException:
            self._tokens.abort()  # nobody else can any more: the writer is closed
            raise
        with written_whole(index_store, index_key) as writer:
            self.index = HashingWriter(writer)
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
        """Tokens so far, padding too; a pass over the lengths."""
        if self._starts is not None:
            return self._packed_tokens
        return int(_viewed(self._lengths, np.int32).sum(dtype=np.int64))

    def abort(self) -> None:
        """Throw away what was written. Does nothing after `finalize`."""
        if self._open:
            self._open = False
            self._tokens.abort()

    def _check_open(self) -> None:
        if not self._open:
            raise FormatError(
                f"{self.prefix}: this writer is closed: it was finalized, or could not write what it was "
                "given, and threw away all of it; begin anew with another writer"
            )

    def _check_ended(self) -> None:
        """Raise FormatError for sequences that belong to no document."""
        ended = self._documents[-1]
        if ended != len(self._lengths):
            raise FormatError(
                f"{self.prefix}: sequences from {ended:,} on belong to no document, and no reader would "
                "open the pair; call end_document() after the last sequence of each document"
            )

    @contextlib.contextmanager
    def _or_nothing(self) -> Iterator[None]:
        """Throw all away where what is copied ends in the middle: tokens of no sequence are left, and
        those of the next one would not lie where the `.idx` says.
        """
        try:
            yield
        except BaseException:
            self.abort()
            raise

    def _put(
        self, data: memoryview, lengths: NDArray[np.int32], modes: NDArray[np.int8] | None
    ) -> None:
        """Append sequences whose bytes lie end to end in `data`."""
        self._check_open()
        self._copy_rest()
        if isinstance(self._tokens, TarWriter):
            self._tokens.add(data, lengths, modes)
        else:
            self._tokens.write(data)
        self._note(lengths, modes)

    def _put_stream(
        self,
        pieces: Iterator[memoryview],
        lengths: NDArray[np.int32],
        modes: NDArray[np.int8] | None,
    ) -> None:
        """Append sequences whose bytes come in pieces."""
        assert not isinstance(self._tokens, TarWriter)
        self._check_open()
        self._copy_rest()
        written = 0
        with self._or_nothing():
            for piece in pieces:
                self._tokens.write(piece)
                written += len(piece)
            if written != self._size_of(lengths):
                raise FormatError(f"{self.prefix}: {written} bytes do not belong to these lengths")
        self._note(lengths, modes)

    def _copy_rest(self) -> None:
        """Copy what was named and not copied yet."""
        if self.files:
            deque(self.copy_files(), maxlen=0)

    def _note(self, lengths: NDArray[np.int32], modes: NDArray[np.int8] | None) -> None:
        """Keep what the `.idx` will say of sequences."""
        self._lengths.frombytes(_bytes(np.ascontiguousarray(lengths, np.int32)))
        if self.multimodal:
            self._modes.frombytes(_bytes(np.ascontiguousarray(modes, np.int8)))

    def _end_documents(self, first_sequence: int, documents: NDArray[np.int64]) -> None:
        """Close documents of so many sequences each, the first of which is `first_sequence`."""
        bounds = first_sequence + np.cumsum(documents, dtype=np.int64)
        self._documents.frombytes(bounds.tobytes())

    def _lengths_of(self, lengths: Sequence[int]) -> NDArray[np.int32]:
        """Lengths as the `.idx` holds them. Raises FormatError for one that it cannot."""
        longest = max(lengths, default=0)
        if longest > MOST_TOKENS:
            raise FormatError(
                f"{self.prefix}: sequence of {longest:,} tokens; an .idx can hold {MOST_TOKENS:,}: cut it "
                "before"
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
        if np.issubdtype(self.dtype, np.integer):
            self._check_range(data)
        return np.ascontiguousarray(data, self.dtype)

    def _check_range(self, data: NDArray[Any]) -> None:
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


def _bytes(data: NDArray[Any]) -> memoryview:
    # An array of nothing cannot be cast.
    return data.data.cast("B") if data.size else memoryview(b"")


def _viewed(values: array[int], dtype: type[Number]) -> NDArray[Number]:
    """An array's values without a copy; while they are looked at, it cannot grow."""
    return np.frombuffer(values, dtype)


def _runs(sizes: NDArray[np.int64], most_bytes: int) -> Iterator[tuple[int, int]]:
    """[first, last) of sequences to be copied together: of `most_bytes` together, at least one."""
    ends = np.cumsum(sizes)
    first = 0
    while first < len(sizes):
        start = int(ends[first] - sizes[first])
        fit = int(np.searchsorted(ends, start + most_bytes, "right"))
        last = max(first + 1, fit)
        yield first, last
        first = last
