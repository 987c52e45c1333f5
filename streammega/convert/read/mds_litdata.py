"""Shards of other loaders: MDS (mosaicml-streaming) and litdata, read by their published layouts.

Pickles are refused.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from streammega.config import StorageConfig
from streammega.convert.documents import RawDocument, one_each
from streammega.convert.options import ConvertOptions
from streammega.convert.read.fields import MISSING, first_value
from streammega.convert.read.open import Item, Skipped, Slice, decompressed, escapes_folder
from streammega.errors import ConvertError
from streammega.storage.open import open_file

# litdata numbers dtypes by their place in these lists.
LITDATA_TORCH = (
    *("float32", "float32", "float64", "float64", "complex64", "complex64"),
    *("complex128", "complex128", "float16", "float16", "bfloat16", "uint8", "int8"),
    *("int16", "int16", "int32", "int32", "int64", "int64", "bool", "uint16"),
)
LITDATA_NUMPY = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
SUFFIX_OF_MDS = {"zstd": ".zst", "gz": ".gz", "bz2": ".bz2"}
"""How MDS calls compressions, and the suffixes of such files."""
WORD_BYTES = 4
"""Of a count, a size or an offset in the shards of both: uint32, little-endian."""


def read_mds(
    piece: Slice, options: ConvertOptions, storage: StorageConfig, skipped: Skipped
) -> Iterator[Item]:
    """Samples of a folder of MDS shards."""
    yield from _items(
        mds_items(piece.input.path, storage, skipped.note_read), options, piece.input.path
    )


def read_litdata(
    piece: Slice, options: ConvertOptions, storage: StorageConfig, skipped: Skipped
) -> Iterator[Item]:
    """Items of a folder of litdata chunks."""
    yield from _items(
        litdata_items(piece.input.path, storage, skipped.note_read), options, piece.input.path
    )


def _items(items: Iterator[tuple[str, Any]], options: ConvertOptions, path: str) -> Iterator[Item]:
    """Records, texts, or token arrays of other loaders' shards; bytes are tokens of input_dtype."""
    for where, item in items:
        value = item
        if isinstance(value, dict):
            value = _tokens_of(value, options)
        if isinstance(value, bytes):
            value = np.frombuffer(value, options.array_dtype)
        if isinstance(value, np.ndarray):
            lengths = np.array([value.size], np.int32)
            yield one_each(value.reshape(-1), lengths, value.nbytes, where)
        elif isinstance(value, str):
            yield RawDocument(data=value.encode(), path=where)
        else:
            size = _text_bytes(value)
            yield RawDocument(data=b"", path=where, record=True, fields=value, size=size)


def _tokens_of(sample: dict[str, Any], options: ConvertOptions) -> Any:
    """The array of tokens that stands for a sample; the sample itself where there is none, or more
    than one of which none was named.
    """
    wanted = [key for key, _ in options.key_modes]
    there = [first_value(sample, key) for key in wanted]
    if all(value is MISSING for value in there) and not options.chat:
        arrays = [value for value in sample.values() if isinstance(value, (np.ndarray, bytes))]
        if len(arrays) == 1:
            return arrays[0]
    if len(there) == 1 and isinstance(there[0], (np.ndarray, bytes)):
        return there[0]
    return sample


def _text_bytes(record: Any) -> int:
    """About what a record weighs: its own texts, not those of dicts within it."""
    if not isinstance(record, dict):
        return 0
    texts = [value for value in record.values() if isinstance(value, (str, bytes))]
    return sum(len(text) for text in texts)


def _read(path: str, storage: StorageConfig, note: Callable[[int], None] | None) -> bytes:
    with open_file(path, storage, note=note) as file:
        return bytes(file.read())


def _cut(data: bytes, path: str) -> Iterator[bytes]:
    """The items of a shard: a count, then count + 1 byte offsets, all uint32, and the items.

    Raises ConvertError, before the first item, unless the offsets lie within the shard.
    """
    count = int.from_bytes(data[:WORD_BYTES], "little")
    header_bytes = WORD_BYTES * (1 + count + 1)
    if len(data) < header_bytes:
        raise ConvertError(
            f"{path}: is cut short: its header speaks of {count} items; copy it again"
        )
    # wider than stored: differences of unsigned numbers would never be negative
    bounds = np.frombuffer(data, "<u4", count + 1, WORD_BYTES).astype(np.int64)
    if (np.diff(bounds) < 0).any() or bounds[-1] > len(data):
        raise ConvertError(
            f"{path}: is cut short or damaged: its items end at byte {bounds[-1]} of {len(data)}; "
            f"copy it again"
        )
    start = int(bounds[0])
    for stop in bounds[1:].tolist():
        yield data[start:stop]
        start = stop


def mds_items(
    folder: str, storage: StorageConfig, note: Callable[[int], None] | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, sample) of every sample of an MDS folder."""
    index: Any = json.loads(_read(f"{folder}/index.json", storage, note))
    for shard in index["shards"]:
        if shard.get("format") != "mds":
            raise ConvertError(
                f"{folder}: has shards of format {shard.get('format')!r}; MDS is read (jsonl "
                f"shards: name the files)"
            )
        compression, _, _level = (shard.get("compression") or "").partition(":")
        stored = shard.get("zip_data") or shard["raw_data"]
        path = f"{folder}/{_safe(stored['basename'], folder)}"
        data = _decompress(_read(path, storage, note), compression, path)
        columns = _mds_columns(shard, folder)
        for number, sample in enumerate(_cut(data, path)):
            yield f"{path}#{number}", _mds_sample(sample, columns)


@dataclass(frozen=True)
class _MdsColumn:
    """A column of MDS samples. decode: None for what is passed over; size: in bytes, of those that
    are all of one size.
    """

    name: str
    decode: Callable[[bytes], Any] | None
    size: int | None


def _mds_columns(shard: dict[str, Any], folder: str) -> list[_MdsColumn]:
    columns = []
    for name, encoding, size in zip(
        shard["column_names"], shard["column_encodings"], shard["column_sizes"], strict=True
    ):
        columns.append(_MdsColumn(name, _mds_decoder(encoding, folder), size))
    return columns


def _mds_sample(data: bytes, columns: list[_MdsColumn]) -> dict[str, Any]:
    """Sizes of the columns that have none of their own come first, then all columns end to end."""
    sizes = []
    place = 0
    for column in columns:
        size = column.size
        if not size:
            size = int.from_bytes(data[place : place + WORD_BYTES], "little")
            place += WORD_BYTES
        sizes.append(size)
    sample = {}
    for column, size in zip(columns, sizes, strict=True):
        if column.decode is not None:
            sample[column.name] = column.decode(data[place : place + size])
        place += size
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
    if compression in ("", "none"):
        return data
    suffix = SUFFIX_OF_MDS.get(compression)
    if suffix is None:
        raise ConvertError(
            f"{path}: is compressed by {compression!r}, which is not read; decompress the shards "
            f"first"
        )
    return b"".join(decompressed(io.BytesIO(data), suffix))


def litdata_items(
    folder: str, storage: StorageConfig, note: Callable[[int], None] | None = None
) -> Iterator[tuple[str, Any]]:
    """(place, item) of every item of a litdata folder: an array, a text, or a dict of them."""
    index: Any = json.loads(_read(f"{folder}/index.json", storage, note))
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
        data = _read(path, storage, note)
        if compression:
            data = b"".join(decompressed(io.BytesIO(data), ".zst"))
        for number, item in enumerate(_cut(data, path)):
            where = f"{path}#{number}"
            if flat:
                yield where, _litdata_value(item, formats[0])
                continue
            values = _litdata_leaves(item, formats)
            yield where, dict(zip(names, values, strict=True)) if names else values[0]


def _litdata_leaves(item: bytes, formats: list[str]) -> list[Any]:
    """Sizes of all values come first, then the values end to end."""
    sizes = np.frombuffer(item, "<u4", len(formats)).tolist()
    place = WORD_BYTES * len(formats)
    values = []
    for size, data_format in zip(sizes, formats, strict=True):
        values.append(_litdata_value(item[place : place + size], data_format))
        place += size
    return values


def _litdata_value(data: bytes, data_format: str) -> Any:
    name, _, number = data_format.partition(":")
    if name in ("str", "text"):
        return data.decode()
    if name == "bytes":
        return data
    if name == "no_header_tensor":
        return np.frombuffer(data, np.dtype(LITDATA_TORCH[int(number)]).newbyteorder("<"))
    if name == "no_header_numpy" and int(number) < len(LITDATA_NUMPY):
        return np.frombuffer(data, np.dtype(LITDATA_NUMPY[int(number)]).newbyteorder("<"))
    if name in ("numpy", "tensor"):
        # a number of a dtype, how many dimensions, and the size of each come first
        code, dimensions = np.frombuffer(data, "<u4", 2).tolist()
        dtypes = LITDATA_NUMPY if name == "numpy" else LITDATA_TORCH
        dtype = np.dtype(dtypes[code]).newbyteorder("<")
        return np.frombuffer(data, dtype, offset=WORD_BYTES * (2 + dimensions))
    if name == "int":
        return int.from_bytes(data, "little", signed=True)
    return None  # neither text nor tokens; pickles among them


def _litdata_names(spec: str | None) -> list[str]:
    """The keys of a flat dict, from its pytree description; none for a single value."""
    if not spec:
        return []
    described: Any = json.loads(spec)
    if not isinstance(described, list) or len(described) != 2:
        return []
    _protocol, tree = described  # as torch's treespec_dumps writes it
    if not str(tree.get("type", "")).endswith("dict"):
        return []
    return [str(name) for name in json.loads(tree["context"])]


def _safe(name: str, folder: str) -> str:
    if escapes_folder(name):
        raise ConvertError(
            f"{folder}: its index names {name!r}, which lies outside of the folder; who made it?"
        )
    return name
