"""From a dataset's name to its shards."""

from __future__ import annotations

import fnmatch
import glob
import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from streammega.config import StorageConfig
from streammega.dataset.folder_listing import list_folder
from streammega.dataset.growing.names import appended_shards, named_version
from streammega.dataset.listing import FEW, NOTHING, Told, told_of, with_told
from streammega.dataset.manifest import MANIFEST, manifest_shards
from streammega.dataset.shards import (
    SUFFIXES,
    KnownShard,
    may_belong,
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
from streammega.kernels.collector import take_as_old
from streammega.storage import ObjectInfo, join_url, open_store, parent_url
from streammega.storage.fetch.threads import each
from streammega.storage.open import is_remote
from streammega.storage.versions import same_version

log = logging.getLogger(__name__)

Opened = TypeVar("Opened")
_Manifest = tuple[list[KnownShard], StreammegaError | None]
_Found = tuple[list[KnownShard], list[KnownShard], StreammegaError | None]
SIGNS = "*?["
"""What makes a pattern of a name, if nothing is called just that."""
TRIES = 5
"""Times that a dataset is looked up again when it was replaced while it was opened."""


def open_shards(
    name: str,
    storage: StorageConfig,
    open_all: Callable[[list[KnownShard]], Opened],
    finish: Callable[[], None] = lambda: None,
    told: Told = NOTHING,
    cache_dir: Path | None = None,
) -> Opened:
    """What `open_all` makes of a dataset's shards. A prefix that is no pair stands for the manifest
    of that name, if any.

    `finish` is called after that, for what is to be read of them at once. `told`: what listings
    told of this dataset and others, which is believed once. A dataset that is replaced meanwhile is
    looked up and opened again: it is the former one, or the new one. `cache_dir`: see `find_shards`.
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
            opened = _open_found(name, storage, open_all, seen, told_now, cache_dir)
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
    cache_dir: Path | None = None,
) -> Opened:
    """`open_shards`, once; `seen` gets what was found on the way."""
    pair = pair_told(name, told)
    if pair is not None:
        seen.append(pair)
        return open_all([pair])
    # What is told of thousands of shards lives on, and would have the collector look at all of it.
    take_as_old()
    shards = find_shards(name, storage, cache_dir)
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
        return open_all(_with_infos(listed, storage))
    try:
        return open_all(shards)
    except ObjectNotFoundError:
        if damage is not None:
            raise damage from None
        if not listed or own_name != strip_suffix(name):
            raise
    return open_all(_with_infos(listed, storage))


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
        is_pair = not name.endswith((".json", "/")) and not _has_signs(_base_name(name))
        if is_remote(name) and is_pair:
            prefixes.append(name)
    return told_of(prefixes, storage)


def find_pairs(name: str, storage: StorageConfig) -> list[str]:
    """The names of the shards that a dataset's name stands for, in order: see `find_shards`."""
    return [shard.name for shard in find_shards(name, storage)]


def find_shards(
    name: str, storage: StorageConfig, cache_dir: Path | None = None
) -> list[KnownShard]:
    """The shards a dataset's name stands for, in order, with what was told of them on the way.

    A prefix stands for itself, a manifest (`.json`) or a version (`web@2`, `web@2..5`) for what it
    lists, a folder (a name ending in /) or glob for all shards in it, in name order. What is there
    by the very name is taken before that is read as a glob. cache_dir: where it is kept how a
    folder is listed; None: nowhere. Raises ObjectNotFoundError for a folder
    or glob without shards, MissingShardsError with some of a set missing.
    """
    name = named_version(name, storage)
    if name.endswith(".json"):
        return _with_infos(manifest_shards(name, storage), storage)
    appended = appended_shards(name, storage)
    if appended is not None:
        return _with_infos(appended, storage)
    shards = _remote_shards(name, storage, cache_dir) if is_remote(name) else _local_shards(name)
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
    beside, stored, index = each(lambda look: look(), looks, len(looks))
    return [KnownShard(name=pair, stored=stored, index=index, is_alone=True)], *beside


def _info_or_none(url: str, storage: StorageConfig) -> ObjectInfo | None:
    """What a look at an object tells; None where it tells nothing. What opens it then looks again,
    and says what is wrong.
    """
    store, key = open_store(url, storage)
    try:
        return _told(store.info(key))
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


def _present(prefixes: list[str], storage: StorageConfig) -> list[str]:
    """Without shards that are being written in place of others, or were replaced: the manifest says
    which are the dataset's.

    Only where a name has the mark of such shards is a manifest read.
    """
    owners = set()
    for prefix in prefixes:
        owner = owner_of(prefix)
        if owner is not None:
            owners.add(owner)
    for owner in sorted(owners):
        may_be_its = [prefix for prefix in prefixes if may_belong(prefix, owner)]
        try:
            shards = manifest_shards(owner + MANIFEST, storage)
            listed = {strip_suffix(shard.name) for shard in shards}
        except ObjectNotFoundError:
            # What has a mark was never finished.
            listed = {prefix for prefix in may_be_its if owner_of(prefix) is None}
        if listed:
            replaced = set(may_be_its) - listed
            prefixes = [prefix for prefix in prefixes if prefix not in replaced]
    return prefixes


# --- local ----------------------------------------------------------------------------------------


def _local_shards(name: str) -> list[KnownShard] | None:
    """Of a folder or glob; None: the name is a prefix."""
    if is_local_folder(name):
        paths = _paths_in(name)
        indices = [path for path in paths if path.endswith(".idx")]
    elif _has_signs(name) and not _exists(name):
        indices = _matching_indices(name)
        paths = set()
        for folder in {os.path.dirname(path) for path in indices}:
            paths |= _paths_in(folder)
    else:
        return None
    prefixes = sorted({strip_suffix(path) for path in indices})
    shards = []
    for prefix in _present(prefixes, StorageConfig()):
        shards.append(KnownShard(name=_with_kind(prefix, paths)))
    return shards


def _paths_in(folder: str) -> set[str]:
    """The paths of all that lies in a folder; "" is the current one."""
    return {os.path.join(folder, entry) for entry in os.listdir(folder or ".")}


def _matching_indices(name: str) -> list[str]:
    """The `.idx` files that a pattern names, with their suffix or without."""
    folder, pattern = os.path.split(name)
    if os.path.isdir(folder):
        # The signs in a folder that is there are letters.
        name = os.path.join(glob.escape(folder), pattern)
    indices = [path for path in glob.glob(name) if path.endswith(".idx")]
    return indices or glob.glob(f"{name}.idx")


def _has_signs(name: str) -> bool:
    """Whether a name may be a pattern."""
    return any(sign in name for sign in SIGNS)


def is_local_folder(name: str) -> bool:
    """A local folder, unless there is a dataset of that very name: caches are often put there."""
    return os.path.isdir(name) and (name.endswith("/") or not _exists(name))


def _exists(name: str) -> bool:
    """Whether a dataset of that very name is there."""
    prefix = strip_suffix(name)
    return os.path.exists(f"{prefix}.idx") or os.path.exists(prefix + MANIFEST)


def _with_kind(prefix: str, there: Collection[str]) -> str:
    """A shard's name, by what lies beside its `.idx`."""
    for kind, suffix in SUFFIXES.items():
        if prefix + suffix in there:
            return named(prefix, kind)
    return prefix


# --- remote ---------------------------------------------------------------------------------------


def _remote_shards(
    name: str, storage: StorageConfig, cache_dir: Path | None
) -> list[KnownShard] | None:
    """Of a folder or glob; None: the name is a prefix."""
    folder, _, pattern = name.rpartition("/")
    if pattern and not _has_signs(pattern):
        return None
    try:
        there = _listed(folder, storage, cache_dir)
    except StorageError as error:
        if not pattern or "*" in pattern or error.transient:
            raise
        return None  # this store cannot be listed, and ? and [ are letters of many names
    exact = strip_suffix(pattern)
    if pattern and (f"{exact}.idx" in there or f"{exact}{MANIFEST}" in there):
        return None
    stems = sorted([item.removesuffix(".idx") for item in there if item.endswith(".idx")])
    if pattern:
        stems = [stem for stem in stems if _matches(stem, pattern)]
    before = join_url(folder, "")
    prefixes = _present([before + stem for stem in stems], storage)
    names = [before + _with_kind(prefix[len(before) :], there) for prefix in prefixes]
    return _from_listing([KnownShard(name=name) for name in names], there, storage)


def _base_name(name: str) -> str:
    """What follows the last slash."""
    _, _, last = name.rpartition("/")
    return last


def _matches(stem: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(stem, pattern) or fnmatch.fnmatchcase(f"{stem}.idx", pattern)


def _listed(
    folder: str, storage: StorageConfig, cache_dir: Path | None = None
) -> dict[str, ObjectInfo]:
    """The objects of a folder by their names in it; what lies deeper is not listed."""
    store, key = open_store(f"{folder}/", storage)
    # None of the keys has a slash behind the folder's.
    return {item.key[len(key) :]: item for item in list_folder(store, key, cache_dir)}


def _with_infos(shards: list[KnownShard], storage: StorageConfig) -> list[KnownShard]:
    """The shards of a manifest with what a listing of their folder tells; few, local or not to be
    listed: as they are.
    """
    if len(shards) <= FEW or not is_remote(shards[0].name):
        return shards
    take_as_old()  # what the manifest told
    told = told_of([shard.name for shard in shards], storage)
    if told.prefixes:
        return [with_told(shard.name, told, shard.entry) for shard in shards]
    try:
        there = _listed(parent_url(shards[0].name), storage)
    except StorageError as error:
        if error.transient:
            raise
        log.debug(
            "the folder of %s cannot be listed: every shard is asked for (%s)",
            shards[0].name,
            type(error).__name__,
        )
        return shards
    return _from_listing(shards, there, storage)


def _from_listing(
    shards: list[KnownShard], there: Mapping[str, ObjectInfo], storage: StorageConfig
) -> list[KnownShard]:
    """Shards with the sizes and ETags of a listing, where its ETags are those that
    reads will tell.
    """
    if not shards or not _agrees(shards[0], there, storage):
        return shards
    with_infos = []
    for shard in shards:
        prefix, kind = split_name(_base_name(shard.name))
        stored = _told(there.get(prefix + SUFFIXES[kind]))
        index = _told(there.get(f"{prefix}.idx"))
        known = KnownShard(name=shard.name, stored=stored, index=index, entry=shard.entry)
        with_infos.append(known)
    return with_infos


def _told(info: ObjectInfo | None) -> ObjectInfo | None:
    """What a listing or a look told, if it told an ETag: without one, replaced objects would not be
    noticed.
    """
    return info if info is not None and info.etag else None


def _agrees(shard: KnownShard, there: Mapping[str, ObjectInfo], storage: StorageConfig) -> bool:
    """Whether a listing tells the ETags that other answers do: where it does not, a run would end
    at its first read.
    """
    prefix, _ = split_name(shard.name)
    listed = _told(there.get(f"{_base_name(prefix)}.idx"))
    if listed is None:
        return False
    store, key = open_store(f"{prefix}.idx", storage)
    info = store.info(key)
    return info.size == listed.size and same_version(info.etag, listed.etag)
