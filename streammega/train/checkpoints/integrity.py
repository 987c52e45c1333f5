"""Whether a checkpoint is whole: checksums, and a list of its tensors that cannot run code.

`tensors.json` says where each tensor is. torch's own `.metadata`, a pickle, says the same to other
programs and is never read. The position of the run has checksums (xxh3_64): one of each item, and one of
the position itself, with these.
"""

from __future__ import annotations

import io
import json
import math
import os
import struct
import zipfile
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
import xxhash
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from streammega.config.validate import parse_json
from streammega.errors import StateError, StreammegaError
from streammega.storage.store import Span

CHECKSUMS = "checksums"
"""The name of the items' checksums in a position."""
CHECKSUM = "checksum"
"""The name of a position's own."""
TENSORS_VERSION = 1
MAX_COUNT = 1 << 50
"""Elements of a tensor along a dimension, and bytes of a file: far more than there are."""
_LOCAL_HEADER = struct.Struct("<4s22xHH")
"""What is before the bytes of a .zip's entry: a signature, and the sizes of its name and its extras."""
_LOCAL_SIGNATURE = b"PK\3\4"


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
        of_file = self.hex_of.get(name)
        return isinstance(of_file, dict) and checksum_of(data) == of_file.get(str(start))

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


def list_tensors(metadata: Metadata) -> bytes:
    """What a checkpoint holds, as JSON: of each tensor its dtype, its size, and its parts, each with its
    place in the tensor, its size, and its file and bytes there.
    """
    tensors: dict[str, dict[str, Any]] = {}
    for name, stored in metadata.state_dict_metadata.items():
        assert isinstance(stored, TensorStorageMetadata), name
        parts = []
        for chunk in stored.chunks:
            place = metadata.storage_data[MetadataIndex(name, chunk.offsets)]
            of_file = [place.relative_path, place.offset, place.length]
            parts.append([list(chunk.offsets), list(chunk.sizes), *of_file])
        dtype = str(stored.properties.dtype).removeprefix("torch.")
        tensors[name] = {"dtype": dtype, "size": list(stored.size), "parts": parts}
    return json.dumps({"version": TENSORS_VERSION, "tensors": tensors}).encode()


def parse_tensors(data: bytes, url: str) -> Metadata:
    """What `list_tensors` made. Raises DamagedError."""
    try:
        stored = parse_json(data)
        if stored["version"] != TENSORS_VERSION:
            raise ValueError(f"version {stored['version']!r}; this release reads {TENSORS_VERSION}")
        metadata = Metadata(state_dict_metadata={}, storage_data={})
        for name, tensor in stored["tensors"].items():
            _add_tensor(metadata, name, tensor)
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise DamagedError(f"{url}: lists no tensors ({type(error).__name__}: {error})") from None
    return metadata


def _add_tensor(metadata: Metadata, name: str, tensor: Mapping[str, Any]) -> None:
    """Raises KeyError, TypeError and ValueError for what describes no tensor."""
    dtype = getattr(torch, tensor["dtype"], None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name} has no dtype {tensor['dtype']!r}")
    size = _counts(tensor["size"])
    chunks = []
    boxes: list[list[Span]] = []
    for offsets, sizes, file_name, start, length in tensor["parts"]:
        chunk = ChunkStorageMetadata(_counts(offsets), _counts(sizes))
        box = [(a, a + count) for a, count in zip(chunk.offsets, chunk.sizes, strict=True)]
        if any(stop > length for (_, stop), length in zip(box, size, strict=True)):
            raise ValueError(f"a part of {name} is outside of it")
        if math.prod(chunk.sizes):
            boxes.append(box)
        if type(file_name) is not str:
            raise TypeError(f"a part of {name} is in no file")
        start, length = _counts([start, length])
        index = MetadataIndex(name, chunk.offsets)
        metadata.storage_data[index] = _StorageInfo(file_name, start, length)
        chunks.append(chunk)
    # torch would leave what no part fills as it is in the model.
    if math.prod(size) and not _tile(boxes, size):
        raise ValueError(f"the parts of {name} do not make it whole")
    properties = TensorProperties(dtype=dtype)
    metadata.state_dict_metadata[name] = TensorStorageMetadata(properties, size, chunks)


def _tile(boxes: list[list[Span]], size: Sequence[int]) -> bool:
    """Whether boxes, of one span a dimension, fill a tensor once, as the grid of a layout does."""
    if not size:
        return len(boxes) == 1
    end = 0
    for (start, stop), of_slab in groupby(sorted(boxes), lambda box: box[0]):
        if start != end or not _tile([box[1:] for box in of_slab], size[1:]):
            return False
        end = stop
    return end == size[0]


def _counts(values: Any) -> torch.Size:
    """Numbers of a list, none of them below zero. Raises TypeError, ValueError."""
    for value in values:
        if type(value) is not int or not 0 <= value <= MAX_COUNT:
            raise ValueError(f"{value!r} is no count")
    return torch.Size(values)


def load_part(data: bytes | memoryview, dtype: torch.dtype, sizes: Sequence[int]) -> Tensor:
    """A part of a tensor from the bytes that `torch.save` wrote of it. They are found in its archive, and
    nothing is unpickled.

    Raises ValueError, and what zipfile raises, for other bytes.
    """
    archive = zipfile.ZipFile(io.BytesIO(data))
    (entry,) = [one for one in archive.infolist() if one.filename.endswith("/data/0")]
    header = _LOCAL_HEADER.unpack_from(data, entry.header_offset)
    start = entry.header_offset + _LOCAL_HEADER.size + header[-2] + header[-1]
    num_bytes = math.prod(sizes) * dtype.itemsize
    is_plain = entry.compress_type == zipfile.ZIP_STORED and header[0] == _LOCAL_SIGNATURE
    if not is_plain or entry.file_size != num_bytes or start + num_bytes > len(data):
        raise ValueError(f"it has no {num_bytes} bytes of a tensor")
    if not num_bytes:
        return torch.empty(sizes, dtype=dtype)
    values = bytearray(memoryview(data)[start : start + num_bytes])
    return torch.frombuffer(values, dtype=dtype).view(sizes)


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
