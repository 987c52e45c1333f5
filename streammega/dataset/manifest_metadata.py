"""What the manifest of a dataset says of its ids, for a dataset opened by any of its names: its
tokenizer, and what is learned.

A folder or a glob is opened without a manifest. What is needed is then looked up beside the shards,
so that one dataset is the same by whatever name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from streammega.config import StorageConfig
from streammega.dataset.manifest import MANIFEST, Manifest, read_manifest
from streammega.dataset.shard import Shard, set_name, strip_suffix
from streammega.errors import FormatError, StorageError

LossModes = tuple[int, ...] | None


@dataclass(frozen=True)
class TokenizerLabel:
    """A tokenizer by its name, for messages, and its digest."""

    name: str
    digest: str

    def __str__(self) -> str:
        return f"{self.name} ({self.digest[:12]})"


def loss_modes_of(files: Sequence[Shard], name: str) -> LossModes:
    """The modes whose sequences are to be learned; None where no manifest names any.

    Raises FormatError where shards differ, StorageError.
    """
    manifests: dict[str, Manifest | None] = {}
    prefix_of_modes: dict[LossModes, str] = {}
    for shard_files in files:
        entry = shard_files.shard.entry
        if entry is not None:
            prefix_of_modes[entry.loss_modes] = shard_files.prefix
        elif shard_files.index.header.multimodal:
            manifest = _beside(shard_files, name, manifests)
            modes = None
            if manifest is not None and manifest.loss_modes is not None:
                modes = tuple(manifest.loss_modes)
            prefix_of_modes[modes] = shard_files.prefix
    if len(prefix_of_modes) > 1:
        told = " and ".join(f"{prefix} has {modes}" for modes, prefix in prefix_of_modes.items())
        raise FormatError(
            f"{name}: its shards differ in the modes that are to be learned ({told}); make a blend "
            "of them"
        )
    return next(iter(prefix_of_modes), None)


def tokenizers_of(files: Sequence[Shard], name: str) -> set[TokenizerLabel]:
    """The tokenizers of a dataset's shards, as far as manifests tell them. Raises StorageError."""
    manifests: dict[str, Manifest | None] = {}
    labels = set()
    for shard_files in files:
        entry = shard_files.shard.entry
        told = None
        if entry is not None:
            told = entry.tokenizer
        else:
            manifest = _beside(shard_files, name, manifests)
            if manifest is not None:
                told = manifest.tokenizer_label
        if told is None:
            continue
        tokenizer_name, digest = told
        if digest:  # tokens that were not made from text have none
            labels.add(TokenizerLabel(tokenizer_name, digest))
    return labels


def _beside(files: Shard, name: str, known: dict[str, Manifest | None]) -> Manifest | None:
    """The manifest beside a shard that was opened without one; None where there is none."""
    if strip_suffix(name) == files.prefix:
        return None  # it was looked for already
    stem = set_name(files.prefix)
    if stem not in known:
        known[stem] = _manifest(stem + MANIFEST, files.storage)
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
