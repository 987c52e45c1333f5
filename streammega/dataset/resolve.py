"""From the name of a dataset to its shards: a prefix, a manifest, a version, a folder or a glob, on a
local disk or in a bucket. What listings and manifests say of them is known then.
"""

from __future__ import annotations

import fnmatch
import glob
import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from streammega.config import StorageConfig
from streammega.dataset.manifest import Manifest, check_counts, read_manifest, shard_names
from streammega.dataset.names import (
    MANIFEST,
    SUFFIXES,
    may_belong,
    missing_shards,
    named,
    owner_of,
    split_name,
    strip_suffix,
)
from streammega.dataset.shard import Shard
from streammega.dataset.versions import base_name, read_between_versions, resolve_version
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
from streammega.storage.store import Store
from streammega.storage.thread_pool import parallel_map

log = logging.getLogger(__name__)

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
TRIES = 5
"""Times that a dataset is looked up again when it was replaced while it was opened."""
GLOB_CHARS = "*?["
"""What makes a pattern of a name, if nothing is called just that."""
_AFTER_A_DOT = "/"
"""The character after a dot: what begins with a name and a dot lies before the name and this."""

Opened = TypeVar("Opened")


class Resolved(NamedTuple):
    """What a name stands for.

    instead: a manifest and where it lies, whose shards are meant where the pair in `shards` is not
    there. damage: why that manifest cannot be read.
    """

    shards: list[Shard]
    instead: tuple[str, Manifest] | None = None
    damage: StreammegaError | None = None

    def versions(self) -> list[Any]:
        """What was found, to be compared with what is there later."""
        found: list[Any] = [self.instead]
        for shard in self.shards:
            found.append((shard.name, shard.known_tokens, shard.known_index, shard.entry))
        return found


def open_shards(
    name: str,
    storage: StorageConfig,
    cache_dir: str | Path | None,
    open_all: Callable[[list[Shard]], Opened],
    finish: Callable[[], None] = lambda: None,
    listed_pair: Shard | None = None,
) -> Opened:
    """What `open_all` makes of a dataset's shards. A prefix that is no pair stands for the manifest
    of that name, if any.

    `finish` is called after that, for what is to be read of them at once. `listed_pair`: the pair
    of that name as a listing had it; it is trusted for the first attempt only. A dataset that is
    replaced meanwhile is looked up and opened again: it is the former one, or the new one.
    """
    # Held meanwhile, for all that is opened on the way: a store ends with its last user, and its
    # client and connections with it.
    _store, _ = open_store(name, storage)
    name = resolve_version(name, storage)
    for number in range(TRIES):
        is_first = number == 0
        is_last = number == TRIES - 1
        resolved = Resolved([] if listed_pair is None else [listed_pair])
        try:
            if listed_pair is None or not is_first:
                resolved = resolve(name, storage, cache_dir)
            opened = _open(resolved, storage, cache_dir, open_all)
            finish()
        except ObjectChangedError:
            if is_last:
                raise
        except (ObjectNotFoundError, FormatError):
            if is_last:
                raise
            now = Resolved([])
            with suppress(ObjectNotFoundError, ObjectChangedError, FormatError):
                now = resolve(name, storage, cache_dir)
            is_as_before = now.versions() == resolved.versions()
            # Local shards have their plain names again in the end: that nothing seems to have
            # changed says little of them once.
            says_little = is_first and not is_remote(name)
            if is_as_before and not says_little:
                raise
        else:
            return opened
    raise AssertionError("unreachable")


def _open(
    resolved: Resolved,
    storage: StorageConfig,
    cache_dir: str | Path | None,
    open_all: Callable[[list[Shard]], Opened],
) -> Opened:
    try:
        return open_all(resolved.shards)
    except ObjectNotFoundError:
        if resolved.damage is not None:
            raise resolved.damage from None
        if resolved.instead is None:
            raise
    return open_all(_shards_of_manifest(*resolved.instead, storage, cache_dir))


def find_pairs(name: str, storage: StorageConfig) -> list[str]:
    """The names of the shards that a dataset's name stands for, in order: see `find_shards`."""
    shards = find_shards(name, storage)
    return [named(*split_name(name))] if shards is None else [shard.name for shard in shards]


def resolve(name: str, storage: StorageConfig, cache_dir: str | Path | None = None) -> Resolved:
    """What a dataset's name stands for: see `find_shards`. A prefix is looked up: it may be the name
    of a manifest.
    """
    shards = find_shards(name, storage, cache_dir)
    return _resolve_prefix(name, storage, cache_dir) if shards is None else Resolved(shards)


def find_shards(
    name: str, storage: StorageConfig, cache_dir: str | Path | None = None
) -> list[Shard] | None:
    """The shards a dataset's name stands for, in order, with what listings and manifests say of
    them; None for a prefix, which may stand for itself.

    A manifest (`.json`) or a version (`web@2`, `web@2..5`) stands for what it lists, a folder (a name
    ending in /) or glob for all shards in it, in name order. What is there by the very name is taken
    before that is read as a glob. Raises ObjectNotFoundError for a folder or glob without shards,
    MissingShardsError with some of a set missing.
    """
    name = resolve_version(name, storage)
    if name.endswith(".json"):
        return _shards_of_manifest(
            name, check_counts(read_manifest(name, storage), name), storage, cache_dir
        )
    appended = read_between_versions(name, storage)
    if appended is not None:
        manifest, url = appended
        return _shards_of_manifest(url, check_counts(manifest, url), storage, cache_dir)
    matching = _match_remote(name, storage) if is_remote(name) else _match_local(name)
    if matching is None:
        return None
    names, objects = matching
    if not names:
        raise ObjectNotFoundError(f"{name}: holds no pair of .bin and .idx; check the path")
    missing = missing_shards(names)
    if missing:
        raise MissingShardsError(
            f"{name}: shards of a set are missing, such as {', '.join(missing)}; was the "
            "conversion interrupted?"
        )
    return _make_shards(names, objects, storage, cache_dir)


def _resolve_prefix(name: str, storage: StorageConfig, cache_dir: str | Path | None) -> Resolved:
    """The pair that a prefix names, or the manifest of that name. Its objects and the manifest are
    looked up side by side: each is an answer from far away.
    """
    pair = Shard(named(*split_name(name)), storage, cache_dir)
    prefix = strip_suffix(name)
    url = prefix + MANIFEST
    looks: list[Callable[[], Any]] = [lambda: _manifest_or_damage(url, storage)]
    if is_remote(name):
        looks.append(lambda: _info_or_none(pair.store, pair.key))
        looks.append(lambda: _info_or_none(pair.store, pair.index_key))
    (manifest, damage), *infos = parallel_map(lambda look: look(), looks, len(looks))
    if infos:
        pair.known_tokens, pair.known_index = infos
    if manifest is None or not manifest.shards:
        return Resolved([pair], damage=damage)
    names = shard_names(manifest, url)
    if names == [pair.name]:
        pair.manifest = _without_shards(manifest)
        pair.entry = manifest.shards[0]
        return Resolved([pair])
    # The pair of that name was replaced, and is being removed.
    if owner_of(names[0]) == prefix:
        return Resolved(_shards_of_manifest(url, manifest, storage, cache_dir))
    return Resolved([pair], instead=(url, manifest) if pair.name == prefix else None)


def _info_or_none(store: Store, key: str) -> ObjectInfo | None:
    """What a look at an object tells; None where it tells nothing. What opens it then looks again,
    and says what is wrong.
    """
    try:
        return _with_etag(store.info(key))
    except StorageError as error:
        if error.transient:
            raise
        return None


def _with_etag(info: ObjectInfo | None) -> ObjectInfo | None:
    """An object, if its ETag is known: without one, replaced ones would not be noticed."""
    return info if info is not None and info.etag else None


def _manifest_or_damage(
    url: str, storage: StorageConfig
) -> tuple[Manifest | None, StreammegaError | None]:
    """The manifest of a prefix, if there is one; or why it cannot be read, which matters only
    without a pair.
    """
    try:
        return check_counts(read_manifest(url, storage), url), None
    except FormatError as error:
        return None, error
    except StorageError as error:
        if error.transient:
            raise
        return None, None  # without the right to list, S3 answers 403 for what is not there


# --- shards, with what listings and manifests say of them -----------------------------------------


def _make_shards(
    names: Sequence[str],
    objects: Mapping[str, ObjectInfo],
    storage: StorageConfig,
    cache_dir: str | Path | None,
    manifest: Manifest | None = None,
) -> list[Shard]:
    """Shards by their names. objects: those that were listed, by URL. manifest: it lists them.

    The store of those that were listed is looked up once: it takes as long as all else of a shard,
    of which there may be thousands.
    """
    entries = [None] * len(names) if manifest is None else manifest.shards
    head = None if manifest is None else _without_shards(manifest)
    shards: list[Shard] = []
    root = ""
    for name, entry in zip(names, entries, strict=True):
        prefix, kind = split_name(name)
        url = prefix + SUFFIXES[kind]
        tokens = _with_etag(objects.get(url))
        opened = None
        # A name may be spelt in other ways than its key, and then means what looking it up says.
        if root and tokens is not None and url == root + tokens.key:
            opened = (shards[0].store, tokens.key)
        shard = Shard(name, storage, cache_dir, manifest=head, entry=entry, opened=opened)
        if objects:
            shard.known_tokens = tokens
            shard.known_index = _with_etag(objects.get(f"{prefix}.idx"))
            shard.is_listed = shard.known_index is not None
        if not shards and url.endswith(f"/{shard.key}"):
            root = url.removesuffix(shard.key)
        shards.append(shard)
    return shards


def _without_shards(manifest: Manifest) -> Manifest:
    """What a manifest says of all of its shards: each of them holds it."""
    return replace(manifest, shards=[], origins=None)


def _shards_of_manifest(
    url: str, manifest: Manifest, storage: StorageConfig, cache_dir: str | Path | None
) -> list[Shard]:
    """All shards of the manifest that lies at `url`, in order, with what a listing tells of them."""
    names = shard_names(manifest, url)
    objects = _list_beside_manifest(names, storage)
    return _make_shards(names, objects, storage, cache_dir, manifest)


def _list_beside_manifest(names: Sequence[str], storage: StorageConfig) -> dict[str, ObjectInfo]:
    """The objects of shards of one folder; none of few, of local ones, or where listings do not
    tell.
    """
    if len(names) <= FEW or not is_remote(names[0]):
        return {}
    objects = _list_objects(names, storage)
    if objects:
        return objects
    folder = parent_url(names[0])
    try:
        objects = _list_folder(folder, storage)
    except StorageError as error:
        if error.transient:
            raise
        log.debug(
            "the folder of %s cannot be listed: every shard is asked for (%s)",
            names[0],
            type(error).__name__,
        )
        return {}
    return objects if _is_trusted(names[0], objects, storage) else {}


def list_pairs(
    names: Sequence[str], storage: StorageConfig, cache_dir: str | Path | None = None
) -> dict[str, Shard]:
    """Those names of a blend that are pairs of remote stores, if listings have all of them; of few
    names, and where listings do not tell, none.

    Raises StorageError for what may pass when it is tried again.
    """
    prefixes = {}
    for name in names:
        is_pair = not name.endswith((".json", "/")) and not is_glob(base_name(name))
        if is_remote(name) and is_pair:
            prefixes[name] = strip_suffix(name)
    objects = _list_objects(list(prefixes.values()), storage)
    pairs = []
    for name, prefix in prefixes.items():
        parts = [prefix + SUFFIXES[split_name(name)[1]], f"{prefix}.idx"]
        is_there = all(_with_etag(objects.get(part)) is not None for part in parts)
        if is_there and prefix + MANIFEST not in objects:
            pairs.append(name)
    shards = _make_shards([named(*split_name(name)) for name in pairs], objects, storage, cache_dir)
    return dict(zip(pairs, shards, strict=True))


def _list_objects(prefixes: Sequence[str], storage: StorageConfig) -> dict[str, ObjectInfo]:
    """The objects of shards of remote stores, by URL, and some of those that lie between them; of
    few, and of those that no listing between two keys tells of, none.

    Raises StorageError for what may pass when it is tried again.
    """
    prefixes_of_root: dict[str, list[str]] = {}
    for name in prefixes:
        prefix = strip_suffix(name)
        # The bucket's URL with its slash; a mock dataset has no bucket.
        after_scheme = prefix.find("://") + len("://")
        root = prefix[: max(prefix.find("/", after_scheme) + 1, after_scheme)]
        prefixes_of_root.setdefault(root, []).append(prefix)
    objects: dict[str, ObjectInfo] = {}
    for root, of_root in prefixes_of_root.items():
        store, _ = open_store(of_root[0], storage)
        listed = _list_groups(store, [prefix[len(root) :] for prefix in of_root])
        objects.update([(root + info.key, info) for info in listed])
    return objects


def _list_groups(store: Store, keys: list[str]) -> list[ObjectInfo]:
    """The objects of shards, and some of those that lie between them; none where listings do not
    tell them, or not their ETags.
    """
    if len(keys) <= FEW:
        return []
    # As their objects lie, all of whose names go on by a dot.
    ordered = sorted(keys, key=lambda key: f"{key}.")
    groups = [ordered[first : first + GROUP] for first in range(0, len(ordered), GROUP)]
    first_index = f"{ordered[0]}.idx"
    looks: list[Callable[[], Any]] = [
        partial(store.list_between, group[0], group[-1] + _AFTER_A_DOT, MOST_OBJECTS)
        for group in groups
    ]
    # The look beside the listings: it would be another answer to wait for.
    looks.append(partial(_info_or_none, store, first_index))
    *parts, looked = parallel_map(lambda look: look(), looks, LISTERS)
    if None in parts:
        return []
    objects = [info for part in parts for info in part]
    listed = next((info for info in objects if info.key == first_index), None)
    return objects if _is_same(listed, looked) else []


def _is_same(listed: ObjectInfo | None, looked: ObjectInfo | None) -> bool:
    """Whether a listing tells the ETag that other answers do: where it does not, a run would end
    at its first read.
    """
    if listed is None or looked is None or not listed.etag:
        return False
    return looked.size == listed.size and same_version(looked.etag, listed.etag)


def _is_trusted(name: str, objects: Mapping[str, ObjectInfo], storage: StorageConfig) -> bool:
    """Whether a listing tells the ETag of a shard's `.idx` as other answers do."""
    url = f"{strip_suffix(name)}.idx"
    if _with_etag(objects.get(url)) is None:
        return False
    store, key = open_store(url, storage)
    return _is_same(objects[url], store.info(key))


def _list_folder(folder: str, storage: StorageConfig) -> dict[str, ObjectInfo]:
    """The objects of a folder, by URL; what lies deeper is not listed."""
    store, key = open_store(f"{folder}/", storage)
    before = join_url(folder, "")
    return {before + info.key[len(key) :]: info for info in store.list(key, recursive=False)}


# --- folders and globs ----------------------------------------------------------------------------


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
            url = owner + MANIFEST
            listed = {
                strip_suffix(name)
                for name in shard_names(check_counts(read_manifest(url, storage), url), url)
            }
        except ObjectNotFoundError:
            # What has a mark was never finished.
            listed = {prefix for prefix in may_be_its if owner_of(prefix) is None}
        if listed:
            replaced = set(may_be_its) - listed
            prefixes = [prefix for prefix in prefixes if prefix not in replaced]
    return prefixes


def _match_local(name: str) -> tuple[list[str], dict[str, ObjectInfo]] | None:
    """The shards of a folder or glob; None: the name is a prefix."""
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
    return [_with_kind(prefix, paths) for prefix in _present(prefixes, StorageConfig())], {}


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


def _match_remote(
    name: str, storage: StorageConfig
) -> tuple[list[str], dict[str, ObjectInfo]] | None:
    """The shards of a folder or glob, and their objects; None: the name is a prefix."""
    folder, _, pattern = name.rpartition("/")
    if pattern and not is_glob(pattern):
        return None
    try:
        objects = _list_folder(folder, storage)
    except StorageError as error:
        if not pattern or "*" in pattern or error.transient:
            raise
        return None  # this store cannot be listed, and ? and [ are letters of many names
    before = join_url(folder, "")
    exact = before + strip_suffix(pattern)
    if pattern and (f"{exact}.idx" in objects or f"{exact}{MANIFEST}" in objects):
        return None
    prefixes = sorted(url.removesuffix(".idx") for url in objects if url.endswith(".idx"))
    if pattern:
        prefixes = [prefix for prefix in prefixes if _matches(prefix[len(before) :], pattern)]
    names = [_with_kind(prefix, objects) for prefix in _present(prefixes, storage)]
    if not names or not _is_trusted(names[0], objects, storage):
        objects = {}
    return names, objects


def _matches(stem: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(stem, pattern) or fnmatch.fnmatchcase(f"{stem}.idx", pattern)
