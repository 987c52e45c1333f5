"""Files mapped into memory, without a descriptor for each.

Python's `mmap` keeps a duplicate of the descriptor, so a dataset of a thousand shards would use up
the usual `ulimit -n`. The kernel needs none once a file is mapped. Whoever maps knows the length
that the addresses are good for: it is proven here, of the very file that is mapped.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,  # off_t
)
_libc.munmap.restype = ctypes.c_int
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_FAILED = ctypes.c_void_p(-1).value


class _Mapping:
    """What arrays of mapped bytes refer to: it is unmapped when the last of them is gone."""

    __slots__ = ("__array_interface__", "__weakref__")

    def __init__(self, address: int, size: int) -> None:
        self.__array_interface__: dict[str, Any] = {
            "data": (address, True),
            "shape": (size,),
            "typestr": "|u1",
            "version": 3,
        }
        unmap = weakref.finalize(self, _libc.munmap, address, size)
        # Other threads may still copy from it, and the process ends anyway.
        unmap.atexit = False


def map_file(fd: int, size: int, path: str | os.PathLike[str]) -> NDArray[np.uint8]:
    """The first `size` bytes of an open file, read-only, uint8 [size].

    The descriptor may be closed at once. The bytes stay mapped as long as this array or a view of
    it lives, also when the file is removed or renamed over. A file that is *shortened* while it is
    mapped ends the process at the next access (SIGBUS): the kernel knows no other way.

    `path` is for messages. Raises OSError when the file has fewer bytes, or cannot be mapped.
    """
    file_size = os.fstat(fd).st_size
    if file_size < size:
        reason = f"has {file_size} bytes, not the {size} that it should have"
        raise OSError(errno.EIO, reason, os.fspath(path))
    # The kernel maps no empty ranges.
    if size == 0:
        return np.empty(0, np.uint8)
    address = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
    if address == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), os.fspath(path))
    return np.asarray(_Mapping(address, size))
