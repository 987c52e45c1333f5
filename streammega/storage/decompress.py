"""Frames of zstd decompressed into the place where their bytes are wanted.

All frames of several reads are decompressed by one call that holds no GIL, into the callers'
buffers, by the C library that the zstandard package brings. The package's own calls return memory
of their own, and take the GIL again for each frame: they are used where the library cannot be
reached (a build of the package without its cffi part).
"""

from __future__ import annotations

import itertools
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import llvmlite.binding
import numpy as np
import zstandard
from numpy.typing import NDArray

from streammega.kernels.frames import SYMBOL, decompress_frames
from streammega.storage.store import Bytes, address_of, check_room

Integers = NDArray[np.int64]
_of_thread = threading.local()
KEPT_EDGE = 1 << 20
"""Bytes of a buffer for frames wanted in part that a thread keeps: fresh memory costs a page fault
for every 4 KiB. Frames of other writers may be larger, and are rare.
"""


@dataclass(frozen=True)
class FrameBounds:
    """Where frames begin and end: in the file, and among the shown bytes, int64 [frames + 1] each.

    largest: shown bytes of the largest one.
    """

    compressed: Integers
    decompressed: Integers
    largest: int

    @classmethod
    def of(cls, compressed: Integers, decompressed: Integers) -> FrameBounds:
        """Those, contiguous."""
        largest = int(np.diff(decompressed).max(initial=0))
        return cls(
            np.ascontiguousarray(compressed, np.int64),
            np.ascontiguousarray(decompressed, np.int64),
            largest,
        )

    def holding(self, start: int, stop: int) -> tuple[int, int]:
        """Frames [first, last) that hold the shown bytes, without empty ones before them."""
        # Not `searchsorted`, which lets go of the GIL and then waits for it, among threads that all
        # decompress: that took a quarter of the time of one.
        # And in a view, whose elements are Python's integers: those of the array would be objects of
        # numpy's: the whole search takes two and a half times as long among those.
        edges = self.decompressed.data
        first = bisect_right(edges, start) - 1
        last = bisect_left(edges, stop, first)
        return first, last


@dataclass(frozen=True)
class FrameRead:
    """Frames [first, last) in memory, and the place for the shown bytes [start, stop) of them."""

    first: int
    last: int
    start: int
    stop: int
    stored: Bytes
    out: Bytes


def decompress_into(bounds: FrameBounds, reads: Sequence[FrameRead]) -> int:
    """Fill what reads want; frees the GIL once for all of them.

    Returns -1, or the number of the first frame that is damaged or not of its size. Raises
    ValueError for a read whose memory is not that of its frames, or of its bytes.
    """
    for read in reads:
        _check(bounds, read)
    make_context = _library()
    if make_context is None:
        return _one_by_one(bounds, reads)
    if not reads:
        return -1
    rows = [
        (
            read.first,
            read.last,
            address_of(read.stored),
            read.start,
            read.stop,
            address_of(read.out),
        )
        for read in reads
    ]
    columns = np.array(rows, np.int64).T.copy()
    damaged: int = decompress_frames(
        _context(make_context),
        bounds.compressed,
        bounds.decompressed,
        *columns,
        _edge(bounds.largest),
    )
    return damaged


def _check(bounds: FrameBounds, read: FrameRead) -> None:
    """Raise ValueError for what the kernel, which looks at nothing, would read or write wrongly."""
    check_room(read.out, read.stop - read.start)
    frames = len(bounds.compressed) - 1
    if not 0 <= read.first <= read.last <= frames:
        raise ValueError(f"there are no frames [{read.first}, {read.last}) among {frames}")
    size = bounds.compressed[read.last] - bounds.compressed[read.first]
    if len(read.stored) != size or not read.stored.flags.c_contiguous:
        raise ValueError(f"{len(read.stored)} bytes are not the frames that have {size}")
    low = bounds.decompressed[read.first]
    high = bounds.decompressed[read.last]
    if not low <= read.start <= read.stop <= high:
        raise ValueError(
            f"frames of the bytes [{low}, {high}) do not show [{read.start}, {read.stop})"
        )


def _one_by_one(bounds: FrameBounds, reads: Sequence[FrameRead]) -> int:
    """The same by the package's own call, which returns each frame in memory of its own."""
    for read in reads:
        edges = bounds.decompressed[read.first : read.last + 1].tolist()
        places = bounds.compressed[read.first : read.last + 1] - bounds.compressed[read.first]
        for number, (low, high) in enumerate(itertools.pairwise(edges)):
            frame = read.stored[places[number] : places[number + 1]]
            try:
                shown = decompress_one(frame, high - low)
            except zstandard.ZstdError:
                return read.first + number
            if len(shown) != high - low:
                return read.first + number
            first = max(low, read.start)
            last = min(high, read.stop)
            wanted = np.frombuffer(shown, np.uint8)[first - low : last - low]
            read.out[first - read.start : last - read.start] = wanted
    return -1


def decompress_one(frame: Bytes, size: int) -> bytes:
    """What a frame holds, at most `size` bytes if it does not say. Raises zstandard.ZstdError."""
    shown: bytes = _decompressor().decompress(frame.data, max_output_size=size)
    return shown


@cache
def _library() -> Callable[[], Any] | None:
    """Makes a context of the C library, whose function the kernel can call from now on; None where
    it cannot be reached.
    """
    try:
        from zstandard._cffi import ffi, lib  # type: ignore[import-not-found]

        function = ffi.addressof(lib, "ZSTD_decompressDCtx")
        address = int(ffi.cast("uintptr_t", function))
        llvmlite.binding.add_symbol(SYMBOL, address)
    except (ImportError, AttributeError):
        return None

    def make_context() -> Any:
        context = lib.ZSTD_createDCtx()
        if context == ffi.NULL:
            raise MemoryError("no memory for a decompressor of zstd")
        owned = ffi.gc(context, lib.ZSTD_freeDCtx)
        return owned, int(ffi.cast("uintptr_t", context))

    return make_context


def _context(make_context: Callable[[], Any]) -> int:
    """The address of this thread's context: they keep tables, and are not to be shared."""
    if not hasattr(_of_thread, "context"):
        _of_thread.context = make_context()
    _, address = _of_thread.context
    return int(address)


def _edge(size: int) -> Bytes:
    """Room for a frame, whose content is left over from before."""
    if size > KEPT_EDGE:
        return np.empty(size, np.uint8)
    if not hasattr(_of_thread, "edge"):
        _of_thread.edge = np.empty(KEPT_EDGE, np.uint8)
    edge: Bytes = _of_thread.edge
    return edge


def _decompressor() -> Any:
    """That of this thread, for the same reason."""
    if not hasattr(_of_thread, "decompressor"):
        _of_thread.decompressor = zstandard.ZstdDecompressor()
    return _of_thread.decompressor
