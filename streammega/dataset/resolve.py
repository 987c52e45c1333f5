"""From the name of a dataset to its shards: a prefix, a manifest, a version, a folder or a glob, on a
local disk or in a bucket.
"""

from __future__ import annotations

import fnmatch
import glob
import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from streammega.config import StorageConfig
from streammega.dataset.manifest import MANIFEST, manifest_shards
from streammega.dataset.shard import (
    SUFFIXES,
    ManifestEntry,
    ShardInfo,
    may_belong,
    missing_shards,
    named,
    owner_of,
    split_name,
    strip_suffix,
)
from streammega.dataset.versions import base_name, resolve_version, shards_between_versions
from streammega.errors import (
    FormatError,
    MissingShardsError,
    ObjectChangedError,
    ObjectNotFoundError,
    StorageError,
    StreammegaError,
)
from streammega.storage import ObjectInfo, join_url, open_store, parent_url
from streammega.storage.etags import same_version
from streammega.storage.open import is_remote
from streammega.storage.store import NotListedBetween, Store
from streammega.storage.thread_pool import parallel_map

FEW = 8
"""Up to so many shards are asked for one by one; a listing tells of 1,000 objects, but of others
too.
"""
GROUP = 480
"""Shards of one listing: their tokens and indices, and some others, are one answer of 1,000."""
MOST_OBJECTS = 3000
"""Of one listing: where so many others lie between the shards, these are looked up instead."""
LISTERS = 32
"""Listings at once: those of 15,360 shards."""
_AFTER_A_DOT = "/"
"""The character after a dot: what begins with a name and a dot lies before the name and this."""


@dataclass(frozen=True, kw_only=True)
class Listing:
    """All objects of the shards `prefixes`, by their URLs."""

    prefixes: frozenset[str] = frozenset()
    objects: Mapping[str, ObjectInfo] = field(default_factory=dict)

    def object_at(self, url: str) -> ObjectInfo | None:
        """An object, if it was listed with an ETag: without one, replaced ones would not be
        noticed.
        """
        info = self.objects.get(url)
        return info if info is not None and info.etag else None


EMPTY_LISTING = Listing()


def list_shards(names: Sequence[str], storage: StorageConfig) -> Listing:
    """What listings tell of shards of remote stores, by their names; of few, and of those that no
    listing between two keys tells of, nothing.

    Raises StorageError for what may pass when it is tried again.
    """
    prefixes_of_root: dict[str, list[str]] = {}
    for name in names:
        prefix, _ = split_name(name)
        root = prefix[: _length_of_root(prefix)]
        prefixes_of_root.setdefault(root, []).append(prefix)
    listed_prefixes: set[str] = set()
    objects: dict[str, ObjectInfo] = {}
    for root, prefixes in prefixes_of_root.items():
        store, _ = open_store(prefixes[0], storage)
        if not store.can_list_between:
            continue
        listed = _list_groups(store, [prefix[len(root) :] for prefix in prefixes])
        if listed is None:
            continue
        listed_prefixes.update(prefixes)
        objects.update([(root + info.key, info) for info in listed])
    return Listing(prefixes=frozenset(listed_prefixes), objects=objects)


def _length_of_root(url: str) -> int:
    """Of what stands before the key within a bucket, with its slash."""
    return url.find("/", url.find("://") + len("://")) + 1


def with_listing(name: str, listing: Listing, entry: ManifestEntry | None = None) -> ShardInfo:
    """A shard with what a listing and a manifest say of it."""
    prefix, kind = split_name(name)
    stored = listing.object_at(prefix + SUFFIXES[kind])
    index = listing.object_at(f"{prefix}.idx")
    return ShardInfo(name=name, stored=stored, index=index, entry=entry)


def _list_groups(store: Store, keys: list[str]) -> list[ObjectInfo] | None:
    """The objects of shards, and some of those that lie between them; None where listings do not
    tell them, or not their ETags.
    """
    if len(keys) <= FEW:
        return None
    # As their objects lie, all of whose names go on by a dot.
    ordered = sorted(keys, key=lambda key: f"{key}.")
    groups = [ordered[first : first + GROUP] for first in range(0, len(ordered), GROUP)]

    looked: list[ObjectInfo] = []

    def list_group(number: int) -> Sequence[ObjectInfo] | None:
        if number == len(groups):
            looked.extend(_look_at(store, f"{ordered[0]}.idx"))
            return []
        group = groups[number]
        with suppress(NotListedBetween):
            return store.list_between(group[0], group[-1] + _AFTER_A_DOT, MOST_OBJECTS)
        return None

    # The look beside the listings: it would be another answer to wait for.
    objects: list[ObjectInfo] = []
    for part in parallel_map(list_group, range(len(groups) + 1), LISTERS):
        if part is None:
            return None
        objects += part
    return objects if _etags_agree(objects, looked) else None


def _look_at(store: Store, key: str) -> list[ObjectInfo]:
    """What another answer than a listing tells of an object; nothing, if it is not there."""
    try:
        return [store.info(key)]
    except ObjectNotFoundError:
        return []  # whoever opens it says what is missing


def _etags_agree(listed: Sequence[ObjectInfo], looked: Sequence[ObjectInfo]) -> bool:
    """Whether a listing tells the ETags that other answers do: where it does not, a run would end
    at its first read.
    """
    for info in looked:
        for other in listed:
            if other.key == info.key:
                is_same = info.size == other.size and same_version(info.etag, other.etag)
                return bool(other.etag) and is_same
    return False


Opened = TypeVar("Opened")
_Manifest = tuple[list[ShardInfo], StreammegaError | None]
_Found = tuple[list[ShardInfo], list[ShardInfo], StreammegaError | None]
TRIES = 5
"""Times that a dataset is looked up again when it was replaced while it was opened."""


def open_shards(
    name: str,
    storage: StorageConfig,
    open_all: Callable[[list[ShardInfo]], Opened],
    finish: Callable[[], None] = lambda: None,
    listing: Listing = EMPTY_LISTING,
) -> Opened:
    """What `open_all` makes of a dataset's shards. A prefix that is no pair stands for the manifest
    of that name, if any.

    `finish` is called after that, for what is to be read of them at once. `listing`: one that was
    made earlier; it is trusted for the first attempt only. A dataset that is replaced meanwhile is
    looked up and opened again: it is the former one, or the new one.
    """
    # Held meanwhile, for all that is opened on the way: a store ends with its last user, and its
    # client and connections with it.
    _store, _ = open_store(name, storage)
    name = resolve_version(name, storage)
    for number in range(TRIES):
        is_first = number == 0
        is_last = number == TRIES - 1
        seen: list[ShardInfo] = []
        try:
            listing_now = listing if is_first else EMPTY_LISTING
            opened = _open_found(name, storage, open_all, seen, listing_now)
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


def _look(name: str, storage: StorageConfig) -> list[ShardInfo]:
    """What a name stands for now, as `_open_found` sees it; [] for nothing."""
    seen: list[ShardInfo] = []
    with suppress(ObjectNotFoundError, ObjectChangedError, FormatError):
        _open_found(name, storage, lambda shards: None, seen)
    return seen


def _open_found(
    name: str,
    storage: StorageConfig,
    open_all: Callable[[list[ShardInfo]], Opened],
    seen: list[ShardInfo],
    listing: Listing = EMPTY_LISTING,
) -> Opened:
    """`open_shards`, once; `seen` gets what was found on the way."""
    pair = listed_pair(name, listing)
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


def listed_pair(name: str, listing: Listing) -> ShardInfo | None:
    """The pair of that very name, if a listing has all of it, and no manifest of its name."""
    prefix = strip_suffix(name)
    if prefix not in listing.prefixes or prefix + MANIFEST in listing.objects:
        return None
    shard = with_listing(named(*split_name(name)), listing)
    return None if shard.stored is None or shard.index is None else shard


def list_datasets(names: Sequence[str], storage: StorageConfig) -> Listing:
    """What listings tell of those names of a blend that stand for shards of remote stores by
    themselves. Raises StorageError.
    """
    prefixes = []
    for name in names:
        is_pair = not name.endswith((".json", "/")) and not is_glob(base_name(name))
        if is_remote(name) and is_pair:
            prefixes.append(name)
    return list_shards(prefixes, storage)


def find_pairs(name: str, storage: StorageConfig) -> list[str]:
    """The names of the shards that a dataset's name stands for, in order: see `find_shards`."""
    return [shard.name for shard in find_shards(name, storage)]


def find_shards(name: str, storage: StorageConfig) -> list[ShardInfo]:
    """The shards a dataset's name stands for, in order, with what listings and manifests say of them.

    A prefix stands for itself, a manifest (`.json`) or a version (`web@2`, `web@2..5`) for what it
    lists, a folder (a name ending in /) or glob for all shards in it, in name order. What is there
    by the very name is taken before that is read as a glob. Raises ObjectNotFoundError for a folder
    or glob without shards, MissingShardsError with some of a set missing.
    """
    name = resolve_version(name, storage)
    if name.endswith(".json"):
        return with_infos(manifest_shards(name, storage), storage)
    appended = shards_between_versions(name, storage)
    if appended is not None:
        return with_infos(appended, storage)
    shards = remote_shards(name, storage) if is_remote(name) else local_shards(name)
    if shards is None:
        return [ShardInfo(name=named(*split_name(name)))]
    if not shards:
        raise ObjectNotFoundError(f"{name}: holds no pair of .bin and .idx; check the path")
    missing = missing_shards(shard.name for shard in shards)
    if missing:
        raise MissingShardsError(
            f"{name}: shards of a set are missing, such as {', '.join(missing)}; was the "
            "conversion interrupted?"
        )
    return shards


def _is_prefix(shards: list[ShardInfo], name: str) -> bool:
    """Whether a name stands for one shard of its own, and nothing is known of that."""
    return shards == [ShardInfo(name=named(*split_name(name)))]


def _pair_and_manifest(name: str, pair: str, storage: StorageConfig) -> _Found:
    """The pair that a prefix names, with the answers of requests for its two objects, and as
    `_manifest_beside` says, looked up side by side: each is an answer from far away.
    """
    if not is_remote(name):
        return [ShardInfo(name=pair)], *_manifest_beside(name, storage)
    prefix, kind = split_name(pair)
    looks: list[Callable[[], Any]] = [
        lambda: _manifest_beside(name, storage),
        lambda: _info_or_none(prefix + SUFFIXES[kind], storage),
        lambda: _info_or_none(f"{prefix}.idx", storage),
    ]
    beside, stored, index = parallel_map(lambda look: look(), looks, len(looks))
    return [ShardInfo(name=pair, stored=stored, index=index, is_alone=True)], *beside


def _info_or_none(url: str, storage: StorageConfig) -> ObjectInfo | None:
    """What a look at an object tells; None where it tells nothing. What opens it then looks again,
    and says what is wrong.
    """
    store, key = open_store(url, storage)
    try:
        return if_has_etag(store.info(key))
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


log = logging.getLogger(__name__)

GLOB_CHARS = "*?["
"""What makes a pattern of a name, if nothing is called just that."""


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


def local_shards(name: str) -> list[ShardInfo] | None:
    """Of a folder or glob; None: the name is a prefix."""
    if is_local_folder(name):
        paths = _paths_in(name)
        indices = [path for path in paths if path.endswith(".idx")]
    elif is_glob(name) and not _exists(name):
        indices = _matching_indices(name)
        paths = set()
        for folder in {os.path.dirname(path) for path in indices}:
            paths |= _paths_in(folder)
    else:
        return None
    prefixes = sorted({strip_suffix(path) for path in indices})
    shards = []
    for prefix in _present(prefixes, StorageConfig()):
        shards.append(ShardInfo(name=_with_kind(prefix, paths)))
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


def is_glob(name: str) -> bool:
    """Whether a name may be a pattern."""
    return any(sign in name for sign in GLOB_CHARS)


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


def remote_shards(name: str, storage: StorageConfig) -> list[ShardInfo] | None:
    """Of a folder or glob; None: the name is a prefix."""
    folder, _, pattern = name.rpartition("/")
    if pattern and not is_glob(pattern):
        return None
    try:
        there = _listed(folder, storage)
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
    return _from_listing([ShardInfo(name=name) for name in names], there, storage)


def _matches(stem: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(stem, pattern) or fnmatch.fnmatchcase(f"{stem}.idx", pattern)


def _listed(folder: str, storage: StorageConfig) -> dict[str, ObjectInfo]:
    """The objects of a folder by their names in it; what lies deeper is not listed."""
    store, key = open_store(f"{folder}/", storage)
    # None of the keys has a slash behind the folder's.
    return {item.key[len(key) :]: item for item in store.list(key, recursive=False)}


def with_infos(shards: list[ShardInfo], storage: StorageConfig) -> list[ShardInfo]:
    """The shards of a manifest with what a listing of their folder tells; few, local or not to be
    listed: as they are.
    """
    if len(shards) <= FEW or not is_remote(shards[0].name):
        return shards
    listing = list_shards([shard.name for shard in shards], storage)
    if listing.prefixes:
        return [with_listing(shard.name, listing, shard.entry) for shard in shards]
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
    shards: list[ShardInfo], there: Mapping[str, ObjectInfo], storage: StorageConfig
) -> list[ShardInfo]:
    """Shards with the sizes and ETags of a listing, where its ETags are those that
    reads will tell.
    """
    if not shards or not _matches_listing(shards[0], there, storage):
        return shards
    with_infos = []
    for shard in shards:
        prefix, kind = split_name(base_name(shard.name))
        stored = if_has_etag(there.get(prefix + SUFFIXES[kind]))
        index = if_has_etag(there.get(f"{prefix}.idx"))
        known = ShardInfo(name=shard.name, stored=stored, index=index, entry=shard.entry)
        with_infos.append(known)
    return with_infos


def if_has_etag(info: ObjectInfo | None) -> ObjectInfo | None:
    """What an answer says of an object, if it has an ETag: without one, replaced objects would not be
    noticed.
    """
    return info if info is not None and info.etag else None


def _matches_listing(
    shard: ShardInfo, there: Mapping[str, ObjectInfo], storage: StorageConfig
) -> bool:
    """Whether a listing tells the ETags that other answers do: where it does not, a run would end
    at its first read.
    """
    prefix, _ = split_name(shard.name)
    listed = if_has_etag(there.get(f"{base_name(prefix)}.idx"))
    if listed is None:
        return False
    store, key = open_store(f"{prefix}.idx", storage)
    info = store.info(key)
    return info.size == listed.size and same_version(info.etag, listed.etag)
