"""What may not be replaced: runs read it."""

from __future__ import annotations

from streammega.config import StorageConfig
from streammega.dataset.growing.names import (
    GrowingName,
    is_called,
    newest_of_numbers,
    newest_version,
)
from streammega.dataset.growing.numbers import STORED, number_of, version_url
from streammega.dataset.growing.versions import base_name, names_of
from streammega.dataset.manifest import MANIFEST, read_manifest
from streammega.dataset.shards import strip_suffix
from streammega.errors import AccessDeniedError, ConfigError, FormatError, ObjectNotFoundError
from streammega.errors.redaction import redact_urls
from streammega.storage import open_store
from streammega.storage.object_ops import exists


def check_not_grown(prefix: str, storage: StorageConfig, *, overwrite: bool) -> None:
    """Raise ConfigError for a dataset that is to be replaced and has versions, or is listed by those
    of another one: they list its shards. Also for one that is to be made where versions of its name
    are: it would be in none of them. And for the name of a version, as a user or as this library
    writes it: it would be one, or hidden by one.
    """
    prefix = strip_suffix(prefix)
    _check_no_version(prefix, storage)
    if not overwrite:
        newest = _newest_seen(prefix, storage)
        if newest and not exists(version_url(prefix, 0), storage):
            raise ConfigError(
                f"{redact_urls(prefix)}: has versions up to {newest}, none of which would list what "
                f"is made here; convert to another name beside it, and append that (--append-to)"
            )
        return
    newest = newest_version(prefix, storage)
    if newest:
        raise ConfigError(
            f"{redact_urls(prefix)}: has versions up to {newest}, which list its shards; runs read "
            f"them. Choose another output, or remove the manifests of the versions first"
        )
    replaced = _shards_called(prefix, storage)
    for other, number in _versions_beside(prefix, storage).items():
        # not joined: of a name without a folder there is none
        url = version_url(prefix.removesuffix(base_name(prefix)) + other, number)
        try:
            listed = names_of(read_manifest(url, storage))
        except (ObjectNotFoundError, FormatError):
            continue  # which no run can read
        if listed & replaced:
            raise ConfigError(
                f"{redact_urls(prefix)}: is listed by versions of {redact_urls(other)}, up to "
                f"{number}; runs read it. Choose another output, and append that"
            )


def _newest_seen(prefix: str, storage: StorageConfig) -> int:
    """The newest version, as far as it can be seen: who may not list may still write, and whoever
    writes says that there is no such bucket.
    """
    try:
        return newest_version(prefix, storage)
    except (AccessDeniedError, ObjectNotFoundError):
        return 0


def _check_no_version(prefix: str, storage: StorageConfig) -> None:
    stored = number_of(prefix + MANIFEST)
    if stored is not None:
        grows, number = stored
        raise ConfigError(
            f"{redact_urls(prefix)}: would be taken for version {number} of {redact_urls(grows)}; "
            f"convert to a name with another end"
        )
    version = GrowingName.parse(prefix)
    if version is None or is_called(prefix, storage):
        return
    if exists(version_url(version.prefix, version.number), storage):
        raise ConfigError(
            f"{redact_urls(prefix)}: is the name of a version of {redact_urls(version.prefix)}; "
            f"convert to another name"
        )


def _shards_called(prefix: str, storage: StorageConfig) -> set[str]:
    """The names of a dataset's shards; of a pair without a manifest that can be read, its own."""
    try:
        return names_of(read_manifest(prefix + MANIFEST, storage))
    except (ObjectNotFoundError, FormatError):
        return {base_name(prefix)}


def _versions_beside(prefix: str, storage: StorageConfig) -> dict[str, int]:
    """The newest version, which lists all shards of the others, of each dataset of the folder."""
    numbers_of: dict[str, list[int]] = {}
    store, key = open_store(prefix, storage)
    folder_key = key[: len(key) - len(base_name(key))]
    for info in store.list(folder_key, recursive=False):
        match = STORED.search(info.key)
        if match is not None:
            other = info.key[len(folder_key) : match.start()]
            numbers_of.setdefault(other, []).append(int(match["number"]))
    folder = prefix.removesuffix(base_name(prefix))
    newest = {}
    for other, numbers in numbers_of.items():
        newest[other] = newest_of_numbers(folder + other, numbers, storage)
    return {other: number for other, number in newest.items() if number}
