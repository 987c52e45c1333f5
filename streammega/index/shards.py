"""Names of token shards, and how each kind is opened: `.bin`, `.bin.zst` (seekable frames), `.tar`; each with an `.idx`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import numpy as np

from streammega.config import StorageConfig
from streammega.errors import FormatError
from streammega.index.cache import cached_object, default_cache_dir
from streammega.index.format import HEADER_BYTES, parse_header, parse_index
from streammega.index.tar import layout, stored_bytes
from streammega.storage import Store, open_store
from streammega.storage.derived import DerivedStore, open_frames
from streammega.storage.local import LocalStore

Kind = Literal["bin", "zst", "tar"]
SUFFIXES: dict[Kind, str] = {"bin": ".bin", "zst": ".bin.zst", "tar": ".tar"}
_NUMBERED = re.compile(r"^(.*)-(\d{5,})-of-(\d{5,})$")


def split_name(name: str) -> tuple[str, Kind]:
    """(prefix, kind) of a shard: a prefix alone is a `.bin`; users paste names with any of the suffixes."""
    for kind, suffix in (("zst", ".bin.zst"), ("tar", ".tar"), ("bin", ".bin"), ("bin", ".idx")):
        if name.endswith(suffix):
            return name[: -len(suffix)], kind  # type: ignore[return-value]
    return name, "bin"


def named(prefix: str, kind: Kind) -> str:
    """The name of a shard: a `.bin`'s is its prefix."""
    return prefix if kind == "bin" else prefix + SUFFIXES[kind]


def strip_suffix(name: str) -> str:
    """A prefix without `.idx`, `.bin`, `.bin.zst` or `.tar`: users paste any of them."""
    return split_name(name)[0]


def shard_name(prefix: str, number: int, count: int) -> str:
    """The prefix of one of several shards. The count is part of it, so that a missing one is noticed."""
    return f"{prefix}-{number:05d}-of-{count:05d}"


def missing_shards(names: Iterable[str]) -> list[str]:
    """Of numbered shards, the prefixes that should be there too and are not, at most a few of each set."""
    sets: dict[tuple[str, int], set[int]] = {}
    for name in names:
        if found := _NUMBERED.match(split_name(name)[0]):
            sets.setdefault((found[1], int(found[3])), set()).add(int(found[2]))
    missing = []
    for (stem, count), there in sets.items():
        gone = (number for number in range(count) if number not in there)
        missing += [shard_name(stem, number, count) for number, _ in zip(gone, range(3), strict=False)]
    return missing


def open_tokens(name: str, storage: StorageConfig, index_cache_dir: Path | None = None) -> tuple[Store, str]:
    """The store and key from which a shard's tokens are read as one little-endian array, whatever its kind.

    Raises FormatError, StorageError.
    """
    prefix, kind = split_name(name)
    store, key = open_store(prefix + SUFFIXES[kind], storage)
    if kind == "bin":
        return store, key
    if kind == "zst":
        return open_frames(store, key), key
    return _open_members(store, key, prefix, storage, index_cache_dir or default_cache_dir()), key


def _open_members(store: Store, key: str, prefix: str, storage: StorageConfig, cache_dir: Path) -> DerivedStore:
    index_store, index_key = open_store(f"{prefix}.idx", storage)
    url, info = index_store.url(index_key), index_store.info(index_key)
    path = Path(index_key)
    if not isinstance(index_store, LocalStore):
        head = index_store.read_ranges(index_key, [0], [min(HEADER_BYTES, info.size)], info.etag)[0]
        parse_header(head, info.size, url)  # before a large foreign file is downloaded
        path = cached_object(index_store, info, cache_dir, storage.part_bytes)
    arrays = parse_index(LocalStore().view(str(path)), url)
    if len(arrays.sequence_lengths) and int(arrays.sequence_lengths.min()) < 0:  # where members lie follows from them
        bad = int(np.argmax(arrays.sequence_lengths < 0))
        raise FormatError(f"{url}: sequence {bad} has the negative length {arrays.sequence_lengths[bad]}; rebuild the .idx")
    lengths, width, multimodal = arrays.sequence_lengths, arrays.dtype.itemsize, arrays.sequence_modes is not None
    tar, expected = store.info(key), stored_bytes(lengths, width, multimodal)
    if tar.size != expected:
        raise FormatError(
            f"{store.url(key)}: has {tar.size} bytes, its .idx speaks of {expected}; it is cut short, or was not written by this "
            f"library (convert reads tars of any kind)"
        )
    return DerivedStore(store, tar, layout(lengths, width, multimodal))
