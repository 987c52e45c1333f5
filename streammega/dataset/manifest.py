"""The manifest of a dataset: its shards, in order, and what they must be.

JSON, written last, the same for the same data.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any, NamedTuple

import dacite
import numpy as np

from streammega.config import StorageConfig
from streammega.dataset.columns import StoredColumn, column_of
from streammega.dataset.idx import CODE_OF_DTYPE, index_bytes
from streammega.dataset.labels import Label, LossModes, TokenizerLabel
from streammega.dataset.names import MANIFEST, SUFFIXES, Kind, strip_suffix, with_suffix
from streammega.errors import FormatError
from streammega.errors.words import is_utf8
from streammega.storage import join_url, open_store, parent_url
from streammega.storage.open import escapes_folder

FORMAT = "streammega-manifest"
BLEND_FORMAT = "streammega-blend"
VERSION = 1
MAX_BYTES = 1 << 30
"""The largest manifest that is read. The object of that name may be anything."""
MAX_BIN_TOKENS = 1 << 24
"""The longest bins that `convert` writes (`pack_length`)."""


class Shard(NamedTuple):
    """One shard: its two stored objects, and what they hold.

    name: its prefix, in a stored manifest without the folder of that. ends: `TokenEnds.digest` of its
    tokens. etag, index_etag: versions of both objects. checksums: xxh3-128 of each 64 MiB, as stored.
    last_end: the byte of the tokens at which the last sequence ends; -1: where these do. What is not known
    is empty.
    """

    name: str
    documents: int
    sequences: int
    tokens: int
    bytes: int
    index_bytes: int
    ends: str = ""
    etag: str = ""
    index_etag: str = ""
    checksums: Sequence[str] = ()
    index_checksums: Sequence[str] = ()
    kind: Kind = "bin"
    dtype: str = ""
    last_end: int = -1

    @property
    def url(self) -> str:
        """That of the tokens."""
        return self.name + SUFFIXES[self.kind]

    @property
    def index_url(self) -> str:
        """That of the `.idx`."""
        return f"{self.name}.idx"

    @property
    def token_dtype(self) -> np.dtype[Any]:
        """Little-endian."""
        return little_endian(self.dtype)

    @property
    def token_bytes(self) -> int:
        """Bytes of all tokens, decompressed."""
        return self.tokens * self.token_dtype.itemsize

    @property
    def multimodal(self) -> bool:
        """Whether its sequences have modes. Without sequences, the `.idx` does not tell."""
        plain = index_bytes(self.sequences, self.documents + 1, multimodal=False)
        return self.sequences > 0 and self.index_bytes != plain

    @property
    def is_known(self) -> bool:
        """Whether nothing has to be asked about it before its tokens are read."""
        return bool(self.ends and self.etag and self.index_etag)


@cache
def little_endian(dtype: str) -> np.dtype[Any]:
    """One object for all shards, and not one for each."""
    return np.dtype(dtype).newbyteorder("<")


_COUNTS = ("documents", "sequences", "tokens", "bytes", "index_bytes")
_LISTS = ("checksums", "index_checksums")
_REQUIRED = frozenset({"name", *_COUNTS})
_KNOWN = frozenset(Shard._fields)
_ENDS = re.compile(r"(?:[0-9a-f]{16})?")


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A dataset.

    kind, dtype: those of its shards; of a folder with several, those of the first. tokenizer: its
    name and digest, if tokens were made from text. vocab_size, eod_id: None where unknown.
    loss_modes: the modes of sequences that are learned; None: modes mean something else, or the
    dataset has no modes. origins: xxh3-128 of the `.origins` of each shard; None: it has no such
    files. pack: the "length" of bins in tokens, how many there are ("bins"), and their tokens of no
    document ("padding"); None: documents are end to end. chat_template: its name and
    digest; None: no template wrote the conversations. columns: what is stored for each token next to
    the ids; in no identity.
    seen_at: the folder and endpoint where the ETags of shards were seen. They do not count in a copy.
    folder_labels: what manifests in a folder say of its shards. pointers: (shard, sequence of it, its first
    token) at cuts of splits. A manifest that is written for one dataset has neither.
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
    chat_template: dict[str, Any] | None = None
    columns: tuple[StoredColumn, ...] = ()
    seen_at: str = ""
    folder_labels: tuple[Label, ...] | None = None
    pointers: tuple[tuple[int, int, int], ...] = ()

    @property
    def token_dtype(self) -> np.dtype[Any]:
        """The dtype of tokens, little-endian."""
        return little_endian(self.dtype)

    @property
    def bin_tokens(self) -> int | None:
        """Tokens of a bin; None where documents are end to end."""
        return None if self.pack is None else self.pack["length"]

    @property
    def tokenizer_label(self) -> tuple[str, str]:
        """(name, digest) of the tokenizer; empty where it is not known."""
        return self.tokenizer.get("name", ""), self.tokenizer.get("digest", "")

    @property
    def labels(self) -> tuple[Label, ...]:
        """What is said of the ids of its shards."""
        if self.folder_labels is not None:
            return self.folder_labels
        tokenizer = None
        if self.tokenizer.get("digest"):
            tokenizer = TokenizerLabel(*self.tokenizer_label, self.vocab_size)
        modes = None if self.loss_modes is None else tuple(self.loss_modes)
        return (Label("", tokenizer, modes, has_modes=True, eod_id=self.eod_id),)

    @property
    def tokenizers(self) -> set[TokenizerLabel]:
        """The tokenizers of its shards, as far as manifests name them."""
        return {label.tokenizer for label in self.labels if label.tokenizer is not None}

    @property
    def eod_ids(self) -> set[int | None]:
        """The ids that end documents in its shards; None for shards whose manifest names none."""
        return {label.eod_id for label in self.labels} or {None}

    @property
    def vocab_sizes(self) -> set[int | None]:
        """Ids of its shards run below these; None for shards whose manifest names no tokenizer."""
        return {label.vocab_size for label in self.labels} or {None}

    def learned_modes(self, name: str) -> LossModes:
        """The modes whose sequences are learned; None where no manifest has any.

        name: for messages. Raises FormatError where its shards differ.
        """
        prefix_of_modes: dict[LossModes, str] = {}
        for label in self.labels:
            if label.has_modes:
                prefix_of_modes[label.loss_modes] = label.prefix
        if len(prefix_of_modes) > 1:
            listed = [f"{prefix} has {modes}" for modes, prefix in prefix_of_modes.items()]
            raise FormatError(
                f"{name}: its shards differ in the modes that are learned ({' and '.join(listed)}); "
                "make a blend of them"
            )
        return next(iter(prefix_of_modes), None)

    def with_shards(self, shards: list[Shard]) -> Manifest:
        """The same with other shards, and the sums of these."""
        return replace(
            self,
            shards=shards,
            documents=sum(shard.documents for shard in shards),
            sequences=sum(shard.sequences for shard in shards),
            tokens=sum(shard.tokens for shard in shards),
        )

    def to_json(self) -> bytes:
        """The stored form. Names of shards have no folder."""
        stored = self.stored()
        for item in (*stored["shards"], *_stored_files(stored)):
            item["name"] = item["name"].rpartition("/")[2]
        text = json.dumps({"format": FORMAT, "version": VERSION, **stored}, indent=1) + "\n"
        return text.encode()

    def stored(self) -> dict[str, Any]:
        """Its fields as values of JSON. Those that say nothing are left out."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        for name in (
            "loss_modes",
            "origins",
            "pack",
            "chat_template",
            "columns",
            "seen_at",
            "folder_labels",
            "pointers",
        ):
            if values[name] in (None, "", ()):
                del values[name]
        if self.columns:
            values["columns"] = [column.stored() for column in self.columns]
        return values | {"shards": [_stored_shard(shard, self) for shard in self.shards]}


def _stored_files(stored: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The files of columns that a stored manifest lists."""
    return [file for column in stored.get("columns", ()) for file in column["files"] if file]


def _stored_shard(shard: Shard, manifest: Manifest) -> dict[str, Any]:
    """The fields of a shard that say more than its manifest."""
    of_manifest = {"kind": manifest.kind, "dtype": manifest.dtype}
    row = shard._asdict()
    return {
        name: value
        for name, value in row.items()
        if name in _REQUIRED or (value not in ("", (), [], -1) and value != of_manifest.get(name))
    }


def manifest_url(name: str) -> str:
    """The URL of a dataset's manifest, by its own name or by the prefix of the dataset."""
    return name if name.endswith(".json") else strip_suffix(name) + MANIFEST


def read_manifest(url: str, storage: StorageConfig) -> Manifest:
    """Raises ObjectNotFoundError, FormatError for another kind of JSON, StorageError."""
    return parse_manifest(read_json(url, storage), url)


def read_json(url: str, storage: StorageConfig) -> bytes:
    """A small object. Raises ObjectNotFoundError, FormatError for one that is too large,
    StorageError.
    """
    store, key = open_store(url, storage)
    info, body = store.get(key, MAX_BYTES)
    if info.size > MAX_BYTES:
        raise FormatError(
            f"{url}: has {info.size:,} bytes, which are too many for a manifest; name a manifest or "
            f"the prefix of a dataset"
        )
    return bytes(body)


def parse_manifest(raw: bytes, url: str) -> Manifest:
    """The manifest of stored bytes. Raises FormatError."""
    try:
        stored = parse_stored(raw)
        form = stored.pop("format", None) if isinstance(stored, dict) else None
        if form == BLEND_FORMAT:
            raise FormatError(
                f"{url}: is a blend that 'streammega manifest' wrote, and no dataset; name it alone: "
                f"blend = {url!r}"
            )
        if form != FORMAT:
            raise FormatError(
                f"{url}: is not a manifest that streammega convert wrote; name a manifest or the prefix "
                f"of a dataset"
            )
        check_version(stored.pop("version", None), url)
        manifest = manifest_of(stored)
    except FormatError:
        raise
    except (ValueError, TypeError, AttributeError, RecursionError, dacite.DaciteError) as error:
        raise FormatError(
            f"{url}: is a damaged manifest ({error}); convert again, or name the shards"
        ) from None
    check_manifest(manifest, url)
    return manifest


def check_version(version: object, url: str) -> None:
    """Raise FormatError for a version that this program does not read."""
    if version != VERSION:
        raise FormatError(
            f"{url}: is a manifest of version {version}; this program reads version {VERSION}; update "
            f"the program, or copy the manifest again"
        )


def check_manifest(manifest: Manifest, url: str, *, in_folder: bool = True) -> None:
    """Raise FormatError for a manifest that contradicts itself.

    in_folder: names of shards are those of files in its own folder.
    """
    if manifest.pack is not None and not 1 <= manifest.pack.get("length", 0) <= MAX_BIN_TOKENS:
        raise FormatError(
            f"{url}: is a damaged manifest: its bins have no length that the format allows; convert "
            f"again"
        )
    known_dtypes = {str(dtype) for dtype in CODE_OF_DTYPE}
    used = {manifest.dtype, *(shard.dtype for shard in manifest.shards)}
    for dtype in used - known_dtypes:
        raise FormatError(
            f"{url}: is a damaged manifest: there are no tokens of dtype {dtype!r}; convert again"
        )
    if manifest.origins is not None and len(manifest.origins) != len(manifest.shards):
        raise FormatError(
            f"{url}: is a damaged manifest: it has origins of {len(manifest.origins)} shards, and "
            f"{len(manifest.shards)} shards; convert again"
        )
    for column in manifest.columns:
        if len(column.files) != len(manifest.shards):
            raise FormatError(
                f"{url}: is a damaged manifest: column {column.name!r} has {len(column.files)} files, and "
                f"there are {len(manifest.shards)} shards; write the column again"
            )
    if len({column.name for column in manifest.columns}) < len(manifest.columns):
        raise FormatError(f"{url}: is a damaged manifest: it lists a column twice; copy it again")
    # Names become paths. One that leads elsewhere could make readers and writers touch other files.
    names = [shard.name for shard in manifest.shards]
    names += [file.name for column in manifest.columns for file in column.files if file]
    leads_elsewhere = in_folder and not all(map(_is_name_in_folder, names))
    kinds = {manifest.kind, *(shard.kind for shard in manifest.shards)}
    if kinds - SUFFIXES.keys() or leads_elsewhere:
        raise FormatError(
            f"{url}: names shards outside of its folder, or of an unknown kind {manifest.kind!r}; "
            f"copy it again, or convert again"
        )


def _is_name_in_folder(name: str) -> bool:
    return bool(name) and is_utf8(name) and not {"/", "\0"} & set(name) and not escapes_folder(name)


def parse_stored(raw: bytes) -> Any:
    """Values of JSON, with shards in place of the objects that describe them.

    Raises ValueError, RecursionError.
    """
    return json.loads(raw, object_hook=_shard_or_dict)  # noqa: TID251


def manifest_of(stored: Mapping[str, Any]) -> Manifest:
    """The manifest that `Manifest.stored` gave. Raises ValueError, TypeError or DaciteError."""
    shards = stored.get("shards")
    if not isinstance(shards, list):
        raise ValueError("it lists no shards")
    for number, shard in enumerate(shards):
        if type(shard) is not Shard:
            raise ValueError(f"its shard {number} lacks a field, or has one of another type")
    values = {**stored, "shards": []}
    if "columns" in stored:
        values["columns"] = tuple(map(column_of, stored["columns"]))
    if "folder_labels" in stored:
        values["folder_labels"] = tuple(map(Label.of_stored, stored["folder_labels"]))
    if "pointers" in stored:
        values["pointers"] = tuple((int(a), int(b), int(c)) for a, b, c in stored["pointers"])
    # dacite would take a second for 10,000 shards.
    manifest = dacite.from_dict(Manifest, values, dacite.Config(strict=True))
    kind: Any = manifest.kind
    dtype = manifest.dtype
    filled = [
        shard._replace(kind=shard.kind or kind, dtype=shard.dtype or dtype) for shard in shards
    ]
    return replace(manifest, shards=filled)


def _shard_or_dict(stored: dict[str, Any]) -> Any:
    """A shard of a manifest, made as soon as it is parsed, because thousands of dicts would slow the
    garbage collector down. Other objects stay dicts.
    """
    if not stored.keys() >= _REQUIRED or not stored.keys() <= _KNOWN:
        return stored
    for name, value in stored.items():
        if name in _COUNTS or name == "last_end":
            is_sound = type(value) is int
        elif name in _LISTS:
            is_sound = type(value) is list and all(type(item) is str for item in value)
            stored[name] = tuple(value) if is_sound else value
        else:
            is_sound = type(value) is str
        if not is_sound:
            return stored
    if not _ENDS.fullmatch(stored.get("ends", "")):
        return stored
    return Shard(**{"kind": "", "dtype": "", **stored})


def check_counts(manifest: Manifest, url: str) -> Manifest:
    """The manifest itself. Raises FormatError for counts that no shard can have."""
    for shard in manifest.shards:
        contradicts = shard.kind == "bin" and shard.token_bytes != shard.bytes
        if contradicts or shard.documents < 0 or shard.sequences < 0 or shard.tokens < 0:
            raise FormatError(
                f"{url}: is a damaged manifest: {shard.name} has {shard.tokens} tokens of "
                f"{shard.dtype} in {shard.bytes} bytes; convert again, or name the shards"
            )
    for number, sequence, token in manifest.pointers:
        is_there = 0 <= number < len(manifest.shards)
        if is_there:
            shard = manifest.shards[number]
            is_there = 0 <= sequence <= shard.sequences and 0 <= token <= shard.tokens
        if not is_there:
            raise FormatError(
                f"{url}: is a damaged manifest: it has a pointer to sequence {sequence} of shard {number} "
                f"at token {token}, and there is none; write it again"
            )
    return manifest


def shard_names(manifest: Manifest, url: str) -> list[str]:
    """The names of the shards of the manifest at `url`, which are in its folder, in order."""
    return [with_suffix(shard.name, shard.kind) for shard in shards_at(manifest, url)]


def shards_at(manifest: Manifest, url: str) -> list[Shard]:
    """The shards of the manifest at `url`, by their full names, in order."""
    folder = _folder_of(url)
    return [shard._replace(name=folder + shard.name) for shard in manifest.shards]


def columns_at(manifest: Manifest, url: str) -> tuple[StoredColumn, ...]:
    """The columns of the manifest at `url`, with full names of their files."""
    folder = _folder_of(url)
    return tuple(
        column._replace(
            files=[file and file._replace(name=folder + file.name) for file in column.files]
        )
        for column in manifest.columns
    )


def _folder_of(url: str) -> str:
    """What the names in a manifest begin with; empty in the working directory."""
    return join_url(parent_url(url), "") if "/" in url else ""


# --- a blend ----------------------------------------------------------------------------------------


class PinnedBlend(NamedTuple):
    """What a blend meant when it was written.

    blend, blend_per_split: as a config has them, of names and weights; a config has one of both.
    manifests: of the datasets by their names, with full names of shards.
    """

    blend: Any
    blend_per_split: Any
    manifests: dict[str, Manifest]

    def to_json(self) -> bytes:
        """The stored form."""
        stored = {
            "format": BLEND_FORMAT,
            "version": VERSION,
            "blend": self.blend,
            "blend_per_split": self.blend_per_split,
            "datasets": {name: manifest.stored() for name, manifest in self.manifests.items()},
        }
        return (json.dumps(stored, indent=1) + "\n").encode()


def read_blend_file(url: str, storage: StorageConfig) -> PinnedBlend | None:
    """The blend at `url`; None for another kind of JSON, such as the manifest of a dataset.

    Raises ObjectNotFoundError, FormatError for a damaged file, StorageError.
    """
    return parse_blend_file(read_json(url, storage), url)


def parse_blend_file(raw: bytes, url: str) -> PinnedBlend | None:
    """The same of stored bytes. Raises FormatError."""
    try:
        stored = parse_stored(raw)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{url}: is no JSON ({error}); write it again") from None
    if not isinstance(stored, dict) or stored.get("format") != BLEND_FORMAT:
        return None
    check_version(stored.get("version"), url)
    try:
        per_split = stored["blend_per_split"]
        if per_split is not None:
            per_split = [_entries(rows) for rows in per_split]
        blend = PinnedBlend(
            _entries(stored["blend"]),
            per_split,
            {name: manifest_of(row) for name, row in stored["datasets"].items()},
        )
    except (KeyError, ValueError, TypeError, AttributeError, dacite.DaciteError) as error:
        raise FormatError(f"{url}: is a damaged blend ({error}); write it again") from None
    for manifest in blend.manifests.values():
        check_manifest(manifest, url, in_folder=False)
        check_counts(manifest, url)
        if not manifest.shards:
            raise FormatError(f"{url}: lists a dataset without shards; write it again")
    return blend


def _entries(rows: Any) -> Any:
    """The entries of a stored blend: names, or (name, weight). Raises ValueError, TypeError."""
    if rows is None:
        return None
    if not all(type(name) is str for name, _ in rows):
        raise ValueError("a name of its blend is no text")
    return [name if weight is None else (name, float(weight)) for name, weight in rows]
