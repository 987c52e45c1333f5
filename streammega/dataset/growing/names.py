"""What names of versions stand for: `web@2`, and `web@2..5`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from streammega.config import StorageConfig
from streammega.dataset.growing.numbers import STORED, version_url
from streammega.dataset.manifest import (
    StoredManifest,
    is_version,
    manifest_shards,
    stored_tokens,
)
from streammega.dataset.shards import MANIFEST, KnownShard, strip_suffix
from streammega.errors import ConfigError, FormatError, ObjectNotFoundError
from streammega.errors.redaction import redact_urls
from streammega.storage import open_store
from streammega.storage.object_ops import exists

_NAMED = re.compile(r"^(?P<prefix>.+)@(?P<number>[1-9]\d{0,8}|0)$")
_APPENDED = re.compile(r"^(?P<prefix>.+)@(?P<after>\d{1,9})\.\.(?P<number>\d{1,9})$")


@dataclass(frozen=True, kw_only=True)
class GrowingName:
    """What a name like `web@7` stands for; `after`: of `web@2..7`, what was appended since."""

    prefix: str
    number: int
    after: int | None = None

    @classmethod
    def parse(cls, name: str) -> GrowingName | None:
        """Of a name as it is written; None for others."""
        match = _NAMED.match(name)
        if match is not None:
            return cls(prefix=match["prefix"], number=int(match["number"]))
        match = _APPENDED.match(name)
        if match is None:
            return None
        return cls(prefix=match["prefix"], number=int(match["number"]), after=int(match["after"]))

    def tokens(self, storage: StorageConfig) -> int:
        """How many it stands for, by the manifests. Raises as `read_manifest` does."""
        tokens = stored_tokens(version_url(self.prefix, self.number), storage)
        if self.after is not None:
            tokens -= stored_tokens(version_url(self.prefix, self.after), storage)
        return tokens


def growing_name(name: str, storage: StorageConfig) -> GrowingName | None:
    """The version that a dataset's name stands for; None where it is no version, or something is
    called just that.
    """
    growing = GrowingName.parse(name)
    if growing is None or is_called(name, storage):
        return None
    return growing if exists(version_url(growing.prefix, growing.number), storage) else None


def named_version(name: str, storage: StorageConfig) -> str:
    """The manifest that `web@2` stands for; any other name as it is, and also one with such an end
    where something is called just that.

    Raises ObjectNotFoundError for a version that is not there, where there are others.
    """
    match = _NAMED.match(name)
    if match is None:
        return name
    prefix = match["prefix"]
    number = int(match["number"])
    url = version_url(prefix, number)
    if exists(url, storage):
        return url
    newest = newest_version(prefix, storage)
    if newest == 0 and not exists(version_url(prefix, 0), storage):
        return name
    if is_called(name, storage) or _is_folder(name, storage):
        return name  # whoever opens it says what is missing
    raise ObjectNotFoundError(
        f"{redact_urls(name)}: there is no such version, the newest is "
        f"{redact_urls(prefix)}@{newest}; name that, or append what is to come"
    )


def is_called(name: str, storage: StorageConfig) -> bool:
    """Whether something is called just that: a pair, or shards with a manifest."""
    return exists(f"{name}.idx", storage) or exists(f"{name}{MANIFEST}", storage)


def _is_folder(name: str, storage: StorageConfig) -> bool:
    """Whether anything lies in a folder that is called just that."""
    store, key = open_store(name, storage)
    return any(info.key.startswith(f"{key}/") for info in store.list(f"{key}/", recursive=False))


def appended_shards(name: str, storage: StorageConfig) -> list[KnownShard] | None:
    """The shards that `web@2..5` stands for, those of version 5 that version 2 has not, in order;
    None for any other name, and also where something is called just that.

    Raises ConfigError for what can hold none, ObjectNotFoundError, FormatError.
    """
    match = _APPENDED.match(name)
    if match is None or is_called(name, storage):
        return None
    after = int(match["after"])
    number = int(match["number"])
    if after >= number:
        raise ConfigError(f"{redact_urls(name)}: nothing was appended from {after} to {number}")
    before = manifest_shards(named_version(f"{match['prefix']}@{after}", storage), storage)
    shards = manifest_shards(named_version(f"{match['prefix']}@{number}", storage), storage)
    if [shard.name for shard in shards[: len(before)]] != [shard.name for shard in before]:
        raise FormatError(
            f"{redact_urls(name)}: version {number} does not begin with version {after}; were "
            f"manifests written by hand?"
        )
    return shards[len(before) :]


def newest_version(
    prefix: str, storage: StorageConfig, known: dict[str, StoredManifest] | None = None
) -> int:
    """The highest number of a version; 0 where nothing was appended yet. One listing, and a look at
    the manifest. known: as of `read_line`.
    """
    numbers = []
    beginning = f"{strip_suffix(prefix)}.v"
    store, key = open_store(beginning, storage)
    for info in store.list(key, recursive=False):
        match = STORED.match(info.key, len(key) - len(".v"))
        if match is not None:
            numbers.append(int(match["number"]))
    return newest_of_numbers(prefix, numbers, storage, known)


def newest_of_numbers(
    prefix: str,
    numbers: Iterable[int],
    storage: StorageConfig,
    known: dict[str, StoredManifest] | None = None,
) -> int:
    """The highest of numbers that is a version's, and not a part of the name of a dataset of its
    own; 0: none is.
    """
    for number in sorted(numbers, reverse=True):
        if is_version(strip_suffix(prefix), number, storage, known):
            return number
    return 0
