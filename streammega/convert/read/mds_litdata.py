"""Shards of other loaders: MDS (mosaicml-streaming) and litdata, read by their published layouts.

Pickles are refused.
"""

from __future__ import annotations

import io
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from streammega.config import StorageConfig
from streammega.config.validate import parse_json
from streammega.convert.documents import RawDocument, Tokens, one_per_document
from streammega.convert.options import ConvertOptions
from streammega.convert.read.arrays import RAW_DTYPE
from streammega.convert.read.compression import PieceReader, decompress
from streammega.convert.read.fields import MISSING, first_value
from streammega.convert.read.source import Input, Slice, Source, unreadable
from streammega.convert.read.tables import arrow_rows
from streammega.dataset.conversations import not_utf8
from streammega.errors import ConvertError, StreammegaError
from streammega.errors.extras import import_extra
from streammega.storage.file_system import open_file
from streammega.storage.open import escapes_folder

# The numbers by which litdata knows dtypes of integers: no others are token ids.
LITDATA_DTYPES: dict[str, dict[int, str]] = {
    "tensor": {
        **{11: "uint8", 12: "int8", 13: "int16", 14: "int16", 15: "int32"},
        **{16: "int32", 17: "int64", 18: "int64", 20: "uint16"},
    },
    "numpy": dict(
        enumerate(("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"))
    ),
}
LITDATA_DECODERS: dict[str, Callable[[bytes], Any]] = {
    "str": bytes.decode,
    "text": bytes.decode,
    "bytes": bytes,
    "int": partial(int.from_bytes, byteorder="little", signed=True),
}
SUFFIX_OF_MDS = {"none": "", "zstd": ".zst", "gz": ".gz", "bz2": ".bz2"}
"""How MDS calls compressions, and the suffixes of such files."""
MDS_DECODERS: dict[str, Callable[[bytes], Any]] = {
    "str": bytes.decode,
    "bytes": bytes,
    "json": parse_json,
}
LITDATA_ARROW = b"LDARW01\0"
"""The end of a chunk that holds an Arrow file: that file, its bytes as a uint32, and this."""
WORD_BYTES = 4
"""Bytes of a count, a size or an offset in the shards of both: uint32, little-endian."""

MAX_SHARD_BYTES = 1 << 30
"""A compressed shard may become so large, or as large as a record may be if that is more."""


def read_mds(source: Source) -> Iterator[RawDocument | Tokens]:
    """Samples of a folder of MDS shards."""
    index: Any = parse_json(_read(source, "index.json")[1])
    for shard in index["shards"]:
        yield from _or_fault(_read_mds_shard(shard, source), shard.get("samples"), source)


def _read_mds_shard(shard: dict[str, Any], source: Source) -> Iterator[RawDocument | Tokens]:
    if shard.get("format") != "mds":
        raise ConvertError(
            f"{source.path}: has shards of format {shard.get('format')!r}; MDS is read (jsonl "
            f"shards: name the files)"
        )
    compression, _, _level = (shard.get("compression") or "none").partition(":")
    stored = shard.get("zip_data") or shard["raw_data"]
    path, data = _read(source, stored["basename"])
    if compression not in SUFFIX_OF_MDS:
        raise ConvertError(
            f"{path}: is compressed by {compression!r}, which is not read; decompress the shards "
            f"first"
        )
    data = _decompress(data, SUFFIX_OF_MDS[compression], path, source)
    names = shard["column_names"]
    decoders = [_mds_decoder(encoding, source.path) for encoding in shard["column_encodings"]]
    if len(set(names)) < len(names):
        raise ConvertError(f"{path}: has two columns of one name; write it again")
    decode = partial(_record, names=names, decoders=decoders, sizes=shard["column_sizes"])
    yield from _documents(data, path, shard.get("samples"), decode, source)


def read_litdata(source: Source) -> Iterator[RawDocument | Tokens]:
    """Items of a folder of litdata chunks: arrays, texts, or dicts of them."""
    folder = source.path
    index: Any = parse_json(_read(source, "index.json")[1])
    config = index["config"]
    if config.get("encryption"):
        raise ConvertError(f"{folder}: is encrypted; decrypt it with litdata first")
    compression = config.get("compression")
    level = config.get("compression_level")
    if compression and (not str(compression).startswith("zstd") or level not in (None, "chunk")):
        raise ConvertError(
            f"{folder}: is compressed by {compression}, by {level}; whole chunks of zstd are read"
        )
    decoders = [_litdata_decoder(data_format) for data_format in config["data_format"]]
    sizes = [None] * len(decoders)
    flat = config.get("item_loader") == "TokensLoader"
    names = _litdata_names(config.get("data_spec"))

    def value_of(item: bytes, where: str) -> Any:
        if flat:
            return decoders[0](item)
        record = _record(item, where, names or range(len(decoders)), decoders, sizes)
        return record if names else record[0]

    def read_chunk(chunk: dict[str, Any]) -> Iterator[RawDocument | Tokens]:
        """The documents of a chunk."""
        path, data = _read(source, chunk["filename"])
        data = _decompress(data, ".zst" if compression else "", path, source)
        if data.endswith(LITDATA_ARROW):
            yield from _rows_of_chunk(data, path, source)
        else:
            yield from _documents(data, path, chunk.get("chunk_size"), value_of, source)

    for chunk in index["chunks"]:
        yield from _or_fault(read_chunk(chunk), chunk.get("chunk_size"), source)


def _rows_of_chunk(data: bytes, path: str, source: Source) -> Iterator[RawDocument | Tokens]:
    """The rows of the Arrow file in a chunk, as litdata writes dicts that hold dicts or lists; the
    items before it are empty then, or the same again. Raises ConvertError.
    """
    import_extra("pyarrow", "convert", f"{path}: reading rows of litdata needs pyarrow")
    stop = len(data) - len(LITDATA_ARROW) - WORD_BYTES
    size = int.from_bytes(data[stop : stop + WORD_BYTES], "little")
    chunk = replace(source.piece.input, path=path)
    part = replace(source, piece=replace(source.piece, input=chunk))
    try:
        # its bytes are counted already
        yield from arrow_rows(io.BytesIO(data[max(0, stop - size) : stop]), part, lambda _: None)
    except StreammegaError:
        raise
    except Exception as error:  # of pyarrow, of codecs
        raise ConvertError(unreadable(path, error)) from None


def keep_folder(
    item: Input, _slice_bytes: int, _max_slice_bytes: int, _storage: StorageConfig
) -> Iterator[Slice]:
    """A folder as a whole: only the size of its index is known."""
    yield Slice(input=item)


def _or_fault(
    documents: Iterator[RawDocument | Tokens], expected: int | None, source: Source
) -> Iterator[RawDocument | Tokens]:
    """The documents of a shard. Damage to it is a fault of the shard, not of its folder.

    expected: how many there are by the index; those that were not read by then are lost.
    """
    num_read = 0
    try:
        for item in documents:
            num_read += len(item.documents) if isinstance(item, Tokens) else 1
            yield item
    except ConvertError as error:
        source.fault("unreadable record", str(error), max(1, (expected or 0) - num_read))


def _documents(
    data: bytes,
    path: str,
    expected: int | None,
    decode: Callable[[bytes, str], Any],
    source: Source,
) -> Iterator[RawDocument | Tokens]:
    """The documents of a shard: a count, then count + 1 byte offsets, all uint32, and the items.

    expected: how many there are by the index. decode: makes a value of an item, with its place for
    errors. An item that is damaged is a fault alone; items that are cut off are faults too. Raises
    ConvertError, before the first item, where the header is cut, or the index has another count.
    """
    count = int.from_bytes(data[:WORD_BYTES], "little")
    header_bytes = WORD_BYTES * (1 + count + 1)
    if len(data) < header_bytes:
        raise ConvertError(
            f"{path}: is cut short: its header speaks of {count} items; copy it again"
        )
    if expected is not None and count != expected:
        raise ConvertError(
            f"{path}: has {count} items, and {expected} by its index.json; copy both again"
        )
    bounds = np.frombuffer(data, "<u4", count + 1, WORD_BYTES).tolist()
    for number, (start, stop) in enumerate(pairwise(bounds)):
        where = f"{path}#{number}"
        if not start <= stop <= len(data):
            message = (
                f"{where}: is cut short or damaged: it should be bytes [{start}, {stop}) of "
                f"{len(data)}; copy the shard again"
            )
            source.fault("broken record", message, count - number)
            return
        try:
            document = _document(decode(data[start:stop], where), where, source.options)
        except ConvertError as error:
            source.fault("broken record", str(error))
        except UnicodeDecodeError as error:
            source.fault("broken record", str(not_utf8(where, error)))
        except Exception as error:  # of arrays, JSON and sizes that are not what they say
            source.fault("broken record", unreadable(where, error))
        else:
            yield document


def _document(item: Any, where: str, options: ConvertOptions) -> RawDocument | Tokens:
    """A record, a text, or an array of tokens; bytes are tokens of uint16. Raises ConvertError
    for None, which is neither.
    """
    if item is None:
        raise ConvertError(f"{where}: holds neither text nor tokens; leave its folder out")
    if isinstance(item, dict):
        item = _tokens_of(item, options)
    if isinstance(item, bytes):
        item = np.frombuffer(item, RAW_DTYPE)
    if isinstance(item, np.ndarray):
        return one_per_document(
            item.reshape(-1), np.array([item.size], np.int32), item.nbytes, where
        )
    if isinstance(item, str):
        return RawDocument(data=item.encode(), path=where)
    size = 0
    if isinstance(item, dict):  # about what it weighs: its own texts, not those of dicts within it
        size = sum(len(value) for value in item.values() if isinstance(value, (str, bytes)))
    return RawDocument(data=b"", path=where, is_record=True, fields=item, size=size)


def _tokens_of(sample: dict[str, Any], options: ConvertOptions) -> Any:
    """The array of tokens of a sample. The sample itself, if it has no such array, or several and
    no key names one.
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


def _read(source: Source, name: str) -> tuple[str, bytes]:
    """(path, bytes) of a file of the folder, which an index names."""
    if escapes_folder(name):
        raise ConvertError(
            f"{source.path}: its index names {name!r}, which is outside of the folder; who made it?"
        )
    path = f"{source.path}/{name}"
    # A file that was not there when the folder was searched has no version.
    etag = source.piece.input.versions.get(name, "")
    with open_file(path, source.storage, etag=etag, note=source.skipped.note_read) as file:
        return path, bytes(file.read())


def _decompress(data: bytes, suffix: str, path: str, source: Source) -> bytes:
    """A shard, up to where it is damaged, which is a fault. suffix: of its compression; "": none.

    Raises ConvertError for one that becomes larger than MAX_SHARD_BYTES and than a record may be.
    """
    if not suffix:
        return data
    max_bytes = max(source.options.max_record_bytes, MAX_SHARD_BYTES)
    file = PieceReader(decompress(io.BytesIO(data), suffix, path))
    unpacked = b""
    try:
        unpacked = file.read(max_bytes)
        is_too_large = bool(file.read(1))  # or the error, which comes after all that was read
    except (EOFError, OSError) as error:
        source.fault("unreadable file", unreadable(path, error))
        return unpacked
    if is_too_large:
        raise ConvertError(
            f"{path}: its {len(data):,} bytes become more than {max_bytes:,}; raise "
            f"max_record_bytes (--max-record-bytes) if there is memory"
        )
    return unpacked


def _record(
    item: bytes,
    where: str,
    names: Sequence[Any],
    decoders: Sequence[Callable[[bytes], Any] | None],
    sizes: Sequence[int | None],
) -> dict[Any, Any]:
    """The values of an item by their names, but for those without a decoder."""
    columns = zip(names, decoders, _values(item, sizes, where), strict=True)
    return {name: decode(value) for name, decode, value in columns if decode is not None}


def _values(item: bytes, fixed_sizes: Sequence[int | None], where: str) -> list[bytes]:
    """The values of an item, end to end; the sizes of those without a fixed one come first. Raises
    ConvertError where they are not the whole item.
    """
    num_sizes = sum(not size for size in fixed_sizes)
    stored = iter(struct.unpack_from(f"<{num_sizes}I", item))
    start = WORD_BYTES * num_sizes
    values = []
    for fixed_size in fixed_sizes:
        stop = start + (fixed_size or next(stored))
        values.append(item[start:stop])
        start = stop
    if start != len(item):
        raise ConvertError(
            f"{where}: has {len(item)} bytes, and {start} by the sizes of its values; copy it again"
        )
    return values


def _mds_decoder(encoding: str, folder: str) -> Callable[[bytes], Any] | None:
    """How a column is decoded; None: it cannot be text or tokens. Pickles are never decoded."""
    kind, _, rest = encoding.partition(":")
    if kind != "ndarray":
        return MDS_DECODERS.get(kind)
    dtype, _, shape = rest.partition(":")
    if not dtype:
        raise ConvertError(
            f"{folder}: a column of ndarrays without a dtype; write it as ndarray:uint16"
        )
    fixed = [int(size) for size in shape.split(",")] if shape else None
    return partial(_mds_array, dtype=np.dtype(dtype), shape=fixed)


def _mds_array(data: bytes, dtype: np.dtype[Any], shape: list[int] | None) -> Any:
    """An array. Unless its shape is fixed, it begins with the shape: a byte for the number and the
    width of its dimensions, then the dimensions.
    """
    start = 0
    if shape is None:
        dimensions = data[0] >> 2
        width = 1 << (data[0] & 3)
        shape = np.frombuffer(data, f"<u{width}", dimensions, 1).tolist()
        start = 1 + width * dimensions
    return _array(data, dtype, start, shape)


def _litdata_decoder(data_format: str) -> Callable[[bytes], Any]:
    """How a value is decoded: to a text, a number, bytes or an array of integers; to None, if it is
    anything else, a pickle too.
    """
    name, _, code = data_format.partition(":")
    kind = name.removeprefix("no_header_")
    if kind in LITDATA_DTYPES:
        return partial(_litdata_array, kind=kind, code=None if name == kind else code)
    return LITDATA_DECODERS.get(name, lambda _: None)


def _litdata_array(data: bytes, kind: str, code: str | None) -> Any:
    """An array, or None of another dtype. Unless the number of its dtype is fixed, that comes first,
    how many dimensions there are, and the size of each.
    """
    if code is not None:
        number, start, shape = int(code), 0, None
    else:
        number, dimensions = np.frombuffer(data, "<u4", 2).tolist()
        shape = np.frombuffer(data, "<u4", dimensions, 2 * WORD_BYTES).tolist()
        start = WORD_BYTES * (2 + dimensions)
    dtype = LITDATA_DTYPES[kind].get(number)
    return None if dtype is None else _array(data, np.dtype(dtype), start, shape)


def _array(data: bytes, dtype: np.dtype[Any], start: int, shape: Sequence[int] | None) -> Any:
    """Values up to the end. Raises ValueError where there are others than the shape says."""
    values = np.frombuffer(data, dtype.newbyteorder("<"), offset=start)
    if shape is not None and len(values) != math.prod(shape):
        raise ValueError(f"an array of shape {list(shape)} has {len(values)} values")
    return values


def _litdata_names(spec: str | None) -> list[str]:
    """The keys of a flat dict, from its pytree description; none for a single value."""
    described: Any = parse_json(spec) if spec else None
    if not isinstance(described, list) or len(described) != 2:
        return []
    _protocol, tree = described  # as torch's treespec_dumps writes it
    if not str(tree.get("type", "")).endswith("dict"):
        return []
    return [str(name) for name in parse_json(tree["context"])]
