"""What listings tell of objects whose names are known: one request for hundreds of them, where
looking them up takes one for each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from streammega.config import StorageConfig
from streammega.dataset.shards import SUFFIXES, KnownShard, ManifestEntry, split_name
from streammega.errors import ObjectNotFoundError
from streammega.storage import ObjectInfo, open_store
from streammega.storage.fetch.threads import each
from streammega.storage.store import ListsBetween
from streammega.storage.versions import same_version

FEW = 8
"""Up to so many shards are asked for one by one; a listing tells of 1,000 objects, but of others
too.
"""
GROUP = 480
"""Shards of one listing: their tokens and indices, and some others, are one answer of 1,000."""
MOST_OBJECTS = 3000
"""Of one listing: where so many others lie between the shards, these are looked up instead."""
LISTERS = 16
"""Listings at once: those of 7,680 shards."""
_AFTER_A_DOT = "/"
"""The character after a dot: what begins with a name and a dot lies before the name and this."""


@dataclass(frozen=True, kw_only=True)
class Told:
    """What listings told: all objects of the shards `prefixes`, by their URLs."""

    prefixes: frozenset[str] = frozenset()
    objects: Mapping[str, ObjectInfo] = field(default_factory=dict)

    def object_at(self, url: str) -> ObjectInfo | None:
        """An object, if it was told with an ETag: without one, replaced ones would not be
        noticed.
        """
        info = self.objects.get(url)
        return info if info is not None and info.etag else None


NOTHING = Told()


def told_of(names: Sequence[str], storage: StorageConfig) -> Told:
    """What listings tell of shards of remote stores, by their names; of few, and of those that no
    listing between two keys tells of, nothing.

    Raises StorageError for what may pass when it is tried again.
    """
    keys_of_root: dict[str, list[str]] = {}
    for name in names:
        prefix, _ = split_name(name)
        root, key = _split_url(prefix)
        keys_of_root.setdefault(root, []).append(key)
    prefixes: set[str] = set()
    objects: dict[str, ObjectInfo] = {}
    for root, keys in keys_of_root.items():
        store, _ = open_store(root + keys[0], storage)
        if not isinstance(store, ListsBetween):
            continue
        listed = _listed(store, keys)
        if listed is None or not _agree(store, listed):
            continue
        prefixes.update(root + key for key in keys)
        objects.update((root + info.key, info) for info in listed)
    return Told(prefixes=frozenset(prefixes), objects=objects)


def _split_url(url: str) -> tuple[str, str]:
    """The root of a bucket, with its slash, and the key within."""
    scheme, _, path = url.partition("://")
    bucket, _, key = path.partition("/")
    return f"{scheme}://{bucket}/", key


def with_told(name: str, told: Told, entry: ManifestEntry | None = None) -> KnownShard:
    """A shard with what listings told of it, and a manifest."""
    prefix, kind = split_name(name)
    return KnownShard(
        name=name,
        stored=told.object_at(prefix + SUFFIXES[kind]),
        index=told.object_at(f"{prefix}.idx"),
        entry=entry,
    )


def _listed(store: ListsBetween, keys: list[str]) -> list[ObjectInfo] | None:
    """The objects of shards, and some of those that lie between them."""
    if len(keys) <= FEW:
        return None
    # As their objects lie, all of whose names go on by a dot.
    ordered = sorted(keys, key=lambda key: f"{key}.")
    groups = [ordered[first : first + GROUP] for first in range(0, len(ordered), GROUP)]

    def listed_group(group: list[str]) -> list[ObjectInfo] | None:
        return store.list_between(group[0], group[-1] + _AFTER_A_DOT, MOST_OBJECTS)

    # The first alone: where it tells nothing, the others would be in vain.
    first, *others = groups
    parts = [listed_group(first)]
    if parts[0] is not None:
        parts += each(listed_group, others, LISTERS)
    objects: list[ObjectInfo] = []
    for part in parts:
        if part is None:
            return None
        objects += part
    return objects


def _agree(store: ListsBetween, listed: Sequence[ObjectInfo]) -> bool:
    """Whether a listing tells the ETags that other answers do: where it does not, a run would end
    at its first read.
    """
    if not listed or not listed[0].etag:
        return False
    first = listed[0]
    try:
        info = store.info(first.key)
    except ObjectNotFoundError:
        return False  # it may be of no concern, and was removed just now
    return info.size == first.size and same_version(info.etag, first.etag)
