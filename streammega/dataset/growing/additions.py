"""What is appended: whether it is what its manifest says, and one dataset with what is there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from streammega.config import StorageConfig
from streammega.dataset.growing.versions import DatasetVersion, folder_of
from streammega.dataset.manifest import (
    MANIFEST,
    Manifest,
    Shard,
    manifest_url,
    read_manifest,
)
from streammega.dataset.shards import SUFFIXES, check_told, strip_suffix
from streammega.errors import ConfigError, ObjectNotFoundError
from streammega.errors.redaction import redact_urls
from streammega.storage import join_url, open_store, parent_url
from streammega.storage.open import resolved
from streammega.storage.thread_pool import parallel_map

LOOKS_AT_ONCE = 16
"""Requests for the sizes of shards: each takes a round trip, and there may be thousands."""

ALIKE = ("kind", "dtype", "multimodal", "loss_modes", "bin_tokens")
"""What all shards of a dataset have in common, by the manifest's names, beside their tokenizer."""


@dataclass(frozen=True, kw_only=True)
class Addition:
    """What is to be appended: its name, for messages, and its manifest."""

    name: str
    manifest: Manifest


def check_beside(prefix: str, name: str) -> None:
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


def open_addition(prefix: str, name: str, storage: StorageConfig) -> Addition:
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
    folder = parent_url(url) if "/" in url else "."
    suffix = SUFFIXES[manifest.kind]  # type: ignore[index]  # checked when it was read

    def check(shard: Shard) -> None:
        for ending, size in ((suffix, shard.bytes), (".idx", shard.index_bytes)):
            store, key = open_store(join_url(folder, shard.name + ending), storage)
            check_told(store.url(key), "bytes", store.info(key).size, size)

    parallel_map(check, manifest.shards, LOOKS_AT_ONCE)
    return Addition(name=name, manifest=manifest)


def has_addition(version: DatasetVersion | None, addition: Addition) -> bool:
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


def joined(prefix: str, current: DatasetVersion | None, added: Sequence[Addition]) -> Manifest:
    """The manifest of all shards. Raises ConfigError for what cannot be one dataset."""
    first_name = added[0].name if current is None else prefix
    first = added[0].manifest if current is None else current.manifest
    manifests = [addition.manifest for addition in added]
    if current is not None:
        manifests.insert(0, current.manifest)
    for addition in added:
        check_alike(first_name, first, addition.name, _told_by(addition.manifest))
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


def check_alike(first_name: str, first: Manifest, name: str, told: Mapping[str, Any]) -> None:
    """Raise ConfigError for what cannot be one dataset with another, as far as it is told.

    told: of what is called `name`, by the manifest's names: some of ALIKE, and `tokenizer`.
    """
    for what in ALIKE:
        if what in told and getattr(first, what) != told[what]:
            raise ConfigError(
                f"{redact_urls(name)}: has {what} {told[what]!r}, "
                f"{redact_urls(first_name)} {getattr(first, what)!r}; a dataset has one: convert it "
                f"again"
            )
    tokenizer = told.get("tokenizer", {})
    digests = (first.tokenizer.get("digest"), tokenizer.get("digest"))
    if all(digests) and len(set(digests)) > 1:
        raise ConfigError(
            f"{redact_urls(name)}: is of tokenizer {tokenizer.get('name')}, "
            f"{redact_urls(first_name)} of {first.tokenizer.get('name')}: their ids mean different "
            f"things; tokenize the text again with the latter"
        )


def _told_by(manifest: Manifest) -> dict[str, Any]:
    told = {what: getattr(manifest, what) for what in ALIKE}
    return told | {"tokenizer": manifest.tokenizer}


def _agreed(values: Sequence[Any]) -> Any:
    """What all say; None where some say nothing or another thing."""
    return values[0] if all(value == values[0] for value in values) else None
