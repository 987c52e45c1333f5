"""Whether a checkpoint is whole: checksums, and metadata that is read without trust.

`.metadata`, which says where each tensor is, is a pickle of torch.distributed.checkpoint. Our unpickler
makes its few classes and nothing else. Checksums (xxh3_64) in the position of the run show bits that
changed: one of each item, and one of the position with all of them.
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
    """A checkpoint that cannot be read, however often it is tried: files are missing, cut short or
    not what they should be.
    """


class Checksums:
    """The checksums of the items of a checkpoint, as they left memory.

    hex_of: by the name of a file, and by the offset, as text, at which an item begins in it.
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
        """A position with them, and with a checksum of both."""
        with_items = {**position, CHECKSUMS: self.hex_of}
        return {**with_items, CHECKSUM: _checksum_of_position(with_items)}


def checksum_of(data: bytes | memoryview) -> str:
    """The checksum of an item."""
    return xxhash.xxh3_64_hexdigest(data)


def checksum_matches(position: Mapping[str, Any]) -> bool:
    """Whether a position that was read has its own checksum."""
    return position.get(CHECKSUM) == _checksum_of_position(position)


def _checksum_of_position(position: Mapping[str, Any]) -> str:
    """The checksum of its values, which does not depend on spaces or the order of names."""
    checked = {name: value for name, value in position.items() if name != CHECKSUM}
    # Twice through JSON: a key that is a number becomes text, as in the file, before names are
    # sorted.
    as_read = json.loads(json.dumps(checked))
    text = json.dumps(as_read, sort_keys=True)
    return xxhash.xxh3_64_hexdigest(text.encode())


def parse_metadata(data: bytes, url: str) -> Metadata:
    """What a `.metadata` file says.

    Raises DamagedError; nothing but the classes of such a file is made.
    """
    try:
        metadata = _Unpickler(io.BytesIO(data)).load()
    except Exception as error:  # a damaged pickle raises anything
        raise DamagedError(f"{url}: is damaged ({type(error).__name__}: {error})") from None
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise DamagedError(f"{url}: is no metadata of a checkpoint")
    return metadata


class _Unpickler(pickle.Unpickler):
    """Knows what torch.distributed.checkpoint puts into `.metadata`: names, numbers and places."""

    def find_class(self, module: str, name: str) -> Any:
        """Raises UnpicklingError for everything else."""
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
"""The classes in such a file by module, for a pickle may call whatever it names."""


def first_cause(error: BaseException) -> BaseException:
    """The first rank's error, of those that torch has collected."""
    if not isinstance(error, CheckpointException) or not error.failures:
        return error
    cause, _ = error.failures[min(error.failures)]
    return cause


def one_line(error: BaseException) -> str:
    """What an error says, in one line."""
    if isinstance(error, StreammegaError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        if not error.filename:
            return error.strerror
        return f"{os.fspath(error.filename)}: {error.strerror}"
    # Texts of torch's errors are tracebacks, whose last line says what went wrong.
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__
