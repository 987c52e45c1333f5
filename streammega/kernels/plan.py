"""From rows of samples to requests, and from buffers to ids; and other bytes that move by address.

A *row* is a run of consecutive tokens of one file, and part of one sample. What the arrays hold;
int64 [rows] where nothing else is said:

    file             the file of a row, among all files
    start, stop      its bytes in the file
    slot, offset     its bytes begin `offset` bytes after the address of `slot`
    size             its tokens
    sample_start     the token of its sample that it begins at
    splits [samples + 1]      the rows of sample i are splits[i] .. splits[i + 1]
    addresses, uses [slots]   where the bytes of a slot are in memory; rows it has still to serve
    dtype_of_file [files]     the number of each file's dtype

Kernels do not check addresses. `addresses.py` proves them before the call, and calls those that
copy; rows are aligned to a token.
"""

from __future__ import annotations

from numba import carray, types  # type: ignore[attr-defined]

from streammega.kernels.intrinsics import pointer_to
from streammega.kernels.jit import kernel

# A digest of numba's cache: see jit.py.
# compiled with intrinsics.py 732f1ead

ZSTD_SYMBOL = "streammega_zstd_decompress"
"""The name by which the compiled kernel finds ZSTD_decompressDCtx. The caller registers its address
with `llvmlite.binding.add_symbol` first.
"""
_decompress = types.ExternalFunction(
    # The context, the target and its room, the source and its size.
    ZSTD_SYMBOL,
    types.int64(types.int64, types.int64, types.int64, types.int64, types.int64),
)


@kernel
def coalesce_rows(
    file, start, stop, by_place, gap, largest, request, request_start, request_stop, request_file
):
    """Requests that cover rows [start, stop) of files; returns how many. `by_place` [rows] sorts
    the rows by file and start.

    Neighbours with at most `gap` between them share a request until it would pass `largest`; a row
    is in one request. Fills request [rows], which of them serves a row, and request_start,
    request_stop, request_file of each.
    """
    last = -1
    for i in by_place:
        fresh = last < 0 or request_file[last] != file[i] or start[i] > request_stop[last] + gap
        if fresh or max(stop[i], request_stop[last]) - request_start[last] > largest:
            last += 1
            request_file[last] = file[i]
            request_start[last] = start[i]
            request_stop[last] = stop[i]
        request_stop[last] = max(request_stop[last], stop[i])
        request[i] = last
    return last + 1


@kernel
def gather_rows(
    like,
    dtype_number,
    dtype_of_file,
    addresses,
    slot,
    offset,
    size,
    file,
    sample_start,
    splits,
    out,
    valid,
):
    """The ids of samples into out [samples, width], widened, and how many each has into `valid`
    [samples]; False if one has too many.

    Only rows of files of `dtype_number` are copied, as tokens of like's dtype. Cost: one copy.
    """
    width = out.shape[1]
    for i in range(len(valid)):
        valid[i] = 0
        for r in range(splits[i], splits[i + 1]):
            tokens = size[r]
            first = sample_start[r]
            valid[i] += tokens
            if first < 0 or tokens < 0 or first + tokens > width:
                return False
            if tokens == 0 or dtype_of_file[file[r]] != dtype_number:
                continue
            source = carray(pointer_to(addresses[slot[r]] + offset[r], like), (tokens,))
            target = out[i, first : first + tokens]
            for k in range(len(target)):  # this form is vectorised, whole-array assignment is not
                target[k] = source[k]
    return True


@kernel
def first_row_outside(
    address_like,
    splits,
    slot,
    offset,
    size,
    file,
    start,
    room,
    zero,
    itemsize,
    num_tokens,
    mapped_at,
    chunk_bytes,
):
    """The first row of samples whose bytes are not where `gather_rows` would read them; -1 if all are,
    and the number of rows if `splits` names others.

    start: the token of its file that a row begins with. room [slots]: bytes of a slot's memory. zero:
    the slot of rows in the page cache. itemsize, num_tokens, mapped_at [files]: as in the plan's
    table. Rows without tokens are not read.
    """
    rows = len(slot)
    if len(splits) < 1 or splits[0] < 0:
        return rows
    for i in range(len(splits) - 1):
        if splits[i] > splits[i + 1] or splits[i + 1] > rows:
            return rows
    for r in range(splits[0], splits[-1]):
        if size[r] == 0:
            continue
        f = file[r]
        s = slot[r]
        if f < 0 or f >= len(itemsize) or s < 0 or s >= len(room):
            return r
        # No product below passes the range of int64, for files do not.
        if size[r] < 0 or start[r] < 0 or size[r] > num_tokens[f] - start[r]:
            return r
        num_bytes = size[r] * itemsize[f]
        if s != zero:
            if offset[r] < 0 or offset[r] > room[s] - num_bytes:
                return r
            continue
        first_byte = start[r] * itemsize[f]
        chunk = first_byte // chunk_bytes
        if mapped_at[f] == 0 or (first_byte + num_bytes - 1) // chunk_bytes != chunk:
            return r
        mapped = carray(pointer_to(mapped_at[f], address_like), (chunk + 1,))
        if mapped[chunk] == 0 or offset[r] != mapped[chunk] + first_byte - chunk * chunk_bytes:
            return r
    return -1


@kernel
def copy_bytes(like, source, size, target) -> None:
    """Copy size[i] bytes from address source[i] to address target[i], for each i.

    `like`: an empty uint8 array, which gives the pointers their type.
    """
    for i in range(len(source)):
        from_bytes = carray(pointer_to(source[i], like), (size[i],))
        to_bytes = carray(pointer_to(target[i], like), (size[i],))
        for k in range(len(to_bytes)):  # vectorised, whole-array assignment is not
            to_bytes[k] = from_bytes[k]


@kernel
def count_down(uses, slot, size, freed):
    """Take one use off the slot of each row that has a size; slots without any left go to `freed`;
    returns how many.

    Returns -1 if `freed` has no room for another one.
    """
    count = 0
    for r in range(len(slot)):
        if size[r] > 0:
            uses[slot[r]] -= 1
            if uses[slot[r]] == 0:
                if count == len(freed):
                    return -1
                freed[count] = slot[r]
                count += 1
    return count


@kernel
def cached_rows(
    bytes_like,
    address_like,
    verified_at,
    mapped_at,
    file,
    start,
    stop,
    file_bytes,
    page_bytes,
    chunk_bytes,
    zero,
    slot,
    offset,
):
    """Serve rows that have no slot from cached pages: slot `zero`, whose address is 0, and the
    row's own address as offset.

    verified_at, mapped_at [files]: addresses of an object's page states (uint8, one a page, 0: not
    there) and of its chunks' addresses (int64, one a chunk), or 0. A row needs all of its pages, in
    one chunk: chunks are not end to end in memory. bytes_like, address_like: empty uint8 and
    int64 arrays. file_bytes [files]: a row beyond them is not served. Returns the bytes served so.
    """
    served = 0
    for r in range(len(file)):
        number = file[r]
        if slot[r] >= 0 or verified_at[number] == 0 or stop[r] <= start[r]:
            continue
        if start[r] < 0 or stop[r] > file_bytes[number]:
            continue
        chunk = start[r] // chunk_bytes
        first_page = start[r] // page_bytes
        last_page = (stop[r] - 1) // page_bytes
        if (stop[r] - 1) // chunk_bytes != chunk:
            continue
        verified = carray(pointer_to(verified_at[number], bytes_like), (last_page + 1,))
        there = True
        for page in range(first_page, last_page + 1):
            there = there and verified[page] != 0
        if there:
            mapped = carray(pointer_to(mapped_at[number], address_like), (chunk + 1,))
            slot[r] = zero
            offset[r] = mapped[chunk] + start[r] - chunk * chunk_bytes
            served += stop[r] - start[r]
    return served


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
        source: int64 [reads], the address of those frames, which are end to end.
        start, stop, target: int64 [reads].
        edge: uint8, room for any frame that is wanted in part.

    They are not checked. Cost: one decompression; parts of frames are copied.
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
            # An error code of the library is negative here, so not a size.
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
