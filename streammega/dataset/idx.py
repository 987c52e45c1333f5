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
HEADER_BYTES = HEADER.size  # 34
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
_CHECK_ROWS = 1 << 17
"""Sequences looked at together: a few arrays of them are made at once, by each of the threads that
open shards.
"""


@dataclass(frozen=True, kw_only=True)
class IndexHeader:
    """What the first 34 bytes and the size of an `.idx` say. `document_count` is documents + 1."""

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
        return self.lengths_at + 4 * self.sequence_count

    @property
    def documents_at(self) -> int:
        """Byte position of document_indices."""
        return self.offsets_at + 8 * self.sequence_count

    @property
    def modes_at(self) -> int:
        """Byte position of the modes, where there are any."""
        return self.documents_at + 8 * self.document_count


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


def dtype_code(dtype: DTypeLike) -> int:
    """The `.idx` code of a dtype. Raises FormatError for one that the format does not have."""
    kind = np.dtype(dtype)
    if kind not in CODE_OF_DTYPE:
        names = ", ".join(str(known) for known in CODE_OF_DTYPE)
        raise FormatError(f"dtype {kind} has no code in the .idx format; it knows {names}")
    return CODE_OF_DTYPE[kind]


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


def parse_header(data: bytes | memoryview, file_bytes: int, path: str) -> IndexHeader:
    """The header of an `.idx` of `file_bytes` bytes whose first bytes are `data`.

    Raises FormatError for a wrong magic, version or dtype code, and for counts that the size
    contradicts.
    """
    mend = "is this the .idx of a Megatron dataset, and whole? copy it again, or rebuild it with 'streammega convert'"
    if file_bytes < HEADER_BYTES or len(data) < HEADER_BYTES:
        raise FormatError(
            f"{path}: {file_bytes} bytes are fewer than the {HEADER_BYTES} of an .idx header; {mend}"
        )
    code: int
    magic, version, code, sequence_count, document_count = HEADER.unpack(bytes(data[:HEADER_BYTES]))
    if magic != MAGIC:
        raise FormatError(f"{path}: starts with {magic!r}, an .idx with {MAGIC!r}; {mend}")
    if version != VERSION:
        raise FormatError(
            f"{path}: .idx version {version}; this reader knows version {VERSION}; {mend}"
        )
    if code not in DTYPE_OF_CODE:
        raise FormatError(
            f"{path}: dtype code {code} is not one of {sorted(DTYPE_OF_CODE)}; {mend}"
        )
    plain = HEADER_BYTES + 12 * sequence_count + 8 * document_count
    if file_bytes not in (plain, plain + sequence_count):
        raise FormatError(
            f"{path}: the header tells of {sequence_count} sequences and {document_count} document bounds, that is "
            f"{plain} bytes ({plain + sequence_count} with modes), but the file has {file_bytes}; {mend}"
        )
    multimodal = file_bytes != plain
    return IndexHeader(
        dtype=DTYPE_OF_CODE[code],
        sequence_count=sequence_count,
        document_count=document_count,
        multimodal=multimodal,
    )


def parse_index(data: memoryview, path: str) -> IndexArrays:
    """The arrays of a whole `.idx`, as views of `data`; checked by `check_index`, not here."""
    header = parse_header(data[:HEADER_BYTES], len(data), path)
    modes = None
    if header.multimodal:
        modes = np.frombuffer(data, np.int8, header.sequence_count, header.modes_at)
    return IndexArrays(
        dtype=header.dtype,
        sequence_lengths=np.frombuffer(data, "<i4", header.sequence_count, header.lengths_at),
        sequence_offsets=np.frombuffer(data, "<i8", header.sequence_count, header.offsets_at),
        document_indices=np.frombuffer(data, "<i8", header.document_count, header.documents_at),
        sequence_modes=modes,
    )


def check_index(arrays: IndexArrays, bin_bytes: int, path: str, tokens: str = "the .bin") -> int:
    """Raise FormatError if a sequence or document lies outside of what exists; return where the
    furthest sequence ends.

    In bytes; bin_bytes: of the tokens, decompressed; path, tokens: the names of both files. One
    pass, bounded memory.
    """
    lengths = arrays.sequence_lengths
    offsets = arrays.sequence_offsets
    end = 0
    for at in range(0, len(lengths), _CHECK_ROWS):
        rows = slice(at, at + _CHECK_ROWS)
        end = max(
            end,
            _check_sequences(
                lengths[rows], offsets[rows], arrays.dtype.itemsize, at, bin_bytes, path, tokens
            ),
        )
    documents = arrays.document_indices
    if len(documents) == 0 or documents[0] != 0 or documents[-1] != len(lengths):
        ends = (int(documents[0]), int(documents[-1])) if len(documents) else ()
        raise FormatError(
            f"{path}: document bounds run {ends}, not from 0 to the {len(lengths)} sequences; rebuild the .idx"
        )
    for at in range(0, len(documents) - 1, _CHECK_ROWS):
        part = documents[at : at + _CHECK_ROWS + 1]
        if (part[1:] < part[:-1]).any():
            bad = at + int(np.argmax(part[1:] < part[:-1]))
            raise FormatError(
                f"{path}: document bound {bad + 1} lies before bound {bad}; rebuild the .idx"
            )
    return end


def check_end(end: int, bin_bytes: int, path: str, tokens: str) -> None:
    """Raise FormatError unless an `.idx` ends where its tokens do: else one of the two is cut
    short, or another dataset's.

    end: one past the last byte of its last sequence; bin_bytes: of the tokens, decompressed; path,
    tokens: the names of both.
    """
    if end == bin_bytes:
        return
    if end > bin_bytes:
        cause = "the .bin is truncated or belongs to another .idx: copy both again"
    else:
        cause = (
            "the .idx belongs to another .bin, or the .bin has grown since: copy both again, or rebuild the .idx by "
            "'streammega verify --repair'"
        )
    raise FormatError(
        f"{path}: its sequences end at byte {end:,}, but {tokens} has {bin_bytes:,} bytes of tokens; {cause}"
    )


def check_whole_end(arrays: IndexArrays, end: int, bin_bytes: int, path: str, tokens: str) -> None:
    """`check_end` where sequences lie end to end, as writers put them: `end` is where the furthest
    one ends.

    An `.idx` made by hand may name parts of a `.bin`, in any order; it is then right wherever the
    last of them ends.
    """
    covered = int(arrays.sequence_lengths.sum(dtype=np.int64)) * arrays.dtype.itemsize
    if covered == end:
        check_end(end, bin_bytes, path, tokens)


def _check_sequences(
    lengths: NDArray[np.int32],
    offsets: NDArray[np.int64],
    itemsize: int,
    at: int,
    bin_bytes: int,
    path: str,
    tokens: str,
) -> int:
    """Check some sequences, the first of which is number `at`; returns where the furthest of them
    ends, in bytes.
    """
    if lengths.min() < 0:
        bad = int(np.argmax(lengths < 0))
        raise FormatError(
            f"{path}: sequence {at + bad} has the negative length {lengths[bad]}; rebuild the .idx"
        )
    size = lengths.astype(np.int64) * itemsize
    if (offsets % itemsize).any():
        bad = int(np.argmax(offsets % itemsize != 0))
        raise FormatError(
            f"{path}: sequence {at + bad} starts at byte {offsets[bad]}, inside a {itemsize}-byte token; rebuild the .idx"
        )
    # never offset + size, which a forged offset overflows
    outside = (offsets < 0) | (offsets > bin_bytes - size)
    if outside.any():
        bad = int(np.argmax(outside))
        raise FormatError(
            f"{path}: sequence {at + bad} lies at bytes [{offsets[bad]}, +{size[bad]}), but the .bin has {bin_bytes} bytes; "
            f"{tokens} is truncated or belongs to another .idx: copy both again"
        )
    return int((offsets + size).max())


def encode_index(
    dtype: np.dtype[Any],
    lengths: NDArray[np.int32],
    document_indices: NDArray[np.int64],
    modes: NDArray[np.int8] | None,
    offsets: NDArray[np.int64] | None = None,
) -> Iterator[bytes]:
    """The bytes of an `.idx`, in chunks. Offsets default to sequences laid end to end."""
    yield HEADER.pack(MAGIC, VERSION, dtype_code(dtype), len(lengths), len(document_indices))
    yield np.ascontiguousarray(lengths, "<i4").tobytes()
    if offsets is None:
        offsets = np.zeros(len(lengths), np.int64)
        np.cumsum(lengths[:-1], dtype=np.int64, out=offsets[1:])
        offsets *= dtype.itemsize
    yield offsets.astype("<i8", copy=False).tobytes()
    yield np.ascontiguousarray(document_indices, "<i8").tobytes()
    if modes is not None:
        yield np.ascontiguousarray(modes, np.int8).tobytes()
