"""Reading a shard: its tokens as one array, whatever their kind, and its `.idx`.

A `Shard` is a value that holds names and counts; these functions open what it names.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from streammega.config import StorageConfig
from streammega.dataset.idx import (
    HEADER_BYTES,
    LENGTH,
    OFFSET,
    IndexArrays,
    check_end,
    check_index,
    check_whole_end,
    parse_header,
    parse_index,
)
from streammega.dataset.local_cache import cache_folder, cached_copy, map_local_copy
from streammega.dataset.manifest import Shard
from streammega.dataset.names import Kind
from streammega.dataset.tar import layout, stored_bytes
from streammega.errors import FormatError
from streammega.storage import ObjectInfo, Store, open_store
from streammega.storage.derived_stores import DerivedStore, LazyView, View
from streammega.storage.seekable_zstd import read_frames

# --- tokens ---------------------------------------------------------------------------------------


def open_stored(shard: Shard, storage: StorageConfig) -> tuple[Store, ObjectInfo]:
    """The store of the tokens, and their object as it is stored."""
    store, key = open_store(shard.url, storage)
    return store, ObjectInfo(key=key, size=shard.bytes, etag=shard.etag)


def open_tokens(shard: Shard, storage: StorageConfig) -> tuple[Store, ObjectInfo]:
    """The store that shows the tokens as one little-endian array, and that array's name and size.

    The table of frames or members is read with the first tokens.
    """
    store, info = open_stored(shard, storage)
    if shard.kind == "bin":
        return store, info
    view = LazyView(shard.token_bytes, partial(_sized_view, shard, storage))
    shown = DerivedStore(store, info, view)
    return shown, shown.info(info.key)


def _sized_view(shard: Shard, storage: StorageConfig) -> View:
    """How the tokens are made of what is stored. Raises FormatError, StorageError."""
    store, info = open_stored(shard, storage)
    view = token_view(shard.kind, store, info, lambda: index_arrays(shard, storage))
    check_expected(store.url(info.key), "bytes of tokens", view.size, shard.token_bytes)
    return view


def token_view(
    kind: Kind, store: Store, info: ObjectInfo, read_arrays: Callable[[], IndexArrays]
) -> View:
    """How the tokens of a `.bin.zst` or a `.tar` are made of what is stored.

    read_arrays: gives the arrays of its `.idx`, which tars need. Raises FormatError, StorageError.
    """
    if kind == "zst":
        return read_frames(store, info)
    arrays = read_arrays()
    url = store.url(info.key)
    lengths = arrays.sequence_lengths
    # The places of members follow from the lengths: a negative one would lead anywhere.
    if len(lengths) and int(lengths.min()) < 0:
        bad = int(np.argmax(lengths < 0))
        raise FormatError(
            f"{url.removesuffix('.tar')}.idx: sequence {bad} has the negative length {lengths[bad]}; "
            "copy it again, or convert again"
        )
    itemsize = arrays.dtype.itemsize
    multimodal = arrays.sequence_modes is not None
    expected = stored_bytes(lengths, itemsize, multimodal)
    if info.size != expected:
        raise FormatError(
            f"{url}: has {info.size} bytes, and by its .idx {expected}; it is cut "
            "short, or was not written by this library (convert reads tars of any kind)"
        )
    return layout(lengths, itemsize, multimodal)


# --- the `.idx` -----------------------------------------------------------------------------------


def open_index(shard: Shard, storage: StorageConfig) -> tuple[Store, ObjectInfo]:
    """The store of the `.idx`, and its object."""
    store, key = open_store(shard.index_url, storage)
    return store, ObjectInfo(key=key, size=shard.index_bytes, etag=shard.index_etag)


def map_index(store: Store, info: ObjectInfo, storage: StorageConfig) -> memoryview:
    """All of an `.idx`, mapped and not checked. A remote one is copied to this node first.

    Raises ObjectNotFoundError, CacheError, FormatError, StorageError.
    """
    if store.is_local:
        return store.view(info.key, info.etag)
    return map_local_copy(store, info, cache_folder(storage), storage.tuning.max_request_bytes)


def read_arrays(store: Store, info: ObjectInfo, storage: StorageConfig) -> IndexArrays:
    """The arrays of an `.idx`, as views of `map_index`. Raises as that does."""
    url = store.url(info.key)
    # The header first, so that a large file of another kind is not downloaded. A copy was checked.
    if not (store.is_local or cached_copy(store, info, cache_folder(storage)).exists()):
        (head,) = store.read(info.key, [(0, min(HEADER_BYTES, info.size))], info.etag)
        parse_header(head, info.size, url)
    return parse_index(map_index(store, info, storage), url)


def index_arrays(shard: Shard, storage: StorageConfig) -> IndexArrays:
    """The arrays of its `.idx`. Raises as `map_index` does, and FormatError for other counts than the
    shard has.
    """
    arrays = read_arrays(*open_index(shard, storage), storage)
    check_shard(shard, arrays.dtype, arrays.num_sequences, arrays.num_documents)
    return arrays


def checked_arrays(shard: Shard, storage: StorageConfig, *, is_packed: bool) -> IndexArrays:
    """The same. Every sequence is within the tokens; if all are end to end, they end with these.

    Raises as `index_arrays` does.
    """
    arrays = index_arrays(shard, storage)
    # Not the header alone: bounds of a forged or cut file would lead past the tokens.
    names = shown_urls(shard, storage)
    end = check_index(arrays, shard.token_bytes, *names)
    if not is_packed:
        check_whole_end(arrays, end, shard.token_bytes, *names)
    return arrays


def token_at(shard: Shard, sequence: int, storage: StorageConfig) -> int:
    """The token at which a sequence starts; past the last sequence, how many there are.

    Raises FormatError, StorageError.
    """
    # Both ends are known without a read: most splits begin or end there.
    if sequence >= shard.sequences:
        return shard.tokens
    if sequence == 0:
        return 0
    store, info = open_index(shard, storage)
    start = HEADER_BYTES + LENGTH.itemsize * shard.sequences + OFFSET.itemsize * sequence
    (stored,) = store.read(info.key, [(start, start + OFFSET.itemsize)], info.etag)
    offset = int.from_bytes(stored, "little", signed=True)
    itemsize = shard.token_dtype.itemsize
    if not 0 <= offset <= shard.token_bytes or offset % itemsize:
        raise FormatError(
            f"{store.url(info.key)}: sequence {sequence} starts at byte {offset} of "
            f"{shard.token_bytes}; copy it again, or convert again"
        )
    return offset // itemsize


def check_last_end(shard: Shard, storage: StorageConfig) -> None:
    """Raise FormatError unless the last sequence ends where the tokens do, for who reads all tokens as
    sequences end to end.
    """
    if shard.last_end != -1:
        check_end(shard.last_end, shard.token_bytes, *shown_urls(shard, storage))


def shown_urls(shard: Shard, storage: StorageConfig) -> tuple[str, str]:
    """The URLs of the `.idx` and of the tokens for messages, without credentials."""
    index_store, index = open_index(shard, storage)
    store, info = open_stored(shard, storage)
    return index_store.url(index.key), store.url(info.key)


def check_shard(shard: Shard, dtype: object, sequences: int, documents: int) -> None:
    """Raise FormatError unless an `.idx` has what its shard has."""
    url = shard.index_url
    check_expected(url, "as dtype", dtype, np.dtype(shard.dtype))
    check_expected(url, "sequences", sequences, shard.sequences)
    check_expected(url, "documents", documents, shard.documents)


def check_expected(url: str, what: str, actual: object, expected: object) -> None:
    """Raise FormatError unless a shard has what its manifest says."""
    if actual != expected:
        raise FormatError(
            f"{url}: has {actual} {what}, its manifest says {expected}; it is cut short, or another "
            "dataset's: copy or convert it again (where the manifest is the stale one, remove that)"
        )
