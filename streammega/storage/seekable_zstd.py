"""The zstd seekable format: independent frames, then a table of their sizes.

The table is a skippable frame, which every zstd tool ignores: magic 0x184D2A5E u32, its size
u32, then for each frame its compressed and decompressed size u32 u32 (and a checksum u32 where the
descriptor's bit 7 is set), the number of frames u32, the descriptor u8, and 0x8F92EAB1 u32. All
little-endian.

One call decompresses the frames of several reads into the callers' buffers, without the GIL. It uses
the C library that the zstandard package brings.

Frames are not decompressed straight into batches: those of all lanes would be open at once, at 16 bytes a
token instead of 2. A frame that two blocks share is not cached: its neighbour may come at any other time of
the epoch.
"""

from __future__ import annotations

import struct
import threading
from array import array
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import llvmlite.binding
import numpy as np
import zstandard
from numpy.typing import NDArray

from streammega.errors import ConfigError, FormatError
from streammega.kernels.addresses import address_of, check_room
from streammega.kernels.plan import ZSTD_SYMBOL, decompress_frames
from streammega.storage.derived_stores import parts_between
from streammega.storage.store import (
    Bytes,
    ObjectInfo,
    ObjectWriter,
    Span,
    Store,
    as_bytes,
)

Integers = NDArray[np.int64]
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
MAX_FRAMES = 0x8000000
"""The format allows no more: a larger number shows that this is not a table."""
MAX_FRAME_BYTES = 1 << 27
"""Decompressed bytes of a frame that is read: one that is wanted in part needs a buffer of its size.
A few bytes of a table may claim 4 GiB, and so may a small frame of zeros.
"""
TABLE_GUESS_BYTES = 1 << 14
"""Bytes that are read from the end of a small zstd object. They hold its table."""


def check_frame_bytes(frame_bytes: int) -> None:
    """Raise ConfigError for frames that no reader takes."""
    if not 1 <= frame_bytes <= MAX_FRAME_BYTES:
        raise ConfigError(
            f"frame_bytes is {frame_bytes:,}; it must be at least 1 and at most {MAX_FRAME_BYTES:,}"
        )


class FrameWriter(ObjectWriter):
    """Compresses what is written into frames of `frame_bytes`, and ends the file with their table."""

    def __init__(
        self, inner: ObjectWriter, level: int = LEVEL, frame_bytes: int = FRAME_BYTES
    ) -> None:
        self._inner = inner
        self._frame_bytes = frame_bytes
        self._compressor = zstandard.ZstdCompressor(
            level=level, write_checksum=True, write_content_size=True
        )
        self._pending = bytearray()
        self._table = array("I")  # the compressed and decompressed size of each frame

    def write(self, data: bytes | memoryview) -> None:
        """Append decompressed bytes."""
        view = as_bytes(data)
        taken = 0
        if self._pending:
            missing = self._frame_bytes - len(self._pending)
            taken = min(missing, len(view))
            self._pending += view[:taken]
            if len(self._pending) < self._frame_bytes:
                return
            self._frame(self._pending)
            self._pending = bytearray()
        # Whole frames are compressed without a copy.
        while len(view) - taken >= self._frame_bytes:
            self._frame(view[taken : taken + self._frame_bytes])
            taken += self._frame_bytes
        self._pending += view[taken:]

    def commit(self) -> None:
        """Write what is left and the table, and publish."""
        if self._pending:
            self._frame(self._pending)
        frames = len(self._table) // SIZE_WORDS
        descriptor = 0  # no checksums in the table: frames have their own
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
        if magic == SEEKABLE and frames <= MAX_FRAMES and total <= size:
            return total
    raise FormatError(
        f"{url}: is not a seekable zstd file, or cut short: its table of frames is missing; "
        f"write it again"
    )


def _entry_words(descriptor: int) -> int:
    return SIZE_WORDS + 1 if descriptor & HAS_CHECKSUMS else SIZE_WORDS


def parse_table(table: bytes | memoryview, size: int, url: str) -> tuple[Integers, Integers]:
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
    compressed = np.append(0, entries[:, 0]).cumsum()
    decompressed = np.append(0, entries[:, 1]).cumsum()
    largest = int(entries[:, 1].max(initial=0))
    if largest > MAX_FRAME_BYTES:
        raise FormatError(
            f"{url}: a frame has {largest:,} bytes, and frames of up to {MAX_FRAME_BYTES:,} are read; "
            f"write it again with smaller frames"
        )
    frame_bytes = compressed[-1]
    before_table = size - len(table)
    if frame_bytes != before_table:
        raise FormatError(
            f"{url}: its frames have {frame_bytes} bytes, the file {before_table} before their "
            f"table; write it again"
        )
    return compressed, decompressed


_thread = threading.local()
KEPT_BUFFER_BYTES = 1 << 20
"""Bytes of the buffer for frames wanted in part that a thread keeps: fresh memory costs a page
fault for every 4 KiB. Frames of other writers may be larger, and are rare.
"""


@cache
def _make_context() -> Callable[[], Any]:
    """Register the C function for the kernel. Returns what makes a context of that library."""
    from zstandard._cffi import ffi, lib  # type: ignore[import-not-found]

    function = ffi.addressof(lib, "ZSTD_decompressDCtx")
    llvmlite.binding.add_symbol(ZSTD_SYMBOL, int(ffi.cast("uintptr_t", function)))

    def make() -> Any:
        context = lib.ZSTD_createDCtx()
        if context == ffi.NULL:
            raise MemoryError("no memory for a decompressor of zstd")
        owned = ffi.gc(context, lib.ZSTD_freeDCtx)
        return owned, int(ffi.cast("uintptr_t", context))

    return make


def _context() -> int:
    """The address of this thread's context. Contexts keep tables, so threads cannot share them."""
    if not hasattr(_thread, "context"):
        _thread.context = _make_context()()
    _, address = _thread.context
    return int(address)


def _thread_buffer(size: int) -> Bytes:
    """Room for a frame that is wanted in part. Its content is left over from before."""
    if size > KEPT_BUFFER_BYTES:
        return np.empty(size, np.uint8)
    if not hasattr(_thread, "buffer"):
        _thread.buffer = np.empty(KEPT_BUFFER_BYTES, np.uint8)
    buffer: Bytes = _thread.buffer
    return buffer


class Frames:
    """The decompressed bytes of a seekable zstd object: a `View` of it.

    compressed, decompressed: where frames begin and end, as they are stored and as they are shown,
    int64 [frames + 1] each.
    """

    def __init__(self, url: str, compressed: Integers, decompressed: Integers) -> None:
        self.url = url
        self.size = int(decompressed[-1])
        self._compressed = np.ascontiguousarray(compressed, np.int64)
        self._decompressed = np.ascontiguousarray(decompressed, np.int64)
        shown = np.diff(self._decompressed)
        self._largest_frame = int(shown.max(initial=0))
        is_rising = min(shown.min(initial=0), np.diff(self._compressed).min(initial=0)) >= 0
        # The kernel goes from frame to frame by these numbers alone.
        if not is_rising or len(self._compressed) != len(self._decompressed):
            raise FormatError(f"{url}: its frames are not one after the other")

    def stored_range(self, start: int, stop: int) -> Span:
        """Whole frames."""
        first, last = parts_between(self._decompressed, start, stop)
        return int(self._compressed[first]), int(self._compressed[last])

    def decode(self, stored: Sequence[Bytes], spans: Sequence[Span], outs: Sequence[Bytes]) -> None:
        """Decompress all spans by one call, which frees the GIL.

        Raises FormatError that names a damaged frame, and ValueError for memory of another size
        than a span's, or its frames'.
        """
        rows = []
        for body, (start, stop), out in zip(stored, spans, outs, strict=True):
            if start < stop:
                rows.append(self._kernel_row(body, start, stop, out))
        if not rows:
            return
        columns = np.array(rows, np.int64).T.copy()
        buffer = _thread_buffer(self._largest_frame)
        damaged: int = decompress_frames(
            _context(), self._compressed, self._decompressed, *columns, buffer
        )
        if damaged >= 0:
            raise self._damage_of(damaged, stored, spans)

    def _kernel_row(self, stored: Bytes, start: int, stop: int, out: Bytes) -> tuple[int, ...]:
        """A read as the kernel takes it. Raises ValueError, since the kernel checks no address."""
        if not 0 <= start <= stop <= self.size:
            raise ValueError(f"there are no bytes [{start}, {stop}) among {self.size}")
        check_room(out, stop - start)
        first, last = parts_between(self._decompressed, start, stop)
        size = self._compressed[last] - self._compressed[first]
        if len(stored) != size or not stored.flags.c_contiguous:
            raise ValueError(f"{len(stored)} bytes are not the frames that have {size}")
        return first, last, address_of(stored), start, stop, address_of(out)

    def _damage_of(
        self, number: int, stored: Sequence[Bytes], spans: Sequence[Span]
    ) -> FormatError:
        """What is wrong with a frame, by the package's own call, which says it."""
        low, high = map(int, self._compressed[number : number + 2])
        size = int(self._decompressed[number + 1] - self._decompressed[number])
        for body, (start, stop) in zip(stored, spans, strict=True):
            begin, end = self.stored_range(start, stop)
            if start < stop and begin <= low and high <= end:
                frame = body[low - begin : high - begin]
        try:
            # The package would allocate what the frame claims, whatever its limit is.
            claimed = zstandard.frame_content_size(frame.data)
            if claimed <= size:
                shown = zstandard.ZstdDecompressor().decompress(frame.data, max_output_size=size)
                claimed = len(shown)
            reason = f"{claimed} bytes instead of {size}"
        except zstandard.ZstdError as error:
            reason = str(error)
        return FormatError(
            f"{self.url}: frame {number}, bytes [{low}, {high}), is damaged ({reason}); copy or "
            f"convert it again"
        )


def read_frames(store: Store, info: ObjectInfo) -> Frames:
    """The frames of a seekable zstd object: one read of its end, rarely two.

    Raises FormatError, StorageError.
    """
    url = store.url(info.key)
    size = info.size
    # A frame of 32 KiB is 8 bytes of the table, and most are stored in more than 8 KiB.
    guess = max(TABLE_GUESS_BYTES, size // 1024)
    low = size - min(size, guess)
    (body,) = store.read(info.key, [(low, size)], info.etag)
    end = bytes(body)
    table_begin = size - table_bytes(end[-FOOTER.size :], size, url)
    if table_begin < low:
        (rest,) = store.read(info.key, [(table_begin, low)], info.etag)
        end = bytes(rest) + end
        low = table_begin
    compressed, decompressed = parse_table(end[table_begin - low :], size, url)
    return Frames(url, compressed, decompressed)
