"""The zstd seekable format: independent frames, then a table of their sizes.

The table is a skippable frame, which every zstd tool passes over: magic 0x184D2A5E u32, its size
u32, then for each frame its compressed and decompressed size u32 u32 (and a checksum u32 where the
descriptor's bit 7 is set), the number of frames u32, the descriptor u8, and 0x8F92EAB1 u32. All
little-endian.
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
"""Decompressed bytes of a frame.

An eighth of the stream order's block, so that a block brings little more than itself.
"""
LEVEL = 3
SKIPPABLE = 0x184D2A5E
SEEKABLE = 0x8F92EAB1
HEADER = struct.Struct("<II")
"""`SKIPPABLE`, and the bytes of the table after this header."""
FOOTER = struct.Struct("<IBI")
"""The number of frames, the descriptor, and `SEEKABLE`."""
HAS_CHECKSUMS = 0x80
"""The bit of the descriptor that says that entries have a third word."""
WORD_BYTES = 4
SIZE_WORDS = 2
"""Words of an entry that are sizes: the compressed one, then the decompressed one."""
MOST_FRAMES = 0x8000000
"""What the format allows; a larger number is no table."""


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
        self._table = array("I")  # of each frame its compressed and its decompressed size

    def write(self, data: bytes | memoryview) -> None:
        """Append decompressed bytes."""
        view = memoryview(data).cast("B")
        taken = 0
        if self._pending:
            missing = self._frame_bytes - len(self._pending)
            taken = min(missing, len(view))
            self._pending += view[:taken]
            if len(self._pending) < self._frame_bytes:
                return
            self._frame(self._pending)
            self._pending = bytearray()
        # Whole frames are compressed from where they lie, without a copy.
        while len(view) - taken >= self._frame_bytes:
            self._frame(view[taken : taken + self._frame_bytes])
            taken += self._frame_bytes
        self._pending += view[taken:]

    def commit(self) -> None:
        """Write what is left and the table, and publish."""
        if self._pending:
            self._frame(self._pending)
        frames = len(self._table) // SIZE_WORDS
        descriptor = 0  # without checksums: frames have their own
        entries = np.array(self._table, "<u4").tobytes()
        content_bytes = len(entries) + FOOTER.size
        header = HEADER.pack(SKIPPABLE, content_bytes)
        footer = FOOTER.pack(frames, descriptor, SEEKABLE)
        for part in (header, entries, footer):
            self._inner.write(part)
        self._inner.commit()

    def abort(self) -> None:
        """Throw everything away."""
        self._inner.abort()

    def _frame(self, data: bytes | bytearray | memoryview) -> None:
        frame = self._compressor.compress(data)
        sizes = (len(frame), len(data))
        self._table.extend(sizes)
        self._inner.write(frame)


def table_bytes(footer: bytes | memoryview, size: int, url: str) -> int:
    """Bytes of the table at the end of an object of `size` bytes whose last ones are `footer`.

    Raises FormatError if there is no table.
    """
    if len(footer) == FOOTER.size:
        frames, descriptor, magic = FOOTER.unpack(footer)
        entries_bytes = frames * _entry_words(descriptor) * WORD_BYTES
        total = int(HEADER.size + entries_bytes + FOOTER.size)
        if magic == SEEKABLE and frames <= MOST_FRAMES and total <= size:
            return total
    raise FormatError(
        f"{url}: is not a seekable zstd file, or cut short: its table of frames is missing; "
        f"write it again"
    )


def _entry_words(descriptor: int) -> int:
    return SIZE_WORDS + 1 if descriptor & HAS_CHECKSUMS else SIZE_WORDS


def parse_table(
    table: bytes | memoryview, size: int, url: str
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where frames begin and end: (compressed, decompressed) bytes, int64 [frames + 1] each.

    Raises FormatError.
    """
    header = table[: HEADER.size]
    footer = table[-FOOTER.size :]
    magic, content_bytes = HEADER.unpack(header)
    frames, descriptor, _ = FOOTER.unpack(footer)
    if magic != SKIPPABLE or content_bytes != len(table) - HEADER.size:
        raise FormatError(f"{url}: its table of frames is damaged; write it again")
    words = _entry_words(descriptor)
    flat = np.frombuffer(table, "<u4", frames * words, HEADER.size)
    entries = flat.reshape(frames, words).astype(np.int64)
    # Two arrays, each contiguous: they are searched for each read.
    compressed = _ends_of(entries[:, 0])
    decompressed = _ends_of(entries[:, 1])
    frame_bytes = compressed[-1]
    before_table = size - len(table)
    if frame_bytes != before_table:
        raise FormatError(
            f"{url}: its frames have {frame_bytes} bytes, the file {before_table} before their "
            f"table; write it again"
        )
    return compressed, decompressed


def _ends_of(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where each of several begins that lie end to end, and where the last one ends."""
    bounds = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=bounds[1:])
    return bounds
