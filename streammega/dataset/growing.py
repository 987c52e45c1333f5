"""Datasets that grow while runs train on them: versions, each a manifest of its own.

    web.manifest.json             what convert wrote: version 0, where there is one
    web.v00000001.manifest.json   its shards, and those of what was appended first
    web.v00000002.manifest.json   those of version 1, and more

A version is written on the condition that none of its number is there, whole, and never again. So
producers need no coordinator: of two at the same moment one is refused, looks again, and appends to
the version of the other. Shards of a version come first in the next one, in the same order. What a
killed producer leaves is a dataset that no version lists: it may be appended later.

A run names the version that it reads, `web@2`, and goes on with it whatever is appended. `web@2..5`
is what was appended between the two: a phase that draws from it beside `web@2` reads nothing twice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from streammega.config import StorageConfig
from streammega.dataset.manifest import (
    MANIFEST,
    Manifest,
    Shard,
    manifest_shards,
    manifest_url,
    read_manifest,
)
from streammega.dataset.shards import SUFFIXES, KnownShard, check_told, set_name, strip_suffix
from streammega.errors import (
    ConfigError,
    FormatError,
    ObjectNotFoundError,
    StorageError,
)
from streammega.errors.redaction import redact_urls
from streammega.storage import Store, join_url, open_store
from streammega.storage.fetch.threads import each
from streammega.storage.moves import exists, read_whole
from streammega.storage.open import is_remote
from streammega.storage.store import ConditionsUnknown, create_object, create_on_condition

_NAMED = re.compile(r"^(?P<prefix>.+)@(?P<number>[1-9]\d{0,8}|0)$")
_APPENDED = re.compile(r"^(?P<prefix>.+)@(?P<after>\d{1,9})\.\.(?P<number>\d{1,9})$")
_STORED = re.compile(rf"\.v(?P<number>\d{{8,}}){re.escape(MANIFEST)}$")
LOOKS_AT_ONCE = 16
"""Requests for the sizes of shards: each takes a round trip, and there may be thousands."""


@dataclass(frozen=True, kw_only=True)
class DatasetVersion:
    """A version of a dataset that grows. added: whether `append` made it, and had to.

    number: 0 is what convert wrote under the plain name.
    """

    number: int
    url: str
    manifest: Manifest
    added: bool = False

    def __str__(self) -> str:
        manifest = self.manifest
        return (
            f"{len(manifest.shards):,} shards, {manifest.documents:,} documents, "
            f"{manifest.tokens:,} tokens"
        )


def version_url(prefix: str, number: int) -> str:
    """Where the manifest of a version lies."""
    prefix = strip_suffix(prefix)
    return f"{prefix}.v{number:08d}{MANIFEST}" if number else f"{prefix}{MANIFEST}"


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
    if _is_called(name, storage) or _is_folder(name, storage):
        return name  # whoever opens it says what is missing
    raise ObjectNotFoundError(
        f"{redact_urls(name)}: there is no such version, the newest is "
        f"{redact_urls(prefix)}@{newest}; name that, or append what is to come"
    )


def _is_called(name: str, storage: StorageConfig) -> bool:
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
    if match is None or _is_called(name, storage):
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


def newest_version(prefix: str, storage: StorageConfig) -> int:
    """The highest number of a version; 0 where nothing was appended yet. One listing."""
    numbers = [0]
    beginning = f"{strip_suffix(prefix)}.v"
    store, key = open_store(beginning, storage)
    for info in store.list(key, recursive=False):
        match = _STORED.match(info.key, len(key) - len(".v"))
        if match is not None:
            numbers.append(int(match["number"]))
    return max(numbers)


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
    added = [_addition(prefix, name, storage) for name in names]
    if not added:
        raise ConfigError(f"{redact_urls(prefix)}: nothing is named that is to be appended")
    create = create_object if alone else _create
    if not alone:
        _check_conditions(manifest_url(names[0]), storage)
    while True:  # each turn that fails is one in which another producer succeeded
        current = _newest(prefix, storage)
        missing = [addition for addition in added if not _has(current, addition)]
        if current is not None and not missing:
            return current
        manifest = _joined(prefix, current, missing)
        number = 1 if current is None else current.number + 1
        url = version_url(prefix, number)
        _check_free(f"{prefix}@{number}", storage)
        if _put(url, manifest, storage, create):
            return DatasetVersion(number=number, url=url, manifest=manifest, added=True)


def versions(
    prefix: str, storage: StorageConfig | None = None, *, most: int | None = None
) -> list[DatasetVersion]:
    """The versions of a dataset, or the last `most` of them, the oldest first.

    Raises ObjectNotFoundError where there is none.
    """
    storage = storage or StorageConfig()
    prefix = strip_suffix(prefix)
    newest = newest_version(prefix, storage)
    oldest = 0 if most is None else max(0, newest + 1 - most)
    found = []
    for number in range(oldest, newest + 1):
        url = version_url(prefix, number)
        try:
            manifest = read_manifest(url, storage)
        except ObjectNotFoundError:
            continue  # 0 of a dataset that began by being appended to
        found.append(DatasetVersion(number=number, url=url, manifest=manifest))
    if not found:
        raise ObjectNotFoundError(
            f"{redact_urls(prefix)}: has neither a manifest nor a version; check the path"
        )
    return found


def orphans(prefix: str, storage: StorageConfig | None = None) -> list[str]:
    """Datasets in the folder that no version lists, though their names begin as that of the dataset
    does, in name order: what a killed producer left, or one is about to append.
    """
    storage = storage or StorageConfig()
    prefix = strip_suffix(prefix)
    current = _newest(prefix, storage)
    listed = set() if current is None else _names_of(current.manifest)
    sets_listed = {set_name(name) for name in listed}
    store, key = open_store(prefix, storage)
    left = []
    for info in store.list(key, recursive=False):
        rest = info.key[len(key) :]
        is_dataset = rest.endswith(MANIFEST) and _STORED.search(rest) is None
        # "website" is no part of "web", and what has its very name is version 0
        if not is_dataset or rest == MANIFEST or rest[0].isalnum():
            continue
        name = prefix + rest.removesuffix(MANIFEST)
        # by the name, which most are told by: of thousands that were appended none is read
        if _base_name(name) in sets_listed:
            continue
        if not _names_of(read_manifest(name + MANIFEST, storage)) <= listed:
            left.append(name)
    return sorted(left)


@dataclass(frozen=True, kw_only=True)
class _Addition:
    """What is to be appended: its name, for messages, and its manifest."""

    name: str
    manifest: Manifest


def check_not_grown(prefix: str, storage: StorageConfig) -> None:
    """Raise ConfigError for a dataset that has versions, or is listed by those of another one:
    they list its shards, which are to be replaced.
    """
    prefix = strip_suffix(prefix)
    newest = newest_version(prefix, storage)
    if newest:
        raise ConfigError(
            f"{redact_urls(prefix)}: has versions up to {newest}, which list its shards; runs read "
            f"them. Choose another output, or remove the manifests of the versions first"
        )
    replaced = _shards_called(prefix, storage)
    for other, number in _versions_beside(prefix, storage).items():
        # not joined: of a name without a folder there is none
        url = version_url(prefix.removesuffix(_base_name(prefix)) + other, number)
        try:
            listed = _names_of(read_manifest(url, storage))
        except (ObjectNotFoundError, FormatError):
            continue  # which no run can read
        if listed & replaced:
            raise ConfigError(
                f"{redact_urls(prefix)}: is listed by versions of {redact_urls(other)}, up to "
                f"{number}; runs read it. Choose another output, and append that"
            )


def _shards_called(prefix: str, storage: StorageConfig) -> set[str]:
    """The names of a dataset's shards; of a pair without a manifest that can be read, its own."""
    try:
        return _names_of(read_manifest(prefix + MANIFEST, storage))
    except (ObjectNotFoundError, FormatError):
        return {_base_name(prefix)}


def _versions_beside(prefix: str, storage: StorageConfig) -> dict[str, int]:
    """The newest version, which lists all shards of the others, of each dataset of the folder."""
    newest: dict[str, int] = {}
    store, key = open_store(prefix, storage)
    folder_key = key[: len(key) - len(_base_name(key))]
    for info in store.list(folder_key, recursive=False):
        match = _STORED.search(info.key)
        if match is not None:
            other = info.key[len(folder_key) : match.start()]
            newest[other] = max(newest.get(other, 0), int(match["number"]))
    return newest


def _check_no_version(prefix: str, storage: StorageConfig) -> None:
    """Raise ConfigError for the name of a version: what is appended to it would be in another
    dataset, of that name, and in no version of the one that was meant.
    """
    match = _APPENDED.match(prefix) or _NAMED.match(prefix)
    if match is None or _is_called(prefix, storage):
        return
    if newest_version(match["prefix"], storage) or exists(match["prefix"] + MANIFEST, storage):
        raise ConfigError(
            f"{redact_urls(prefix)}: is a version, and stays as it is; append to the dataset, "
            f"{redact_urls(match['prefix'])}, whose next version has what the newest has, and more"
        )


def _check_free(name: str, storage: StorageConfig) -> None:
    """Raise ConfigError for a name of a version that a dataset of its own has: runs that read it
    would read the version from then on.
    """
    if _is_called(name, storage):
        raise ConfigError(
            f"{redact_urls(name)}: is a dataset of its own, and would be the name of the next "
            f"version; rename one of the two"
        )


def check_beside(prefix: str, name: str) -> None:
    """Raise ConfigError unless what is appended lies where the dataset does, by another name."""
    beside = strip_suffix(name)
    if _folder(beside) != _folder(strip_suffix(prefix)):
        raise ConfigError(
            f"{redact_urls(name)}: what is appended lies in the folder of {redact_urls(prefix)}, "
            f"since a manifest names shards beside it; convert it to there"
        )
    if beside == strip_suffix(prefix):
        raise ConfigError(
            f"{redact_urls(name)}: is the dataset itself; what is appended to it has another name"
        )


def _addition(prefix: str, name: str, storage: StorageConfig) -> _Addition:
    """A dataset whose shards are what its manifest says, as far as their sizes tell."""
    url = manifest_url(name)
    check_beside(prefix, url.removesuffix(MANIFEST))
    try:
        manifest = read_manifest(url, storage)
    except ObjectNotFoundError as error:
        raise ObjectNotFoundError(
            f"{redact_urls(name)}: has no manifest, so what its shards must be is not known; "
            f"convert it to a name beside {redact_urls(prefix)} ({error})"
        ) from None
    folder = _folder(url)
    suffix = SUFFIXES[manifest.kind]  # type: ignore[index]  # checked when it was read

    def check(shard: Shard) -> None:
        for ending, size in ((suffix, shard.bytes), (".idx", shard.index_bytes)):
            store, key = open_store(join_url(folder, shard.name + ending), storage)
            check_told(store.url(key), "bytes", store.info(key).size, size)

    each(check, manifest.shards, LOOKS_AT_ONCE)
    return _Addition(name=name, manifest=manifest)


def _newest(prefix: str, storage: StorageConfig) -> DatasetVersion | None:
    """The last version; None where there is nothing of the name.

    Raises ConfigError for a pair without a manifest: the first version would be without it.
    """
    number = newest_version(prefix, storage)
    url = version_url(prefix, number)
    try:
        manifest = read_manifest(url, storage)
    except ObjectNotFoundError:
        if number:
            raise
        if exists(f"{prefix}.idx", storage):
            raise ConfigError(
                f"{redact_urls(prefix)}: is a pair without a manifest, which would be in no version; "
                f"convert it to another name, and append that"
            ) from None
        return None
    return DatasetVersion(number=number, url=url, manifest=manifest)


def _has(version: DatasetVersion | None, addition: _Addition) -> bool:
    """Whether a version has all shards of an addition.

    Raises ConfigError where it has others of their names.
    """
    if version is None:
        return False
    shard_of_name = {shard.name: shard for shard in version.manifest.shards}
    known = [shard_of_name.get(shard.name) for shard in addition.manifest.shards]
    if known == addition.manifest.shards:
        return True
    if any(shard is not None for shard in known):
        raise ConfigError(
            f"{redact_urls(addition.name)}: version {version.number} lists shards of these names "
            f"with other contents; what a version lists must stay as it is: convert to another name"
        )
    return False


def _joined(prefix: str, current: DatasetVersion | None, added: Sequence[_Addition]) -> Manifest:
    """The manifest of all shards. Raises ConfigError for what cannot be one dataset."""
    first_name = added[0].name if current is None else prefix
    first = added[0].manifest if current is None else current.manifest
    manifests = [addition.manifest for addition in added]
    if current is not None:
        manifests.insert(0, current.manifest)
    for addition in added:
        _check_alike(first_name, first, addition)
    shards = [shard for manifest in manifests for shard in manifest.shards]
    if len({shard.name for shard in shards}) < len(shards):
        raise ConfigError(f"{redact_urls(prefix)}: a shard is named twice among what is appended")
    return replace(
        first,
        eod_id=_agreed([manifest.eod_id for manifest in manifests]),
        vocab_size=_agreed([manifest.vocab_size for manifest in manifests]),
        tokenizer=_agreed([manifest.tokenizer for manifest in manifests]) or {},
        documents=sum(shard.documents for shard in shards),
        sequences=sum(shard.sequences for shard in shards),
        tokens=sum(shard.tokens for shard in shards),
        shards=shards,
        origins=_joined_origins([manifest.origins for manifest in manifests]),
        pack=_joined_bins([manifest.pack for manifest in manifests]),
    )


def _joined_origins(origins: Sequence[list[str] | None]) -> list[str] | None:
    """The checksums of all origins; None where one of the datasets has none, since a manifest has
    one for each of its shards, or no one. What lies beside a shard is found without them.
    """
    joined: list[str] = []
    for of_dataset in origins:
        if of_dataset is None:
            return None
        joined += of_dataset
    return joined


def _joined_bins(packs: Sequence[dict[str, int] | None]) -> dict[str, int] | None:
    """What manifests say together of their bins, which are of one length; None where documents lie
    end to end.
    """
    joined: dict[str, int] | None = None
    for pack in packs:
        if joined is None or pack is None:
            joined = pack
        else:
            counts = {name: joined[name] + pack[name] for name in ("bins", "padding")}
            joined = {**joined, **counts}
    return joined


def _check_alike(first_name: str, first: Manifest, addition: _Addition) -> None:
    other = addition.manifest
    for what in ("kind", "dtype", "multimodal", "loss_modes", "bin_tokens"):
        if getattr(first, what) != getattr(other, what):
            raise ConfigError(
                f"{redact_urls(addition.name)}: has {what} {getattr(other, what)!r}, "
                f"{redact_urls(first_name)} {getattr(first, what)!r}; a dataset has one: convert it "
                f"again"
            )
    digests = (first.tokenizer.get("digest"), other.tokenizer.get("digest"))
    if all(digests) and len(set(digests)) > 1:
        raise ConfigError(
            f"{redact_urls(addition.name)}: is of tokenizer {other.tokenizer.get('name')}, "
            f"{redact_urls(first_name)} of {first.tokenizer.get('name')}: their ids mean different "
            f"things; tokenize the text again with the latter"
        )


def _agreed(values: Sequence[Any]) -> Any:
    """What all say; None where some say nothing or another thing."""
    return values[0] if all(value == values[0] for value in values) else None


def _put(
    url: str,
    manifest: Manifest,
    storage: StorageConfig,
    create: Callable[[Store, str, bytes], bool],
) -> bool:
    """Write a version, unless one of its number is there: perhaps this one, after a lost answer."""
    store, key = open_store(url, storage)
    return create(store, key, manifest.to_json())


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


def _names_of(manifest: Manifest) -> set[str]:
    return {shard.name for shard in manifest.shards}


def _folder(name: str) -> str:
    folder, _, _ = name.rpartition("/")
    return folder


def _base_name(name: str) -> str:
    _, _, last = name.rpartition("/")
    return last
