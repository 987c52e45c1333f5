"""Shards of other loaders: MDS (mosaicml-streaming) and litdata, read by their published layouts.

Pickles are refused.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from streammega.config import StorageConfig
from streammega.convert.documents import RawDocument, one_each
from streammega.convert.options import ConvertOptions
from streammega.convert.read.keys import MISSING, value_at
from streammega.convert.read.slices import Item, Skipped, Slice
from streammega.convert.read.zstd import ZstdReader
from streammega.errors import ConvertError
from streammega.storage.open import open_file

# litdata numbers dtypes by their place in these lists.
LITDATA_TORCH = (
    *(
        "float32",
        "float32",
        "float64",
        "float64",
        "complex64",
        "complex64",
        "complex128",
        "complex128",
        "float16",
        "float16",
    ),
    *(
        "bfloat16",
        "uint8",
        "int8",
        "int16",
        "int16",
        "int32",
        "int32",
        "int64",
        "int64",
        "bool",
        "uint16",
    ),
)
LITDATA_NUMPY = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]


def read_mds(
    piece: Slice, options: ConvertOptions, storage: StorageConfig, skipped: Skipped
) -> Iterator[Item]:
    """Samples of a folder of MDS shards."""
    yield from _items(mds_items(piece.input.path, storage), options, piece.input.path)


def read_litdata(
    piece: Slice, options: ConvertOptions, storage: StorageConfig, skipped: Skipped
) -> Iterator[Item]:
    """Items of a folder of litdata chunks."""
    yield from _items(litdata_items(piece.input.path, storage), options, piece.input.path)


def _items(items: Iterator[tuple[str, Any]], options: ConvertOptions, path: str) -> Iterator[Item]:
    """Records, texts, or token arrays of other loaders' shards; bytes are tokens of input_dtype."""
    for where, value in items:
        if isinstance(value, dict):
            wanted = [key for key, _ in options.key_modes]
            arrays = [
                name for name, field in value.items() if isinstance(field, (np.ndarray, bytes))
            ]
            if (
                not any(value_at(value, key) is not MISSING for key in wanted)
                and len(arrays) == 1
                and not options.chat
            ):
                value = value[arrays[0]]
            elif len(wanted) == 1 and isinstance(
                found := value_at(value, wanted[0]), (np.ndarray, bytes)
            ):
                value = found
        if isinstance(value, bytes):
            value = np.frombuffer(value, options.array_dtype)
        if isinstance(value, np.ndarray):
            yield one_each(value.reshape(-1), np.array([value.size], np.int32), value.nbytes, where)
        elif isinstance(value, str):
            yield RawDocument(data=value.encode(), path=where)
        else:
            size = (
                sum(len(field) for field in value.values() if isinstance(field, (str, bytes)))
                if isinstance(value, dict)
                else 0
            )
            yield RawDocument(data=b"", path=where, record=True, fields=value, size=size)


def _read(path: str, storage: StorageConfig) -> bytes:
    with open_file(path, storage) as file:
        return bytes(file.read())


def _unzstd(data: bytes) -> bytes:
    return io.BufferedReader(ZstdReader(io.BytesIO(data))).read()


def _offsets(data: bytes, path: str) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """Item bounds of a shard: a count, then count + 1 byte offsets, all uint32; checked against the
    shard's size.
    """
    count = int.from_bytes(data[:4], "little")
    if len(data) < 4 or 4 * (count + 2) > len(data):
        raise ConvertError(
            f"{path}: is cut short: its header speaks of {count} items; copy it again"
        )
    bounds = np.frombuffer(data, "<u4", count + 1, 4)
    if (np.diff(bounds.astype(np.int64)) < 0).any() or int(bounds[-1]) > len(data):
        raise ConvertError(
            f"{path}: is cut short or damaged: its items end at byte {bounds[-1]} of {len(data)}; copy it again"
        )
    return bounds


def mds_items(folder: str, storage: StorageConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, sample) of every sample of an MDS folder."""
    index: Any = json.loads(_read(f"{folder}/index.json", storage))
    for shard in index["shards"]:
        if shard.get("format") != "mds":
            raise ConvertError(
                f"{folder}: has shards of format {shard.get('format')!r}; MDS is read (jsonl shards: name the files)"
            )
        compression = (shard.get("compression") or "").partition(":")[0]
        name = (
            shard["zip_data"]["basename"]
            if shard.get("zip_data")
            else shard["raw_data"]["basename"]
        )
        path = f"{folder}/{_safe(name, folder)}"
        data = _decompress(_read(path, storage), compression, path)
        bounds = _offsets(data, path)
        columns = list(
            zip(
                shard["column_names"], shard["column_encodings"], shard["column_sizes"], strict=True
            )
        )
        decoders = [
            (column, _mds_decoder(encoding, folder), size) for column, encoding, size in columns
        ]
        for number in range(len(bounds) - 1):
            yield (
                f"{path}#{number}",
                _mds_sample(data[bounds[number] : bounds[number + 1]], decoders),
            )


def _mds_sample(
    data: bytes, columns: list[tuple[str, Callable[[bytes], Any] | None, int | None]]
) -> dict[str, Any]:
    """Sizes of the columns that have none of their own come first, then all columns end to end."""
    sizes = []
    at = 0
    for _, _, size in columns:
        if not size:
            size = int.from_bytes(data[at : at + 4], "little")
            at += 4
        sizes.append(size)
    sample = {}
    for (column, decode, _), size in zip(columns, sizes, strict=True):
        if decode is not None:
            sample[column] = decode(data[at : at + size])
        at += size
    return sample


def _mds_decoder(encoding: str, folder: str) -> Callable[[bytes], Any] | None:
    """How a column is decoded; None: columns that cannot be text or tokens are passed over."""
    kind, _, rest = encoding.partition(":")
    if kind == "str":
        return lambda data: data.decode()
    if kind == "bytes":
        return bytes
    if kind == "json":
        return json.loads
    if kind == "pkl":
        return None  # never unpickled
    if kind == "ndarray":
        dtype, _, shape = rest.partition(":")
        if not dtype:
            raise ConvertError(
                f"{folder}: a column of ndarrays without a dtype; write it as ndarray:uint16"
            )
        return lambda data: _mds_array(data, np.dtype(dtype).newbyteorder("<"), bool(shape))
    return None


def _mds_array(data: bytes, dtype: np.dtype[Any], fixed: bool) -> Any:
    """An array: unless its shape is fixed, a byte that says how many dimensions of which width, and
    the shape, come first.
    """
    if fixed:
        return np.frombuffer(data, dtype)
    dimensions = data[0] >> 2
    width = 1 << (data[0] & 3)
    return np.frombuffer(data, dtype, offset=1 + width * dimensions)


def _decompress(data: bytes, compression: str, path: str) -> bytes:
    import bz2
    import gzip

    if compression in ("", "none"):
        return data
    if compression == "zstd":
        return _unzstd(data)
    if compression == "gz":
        return gzip.decompress(data)
    if compression == "bz2":
        return bz2.decompress(data)
    raise ConvertError(
        f"{path}: is compressed by {compression}, which is not read; decompress the shards first"
    )


def litdata_items(folder: str, storage: StorageConfig) -> Iterator[tuple[str, Any]]:
    """(place, item) of every item of a litdata folder: an array, a text, or a dict of them."""
    index: Any = json.loads(_read(f"{folder}/index.json", storage))
    config = index["config"]
    if config.get("encryption"):
        raise ConvertError(f"{folder}: is encrypted; decrypt it with litdata first")
    compression = config.get("compression")
    level = config.get("compression_level")
    if compression and (not str(compression).startswith("zstd") or level not in (None, "chunk")):
        raise ConvertError(
            f"{folder}: is compressed by {compression}, by {level}; whole chunks of zstd are read"
        )
    formats: list[str] = config["data_format"]
    flat = config.get("item_loader") == "TokensLoader"
    names = _litdata_names(config.get("data_spec"))
    for chunk in index["chunks"]:
        path = f"{folder}/{_safe(chunk['filename'], folder)}"
        data = _read(path, storage)
        data = _unzstd(data) if compression else data
        bounds = _offsets(data, path)
        for number in range(len(bounds) - 1):
            item = data[bounds[number] : bounds[number + 1]]
            if flat:
                yield f"{path}#{number}", _litdata_value(item, formats[0], path)
                continue
            values = _litdata_leaves(item, formats, path)
            yield f"{path}#{number}", dict(zip(names, values, strict=True)) if names else values[0]


def _litdata_leaves(item: bytes, formats: list[str], path: str) -> list[Any]:
    sizes = np.frombuffer(item, "<u4", len(formats)).tolist()
    at = 4 * len(formats)
    values = []
    for size, kind in zip(sizes, formats, strict=True):
        values.append(_litdata_value(item[at : at + size], kind, path))
        at += size
    return values


def _litdata_value(data: bytes, kind: str, path: str) -> Any:
    name, _, number = kind.partition(":")
    if name in ("str", "text"):
        return data.decode()
    if name == "bytes":
        return data
    if name == "no_header_tensor":
        return np.frombuffer(data, np.dtype(LITDATA_TORCH[int(number)]).newbyteorder("<"))
    if name == "no_header_numpy" and int(number) < len(LITDATA_NUMPY):
        return np.frombuffer(data, np.dtype(LITDATA_NUMPY[int(number)]).newbyteorder("<"))
    if name in ("numpy", "tensor"):
        code, dims = np.frombuffer(data, "<u4", 2).tolist()
        dtypes = LITDATA_NUMPY if name == "numpy" else LITDATA_TORCH
        return np.frombuffer(data, np.dtype(dtypes[code]).newbyteorder("<"), offset=8 + 4 * dims)
    if name == "int":
        return int.from_bytes(data, "little", signed=True)
    return None  # neither text nor tokens; pickles among them


def _litdata_names(spec: str | None) -> list[str]:
    """The keys of a flat dict, from its pytree description; none for a single value."""
    found: Any = json.loads(spec) if spec else None
    tree = found[1] if isinstance(found, list) and len(found) == 2 else {}
    if not str(tree.get("type", "")).endswith("dict"):
        return []
    return [str(name) for name in json.loads(tree["context"])]


def _safe(name: str, folder: str) -> str:
    if name.startswith("/") or ".." in name.split("/"):
        raise ConvertError(
            f"{folder}: its index names {name!r}, which lies outside of the folder; who made it?"
        )
    return name
