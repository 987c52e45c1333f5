"""Frames of zstd to the bytes that are wanted of them, by the library's own C function."""

from __future__ import annotations

from numba import types

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
def decompress_frames(context, address, stored_bounds, shown_bounds, start, edge, out):
    """The shown bytes [start, start + len(out)) of frames that lie end to end from `address` on;
    -1, or the number of the first frame that is damaged or not of its size.

    context: the address of a ZSTD_DCtx that no other thread uses. stored_bounds, shown_bounds:
    int64 [frames + 1], where frames begin and end in the file and among the shown bytes. edge:
    uint8, room for each frame that is wanted in part. The caller vouches for the bounds. Cost: one
    decompression; what is wanted of a frame in part is copied.
    """
    stop = start + len(out)
    for frame in range(len(shown_bounds) - 1):
        low = shown_bounds[frame]
        high = shown_bounds[frame + 1]
        size = high - low
        source = address + stored_bounds[frame] - stored_bounds[0]
        stored_size = stored_bounds[frame + 1] - stored_bounds[frame]
        is_whole = start <= low and high <= stop
        target = edge.ctypes.data
        if is_whole:
            target = out.ctypes.data + (low - start)
        # What the library returns for an error is negative here, so no size.
        if _decompress(context, target, size, source, stored_size) != size:
            return frame
        if not is_whole:
            for at in range(max(low, start), min(high, stop)):
                out[at - start] = edge[at - low]
    return -1
