"""What the stream order needs to know of shards: dtypes, counts, and a digest of their content. The
arrays of their `.idx` are not read. Headers of many small `.idx` are read together, and kept on local
disk.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streammega.config import StorageConfig
from streammega.dataset.idx import (
    CODE_OF_DTYPE,
    DOCUMENT_BOUND,
    DTYPE_OF_CODE,
    HEADER_BYTES,
    LENGTH,
    MAGIC,
    MODE,
    OFFSET,
    VERSION,
    IndexHeader,
    dtype_code,
    index_bytes,
)
from streammega.dataset.local_cache import (
    ArrayKind,
    cache_folder,
    cached_arrays,
    corrupt_cache_error,
    digest_of,
    remove_stale,
    remove_unused,
    touch,
)
from streammega.dataset.resolve import MAX_LOOKED_UP, open_resolved
from streammega.dataset.shard import MAX_WHOLE_INDEX_BYTES, Shard
from streammega.dataset.token_ends import END_BYTES, digest_of_ends
from streammega.errors import CacheError
from streammega.storage import Buffer, ObjectInfo, Store
from streammega.storage.backends.local import PreadStore
from streammega.storage.derived_stores import DerivedStore
from streammega.storage.store import Part, Span, read_many
from streammega.storage.thread_pool import parallel_map

log = logging.getLogger(__name__)

Integers = NDArray[np.int64]
MIN_KEPT_HEADERS = 64
"""So many headers are read together and kept on local disk. For fewer, a file costs more than it
saves.
"""
MAX_HEADER_REQUESTS = 128
"""Requests at once. Each has a small answer, and waits for a round trip or two."""
MAX_SMALL_REQUESTS = 256
"""Requests at once for small `.idx`: 10,000 of 20 ms each are answered within a second."""
NEAR_SECONDS = 0.004
"""Seconds. Where an answer takes less than this, many threads only take turns."""
MAX_NEAR_REQUESTS = 32
MAX_SHARDS_AT_ONCE = 1 << 12
"""Shards whose `.idx` are in memory at once: at most 96 MiB, and 32 MiB of copies while they are
checked.
"""
MAX_KEPT_BYTES = 64 << 20
"""Small `.idx` stay in memory until their offsets are read, if all of them take no more than this."""
MAX_WHOLE_TOKEN_BYTES = 16 << 10
"""Tokens of so many bytes are read whole: one request takes less time than two. It is no less than
END_BYTES, and changes no identity.
"""
UNUSED_DAYS = 60
"""Kept headers that were not used for so long are removed, such as those of a blend that changed."""
FIELDS = 4
"""The columns of a kept header: code of the dtype, sequences, document bounds, and whether there are
modes.
"""
_KINDS: dict[str, ArrayKind] = {"headers": ((np.dtype("<i8"),), (None, FIELDS + 1))}
"""One column more: the digest of a shard's first and last tokens, 0 where it is not needed."""
_PREFIX = "headers-"
"""What names of kept files begin with."""
_DIGITS = 16


def read_datasets(names: Sequence[str], storage: StorageConfig) -> list[list[Shard]]:
    """Open the shards of datasets by their sizes and headers, and read the tokens that `content_of`
    needs. Raises as `Shard.open` does.
    """

    def open_all(datasets: list[list[Shard]]) -> list[list[Shard]]:
        _open_datasets(datasets, names, storage)
        return datasets

    return open_resolved(names, storage, open_all)


def _open_datasets(
    datasets: Sequence[Sequence[Shard]], names: Sequence[str], storage: StorageConfig
) -> None:
    """Open all shards. Unknown ones take a round of requests for sizes, then one for headers and
    tokens.
    """
    shards = [shard for dataset in datasets for shard in dataset]
    unknown = [shard for shard in shards if shard.version is None or shard.index_version is None]
    at_once = min(MAX_HEADER_REQUESTS, storage.max_concurrent_requests)
    _run([shard.look_up for shard in unknown], unknown, at_once)
    shown = [shard for shard in shards if shard.kind != "bin"]
    _run([shard.tokens for shard in shown], shown, at_once)
    at_ends = [shard for dataset in datasets for shard in end_shards(dataset)]
    plain = []
    for shard in shards:
        if shard.entry is None and shard.kind == "bin" and not shard.store.is_local:
            plain.append(shard)
    # Without ETags, kept headers could be those of earlier shards.
    if len(plain) >= MIN_KEPT_HEADERS and all(shard.stored.etag for shard in plain):
        are_plain = {id(shard) for shard in plain}
        _open_many(plain, [shard for shard in at_ends if id(shard) in are_plain], names, storage)
    unread = [shard for shard in shards if shard.entry is None and shard.header is None]
    are_many = len(unread) > MAX_LOOKED_UP
    jobs: list[Callable[[], Any]] = [
        partial(shard.read_header, is_one_of_many=are_many) for shard in unread
    ]
    # Each job may send so many, since so many jobs run at once.
    each = max(1, storage.max_concurrent_requests // at_once)
    jobs += [partial(read_ends, [shard], each) for shard in at_ends if shard.ends is None]
    _run(jobs, shards, at_once)
    for shard in shards:
        shard.open()


def _run(jobs: Sequence[Callable[[], Any]], shards: Sequence[Shard], max_threads: int) -> None:
    """Make calls that open shards, many at once."""
    are_local = all(shard.store.is_local for shard in shards)
    parallel_map(lambda job: job(), jobs, max_threads, is_local=are_local)


def content_of(shards: Sequence[Shard]) -> str:
    """A digest of the content of a dataset, whose shards `read_datasets` opened."""
    return content_digest(
        dtypes=[shard.dtype for shard in shards],
        tokens=[shard.num_tokens for shard in shards],
        ends=[shard.ends for shard in end_shards(shards)],
        sequences=sum(shard.num_sequences for shard in shards),
        documents=sum(shard.num_documents for shard in shards),
    )


# --- headers of many shards -----------------------------------------------------------------------


def _open_many(
    shards: Sequence[Shard], at_ends: Sequence[Shard], names: Sequence[str], storage: StorageConfig
) -> None:
    """Give each shard the header of its `.idx`, and those at ends the digest of their tokens.

    They are kept as long as ETags and sizes of all shards stay the same. Then they are read again,
    and what was kept of the same datasets is removed, as is what was not used for long. Where
    headers cannot be kept, they are read every time.

    names: of the datasets. Raises CacheError for a damaged file.
    """
    folder = cache_folder(storage) / "idx"
    built: list[Integers] = []

    def build() -> dict[str, NDArray[Any]]:
        built.append(_read_rows(shards, at_ends, storage))
        return {"headers": built[0]}

    versions = [f"{shard.prefix} {shard.version} {shard.index_version}" for shard in shards]
    key_of_datasets = f"{_PREFIX}{digest_of(json.dumps(names))}-"
    key = key_of_datasets + digest_of(json.dumps(versions))
    path = folder / f"{key}-headers.npy"
    try:
        arrays: dict[str, NDArray[Any]] = cached_arrays(folder, key, _KINDS, build)
    except CacheError as error:
        if path.exists():
            raise  # the file is there, and damaged
        log.info("%s; until then the headers of %d shards are read each time", error, len(shards))
        arrays = {"headers": built[0]} if built else build()
    if built:
        remove_stale(folder, key_of_datasets, key)
        remove_unused(folder, _PREFIX, UNUSED_DAYS)
    else:
        touch(path)
    rows = np.asarray(arrays["headers"])
    if len(rows) != len(shards):
        raise corrupt_cache_error(f"{path}: holds {len(rows)} headers, of {len(shards)} shards")
    for shard, *row in zip(shards, *rows.T.tolist(), strict=True):
        shard.header = _header_of(row, shard, path)
    number_of = {id(shard): number for number, shard in enumerate(shards)}
    for shard in at_ends:
        shard.ends = int(rows[number_of[id(shard)], FIELDS])


def _header_of(row: Sequence[int], shard: Shard, path: Path) -> IndexHeader:
    """The header of a kept row. Raises CacheError for a row of another shard."""
    code, sequences, documents, modes, _ = row
    expected_bytes = index_bytes(sequences, documents, multimodal=bool(modes))
    assert shard.index_version is not None
    is_header = code in DTYPE_OF_CODE and sequences >= 0 and documents > 0
    if not is_header or expected_bytes != shard.index_version[0]:
        raise corrupt_cache_error(f"{path}: does not hold the header of {shard.index_url}")
    return IndexHeader(
        dtype=DTYPE_OF_CODE[code],
        sequence_count=sequences,
        document_count=documents,
        multimodal=bool(modes),
    )


def _read_rows(
    shards: Sequence[Shard], at_ends: Sequence[Shard], storage: StorageConfig
) -> Integers:
    """The rows of shards, int64 [shards, FIELDS + 1].

    Sets `ends` of shards at ends, and `index_body` of shards with a small `.idx`, unless these are
    too many. The source of samples frees it when the bounds of the split are known.
    """
    sizes = [shard.index_info.size for shard in shards]
    keep = sum(min(size, MAX_WHOLE_INDEX_BYTES) for size in sizes) <= MAX_KEPT_BYTES
    are_of_one_store = len({id(shard.store) for shard in shards}) == 1

    def read_one(shard: Shard) -> IndexHeader:
        header = shard.read_header(is_one_of_many=True)
        if not keep:
            shard.index_body = None
        return header

    parts = []
    if are_of_one_store and max(sizes) <= MAX_WHOLE_INDEX_BYTES:
        readers = min(MAX_SMALL_REQUESTS, storage.max_concurrent_requests)
        for first in range(0, len(shards), MAX_SHARDS_AT_ONCE):
            parts.append(
                _read_small(shards[first : first + MAX_SHARDS_AT_ONCE], readers, keep=keep)
            )
    else:
        headers = parallel_map(
            read_one, shards, min(MAX_HEADER_REQUESTS, storage.max_concurrent_requests)
        )
        parts.append(rows_of_headers(headers))
    read_ends(at_ends, min(MAX_HEADER_REQUESTS, storage.max_concurrent_requests))
    ends = [shard.ends or 0 for shard in shards]
    return np.column_stack([np.concatenate(parts), np.array(ends, np.int64)])


def _read_small(shards: Sequence[Shard], readers: int, *, keep: bool) -> Integers:
    """The rows of small `.idx`, which are read whole. Raises FormatError for one that is not sound."""
    bodies = read_bodies(shards, readers)
    rows, is_sound = rows_of(bodies, [shard.stored.size for shard in shards])
    for number in np.flatnonzero(~is_sound).tolist():
        shards[number].index_body = bytes(bodies[number])
        shards[number].read_header()  # says what is wrong
    if keep:
        for shard, body in zip(shards, bodies, strict=True):
            shard.index_body = bytes(body)
    return rows


def read_bodies(shards: Sequence[Shard], max_readers: int) -> list[Buffer]:
    """Each `.idx` of one store, whole. Raises StorageError."""
    store = shards[0].store
    infos = [shard.index_info for shard in shards]
    parts: list[Part] = [(info, 0, info.size) for info in infos]
    began = time.monotonic()
    first = read_many(store, parts[:1], 1)
    is_near = time.monotonic() - began < NEAR_SECONDS
    readers = min(MAX_NEAR_REQUESTS, max_readers) if is_near else max_readers
    return first + read_many(store, parts[1:], readers)


def rows_of_headers(headers: Sequence[IndexHeader]) -> Integers:
    """The rows of headers, int64 [headers, FIELDS]."""
    rows = []
    for header in headers:
        code = dtype_code(header.dtype)
        rows.append((code, header.sequence_count, header.document_count, int(header.multimodal)))
    return np.array(rows, np.int64).reshape(-1, FIELDS)


_STORED = np.dtype([("magic", "S9"), ("version", "<u8"), ("code", "u1"), ("counts", "<u8", 2)])
"""A header as it is stored."""
assert _STORED.itemsize == HEADER_BYTES


def rows_of(
    bodies: Sequence[Buffer], token_bytes: Sequence[int]
) -> tuple[Integers, NDArray[np.bool_]]:
    """The row of each `.idx`, [files, FIELDS], and which of them are sound: the format, the size by
    their counts, and the end where their tokens end.

    For one that is not sound, `parse_header` and `check_end` say what is wrong.
    """
    sizes = np.array([len(body) for body in bodies], np.int64)
    # With room after the last one: also a wrong place that is read below is within.
    stored = np.frombuffer(b"".join([*bodies, bytes(MAX_WHOLE_INDEX_BYTES)]), np.uint8)
    first_byte = np.cumsum(sizes) - sizes
    heads = _read_at(stored, first_byte, HEADER_BYTES).view(_STORED)[:, 0]
    known = heads["magic"] == MAGIC
    known &= heads["version"] == VERSION
    itemsize = _ITEMSIZE_OF_CODE[heads["code"]]
    known &= itemsize > 0
    # Larger counts than there are bytes would overflow below.
    known &= (heads["counts"] <= sizes[:, None].astype(np.uint64)).all(axis=1)
    counts = np.where(known[:, None], heads["counts"], 0).astype(np.int64)
    sequences, documents = counts.T
    known &= documents > 0
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
    """Where the last sequence of each ends, in bytes; -1 for a negative length or offset."""
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
    """A copy of `size` bytes at each place, [places, size]."""
    read: NDArray[np.uint8] = stored[places[:, None] + np.arange(size)]
    return read


def _itemsizes() -> Integers:
    """Bytes of a token by dtype code; 0: there is no such code."""
    itemsizes = np.zeros(256, np.int64)
    for dtype, code in CODE_OF_DTYPE.items():
        itemsizes[code] = dtype.itemsize
    return itemsizes


_ITEMSIZE_OF_CODE = _itemsizes()


# --- content: which tokens it is ---------------------------------------------------------------


def end_shards(shards: Sequence[Shard]) -> list[Shard]:
    """The first and the last shard that hold tokens; of a single one, that."""

    def holds_tokens(shard: Shard) -> bool:
        _, info = shard.tokens()
        return info.size > 0

    first = next(filter(holds_tokens, shards), None)
    if first is None:
        return []
    last = next(filter(holds_tokens, reversed(shards)))
    return [first] if first is last else [first, last]


def read_ends(shards: Sequence[Shard], max_requests: int) -> None:
    """Set `ends` of each shard where it is not known: as the manifest says, or by requests that go out
    together.

    Raises ObjectNotFoundError, ObjectChangedError, FormatError, StorageError.
    """
    shards_of_store: dict[int, list[Shard]] = {}
    for shard in shards:
        if shard.ends is None:
            shard.ends = shard.ends_of_manifest
        if shard.ends is None:
            store, _ = shard.tokens()
            shards_of_store.setdefault(id(store), []).append(shard)
    each = max(1, max_requests // max(1, len(shards_of_store)))
    _run(
        [partial(_read_ends_of_store, of_store, each) for of_store in shards_of_store.values()],
        shards,
        max_requests,
    )


def _read_ends_of_store(shards: Sequence[Shard], max_requests: int) -> None:
    """Set `ends` of shards whose tokens are all in one store."""
    store, _ = shards[0].tokens()
    infos = [info for _, info in (shard.tokens() for shard in shards)]
    parts: list[Part] = [(info, *span) for info in infos for span in _end_spans(info)]
    if store.is_local:
        unmapped = _without_maps(store)
        bodies = [
            unmapped.read(info.key, [(start, stop)], info.etag)[0] for info, start, stop in parts
        ]
    else:
        bodies = read_many(store, parts, max_requests)
    unused = iter(bodies)
    for shard, info in zip(shards, infos, strict=True):
        read = b"".join(next(unused) for _ in _end_spans(info))
        shard.ends = digest_of_ends(read[:END_BYTES], read[-END_BYTES:])


def _end_spans(info: ObjectInfo) -> list[Span]:
    """The bytes that are read of the tokens of a shard."""
    size = info.size
    if size <= MAX_WHOLE_TOKEN_BYTES:
        return [(0, size)] if size else []
    return [(0, END_BYTES), (size - END_BYTES, size)]


def _without_maps(store: Store) -> Store:
    """The same local store without maps. A map of a file that is opened and not read yet would show
    a later change as other bytes. Without a map it is an error.
    """
    if isinstance(store, DerivedStore):
        return store.over(PreadStore(StorageConfig()))
    return PreadStore(StorageConfig())


def content_digest(
    dtypes: Sequence[np.dtype[Any]],
    tokens: Sequence[int],
    ends: Sequence[int | None],
    sequences: int,
    documents: int,
) -> str:
    """A digest of a dataset, 16 hex digits.

    dtypes, tokens: of each shard. ends: of the shards at its ends. sequences, documents: of all
    shards together.
    """
    kinds = [dtype.newbyteorder("<").str for dtype in dict.fromkeys(dtypes)]
    numbers = {dtype: number for number, dtype in enumerate(dict.fromkeys(dtypes))}
    kind_of_shard = [numbers[dtype] for dtype in dtypes] if len(kinds) > 1 else []
    described = json.dumps([kinds, kind_of_shard, list(tokens), list(ends), sequences, documents])
    return hashlib.blake2b(described.encode(), digest_size=_DIGITS // 2).hexdigest()
