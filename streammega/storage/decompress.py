"""Frames of zstd decompressed into the place where their bytes are wanted.

All frames of a read are decompressed by one call that holds no GIL, into the caller's buffer, by
the C library that the zstandard package brings: its own calls return memory of their own, and
take the GIL again for each frame. They are used where the library cannot be reached (a build of the
package without its cffi part).
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
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


def decompress_into(
    stored: Bytes, stored_bounds: Integers, shown_bounds: Integers, start: int, out: Bytes
) -> int:
    """Fill `out` with the shown bytes [start, start + len(out)) of frames that lie end to end.

    Args:
        stored: the frames.
        stored_bounds: int64 [frames + 1], where they begin and end in `stored`.
        shown_bounds: the same among the shown bytes, [start, start + len(out)) within them.

    Returns -1, or the number of the first frame that is damaged or not of its size.
    """
    # The kernel looks at nothing before it follows addresses.
    check_room(out, len(out))
    if len(stored) != stored_bounds[-1] - stored_bounds[0]:
        raise ValueError(f"{len(stored)} bytes are not those of the frames {stored_bounds}")
    if not shown_bounds[0] <= start <= start + len(out) <= shown_bounds[-1]:
        raise ValueError(f"frames of {shown_bounds} do not show [{start}, {start + len(out)})")
    make_context = _library()
    if make_context is None:
        return _one_by_one(stored, stored_bounds, shown_bounds, start, out)
    largest = int(np.diff(shown_bounds).max())
    damaged: int = decompress_frames(
        _context(make_context),
        address_of(stored),
        stored_bounds,
        shown_bounds,
        start,
        _edge(largest),
        out,
    )
    return damaged


def _one_by_one(
    stored: Bytes, stored_bounds: Integers, shown_bounds: Integers, start: int, out: Bytes
) -> int:
    """The same by the package's own call, which returns each frame in memory of its own."""
    places = (stored_bounds - stored_bounds[0]).tolist()
    edges = shown_bounds.tolist()
    stop = start + len(out)
    for number, (low, high) in enumerate(itertools.pairwise(edges)):
        frame = stored[places[number] : places[number + 1]]
        try:
            shown = decompress_one(frame, high - low)
        except zstandard.ZstdError:
            return number
        if len(shown) != high - low:
            return number
        first = max(low, start)
        last = min(high, stop)
        wanted = np.frombuffer(shown, np.uint8)[first - low : last - low]
        out[first - start : last - start] = wanted
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
