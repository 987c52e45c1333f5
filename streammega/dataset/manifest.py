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
from streammega.dataset.shards import (
    SUFFIXES,
    Kind,
    KnownShard,
    ManifestEntry,
    named,
    strip_suffix,
)
from streammega.errors import FormatError
from streammega.storage import join_url, open_store, parent_url

MANIFEST = ".manifest.json"
FORMAT = "streammega-manifest"
VERSION = 1
MOST_BYTES = 1 << 30
"""Of a manifest, which is read whole: a name in its place may be that of anything."""


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


_TYPE_OF_FIELD: dict[str, type] = {
    "name": str,
    "documents": int,
    "sequences": int,
    "tokens": int,
    "bytes": int,
    "checksums": list,
    "index_bytes": int,
    "index_checksums": list,
}


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A dataset. `tokenizer`: its name and digest, if tokens were made from text; vocab_size and
    eod_id: None where unknown.

    loss_modes: the modes of sequences that are to be learned; None: modes mean something else, or
    there are none. origins: xxh3-128 of the `.origins` beside each shard; None: there are none.
    pack: of bins their "length" in tokens, how many there are ("bins") and the tokens of them that
    are no documents' ("padding"); None: documents lie end to end.
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
    origins: list[str] | None = None
    pack: dict[str, int] | None = None

    @property
    def bin_tokens(self) -> int | None:
        """Tokens of a bin; None where documents lie end to end."""
        return None if self.pack is None else self.pack["length"]

    @property
    def tokenizer_label(self) -> tuple[str, str]:
        """(name, digest) of the tokenizer; empty where it is not known."""
        return self.tokenizer.get("name", ""), self.tokenizer.get("digest", "")

    def to_json(self) -> bytes:
        """What is stored."""
        fields = asdict(self)
        for name in ("loss_modes", "origins", "pack"):
            # so that a dataset without them has the manifest it always had
            if fields[name] is None:
                del fields[name]
        stored = {"format": FORMAT, "version": VERSION, **fields}
        text = json.dumps(stored, indent=1) + "\n"
        return text.encode()


def manifest_url(name: str) -> str:
    """Where the manifest of a dataset lies: its own name, or beside the prefix's shards."""
    return name if name.endswith(".json") else strip_suffix(name) + MANIFEST


def read_manifest(url: str, storage: StorageConfig) -> Manifest:
    """Raises ObjectNotFoundError, FormatError for another kind of JSON, StorageError."""
    store, key = open_store(url, storage)
    info = store.info(key)
    if info.size > MOST_BYTES:
        raise FormatError(f"{url}: {info.size:,} bytes are too many for a manifest")
    raw = store.read_ranges(key, [0], [info.size], info.etag)[0]
    try:
        manifest = _parse(bytes(raw), url)
    except FormatError:
        raise
    except (ValueError, RecursionError, dacite.DaciteError) as error:
        raise FormatError(
            f"{url}: is a damaged manifest ({error}); convert again, or name the shards"
        ) from None
    if manifest.pack is not None and manifest.pack.get("length", 0) < 1:
        raise FormatError(f"{url}: is a damaged manifest: its bins have no length; convert again")
    known_dtypes = [str(dtype) for dtype in CODE_OF_DTYPE]
    if manifest.dtype not in known_dtypes:
        raise FormatError(
            f"{url}: is a damaged manifest: there are no tokens of dtype {manifest.dtype!r}; "
            "convert again"
        )
    # Names become paths: one that leads elsewhere could show, or replace, what is no dataset.
    leads_elsewhere = any(
        "/" in shard.name or shard.name in ("", "..") for shard in manifest.shards
    )
    if manifest.origins is not None and len(manifest.origins) != len(manifest.shards):
        raise FormatError(
            f"{url}: is a damaged manifest: it has origins of {len(manifest.origins)} shards, and "
            f"{len(manifest.shards)} shards; convert again"
        )
    if manifest.kind not in SUFFIXES or leads_elsewhere:
        raise FormatError(
            f"{url}: names shards outside of its folder, or of an unknown kind {manifest.kind!r}"
        )
    return manifest


def _parse(raw: bytes, url: str) -> Manifest:
    """Raises FormatError for another kind of JSON, ValueError or DaciteError for what is none."""
    stored: Any = json.loads(raw)
    if not isinstance(stored, dict) or stored.pop("format", None) != FORMAT:
        raise FormatError(f"{url}: is not a manifest that streammega convert wrote")
    version = stored.pop("version", None)
    if version != VERSION:
        raise FormatError(
            f"{url}: is a manifest of version {version}; this program reads version {VERSION}"
        )
    return dacite.from_dict(
        Manifest, stored, dacite.Config(strict=True, type_hooks={Shard: _shard})
    )


def _shard(stored: Any) -> Any:
    """A shard of what is stored, if it is plainly one; else that as it is, for dacite to say what
    is wrong. Looking closely at each of 10,000 shards takes dacite a second.
    """
    if type(stored) is not dict or stored.keys() != _TYPE_OF_FIELD.keys():
        return stored
    for name, value in stored.items():
        if type(value) is not _TYPE_OF_FIELD[name]:
            return stored
    checksums = [*stored["checksums"], *stored["index_checksums"]]
    if not all(type(checksum) is str for checksum in checksums):
        return stored
    return Shard(**stored)


def manifest_shards(url: str, storage: StorageConfig) -> list[KnownShard]:
    """All shards of a manifest, beside it, in order, with what it says of them.

    Raises as `read_manifest` does.
    """
    manifest = read_manifest(url, storage)
    dtype = np.dtype(manifest.dtype)
    shards = []
    for shard, name in zip(manifest.shards, shard_names(manifest, url), strict=True):
        shards.append(KnownShard(name=name, entry=_entry(shard, manifest, dtype, url)))
    return shards


def shard_names(manifest: Manifest, url: str) -> list[str]:
    """The shards of the manifest that lies at `url`, beside it, in order."""
    folder = parent_url(url) if "/" in url else "."
    kind = cast(Kind, manifest.kind)
    return [join_url(folder, named(shard.name, kind)) for shard in manifest.shards]


def _entry(shard: Shard, manifest: Manifest, dtype: np.dtype[Any], url: str) -> ManifestEntry:
    entry = ManifestEntry(
        dtype=dtype,
        documents=shard.documents,
        sequences=shard.sequences,
        tokens=shard.tokens,
        bytes=shard.bytes,
        index_bytes=shard.index_bytes,
        loss_modes=None if manifest.loss_modes is None else tuple(manifest.loss_modes),
        tokenizer=manifest.tokenizer_label,
        bin_tokens=manifest.bin_tokens,
    )
    least = min(entry.documents, entry.sequences, entry.tokens)
    contradicts = manifest.kind == "bin" and entry.token_bytes != entry.bytes
    if least < 0 or contradicts:
        raise FormatError(
            f"{url}: is a damaged manifest: {shard.name} has {shard.tokens} tokens of "
            f"{manifest.dtype} in {shard.bytes} bytes; convert again, or name the shards"
        )
    return entry
