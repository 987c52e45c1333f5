"""The shards of folders and globs, on a local disk or in a bucket, and what listings tell of them."""

from __future__ import annotations

import fnmatch
import glob
import logging
import os
from collections.abc import Collection, Mapping

from streammega.config import StorageConfig
from streammega.dataset.listing import FEW, told_of, with_told
from streammega.dataset.manifest import MANIFEST, manifest_shards
from streammega.dataset.shards import (
    SUFFIXES,
    KnownShard,
    may_belong,
    named,
    owner_of,
    split_name,
    strip_suffix,
)
from streammega.errors import ObjectNotFoundError, StorageError
from streammega.storage import ObjectInfo, join_url, open_store, parent_url
from streammega.storage.etags import same_version
from streammega.storage.open import is_remote

log = logging.getLogger(__name__)

SIGNS = "*?["
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


def local_shards(name: str) -> list[KnownShard] | None:
    """Of a folder or glob; None: the name is a prefix."""
    if is_local_folder(name):
        paths = _paths_in(name)
        indices = [path for path in paths if path.endswith(".idx")]
    elif has_signs(name) and not _exists(name):
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


def has_signs(name: str) -> bool:
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


def remote_shards(name: str, storage: StorageConfig) -> list[KnownShard] | None:
    """Of a folder or glob; None: the name is a prefix."""
    folder, _, pattern = name.rpartition("/")
    if pattern and not has_signs(pattern):
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
    return _from_listing([KnownShard(name=name) for name in names], there, storage)


def base_name(name: str) -> str:
    """What follows the last slash."""
    _, _, last = name.rpartition("/")
    return last


def _matches(stem: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(stem, pattern) or fnmatch.fnmatchcase(f"{stem}.idx", pattern)


def _listed(folder: str, storage: StorageConfig) -> dict[str, ObjectInfo]:
    """The objects of a folder by their names in it; what lies deeper is not listed."""
    store, key = open_store(f"{folder}/", storage)
    # None of the keys has a slash behind the folder's.
    return {item.key[len(key) :]: item for item in store.list(key, recursive=False)}


def with_infos(shards: list[KnownShard], storage: StorageConfig) -> list[KnownShard]:
    """The shards of a manifest with what a listing of their folder tells; few, local or not to be
    listed: as they are.
    """
    if len(shards) <= FEW or not is_remote(shards[0].name):
        return shards
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
        prefix, kind = split_name(base_name(shard.name))
        stored = if_told(there.get(prefix + SUFFIXES[kind]))
        index = if_told(there.get(f"{prefix}.idx"))
        known = KnownShard(name=shard.name, stored=stored, index=index, entry=shard.entry)
        with_infos.append(known)
    return with_infos


def if_told(info: ObjectInfo | None) -> ObjectInfo | None:
    """What a listing or a look told, if it told an ETag: without one, replaced objects would not be
    noticed.
    """
    return info if info is not None and info.etag else None


def _agrees(shard: KnownShard, there: Mapping[str, ObjectInfo], storage: StorageConfig) -> bool:
    """Whether a listing tells the ETags that other answers do: where it does not, a run would end
    at its first read.
    """
    prefix, _ = split_name(shard.name)
    listed = if_told(there.get(f"{base_name(prefix)}.idx"))
    if listed is None:
        return False
    store, key = open_store(f"{prefix}.idx", storage)
    info = store.info(key)
    return info.size == listed.size and same_version(info.etag, listed.etag)
