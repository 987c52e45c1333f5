"""The `.idx` of several shards as one: made once per node, in files that all of its processes map.

A sequence takes 20 bytes of an index. Joined in memory, they would be taken by every rank and
worker of a node; a dataset of one shard takes them once, as its `.idx` is mapped.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from streammega.dataset.idx import (
    DOCUMENT_BOUND,
    DTYPE_OF_CODE,
    LENGTH,
    MODE,
    OFFSET,
    IndexArrays,
    dtype_code,
)
from streammega.dataset.local_cache import (
    ArrayKind,
    ArrayParts,
    cached_arrays,
    corrupt_cache_error,
    remove_stale,
)
from streammega.errors import CacheError, FormatError

log = logging.getLogger(__name__)

KEEP_BYTES = 16 << 20
"""What the `.idx` of all shards have together for a joined one to be kept on disk: below, files
cost more than they save.
"""
ROWS = 1 << 17
"""Sequences that are joined at once: what bounds the memory."""
KIND = np.dtype("<i8")


class Version(NamedTuple):
    """What tells an `.idx` from all others at its URL."""

    etag: str
    size: int
    token_bytes: int
    """Of the tokens that it speaks of."""


_KINDS: dict[str, ArrayKind] = {
    "kind": ((KIND,), (2,)),  # the code of the token dtype, and whether there are modes
    "sequence_lengths": ((LENGTH,), (None,)),
    "sequence_offsets": ((OFFSET,), (None,)),
    "document_indices": ((DOCUMENT_BOUND,), (None,)),
    "sequence_modes": ((MODE,), (None,)),
}


def join_indices(parts: Sequence[IndexArrays], bin_bytes: Sequence[int]) -> IndexArrays:
    """The arrays of shards laid end to end, as a merge of them would have, in memory.

    Raises FormatError for shards of different kinds.
    """
    joined = _joined(parts, bin_bytes)
    return _arrays_of({name: source.filled() for name, source in joined.items()})


def kept_indices(
    folder: Path,
    urls: Sequence[str],
    versions: Sequence[Version],
    open_parts: Callable[[], Sequence[IndexArrays]],
) -> IndexArrays:
    """The same as read-only maps of files in `folder`, which are made of what `open_parts` gives if
    they are not there.

    `urls` of the shards' `.idx` files. Where the files cannot be kept, every process joins in its
    memory, with a warning. Raises FormatError, StorageError, CacheError for files that are damaged.
    """
    token_bytes = [version.token_bytes for version in versions]
    key_of_dataset = f"{_digest(list(urls))}-"
    key = key_of_dataset + _digest(list(versions))
    opened: list[Sequence[IndexArrays]] = []

    def build() -> dict[str, ArrayParts]:
        opened.append(open_parts())
        return _joined(opened[0], token_bytes)

    try:
        arrays = cached_arrays(folder, key, _KINDS, build)
    except CacheError as error:
        if all((folder / f"{key}-{name}.npy").exists() for name in _KINDS):
            raise  # what is there is damaged: to be named, not passed over
        log.warning(
            "%s; until then every process joins the indices of %d shards in its memory",
            error,
            len(urls),
        )
        parts = opened[0] if opened else open_parts()
        return join_indices(parts, token_bytes)
    joined = _arrays_of(arrays)
    if opened:
        remove_stale(folder, key_of_dataset, key)
    # Rows of one file are looked up in the others.
    counts = {joined.num_sequences, len(joined.sequence_offsets)}
    if joined.sequence_modes is not None:
        counts.add(len(joined.sequence_modes))
    if len(counts) > 1:
        raise corrupt_cache_error(f"{folder / key}-*.npy: are not of the same number of sequences")
    return joined


def _joined(parts: Sequence[IndexArrays], bin_bytes: Sequence[int]) -> dict[str, ArrayParts]:
    """What a merge of the shards would have, to be made a few rows at a time."""
    dtypes = {str(part.dtype) for part in parts}
    modes = [part.sequence_modes for part in parts if part.sequence_modes is not None]
    if len(dtypes) > 1 or len(modes) not in (0, len(parts)):
        raise FormatError(
            f"its shards differ in dtype ({', '.join(sorted(dtypes))}) or in having modes; convert "
            "them together"
        )
    lengths = [part.sequence_lengths for part in parts]
    offsets = [part.sequence_offsets for part in parts]
    bytes_before = np.cumsum([0, *bin_bytes[:-1]]).tolist()
    sequences_before = np.cumsum([0, *map(len, lengths[:-1])]).tolist()
    # Each part begins with the bound 0, which is the last bound of the part before it.
    bounds = [np.zeros(1, np.int64), *(part.document_indices[1:] for part in parts)]
    kind = np.array([dtype_code(parts[0].dtype), len(modes) > 0], np.int64)
    unshifted = [0] * len(parts)
    return {
        "kind": _shifted([kind], [0], KIND),
        "sequence_lengths": _shifted(lengths, unshifted, LENGTH),
        "sequence_offsets": _shifted(offsets, bytes_before, OFFSET),
        "document_indices": _shifted(bounds, [0, *sequences_before], DOCUMENT_BOUND),
        "sequence_modes": _shifted(modes, unshifted[: len(modes)], MODE),
    }


def _shifted(
    arrays: Sequence[NDArray[Any]], shifts: Sequence[int], dtype: np.dtype[Any]
) -> ArrayParts:
    """Arrays end to end, each plus its shift."""

    def parts() -> Iterator[NDArray[Any]]:
        """The rows of all arrays, a few at a time, each moved by its shift."""
        for array, shift in zip(arrays, shifts, strict=True):
            for first_row in range(0, len(array), ROWS):
                rows = array[first_row : first_row + ROWS]
                yield rows + shift if shift else rows  # a sum is a copy

    size = sum(len(array) for array in arrays)
    return ArrayParts(dtype=dtype, size=size, parts=parts)


def _arrays_of(arrays: dict[str, NDArray[Any]]) -> IndexArrays:
    code, modes = arrays["kind"].tolist()
    # no subclass: rows of it are asked for one by one
    plain = {name: np.asarray(array) for name, array in arrays.items()}
    return IndexArrays(
        dtype=DTYPE_OF_CODE[code],
        sequence_lengths=plain["sequence_lengths"],
        sequence_offsets=plain["sequence_offsets"],
        document_indices=plain["document_indices"],
        sequence_modes=plain["sequence_modes"] if modes else None,
    )


def _digest(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=12).hexdigest()
