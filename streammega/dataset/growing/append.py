"""The next version of a dataset, by any number of producers at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from streammega.config import StorageConfig
from streammega.dataset.growing.additions import (
    check_alike,
    check_beside,
    has_addition,
    joined,
    open_addition,
)
from streammega.dataset.growing.names import GrowingName, is_called, newest_version
from streammega.dataset.growing.numbers import parent_of, version_url
from streammega.dataset.growing.versions import DatasetVersion, newest_of
from streammega.dataset.manifest import MANIFEST, Parent, is_version, manifest_url
from streammega.dataset.shards import strip_suffix
from streammega.errors import ConfigError, StorageError
from streammega.errors.redaction import redact_urls
from streammega.storage import Store, open_store
from streammega.storage.object_ops import exists, read_whole
from streammega.storage.open import is_remote
from streammega.storage.store import ConditionsUnknown, create_object, create_on_condition


def append(
    prefix: str,
    names: Sequence[str],
    storage: StorageConfig | None = None,
    *,
    alone: bool = False,
) -> DatasetVersion:
    """Make the next version of a dataset: its shards, then those of other datasets in the same
    folder, each with a manifest of `streammega convert`. Theirs that it has already stay once.

    May be called by any number of producers at once, killed, and called again: all is in that was
    appended, once, and every version is whole. What no dataset is called yet begins with version 1.

    Args:
        prefix: the dataset that grows, path or URL.
        names: prefixes or manifests of what is appended.
        alone: no other producer appends to it now: for storage without conditional writes.

    Raises ConfigError for what cannot be one dataset, ObjectNotFoundError, FormatError for shards
    that are not what their manifest says, StorageError.
    """
    storage = storage or StorageConfig()
    prefix = strip_suffix(prefix)
    _check_no_version(prefix, storage)
    added = [open_addition(prefix, name, storage) for name in names]
    if not added:
        raise ConfigError(f"{redact_urls(prefix)}: nothing is named that is to be appended")
    create = create_object if alone else _create
    if not alone:
        _check_conditions(manifest_url(names[0]), storage)
    while True:  # each turn that fails is one in which another producer succeeded
        current = newest_of(prefix, storage)
        missing = [addition for addition in added if not has_addition(current, addition)]
        if current is not None and not missing:
            return current
        manifest = joined(prefix, current, missing)
        number = 1 if current is None else current.number + 1
        url = version_url(prefix, number)
        _check_free(f"{prefix}@{number}", storage)
        if _put(url, manifest.to_json(_parent(number, current)), storage, create):
            return DatasetVersion(number=number, url=url, manifest=manifest, added=True)
        _check_is_version(prefix, number, storage)


def check_can_append(
    prefix: str, name: str, told: Mapping[str, Any], storage: StorageConfig
) -> None:
    """Raise ConfigError for what could not be appended once it is made, as far as that is known.

    Args:
        prefix: the dataset that grows.
        name: the prefix that will be appended, of which nothing need be there.
        told: what is known of it: see `check_alike`.
    """
    prefix = strip_suffix(prefix)
    check_beside(prefix, name)
    _check_no_version(prefix, storage)
    current = newest_of(prefix, storage)
    if current is not None:
        check_alike(prefix, current.manifest, name, told)


def _parent(number: int, current: DatasetVersion | None) -> Parent | None:
    """What a version builds on; None: it lists everything. That is so too where the one it would
    build on was not needed to read the version before it: which lists everything, too.
    """
    parents = [] if current is None else current.parents
    for parent in parents:
        if parent.number and parent.number == parent_of(number):
            return parent
    return None


def _check_no_version(prefix: str, storage: StorageConfig) -> None:
    """Raise ConfigError for the name of a version: what is appended to it would be in another
    dataset, of that name, and in no version of the one that was meant.
    """
    version = GrowingName.parse(prefix)
    if version is None or is_called(prefix, storage):
        return
    grows = version.prefix
    if newest_version(grows, storage) or exists(grows + MANIFEST, storage):
        raise ConfigError(
            f"{redact_urls(prefix)}: is a version, and stays as it is; append to the dataset, "
            f"{redact_urls(grows)}, whose next version has what the newest has, and more"
        )


def _check_free(name: str, storage: StorageConfig) -> None:
    """Raise ConfigError for a name of a version that a dataset of its own has: runs that read it
    would read the version from then on.
    """
    if is_called(name, storage):
        raise ConfigError(
            f"{redact_urls(name)}: is a dataset of its own, and would be the name of the next "
            f"version; rename one of the two"
        )


def _check_is_version(prefix: str, number: int, storage: StorageConfig) -> None:
    """Raise ConfigError for a dataset of its own that lies where the next version is to be."""
    if not is_version(prefix, number, storage):
        name = version_url(prefix, number).removesuffix(MANIFEST)
        raise ConfigError(
            f"{redact_urls(name)}: is a dataset of its own, and lies where version {number} of "
            f"{redact_urls(prefix)} is to be; convert it to another name, and remove this one"
        )


def _put(
    url: str,
    data: bytes,
    storage: StorageConfig,
    create: Callable[[Store, str, bytes], bool],
) -> bool:
    """Write a version, unless one of its number is there: perhaps this one, after a lost answer."""
    store, key = open_store(url, storage)
    return create(store, key, data)


def _create(store: Store, key: str, data: bytes) -> bool:
    """`create` of stores that have it. Raises StorageError where one producer could write over
    another.
    """
    try:
        return create_on_condition(store, key, data)
    except ConditionsUnknown as unknown:
        raise _no_conditions(store.url(key), str(unknown)) from None


def _check_conditions(url: str, storage: StorageConfig) -> None:
    """Raise StorageError for a server that takes conditions and does not keep to them: one that
    writes the bytes that an object has once more, though it is there.
    """
    if not is_remote(url):
        return
    data = read_whole(url, storage)
    store, key = open_store(url, storage)
    if data is not None and _create(store, key, data):
        raise _no_conditions(url, "the server writes over what is there")


def _no_conditions(url: str, reason: str) -> StorageError:
    return StorageError(
        f"{url}: cannot be written on the condition that nothing is there ({reason}), so of two "
        f"producers one could be lost; where no other appends at the same time, say so: --alone"
    )
