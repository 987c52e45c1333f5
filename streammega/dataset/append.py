"""The next version of a dataset, by any number of producers at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from streammega.config import StorageConfig
from streammega.dataset.manifest import (
    MANIFEST,
    Manifest,
    Parent,
    ShardEntry,
    manifest_url,
    parent_of,
    read_manifest,
    version_url,
)
from streammega.dataset.shard import SUFFIXES, check_expected, strip_suffix
from streammega.dataset.versions import (
    DatasetVersion,
    check_no_version,
    folder_of,
    read_newest,
)
from streammega.errors import ConfigError, ObjectNotFoundError, StorageError, UnsupportedOperation
from streammega.errors.redaction import redact_urls
from streammega.storage import Store, join_url, open_store, parent_url
from streammega.storage.object_ops import read_whole
from streammega.storage.open import is_remote, resolved
from streammega.storage.store import create_object, create_on_condition
from streammega.storage.thread_pool import parallel_map

LOOKS_AT_ONCE = 16
"""Requests for the sizes of shards: each takes a round trip, and there may be thousands."""

ALIKE = ("kind", "dtype", "multimodal", "loss_modes", "bin_tokens")
"""What all shards of a dataset have in common, by the manifest's names, beside their tokenizer."""


NOT_TO_A_VERSION = (
    "stays as it is; append to the dataset, {prefix}, whose next version has what the newest has, and "
    "more"
)


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
    check_no_version(prefix, NOT_TO_A_VERSION)
    added = [open_request(prefix, name, storage) for name in names]
    if not added:
        raise ConfigError(f"{redact_urls(prefix)}: nothing is named that is to be appended")
    create = create_object if alone else _create
    if not alone:
        _check_conditions(manifest_url(names[0]), storage)
    while True:  # each turn that fails is one in which another producer succeeded
        current = read_newest(prefix, storage)
        missing = [request for request in added if not has_shards_of(current, request)]
        if current is not None and not missing:
            return current
        manifest = join_manifests(prefix, current, missing)
        number = 1 if current is None else current.number + 1
        url = version_url(prefix, number)
        store, key = open_store(url, storage)
        # False: one of its number is there, perhaps this one, after a lost answer.
        if create(store, key, manifest.to_json(_parent(number, current))):
            return DatasetVersion(number=number, url=url, manifest=manifest, added=True)


def check_can_append(
    prefix: str, name: str, metadata: Mapping[str, Any], storage: StorageConfig
) -> None:
    """Raise ConfigError for what could not be appended once it is made, as far as that is known.

    Args:
        prefix: the dataset that grows.
        name: the prefix that will be appended, of which nothing need be there.
        metadata: what is known of it: see `check_alike`.
    """
    prefix = strip_suffix(prefix)
    check_same_folder(prefix, name)
    check_no_version(prefix, NOT_TO_A_VERSION)
    current = read_newest(prefix, storage)
    if current is not None:
        check_alike(prefix, current.manifest, name, metadata)


def _parent(number: int, current: DatasetVersion | None) -> Parent | None:
    """What a version builds on; None: it lists everything. That is so too where the one it would
    build on was not needed to read the version before it: which lists everything, too.
    """
    parents = [] if current is None else current.parents
    for parent in parents:
        if parent.number and parent.number == parent_of(number):
            return parent
    return None


def _create(store: Store, key: str, data: bytes) -> bool:
    """`create` of stores that have it. Raises StorageError where one producer could write over
    another.
    """
    try:
        return create_on_condition(store, key, data)
    except UnsupportedOperation as unknown:
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


@dataclass(frozen=True, kw_only=True)
class AppendRequest:
    """What is to be appended: its name, for messages, and its manifest."""

    name: str
    manifest: Manifest


def check_same_folder(prefix: str, name: str) -> None:
    """Raise ConfigError unless what is appended lies where the dataset does, by another name."""
    added = resolved(strip_suffix(name))
    grows = resolved(strip_suffix(prefix))
    folder = redact_urls(folder_of(grows))
    if folder_of(added) != folder_of(grows):
        raise ConfigError(
            f"{redact_urls(name)}: lies in the folder {redact_urls(folder_of(added))}, and "
            f"{redact_urls(prefix)} in {folder}: a manifest names shards beside it, so both must be in "
            f"one; convert it to {folder}"
        )
    if added == grows:
        raise ConfigError(
            f"{redact_urls(name)}: is the dataset itself; what is appended to it has another name"
        )


def open_request(prefix: str, name: str, storage: StorageConfig) -> AppendRequest:
    """A dataset whose shards are what its manifest says, as far as their sizes tell."""
    url = manifest_url(name)
    check_same_folder(prefix, url.removesuffix(MANIFEST))
    try:
        manifest = read_manifest(url, storage)
    except ObjectNotFoundError as error:
        raise ObjectNotFoundError(
            f"{redact_urls(name)}: has no manifest, so what its shards must be is not known; "
            f"convert it to a name beside {redact_urls(prefix)} ({error})"
        ) from None
    folder = parent_url(url) if "/" in url else "."
    suffix = SUFFIXES[manifest.kind]  # type: ignore[index]  # checked when it was read

    def check(shard: ShardEntry) -> None:
        for ending, size in ((suffix, shard.bytes), (".idx", shard.index_bytes)):
            store, key = open_store(join_url(folder, shard.name + ending), storage)
            check_expected(store.url(key), "bytes", store.info(key).size, size)

    parallel_map(check, manifest.shards, LOOKS_AT_ONCE)
    return AppendRequest(name=name, manifest=manifest)


def has_shards_of(version: DatasetVersion | None, request: AppendRequest) -> bool:
    """Whether a version has all shards of an request.

    Raises ConfigError where it has others of their names.
    """
    if version is None:
        return False
    shard_of_name = {shard.name: shard for shard in version.manifest.shards}
    known = [shard_of_name.get(shard.name) for shard in request.manifest.shards]
    if known == request.manifest.shards:
        return True
    if any(shard is not None for shard in known):
        raise ConfigError(
            f"{redact_urls(request.name)}: version {version.number} lists shards of these names "
            f"with other contents; what a version lists must stay as it is: convert to another name"
        )
    return False


def join_manifests(
    prefix: str, current: DatasetVersion | None, added: Sequence[AppendRequest]
) -> Manifest:
    """The manifest of all shards. Raises ConfigError for what cannot be one dataset."""
    first_name = added[0].name if current is None else prefix
    first = added[0].manifest if current is None else current.manifest
    manifests = [request.manifest for request in added]
    if current is not None:
        manifests.insert(0, current.manifest)
    for request in added:
        check_alike(first_name, first, request.name, _metadata(request.manifest))
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
        chat_template=_agreed([manifest.chat_template for manifest in manifests]),
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


def check_alike(first_name: str, first: Manifest, name: str, metadata: Mapping[str, Any]) -> None:
    """Raise ConfigError for what cannot be one dataset with another, as far as its metadata says.

    metadata: of what is called `name`, by the manifest's names: some of ALIKE, and `tokenizer`.
    """
    for what in ALIKE:
        if what in metadata and getattr(first, what) != metadata[what]:
            raise ConfigError(
                f"{redact_urls(name)}: has {what} {metadata[what]!r}, "
                f"{redact_urls(first_name)} {getattr(first, what)!r}; a dataset has one: convert it "
                f"again"
            )
    tokenizer = metadata.get("tokenizer", {})
    digests = (first.tokenizer.get("digest"), tokenizer.get("digest"))
    if all(digests) and len(set(digests)) > 1:
        raise ConfigError(
            f"{redact_urls(name)}: is of tokenizer {tokenizer.get('name')}, "
            f"{redact_urls(first_name)} of {first.tokenizer.get('name')}: their ids mean different "
            f"things; tokenize the text again with the latter"
        )


def _metadata(manifest: Manifest) -> dict[str, Any]:
    common = {what: getattr(manifest, what) for what in ALIKE}
    return common | {"tokenizer": manifest.tokenizer}


def _agreed(values: Sequence[Any]) -> Any:
    """What all say; None where some say nothing or another thing."""
    return values[0] if all(value == values[0] for value in values) else None
