"""The manifest of a dataset: its shards, in order, and what they must be.

JSON, written last, the same for the same data.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any, cast

import dacite
import numpy as np

from streammega.config import StorageConfig
from streammega.dataset.idx import CODE_OF_DTYPE
from streammega.dataset.shards import SUFFIXES, Kind, KnownShard, ManifestEntry, named
from streammega.errors import FormatError
from streammega.storage import join_url, open_store, parent_url

MANIFEST = ".manifest.json"
FORMAT = "streammega-manifest"
VERSION = 1
MOST_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One shard.

    `name`: its prefix beside the manifest; `checksums`: xxh3-128 of each 64 MiB, as stored.
    """

    name: str
    documents: int
    sequences: int
    tokens: int
    bytes: int
    checksums: list[str]
    index_bytes: int
    index_checksums: list[str]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A dataset. `tokenizer`: its name and digest, if tokens were made from text; vocab_size and
    eod_id: None where unknown.

    loss_modes: the modes of sequences that are to be learned; None: modes mean something else, or
    there are none.
    """

    kind: str
    dtype: str
    multimodal: bool = False
    eod_id: int | None = None
    vocab_size: int | None = None
    tokenizer: dict[str, str] = field(default_factory=dict)
    documents: int
    sequences: int
    tokens: int
    shards: list[Shard]
    loss_modes: list[int] | None = None

    def to_json(self) -> bytes:
        """What is stored."""
        fields = asdict(self)
        if self.loss_modes is None:  # so that a dataset without them has the manifest it always had
            del fields["loss_modes"]
        return (
            json.dumps({"format": FORMAT, "version": VERSION, **fields}, indent=1) + "\n"
        ).encode()


def read_manifest(url: str, storage: StorageConfig) -> Manifest:
    """Raises ObjectNotFoundError, FormatError for another kind of JSON, StorageError."""
    store, key = open_store(url, storage)
    info = store.info(key)
    if info.size > MOST_BYTES:
        raise FormatError(f"{url}: {info.size:,} bytes are too many for a manifest")
    raw = bytes(store.read_ranges(key, [0], [info.size], info.etag)[0])
    try:
        found: Any = json.loads(raw)
        if not isinstance(found, dict) or found.pop("format", None) != FORMAT:
            raise FormatError(f"{url}: is not a manifest that streammega convert wrote")
        version = found.pop("version", None)
        if version != VERSION:
            raise FormatError(
                f"{url}: is a manifest of version {version}; this program reads version {VERSION}"
            )
        manifest = dacite.from_dict(Manifest, found, dacite.Config(strict=True))
    except (ValueError, dacite.DaciteError) as error:
        if isinstance(error, FormatError):
            raise
        raise FormatError(
            f"{url}: is a damaged manifest ({error}); convert again, or name the shards"
        ) from None
    if manifest.dtype not in {str(dtype) for dtype in CODE_OF_DTYPE}:
        raise FormatError(
            f"{url}: is a damaged manifest: there are no tokens of dtype {manifest.dtype!r}; convert again"
        )
    if manifest.kind not in SUFFIXES or any(
        "/" in shard.name or shard.name in ("", "..") for shard in manifest.shards
    ):
        raise FormatError(
            f"{url}: names shards outside of its folder, or of an unknown kind {manifest.kind!r}"
        )
    return manifest


def manifest_shards(url: str, storage: StorageConfig) -> list[KnownShard]:
    """All shards of a manifest, beside it, in order, with what it says of them.

    Raises as `read_manifest` does.
    """
    manifest = read_manifest(url, storage)
    folder = parent_url(url) if "/" in url else "."
    kind = cast(Kind, manifest.kind)
    return [
        KnownShard(
            name=join_url(folder, named(shard.name, kind)), entry=_entry(shard, manifest, url)
        )
        for shard in manifest.shards
    ]


def _entry(shard: Shard, manifest: Manifest, url: str) -> ManifestEntry:
    entry = ManifestEntry(
        dtype=np.dtype(manifest.dtype),
        documents=shard.documents,
        sequences=shard.sequences,
        tokens=shard.tokens,
        bytes=shard.bytes,
        index_bytes=shard.index_bytes,
        loss_modes=None if manifest.loss_modes is None else tuple(manifest.loss_modes),
        tokenizer=(manifest.tokenizer.get("name", ""), manifest.tokenizer.get("digest", "")),
    )
    if min(entry.documents, entry.sequences, entry.tokens) < 0 or (
        manifest.kind == "bin" and entry.token_bytes != entry.bytes
    ):
        raise FormatError(
            f"{url}: is a damaged manifest: {shard.name} has {shard.tokens} tokens of {manifest.dtype} in {shard.bytes} bytes; "
            f"convert again, or name the shards"
        )
    return entry
