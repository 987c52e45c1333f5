"""The files of a checkpoint: where they lie, what they hold, whether they are whole. Read without
trust.

They have the format of torch.distributed.checkpoint. `.metadata`, which says what lies where, is a
pickle: it is read by an unpickler that knows its few classes and nothing else. Each item is what
torch.save made, and read by torch.load with `weights_only`. Bits that changed since are seen by
checksums, which lie beside the position of the run.
"""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash
from torch.distributed.checkpoint.metadata import Metadata

from streammega.errors import ObjectNotFoundError, ShortReadError, StateError
from streammega.storage import Store

METADATA = ".metadata"

CHECKSUMS = "checksums"
POSITION = "position"
ALGORITHM = "xxh3_64"
"""A name in files: one that is not known is not checked, so that another may come later."""


class DamagedError(StateError):
    """A checkpoint that cannot be read, however often it is tried: files are missing, cut short or
    not what they should be.
    """


@dataclass(frozen=True)
class Checksums:
    """What was written, as it left memory: `hexes` by the name of a file and the offset, as text,
    at which an item begins.
    """

    hexes: dict[str, dict[str, str]] = field(default_factory=dict)

    def match(self, name: str, start: int, data: bytes | memoryview) -> bool:
        """Whether an item has its checksum.

        True where there is none: checkpoints of earlier versions have none.
        """
        expected = self.hexes.get(name, {}).get(str(start))
        return expected is None or xxhash.xxh3_64_hexdigest(data) == expected

    def beside(self, position: Mapping[str, Any]) -> dict[str, Any]:
        """A position with them, and with one of its own."""
        own = {ALGORITHM: _checksum_of_position(position)}
        return {**position, CHECKSUMS: {ALGORITHM: self.hexes, POSITION: own}}


def checksums_in(position: Mapping[str, Any]) -> Checksums:
    """Those that lie beside a position; none for checkpoints of earlier versions."""
    files = _within(_within(position, CHECKSUMS), ALGORITHM)
    return Checksums({name: items for name, items in files.items() if isinstance(items, dict)})


def is_as_written(position: Mapping[str, Any]) -> bool:
    """Whether a position that was read has its own checksum.

    True where there is none, as in checkpoints of earlier versions.
    """
    expected = _within(_within(position, CHECKSUMS), POSITION).get(ALGORITHM)
    return expected is None or _checksum_of_position(position) == expected


def _within(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = values.get(name)
    return found if isinstance(found, dict) else {}


def _checksum_of_position(position: Mapping[str, Any]) -> str:
    """Of what it says, not of its bytes, which spaces and the order of names change.

    Other checksums beside it do not count.
    """
    said = json.loads(
        json.dumps({name: value for name, value in position.items() if name != CHECKSUMS})
    )
    return xxhash.xxh3_64_hexdigest(json.dumps(said, sort_keys=True).encode())


@dataclass(frozen=True, kw_only=True)
class Files:
    """A folder of files in a store. `prefix`: the key of the folder, without a slash at its end."""

    store: Store
    prefix: str

    def key(self, name: str) -> str:
        """The key of a file."""
        return f"{self.prefix}/{name}"

    def url(self, name: str = "") -> str:
        """For messages."""
        return self.store.url(self.key(name) if name else self.prefix)

    def sizes(self) -> dict[str, int]:
        """Bytes of every file that lies directly in the folder."""
        found = self.store.list(f"{self.prefix}/", recursive=False)
        return {item.key.rpartition("/")[2]: item.size for item in found}

    def read(self, name: str) -> bytes:
        """A small file. Raises DamagedError where it is missing."""
        try:
            size = self.store.info(self.key(name)).size
            return bytes(self.store.read_ranges(self.key(name), [0], [size])[0]) if size else b""
        except (ObjectNotFoundError, ShortReadError) as error:
            raise DamagedError(f"{self.url(name)}: is missing or cut short ({error})") from None


def read_metadata(files: Files, checksums: Checksums) -> Metadata:
    """What a checkpoint holds, and where.

    Raises DamagedError; nothing but the classes of such a file is made.
    """
    data = files.read(METADATA)
    if not checksums.match(METADATA, 0, data):
        raise DamagedError(f"{files.url(METADATA)}: is damaged: its checksum is another")
    try:
        metadata = _Unpickler(io.BytesIO(data)).load()
    except Exception as error:  # a damaged pickle raises anything
        raise DamagedError(
            f"{files.url(METADATA)}: is damaged ({type(error).__name__}: {error})"
        ) from None
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise DamagedError(f"{files.url(METADATA)}: is no metadata of a checkpoint")
    return metadata


def check_files(files: Files, metadata: Metadata) -> None:
    """Raise DamagedError unless every file that the metadata names is there, as long as what it is
    to hold.
    """
    there = files.sizes()
    needed: dict[str, int] = {}
    for place in metadata.storage_data.values():
        needed[place.relative_path] = max(
            needed.get(place.relative_path, 0), place.offset + place.length
        )
    for name, size in sorted(needed.items()):
        if "/" in name or name not in there:  # a name with a slash would lead out of the folder
            raise DamagedError(f"{files.url(name)}: is missing")
        if there[name] < size:
            raise DamagedError(
                f"{files.url(name)}: is cut short: {there[name]} bytes, and {size} were written"
            )


class _Unpickler(pickle.Unpickler):
    """Knows what torch.distributed.checkpoint puts into `.metadata`: names, numbers and places."""

    def find_class(self, module: str, name: str) -> Any:
        """Raises UnpicklingError for everything else."""
        if (module, name) in _KNOWN or (
            module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        ):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in such a file")


_METADATA_MODULE = "torch.distributed.checkpoint.metadata"
_KNOWN = {
    *(
        (_METADATA_MODULE, name)
        for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")
    ),
    *(
        (_METADATA_MODULE, name)
        for name in ("TensorStorageMetadata", "ChunkStorageMetadata", "BytesStorageMetadata")
    ),
    (_METADATA_MODULE, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    *(
        (module, kind)
        for module in ("pathlib", "pathlib._local")
        for kind in ("PosixPath", "PurePosixPath", "WindowsPath")
    ),
}
