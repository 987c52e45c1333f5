"""Which files a conversion reads: inputs as given, folders, globs, lists and URLs, and what format
each is in.
"""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from streammega.config import StorageConfig
from streammega.convert.read.folders import FilePatterns, PassedOver
from streammega.convert.read.suffixes import Format, format_of, split_query, without_queries
from streammega.dataset.manifest import FORMAT as MANIFEST_FORMAT
from streammega.dataset.shards import SUFFIXES
from streammega.errors import (
    AccessDeniedError,
    ConvertError,
    EndpointError,
    ObjectNotFoundError,
    StreammegaError,
)
from streammega.errors.redaction import redact
from streammega.storage.open import file_system, is_remote

PROBE = ".streammega-writable"
"""Of the object by which a conversion tries its rights: no input, where it could not be removed."""
CLAIM = ".streammega-claim"
"""Of the object by which a conversion says in a bucket that it writes there; see `claims`."""
SIGNS = "*?["
"""What makes a pattern of a name, if nothing is called just that."""


@dataclass(frozen=True, kw_only=True)
class Input:
    """One input file (of mds and litdata, one folder). `etag`: changes when it does; `size` in
    bytes.

    path: for messages and records too; `query` of a URL, which may be a secret, is not in it.
    """

    path: str
    format: Format
    size: int
    etag: str
    query: str = field(default="", repr=False)

    @property
    def url(self) -> str:
        """Where it is read."""
        return self.path + self.query


def find_inputs(
    inputs: Sequence[str],
    storage: StorageConfig | None = None,
    choice: FilePatterns | None = None,
    passed: PassedOver | None = None,
) -> list[Input]:
    """Input files in a fixed order: files as given, globs and folders expanded in name order,
    `@list` files line by line.

    What is there by the very name is taken before that is read as a glob. choice: of the files in
    folders and of globs; what is left out there is counted in `passed`. Raises ObjectNotFoundError
    for an input that is not there, ConvertError for a folder without files.
    """
    choice = choice or FilePatterns()
    passed = passed if passed is not None else PassedOver()
    found: list[Input] = []
    for item in _listed(inputs):
        remote = is_remote(item)
        own = (
            _remote(item, storage or StorageConfig(), choice, passed)
            if remote
            else _local(item, choice, passed)
        )
        if not own:
            told = passed.as_text()
            raise ConvertError(
                f"{split_query(item)[0]}: the folder holds no files{f' but {told} ones' if told else ''}"
            )
        found += own
    return found


def _listed(inputs: Sequence[str]) -> Iterator[str]:
    for item in inputs:
        if not item.startswith("@") or os.path.exists(item):
            yield item
            continue
        try:
            with open(item[1:], encoding="utf-8") as file:
                yield from (
                    line.strip() for line in file if line.strip() and not line.startswith("#")
                )
        except (OSError, UnicodeDecodeError) as error:
            raise ObjectNotFoundError(f"{item[1:]}: no readable list of files ({error})") from None


def _local(item: str, choice: FilePatterns, passed: PassedOver) -> list[Input]:
    def stat(path: str) -> tuple[int, str]:
        info = os.stat(path)
        return info.st_size, f"{info.st_size:x}-{info.st_mtime_ns:x}"

    def read(path: str) -> bytes:
        with open(path, "rb") as file:
            return file.read()

    if os.path.isdir(item):
        return _files(choice.of_folder(_walk(item, passed), item, passed), stat, read)
    for suffix in ("", ".idx", ".manifest.json"):
        if os.path.isfile(item + suffix):
            return _files([item + suffix], stat, read, named=True)
    if os.path.exists(item):
        raise ConvertError(
            f"{item}: is no file (a pipe, or a device), which only `streammega convert` reads, and only once"
        )
    if matches := sorted(
        path for path in glob.glob(_pattern(item), recursive=True) if os.path.isfile(path)
    ):
        return _files(choice.of_matches(matches, passed), stat, read)
    raise ObjectNotFoundError(
        f"{item}: no such file, folder or match; check the path, and quote globs"
    )


def _pattern(item: str) -> str:
    """A glob in which the signs of folders that are there are letters."""
    folder = ""
    below = item
    while below and os.path.isdir(join := os.path.join(folder, below.partition("/")[0]) or "/"):
        folder = join
        below = below.partition("/")[2].lstrip("/")
    return os.path.join(glob.escape(folder), below)


def _walk(folder: str, passed: PassedOver) -> list[str]:
    """All files below a folder; folders that are hidden are not looked into, and count as one."""
    found = []
    for root, folders, names in os.walk(folder):
        passed.add("hidden", sum(name.startswith(".") for name in folders))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += [os.path.join(root, name) for name in sorted(names)]
    return found


def _remote(
    item: str, storage: StorageConfig, choice: FilePatterns, passed: PassedOver
) -> list[Input]:
    options = dict(storage.storage_options)
    shown, query = split_query(item)
    try:
        system, path = file_system(item, storage)
        scheme = item.partition("://")[0]
        web = scheme in ("http", "https")

        def stat(url: str) -> tuple[int, str]:
            info = system.info(f"{url}{query}" if web else url.partition("://")[2])
            return int(info["size"] or 0), str(
                info.get("ETag") or info.get("etag") or info.get("LastModified") or info["size"]
            )

        def read(url: str) -> bytes:
            return bytes(system.cat_file(f"{url}{query}" if web else url.partition("://")[2]))

        def full(name: str) -> str:
            return name if "://" in name else f"{scheme}://{name}"

        # What is there by the very name is no pattern, whatever signs are in it.
        for suffix in ("", ".idx", ".manifest.json") if not query else ("",):
            if system.isfile(path + suffix):
                return _files([shown + suffix], stat, read, named=True, query=query)
        # a password may hold any sign
        below_host = path.partition("://")[2].partition("/")[2] if "://" in path else path
        if any(sign in below_host for sign in SIGNS) and not query and not system.isdir(path):
            if matches := sorted(map(full, system.glob(path))):
                return _files(choice.of_matches(matches, passed), stat, read)
        elif found := sorted(
            full(name) for name in system.find(path) if not name.endswith((PROBE, CLAIM))
        ):
            return _files(choice.of_folder(found, full(path), passed), stat, read)
    except PermissionError as error:
        message = without_queries(f"{item}: access denied ({error}); check the credentials")
        raise AccessDeniedError(redact(message, options)) from None
    except FileNotFoundError:
        pass
    except StreammegaError:
        raise
    except Exception as error:  # clients raise whatever they like
        message = without_queries(f"{item}: cannot be listed ({type(error).__name__}: {error})")
        raise EndpointError(redact(message, options)) from None
    mend = "has its signature expired?" if query else "check the URL, and quote globs"
    raise ObjectNotFoundError(f"{shown}: no such object, folder or match; {mend}")


Stat = Callable[[str], tuple[int, str]]
Read = Callable[[str], bytes]


def _files(
    paths: Sequence[str], stat: Stat, read: Read, *, named: bool = False, query: str = ""
) -> list[Input]:
    """Inputs of some files; what belongs to another file of a format (its .bin, its index.json) is
    not one by itself.
    """
    there = set(paths)
    inputs = []
    taken = set()
    for path in paths:
        folder, _, name = path.rpartition("/")
        if name == "index.json" and (kind := _index_kind(read(path))):
            inputs.append(
                Input(path=folder or ".", format=kind, size=stat(path)[0], etag=stat(path)[1])
            )
            taken.add(folder)
    for path in paths:
        folder, _, name = path.rpartition("/")
        if folder in taken or name.endswith(".idx.json"):
            continue
        kind = _format(path, there, stat, read, named=named)
        if kind is not None:
            size, etag = stat(path)
            if kind == "megatron" and path.endswith(".idx") and (data := _data_beside(path, stat)):
                size = data[0]
                etag = f"{etag}+{data[1]}"
            inputs.append(Input(path=path, format=kind, size=size, etag=etag, query=query))
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
    return format_of(path)


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
    raise ObjectNotFoundError(
        f"{path}: has no .bin, .bin.zst or .tar beside it; copy both, or leave it out"
    )


def _index_kind(data: bytes) -> Format | None:
    try:
        found: Any = json.loads(data)
    except ValueError:
        return None
    if (
        isinstance(found, dict)
        and isinstance(found.get("shards"), list)
        and found.get("format") != MANIFEST_FORMAT
    ):
        return "mds"
    return (
        "litdata"
        if isinstance(found, dict) and isinstance(found.get("chunks"), list) and "config" in found
        else None
    )


def _is_manifest(data: bytes) -> bool:
    return MANIFEST_FORMAT.encode() in data[:200]
