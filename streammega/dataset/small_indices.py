"""The headers of many small `.idx`: each is read whole by one request, and all are checked together."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from streammega.dataset.idx import (
    CODE_OF_DTYPE,
    DOCUMENT_BOUND,
    HEADER,
    HEADER_BYTES,
    LENGTH,
    MAGIC,
    MODE,
    OFFSET,
    VERSION,
)
from streammega.dataset.index_file import READ_WHOLE
from streammega.dataset.kept_headers import FIELDS
from streammega.dataset.token_file import ShardFiles
from streammega.storage import Buffer, Store
from streammega.storage.store import Part, reads_parts

Integers = NDArray[np.int64]
NEAR = 0.004
"""Seconds. Where an answer takes less, more than a few threads only take turns."""
NEAR_READERS = 32
SMALL_READERS = 256
"""Requests at once, of all datasets together: of 10,000 with 20 ms each, all are answered within a
second.
"""
READ_TOGETHER = 1 << 12
"""Shards of which what is read is in memory at once: 96 MiB at most, and a third of that twice while
it is checked.
"""
MOST_KEPT_BYTES = 64 << 20
"""Of all bodies together, if pointers are to be read of them: what is opened at once holds them."""
_STORED = np.dtype([("magic", "S9"), ("version", "<u8"), ("code", "u1"), ("counts", "<u8", 2)])
"""A header as it is stored."""
assert _STORED.itemsize == HEADER_BYTES == HEADER.size


def are_small(files: Sequence[ShardFiles]) -> bool:
    """Whether all `.idx` are small ones of one store that reads many of them at once."""
    store = files[0].index.store
    if not reads_parts(store):
        return False
    roots = {id(file.index.store) for file in files}
    return len(roots) == 1 and all(file.index.info.size <= READ_WHOLE for file in files)


def read_bodies(
    files: Sequence[ShardFiles], most_readers: int, more: Sequence[Part] = ()
) -> list[Buffer]:
    """Each `.idx`, whole, and behind them more parts of objects of the same store. Raises
    StorageError.
    """
    store: Store = files[0].index.store
    assert reads_parts(store)
    infos = [file.index.info for file in files]
    parts = [*((info, 0, info.size) for info in infos), *more]
    began = time.monotonic()
    first = store.read_parts(parts[:1], 1)
    is_near = time.monotonic() - began < NEAR
    readers = min(NEAR_READERS, most_readers) if is_near else most_readers
    return first + store.read_parts(parts[1:], readers)


def rows_of(
    bodies: Sequence[Buffer], token_bytes: Sequence[int]
) -> tuple[Integers, NDArray[np.bool_]]:
    """What `kept_headers` keeps of each `.idx`, [files, FIELDS], and which of them are sound: of the
    format, of the size that their counts tell, and ending where their tokens do.

    One that is not sound is for `parse_header` and `check_end`, which say what is wrong.
    """
    sizes = np.array([len(body) for body in bodies], np.int64)
    # Room behind the last one, so that no place that is read lies outside, wrong as it may be.
    stored = np.frombuffer(b"".join([*bodies, bytes(READ_WHOLE)]), np.uint8)
    first_byte = np.cumsum(sizes) - sizes
    heads = _read_at(stored, first_byte, HEADER_BYTES).view(_STORED)[:, 0]
    known = heads["magic"] == MAGIC
    known &= heads["version"] == VERSION
    itemsize = _ITEMSIZE_OF_CODE[heads["code"]]
    known &= itemsize > 0
    # More than there are bytes would not fit into what is computed of them.
    known &= (heads["counts"] <= sizes[:, None].astype(np.uint64)).all(axis=1)
    counts = np.where(known[:, None], heads["counts"], 0).astype(np.int64)
    sequences, documents = counts.T
    pairs = LENGTH.itemsize + OFFSET.itemsize
    plain = HEADER_BYTES + pairs * sequences + DOCUMENT_BOUND.itemsize * documents
    with_modes = plain + MODE.itemsize * sequences
    has_modes = sizes != plain
    known &= (sizes == plain) | (sizes == with_modes)
    known &= _ends(stored, first_byte, np.where(known, sequences, 0), itemsize) == token_bytes
    rows = np.stack([heads["code"], sequences, documents, has_modes], axis=1)
    assert rows.shape[1] == FIELDS
    return rows.astype(np.int64), known


def _ends(
    stored: NDArray[np.uint8], first_byte: Integers, sequences: Integers, itemsize: Integers
) -> Integers:
    """Where the last sequence of each ends, in bytes; -1 where that is nowhere."""
    last = np.maximum(sequences - 1, 0)
    lengths_at = first_byte + HEADER_BYTES
    offsets_at = lengths_at + LENGTH.itemsize * sequences
    lengths = _read_at(stored, lengths_at + LENGTH.itemsize * last, LENGTH.itemsize).view(LENGTH)
    offsets = _read_at(stored, offsets_at + OFFSET.itemsize * last, OFFSET.itemsize).view(OFFSET)
    ends = offsets[:, 0] + lengths[:, 0].astype(np.int64) * itemsize
    ends[(lengths[:, 0] < 0) | (offsets[:, 0] < 0)] = -1
    ends[sequences == 0] = 0
    return ends


def _read_at(stored: NDArray[np.uint8], places: Integers, size: int) -> NDArray[np.uint8]:
    """So many bytes at each place, [places, size], in memory of their own."""
    read: NDArray[np.uint8] = stored[places[:, None] + np.arange(size)]
    return read


def _itemsizes() -> Integers:
    """Bytes of a token of each dtype code; 0: no such code."""
    itemsizes = np.zeros(256, np.int64)
    for dtype, code in CODE_OF_DTYPE.items():
        itemsizes[code] = dtype.itemsize
    return itemsizes


_ITEMSIZE_OF_CODE = _itemsizes()
