"""Which versions of a dataset there are, and what lies beside it and is in none of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from streammega.config import StorageConfig
from streammega.dataset.growing.names import newest_version
from streammega.dataset.growing.numbers import number_of, version_url
from streammega.dataset.manifest import (
    MANIFEST,
    Manifest,
    Parent,
    StoredManifest,
    is_version,
    read_line,
    read_manifest,
)
from streammega.dataset.shards import set_name, strip_suffix
from streammega.errors import ConfigError, FormatError, ObjectNotFoundError
from streammega.errors.redaction import redact_urls
from streammega.errors.words import pluralize
from streammega.storage import open_store
from streammega.storage.object_ops import exists


@dataclass(frozen=True, kw_only=True)
class DatasetVersion:
    """A version of a dataset that grows. added: whether `append` made it, and had to.

    number: 0 is what convert wrote under the plain name. parents: what the next version may build
    on.
    """

    number: int
    url: str
    manifest: Manifest
    parents: list[Parent] = field(default_factory=list, repr=False, compare=False)
    added: bool = False

    def __str__(self) -> str:
        manifest = self.manifest
        return (
            f"{pluralize(len(manifest.shards), 'shard')}, "
            f"{pluralize(manifest.documents, 'document')}, {pluralize(manifest.tokens, 'token')}"
        )


@dataclass(frozen=True, kw_only=True)
class DamagedVersion:
    """A version whose manifest cannot be read, and why. Others may be sound."""

    number: int
    url: str
    why: str

    def __str__(self) -> str:
        return f"cannot be read: {self.why}"


def versions(
    prefix: str, storage: StorageConfig | None = None, *, most: int | None = None
) -> list[DatasetVersion | DamagedVersion]:
    """The versions of a dataset, or the last `most` of them, the oldest first.

    Raises ObjectNotFoundError where there is none.
    """
    storage = storage or StorageConfig()
    prefix = strip_suffix(prefix)
    known: dict[str, StoredManifest] = {}
    newest = newest_version(prefix, storage, known)
    oldest = 0 if most is None else max(0, newest + 1 - most)
    found: list[DatasetVersion | DamagedVersion] = []
    for number in range(oldest, newest + 1):
        url = version_url(prefix, number)
        try:
            manifest, parents = read_line(url, storage, known)
        except ObjectNotFoundError:
            if number:
                why = "its manifest is not there, though later ones are"
                found.append(DamagedVersion(number=number, url=url, why=why))
            continue  # 0 of a dataset that began by being appended to
        except FormatError as error:
            found.append(DamagedVersion(number=number, url=url, why=str(error)))
        else:
            version = DatasetVersion(number=number, url=url, manifest=manifest, parents=parents)
            found.append(version)
    if not found:
        raise ObjectNotFoundError(
            f"{redact_urls(prefix)}: has neither a manifest nor a version; check the path"
        )
    return found


def newest_of(prefix: str, storage: StorageConfig) -> DatasetVersion | None:
    """The last version; None where there is nothing of the name.

    Raises ConfigError for a pair without a manifest: the first version would be without it.
    """
    known: dict[str, StoredManifest] = {}
    number = newest_version(prefix, storage, known)
    url = version_url(prefix, number)
    try:
        manifest, parents = read_line(url, storage, known)
    except ObjectNotFoundError:
        if number:
            raise
        if exists(f"{prefix}.idx", storage):
            raise ConfigError(
                f"{redact_urls(prefix)}: is a pair without a manifest, which would be in no version; "
                f"convert it to another name, and append that"
            ) from None
        return None
    return DatasetVersion(number=number, url=url, manifest=manifest, parents=parents)


def orphans(prefix: str, storage: StorageConfig | None = None) -> list[str]:
    """Datasets in the folder that no version lists, though their names begin as that of the dataset
    does, in name order: what a killed producer left, or one is about to append.
    """
    storage = storage or StorageConfig()
    prefix = strip_suffix(prefix)
    current = newest_of(prefix, storage)
    listed = set() if current is None else names_of(current.manifest)
    newest = 0 if current is None else current.number
    sets_listed = {set_name(name) for name in listed}
    store, key = open_store(prefix, storage)
    left = []
    for info in store.list(key, recursive=False):
        rest = info.key[len(key) :]
        # "website" is no part of "web", and what has its very name is version 0
        if not rest.endswith(MANIFEST) or rest == MANIFEST or rest[0].isalnum():
            continue
        if _is_some_version(prefix + rest, prefix, newest, storage):
            continue
        name = prefix + rest.removesuffix(MANIFEST)
        # by the name, which most are told by: of thousands that were appended none is read
        if base_name(name) in sets_listed:
            continue
        if not _names_at(name + MANIFEST, storage) <= listed:
            left.append(name)
    return sorted(left)


def _is_some_version(url: str, prefix: str, newest: int, storage: StorageConfig) -> bool:
    """Whether a manifest is a version, of the dataset `prefix` whose newest is known or of another."""
    of_version = number_of(url)
    if of_version is None:
        return False
    # Versions up to the newest are many, and none of them is looked at.
    name, number = of_version
    return (name == prefix and number <= newest) or is_version(name, number, storage)


def _names_at(url: str, storage: StorageConfig) -> set[str]:
    """The shards of a manifest; of a damaged one its name: whoever appends it is told."""
    try:
        return names_of(read_manifest(url, storage))
    except FormatError:
        return {url}


def names_of(manifest: Manifest) -> set[str]:
    """The names of a dataset's shards."""
    return {shard.name for shard in manifest.shards}


def folder_of(name: str) -> str:
    """What stands before the last slash."""
    folder, _, _ = name.rpartition("/")
    return folder


def base_name(name: str) -> str:
    """What stands behind the last slash."""
    _, _, last = name.rpartition("/")
    return last
