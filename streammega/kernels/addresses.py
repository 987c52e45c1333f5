"""Memory that kernels follow by address. Here, and nowhere else, it is proven before a call that all of
it is inside of the arrays that it belongs to.

Kernels take addresses where the number of arrays is not known when they are compiled: buffers, mapped
files, parts of a conversion. They compare nothing themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streammega.kernels.plan import copy_bytes, first_row_outside

Bytes = NDArray[np.uint8]
Integers = NDArray[np.int64]
_LIKE_BYTES = np.empty(0, np.uint8)
_LIKE_ADDRESSES = np.empty(0, np.int64)


def address_of(array: NDArray[Any]) -> int:
    """The memory address of an array's first byte."""
    return int(array.__array_interface__["data"][0])


def check_room(out: NDArray[Any], size: int) -> None:
    """Raise ValueError if `out` is not an array for `size` bytes."""
    if out.nbytes != size or not out.flags.c_contiguous or not out.flags.writeable:
        raise ValueError(
            f"{size} bytes are to be written to an array of {out.nbytes} bytes, which must be "
            f"contiguous and writeable"
        )


def copy_arrays(sources: Sequence[Bytes], outs: Sequence[Bytes]) -> None:
    """Copy each array to the one of the same number and size, by one call without the GIL.

    Raises ValueError, and copies nothing then, where sizes differ or an array is not contiguous.
    """
    for source, out in zip(sources, outs, strict=True):
        check_room(out, source.nbytes)
        if not source.flags.c_contiguous:
            raise ValueError("bytes are copied from contiguous arrays only")
    sizes = np.array([source.nbytes for source in sources], np.int64)
    copy_bytes(_LIKE_BYTES, _addresses(sources), sizes, _addresses(outs))


def copy_stretches(
    sources: Sequence[Bytes],
    number: Integers,
    start: Integers,
    size: Integers,
    out: NDArray[Any],
    target: Integers,
) -> None:
    """Copy bytes [start, start + size) of source `number` to byte `target` of `out`, for each of these
    int64 [stretches], without the GIL.

    Raises ValueError if one of them is not inside, and copies nothing then.
    """
    check_room(out, out.nbytes)
    if not all(source.flags.c_contiguous for source in sources):
        raise ValueError("bytes are copied from contiguous arrays only")
    lengths = np.array([source.nbytes for source in sources], np.int64)
    if len(number) and not 0 <= number.min() <= number.max() < len(sources):
        raise ValueError(
            f"stretches are of sources {number.min()} to {number.max()} of {len(sources)}"
        )
    # Written so that no sum passes the range of int64.
    outside = (size < 0) | (start < 0) | (start > lengths[number] - size)
    outside |= (target < 0) | (target > out.nbytes - size)
    if outside.any():
        first = int(outside.argmax())
        raise ValueError(
            f"{size[first]} bytes from byte {start[first]} of {lengths[number[first]]} on do not go "
            f"to byte {target[first]} of {out.nbytes}"
        )
    addresses = _addresses(sources)
    copy_bytes(_LIKE_BYTES, addresses[number] + start, size, address_of(out) + target)


def copy_to(source: Integers, size: Integers, out: NDArray[Any], target: Integers) -> None:
    """Copy size bytes from each address `source`, which is proven by `check_rows` or is an array's, to byte
    `target` of `out`, without the GIL; int64 [stretches] each, in their order.

    Raises ValueError if one of them is not inside of `out`, and copies nothing then.
    """
    check_room(out, out.nbytes)
    if ((size < 0) | (target < 0) | (target > out.nbytes - size)).any():
        raise ValueError(f"stretches are not inside of the {out.nbytes} bytes of their array")
    copy_bytes(_LIKE_BYTES, source, size, address_of(out) + target)


def _addresses(arrays: Sequence[Bytes]) -> Integers:
    return np.array([address_of(array) for array in arrays], np.int64)


def check_rows(
    splits: Integers,
    rows: Sequence[Integers],
    slots: tuple[Integers, int],
    files: Sequence[Integers],
    chunk_bytes: int,
    name: str,
) -> None:
    """Raise AssertionError, which says `name`, unless the bytes of all rows that `splits` names are in
    memory: those of a slot, or of a mapped chunk of the page cache.

    Args:
        splits: int64 [samples + 1], as `gather_rows` takes it.
        rows: slot, offset, size, file, start, int64 [rows] each.
        slots: (bytes of each slot, int64 [slots]; the slot of rows in the page cache).
        files: bytes of a token, tokens, where addresses of chunks are, int64 [files] each.
        chunk_bytes: of the page cache.
    """
    room, zero = slots
    if len({len(array) for array in rows}) > 1 or len({len(array) for array in files}) > 1:
        raise AssertionError(f"{name}: its arrays differ in length")
    bad: int = first_row_outside(_LIKE_ADDRESSES, splits, *rows, room, zero, *files, chunk_bytes)
    if bad == len(rows[0]):
        raise AssertionError(f"{name}: its samples name rows that are not there")
    if bad >= 0:
        slot, offset, size, file, start = (int(array[bad]) for array in rows)
        raise AssertionError(
            f"{name}: row {bad}, {size} tokens of file {file} from token {start} on, is not in memory "
            f"at byte {offset} of slot {slot}; please report this"
        )
