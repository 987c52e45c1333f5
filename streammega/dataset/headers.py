"""What the stream order needs of shards, without reading their indices: sizes, counts, the pointers
at a split's bounds, and a digest of what a dataset holds. Headers of many small `.idx` are read
together, and kept on local disk.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from streammega.config import StorageConfig
from streammega.dataset.idx import (
    CODE_OF_DTYPE,
    DOCUMENT_BOUND,
    DTYPE_OF_CODE,
    HEADER,
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
    damaged_array,
    note_use,
    remove_former,
    remove_unused,
)
from streammega.dataset.resolve import list_pairs, open_shards
from streammega.dataset.shard import READ_WHOLE, Shard
from streammega.errors import CacheError, FormatError, ObjectChangedError, ObjectNotFoundError
from streammega.storage import Buffer, ObjectInfo, Store, open_store
from streammega.storage.backends.local import PreadStore
from streammega.storage.derived_stores import DerivedStore
from streammega.storage.store import Part
from streammega.storage.thread_pool import parallel_map

LISTED_AT_ONCE = 128
"""Pairs of a blend that are opened at once where a listing has them: each waits for an answer or
two from far away, and holds next to nothing meanwhile.
"""
DATASETS_AT_ONCE = 16
"""Datasets that are opened at once where listings do not have all of them."""
OPENERS = 32
"""Shards of a dataset that are opened at once."""
READERS = 128
"""Shards of all datasets together whose headers are read at once, where none gets fewer than
`OPENERS`: each is one answer from far away, of a few bytes.
"""


def read_datasets(
    names: Sequence[str], storage: StorageConfig, cache_dir: str | Path | None = None
) -> list[list[Shard]]:
    """Open the shards of datasets, by listings where these tell of them: see `read_dataset`."""
    # Held until all is open, so that what is listed first does not end with its client.
    _stores = [open_store(name, storage) for name in names]
    pairs = list_pairs(names, storage, cache_dir)
    are_listed = len(pairs) == len(set(names))
    at_once = min(LISTED_AT_ONCE if are_listed else DATASETS_AT_ONCE, storage.max_requests)
    if _read_pairs(pairs, storage):
        at_once = 1 if are_listed else at_once  # nothing is asked: threads would only take turns
    beside = min(at_once, max(1, len(names)))

    def open_one(name: str) -> list[Shard]:
        return read_dataset(name, storage, cache_dir, pairs.get(name), beside)

    return parallel_map(open_one, names, at_once)


def _read_pairs(pairs: Mapping[str, Shard], storage: StorageConfig) -> bool:
    """Read the headers of pairs of a blend together, or take those that are kept. False: they are
    few, or one is not as it should be, and who opens it says what is wrong.

    Raises StorageError for what may pass when it is tried again, CacheError for a damaged file.
    """
    shards = list(pairs.values())
    if not are_kept(shards):
        return False
    each = range(len(shards))  # each is a dataset
    with suppress(FormatError, ObjectChangedError, ObjectNotFoundError):
        adopt_kept(pairs, shards, each, lambda: _read(shards, each, storage, keep=True))
        return True
    return False


def read_dataset(
    name: str,
    storage: StorageConfig,
    cache_dir: str | Path | None = None,
    listed_pair: Shard | None = None,
    beside: int = 1,
) -> list[Shard]:
    """Open all shards of a dataset by their sizes and headers. What `content_of` needs of their
    tokens is read too.

    listed_pair: the pair of that name, if a listing had it. `beside`: how many datasets are opened
    at the same time. Raises as `Shard.open` does.
    """

    def open_all(shards: list[Shard]) -> list[Shard]:
        if are_kept(shards):
            ends_of = end_shards([shard.stored.size for shard in shards])
            adopt_kept([name], shards, ends_of, lambda: _read(shards, ends_of, storage, beside))
        _open_each(shards, storage)
        read_ends(_at_ends(shards))
        return shards

    return open_shards(name, storage, cache_dir, open_all, listed_pair=listed_pair)


def content_of(shards: Sequence[Shard]) -> str:
    """A digest of what a dataset holds, of its shards as `read_dataset` opened them."""
    return content_digest(
        dtypes=[shard.dtype for shard in shards],
        tokens=[shard.num_tokens for shard in shards],
        ends=[shard.ends for shard in _at_ends(shards)],
        sequences=sum(shard.num_sequences for shard in shards),
        documents=sum(shard.num_documents for shard in shards),
    )


def _at_ends(shards: Sequence[Shard]) -> list[Shard]:
    """The first and the last shard that hold tokens."""
    return [shards[number] for number in end_shards([shard.num_tokens for shard in shards])]


def _open_each(shards: Sequence[Shard], storage: StorageConfig) -> None:
    """Open shards. The tokens at the ends of remote `.bin` shards are read meanwhile."""
    # Where nothing is asked, threads would only take turns.
    if all(_is_known(shard) for shard in shards):
        for shard in shards:
            shard.open()
        return
    ends = [shards[number] for number in sorted({0, len(shards) - 1})]
    jobs: list[Callable[[], Any]] = [shard.open for shard in shards]
    if all(shard.kind == "bin" and shard.known_tokens is not None for shard in ends):
        jobs.append(lambda: read_ends(ends))
    parallel_map(lambda job: job(), jobs, min(OPENERS, storage.max_requests))


def _is_known(shard: Shard) -> bool:
    """Whether all that is needed of a shard is known without a request."""
    is_listed = shard.known_tokens is not None and shard.known_index is not None
    return is_listed and (shard.entry is not None or shard.header is not None)


def _readers(most: int, beside: int, storage: StorageConfig) -> int:
    """Requests at once for a dataset, of `most` for all that are opened at the same time."""
    return min(max(OPENERS, most // beside), storage.max_requests)


def _read(
    shards: Sequence[Shard],
    ends_of: Sequence[int],
    storage: StorageConfig,
    beside: int = 1,
    *,
    keep: bool = False,
) -> NDArray[np.int64]:
    """What is kept of shards. `ends_of`: the numbers of those whose tokens are looked at. `keep`: see
    `_read_headers`.
    """
    rows = _read_headers(shards, ends_of, storage, beside, keep=keep)
    ends = [shard.ends or 0 for shard in shards]
    return np.column_stack([rows, np.array(ends, np.int64)])


def _read_headers(
    shards: Sequence[Shard],
    ends_of: Sequence[int],
    storage: StorageConfig,
    beside: int,
    *,
    keep: bool,
) -> NDArray[np.int64]:
    """The headers of shards, which end where their tokens do: int64 [shards, FIELDS]. The ends of
    the tokens of those numbered `ends_of` are read meanwhile. `keep`: pointers will be read of the
    headers, if what was read of all is not too much to be held.
    """
    keep = (
        keep and sum(min(shard.index_info.size, READ_WHOLE) for shard in shards) <= MOST_KEPT_BYTES
    )

    def read_one(shard: Shard) -> IndexHeader:
        header = shard.read_header(shard.stored.size)
        if not keep:
            shard.forget()  # of thousands it would be much
        return header

    if not are_small(shards):
        jobs: list[Callable[[], Any]] = [partial(read_one, shard) for shard in shards]
        jobs += [partial(read_ends, [shards[number]]) for number in ends_of]
        read = parallel_map(lambda job: job(), jobs, _readers(READERS, beside, storage))
        return rows_of_headers(read[: len(shards)])
    readers = _readers(SMALL_READERS, beside, storage)
    rows = []
    for first in range(0, len(shards), READ_TOGETHER):
        stop = first + READ_TOGETHER
        at_ends = [shards[number] for number in ends_of if first <= number < stop]
        rows.append(_read_small(shards[first:stop], at_ends, readers, read_one, keep=keep))
    return np.concatenate(rows)


def _read_small(
    shards: Sequence[Shard],
    at_ends: Sequence[Shard],
    readers: int,
    read_one: Callable[[Shard], IndexHeader],
    *,
    keep: bool,
) -> NDArray[np.int64]:
    """As `_read_headers`, of small ones; what is not as it should be is for `read_one`."""
    parts = [part for shard in at_ends for part in end_parts(shard.stored)]
    all_bodies = read_bodies(shards, readers, parts)
    set_ends(at_ends, all_bodies[len(shards) :])
    bodies = all_bodies[: len(shards)]
    rows, is_sound = rows_of(bodies, [shard.stored.size for shard in shards])
    if keep:
        for shard, body in zip(shards, bodies, strict=True):
            shard.index.keep(body)
    for number in np.flatnonzero(~is_sound).tolist():
        # This says what is wrong.
        rows[number : number + 1] = rows_of_headers([read_one(shards[number])])
    return rows


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


def are_kept(shards: Sequence[Shard]) -> bool:
    """Whether headers of shards are kept: those of many `.bin`, of which no manifest tells what
    they hold, and a listing has the versions. Without, nothing would distinguish them from former
    shards. Those that are known already are not kept again.
    """
    if len(shards) < KEEP_SHARDS or shards[0].entry is not None or shards[0].header is not None:
        return False
    return all(
        shard.kind == "bin" and shard.known_index is not None and shard.known_tokens is not None
        for shard in shards
    )


def adopt_kept(
    names: Iterable[str],
    shards: Sequence[Shard],
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
    folder = cache_folder(shards[0].cache_dir) / "idx"
    found: list[NDArray[np.int64]] = []

    def build() -> dict[str, NDArray[Any]]:
        found.append(read())
        return {"headers": found[0]}

    key_of_datasets = f"{_PREFIX}{_digest(names)}-"
    key = key_of_datasets + _digest(_versions(shards))
    path = folder / f"{key}-headers.npy"
    try:
        arrays: dict[str, NDArray[Any]] = cached_arrays(folder, key, _KINDS, build)
    except CacheError as error:
        if path.exists():
            raise  # what is there is damaged: to be named, not passed over
        log.info("%s; until then the headers of %d shards are read each time", error, len(shards))
        arrays = {"headers": found[0] if found else read()}
    if found:
        remove_former(folder, key_of_datasets, key)
        remove_unused(folder, _PREFIX, UNUSED_DAYS)
    else:
        note_use(path)
    rows = np.asarray(arrays["headers"])
    if len(rows) != len(shards):
        raise damaged_array(f"{path}: holds {len(rows)} headers, of {len(shards)} shards")
    for row, shard in zip(rows.tolist(), shards, strict=True):
        shard.header = _header_of(row, shard, path)
    for number in ends_of:
        shards[number].ends = int(rows[number, FIELDS])


def _versions(shards: Iterable[Shard]) -> Iterator[str]:
    """The shards, and what tells the two objects of each from all others of their names."""
    for shard in shards:
        yield shard.prefix
        for info in (shard.known_tokens, shard.known_index):
            assert info is not None
            yield f"{info.size} {info.etag}"


def rows_of_headers(headers: Sequence[IndexHeader]) -> NDArray[np.int64]:
    """What is kept of headers, int64 [headers, FIELDS]."""
    rows = []
    for header in headers:
        code = dtype_code(header.dtype)
        rows.append((code, header.sequence_count, header.document_count, int(header.multimodal)))
    return np.array(rows, np.int64).reshape(-1, FIELDS)


def _header_of(row: list[int], shard: Shard, path: Path) -> IndexHeader:
    """Raises CacheError for a row that cannot be that of the shard."""
    code, sequences, documents, modes, _ = row
    expected_bytes = index_bytes(sequences, documents, multimodal=bool(modes))
    assert shard.known_index is not None
    if code not in DTYPE_OF_CODE or sequences < 0 or expected_bytes != shard.known_index.size:
        raise damaged_array(f"{path}: does not hold the header of {shard.index.url}")
    return IndexHeader(
        dtype=DTYPE_OF_CODE[code],
        sequence_count=sequences,
        document_count=documents,
        multimodal=bool(modes),
    )


def _digest(texts: Iterable[str]) -> str:
    # A zero byte is in no URL and no ETag.
    return hashlib.blake2b("\0".join(texts).encode(), digest_size=12).hexdigest()


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


def are_small(shards: Sequence[Shard]) -> bool:
    """Whether all `.idx` are small ones of one store that reads many of them at once."""
    store = shards[0].store
    if store.is_local:
        return False
    stores = {id(shard.store) for shard in shards}
    return len(stores) == 1 and all(shard.index_info.size <= READ_WHOLE for shard in shards)


def read_bodies(
    shards: Sequence[Shard], most_readers: int, more: Sequence[Part] = ()
) -> list[Buffer]:
    """Each `.idx`, whole, and behind them more parts of objects of the same store. Raises
    StorageError.
    """
    store = shards[0].store
    infos = [shard.index_info for shard in shards]
    parts = [*((info, 0, info.size) for info in infos), *more]
    began = time.monotonic()
    first = store.read_many(parts[:1], 1)
    is_near = time.monotonic() - began < NEAR
    readers = min(NEAR_READERS, most_readers) if is_near else most_readers
    return first + store.read_many(parts[1:], readers)


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


# --- content: which tokens it is ---------------------------------------------------------------

END_BYTES = 1 << 10
"""Bytes of tokens that are read at each end of a shard."""
TOKENS_READ_WHOLE = 16 << 10
"""Bytes of tokens that are read whole: one request takes less than two."""
AT_ONCE = 4
"""Requests at once for one dataset: two ends of two shards."""
_DIGITS = 16


def end_shards(token_bytes: Sequence[int]) -> list[int]:
    """The numbers of the first and the last shard that hold tokens; of a single one, or none."""
    numbers = range(len(token_bytes))
    first = next((number for number in numbers if token_bytes[number]), None)
    if first is None:
        return []
    last = next(number for number in reversed(numbers) if token_bytes[number])
    return [first] if first == last else [first, last]


def read_ends(shards: Sequence[Shard]) -> None:
    """Set `ends` of each shard for which it is not known, by requests that go out together.

    Raises ObjectNotFoundError, ObjectChangedError, FormatError, StorageError.
    """
    unread = [shard for shard in shards if shard.ends is None]
    stores = []
    parts = []
    for shard in unread:
        store, info = shard.tokens()
        of_shard = end_parts(info)
        parts += of_shard
        stores += [store] * len(of_shard)
    set_ends(unread, _read_parts(stores, parts))


def end_parts(info: ObjectInfo) -> list[Part]:
    """What is read of the tokens of a shard."""
    size = info.size
    if size <= TOKENS_READ_WHOLE:
        return [(info, 0, size)] if size else []
    return [(info, 0, END_BYTES), (info, size - END_BYTES, size)]


def set_ends(shards: Iterable[Shard], bodies: Iterable[Buffer]) -> None:
    """Set `ends` of shards. bodies: the `end_parts` of all of them, end to end."""
    unused = iter(bodies)
    for shard in shards:
        _, info = shard.tokens()
        read = b"".join(next(unused) for _ in end_parts(info))
        ends = read[:END_BYTES] + read[-END_BYTES:]
        # As it is kept on disk: an int64.
        shard.ends = int.from_bytes(xxhash.xxh3_64_digest(ends), "little", signed=True)


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


def _read_parts(stores: Sequence[Store], parts: Sequence[Part]) -> list[Buffer]:
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
