"""What a segment's documents need beside their tokens: a `.side` file of uint64 rows, a value of
each document in each row.

    shuffle_key                      where documents are shuffled
    number, hash_low, hash_high      where duplicates are removed
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from streammega.config import StorageConfig
from streammega.convert.job import Job
from streammega.convert.options import ConvertOptions
from streammega.convert.write.records import load_bytes
from streammega.storage import join_url, open_store, save_bytes

SideRows = dict[str, NDArray[np.uint64]]


def row_names(options: ConvertOptions) -> list[str]:
    """The rows of every `.side` file of a conversion, in their order; none: there are no files."""
    names = []
    if options.shuffle_seed is not None:
        names.append("shuffle_key")
    if options.dedup:
        names += ["number", "hash_low", "hash_high"]
    return names


def side_name(segment: str) -> str:
    """The name of a segment's file."""
    return f"{segment}.side"


def save_side(job: Job, segment: str, rows: SideRows) -> None:
    """Write what was asked for of a segment's documents, if anything was."""
    names = row_names(job.options)
    if not names:
        return
    in_order = [rows[name].astype("<u8", copy=False) for name in names]
    url = join_url(job.work, side_name(segment))
    save_bytes(url, np.stack(in_order).tobytes(), job.storage)


def read_side(job: Job, name: str, documents: int) -> SideRows:
    """The rows of a file, each uint64 [documents]; mapped where it is local."""
    values = _stored_values(join_url(job.work, name), job.storage)
    rows = values.reshape(-1, documents)
    return dict(zip(row_names(job.options), rows, strict=True))


def _stored_values(url: str, storage: StorageConfig) -> NDArray[np.uint64]:
    store, key = open_store(url, storage)
    path = store.local_path(key)
    if path is not None:
        # Mapped, since a bucket needs a stretch of every file.
        return np.memmap(path, "<u8", "r")
    return load_bytes(url, storage).view("<u8")
