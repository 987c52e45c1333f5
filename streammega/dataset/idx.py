"""The `.idx` format: the one place that knows its bytes.

Little-endian: magic (9 bytes), version u64 = 1, dtype code u8, sequence_count u64, document_count
u64, then int32 lengths, int64 byte offsets, int64 document_indices, and in multimodal files int8
modes. Counts are checked against the size of the file before anything is allocated.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from streammega.errors import ConfigError, FormatError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
HEADER_BYTES = HEADER.size
LENGTH = np.dtype("<i4")
OFFSET = np.dtype("<i8")
DOCUMENT_BOUND = np.dtype("<i8")
MODE = np.dtype(np.int8)
DTYPE_OF_CODE: dict[int, np.dtype[Any]] = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.int8),
    3: np.dtype(np.int16),
    4: np.dtype(np.int32),
    5: np.dtype(np.int64),
    6: np.dtype(np.float64),
    7: np.dtype(np.float32),
    8: np.dtype(np.uint16),
}
CODE_OF_DTYPE = {dtype: code for code, dtype in DTYPE_OF_CODE.items()}
MAX_TOKENS = 2**31 - 1
"""Tokens of a sequence: the `.idx` holds their number as int32."""
_CHECK_ROWS = 1 << 17
"""Sequences that are checked together: it bounds the memory of each thread that opens shards."""


# Not frozen: there are thousands, and a frozen one takes two to three times as long to make.
@dataclass(kw_only=True, slots=True)
class IndexHeader:
    """What the header and the size of an `.idx` say. `document_count` is documents + 1."""

    dtype: np.dtype[Any]
    sequence_count: int
    document_count: int
    multimodal: bool

    @property
    def lengths_at(self) -> int:
        """Byte position of the sequence lengths."""
        return HEADER_BYTES

    @property
    def offsets_at(self) -> int:
        """Byte position of the sequence offsets."""
        return self.lengths_at + LENGTH.itemsize * self.sequence_count

    @property
    def documents_at(self) -> int:
        """Byte position of document_indices."""
        return self.offsets_at + OFFSET.itemsize * self.sequence_count

    @property
    def modes_at(self) -> int:
        """Byte position of the modes, where there are any."""
        return self.documents_at + DOCUMENT_BOUND.itemsize * self.document_count


@dataclass(frozen=True, kw_only=True)
class IndexArrays:
    """The arrays of an `.idx`, as views where the source allows.

    sequence_lengths int32 [sequences] in tokens; sequence_offsets int64 [sequences] in bytes;
    document_indices int64 [documents + 1]; sequence_modes int8 [sequences] or None.
    """

    dtype: np.dtype[Any]
    sequence_lengths: NDArray[np.int32]
    sequence_offsets: NDArray[np.int64]
    document_indices: NDArray[np.int64]
    sequence_modes: NDArray[np.int8] | None

    @property
    def num_sequences(self) -> int:
        """How many sequences there are."""
        return len(self.sequence_lengths)

    @property
    def num_documents(self) -> int:
        """How many documents there are."""
        return len(self.document_indices) - 1

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences together. It reads all lengths."""
        return int(self.sequence_lengths.sum(dtype=np.int64))


def dtype_code(dtype: DTypeLike) -> int:
    """The `.idx` code of a dtype. Raises FormatError for one that the format does not have."""
    wanted = np.dtype(dtype)
    if wanted not in CODE_OF_DTYPE:
        names = ", ".join(str(known) for known in CODE_OF_DTYPE)
        raise FormatError(f"dtype {wanted} has no code in the .idx format; it knows {names}")
    return CODE_OF_DTYPE[wanted]


def token_dtype_named(name: str) -> np.dtype[Any]:
    """A dtype that tokens can have. Raises ConfigError."""
    try:
        dtype = np.dtype(name)
    except TypeError:
        raise ConfigError(
            f"dtype {name!r} is not known; use uint16, int32, uint8, int64, ..."
        ) from None
    if not np.issubdtype(dtype, np.integer):
        raise ConfigError(
            f"dtype {name!r} holds no token ids; use uint16, int32, uint8, int64, ..."
        )
    dtype_code(dtype)
    return dtype


def smallest_dtype(vocab_size: int) -> np.dtype[Any]:
    """The token dtype Megatron's writers pick: uint16 for vocabularies under 65500, else int32."""
    return np.dtype(np.uint16) if vocab_size < 65500 else np.dtype(np.int32)


def index_bytes(sequence_count: int, document_count: int, *, multimodal: bool) -> int:
    """The size of an `.idx` of so many sequences and document bounds (documents + 1)."""
    bytes_of_sequence = LENGTH.itemsize + OFFSET.itemsize
    if multimodal:
        bytes_of_sequence += MODE.itemsize
    bytes_of_documents = DOCUMENT_BOUND.itemsize * document_count
    return HEADER_BYTES + bytes_of_sequence * sequence_count + bytes_of_documents


def parse_header(data: bytes | memoryview, file_bytes: int, path: str) -> IndexHeader:
    """The header of an `.idx` of `file_bytes` bytes whose first bytes are `data`.

    Raises FormatError for a wrong magic, version or dtype code, for counts that the size
    contradicts, and for no document bounds.
    """
    mend = "is this the .idx of a Megatron dataset, and whole? copy it again, or convert again"
    if min(file_bytes, len(data)) < HEADER_BYTES:
        raise FormatError(
            f"{path}: {file_bytes} bytes are fewer than the {HEADER_BYTES} of an .idx header; "
            f"{mend}"
        )
    fields = HEADER.unpack(bytes(data[:HEADER_BYTES]))
    magic, version, dtype_code, sequence_count, document_count = fields
    if magic != MAGIC:
        raise FormatError(f"{path}: starts with {magic!r}, an .idx with {MAGIC!r}; {mend}")
    if version != VERSION:
        raise FormatError(
            f"{path}: .idx version {version}; this reader knows version {VERSION}; {mend}"
        )
    if dtype_code not in DTYPE_OF_CODE:
        known_codes = sorted(DTYPE_OF_CODE)
        raise FormatError(f"{path}: dtype code {dtype_code} is not one of {known_codes}; {mend}")
    # Only the size tells whether there are modes. It is checked before anything is allocated.
    plain = index_bytes(sequence_count, document_count, multimodal=False)
    with_modes = index_bytes(sequence_count, document_count, multimodal=True)
    if file_bytes not in (plain, with_modes):
        raise FormatError(
            f"{path}: the header has {sequence_count} sequences and {document_count} document "
            f"bounds, that is {plain} bytes ({with_modes} with modes), but the file has "
            f"{file_bytes}; {mend}"
        )
    if document_count == 0:
        raise FormatError(
            f"{path}: the header has no document bounds, and even an .idx without documents has one; "
            f"{mend}"
        )
    return IndexHeader(
        dtype=DTYPE_OF_CODE[dtype_code],
        sequence_count=sequence_count,
        document_count=document_count,
        multimodal=file_bytes != plain,
    )


def parse_index(data: memoryview, path: str) -> IndexArrays:
    """The arrays of a whole `.idx`, as views of `data`; checked by `check_index`, not here."""
    header = parse_header(data[:HEADER_BYTES], len(data), path)
    sequences = header.sequence_count
    modes = None
    if header.multimodal:
        modes = np.frombuffer(data, MODE, sequences, header.modes_at)
    return IndexArrays(
        dtype=header.dtype,
        sequence_lengths=np.frombuffer(data, LENGTH, sequences, header.lengths_at),
        sequence_offsets=np.frombuffer(data, OFFSET, sequences, header.offsets_at),
        document_indices=np.frombuffer(
            data, DOCUMENT_BOUND, header.document_count, header.documents_at
        ),
        sequence_modes=modes,
    )


def check_index(arrays: IndexArrays, bin_bytes: int, path: str, tokens: str = "the .bin") -> int:
    """Raise FormatError if a sequence or document is outside of what exists; return where the
    furthest sequence ends, in bytes.

    bin_bytes: of the tokens, decompressed; path, tokens: the names of both files. One pass,
    bounded memory.
    """
    furthest_end = 0
    for first_row in range(0, arrays.num_sequences, _CHECK_ROWS):
        end = _check_sequences(arrays, first_row, bin_bytes, path, tokens)
        furthest_end = max(furthest_end, end)
    _check_documents(arrays, path)
    return furthest_end


def check_end(end: int, bin_bytes: int, path: str, tokens: str) -> None:
    """Raise FormatError unless an `.idx` ends where its tokens do. Otherwise one of the two is cut
    short, or belongs to another dataset.

    end: one past the last byte of its last sequence; bin_bytes: of the tokens, decompressed; path,
    tokens: the names of both.
    """
    if end == bin_bytes:
        return
    if end > bin_bytes:
        cause = "the .bin is truncated or belongs to another .idx: copy both again"
    else:
        cause = (
            "the .idx belongs to another .bin, or the .bin has grown since: copy both again, or "
            "convert again; if it was converted with --pack-length, name its manifest"
        )
    raise FormatError(
        f"{path}: its sequences end at byte {end:,}, but {tokens} has {bin_bytes:,} bytes of "
        f"tokens; {cause}"
    )


def check_whole_end(arrays: IndexArrays, end: int, bin_bytes: int, path: str, tokens: str) -> None:
    """`check_end` if sequences are end to end, as writers put them. end: where the furthest one ends.

    An `.idx` made by hand may name parts of a `.bin`, in any order. It may then end anywhere.
    """
    covered = arrays.num_tokens * arrays.dtype.itemsize
    if covered == end:
        check_end(end, bin_bytes, path, tokens)


def check_bins(arrays: IndexArrays, bin_tokens: int, path: str) -> None:
    """Raise FormatError unless each bin has whole documents end to end, from its first token on.

    For arrays that passed `check_index`: bounds rise, and sequences begin at whole tokens. Only
    `streammega verify` calls it. Readers find the documents of a bin by binary search, so offsets
    must ascend. They count all tokens of a bin before its padding (kernels/documents.py).
    """
    bounds = arrays.document_indices
    starts = arrays.sequence_offsets // arrays.dtype.itemsize
    stops = starts + arrays.sequence_lengths
    tokens_before = np.zeros(len(starts) + 1, np.int64)
    np.cumsum(arrays.sequence_lengths, dtype=np.int64, out=tokens_before[1:])
    without_tokens = np.flatnonzero(tokens_before[bounds[1:]] == tokens_before[bounds[:-1]])
    if len(without_tokens):
        raise FormatError(
            f"{path}: document {without_tokens[0]} has no tokens, and every document of a bin has "
            f"some; copy both files again, or convert again"
        )
    first = starts[bounds[:-1]]
    last = stops[bounds[1:] - 1]
    lies_wrong = (last <= first) | (first // bin_tokens != (last - 1) // bin_tokens)
    previous_stops = np.zeros_like(stops)
    previous_stops[1:] = stops[:-1]
    begins_bin = np.zeros(len(starts), np.bool_)
    begins_bin[bounds[:-1]] = first % bin_tokens == 0
    follows = (starts == previous_stops) | (begins_bin & (starts > previous_stops))
    lies_wrong[np.searchsorted(bounds, np.flatnonzero(~follows), side="right") - 1] = True
    if lies_wrong.any():
        bad = int(np.argmax(lies_wrong))
        raise FormatError(
            f"{path}: document {bad} has tokens [{first[bad]}, {last[bad]}), which are not within one "
            f"bin of {bin_tokens}, or its sequences do not follow each other and the document before "
            f"it in the bin; copy both files again, or convert again"
        )


def _check_sequences(
    arrays: IndexArrays, first_row: int, bin_bytes: int, path: str, tokens: str
) -> int:
    """Check up to _CHECK_ROWS sequences, from number `first_row` on; returns where the furthest of
    them ends, in bytes.
    """
    rows = slice(first_row, first_row + _CHECK_ROWS)
    lengths = arrays.sequence_lengths[rows]
    offsets = arrays.sequence_offsets[rows]
    itemsize = arrays.dtype.itemsize
    if lengths.min() < 0:
        bad = int(np.argmax(lengths < 0))
        raise FormatError(
            f"{path}: sequence {first_row + bad} has the negative length {lengths[bad]}; "
            "copy it again, or convert again"
        )
    within_token = offsets % itemsize
    if within_token.any():
        bad = int(np.argmax(within_token != 0))
        raise FormatError(
            f"{path}: sequence {first_row + bad} starts at byte {offsets[bad]}, inside a "
            f"{itemsize}-byte token; copy it again, or convert again"
        )
    # Sizes are below 2**35 and cannot overflow here; offset + size of a forged offset would.
    sizes = lengths.astype(np.int64) * itemsize
    outside = (offsets < 0) | (offsets > bin_bytes - sizes)
    if outside.any():
        bad = int(np.argmax(outside))
        raise FormatError(
            f"{path}: sequence {first_row + bad} is at bytes [{offsets[bad]}, +{sizes[bad]}), "
            f"but the .bin has {bin_bytes} bytes; {tokens} is truncated or belongs to another "
            ".idx: copy both again"
        )
    ends = offsets + sizes
    return int(ends.max())


def _check_documents(arrays: IndexArrays, path: str) -> None:
    """Raise FormatError unless document bounds rise from 0 to the number of sequences."""
    bounds = arrays.document_indices
    num_sequences = arrays.num_sequences
    ends = (int(bounds[0]), int(bounds[-1])) if len(bounds) else ()
    if ends != (0, num_sequences):
        raise FormatError(
            f"{path}: document bounds run {ends}, not from 0 to the {num_sequences} sequences; "
            "copy it again, or convert again"
        )
    for first_row in range(0, arrays.num_documents, _CHECK_ROWS):
        # One row more: the last bound of these rows is compared with the first of the next ones.
        part = bounds[first_row : first_row + _CHECK_ROWS + 1]
        falls = part[1:] < part[:-1]
        if falls.any():
            bad = first_row + int(np.argmax(falls))
            raise FormatError(
                f"{path}: document bound {bad + 1} is before bound {bad}; copy it again, or convert again"
            )


def encode_header(dtype: np.dtype[Any], sequence_count: int, document_count: int) -> bytes:
    """The header of an `.idx`. document_count: documents + 1."""
    return HEADER.pack(MAGIC, VERSION, dtype_code(dtype), sequence_count, document_count)


def encode_index(
    dtype: np.dtype[Any],
    lengths: NDArray[np.int32],
    document_indices: NDArray[np.int64],
    modes: NDArray[np.int8] | None,
    offsets: NDArray[np.int64] | None = None,
) -> Iterator[bytes]:
    """The bytes of an `.idx`, in chunks. Offsets default to sequences laid end to end."""
    yield encode_header(dtype, len(lengths), len(document_indices))
    yield _stored(lengths, LENGTH)
    if offsets is None:
        offsets = np.zeros(len(lengths), np.int64)
        np.cumsum(lengths[:-1], dtype=np.int64, out=offsets[1:])
        offsets *= dtype.itemsize
    yield _stored(offsets, OFFSET)
    yield _stored(document_indices, DOCUMENT_BOUND)
    if modes is not None:
        yield _stored(modes, MODE)


def _stored(values: NDArray[Any], dtype: np.dtype[Any]) -> bytes:
    return np.ascontiguousarray(values, dtype).tobytes()
