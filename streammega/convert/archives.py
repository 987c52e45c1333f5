"""WebDataset tars: .txt, .json, .jsonl and .npy members, themselves compressed or not. Nothing is extracted to disk."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import tarfile
from collections.abc import Iterator
from typing import Any

import numpy as np

from streammega.config import StorageConfig
from streammega.convert.arrays import load_npy
from streammega.convert.documents import RawDocument, one_each
from streammega.convert.inputs import JSON_SUFFIXES, bare_name
from streammega.convert.options import ConvertOptions
from streammega.convert.slices import Item, Skipped, Slice, fault, open_stream
from streammega.convert.zstd import ZstdReader
from streammega.errors import ConvertError


class _Tail:
    """A file of which the last bytes that were read are known."""

    def __init__(self, file: Any) -> None:
        self._file, self.last = file, b""

    def read(self, size: int) -> bytes:
        """Read on."""
        data = bytes(self._file.read(size))
        self.last = (self.last + data)[-tarfile.BLOCKSIZE :]
        return data


def read_tar(piece: Slice, options: ConvertOptions, storage: StorageConfig, skipped: Skipped) -> Iterator[Item]:
    """Documents of all members, in their order. Raises ConvertError for an archive without an end."""
    path = piece.input.path
    with open_stream(path, storage) as opened:
        file = _Tail(opened)
        with tarfile.open(fileobj=file, mode="r|") as archive:  # type: ignore[call-overload]
            for member in archive:
                where = f"{path}!{member.name}"
                if member.name.startswith("/") or ".." in member.name.split("/"):
                    fault(options, skipped, "hostile path", f"{where}: a member outside of its archive; who made this tar?")
                elif member.isfile():
                    payload = archive.extractfile(member)
                    data = payload.read() if payload is not None else b""
                    yield from _member(bare_name(member.name), _decompressed(member.name, data), where)
        if file.last.strip(b"\0"):
            raise ConvertError(f"{path}: the archive has no end; it is cut short: copy it again")


def _member(name: str, data: bytes, where: str) -> Iterator[Item]:
    suffix = "." + name.rpartition(".")[2].lower() if "." in name else ""
    if suffix == ".txt":
        yield RawDocument(data=data, path=where)
    elif suffix == ".json":
        yield RawDocument(data=data, path=where, record=True)
    elif suffix in JSON_SUFFIXES:
        for line, record in enumerate(io.BytesIO(data), 1):
            if record.strip():
                yield RawDocument(data=record, path=where, line=line, record=True)
    elif suffix == ".npy":
        array = load_npy(io.BytesIO(data), where)
        yield one_each(array, np.array([array.size], np.int32), len(data))


def _decompressed(name: str, data: bytes) -> bytes:
    if name.endswith(".zst"):
        return io.BufferedReader(ZstdReader(io.BytesIO(data))).read()
    if name.endswith(".gz"):
        return gzip.decompress(data)
    if name.endswith(".bz2"):
        return bz2.decompress(data)
    return lzma.decompress(data) if name.endswith(".xz") else data
