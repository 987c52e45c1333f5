"""The files of a checkpoint: where they lie, what they hold, whether they are whole. Read without
trust.

They have the format of torch.distributed.checkpoint. `.metadata`, which says what lies where, is a
pickle: it is read by an unpickler that knows its few classes and nothing else. Each item is what
torch.save made, and read by torch.load with `weights_only`. Bits that changed since are seen by
checksums (xxh3_64) in the position of the run: one of each item, and one of the position with all
of them.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from streammega.errors import (
    ObjectNotFoundError,
    ShortReadError,
    StateError,
    StorageError,
    StreammegaError,
)
from streammega.storage import Store
from streammega.train.small_objects import read_small

METADATA = ".metadata"

CHECKSUMS = "checksums"
"""The name of the items' checksums in a position."""
CHECKSUM = "checksum"
"""The name of a position's own."""


class DamagedError(StateError):
    """A checkpoint that cannot be read, however often it is tried: files are missing, cut short or
    not what they should be.
    """


@dataclass(frozen=True)
class Checksums:
    """What was written, as it left memory.

    hexes: by the name of a file, and by the offset, as text, at which an item begins in it.
    """

    hexes: dict[str, dict[str, str]] = field(default_factory=dict)

    def match(self, name: str, start: int, data: bytes | memoryview) -> bool:
        """Whether an item has its checksum. Every item has one."""
        return xxhash.xxh3_64_hexdigest(data) == self.hexes.get(name, {}).get(str(start))

    def add_to(self, position: Mapping[str, Any]) -> dict[str, Any]:
        """A position with them, and with a checksum of both."""
        with_items = {**position, CHECKSUMS: self.hexes}
        return {**with_items, CHECKSUM: _checksum_of_position(with_items)}


def is_as_written(position: Mapping[str, Any]) -> bool:
    """Whether a position that was read has its own checksum."""
    return position.get(CHECKSUM) == _checksum_of_position(position)


def _checksum_of_position(position: Mapping[str, Any]) -> str:
    """Of what it says, not of its bytes, which spaces and the order of names change."""
    checked = {name: value for name, value in position.items() if name != CHECKSUM}
    # Twice through JSON: a key that is a number becomes text, as in the file, before names are
    # sorted.
    as_read = json.loads(json.dumps(checked))
    text = json.dumps(as_read, sort_keys=True)
    return xxhash.xxh3_64_hexdigest(text.encode())


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
        sizes: dict[str, int] = {}
        for item in self.store.list(f"{self.prefix}/", recursive=False):
            _, _, name = item.key.rpartition("/")
            sizes[name] = item.size
        return sizes

    def read(self, name: str) -> bytes:
        """A small file. Raises DamagedError where it is missing."""
        try:
            return read_small(self.store, self.key(name))
        except (ObjectNotFoundError, ShortReadError) as error:
            raise DamagedError(f"{self.url(name)}: is missing or cut short ({error})") from None


def read_metadata(files: Files, checksums: Checksums) -> Metadata:
    """What a checkpoint holds, and where.

    Raises DamagedError; nothing but the classes of such a file is made.
    """
    data = files.read(METADATA)
    if not checksums.match(METADATA, 0, data):
        raise DamagedError(f"{files.url(METADATA)}: is damaged: its checksum is another")
    return parse_metadata(data, files.url(METADATA))


def parse_metadata(data: bytes, url: str) -> Metadata:
    """What a `.metadata` file says. Raises as `read_metadata` does."""
    try:
        metadata = _Unpickler(io.BytesIO(data)).load()
    except Exception as error:  # a damaged pickle raises anything
        raise DamagedError(f"{url}: is damaged ({type(error).__name__}: {error})") from None
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise DamagedError(f"{url}: is no metadata of a checkpoint")
    return metadata


def check_files(files: Files, metadata: Metadata) -> None:
    """Raise DamagedError unless every file that the metadata names is there, as long as what it is
    to hold.
    """
    stored_bytes = files.sizes()
    for name, written_bytes in sorted(_bytes_by_file(metadata).items()):
        # A name with a slash would lead out of the folder.
        if "/" in name or name not in stored_bytes:
            raise DamagedError(f"{files.url(name)}: is missing")
        if stored_bytes[name] < written_bytes:
            raise DamagedError(
                f"{files.url(name)}: is cut short: {stored_bytes[name]} bytes, "
                f"and {written_bytes} were written"
            )


def _bytes_by_file(metadata: Metadata) -> dict[str, int]:
    """How long each file must be, to hold the items that lie in it."""
    bytes_by_file: dict[str, int] = {}
    for item in metadata.storage_data.values():
        stop_byte = item.offset + item.length
        bytes_by_file[item.relative_path] = max(bytes_by_file.get(item.relative_path, 0), stop_byte)
    return bytes_by_file


class _Unpickler(pickle.Unpickler):
    """Knows what torch.distributed.checkpoint puts into `.metadata`: names, numbers and places."""

    def find_class(self, module: str, name: str) -> Any:
        """Raises UnpicklingError for everything else."""
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in _KNOWN:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in such a file")


_METADATA_MODULE = "torch.distributed.checkpoint.metadata"
_KNOWN = {
    (_METADATA_MODULE, "Metadata"),
    (_METADATA_MODULE, "MetadataIndex"),
    (_METADATA_MODULE, "StorageMeta"),
    (_METADATA_MODULE, "TensorProperties"),
    (_METADATA_MODULE, "TensorStorageMetadata"),
    (_METADATA_MODULE, "ChunkStorageMetadata"),
    (_METADATA_MODULE, "BytesStorageMetadata"),
    (_METADATA_MODULE, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
    ("pathlib", "WindowsPath"),
    # where Python 3.13 has them
    ("pathlib._local", "PosixPath"),
    ("pathlib._local", "PurePosixPath"),
    ("pathlib._local", "WindowsPath"),
}
"""(module, name) of the classes in such a file, for a pickle may call whatever it names."""


def first_cause(error: BaseException) -> BaseException:
    """The first rank's error, of those that torch has collected."""
    if not isinstance(error, CheckpointException) or not error.failures:
        return error
    first_rank = min(error.failures)
    cause, _ = error.failures[first_rank]
    return cause


def root_failure(error: BaseException) -> BaseException:
    """The failure of a disk or store that an error came from; else the error.

    torch's writer of archives fails once more as it is closed, and tells of that alone.
    """
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError | StorageError):
        cause = cause.__cause__ or cause.__context__
    return cause or error


def one_line(error: BaseException) -> str:
    """What an error says, in one line."""
    if isinstance(error, StreammegaError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        if not error.filename:
            return error.strerror
        return f"{os.fspath(error.filename)}: {error.strerror}"
    # Of others the last line: torch's own are tracebacks, which end with what went wrong.
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__


@contextmanager
def without_torch_warning() -> Iterator[None]:
    """torch warns when one process saves by itself, which one rank without torchrun
    rightly does.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "torch.distributed is disabled, unavailable or uninitialized"
        )
        yield
