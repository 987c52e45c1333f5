"""Local files by reads instead of maps.

For file systems that fail: NFS, FUSE, a disk that is dying. An I/O error under a map ends the
process (SIGBUS); here it is an error like any other, tried again as those of the network are. Every
read opens the file, compares it with the one that was opened first, and closes it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence

import numpy as np

from streammega.config import StorageConfig
from streammega.errors import StorageError
from streammega.storage.backends.local import LocalStore, etag_of, local_error
from streammega.storage.etags import check_version
from streammega.storage.retry import RetryPolicy
from streammega.storage.store import (
    Buffer,
    Bytes,
    ObjectInfo,
    ObjectWriter,
    Span,
    check_room,
    ended_early,
)

PASSING = frozenset(
    {
        errno.EIO,
        errno.ESTALE,
        errno.ETIMEDOUT,
        errno.EAGAIN,
        errno.ENOTCONN,
        errno.EHOSTDOWN,
        errno.ECONNRESET,
    }
)
"""Errors of a server behind a file system, which may answer the next time."""


class PreadStore:
    """The local disk, read by `pread`. Keys are file paths; implements `storage.store.Store`."""

    def __init__(self, config: StorageConfig) -> None:
        self._local = LocalStore()
        self._retry = RetryPolicy.of(config)

    def url(self, key: str) -> str:
        """The path itself."""
        return self._local.url(key)

    def info(self, key: str) -> ObjectInfo:
        """As of the local store."""
        return self._local.info(key)

    def read_ranges(
        self, key: str, starts: Sequence[int], stops: Sequence[int], etag: str = ""
    ) -> list[Buffer]:
        """Copies of the bytes."""
        spans: list[Span] = []
        outs: list[Bytes] = []
        for start, stop in zip(starts, stops, strict=True):
            spans.append((int(start), int(stop)))
            # One that ends before it begins is refused below, by an error that names the object.
            size = max(0, int(stop) - int(start))
            outs.append(np.empty(size, np.uint8))
        self._retry.call(lambda: self.read_into(key, spans, outs, etag))
        return [out.data for out in outs]

    def read_into(
        self, key: str, spans: Sequence[Span], outs: Sequence[Bytes], etag: str = ""
    ) -> None:
        """Reads straight into `outs`, one after the other."""
        try:
            fd = os.open(key, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise _told_apart(key, error) from None
        try:
            stat = os.fstat(fd)
            check_version(key, etag, etag_of(stat))
            for (start, stop), out in zip(spans, outs, strict=True):
                check_room(out, stop - start)
                if not 0 <= start <= stop <= stat.st_size:
                    raise ended_early(key, f"bytes [{start}, {stop}) of {stat.st_size}")
                _read(fd, key, start, out)
        except OSError as error:
            raise _told_apart(key, error) from None
        finally:
            os.close(fd)

    def list(self, prefix: str, recursive: bool = True) -> list[ObjectInfo]:
        """As of the local store."""
        return self._local.list(prefix, recursive)

    def open_writer(self, key: str) -> ObjectWriter:
        """As of the local store."""
        return self._local.open_writer(key)

    def create(self, key: str, data: bytes) -> bool:
        """As of the local store."""
        return self._local.create(key, data)

    def delete(self, key: str) -> None:
        """As of the local store."""
        self._local.delete(key)


def _read(fd: int, path: str, start: int, out: Bytes) -> None:
    """Fill `out`."""
    filled = 0
    # One call gives no more than 2 GiB, and less where a signal comes.
    while filled < len(out):
        rest = out[filled:]
        got = os.preadv(fd, [rest], start + filled)  # type: ignore[list-item]
        if not got:
            raise ended_early(path, f"bytes from {start + filled} on, while they were read")
        filled += got


def _told_apart(path: str, error: OSError) -> StorageError:
    """The error, and whether trying again may help."""
    # Ours are OSErrors by their second base, and told apart already.
    if isinstance(error, StorageError):
        return error
    storage_error = local_error(path, error)
    storage_error.transient = error.errno in PASSING
    return storage_error
