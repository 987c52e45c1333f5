"""Versions of a dataset that grows while runs train on it, each with a manifest of its own.

    web.manifest.json             what convert wrote: version 0, where there is one
    web.v00000001.manifest.json   its shards, and those of what was appended first
    web.v00000002.manifest.json   those of version 1, and more

A version is written whole, on the condition that its number is not taken, and never changed. So
producers need no coordinator: of two at the same moment one is refused, looks again, and appends to
the version of the other. Shards of a version come first in the next one, in the same order. A killed
producer leaves a dataset that no version lists: it may be appended later.

A run names the version that it reads, `web@2`, and continues with it whatever is appended. `web@2..5`
is what was appended between the two: a phase that draws from it and from `web@2` reads nothing twice.

Names that end in `@N`, `@N..M` or `.vNNNNNNNN` are versions, whatever else is there: a folder so
called is written with a slash, `./web@7/`. `append.py` makes versions, `manifest.py` reads and
writes them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from streammega.config import StorageConfig
from streammega.dataset.manifest import (
    Manifest,
    Parent,
    StoredManifest,
    number_of,
    read_ancestors,
    read_manifest,
    stored_tokens,
    version_url,
)
from streammega.dataset.names import MANIFEST, strip_suffix, without_number
from streammega.errors import AccessDeniedError, ConfigError, FormatError, ObjectNotFoundError
from streammega.errors.redaction import redact_urls
from streammega.errors.words import pluralize
from streammega.storage import Store, open_store
from streammega.storage.object_ops import exists

_NUMBER = r"[1-9]\d{0,8}|0"
_VERSION = re.compile(rf"^(?P<prefix>.+)@((?P<after>{_NUMBER})\.\.)?(?P<number>{_NUMBER})$")


# --- names ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class VersionName:
    """The parts of a name like `web@7`. after: 2 in `web@2..7`, which is what was appended since."""

    prefix: str
    number: int
    after: int | None = None

    @classmethod
    def parse(cls, name: str) -> VersionName | None:
        """The parts of a name as users write it; None for names that are not of a version."""
        match = _VERSION.match(name)
        if match is None:
            return None
        after = None if match["after"] is None else int(match["after"])
        return cls(prefix=match["prefix"], number=int(match["number"]), after=after)

    @property
    def url(self) -> str:
        """The URL of its manifest."""
        return version_url(self.prefix, self.number)

    def tokens(self, storage: StorageConfig) -> int:
        """Its tokens, by the manifests. Raises as `read_manifest` does."""
        tokens = stored_tokens(self.url, storage)
        if self.after is not None:
            tokens -= stored_tokens(version_url(self.prefix, self.after), storage)
        return tokens


def check_no_version(name: str, advice: str) -> None:
    """Raise ConfigError for the name of a version, or of its manifest. advice: what to do instead;
    {prefix} in it is the dataset that grows.
    """
    version = VersionName.parse(name)
    stored = number_of(strip_suffix(name).removesuffix(MANIFEST) + MANIFEST)
    if version is not None:
        prefix = version.prefix
    elif stored is not None:
        prefix, _ = stored
    else:
        return
    advice = advice.format(prefix=redact_urls(prefix))
    raise ConfigError(f"{redact_urls(name)}: is the name of a version, and {advice}")


def read_named_manifest(name: str, storage: StorageConfig) -> tuple[Manifest, str] | None:
    """(manifest, its URL) of `x.json`, or of the version `web@2`; for `web@2..5` the manifest of
    version 5 without the shards of version 2. None for any other name.

    Raises ConfigError for a range without versions, ObjectNotFoundError, FormatError.
    """
    version = VersionName.parse(name)
    if version is None:
        return (read_manifest(name, storage), name) if name.endswith(".json") else None
    if version.after is None:
        return _read_version(version, storage), version.url
    if version.after >= version.number:
        raise ConfigError(
            f"{redact_urls(name)}: nothing was appended from {version.after} to {version.number}"
        )
    first = replace(version, number=version.after)
    before = _read_version(first, storage).shards
    last = _read_version(version, storage)
    if [shard.name for shard in last.shards[: len(before)]] != [shard.name for shard in before]:
        raise FormatError(
            f"{redact_urls(name)}: version {version.number} does not begin with version "
            f"{version.after}; were manifests written by hand?"
        )
    origins = None if last.origins is None else last.origins[len(before) :]
    appended = replace(last.with_shards(last.shards[len(before) :]), origins=origins)
    return appended, version.url


def _read_version(version: VersionName, storage: StorageConfig) -> Manifest:
    """Raises ObjectNotFoundError for a version that is not there, FormatError."""
    try:
        return read_manifest(version.url, storage)
    except ObjectNotFoundError:
        name = redact_urls(f"{version.prefix}@{version.number}")
    newest = newest_version(version.prefix, storage)
    if newest or exists(version_url(version.prefix, 0), storage):
        hint = f"the newest is {redact_urls(version.prefix)}@{newest}; name that, or append more"
    else:
        hint = (
            f"and no dataset {redact_urls(version.prefix)}; check the path, and write the name of a "
            f"folder with a slash: {name}/"
        )
    raise ObjectNotFoundError(f"{name}: there is no such version, {hint}")


# --- history --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class DatasetVersion:
    """A version of a dataset that grows.

    number: 0 is what convert wrote under the plain name. parents: what the next version may build
    on. added: whether this call of `append` made it.
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


def newest_version(prefix: str, storage: StorageConfig) -> int:
    """The highest number of a version; 0 where nothing was appended yet. One listing."""
    store, key = open_store(f"{strip_suffix(prefix)}.v", storage)
    return _newest_versions(store, key).get(base_name(key.removesuffix(".v")), 0)


def _newest_versions(store: Store, start: str) -> dict[str, int]:
    """The highest number of a version of each dataset, by name. start: of the manifests' keys."""
    newest: dict[str, int] = {}
    for info in store.list(start, recursive=False):
        version = number_of(info.key)
        if version is not None and version[1]:  # 0 has the plain name
            name = base_name(version[0])
            newest[name] = max(newest.get(name, 0), version[1])
    return newest


def versions(
    prefix: str, storage: StorageConfig | None = None, *, max_count: int | None = None
) -> list[DatasetVersion | DamagedVersion]:
    """The versions of a dataset, or the last `max_count` of them, the oldest first.

    Raises ObjectNotFoundError where the dataset has no version.
    """
    storage = storage or StorageConfig()
    prefix = strip_suffix(prefix)
    known: dict[str, StoredManifest] = {}
    newest = newest_version(prefix, storage)
    oldest = 0 if max_count is None else max(0, newest + 1 - max_count)
    listed: list[DatasetVersion | DamagedVersion] = []
    for number in range(oldest, newest + 1):
        url = version_url(prefix, number)
        try:
            manifest, parents = read_ancestors(url, storage, known)
        except ObjectNotFoundError:
            if number:
                why = "its manifest is not there, though later ones are"
                listed.append(DamagedVersion(number=number, url=url, why=why))
            continue  # 0 of a dataset that began by being appended to
        except FormatError as error:
            listed.append(DamagedVersion(number=number, url=url, why=str(error)))
        else:
            version = DatasetVersion(number=number, url=url, manifest=manifest, parents=parents)
            listed.append(version)
    if not listed:
        raise ObjectNotFoundError(
            f"{redact_urls(prefix)}: has neither a manifest nor a version; check the path"
        )
    return listed


def read_newest(prefix: str, storage: StorageConfig) -> DatasetVersion | None:
    """The last version; None where nothing has the name.

    Raises ConfigError for a pair without a manifest: the first version would be without it.
    """
    number = newest_version(prefix, storage)
    url = version_url(prefix, number)
    try:
        manifest, parents = read_ancestors(url, storage)
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


def unlisted_datasets(prefix: str, storage: StorageConfig | None = None) -> list[str]:
    """Datasets in the folder whose names begin as this one's and which no version lists, in name
    order. A killed producer left them, or a producer is about to append them.
    """
    storage = storage or StorageConfig()
    prefix = strip_suffix(prefix)
    current = read_newest(prefix, storage)
    listed = set() if current is None else listed_names(current.manifest)
    listed_sets = {without_number(name) for name in listed}
    store, key = open_store(prefix, storage)
    unlisted = []
    for info in store.list(key, recursive=False):
        rest = info.key[len(key) :]
        # "website" is another dataset than "web", and the plain name is version 0
        if not rest.endswith(MANIFEST) or rest == MANIFEST or rest[0].isalnum():
            continue
        if number_of(prefix + rest) is not None:
            continue
        name = prefix + rest.removesuffix(MANIFEST)
        # By the name alone, which is enough for most: thousands may have been appended.
        if base_name(name) in listed_sets:
            continue
        if not _names_at(name + MANIFEST, storage) <= listed:
            unlisted.append(name)
    return sorted(unlisted)


def _names_at(url: str, storage: StorageConfig) -> set[str]:
    """The shards of a manifest; of a damaged one its name, so that it counts as in no version."""
    try:
        return listed_names(read_manifest(url, storage))
    except FormatError:
        return {url}


# --- what may not be replaced ---------------------------------------------------------------------


def check_not_grown(prefix: str, storage: StorageConfig, *, overwrite: bool) -> None:
    """Raise ConfigError for an output of convert that is the name of a version, that versions list
    (they may be those of another dataset), or that has versions and no plain dataset.
    """
    prefix = strip_suffix(prefix)
    check_no_version(prefix, "versions are made by append; convert to a name with another end")
    if not overwrite:
        newest = _newest_visible(prefix, storage)
        if newest and not exists(version_url(prefix, 0), storage):
            raise ConfigError(
                f"{redact_urls(prefix)}: has versions up to {newest}, and none would list what "
                f"is made here; convert to another name, and append that (--append-to)"
            )
        return
    newest = newest_version(prefix, storage)
    if newest:
        raise ConfigError(
            f"{redact_urls(prefix)}: has versions up to {newest}, which list its shards; runs read "
            f"them. Choose another output, or remove the manifests of the versions first"
        )
    try:
        replaced = listed_names(read_manifest(prefix + MANIFEST, storage))
    except (ObjectNotFoundError, FormatError):
        replaced = {base_name(prefix)}  # a pair without a manifest that can be read
    store, key = open_store(prefix, storage)
    for other, number in _newest_versions(store, key.removesuffix(base_name(key))).items():
        # Not joined: a name without a folder has none.
        url = version_url(prefix.removesuffix(base_name(prefix)) + other, number)
        try:
            # The newest version lists all shards of the others.
            listed = listed_names(read_manifest(url, storage))
        except (ObjectNotFoundError, FormatError):
            continue  # no run can read it
        if listed & replaced:
            raise ConfigError(
                f"{redact_urls(prefix)}: is listed by versions of {redact_urls(other)}, up to "
                f"{number}; runs read it. Choose another output, and append that"
            )


def _newest_visible(prefix: str, storage: StorageConfig) -> int:
    """The newest version; 0 without the right to list, where the right to write may be there."""
    try:
        return newest_version(prefix, storage)
    except (AccessDeniedError, ObjectNotFoundError):
        return 0


def listed_names(manifest: Manifest) -> set[str]:
    """The names of a dataset's shards."""
    return {shard.name for shard in manifest.shards}


def base_name(name: str) -> str:
    """What follows the last slash."""
    _, _, last = name.rpartition("/")
    return last
