"""Frames of zstd to the bytes that are wanted of them, by the library's own C function."""

from __future__ import annotations

from numba import carray, types  # type: ignore[attr-defined]

from streammega.kernels.intrinsics import pointer_to
from streammega.kernels.jit import kernel

SYMBOL = "streammega_zstd_decompress"
"""The name by which the compiled kernel finds ZSTD_decompressDCtx.

Whoever calls the kernel has registered its address with `llvmlite.binding.add_symbol` before.
"""
_decompress = types.ExternalFunction(
    # The context, the target and its room, the source and its size.
    SYMBOL,
    types.int64(types.int64, types.int64, types.int64, types.int64, types.int64),
)


@kernel
def decompress_frames(
    context, compressed, decompressed, first, last, source, start, stop, target, edge
):
    """The shown bytes [start, stop) of several reads, each to its address `target`; -1, or the
    number of the first frame that is damaged or not of its size.

    Args:
        context: the address of a ZSTD_DCtx that no other thread uses.
        compressed, decompressed: int64 [frames + 1], where frames begin and end in the file, and
            among the shown bytes.
        first, last: int64 [reads], the frames [first, last) that hold the bytes of a read.
        source: int64 [reads], the address of those frames, which lie end to end.
        start, stop, target: int64 [reads].
        edge: uint8, room for any frame that is wanted in part.

    The caller vouches for all of them. Cost: one decompression; what is wanted of a frame in part
    is copied.
    """
    for i in range(len(first)):
        for frame in range(first[i], last[i]):
            low = decompressed[frame]
            high = decompressed[frame + 1]
            size = high - low
            stored_at = source[i] + compressed[frame] - compressed[first[i]]
            stored_size = compressed[frame + 1] - compressed[frame]
            is_whole = start[i] <= low and high <= stop[i]
            place = edge.ctypes.data
            if is_whole:
                place = target[i] + (low - start[i])
            # What the library returns for an error is negative here, so no size.
            if _decompress(context, place, size, stored_at, stored_size) != size:
                return frame
            if not is_whole:
                begin = max(low, start[i])
                wanted = min(high, stop[i]) - begin
                shown_at = place + begin - low
                shown = carray(pointer_to(shown_at, edge), (wanted,))
                out = carray(pointer_to(target[i] + (begin - start[i]), edge), (wanted,))
                for k in range(len(out)):  # of two arrays from 0 on: this form is vectorised
                    out[k] = shown[k]
    return -1
