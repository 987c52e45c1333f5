"""Whether a checkpoint is whole: checksums, and a list of its tensors that cannot run code.

`tensors.json` says where each part of a tensor is, with its checksum (xxh3_64). The record of the checkpoint
has the checksum of `tensors.json`, and one of itself. torch's own `.metadata`, a pickle, says to other
programs where the tensors are, and is never read.
"""

from __future__ import annotations

import io
import json
import math
import struct
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from streammega.config.validate import parse_json
from streammega.errors import StateError

CHECKSUM = "checksum"
"""The name of a record's own checksum in it."""
TENSORS_VERSION = 2
MAX_COUNT = 1 << 50
"""Elements of a tensor along a dimension, and bytes of a file: far more than there are."""
_LOCAL_HEADER = struct.Struct("<4s22xHH")
"""What is before the bytes of a .zip's entry: a signature, and the sizes of its name and its extras."""
_LOCAL_SIGNATURE = b"PK\3\4"


class DamagedError(StateError):
    """A checkpoint that cannot be read: files are missing, cut short or damaged."""


class StoredPart(NamedTuple):
    """Where a part of a tensor is: bytes [start, stop) of a file of the checkpoint."""

    file: str
    start: int
    stop: int
    checksum: str


def checksum_of(data: bytes | memoryview) -> str:
    """The checksum of a part of a tensor, or of a small file."""
    return xxhash.xxh3_64_hexdigest(data)


def sign(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record with a checksum of itself."""
    return {**record, CHECKSUM: _checksum_of_record(record)}


def is_signed(record: Mapping[str, Any]) -> bool:
    """Whether a record that was read has its own checksum."""
    return record.get(CHECKSUM) == _checksum_of_record(record)


def check_version(stored: Any, version: int, where: str) -> None:
    """Raise StateError for another version of a file that is whole: of another release it is no damaged one,
    which would be skipped and removed. Raises DamagedError for what is no version.
    """
    if type(stored) is not int:
        raise DamagedError(f"{where}: has no version")
    if stored != version:
        raise StateError(
            f"{where}: has version {stored}, and this release reads {version}: go on with the release that "
            f"wrote it, or start in another train.out_dir"
        )


def _checksum_of_record(record: Mapping[str, Any]) -> str:
    """The checksum of the values of a record, whatever the spaces and the order of names in a file."""
    checked = {name: value for name, value in record.items() if name != CHECKSUM}
    # Through JSON first: keys that are numbers become text, as in the file, before they are sorted.
    as_read = json.loads(json.dumps(checked))  # noqa: TID251
    return checksum_of(json.dumps(as_read, sort_keys=True).encode())


def list_tensors(metadata: Metadata) -> bytes:
    """What a checkpoint holds, as JSON: of each tensor its dtype, its size, and its parts, each with its
    place in the tensor, its size, and its `StoredPart`.

    metadata: whose `storage_data` has the StoredPart of each index.
    """
    tensors: dict[str, dict[str, Any]] = {}
    for name, stored in metadata.state_dict_metadata.items():
        assert isinstance(stored, TensorStorageMetadata), name
        parts = []
        for chunk in stored.chunks:
            part = metadata.storage_data[MetadataIndex(name, chunk.offsets)]
            parts.append([list(chunk.offsets), list(chunk.sizes), *part])
        dtype = str(stored.properties.dtype).removeprefix("torch.")
        tensors[name] = {"dtype": dtype, "size": list(stored.size), "parts": parts}
    return json.dumps({"version": TENSORS_VERSION, "tensors": tensors}).encode()


def parse_tensors(data: bytes, url: str) -> Metadata:
    """The metadata that `list_tensors` was given. Raises DamagedError, StateError for one of another
    release.
    """
    try:
        stored = parse_json(data)
        check_version(stored["version"], TENSORS_VERSION, url)
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
    for offsets, sizes, file, start, stop, checksum in tensor["parts"]:
        chunk = ChunkStorageMetadata(_counts(offsets), _counts(sizes))
        for offset, length, limit in zip(chunk.offsets, chunk.sizes, size, strict=True):
            if offset + length > limit:
                raise ValueError(f"a part of {name} is outside of it")
        if type(file) is not str:
            raise TypeError(f"a part of {name} is in no file")
        start, stop = _counts([start, stop])
        part = StoredPart(file, start, stop, checksum)
        metadata.storage_data[MetadataIndex(name, chunk.offsets)] = part
        chunks.append(chunk)
    # torch would leave what no part fills as it is in the model.
    if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(size):
        raise ValueError(f"the parts of {name} do not make it whole")
    properties = TensorProperties(dtype=dtype)
    metadata.state_dict_metadata[name] = TensorStorageMetadata(properties, size, chunks)


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
