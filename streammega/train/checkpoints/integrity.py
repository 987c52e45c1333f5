"""Whether a checkpoint is whole: checksums, and metadata that cannot run code.

`.metadata`, which says where each tensor is, is a pickle of torch.distributed.checkpoint. Our unpickler
makes its few classes and nothing else. The position of the run has checksums (xxh3_64): one of each
item, and one of the position itself, with these.
"""

from __future__ import annotations

import io
import json
import os
import pickle
from collections.abc import Mapping
from typing import Any

import torch
import xxhash
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from streammega.errors import StateError, StreammegaError

CHECKSUMS = "checksums"
"""The name of the items' checksums in a position."""
CHECKSUM = "checksum"
"""The name of a position's own."""


class DamagedError(StateError):
    """A checkpoint that cannot be read: files are missing, cut short or damaged. Another try does not
    help.
    """


class Checksums:
    """The checksums of the items of a checkpoint.

    hex_of: by file name, and then by the offset of the item in the file, as text.
    """

    def __init__(self, hex_of: dict[str, dict[str, str]] | None = None) -> None:
        self.hex_of = hex_of or {}

    def add(self, name: str, start: int, checksum: str) -> None:
        """Note the checksum of an item."""
        self.hex_of.setdefault(name, {})[str(start)] = checksum

    def match(self, name: str, start: int, data: bytes | memoryview) -> bool:
        """Whether an item has its checksum. Every item has one."""
        return checksum_of(data) == self.hex_of.get(name, {}).get(str(start))

    def add_to(self, position: Mapping[str, Any]) -> dict[str, Any]:
        """A position with these checksums, and with a checksum of itself."""
        with_items = {**position, CHECKSUMS: self.hex_of}
        return {**with_items, CHECKSUM: _checksum_of_position(with_items)}


def checksum_of(data: bytes | memoryview) -> str:
    """The checksum of an item."""
    return xxhash.xxh3_64_hexdigest(data)


def checksum_matches(position: Mapping[str, Any]) -> bool:
    """Whether a position that was read has its own checksum."""
    return position.get(CHECKSUM) == _checksum_of_position(position)


def _checksum_of_position(position: Mapping[str, Any]) -> str:
    """The checksum of the values of a position, whatever the spaces and the order of names in a file."""
    checked = {name: value for name, value in position.items() if name != CHECKSUM}
    # Through JSON first: keys that are numbers become text, as in the file, before they are sorted.
    as_read = json.loads(json.dumps(checked))  # noqa: TID251
    text = json.dumps(as_read, sort_keys=True)
    return xxhash.xxh3_64_hexdigest(text.encode())


def parse_metadata(data: bytes, url: str) -> Metadata:
    """The content of a `.metadata` file. Raises DamagedError."""
    try:
        metadata = _Unpickler(io.BytesIO(data)).load()
    except Exception as error:  # a damaged pickle raises anything
        raise DamagedError(f"{url}: is damaged ({type(error).__name__}: {error})") from None
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise DamagedError(f"{url}: is no metadata of a checkpoint")
    return metadata


class _Unpickler(pickle.Unpickler):
    """Makes only the classes that torch.distributed.checkpoint puts into `.metadata`."""

    def find_class(self, module: str, name: str) -> Any:
        """A class of _KNOWN, or a dtype. Raises UnpicklingError for any other."""
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in _KNOWN.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in such a file")


_PATHS = ("PosixPath", "PurePosixPath", "WindowsPath")
_KNOWN = {
    "torch.distributed.checkpoint.metadata": (
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "ChunkStorageMetadata",
        "BytesStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "collections": ("OrderedDict",),
    "pathlib": _PATHS,
    "pathlib._local": _PATHS,  # of Python 3.13
}
"""The classes in such a file, by module. A pickle could call anything else that it names."""


def first_cause(error: BaseException) -> BaseException:
    """The error of the first rank, among those that torch has collected."""
    if not isinstance(error, CheckpointException) or not error.failures:
        return error
    cause, _ = error.failures[min(error.failures)]
    return cause


def one_line(error: BaseException) -> str:
    """The message of an error, in one line."""
    if isinstance(error, StreammegaError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        if not error.filename:
            return error.strerror
        return f"{os.fspath(error.filename)}: {error.strerror}"
    # Messages of torch are tracebacks, whose last line says what went wrong.
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__
