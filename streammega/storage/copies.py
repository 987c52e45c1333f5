"""Stretches of local files, copied elsewhere a little at a time.

They are read, not mapped: memory stays flat, and no page of the source is mapped to be used once.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from streammega.storage.backends.local import LocalStore, etag_of, local_error
from streammega.storage.derived_stores import ConcatStore
from streammega.storage.etags import check_version
from streammega.storage.store import Bytes, Store, ended_early

COPY_BYTES = 1 << 20
"""Copied at a time: it stays in the processor's cache while its checksum is taken."""


@dataclass(frozen=True, kw_only=True)
class FileRange:
    """Bytes [start, stop) of a local file. etag: of the file that was opened; empty: of any."""

    path: str
    start: int
    stop: int
    etag: str = ""

    @property
    def size(self) -> int:
        """Bytes."""
        return self.stop - self.start

    def part(self, low: int, high: int) -> FileRange:
        """Bytes [low, high) of it, counted from its start."""
        return replace(self, start=self.start + low, stop=self.start + high)


def file_ranges(store: Store, key: str, start: int, stop: int, etag: str) -> list[FileRange] | None:
    """Where the bytes [start, stop) of an object lie in local files, in order; None where some lie
    elsewhere, or in another form.
    """
    if isinstance(store, LocalStore):
        return [FileRange(path=key, start=start, stop=stop, etag=etag)]
    if not isinstance(store, ConcatStore):
        return None
    ranges = []
    for (part, info), low, high in store.spans(start, stop):
        if not isinstance(part, LocalStore):
            return None
        ranges.append(FileRange(path=info.key, start=low, stop=high, etag=info.etag))
    return ranges


def read_files(ranges: Iterable[FileRange], buffer: Bytes) -> Iterator[Bytes]:
    """The bytes of ranges, end to end, as views of `buffer`: each is overwritten by the next.

    Raises ObjectChangedError for another file than was opened, ShortReadError for one that ends
    before, StorageError.
    """
    # Ranges of one file follow each other as a rule: it is opened once for them.
    for _, of_file in itertools.groupby(ranges, lambda wanted: (wanted.path, wanted.etag)):
        first, *others = of_file
        with _opened(first) as fd:
            for wanted in (first, *others):
                yield from _read(fd, wanted, buffer)


@contextmanager
def _opened(wanted: FileRange) -> Iterator[int]:
    """A descriptor of the file that was opened, and of no other one."""
    try:
        fd = os.open(wanted.path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise local_error(wanted.path, error) from None
    try:
        check_version(wanted.path, wanted.etag, etag_of(os.fstat(fd)))
        yield fd
    finally:
        os.close(fd)


def _read(fd: int, wanted: FileRange, buffer: Bytes) -> Iterator[Bytes]:
    place = wanted.start
    while place < wanted.stop:
        room = buffer[: wanted.stop - place]
        try:
            got = os.preadv(fd, [room.data], place)
        except OSError as error:
            raise local_error(wanted.path, error) from None
        if not got:
            reason = f"bytes [{wanted.start}, {wanted.stop}), of which there are none from {place}"
            raise ended_early(wanted.path, reason)
        yield room[:got]
        place += got


def copy_buffer(size: int = COPY_BYTES) -> Bytes:
    """Room for `read_files`; no more than `size` bytes of it are of use."""
    return np.empty(min(size, COPY_BYTES), np.uint8)
