"""The next version of a dataset, by any number of producers at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from streammega.config import StorageConfig
from streammega.dataset.manifest import (
    Manifest,
    ShardEntry,
    check_counts,
    manifest_url,
    parent_of,
    read_manifest,
    shard_names,
    version_url,
)
from streammega.dataset.names import MANIFEST, strip_suffix
from streammega.dataset.shard import Shard
from streammega.dataset.versions import DatasetVersion, check_no_version, read_newest
from streammega.errors import ConfigError, ObjectNotFoundError, StorageError, UnsupportedOperation
from streammega.errors.redaction import redact_urls
from streammega.storage import Store, open_store
from streammega.storage.object_ops import read_if_exists
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
    conditional_writes: bool = True,
) -> DatasetVersion:
    """Make the next version of a dataset: its shards, then those of other datasets in the same
    folder, each with a manifest of `streammega convert`. Theirs that it has already stay once.

    May be called by any number of producers at once, killed, and called again: all is in that was
    appended, once, and every version is whole. What no dataset is called yet begins with version 1.

    Args:
        prefix: the dataset that grows, path or URL.
        names: prefixes or manifests of what is appended.
        conditional_writes: False for storage without them, where no other producer may append at
            the same time.

    Raises ConfigError for what cannot be one dataset, ObjectNotFoundError, FormatError for shards
    that are not what their manifest says, StorageError.
    """
    storage = storage or StorageConfig()
    prefix = strip_suffix(prefix)
    check_no_version(prefix, NOT_TO_A_VERSION)
    added = [AppendRequest.read(prefix, name, storage) for name in names]
    if not added:
        raise ConfigError(f"{redact_urls(prefix)}: nothing is named that is to be appended")
    create = _create if conditional_writes else create_object
    if conditional_writes:
        _check_conditions(manifest_url(names[0]), storage)
    while True:  # each turn that fails is one in which another producer succeeded
        current = read_newest(prefix, storage)
        missing = [request for request in added if not request.is_in(current)]
        if current is not None and not missing:
            return current
        manifest = join_manifests(prefix, current, missing)
        number = 1 if current is None else current.number + 1
        parents = [] if current is None else current.parents
        # Without a parent a version lists everything, and so does what came before it perhaps.
        wanted = parent_of(number)
        parent = next((each for each in parents if wanted and each.number == wanted), None)
        url = version_url(prefix, number)
        store, key = open_store(url, storage)
        # False: one of its number is there, perhaps this one, after a lost answer.
        if create(store, key, manifest.to_json(parent)):
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
    data = read_if_exists(url, storage)
    store, key = open_store(url, storage)
    if data is not None and _create(store, key, data):
        raise _no_conditions(url, "the server writes over what is there")


def _no_conditions(url: str, reason: str) -> StorageError:
    return StorageError(
        f"{url}: cannot be written on the condition that nothing is there ({reason}), so of two "
        f"producers one could be lost; where no other appends at the same time, use "
        f"--no-conditional-writes"
    )


class AppendRequest(NamedTuple):
    """What is to be appended: its name, for messages, and its manifest."""

    name: str
    manifest: Manifest

    @classmethod
    def read(cls, prefix: str, name: str, storage: StorageConfig) -> AppendRequest:
        """A dataset whose shards have the sizes that its manifest says."""
        url = manifest_url(name)
        check_same_folder(prefix, url.removesuffix(MANIFEST))
        try:
            manifest = read_manifest(url, storage)
        except ObjectNotFoundError as error:
            raise ObjectNotFoundError(
                f"{redact_urls(name)}: has no manifest, so what its shards must be is not known; "
                f"convert it to a name beside {redact_urls(prefix)} ({error})"
            ) from None

        def check(listed: tuple[str, ShardEntry]) -> None:
            shard = Shard(listed[0], storage, manifest=manifest, entry=listed[1])
            shard.look_up()  # and compare it with the manifest

        names = shard_names(check_counts(manifest, url), url)
        parallel_map(check, list(zip(names, manifest.shards, strict=True)), LOOKS_AT_ONCE)
        return cls(name, manifest)

    def is_in(self, version: DatasetVersion | None) -> bool:
        """Whether a version has all its shards. Raises ConfigError where it has others of their
        names.
        """
        if version is None:
            return False
        shard_of_name = {shard.name: shard for shard in version.manifest.shards}
        known = [shard_of_name.get(shard.name) for shard in self.manifest.shards]
        if known == self.manifest.shards:
            return True
        if any(shard is not None for shard in known):
            raise ConfigError(
                f"{redact_urls(self.name)}: version {version.number} lists shards of these names "
                f"with other contents; what a version lists must stay as it is: convert to another name"
            )
        return False


def check_same_folder(prefix: str, name: str) -> None:
    """Raise ConfigError unless what is appended lies where the dataset does, by another name."""
    added = resolved(strip_suffix(name))
    grows = resolved(strip_suffix(prefix))
    added_folder, _, _ = added.rpartition("/")
    folder, _, _ = grows.rpartition("/")
    if added_folder != folder:
        raise ConfigError(
            f"{redact_urls(name)}: lies in the folder {redact_urls(added_folder)}, and "
            f"{redact_urls(prefix)} in {redact_urls(folder)}: a manifest names shards beside it, so "
            f"both must be in one; convert it to {redact_urls(folder)}"
        )
    if added == grows:
        raise ConfigError(
            f"{redact_urls(name)}: is the dataset itself; what is appended to it has another name"
        )


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
    # All have bins, and of one length, or none has.
    packs = [manifest.pack for manifest in manifests if manifest.pack is not None]
    pack = None
    if packs:
        counts = {name: sum(each[name] for each in packs) for name in ("bins", "padding")}
        pack = packs[0] | counts
    # A manifest has a checksum of origins for each of its shards, or none.
    origins: list[str] | None = []
    for manifest in manifests:
        more = manifest.origins
        origins = None if origins is None or more is None else [*origins, *more]
    return replace(
        first.with_shards(shards),
        eod_id=_agreed([manifest.eod_id for manifest in manifests]),
        vocab_size=_agreed([manifest.vocab_size for manifest in manifests]),
        tokenizer=_agreed([manifest.tokenizer for manifest in manifests]) or {},
        origins=origins,
        pack=pack,
        chat_template=_agreed([manifest.chat_template for manifest in manifests]),
    )


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
