"""The `.idx` of several shards as one: made once per node, in a file that all of its processes map.

An index takes 20 bytes for a sequence. In memory, every rank and worker of a node would need them; a
mapped file needs them once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streammega.dataset.idx import (
    DOCUMENT_BOUND,
    LENGTH,
    MODE,
    OFFSET,
    IndexArrays,
    encode_header,
    parse_index,
)
from streammega.dataset.local_cache import (
    corrupt_cache_error,
    digest_of,
    map_kept_file,
    remove_stale,
)
from streammega.errors import CacheError, FormatError
from streammega.errors.logs import get_logger

log = get_logger(__name__)

KEEP_BYTES = 16 << 20
"""Bytes of all `.idx` together from which on a joined one is kept on disk. Below, a file costs more
than it saves.
"""
ROWS = 1 << 17
"""Sequences that are joined at once, which bounds the memory."""


def join_indices(parts: Sequence[IndexArrays], bin_bytes: Sequence[int]) -> IndexArrays:
    """The arrays that a merge of the shards would have, in memory.

    Raises FormatError for shards of different kinds.
    """
    return parse_index(memoryview(b"".join(_joined(parts, bin_bytes))), "the joined index")


def map_joined_index(
    folder: Path,
    urls: Sequence[str],
    versions: Sequence[tuple[str, int, int]],
    open_parts: Callable[[], Sequence[IndexArrays]],
) -> IndexArrays:
    """The same arrays, as a read-only map of a file in `folder`. If it is missing, it is made of the
    parts that `open_parts` returns. If it cannot be kept, every process joins the parts in its
    memory, with a warning.

    urls: of the `.idx` of the shards. versions: (ETag of the `.idx`, its bytes, bytes of the tokens)
    of each. Raises FormatError, StorageError, CacheError for a damaged file.
    """
    token_bytes = [size for _, _, size in versions]
    key_of_dataset = f"joined-{digest_of(json.dumps(urls))}-"
    key = key_of_dataset + digest_of(json.dumps(versions))
    path = folder / f"{key}.idx"
    opened: list[Sequence[IndexArrays]] = []

    def make() -> Iterator[bytes]:
        opened.append(open_parts())
        return _joined(opened[0], token_bytes)

    try:
        data = map_kept_file(path, folder / f"{key}.lock", make)
    except CacheError as error:
        log.warning(
            "%s; until then every process joins the indices of %d shards in its memory",
            error,
            len(urls),
        )
        return join_indices(opened[0] if opened else open_parts(), token_bytes)
    if opened:
        remove_stale(folder, key_of_dataset, key)
    try:
        return parse_index(data, str(path))
    except FormatError as error:
        raise corrupt_cache_error(str(error)) from None


def _joined(parts: Sequence[IndexArrays], bin_bytes: Sequence[int]) -> Iterator[bytes]:
    """The `.idx` of a merge of the shards, a few rows at a time."""
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
    sequences_before = np.cumsum([0, *map(len, lengths)]).tolist()
    # Each part begins with the bound 0, which is the last bound of the part before it.
    bounds = [np.zeros(1, np.int64), *(part.document_indices[1:] for part in parts)]
    yield encode_header(parts[0].dtype, sequences_before[-1], sum(map(len, bounds)))
    yield from _shifted(lengths, [0] * len(parts), LENGTH)
    yield from _shifted(offsets, bytes_before, OFFSET)
    yield from _shifted(bounds, [0, *sequences_before[:-1]], DOCUMENT_BOUND)
    yield from _shifted(modes, [0] * len(modes), MODE)


def _shifted(
    arrays: Sequence[NDArray[Any]], shifts: Sequence[int], dtype: np.dtype[Any]
) -> Iterator[bytes]:
    """Arrays end to end, each plus its shift."""
    for array, shift in zip(arrays, shifts, strict=True):
        for first_row in range(0, len(array), ROWS):
            yield (array[first_row : first_row + ROWS] + shift).astype(dtype).tobytes()
