"""What listings tell of objects whose names are known: one request for hundreds of them, where
looking them up takes one for each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from streammega.config import StorageConfig
from streammega.dataset.shards import SUFFIXES, KnownShard, ManifestEntry, split_name
from streammega.errors import ObjectNotFoundError
from streammega.storage import ObjectInfo, open_store
from streammega.storage.etags import same_version
from streammega.storage.store import ListsBetween, NotListedBetween
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
    prefixes_of_root: dict[str, list[str]] = {}
    for name in names:
        prefix, _ = split_name(name)
        root = prefix[: _length_of_root(prefix)]
        prefixes_of_root.setdefault(root, []).append(prefix)
    told: set[str] = set()
    objects: dict[str, ObjectInfo] = {}
    for root, prefixes in prefixes_of_root.items():
        store, _ = open_store(prefixes[0], storage)
        if not isinstance(store, ListsBetween):
            continue
        listed = _listed(store, [prefix[len(root) :] for prefix in prefixes])
        if listed is None:
            continue
        told.update(prefixes)
        objects.update([(root + info.key, info) for info in listed])
    return Told(prefixes=frozenset(told), objects=objects)


def _length_of_root(url: str) -> int:
    """Of what stands before the key within a bucket, with its slash."""
    return url.find("/", url.find("://") + len("://")) + 1


def with_told(name: str, told: Told, entry: ManifestEntry | None = None) -> KnownShard:
    """A shard with what listings told of it, and a manifest."""
    prefix, kind = split_name(name)
    stored = told.object_at(prefix + SUFFIXES[kind])
    index = told.object_at(f"{prefix}.idx")
    return KnownShard(name=name, stored=stored, index=index, entry=entry)


def _listed(store: ListsBetween, keys: list[str]) -> list[ObjectInfo] | None:
    """The objects of shards, and some of those that lie between them; None where listings do not
    tell them, or not their ETags.
    """
    if len(keys) <= FEW:
        return None
    # As their objects lie, all of whose names go on by a dot.
    ordered = sorted(keys, key=lambda key: f"{key}.")
    groups = [ordered[first : first + GROUP] for first in range(0, len(ordered), GROUP)]

    looked: list[ObjectInfo] = []

    def list_group(number: int) -> list[ObjectInfo] | None:
        if number == len(groups):
            looked.extend(_look(store, f"{ordered[0]}.idx"))
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
    return objects if _agree(objects, looked) else None


def _look(store: ListsBetween, key: str) -> list[ObjectInfo]:
    """What another answer than a listing tells of an object; nothing, if it is not there."""
    try:
        return [store.info(key)]
    except ObjectNotFoundError:
        return []  # whoever opens it says what is missing


def _agree(listed: Sequence[ObjectInfo], looked: Sequence[ObjectInfo]) -> bool:
    """Whether a listing tells the ETags that other answers do: where it does not, a run would end
    at its first read.
    """
    for info in looked:
        for other in listed:
            if other.key == info.key:
                is_same = info.size == other.size and same_version(info.etag, other.etag)
                return bool(other.etag) and is_same
    return False
