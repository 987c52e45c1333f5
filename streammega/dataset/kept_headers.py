"""The headers of many shards' `.idx`, and digests of their first and last tokens, kept on local disk:
opened again, a folder of thousands takes a listing.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streammega.dataset.idx import DTYPE_OF_CODE, IndexHeader, dtype_code, index_bytes
from streammega.dataset.node_cache import (
    ArrayKind,
    cached_arrays,
    damaged_array,
    note_use,
    remove_former,
    remove_unused,
)
from streammega.dataset.token_file import ShardFiles
from streammega.errors import CacheError

log = logging.getLogger(__name__)

KEEP_SHARDS = 64
"""So many shards are read at once: of fewer, a file costs more than it saves."""
FIELDS = 4
"""Of a header: the code of its dtype, its sequences, its document bounds, and whether there are
modes.
"""
_PREFIX = "headers-"
"""What names of kept files begin with."""
UNUSED_DAYS = 60
"""After so many without use what is kept is removed: of a blend that changed, for instance."""
_KINDS: dict[str, ArrayKind] = {"headers": ((np.dtype("<i8"),), (None, FIELDS + 1))}
"""The last column is the digest of a shard's first and last tokens: 0 where it is not needed."""


def are_kept(files: Sequence[ShardFiles]) -> bool:
    """Whether headers of shards are kept: those of many `.bin`, of which no manifest tells what
    they hold, and a listing told the versions. Without, nothing would tell them from former shards.
    """
    if len(files) < KEEP_SHARDS or files[0].shard.entry is not None:
        return False
    return all(
        shard.kind == "bin" and shard.shard.index is not None and shard.shard.stored is not None
        for shard in files
    )


def adopt_kept(
    folder: Path,
    names: Iterable[str],
    files: Sequence[ShardFiles],
    ends_of: Sequence[int],
    read: Callable[[], NDArray[np.int64]],
) -> None:
    """Give each shard the header of its `.idx`, and those numbered `ends_of` the digest of their
    tokens: as `read` found them when the shards were the same, by their ETags and sizes, or as
    `read` finds them now.

    names: of the datasets of which they are all. What was kept of the same ones before is removed,
    and of others what nobody used for long. Where headers cannot be kept, they are read every time.
    Raises what `read` does, and CacheError for a damaged file.
    """
    found: list[NDArray[np.int64]] = []

    def build() -> dict[str, NDArray[Any]]:
        found.append(read())
        return {"headers": found[0]}

    key_of_datasets = f"{_PREFIX}{_digest(names)}-"
    key = key_of_datasets + _digest(_versions(files))
    try:
        arrays: dict[str, NDArray[Any]] = cached_arrays(folder, key, _KINDS, build)
    except CacheError as error:
        if (folder / f"{key}-headers.npy").exists():
            raise  # what is there is damaged: to be named, not passed over
        log.info("%s; until then the headers of %d shards are read each time", error, len(files))
        arrays = {"headers": found[0] if found else read()}
    if found:
        remove_former(folder, key_of_datasets, key)
        remove_unused(folder, _PREFIX, UNUSED_DAYS)
    else:
        note_use(folder / f"{key}-headers.npy")
    rows = np.asarray(arrays["headers"])
    headers = _from_array(rows[:, :FIELDS], files, folder / f"{key}-headers.npy")
    for shard, header in zip(files, headers, strict=True):
        shard.index.adopt(header)
    for number in ends_of:
        files[number].ends = int(rows[number, FIELDS])


def _versions(files: Iterable[ShardFiles]) -> Iterable[str]:
    """The shards, and what tells the two objects of each from all others of their names."""
    for shard in files:
        yield shard.prefix
        for info in (shard.shard.stored, shard.shard.index):
            assert info is not None
            yield f"{info.size} {info.etag}"


def rows_of_headers(headers: Sequence[IndexHeader]) -> NDArray[np.int64]:
    """What is kept of headers, int64 [headers, FIELDS]."""
    rows = []
    for header in headers:
        code = dtype_code(header.dtype)
        rows.append((code, header.sequence_count, header.document_count, int(header.multimodal)))
    return np.array(rows, np.int64).reshape(-1, FIELDS)


def _from_array(
    rows: NDArray[np.int64], files: Sequence[ShardFiles], path: Path
) -> list[IndexHeader]:
    """Raises CacheError for rows that cannot be those of the shards."""
    if len(rows) != len(files):
        raise damaged_array(f"{path}: holds {len(rows)} headers, of {len(files)} shards")
    headers = []
    for (code, sequences, documents, modes), shard in zip(rows.tolist(), files, strict=True):
        told = index_bytes(sequences, documents, multimodal=bool(modes))
        assert shard.shard.index is not None
        if code not in DTYPE_OF_CODE or sequences < 0 or told != shard.shard.index.size:
            raise damaged_array(f"{path}: does not hold the header of {shard.index.url}")
        header = IndexHeader(
            dtype=DTYPE_OF_CODE[code],
            sequence_count=sequences,
            document_count=documents,
            multimodal=bool(modes),
        )
        headers.append(header)
    return headers


def _digest(texts: Iterable[str]) -> str:
    # A zero byte is in no URL and no ETag.
    return hashlib.blake2b("\0".join(texts).encode(), digest_size=12).hexdigest()
