"""The next version of a dataset, by any number of producers at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from streammega.config import StorageConfig
from streammega.dataset.manifest import (
    Manifest,
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
from streammega.storage.progress import ProgressObserver
from streammega.storage.store import create_object, create_on_condition
from streammega.storage.thread_pool import parallel_map

MAX_LOOK_UPS = 16
"""Requests at once for the sizes of shards: each takes a round trip, and there may be thousands."""

COMMON_FIELDS = ("kind", "dtype", "multimodal", "loss_modes", "bin_tokens")
"""Fields of a manifest that all shards of a dataset have in common, besides the tokenizer."""


NOT_TO_A_VERSION = (
    "versions never change; append to the dataset, {prefix}: its next version has what the newest has, "
    "and more"
)


def append(
    prefix: str,
    names: Sequence[str],
    storage: StorageConfig | None = None,
    *,
    conditional_writes: bool = True,
    progress: ProgressObserver | None = None,
) -> DatasetVersion:
    """Make the next version of a dataset: its shards, then those of other datasets in the same
    folder, each with a manifest of `streammega convert`. What it has already is not added again.

    Any number of producers may append at once, be killed, and append again: the dataset then has
    everything once, and every version is whole. A new dataset begins with version 1.

    Args:
        prefix: the dataset that grows, path or URL.
        names: prefixes or manifests of what is appended.
        conditional_writes: False for storage without them, where no other producer may append at
            the same time.
        progress: receives the shards that were looked up.

    Raises ConfigError for datasets that cannot be one, ObjectNotFoundError, FormatError for shards
    that are not what their manifest says, StorageError.
    """
    storage = storage or StorageConfig()
    prefix = strip_suffix(prefix)
    check_no_version(prefix, NOT_TO_A_VERSION)
    progress = progress or ProgressObserver()
    added = [AppendRequest.read(prefix, name, storage) for name in names]
    if not added:
        raise ConfigError(f"{redact_urls(prefix)}: name the datasets to append")
    _check_shards(added, storage, progress)
    progress.begin("appending")
    create = _create if conditional_writes else create_object
    if conditional_writes:
        _check_conditions(manifest_url(names[0]), storage)
    while True:  # where a turn fails, another producer has made the version
        current = read_newest(prefix, storage)
        missing = [request for request in added if not request.is_in(current)]
        if current is not None and not missing:
            return current
        manifest = join_manifests(prefix, current, missing)
        number = 1 if current is None else current.number + 1
        parents = [] if current is None else current.parents
        # The wanted parent may be missing, if that version lists everything. So does this one then.
        wanted = parent_of(number)
        parent = next((each for each in parents if wanted and each.number == wanted), None)
        url = version_url(prefix, number)
        store, key = open_store(url, storage)
        # False: there is a version of this number. It may be this one, whose answer was lost.
        if create(store, key, manifest.without_ends().to_json(parent)):
            return DatasetVersion(number=number, url=url, manifest=manifest, added=True)


def check_can_append(
    prefix: str, name: str, metadata: Mapping[str, Any], storage: StorageConfig
) -> None:
    """Raise ConfigError for what keeps a dataset from being appended, as far as that is known before
    the dataset is made.

    Args:
        prefix: the dataset that grows.
        name: the prefix that will be appended. Nothing need be there yet.
        metadata: what is known of it; see `check_compatible`.
    """
    prefix = strip_suffix(prefix)
    check_same_folder(prefix, name)
    check_no_version(prefix, NOT_TO_A_VERSION)
    current = read_newest(prefix, storage)
    if current is not None:
        check_compatible(prefix, current.manifest, name, metadata)


def _create(store: Store, key: str, data: bytes) -> bool:
    """Create an object on the condition that it does not exist. Raises StorageError for a store without
    conditions, where one producer could replace another's version.
    """
    try:
        return create_on_condition(store, key, data)
    except UnsupportedOperation as unknown:
        raise _no_conditions(store.url(key), str(unknown)) from None


def _check_conditions(url: str, storage: StorageConfig) -> None:
    """Raise StorageError for a server that ignores conditions: one that creates an object which is
    there already. The same bytes are written.
    """
    if not is_remote(url):
        return
    data = read_if_exists(url, storage)
    store, key = open_store(url, storage)
    if data is not None and _create(store, key, data):
        raise _no_conditions(url, "the server writes over what is there")


def _no_conditions(url: str, reason: str) -> StorageError:
    return StorageError(
        f"{url}: the storage has no conditional writes ({reason}), so the version of one of two "
        f"producers could be lost; if no other producer appends at the same time, pass "
        f"--no-conditional-writes"
    )


class AppendRequest(NamedTuple):
    """A dataset to be appended: its name, for messages, and its manifest."""

    name: str
    manifest: Manifest

    @classmethod
    def read(cls, prefix: str, name: str, storage: StorageConfig) -> AppendRequest:
        """Read the manifest of a dataset in the same folder."""
        url = manifest_url(name)
        check_same_folder(prefix, url.removesuffix(MANIFEST))
        try:
            manifest = read_manifest(url, storage)
        except ObjectNotFoundError as error:
            raise ObjectNotFoundError(
                f"{redact_urls(name)}: has no manifest, so its shards cannot be checked; "
                f"convert it to a name next to {redact_urls(prefix)} ({error})"
            ) from None
        return cls(name, check_counts(manifest, url))

    def is_in(self, version: DatasetVersion | None) -> bool:
        """Whether a version has all of the shards. Raises ConfigError where it has other shards of
        these names.
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
                f"with other contents, which must stay as they are: convert to another name"
            )
        return False


def _check_shards(
    added: Sequence[AppendRequest], storage: StorageConfig, progress: ProgressObserver
) -> None:
    """Compare the sizes of all shards with their manifests. Raises FormatError, StorageError."""

    def check(shard: Shard) -> None:
        shard.look_up()  # and compare it with the manifest
        progress.advance(1)

    shards = []
    for name, manifest in added:
        names = shard_names(manifest, manifest_url(name))
        for shard_name, entry in zip(names, manifest.shards, strict=True):
            shards.append(Shard(shard_name, storage, manifest=manifest, entry=entry))
    progress.begin("checking shards", len(shards), " shards")
    parallel_map(check, shards, MAX_LOOK_UPS)


def check_same_folder(prefix: str, name: str) -> None:
    """Raise ConfigError unless both datasets are in one folder, under different names."""
    added = resolved(strip_suffix(name))
    grows = resolved(strip_suffix(prefix))
    added_folder, _, _ = added.rpartition("/")
    folder, _, _ = grows.rpartition("/")
    if added_folder != folder:
        raise ConfigError(
            f"{redact_urls(name)}: is in the folder {redact_urls(added_folder)}, and "
            f"{redact_urls(prefix)} in {redact_urls(folder)}; a manifest names shards of its own "
            f"folder: convert it to {redact_urls(folder)}"
        )
    if added == grows:
        raise ConfigError(
            f"{redact_urls(name)}: is the dataset itself; name another dataset to append"
        )


def join_manifests(
    prefix: str, current: DatasetVersion | None, added: Sequence[AppendRequest]
) -> Manifest:
    """The manifest of all shards. Raises ConfigError for datasets that cannot be one."""
    first_name = added[0].name if current is None else prefix
    first = added[0].manifest if current is None else current.manifest
    manifests = [request.manifest for request in added]
    if current is not None:
        manifests.insert(0, current.manifest)
    for request in added:
        check_compatible(first_name, first, request.name, _metadata(request.manifest))
    shards = [shard for manifest in manifests for shard in manifest.shards]
    if len({shard.name for shard in shards}) < len(shards):
        raise ConfigError(f"{redact_urls(prefix)}: a shard is named twice; name each dataset once")
    # Either all have bins of one length, or none has bins.
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


def check_compatible(
    first_name: str, first: Manifest, name: str, metadata: Mapping[str, Any]
) -> None:
    """Raise ConfigError for two datasets that cannot be one, as far as the metadata of the second says.

    metadata: of the dataset `name`, by the manifest's names: some of COMMON_FIELDS, and `tokenizer`.
    """
    for what in COMMON_FIELDS:
        if what in metadata and getattr(first, what) != metadata[what]:
            raise ConfigError(
                f"{redact_urls(name)}: has {what} {metadata[what]!r}, "
                f"{redact_urls(first_name)} {getattr(first, what)!r}; both must be the same: convert "
                f"it again"
            )
    tokenizer = metadata.get("tokenizer", {})
    digests = (first.tokenizer.get("digest"), tokenizer.get("digest"))
    if all(digests) and len(set(digests)) > 1:
        raise ConfigError(
            f"{redact_urls(name)}: was made with the tokenizer {tokenizer.get('name')}, "
            f"{redact_urls(first_name)} with {first.tokenizer.get('name')}: their ids mean different "
            f"things; tokenize the text again with the latter"
        )


def _metadata(manifest: Manifest) -> dict[str, Any]:
    common = {what: getattr(manifest, what) for what in COMMON_FIELDS}
    return common | {"tokenizer": manifest.tokenizer}


def _agreed(values: Sequence[Any]) -> Any:
    """The value that all have; None where they differ."""
    return values[0] if all(value == values[0] for value in values) else None
