"""What manifests say of a dataset's ids: its tokenizer, and which modes are learned.

A folder or a glob is opened without a manifest. Then the manifests are looked for in the folder of the
shards, so that a dataset means the same under each of its names.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from streammega.config import StorageConfig
from streammega.dataset.manifest import Manifest, read_manifest
from streammega.dataset.names import MANIFEST, strip_suffix, without_number
from streammega.dataset.shard import Shard
from streammega.errors import FormatError, StorageError

LossModes = tuple[int, ...] | None
MAX_LISTED = 5
"""Datasets of each tokenizer that a message lists."""


@dataclass(frozen=True)
class TokenizerLabel:
    """A tokenizer by its name, for messages, and its digest. vocab_size: ids run below it; None: not
    known.
    """

    name: str
    digest: str
    vocab_size: int | None = None

    def __str__(self) -> str:
        return f"{self.name} ({self.digest[:12]})"


def mixed_tokenizers(datasets: Iterable[tuple[str, Iterable[TokenizerLabel]]]) -> str:
    """What a message says of datasets of several tokenizers, with the datasets of each. Empty if all
    are of one, as far as it is known. datasets: (name, tokenizers), none where they are not known.
    """
    names_of: dict[str, tuple[str, list[str]]] = {}
    unknown: list[str] = []
    for name, tokenizers in datasets:
        # sorted, so that the message is the same each time
        labels = sorted(tokenizers, key=str)
        for label in labels:
            names_of.setdefault(label.digest, (str(label), []))[1].append(name)
        if not labels:
            unknown.append(name)
    if len(names_of) < 2:
        return ""
    listed = [f"{list_names(names)}: tokenizer {label}" for label, names in names_of.values()]
    if unknown:
        listed.append(f"{list_names(unknown)}: no manifest names it")
    return (
        f"these datasets are of {len(names_of)} tokenizers, so their ids mean different things: "
        f"{'; '.join(listed)}"
    )


def list_names(names: Sequence[str]) -> str:
    """Names for a message: the first of them, and how many others there are."""
    more = len(names) - MAX_LISTED
    shown = ", ".join(names[:MAX_LISTED])
    return shown if more <= 0 else f"{shown} and {more:,} other{'s' * (more > 1)}"


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
            labels.add(TokenizerLabel(*manifest.tokenizer_label, manifest.vocab_size))
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
