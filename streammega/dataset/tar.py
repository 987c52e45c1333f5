"""Token shards as WebDataset tars: one sample for each sequence, `000000042.npy`, and its mode in
`000000042.cls`.

The number is that of the sequence in the dataset, so that no two samples of it have the same key.
Readers do not look at it: shards of earlier versions counted from zero each.

Every member begins with a 512-byte ustar header, every payload with a 128-byte .npy header, and is
padded to 512 bytes; so the places of all payloads follow from the lengths in the shard's `.idx`.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streammega.errors import FormatError
from streammega.storage.store import ObjectWriter
from streammega.storage.views import Members

RECORD = 512
NPY_HEADER = 128
MOST_BYTES = 8**11 - 1
"""What the size field of a tar header can hold."""


def layout(lengths: NDArray[np.int32], itemsize: int, multimodal: bool) -> Members:
    """Where the payloads of a shard with these sequence lengths lie."""
    size = lengths.astype(np.int64) * itemsize
    shown = np.concatenate([np.zeros(1, np.int64), np.cumsum(size)])
    record = RECORD + -(-(NPY_HEADER + size) // RECORD) * RECORD + (2 * RECORD if multimodal else 0)
    at = np.concatenate([np.zeros(1, np.int64), np.cumsum(record)]) + RECORD + NPY_HEADER
    return Members(shown, at)


def stored_bytes(lengths: NDArray[np.int32], itemsize: int, multimodal: bool) -> int:
    """Bytes of such a shard: all members, and two empty records at its end."""
    size = NPY_HEADER + lengths.astype(np.int64) * itemsize
    return (
        int((RECORD + -(-size // RECORD) * RECORD).sum())
        + len(lengths) * (2 * RECORD if multimodal else 0)
        + 2 * RECORD
    )


class TarWriter:
    """Writes sequences as members.

    The same sequences, from the same `first` number on, give the same bytes.
    """

    def __init__(
        self, inner: ObjectWriter, dtype: np.dtype[Any], multimodal: bool, first: int = 0
    ) -> None:
        self._inner, self._dtype, self._multimodal = inner, dtype.newbyteorder("<"), multimodal
        self._number = first

    def add(
        self, data: memoryview, lengths: NDArray[np.int32], modes: NDArray[np.int8] | None
    ) -> None:
        """Append sequences, whose tokens lie end to end in `data`."""
        at = 0
        for place, length in enumerate(lengths.tolist()):
            size = length * self._dtype.itemsize
            name = f"{self._number:09d}"
            self._member(f"{name}.npy", [_npy_header(self._dtype, length), data[at : at + size]])
            if self._multimodal:
                assert modes is not None
                self._member(f"{name}.cls", [str(int(modes[place])).encode()])
            at += size
            self._number += 1

    def commit(self) -> None:
        """End the archive and publish it."""
        self._inner.write(bytes(2 * RECORD))
        self._inner.commit()

    def abort(self) -> None:
        """Throw everything away."""
        self._inner.abort()

    def _member(self, name: str, parts: list[bytes | memoryview]) -> None:
        size = sum(len(part) for part in parts)
        self._inner.write(_header(name, size))
        for part in parts:
            self._inner.write(part)
        self._inner.write(bytes(-size % RECORD))


def _header(name: str, size: int) -> bytes:
    """A ustar header of a plain file."""
    if size > MOST_BYTES:
        raise FormatError(
            f"{name}: {size:,} bytes are more than a tar member can have; write this corpus as .bin or zst shards"
        )
    block = bytearray(RECORD)
    struct.pack_into("100s8s8s8s12s12s8sc", block, 0, name.encode(), b"0000644\0", b"0000000\0", b"0000000\0",
                     b"%011o\0" % size, b"%011o\0" % 0, b" " * 8, b"0")  # fmt: skip
    block[257:265] = b"ustar\x0000"
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def _npy_header(dtype: np.dtype[Any], length: int) -> bytes:
    """A .npy header, version 1.0, always of 128 bytes."""
    text = f"{{'descr': '{dtype.str}', 'fortran_order': False, 'shape': ({length},), }}"
    return (
        b"\x93NUMPY\x01\x00"
        + struct.pack("<H", NPY_HEADER - 10)
        + text.encode().ljust(NPY_HEADER - 11)
        + b"\n"
    )
