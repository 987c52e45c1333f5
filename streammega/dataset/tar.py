"""Token shards as WebDataset tars: one sample for each sequence, `000000042.npy`, and its mode in
`000000042.cls`.

The number is that of the sequence in the dataset, so that no two samples have the same key. Readers
ignore it.

Every member begins with a 512-byte ustar header, and every payload with a 128-byte .npy header; both
are padded to 512 bytes. So the places of all payloads follow from the lengths in the shard's `.idx`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streammega.errors import FormatError
from streammega.storage.derived_stores import Members

RECORD = 512
"""Everything in a tar is padded to a multiple of this. A header is one record."""
END = bytes(2 * RECORD)
"""Two empty records end an archive."""
MODE_MEMBER_BYTES = 2 * RECORD
"""A header, and a mode of a few digits, padded."""
NPY_HEADER = 128
NPY_MAGIC = b"\x93NUMPY\x01\x00"
NPY_TEXT_LENGTH = struct.Struct("<H")
NPY_TEXT_BYTES = NPY_HEADER - len(NPY_MAGIC) - NPY_TEXT_LENGTH.size
"""Room in a .npy header for its text, which ends in a newline."""
MAX_BYTES = 8**11 - 1
"""The size field of a tar header has 11 octal digits."""
HEADER = struct.Struct("100s8s8s8s12s12s8sc100s8s")
"""ustar: name, mode, owner, group, size, time, checksum, type, link, magic and version."""
CHECKSUM_PLACE = struct.calcsize("100s8s8s8s12s12s")


def layout(lengths: NDArray[np.int32], itemsize: int, multimodal: bool) -> Members:
    """The places of the payloads of a shard with these sequence lengths."""
    sizes = lengths.astype(np.int64) * itemsize
    member_starts = _running_sums(_member_bytes(sizes, multimodal))
    payload_starts = member_starts + RECORD + NPY_HEADER
    return Members(_running_sums(sizes), payload_starts)


def stored_bytes(lengths: NDArray[np.int32], itemsize: int, multimodal: bool) -> int:
    """Bytes of a shard with these sequence lengths, with the end of the archive."""
    sizes = lengths.astype(np.int64) * itemsize
    return int(_member_bytes(sizes, multimodal).sum()) + len(END)


def _running_sums(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """The sum of the values before each, and of all of them; int64 [values + 1]."""
    sums = np.zeros(len(values) + 1, np.int64)
    np.cumsum(values, out=sums[1:])
    return sums


def _member_bytes(sizes: NDArray[np.int64], multimodal: bool) -> NDArray[np.int64]:
    """Bytes that sequences of `sizes` bytes take in a tar, with their modes."""
    records = -(-(NPY_HEADER + sizes) // RECORD)
    members: NDArray[np.int64] = RECORD + records * RECORD
    if multimodal:
        members += MODE_MEMBER_BYTES
    return members


def encode_members(
    pieces: Iterator[memoryview],
    lengths: NDArray[np.int32],
    modes: NDArray[np.int8] | None,
    dtype: np.dtype[Any],
    first: int,
) -> Iterator[bytes | memoryview]:
    """The bytes of samples, in parts: the same sequences, from the same number `first` on, give the
    same bytes.

    pieces: the tokens, end to end, in pieces of any size, each valid until the next one. modes: of
    each sequence, which then have members too.
    """
    dtype = dtype.newbyteorder("<")
    unread = memoryview(b"")
    for row, length in enumerate(lengths.tolist()):
        missing = length * dtype.itemsize
        size = NPY_HEADER + missing
        yield _header(f"{first + row:09d}.npy", size)
        yield _npy_header(dtype, length)
        while missing:
            if not unread:
                piece = next(pieces, None)
                if piece is None:
                    return  # the caller counts the bytes
                unread = piece
            part = unread[:missing]
            yield part
            unread = unread[len(part) :]
            missing -= len(part)
        yield bytes(-size % RECORD)
        if modes is not None:
            mode = str(modes[row]).encode()
            yield _header(f"{first + row:09d}.cls", len(mode))
            yield mode
            yield bytes(-len(mode) % RECORD)


def _header(name: str, size: int) -> bytes:
    """A ustar header of a plain file, without user and time: it is always the same for a file."""
    if size > MAX_BYTES:
        raise FormatError(
            f"{name}: {size:,} bytes are more than a tar member can have; write this corpus as "
            ".bin or zst shards"
        )
    block = bytearray(RECORD)
    HEADER.pack_into(
        block,
        0,
        name.encode(),
        b"0000644\0",
        b"0000000\0",
        b"0000000\0",
        b"%011o\0" % size,
        b"%011o\0" % 0,
        b" " * 8,  # the checksum, which is computed with spaces in its place
        b"0",
        b"",
        b"ustar\x0000",
    )
    checksum = b"%06o\0 " % sum(block)
    block[CHECKSUM_PLACE : CHECKSUM_PLACE + len(checksum)] = checksum
    return bytes(block)


def _npy_header(dtype: np.dtype[Any], length: int) -> bytes:
    """A .npy header, version 1.0, always of 128 bytes."""
    text = f"{{'descr': '{dtype.str}', 'fortran_order': False, 'shape': ({length},), }}"
    padded = text.encode().ljust(NPY_TEXT_BYTES - 1) + b"\n"
    return NPY_MAGIC + NPY_TEXT_LENGTH.pack(NPY_TEXT_BYTES) + padded
