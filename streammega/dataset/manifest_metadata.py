"""What manifests say of a dataset's ids: its tokenizer, and which modes are learned.

A folder or a glob is opened without a manifest. Then the manifests are looked for in the folder of the
shards, so that a dataset means the same under each of its names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from streammega.config import StorageConfig
from streammega.dataset.manifest import Manifest, read_manifest
from streammega.dataset.names import MANIFEST, strip_suffix, without_number
from streammega.dataset.shard import Shard
from streammega.errors import FormatError, StorageError

LossModes = tuple[int, ...] | None


@dataclass(frozen=True)
class TokenizerLabel:
    """A tokenizer by its name, for messages, and its digest."""

    name: str
    digest: str

    def __str__(self) -> str:
        return f"{self.name} ({self.digest[:12]})"


def loss_modes_of(shards: Sequence[Shard], name: str) -> LossModes:
    """The modes whose sequences are learned; None where no manifest has any.

    Raises FormatError where shards differ, StorageError.
    """
    manifests: dict[str, Manifest | None] = {}
    prefix_of_modes: dict[LossModes, str] = {}
    for shard in shards:
        manifest = _manifest_of(shard, name, manifests)
        modes = None if manifest is None or manifest.loss_modes is None else manifest.loss_modes
        prefix_of_modes[None if modes is None else tuple(modes)] = shard.prefix
    if len(prefix_of_modes) > 1:
        listed = " and ".join(f"{prefix} has {modes}" for modes, prefix in prefix_of_modes.items())
        raise FormatError(
            f"{name}: its shards differ in the modes that are learned ({listed}); make a "
            "blend of them"
        )
    return next(iter(prefix_of_modes), None)


def tokenizers_of(shards: Sequence[Shard], name: str) -> set[TokenizerLabel]:
    """The tokenizers of a dataset's shards, as far as manifests name them. Raises StorageError."""
    manifests: dict[str, Manifest | None] = {}
    labels = set()
    for shard in shards:
        manifest = _manifest_of(shard, name, manifests)
        if manifest is not None and manifest.tokenizer.get("digest"):
            labels.add(TokenizerLabel(*manifest.tokenizer_label))
    return labels


def _manifest_of(shard: Shard, name: str, known: dict[str, Manifest | None]) -> Manifest | None:
    """The manifest of a shard; if it was opened without, one in its folder. None: it has no manifest. known:
    manifests that were read before.
    """
    if shard.manifest is not None or strip_suffix(name) == shard.prefix:
        return shard.manifest  # opening a pair looks for its manifest
    stem = without_number(shard.prefix)
    if stem not in known:
        known[stem] = _manifest(stem + MANIFEST, shard.storage)
    return known[stem]


def _manifest(url: str, storage: StorageConfig) -> Manifest | None:
    try:
        return read_manifest(url, storage)
    except FormatError:
        raise
    except StorageError as error:
        if error.transient:
            raise
        return None  # without the right to list, S3 answers 403 for what is not there
