"""The zstd seekable format: independent frames, then their sizes in a skippable frame, which every
zstd tool passes over.

The table: magic 0x184D2A5E u32, its size u32, then for each frame its compressed and decompressed
size u32 u32 (and a checksum u32 where the descriptor's bit 7 is set), the number of frames u32, the
descriptor u8, and 0x8F92EAB1 u32. All little-endian.
"""

from __future__ import annotations

import struct
from array import array

import numpy as np
import zstandard
from numpy.typing import NDArray

from streammega.errors import FormatError
from streammega.storage.store import ObjectWriter

FRAME_BYTES = 32 << 10
"""Decompressed bytes of a frame: an eighth of the stream order's block, so that a block brings
little more than itself.
"""
LEVEL = 3
SKIPPABLE = 0x184D2A5E
SEEKABLE = 0x8F92EAB1
FOOTER = struct.Struct("<IBI")
HEADER = struct.Struct("<II")
MOST_FRAMES = 0x8000000


class FrameWriter:
    """Compresses what is written into frames of `frame_bytes`, and ends the file with their table.

    An ObjectWriter.
    """

    def __init__(
        self, inner: ObjectWriter, level: int = LEVEL, frame_bytes: int = FRAME_BYTES
    ) -> None:
        self._inner = inner
        self._frame_bytes = frame_bytes
        self._compressor = zstandard.ZstdCompressor(
            level=level, write_checksum=True, write_content_size=True
        )
        self._pending = bytearray()
        self._table = array("I")

    def write(self, data: bytes | memoryview) -> None:
        """Append decompressed bytes."""
        view = memoryview(data).cast("B")
        at = 0
        if self._pending:
            at = min(self._frame_bytes - len(self._pending), len(view))
            self._pending += view[:at]
            if len(self._pending) < self._frame_bytes:
                return
            self._frame(self._pending)
            self._pending = bytearray()
        while len(view) - at >= self._frame_bytes:
            self._frame(view[at : at + self._frame_bytes])
            at += self._frame_bytes
        self._pending += view[at:]

    def commit(self) -> None:
        """Write what is left and the table, and publish."""
        if self._pending:
            self._frame(self._pending)
        frames = len(self._table) // 2
        self._inner.write(HEADER.pack(SKIPPABLE, 8 * frames + FOOTER.size))
        self._inner.write(np.array(self._table, "<u4").tobytes())
        self._inner.write(FOOTER.pack(frames, 0, SEEKABLE))
        self._inner.commit()

    def abort(self) -> None:
        """Throw everything away."""
        self._inner.abort()

    def _frame(self, data: bytes | bytearray | memoryview) -> None:
        frame = self._compressor.compress(data)
        self._table.append(len(frame))
        self._table.append(len(data))
        self._inner.write(frame)


def table_bytes(footer: bytes | memoryview, size: int, url: str) -> int:
    """Bytes of the table at the end of an object of `size` bytes whose last ones are `footer`.

    Raises FormatError if there is no table.
    """
    if len(footer) == FOOTER.size:
        frames, descriptor, magic = FOOTER.unpack(footer)
        entry = 12 if descriptor & 0x80 else 8
        total = int(HEADER.size + frames * entry + FOOTER.size)
        if magic == SEEKABLE and frames <= MOST_FRAMES and total <= size:
            return total
    raise FormatError(
        f"{url}: is not a seekable zstd file, or cut short: its table of frames is missing; write it again"
    )


def parse_table(
    table: bytes | memoryview, size: int, url: str
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where frames begin and end: (compressed, decompressed) bytes, int64 [frames + 1] each.

    Raises FormatError.
    """
    magic, content = HEADER.unpack(table[: HEADER.size])
    frames, descriptor, _ = FOOTER.unpack(table[-FOOTER.size :])
    if magic != SKIPPABLE or content != len(table) - HEADER.size:
        raise FormatError(f"{url}: its table of frames is damaged; write it again")
    words = 3 if descriptor & 0x80 else 2
    entries = (
        np.frombuffer(table, "<u4", frames * words, HEADER.size)
        .reshape(frames, words)
        .astype(np.int64)
    )
    bounds = np.zeros((frames + 1, 2), np.int64)
    np.cumsum(entries[:, :2], axis=0, out=bounds[1:])
    if bounds[-1, 0] + len(table) != size:
        raise FormatError(
            f"{url}: its frames have {bounds[-1, 0]} bytes, the file {size - len(table)} before their table; write it again"
        )
    return np.ascontiguousarray(bounds[:, 0]), np.ascontiguousarray(bounds[:, 1])
