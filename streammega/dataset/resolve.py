"""From the name of a dataset to its shards: a prefix, a manifest, a folder or a glob, on a local disk
or in a bucket. The shards know what listings and manifests say of them.
"""

from __future__ import annotations

import fnmatch
import glob
import logging
import os
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from streammega.config import StorageConfig
from streammega.dataset.manifest import Manifest, check_counts, read_manifest, shard_names
from streammega.dataset.names import (
    MANIFEST,
    SUFFIXES,
    dataset_of_marked,
    missing_shards,
    split_name,
    strip_suffix,
    with_suffix,
    without_number,
)
from streammega.dataset.shard import Shard, Version, version_of
from streammega.errors import (
    FormatError,
    MissingShardsError,
    ObjectChangedError,
    ObjectNotFoundError,
    StorageError,
)
from streammega.storage import ObjectInfo, join_url, open_store, parent_url
from streammega.storage.answers import forget_answers
from streammega.storage.backends.local import local_error
from streammega.storage.etags import same_version
from streammega.storage.open import is_remote, local_path
from streammega.storage.store import Store
from streammega.storage.thread_pool import parallel_map

log = logging.getLogger(__name__)

MAX_LOOKED_UP = 8
"""Up to so many shards are looked up one by one. A listing has 1,000 objects, some of other
datasets.
"""
SHARDS_OF_A_LISTING = 480
"""Shards of one listing: one answer of 1,000 has their tokens and indices, and some other objects."""
MAX_OBJECTS = 3000
"""Objects of one listing. With so many others between them, shards are looked up one by one."""
MAX_LISTINGS = 32
"""Listings at once: enough for 15,360 shards."""
MAX_DATASETS = 16
"""Datasets that are resolved at once, if no listing has them."""
MAX_TRIES = 5
"""How often datasets are resolved, if one is replaced while they are opened."""
GLOB_CHARS = "*?["
"""A name with one of these is a pattern, unless a dataset has that very name."""
_AFTER_A_DOT = "/"
"""The character after a dot: `web.bin` sorts before `web/`."""

Objects = dict[str, Version]
"""Objects by their URLs."""
Opened = TypeVar("Opened")


def open_resolved(
    names: Sequence[str],
    storage: StorageConfig,
    open_all: Callable[[list[list[Shard]]], Opened],
) -> Opened:
    """What `open_all` makes of the shards of datasets.

    If a dataset is replaced meanwhile, all are resolved and opened again: each is then the earlier
    one or the new one, and never a mixture.
    """
    # A store ends with its last user, and its client and connections with it: keep one for all tries.
    _stores = [open_store(name, storage) for name in names]
    for number in range(MAX_TRIES):
        is_last = number == MAX_TRIES - 1
        before = None
        try:
            datasets = resolve(names, storage)
            before = _state_of(datasets)
            return open_all(datasets)
        except ObjectChangedError:
            forget_answers()
            if is_last:
                raise
        except (ObjectNotFoundError, FormatError):
            forget_answers()
            now = None
            with suppress(ObjectNotFoundError, ObjectChangedError, FormatError):
                now = _state_of(resolve(names, storage))
            if is_last or now == before:
                raise
    raise AssertionError("unreachable")


def _state_of(datasets: list[list[Shard]]) -> list[Any]:
    """What was found, to be compared with what is found later."""
    state: list[Any] = []
    for dataset in datasets:
        for shard in dataset:
            state += (shard.name, shard.version, shard.index_version, shard.entry)
    return state


def find_pairs(name: str, storage: StorageConfig) -> list[str]:
    """The names of the shards of a dataset, in order. Raises as `resolve` does."""
    (shards,) = resolve([name], storage)
    return [shard.name for shard in shards]


def resolve(names: Sequence[str], storage: StorageConfig) -> list[list[Shard]]:
    """The shards of datasets, in order, with what listings and manifests say of them.

    A manifest (`.json`) means the shards that it lists. A folder (a name ending in /) or a glob means
    all shards in it, in name order; a dataset of the very name comes before a glob. A prefix means
    its pair, or else the manifest of that name. Many pairs of a bucket are found by listings.

    Raises ObjectNotFoundError for a folder or glob without shards, MissingShardsError with some of a
    set missing, FormatError, StorageError.
    """
    pairs = _list_pairs(names, storage)
    others = [name for name in dict.fromkeys(names) if name not in pairs]

    def resolve_one(name: str) -> list[Shard]:
        return _resolve_name(name, storage)

    are_local = not any(map(is_remote, others))
    shards = parallel_map(resolve_one, others, MAX_DATASETS, is_local=are_local)
    resolved = pairs | dict(zip(others, shards, strict=True))
    return [resolved[name] for name in names]


def _resolve_name(name: str, storage: StorageConfig) -> list[Shard]:
    if name.endswith(".json"):
        return _shards_of_manifest(read_manifest(name, storage), name, storage)
    matching = _match_remote(name, storage) if is_remote(name) else _match_local(name)
    if matching is None and not name.endswith("/"):
        return _resolve_prefix(name, storage)
    names, objects = matching or ([], {})
    if not names:
        remedy = "check the path"
        if name.endswith("/"):
            remedy += f"; without the slash, {name.rstrip('/')} names a dataset"
        raise ObjectNotFoundError(f"{name}: holds no pair of .bin and .idx; {remedy}")
    missing = missing_shards(names)
    if missing:
        raise MissingShardsError(
            f"{name}: shards of a set are missing, such as {', '.join(missing)}; copy them again, or "
            "convert again"
        )
    return _make_shards(names, objects, storage)


def _resolve_prefix(name: str, storage: StorageConfig) -> list[Shard]:
    """The pair that a prefix names, or the shards of the manifest of that name.

    The two objects and the manifest are looked up at once: each takes a round trip.
    """
    pair = Shard(with_suffix(*split_name(name)), storage)
    prefix = strip_suffix(name)
    url = prefix + MANIFEST
    looks: list[Callable[[], Any]] = [
        lambda: _manifest_or_damage(url, storage),
        lambda: _info_or_none(pair.store, pair.key),
        lambda: _info_or_none(pair.store, pair.index_key),
    ]
    (manifest, damage), *infos = parallel_map(
        lambda look: look(), looks, len(looks), is_local=not is_remote(name)
    )
    pair.version, pair.index_version = [info and version_of(info) for info in infos]
    is_pair = None not in infos
    if damage is not None and not is_pair:
        raise damage
    if manifest is None or not manifest.shards:
        return [pair]
    names = shard_names(manifest, url)
    if names == [pair.name]:
        pair.manifest = _without_shards(manifest)
        pair.entry = manifest.shards[0]
        return [pair]
    # Shards with a mark have replaced a pair of that name, which is being removed.
    is_replaced = dataset_of_marked(names[0]) == prefix
    if is_replaced or (pair.name == prefix and not is_pair):
        return _shards_of_manifest(manifest, url, storage)
    return [pair]


def _info_or_none(store: Store, key: str) -> ObjectInfo | None:
    """An object, or None where it cannot be looked up. What opens it looks again, and raises."""
    try:
        return store.info(key)
    except StorageError as error:
        if error.transient:
            raise
        return None


def _manifest_or_damage(
    url: str, storage: StorageConfig
) -> tuple[Manifest | None, FormatError | None]:
    """The manifest of a prefix, or why it cannot be read, which matters only without a pair; (None,
    None) where it has no manifest.
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
    objects: Objects,
    storage: StorageConfig,
    manifest: Manifest | None = None,
) -> list[Shard]:
    """Shards by their names. objects: those that were listed. manifest: it lists them.

    Listed shards share the store of the first: for thousands, looking it up for each would take as
    long as all the rest.
    """
    entries = [None] * len(names) if manifest is None else manifest.shards
    head = None if manifest is None else _without_shards(manifest)
    shards: list[Shard] = []
    root = ""
    for name, entry in zip(names, entries, strict=True):
        prefix, kind = split_name(name)
        url = prefix + SUFFIXES[kind]
        version = objects.get(url)
        opened = None
        if root and version is not None and url.startswith(root):
            opened = (shards[0].store, url[len(root) :])
        shard = Shard(name, storage, manifest=head, entry=entry, opened=opened)
        shard.version = version
        shard.index_version = objects.get(f"{prefix}.idx")
        # A name may be written in other ways than its key. Such shards are looked up one by one.
        if not shards and url.endswith(f"/{shard.key}"):
            root = url.removesuffix(shard.key)
        shards.append(shard)
    return shards


def _without_shards(manifest: Manifest) -> Manifest:
    """What a manifest says of all of its shards. Each shard keeps it."""
    return replace(manifest, shards=[], origins=None)


def _shards_of_manifest(manifest: Manifest, url: str, storage: StorageConfig) -> list[Shard]:
    """All shards of the manifest at `url`, in order, with what a listing says of them."""
    names = shard_names(check_counts(manifest, url), url)
    if not names:
        raise FormatError(f"{url}: lists no shards; convert again, or name another dataset")
    objects: Objects = {}
    if len(names) > MAX_LOOKED_UP and is_remote(url):
        objects = _list_objects(names, storage)
        if not objects:
            try:
                objects = _list_folder(parent_url(url), storage)
            except StorageError as error:
                if error.transient:
                    raise
                log.debug("%s: its folder cannot be listed: shards are looked up", url)
            objects = _if_trusted(names[0], objects, storage)
    return _make_shards(names, objects, storage, manifest)


def _list_pairs(names: Sequence[str], storage: StorageConfig) -> dict[str, list[Shard]]:
    """The names of a blend that are pairs of buckets, as far as listings have them. Empty for a few
    names, and where objects cannot be listed.

    Raises StorageError for what may pass when it is tried again.
    """
    prefixes = {}
    for name in names:
        is_prefix = not name.endswith((".json", "/")) and not is_glob(name.rpartition("/")[2])
        if is_remote(name) and is_prefix:
            prefixes[name] = strip_suffix(name)
    objects = _list_objects(list(prefixes.values()), storage)
    pairs = []
    for name, prefix in prefixes.items():
        parts = [prefix + SUFFIXES[split_name(name)[1]], f"{prefix}.idx"]
        if all(part in objects for part in parts) and prefix + MANIFEST not in objects:
            pairs.append(name)
    shards = _make_shards([with_suffix(*split_name(name)) for name in pairs], objects, storage)
    return {name: [shard] for name, shard in zip(pairs, shards, strict=True)}


def _list_objects(names: Sequence[str], storage: StorageConfig) -> Objects:
    """The objects of shards of buckets, and some of those between them. Empty for a few shards, and
    where a store cannot list between two keys.

    Raises StorageError for what may pass when it is tried again.
    """
    prefixes_of_root: dict[str, list[str]] = {}
    for name in names:
        prefix = strip_suffix(name)
        # The bucket's URL with its slash; a mock dataset has no bucket.
        after_scheme = prefix.find("://") + len("://")
        root = prefix[: max(prefix.find("/", after_scheme) + 1, after_scheme)]
        prefixes_of_root.setdefault(root, []).append(prefix)
    objects: Objects = {}
    for root, prefixes in prefixes_of_root.items():
        if len(prefixes) <= MAX_LOOKED_UP:
            continue
        store, key = open_store(prefixes[0], storage)
        # A store of a registered scheme has no bucket before its keys.
        if prefixes[0].endswith(key):
            root = prefixes[0].removesuffix(key)
        # In the order of their objects, all of whose names go on with a dot.
        keys = sorted((prefix[len(root) :] for prefix in prefixes), key=lambda key: f"{key}.")
        groups = [
            keys[first : first + SHARDS_OF_A_LISTING]
            for first in range(0, len(keys), SHARDS_OF_A_LISTING)
        ]
        looks: list[Callable[[], Any]] = [
            partial(_list_group, store, root, group) for group in groups
        ]
        # At once with the listings, so that nothing waits for it. `_has_same_etag` needs it.
        looks.append(partial(_info_or_none, store, f"{keys[0]}.idx"))
        *parts, looked_up = parallel_map(lambda look: look(), looks, MAX_LISTINGS)
        if None in parts:
            continue
        listed = {url: version for part in parts for url, version in part.items()}
        if _has_same_etag(listed.get(f"{root}{keys[0]}.idx"), looked_up):
            objects |= listed
    return objects


def _list_group(store: Store, root: str, keys: Sequence[str]) -> Objects | None:
    """The objects of some shards, whose keys are in order; None where they cannot be listed."""
    infos = store.list_between(keys[0], keys[-1] + _AFTER_A_DOT, MAX_OBJECTS)
    return None if infos is None else {root + info.key: version_of(info) for info in infos}


def _list_folder(folder: str, storage: StorageConfig) -> Objects:
    """The objects of a folder, without those of folders in it."""
    store, key = open_store(f"{folder}/", storage)
    before = join_url(folder, "")
    infos = store.list(key, recursive=False)
    return {before + info.key[len(key) :]: version_of(info) for info in infos}


def _if_trusted(name: str, objects: Objects, storage: StorageConfig) -> Objects:
    """The objects of a listing that has the same ETag of a shard's `.idx` as other answers, else
    none.
    """
    url = f"{strip_suffix(name)}.idx"
    if url not in objects:
        return {}
    store, key = open_store(url, storage)
    return objects if _has_same_etag(objects[url], store.info(key)) else {}


def _has_same_etag(listed: Version | None, looked_up: ObjectInfo | None) -> bool:
    """Whether a listing has the ETag that other requests have. Otherwise the first read would fail."""
    if listed is None or looked_up is None or not listed[1]:
        return False
    return looked_up.size == listed[0] and same_version(looked_up.etag, listed[1])


# --- folders and globs ----------------------------------------------------------------------------


def _without_unlisted(prefixes: list[str], storage: StorageConfig) -> list[str]:
    """The prefixes without shards that are not part of a dataset yet, or any more: a shard with a mark
    is one only if the manifest of its dataset lists it, and what such shards replaced is left out.

    Manifests are read only where a name has such a mark.
    """
    marked_of: dict[str, set[str]] = {}
    for prefix in prefixes:
        owner = dataset_of_marked(prefix)
        if owner is not None:
            marked_of.setdefault(owner, set()).add(prefix)
    plain_of: dict[str, set[str]] = {owner: set() for owner in marked_of}
    for prefix in prefixes if marked_of else ():
        for owner in {prefix, without_number(prefix)} & marked_of.keys():
            plain_of[owner].add(prefix)

    def unlisted(owner: str) -> set[str]:
        """The shards with names of a dataset that its manifest does not list."""
        try:
            url = owner + MANIFEST
            manifest = check_counts(read_manifest(url, storage), url)
        except ObjectNotFoundError:
            return marked_of[owner]  # the conversion that wrote them was never finished
        listed = {strip_suffix(name) for name in shard_names(manifest, url)}
        return (marked_of[owner] | plain_of[owner]) - listed if listed else set()

    are_local = not any(map(is_remote, marked_of))
    left_out: set[str] = set()
    for others in parallel_map(unlisted, marked_of, MAX_DATASETS, is_local=are_local):
        left_out |= others
    return [prefix for prefix in prefixes if prefix not in left_out]


def _match_local(name: str) -> tuple[list[str], Objects] | None:
    """The shards of a folder or glob; None: the name is a prefix."""
    name = _plain_name(name)
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
    return [
        _with_kind(prefix, paths) for prefix in _without_unlisted(prefixes, StorageConfig())
    ], {}


def _paths_in(folder: str) -> set[str]:
    """The paths of all that is in a folder; "" is the current one. Raises StorageError."""
    try:
        return {os.path.join(folder, entry) for entry in os.listdir(folder or ".")}
    except OSError as error:
        raise local_error(folder, error) from None


def _matching_indices(name: str) -> list[str]:
    """The `.idx` files that a pattern names, with their suffix or without."""
    folder, pattern = os.path.split(name)
    if os.path.isdir(folder):
        # In the name of a folder that exists these signs are letters.
        name = os.path.join(glob.escape(folder), pattern)
    indices = [path for path in glob.glob(name) if path.endswith(".idx")]
    return indices or glob.glob(f"{name}.idx")


def is_glob(name: str) -> bool:
    """Whether a name may be a pattern."""
    return any(sign in name for sign in GLOB_CHARS)


def is_local_folder(name: str) -> bool:
    """Whether a name is a local folder. A dataset of that very name comes first: caches are often put
    in a folder of its name.
    """
    name = _plain_name(name)
    return os.path.isdir(name) and (name.endswith("/") or not _exists(name))


def _plain_name(name: str) -> str:
    """A local name without `file://` and `~`."""
    if not name.startswith(("file://", "local://", "~")):
        return name
    return local_path(name) + ("/" if name.endswith("/") else "")


def _exists(name: str) -> bool:
    """Whether a dataset of that very name is there."""
    prefix = strip_suffix(name)
    return os.path.exists(f"{prefix}.idx") or os.path.exists(prefix + MANIFEST)


def _with_kind(prefix: str, there: Collection[str]) -> str:
    """A shard's name, by the files in the folder of its `.idx`."""
    for kind, suffix in SUFFIXES.items():
        if prefix + suffix in there:
            return with_suffix(prefix, kind)
    return prefix


def _match_remote(name: str, storage: StorageConfig) -> tuple[list[str], Objects] | None:
    """The shards of a folder or glob, and their objects; None: the name is a prefix."""
    folder, _, pattern = name.rpartition("/")
    if pattern and not is_glob(pattern):
        return None
    try:
        objects = _list_folder(folder, storage)
    except StorageError as error:
        if not pattern or "*" in pattern or error.transient:
            raise
        return None  # this store cannot be listed, and many names have ? and [ as letters
    before = join_url(folder, "")
    exact = before + strip_suffix(pattern)
    if pattern and (f"{exact}.idx" in objects or f"{exact}{MANIFEST}" in objects):
        return None
    prefixes = sorted(url.removesuffix(".idx") for url in objects if url.endswith(".idx"))
    if pattern:
        prefixes = [prefix for prefix in prefixes if _matches(prefix[len(before) :], pattern)]
    names = [_with_kind(prefix, objects) for prefix in _without_unlisted(prefixes, storage)]
    return names, _if_trusted(names[0], objects, storage) if names else {}


def _matches(stem: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(stem, pattern) or fnmatch.fnmatchcase(f"{stem}.idx", pattern)
