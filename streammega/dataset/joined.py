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
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streammega.dataset.idx import DTYPE_OF_CODE, IndexArrays, dtype_code
from streammega.dataset.node_cache import ArrayKind, ArrayParts, cached_arrays, damaged_array
from streammega.errors import CacheError, FormatError

log = logging.getLogger(__name__)

KEEP_BYTES = 16 << 20
"""What the `.idx` of all shards have together for a joined one to be kept on disk: below, files
cost more than they save.
"""
ROWS = 1 << 17
"""Sequences that are joined at once: what bounds the memory."""
Version = tuple[str, int, int]
"""What tells an `.idx` from all others at its URL: its ETag and size, and the bytes of tokens that
it speaks of.
"""
_KINDS: dict[str, ArrayKind] = {
    "kind": ((np.int64,), (2,)),  # the code of the token dtype, and whether there are modes
    "sequence_lengths": ((np.dtype("<i4"),), (None,)),
    "sequence_offsets": ((np.dtype("<i8"),), (None,)),
    "document_indices": ((np.dtype("<i8"),), (None,)),
    "sequence_modes": ((np.int8,), (None,)),
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
    bin_bytes = [version[2] for version in versions]
    of_name = f"{_digest(list(urls))}-"
    key = of_name + _digest(list(versions))
    made: list[Sequence[IndexArrays]] = []

    def build() -> dict[str, ArrayParts]:
        made.append(open_parts())
        return _joined(made[0], bin_bytes)

    try:
        found = _arrays_of(cached_arrays(folder, key, _KINDS, build))
    except CacheError as error:
        if all((folder / f"{key}-{name}.npy").exists() for name in _KINDS):
            raise  # what is there is damaged: to be named, not passed over
        log.warning(
            "%s; until then every process joins the indices of %d shards in its memory",
            error,
            len(urls),
        )
        return join_indices(made[0] if made else open_parts(), bin_bytes)
    if made:
        _remove_former(folder, of_name, key)
    _check_lengths(found, folder / key)
    return found


def _joined(parts: Sequence[IndexArrays], bin_bytes: Sequence[int]) -> dict[str, ArrayParts]:
    """What a merge of the shards would have, to be made a few rows at a time."""
    dtypes = {str(part.dtype) for part in parts}
    multimodal = {part.sequence_modes is not None for part in parts}
    if len(dtypes) > 1 or len(multimodal) > 1:
        raise FormatError(
            f"its shards differ in dtype ({', '.join(sorted(dtypes))}) or in having modes; convert them together"
        )
    none = [0] * len(parts)
    bytes_before = np.cumsum([0, *bin_bytes[:-1]]).tolist()
    sequences_before = np.cumsum([0, *(len(part.sequence_lengths) for part in parts[:-1])]).tolist()
    modes = [part.sequence_modes for part in parts if part.sequence_modes is not None]
    kind = np.array([dtype_code(parts[0].dtype), len(modes) > 0], np.int64)
    return {
        "kind": _shifted([kind], [0], "<i8"),
        "sequence_lengths": _shifted([part.sequence_lengths for part in parts], none, "<i4"),
        "sequence_offsets": _shifted(
            [part.sequence_offsets for part in parts], bytes_before, "<i8"
        ),
        "document_indices": _shifted(
            [np.zeros(1, np.int64), *(part.document_indices[1:] for part in parts)],
            [0, *sequences_before],
            "<i8",
        ),
        "sequence_modes": _shifted(modes, none, "|i1"),
    }


def _shifted(arrays: Sequence[NDArray[Any]], shifts: Sequence[int], dtype: str) -> ArrayParts:
    """Arrays end to end, each plus its shift."""

    def parts() -> Iterator[NDArray[Any]]:
        for array, shift in zip(arrays, shifts, strict=False):
            for at in range(0, len(array), ROWS):
                rows = array[at : at + ROWS]
                yield rows + shift if shift else rows

    return ArrayParts(dtype=np.dtype(dtype), size=sum(len(array) for array in arrays), parts=parts)


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


def _check_lengths(found: IndexArrays, files: Path) -> None:
    """Raise CacheError if the files are not all of one index: rows of one are looked up in the
    others.
    """
    sequences = len(found.sequence_lengths)
    modes = found.sequence_modes
    if len(found.sequence_offsets) != sequences or (modes is not None and len(modes) != sequences):
        raise damaged_array(f"{files}-*.npy: are not of the same number of sequences")


def _remove_former(folder: Path, of_name: str, key: str) -> None:
    """What was joined of former shards of the same dataset; whoever has it mapped keeps it."""
    for path in folder.glob(f"{of_name}*"):
        if not path.name.startswith(key):
            path.unlink(missing_ok=True)


def _digest(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=12).hexdigest()
