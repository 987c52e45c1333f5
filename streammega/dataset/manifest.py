"""The manifest of a dataset: its shards, in order, and what they must be.

JSON, written last, the same for the same data.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, cast

import dacite
import numpy as np

from streammega.config import StorageConfig
from streammega.dataset.idx import CODE_OF_DTYPE
from streammega.dataset.names import MANIFEST, SUFFIXES, Kind, strip_suffix, with_suffix
from streammega.errors import FormatError
from streammega.errors.cached_property import cached_property
from streammega.errors.words import is_utf8
from streammega.storage import join_url, open_store, parent_url
from streammega.storage.open import escapes_folder

FORMAT = "streammega-manifest"
VERSION = 1
MAX_BYTES = 1 << 30
"""The largest manifest that is read. The object of that name may be anything."""
MAX_BIN_TOKENS = 1 << 24
"""The longest bins that `convert` writes (`pack_length`)."""


# Not frozen: there are thousands, and a frozen one takes two to three times as long to make.
@dataclass(kw_only=True, slots=True)
class ShardEntry:
    """One shard.

    name: its prefix, without the folder of the manifest. checksums: xxh3-128 of each 64 MiB, as stored.
    ends: `TokenEnds.digest` of its tokens; empty where it is not known.
    """

    name: str
    documents: int
    sequences: int
    tokens: int
    bytes: int
    checksums: Sequence[str]
    index_bytes: int
    index_checksums: Sequence[str]
    ends: str = field(default="", compare=False)


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
_ENDS = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A dataset.

    tokenizer: its name and digest, if tokens were made from text. vocab_size, eod_id: None where
    unknown. loss_modes: the modes of sequences that are learned; None: modes mean something else,
    or the dataset has no modes. origins: xxh3-128 of the `.origins` of each shard; None: it has no such
    files.
    pack: the "length" of bins in tokens, how many there are ("bins"), and their tokens of no
    document ("padding"); None: documents are end to end. chat_template: its name, digest and
    variables; None: no template wrote the conversations.
    written: when its object was, as `ObjectInfo.modified` says; 0: not known. It is not stored.
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
    shards: list[ShardEntry]
    loss_modes: list[int] | None = None
    origins: list[str] | None = None
    pack: dict[str, int] | None = None
    chat_template: dict[str, Any] | None = None
    written: float = field(default=0.0, compare=False)

    @cached_property
    def token_dtype(self) -> np.dtype[Any]:
        """The dtype of tokens, little-endian."""
        return np.dtype(self.dtype).newbyteorder("<")

    @property
    def bin_tokens(self) -> int | None:
        """Tokens of a bin; None where documents are end to end."""
        return None if self.pack is None else self.pack["length"]

    @property
    def tokenizer_label(self) -> tuple[str, str]:
        """(name, digest) of the tokenizer; empty where it is not known."""
        return self.tokenizer.get("name", ""), self.tokenizer.get("digest", "")

    def with_shards(self, shards: list[ShardEntry]) -> Manifest:
        """The same with other shards, and the sums of these."""
        return replace(
            self,
            shards=shards,
            documents=sum(shard.documents for shard in shards),
            sequences=sum(shard.sequences for shard in shards),
            tokens=sum(shard.tokens for shard in shards),
        )

    def to_json(self) -> bytes:
        """The stored form."""
        fields = asdict(self)
        del fields["written"]
        for shard in fields["shards"]:
            if not shard["ends"]:
                del shard["ends"]
        for name in ("loss_modes", "origins", "pack", "chat_template"):
            # A dataset without them has the same manifest as before they were added.
            if fields[name] is None:
                del fields[name]
        text = json.dumps({"format": FORMAT, "version": VERSION, **fields}, indent=1) + "\n"
        return text.encode()


def manifest_url(name: str) -> str:
    """The URL of a dataset's manifest, by its own name or by the prefix of the dataset."""
    return name if name.endswith(".json") else strip_suffix(name) + MANIFEST


def read_manifest(url: str, storage: StorageConfig) -> Manifest:
    """Raises ObjectNotFoundError, FormatError for another kind of JSON, StorageError."""
    store, key = open_store(url, storage)
    info, body = store.get(key, MAX_BYTES)
    if info.size > MAX_BYTES:
        raise FormatError(
            f"{url}: has {info.size:,} bytes, which are too many for a manifest; name a manifest or "
            f"the prefix of a dataset"
        )
    try:
        manifest = _parse(bytes(body), url)
    except FormatError:
        raise
    except (ValueError, TypeError, AttributeError, RecursionError, dacite.DaciteError) as error:
        raise FormatError(
            f"{url}: is a damaged manifest ({error}); convert again, or name the shards"
        ) from None
    _check(manifest, url)
    return replace(manifest, written=info.modified)


def _check(manifest: Manifest, url: str) -> None:
    """Raise FormatError for a manifest that contradicts itself."""
    if manifest.pack is not None and not 1 <= manifest.pack.get("length", 0) <= MAX_BIN_TOKENS:
        raise FormatError(
            f"{url}: is a damaged manifest: its bins have no length that the format allows; convert "
            f"again"
        )
    known_dtypes = [str(dtype) for dtype in CODE_OF_DTYPE]
    if manifest.dtype not in known_dtypes:
        raise FormatError(
            f"{url}: is a damaged manifest: there are no tokens of dtype {manifest.dtype!r}; "
            "convert again"
        )
    # Names become paths. One that leads elsewhere could make readers and writers touch other files.
    leads_elsewhere = any(not _is_name_in_folder(shard.name) for shard in manifest.shards)
    if manifest.origins is not None and len(manifest.origins) != len(manifest.shards):
        raise FormatError(
            f"{url}: is a damaged manifest: it has origins of {len(manifest.origins)} shards, and "
            f"{len(manifest.shards)} shards; convert again"
        )
    if manifest.kind not in SUFFIXES or leads_elsewhere:
        raise FormatError(
            f"{url}: names shards outside of its folder, or of an unknown kind {manifest.kind!r}; "
            f"copy it again, or convert again"
        )


def _is_name_in_folder(name: str) -> bool:
    return bool(name) and is_utf8(name) and not {"/", "\0"} & set(name) and not escapes_folder(name)


def _parse(raw: bytes, url: str) -> Manifest:
    """Raises FormatError for another kind of JSON, ValueError or DaciteError for damaged JSON."""
    stored: Any = json.loads(raw, object_hook=_entry_or_dict)  # noqa: TID251
    if not isinstance(stored, dict) or stored.pop("format", None) != FORMAT:
        raise FormatError(
            f"{url}: is not a manifest that streammega convert wrote; name a manifest or the prefix "
            f"of a dataset"
        )
    version = stored.pop("version", None)
    if version != VERSION:
        raise FormatError(
            f"{url}: is a manifest of version {version}; this program reads version {VERSION}; update "
            f"the program, or copy the manifest again"
        )
    shards = stored.get("shards")
    if not isinstance(shards, list):
        raise ValueError("it lists no shards")
    for number, shard in enumerate(shards):
        if type(shard) is not ShardEntry:
            raise ValueError(f"its shard {number} lacks a field, or has one of another type")
    # dacite would take a second for 10,000 shards.
    manifest = dacite.from_dict(Manifest, stored | {"shards": []}, dacite.Config(strict=True))
    return replace(manifest, shards=shards)


def _entry_or_dict(stored: dict[str, Any]) -> Any:
    """A shard of a manifest, made as soon as it is parsed, because thousands of dicts would slow the
    garbage collector down. Other objects stay dicts.
    """
    if stored.keys() - {"ends"} != _TYPE_OF_FIELD.keys():
        return stored
    ends = stored.get("ends", "")
    if type(ends) is not str or (ends and not _ENDS.fullmatch(ends)):
        return stored
    for name, kind in _TYPE_OF_FIELD.items():
        if type(stored[name]) is not kind:
            return stored
    for name in ("checksums", "index_checksums"):
        if not all(type(checksum) is str for checksum in stored[name]):
            return stored
        stored[name] = tuple(stored[name])
    return ShardEntry(**stored)


def check_counts(manifest: Manifest, url: str) -> Manifest:
    """The manifest itself. Raises FormatError for counts that no shard can have."""
    itemsize = manifest.token_dtype.itemsize
    for shard in manifest.shards:
        contradicts = manifest.kind == "bin" and shard.tokens * itemsize != shard.bytes
        if contradicts or shard.documents < 0 or shard.sequences < 0 or shard.tokens < 0:
            raise FormatError(
                f"{url}: is a damaged manifest: {shard.name} has {shard.tokens} tokens of "
                f"{manifest.dtype} in {shard.bytes} bytes; convert again, or name the shards"
            )
    return manifest


def shard_names(manifest: Manifest, url: str) -> list[str]:
    """The names of the shards of the manifest at `url`, which are in its folder, in order."""
    kind = cast(Kind, manifest.kind)
    names = [with_suffix(shard.name, kind) for shard in manifest.shards]
    if "/" not in url:  # in the working directory
        return names
    return [join_url(parent_url(url), name) for name in names]
