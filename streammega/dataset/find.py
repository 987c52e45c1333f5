"""From a dataset's name to its shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

from streammega.config import StorageConfig
from streammega.dataset.folders import (
    base_name,
    has_signs,
    if_told,
    local_shards,
    remote_shards,
    with_infos,
)
from streammega.dataset.growing.names import appended_shards, named_version
from streammega.dataset.listing import NOTHING, Told, told_of, with_told
from streammega.dataset.manifest import MANIFEST, manifest_shards
from streammega.dataset.shards import (
    SUFFIXES,
    KnownShard,
    missing_shards,
    named,
    owner_of,
    split_name,
    strip_suffix,
)
from streammega.errors import (
    FormatError,
    MissingShardsError,
    ObjectChangedError,
    ObjectNotFoundError,
    StorageError,
    StreammegaError,
)
from streammega.storage import ObjectInfo, open_store
from streammega.storage.open import is_remote
from streammega.storage.thread_pool import parallel_map

Opened = TypeVar("Opened")
_Manifest = tuple[list[KnownShard], StreammegaError | None]
_Found = tuple[list[KnownShard], list[KnownShard], StreammegaError | None]
TRIES = 5
"""Times that a dataset is looked up again when it was replaced while it was opened."""


def open_shards(
    name: str,
    storage: StorageConfig,
    open_all: Callable[[list[KnownShard]], Opened],
    finish: Callable[[], None] = lambda: None,
    told: Told = NOTHING,
) -> Opened:
    """What `open_all` makes of a dataset's shards. A prefix that is no pair stands for the manifest
    of that name, if any.

    `finish` is called after that, for what is to be read of them at once. `told`: what listings
    told of this dataset and others, which is believed once. A dataset that is replaced meanwhile is
    looked up and opened again: it is the former one, or the new one.
    """
    # Held meanwhile, for all that is opened on the way: a store ends with its last user, and its
    # client and connections with it.
    _store, _ = open_store(name, storage)
    name = named_version(name, storage)
    for number in range(TRIES):
        is_first = number == 0
        is_last = number == TRIES - 1
        seen: list[KnownShard] = []
        try:
            told_now = told if is_first else NOTHING
            opened = _open_found(name, storage, open_all, seen, told_now)
            finish()
        except ObjectChangedError:
            if is_last:
                raise
        except (ObjectNotFoundError, FormatError):
            if is_last:
                raise
            is_as_before = _look(name, storage) == seen
            # Local shards have their plain names again in the end: that nothing seems to have
            # changed says little of them once.
            says_little = is_first and not is_remote(name)
            if is_as_before and not says_little:
                raise
        else:
            return opened
    raise AssertionError("unreachable")


def _look(name: str, storage: StorageConfig) -> list[KnownShard]:
    """What a name stands for now, as `_open_found` sees it; [] for nothing."""
    seen: list[KnownShard] = []
    with suppress(ObjectNotFoundError, ObjectChangedError, FormatError):
        _open_found(name, storage, lambda shards: None, seen)
    return seen


def _open_found(
    name: str,
    storage: StorageConfig,
    open_all: Callable[[list[KnownShard]], Opened],
    seen: list[KnownShard],
    told: Told = NOTHING,
) -> Opened:
    """`open_shards`, once; `seen` gets what was found on the way."""
    pair = pair_told(name, told)
    if pair is not None:
        seen.append(pair)
        return open_all([pair])
    shards = find_shards(name, storage)
    if not _is_prefix(shards, name):
        seen += shards
        return open_all(shards)
    own_name = shards[0].name
    shards, listed, damage = _pair_and_manifest(name, own_name, storage)
    seen += shards + listed
    if [shard.name for shard in listed] == [own_name]:
        (of_pair,) = shards
        (of_manifest,) = listed
        return open_all([replace(of_pair, entry=of_manifest.entry)])
    # The pair of that name was replaced, and is being removed.
    if listed and owner_of(listed[0].name) == strip_suffix(name):
        return open_all(with_infos(listed, storage))
    try:
        return open_all(shards)
    except ObjectNotFoundError:
        if damage is not None:
            raise damage from None
        if not listed or own_name != strip_suffix(name):
            raise
    return open_all(with_infos(listed, storage))


def pair_told(name: str, told: Told) -> KnownShard | None:
    """The pair of that very name, if listings told all of it, and of no manifest beside it."""
    prefix = strip_suffix(name)
    if prefix not in told.prefixes or prefix + MANIFEST in told.objects:
        return None
    shard = with_told(named(*split_name(name)), told)
    return None if shard.stored is None or shard.index is None else shard


def told_of_prefixes(names: Sequence[str], storage: StorageConfig) -> Told:
    """What listings tell of those names of a blend that stand for shards of remote stores by
    themselves. Raises StorageError.
    """
    prefixes = []
    for name in names:
        is_pair = not name.endswith((".json", "/")) and not has_signs(base_name(name))
        if is_remote(name) and is_pair:
            prefixes.append(name)
    return told_of(prefixes, storage)


def find_pairs(name: str, storage: StorageConfig) -> list[str]:
    """The names of the shards that a dataset's name stands for, in order: see `find_shards`."""
    return [shard.name for shard in find_shards(name, storage)]


def find_shards(name: str, storage: StorageConfig) -> list[KnownShard]:
    """The shards a dataset's name stands for, in order, with what was told of them on the way.

    A prefix stands for itself, a manifest (`.json`) or a version (`web@2`, `web@2..5`) for what it
    lists, a folder (a name ending in /) or glob for all shards in it, in name order. What is there
    by the very name is taken before that is read as a glob. Raises ObjectNotFoundError for a folder
    or glob without shards, MissingShardsError with some of a set missing.
    """
    name = named_version(name, storage)
    if name.endswith(".json"):
        return with_infos(manifest_shards(name, storage), storage)
    appended = appended_shards(name, storage)
    if appended is not None:
        return with_infos(appended, storage)
    shards = remote_shards(name, storage) if is_remote(name) else local_shards(name)
    if shards is None:
        return [KnownShard(name=named(*split_name(name)))]
    if not shards:
        raise ObjectNotFoundError(f"{name}: holds no pair of .bin and .idx; check the path")
    missing = missing_shards(shard.name for shard in shards)
    if missing:
        raise MissingShardsError(
            f"{name}: shards of a set are missing, such as {', '.join(missing)}; was the "
            "conversion interrupted?"
        )
    return shards


def _is_prefix(shards: list[KnownShard], name: str) -> bool:
    """Whether a name stands for one shard of its own, and nothing is known of that."""
    return shards == [KnownShard(name=named(*split_name(name)))]


def _pair_and_manifest(name: str, pair: str, storage: StorageConfig) -> _Found:
    """The pair that a prefix names, with what looks at its two objects told, and as
    `_manifest_beside` says, looked up side by side: each is an answer from far away.
    """
    if not is_remote(name):
        return [KnownShard(name=pair)], *_manifest_beside(name, storage)
    prefix, kind = split_name(pair)
    looks: list[Callable[[], Any]] = [
        lambda: _manifest_beside(name, storage),
        lambda: _info_or_none(prefix + SUFFIXES[kind], storage),
        lambda: _info_or_none(f"{prefix}.idx", storage),
    ]
    beside, stored, index = parallel_map(lambda look: look(), looks, len(looks))
    return [KnownShard(name=pair, stored=stored, index=index, is_alone=True)], *beside


def _info_or_none(url: str, storage: StorageConfig) -> ObjectInfo | None:
    """What a look at an object tells; None where it tells nothing. What opens it then looks again,
    and says what is wrong.
    """
    store, key = open_store(url, storage)
    try:
        return if_told(store.info(key))
    except StorageError as error:
        if error.transient:
            raise
        return None


def _manifest_beside(name: str, storage: StorageConfig) -> _Manifest:
    """What the manifest of a prefix lists, if there is one; or why it cannot be read, which matters
    only without a pair.
    """
    try:
        return manifest_shards(strip_suffix(name) + MANIFEST, storage), None
    except FormatError as error:
        return [], error
    except StorageError as error:
        if error.transient:
            raise
        return [], None  # without the right to list, S3 answers 403 for what is not there
