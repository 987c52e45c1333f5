"""From rows of samples to requests, and from buffers to ids."""

from __future__ import annotations

from numba import carray  # type: ignore[attr-defined]

from streammega.kernels.intrinsics import pointer_to
from streammega.kernels.jit import kernel


@kernel
def coalesce_rows(file, start, stop, order, gap, largest, request, low, high, of_file):  # type: ignore[no-untyped-def]  # pragma: no cover
    """Requests that cover rows [start, stop) of files; returns how many. `order` sorts the rows by
    file and start.

    Neighbours with at most `gap` between them share a request until it would pass `largest`; a row
    lies whole in its request. Fills request [rows], and low, high, of_file of each request.
    """
    last = -1
    for i in order:
        fresh = last < 0 or of_file[last] != file[i] or start[i] > high[last] + gap
        if fresh or max(stop[i], high[last]) - low[last] > largest:
            last += 1
            of_file[last], low[last], high[last] = file[i], start[i], stop[i]
        high[last] = max(high[last], stop[i])
        request[i] = last
    return last + 1


@kernel
def gather_rows(  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    like, kind, kinds, table, slot, offset, size, file, column, splits, out, valid
):
    """The ids of samples into out [samples, width], widened, and how many each has into `valid`;
    False if one has too many.

    Rows splits[i] .. splits[i + 1] are those of sample i: size[r] tokens of like's dtype at byte
    offset[r] of the memory at table[slot[r]], to token column[r] of the sample. Only rows whose
    file is of `kind` are copied. Cost: one copy. The caller vouches that what rows refer to is
    there, and aligned to a token.
    """
    width = out.shape[1]
    for i in range(len(valid)):
        valid[i] = 0
        for r in range(splits[i], splits[i + 1]):
            n = size[r]
            valid[i] += n
            if column[r] < 0 or n < 0 or column[r] + n > width:
                return False
            if n == 0 or kinds[file[r]] != kind:
                continue
            source = carray(pointer_to(table[slot[r]] + offset[r], like), (n,))
            target = out[i, column[r] : column[r] + n]
            for k in range(len(target)):  # this form is vectorised, whole-array assignment is not
                target[k] = source[k]
    return True


@kernel
def gather_shifted(  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    like, kind, kinds, table, slot, offset, size, file, column, splits, tokens, labels, valid
):
    """As `gather_rows`, of samples of S + 1 ids: the first S into tokens [samples, S], the last S
    into labels [samples, S].

    Each is contiguous. Cost: two writes for each read.
    """
    width = tokens.shape[1] + 1
    for i in range(len(valid)):
        valid[i] = 0
        for r in range(splits[i], splits[i + 1]):
            n = size[r]
            first = column[r]
            valid[i] += n
            if first < 0 or n < 0 or first + n > width:
                return False
            if n == 0 or kinds[file[r]] != kind:
                continue
            source = carray(pointer_to(table[slot[r]] + offset[r], like), (n,))
            low = 1 if first == 0 else 0  # the first id of a sample is no label, the last no token
            high = n - 1 if first + n == width else n
            if low == 1:
                tokens[i, 0] = source[0]
            if high < n:
                labels[i, width - 2] = source[n - 1]
            token = tokens[i, first + low : first + high]
            label = labels[i, first + low - 1 : first + high - 1]
            rest = source[low:high]
            for k in range(len(rest)):  # one loop for both: two cost a quarter more
                x = rest[k]
                token[k] = x
                label[k] = x
    return True


@kernel
def copy_bytes(like, source, size, target) -> None:  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    """Copy size[i] bytes from address source[i] to address target[i], for each i.

    `like`: an empty uint8 array.
    """
    for i in range(len(source)):
        a = carray(pointer_to(source[i], like), (size[i],))
        b = carray(pointer_to(target[i], like), (size[i],))
        for k in range(len(b)):
            b[k] = a[k]


@kernel
def count_down(uses, slot, size, freed):  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    """Take one use off the slot of each row that has a size; slots without any left go to `freed`;
    returns how many.
    """
    made = 0
    for r in range(len(slot)):
        if size[r] > 0:
            uses[slot[r]] -= 1
            if uses[slot[r]] == 0:
                freed[made] = slot[r]
                made += 1
    return made


@kernel
def cached_rows(  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    bytes_like,
    address_like,
    verified_at,
    mapped_at,
    file,
    start,
    stop,
    page_bytes,
    chunk_bytes,
    zero,
    slot,
    offset,
):
    """Serve rows that have no slot from cached pages: slot `zero`, whose address is 0, and the
    row's own address as offset.

    verified_at, mapped_at [files]: addresses of an object's page states (uint8) and of its chunks'
    addresses (int64), or 0. A row needs all of its pages, in one chunk. Returns the bytes served
    so.
    """
    served = 0
    for r in range(len(file)):
        f = file[r]
        if slot[r] >= 0 or verified_at[f] == 0 or stop[r] <= start[r]:
            continue
        chunk = start[r] // chunk_bytes
        first = start[r] // page_bytes
        last = (stop[r] - 1) // page_bytes
        if (stop[r] - 1) // chunk_bytes != chunk:
            continue
        verified = carray(pointer_to(verified_at[f], bytes_like), (last + 1,))
        there = True
        for page in range(first, last + 1):
            there = there and verified[page] != 0
        if there:
            mapped = carray(pointer_to(mapped_at[f], address_like), (chunk + 1,))
            slot[r], offset[r] = zero, mapped[chunk] + start[r] - chunk * chunk_bytes
            served += stop[r] - start[r]
    return served
