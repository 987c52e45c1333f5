"""What a dataset holds, wherever it lies and however it is stored: a digest of its dtypes, its counts
and some of its tokens.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import xxhash

from streammega.config import StorageConfig
from streammega.dataset.shard import Shard
from streammega.storage import Buffer, ObjectInfo, Store
from streammega.storage.backends.local import PreadStore
from streammega.storage.derived_stores import DerivedStore
from streammega.storage.store import Part
from streammega.storage.thread_pool import parallel_map

END_BYTES = 1 << 10
"""Bytes of tokens that are read at each end of a shard."""
READ_WHOLE = 16 << 10
"""Bytes of tokens that are read whole: one request takes less than two."""
AT_ONCE = 4
"""Requests at once for one dataset: two ends of two shards."""
_DIGITS = 16

OpenShard = tuple[Shard, Store, ObjectInfo]
"""A shard, the store that shows its tokens, and how many bytes of them there are."""


def end_shards(token_bytes: Sequence[int]) -> list[int]:
    """The numbers of the first and the last shard that hold tokens; of a single one, or none."""
    numbers = range(len(token_bytes))
    first = next((number for number in numbers if token_bytes[number]), None)
    if first is None:
        return []
    last = next(number for number in reversed(numbers) if token_bytes[number])
    return [first] if first == last else [first, last]


def read_ends(shards: Sequence[OpenShard]) -> None:
    """Set `ends` of each shard for which it is not known, by requests that go out together.

    Raises ObjectNotFoundError, ObjectChangedError, FormatError, StorageError.
    """
    unread = [shard for shard in shards if shard[0].ends is None]
    parts = [part for _, _, info in unread for part in end_parts(info)]
    stores = [store for _, store, info in unread for _ in end_parts(info)]
    bodies = _read(stores, parts)
    set_ends([(files, info) for files, _, info in unread], bodies)


def end_parts(info: ObjectInfo) -> list[Part]:
    """What is read of the tokens of a shard."""
    size = info.size
    if size <= READ_WHOLE:
        return [(info, 0, size)] if size else []
    return [(info, 0, END_BYTES), (info, size - END_BYTES, size)]


def set_ends(shards: Iterable[tuple[Shard, ObjectInfo]], bodies: Iterable[Buffer]) -> None:
    """Set `ends` of shards. bodies: the `end_parts` of all of them, end to end."""
    unused = iter(bodies)
    for files, info in shards:
        read = b"".join(next(unused) for _ in end_parts(info))
        ends = read[:END_BYTES] + read[-END_BYTES:]
        # As it is kept on disk: an int64.
        files.ends = int.from_bytes(xxhash.xxh3_64_digest(ends), "little", signed=True)


def content_digest(
    dtypes: Sequence[np.dtype[Any]],
    tokens: Sequence[int],
    ends: Sequence[int | None],
    sequences: int,
    documents: int,
) -> str:
    """A digest of a dataset, 16 hex digits. dtypes, tokens: of each shard. ends: of `end_shards`.
    sequences, documents: of all shards.
    """
    kinds = [dtype.newbyteorder("<").str for dtype in dict.fromkeys(dtypes)]
    numbers = {dtype: number for number, dtype in enumerate(dict.fromkeys(dtypes))}
    kind_of_shard = [numbers[dtype] for dtype in dtypes] if len(kinds) > 1 else []
    described = json.dumps([kinds, kind_of_shard, list(tokens), list(ends), sequences, documents])
    return hashlib.blake2b(described.encode(), digest_size=_DIGITS // 2).hexdigest()


def _read(stores: Sequence[Store], parts: Sequence[Part]) -> list[Buffer]:
    """Parts of objects, each of its own store."""
    first_store = stores[0] if stores else None
    is_one_store = all(store is first_store for store in stores)
    if first_store is not None and is_one_store and not first_store.is_local:
        return first_store.read_many(parts, AT_ONCE)

    def read_one(number: int) -> Buffer:
        info, start, stop = parts[number]
        store = _without_maps(stores[number])
        return store.read(info.key, [(start, stop)], info.etag)[0]

    if all(store.is_local for store in stores):
        return [read_one(number) for number in range(len(parts))]
    return parallel_map(read_one, range(len(parts)), AT_ONCE)


def _without_maps(store: Store) -> Store:
    """A store that reads local files without mapping them. What is opened may never be read: until
    it is, it may change, which is then an error and not other bytes.
    """
    if not store.is_local:
        return store
    if isinstance(store, DerivedStore):
        return store.over(PreadStore(StorageConfig()))
    return PreadStore(StorageConfig())
