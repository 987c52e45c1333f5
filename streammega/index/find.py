"""From a dataset's name to its shards."""

from __future__ import annotations

import fnmatch
import glob
import os
from collections.abc import Callable, Collection
from typing import TypeVar

from streammega.config import StorageConfig
from streammega.errors import MissingShardsError, ObjectNotFoundError
from streammega.index.manifest import MANIFEST, manifest_shards
from streammega.index.shards import SUFFIXES, missing_shards, named, split_name, strip_suffix
from streammega.storage import join_url, open_store, parent_url
from streammega.storage.urls import is_remote

Opened = TypeVar("Opened")


def open_shards(name: str, storage: StorageConfig, open_all: Callable[[list[str]], Opened]) -> Opened:
    """What `open_all` makes of a dataset's shards. A prefix that is no pair stands for the manifest of that name, if any."""
    names = find_pairs(name, storage)
    try:
        return open_all(names)
    except ObjectNotFoundError:
        if names != [strip_suffix(name)]:
            raise
        try:
            listed = manifest_shards(names[0] + MANIFEST, storage)
        except ObjectNotFoundError:
            listed = names
        if listed == names:
            raise
    return open_all(listed)


def find_pairs(name: str, storage: StorageConfig) -> list[str]:
    """The shards a dataset's name stands for, in order.

    A prefix stands for itself, a manifest (`.json`) for what it lists, a folder (a name ending in /) or glob for all shards in
    it, in name order. Raises ObjectNotFoundError for a folder or glob without shards, or with some of a set missing.
    """
    if name.endswith(".json"):
        return manifest_shards(name, storage)
    if not is_remote(name) and (_is_folder(name) or any(sign in name for sign in "*?[")):
        pattern = os.path.join(name, "*") if _is_folder(name) else name
        found = sorted({strip_suffix(path) for path in glob.glob(pattern) if path.endswith(".idx")})
        found = found or sorted(strip_suffix(path) for path in glob.glob(f"{pattern}.idx"))
        found = [_with_kind(prefix, set(glob.glob(f"{glob.escape(prefix)}.*"))) for prefix in found]
    elif name.endswith("/") or "*" in name.rpartition("/")[2]:
        found = _remote_pairs(name, storage)
    else:
        return [named(*split_name(name))]
    if not found:
        raise ObjectNotFoundError(f"{name}: holds no pair of .bin and .idx; check the path")
    if missing := missing_shards(found):
        raise MissingShardsError(
            f"{name}: shards of a set are missing, such as {', '.join(missing)}; was the conversion interrupted?"
        )
    return found


def _is_folder(name: str) -> bool:
    """A local folder, unless there is a dataset of that very name: caches are often put there."""
    named_so = any(os.path.exists(name + suffix) for suffix in (".idx", MANIFEST))
    return os.path.isdir(name) and (name.endswith("/") or not named_so)


def _with_kind(prefix: str, there: Collection[str]) -> str:
    """A shard's name, by what lies beside its `.idx`."""
    for suffix in SUFFIXES.values():
        if prefix + suffix in there:
            return prefix if suffix == ".bin" else prefix + suffix
    return prefix


def _remote_pairs(name: str, storage: StorageConfig) -> list[str]:
    folder, pattern = (name.rstrip("/"), "*") if name.endswith("/") else (parent_url(name), name.rpartition("/")[2])
    store, key = open_store(f"{folder}/", storage)
    names = {item.key.rpartition("/")[2] for item in store.list(key) if "/" not in item.key.lstrip("/")[len(key.lstrip("/")) :]}
    stems = sorted(strip_suffix(item) for item in names if item.endswith(".idx"))
    chosen = [stem for stem in stems if fnmatch.fnmatch(stem, pattern) or fnmatch.fnmatch(f"{stem}.idx", pattern)]
    return [join_url(folder, _with_kind(stem, names)) for stem in chosen]
