"""Documents out of text files, folders and JSON lines (plain, .gz, .bz2, .zst)."""

from __future__ import annotations

import glob
import io
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import fsspec

from streammega.config import StorageConfig
from streammega.convert.zstd import ZstdReader
from streammega.errors import ConvertError, ObjectNotFoundError
from streammega.storage.options import redact
from streammega.storage.urls import is_remote

JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
COMPRESSIONS = (".gz", ".bz2", ".zst", ".xz")
BATCH_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class RawDocument:
    """A document before parsing: its bytes, and where they came from (line 0: the whole file)."""

    data: bytes
    path: str
    line: int


def find_inputs(inputs: Sequence[str]) -> list[str]:
    """Input files in a fixed order: files as given, globs and folders expanded in name order.

    Raises ObjectNotFoundError for an input that is not there, ConvertError for a folder without text.
    """
    found: list[str] = []
    for item in inputs:
        if is_remote(item):
            found.append(item)
        elif os.path.isdir(item):
            found += _files_under(item)
        elif os.path.isfile(item):
            found.append(item)
        elif matches := sorted(path for path in glob.glob(item, recursive=True) if os.path.isfile(path)):
            found += matches
        else:
            raise ObjectNotFoundError(f"{item}: no such file, folder or match; check the path, and quote globs")
    return found


def _files_under(folder: str) -> list[str]:
    found = []
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += [os.path.join(root, name) for name in sorted(names) if not name.startswith(".")]
    if not found:
        raise ConvertError(f"{folder}: the folder holds no files")
    return found


def read_batches(paths: Iterable[str], storage: StorageConfig) -> Iterator[list[RawDocument]]:
    """Raw documents of all files, in order, in lists of about a mebibyte."""
    batch: list[RawDocument] = []
    size = 0
    for path in paths:
        for document in _read_file(path, storage):
            batch.append(document)
            size += len(document.data)
            if size >= BATCH_BYTES:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _read_file(path: str, storage: StorageConfig) -> Iterator[RawDocument]:
    options: dict[str, Any] = dict(storage.storage_options) if is_remote(path) else {}
    try:
        with _open(path, options) as file:
            if _bare_name(path).endswith(JSON_SUFFIXES):
                for line, data in enumerate(file, 1):
                    if data.strip():
                        yield RawDocument(data=data, path=path, line=line)
            elif data := file.read():
                yield RawDocument(data=data, path=path, line=0)
    except (OSError, EOFError, ValueError) as error:
        if isinstance(error, FileNotFoundError):
            raise ObjectNotFoundError(f"{path}: no such file or object; check the path") from None
        reason = redact(f"{type(error).__name__}: {error}", options)
        raise ConvertError(f"{path}: cannot be read ({reason}); is the file whole, and its suffix true?") from None


@contextmanager
def _open(path: str, options: dict[str, Any]) -> Iterator[Any]:
    """The decompressed bytes of a file, by its suffix."""
    zstd = path.endswith(".zst")
    with fsspec.open(path, "rb", compression=None if zstd else "infer", **options) as file:
        yield io.BufferedReader(ZstdReader(file), BATCH_BYTES) if zstd else file


def _bare_name(path: str) -> str:
    for suffix in COMPRESSIONS:
        path = path.removesuffix(suffix)
    return path


def text_of(document: RawDocument, key: str) -> str:
    """The text of a raw document. Raises ConvertError that names file and line."""
    where = f"{document.path}:{document.line}" if document.line else document.path
    try:
        if not document.line:
            return document.data.decode("utf-8")
        record = json.loads(document.data)
    except UnicodeDecodeError as error:
        raise ConvertError(f"{where}: is not UTF-8 text (byte {error.start}); convert it with iconv, or leave it out") from None
    except ValueError as error:
        raise ConvertError(f"{where}: broken JSON ({error}); mend the line, or leave it out") from None
    if not isinstance(record, dict) or key not in record:
        has = ", ".join(sorted(record)) if isinstance(record, dict) else type(record).__name__
        raise ConvertError(f"{where}: has no key {key!r} (it has: {has}); name the text's key with --key")
    if not isinstance(record[key], str):
        raise ConvertError(f"{where}: key {key!r} holds {type(record[key]).__name__}, not text; name the text's key with --key")
    return str(record[key])
