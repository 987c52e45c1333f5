"""Which files a conversion reads: inputs as given, folders, globs, lists and URLs, and what format each is in."""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from streammega.config import StorageConfig
from streammega.errors import AccessDeniedError, ConvertError, EndpointError, ObjectNotFoundError, StreammegaError
from streammega.index.manifest import FORMAT as MANIFEST_FORMAT
from streammega.index.shards import SUFFIXES
from streammega.redaction import redact
from streammega.storage.urls import file_system, is_remote

Format = Literal["text", "jsonl", "parquet", "arrow", "tar", "megatron", "raw", "npy", "mds", "litdata"]
JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
COMPRESSIONS = (".gz", ".bz2", ".zst", ".xz")
PROBE = ".streammega-writable"
"""Of the object by which a conversion tries its rights: no input, where it could not be removed."""
BY_SUFFIX: dict[str, Format] = {
    ".parquet": "parquet", ".arrow": "arrow", ".feather": "arrow", ".ipc": "arrow", ".tar": "tar", ".tgz": "tar", ".bin": "raw",
    ".npy": "npy", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Input:
    """One input file (of mds and litdata, one folder). `etag`: changes when it does; `size` in bytes."""

    path: str
    format: Format
    size: int
    etag: str


def find_inputs(inputs: Sequence[str], storage: StorageConfig | None = None) -> list[Input]:
    """Input files in a fixed order: files as given, globs and folders expanded in name order, `@list` files line by line.

    Raises ObjectNotFoundError for an input that is not there, ConvertError for a folder without files.
    """
    found: list[Input] = []
    for item in _listed(inputs):
        own = _remote(item, storage or StorageConfig()) if is_remote(item) else _local(item)
        if not own:
            raise ConvertError(f"{item}: the folder holds no files")
        found += own
    return found


def _listed(inputs: Sequence[str]) -> Iterator[str]:
    for item in inputs:
        if not item.startswith("@"):
            yield item
            continue
        try:
            with open(item[1:], encoding="utf-8") as file:
                yield from (line.strip() for line in file if line.strip() and not line.startswith("#"))
        except (OSError, UnicodeDecodeError) as error:
            raise ObjectNotFoundError(f"{item[1:]}: no readable list of files ({error})") from None


def _local(item: str) -> list[Input]:
    def stat(path: str) -> tuple[int, str]:
        info = os.stat(path)
        return info.st_size, f"{info.st_size:x}-{info.st_mtime_ns:x}"

    def read(path: str) -> bytes:
        with open(path, "rb") as file:
            return file.read()

    if os.path.isdir(item):
        return _files(_walk(item), stat, read)
    if os.path.isfile(item):
        return _files([item], stat, read, named=True)
    if os.path.isfile(f"{item}.idx"):
        return _files([f"{item}.idx"], stat, read, named=True)
    if os.path.isfile(f"{item}.manifest.json"):
        return _files([f"{item}.manifest.json"], stat, read, named=True)
    if matches := sorted(path for path in glob.glob(item, recursive=True) if os.path.isfile(path)):
        return _files(matches, stat, read)
    raise ObjectNotFoundError(f"{item}: no such file, folder or match; check the path, and quote globs")


def _walk(folder: str) -> list[str]:
    found = []
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += [os.path.join(root, name) for name in sorted(names) if not name.startswith(".")]
    return found


def _remote(item: str, storage: StorageConfig) -> list[Input]:
    options = dict(storage.storage_options)
    try:
        system, path = file_system(item, storage)
        scheme = item.partition("://")[0]

        def stat(url: str) -> tuple[int, str]:
            info = system.info(url.partition("://")[2] if scheme not in ("http", "https") else url)
            return int(info["size"] or 0), str(info.get("ETag") or info.get("etag") or info.get("LastModified") or info["size"])

        def read(url: str) -> bytes:
            return bytes(system.cat_file(url.partition("://")[2] if scheme not in ("http", "https") else url))

        def full(name: str) -> str:
            return name if "://" in name else f"{scheme}://{name}"

        below_host = path.partition("://")[2].partition("/")[2] if "://" in path else path  # a password may hold any sign
        # What is there by the very name is no pattern, whatever signs are in it.
        for suffix in ("", ".idx", ".manifest.json"):
            if system.isfile(path + suffix):
                return _files([item + suffix], stat, read, named=True)
        if any(sign in below_host for sign in "*?[") and (matches := sorted(map(full, system.glob(path)))):
            return _files(matches, stat, read)
        found = sorted(full(name) for name in system.find(path) if not name.endswith(PROBE))
        if found:
            return _files(found, stat, read)
    except PermissionError as error:
        raise AccessDeniedError(redact(f"{item}: access denied ({error}); check the credentials", options)) from None
    except FileNotFoundError:
        pass
    except StreammegaError:
        raise
    except Exception as error:  # clients raise whatever they like
        raise EndpointError(redact(f"{item}: cannot be listed ({type(error).__name__}: {error})", options)) from None
    raise ObjectNotFoundError(f"{item}: no such object, folder or match; check the URL, and quote globs")


Stat = Callable[[str], tuple[int, str]]
Read = Callable[[str], bytes]


def _files(paths: Sequence[str], stat: Stat, read: Read, *, named: bool = False) -> list[Input]:
    """Inputs of some files; what belongs to another file of a format (its .bin, its index.json) is not one by itself."""
    there, inputs, taken = set(paths), [], set()
    for path in paths:
        folder, _, name = path.rpartition("/")
        if name == "index.json" and (kind := _index_kind(read(path))):
            inputs.append(Input(path=folder or ".", format=kind, size=stat(path)[0], etag=stat(path)[1]))
            taken.add(folder)
    for path in paths:
        folder, _, name = path.rpartition("/")
        if folder in taken or name.endswith(".idx.json"):
            continue
        kind = _format(path, there, stat, read, named=named)
        if kind is not None:
            size, etag = stat(path)
            if kind == "megatron" and path.endswith(".idx") and (data := _data_beside(path, stat)):
                size, etag = data[0], f"{etag}+{data[1]}"
            inputs.append(Input(path=path, format=kind, size=size, etag=etag))
    return inputs


def _format(path: str, there: set[str], stat: Stat, read: Read, *, named: bool) -> Format | None:
    """None: a part of another input."""
    if path.endswith(".idx"):
        return "megatron"
    for suffix in SUFFIXES.values():
        if path.endswith(suffix):
            index = f"{path.removesuffix(suffix)}.idx"
            if index in there:
                return None
            if _is_there(index, stat):
                return "megatron"  # its documents and modes are in the .idx
    if path.endswith(".manifest.json") and _is_manifest(read(path)):
        return "megatron" if named else None  # in a folder, its shards are there too
    bare = bare_name(path)
    return BY_SUFFIX.get(os.path.splitext(bare)[1].lower(), "text")


def _is_there(path: str, stat: Stat) -> bool:
    try:
        stat(path)
    except OSError:
        return False
    return True


def _data_beside(path: str, stat: Stat) -> tuple[int, str] | None:
    for suffix in SUFFIXES.values():
        try:
            return stat(path.removesuffix(".idx") + suffix)
        except OSError:
            continue
    raise ObjectNotFoundError(f"{path}: has no .bin, .bin.zst or .tar beside it; copy both, or leave it out")


def _index_kind(data: bytes) -> Format | None:
    try:
        found: Any = json.loads(data)
    except ValueError:
        return None
    if isinstance(found, dict) and isinstance(found.get("shards"), list) and found.get("format") != MANIFEST_FORMAT:
        return "mds"
    return "litdata" if isinstance(found, dict) and isinstance(found.get("chunks"), list) and "config" in found else None


def _is_manifest(data: bytes) -> bool:
    return MANIFEST_FORMAT.encode() in data[:200]


def bare_name(path: str) -> str:
    """A path without the suffix of its compression."""
    for suffix in COMPRESSIONS:
        path = path.removesuffix(suffix)
    return path
