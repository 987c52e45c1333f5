"""Which files a conversion reads: inputs as given, folders, globs, lists and URLs, and what format
each is in.
"""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from streammega.config import StorageConfig
from streammega.convert.read.folders import FilePatterns, PassedOver
from streammega.convert.read.suffixes import (
    FORMAT_READ_AS,
    Format,
    format_of,
    split_query,
    without_queries,
)
from streammega.dataset.manifest import FORMAT as MANIFEST_FORMAT
from streammega.dataset.shards import SUFFIXES
from streammega.errors import (
    ConfigError,
    ConvertError,
    EndpointError,
    ObjectNotFoundError,
)
from streammega.storage.backends.fsspec_store import driver_error
from streammega.storage.endpoints import endpoint_of
from streammega.storage.open import file_system, is_remote
from streammega.storage.retry import RetryPolicy
from streammega.storage.store_files import StoreFiles

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
    read_as: str | None = None,
) -> list[Input]:
    """Input files in a fixed order: files as given, globs and folders expanded in name order,
    `@list` files line by line.

    What is there by the very name is taken before that is read as a glob. choice: of the files in
    folders and of globs; what is left out there is counted in `passed`. read_as: how plain text and
    files of unknown suffix are read (`FORMAT_READ_AS`).

    Raises ObjectNotFoundError for an input that is not there, ConvertError for a folder without
    files, and for a file whose suffix names no format, ConfigError for a `read_as` without a file.
    """
    storage = storage or StorageConfig()
    choice = choice or FilePatterns()
    if passed is None:
        passed = PassedOver()
    found: list[Input] = []
    for item in _listed(inputs):
        files = _files_of(item, storage, choice, passed)
        if not files:
            shown, _query = split_query(item)
            told = passed.as_text()
            others = f" but {told} ones" if told else ""
            raise ConvertError(f"{shown}: the folder holds no files{others}")
        found += _of_known_format(files, item, passed) if read_as is None else files
    if read_as is None:
        return found
    return _read_as(found, read_as)


def _of_known_format(files: list[Input], item: str, passed: PassedOver) -> list[Input]:
    """The files whose suffix names a format.

    Of a folder, the others are counted. Raises ConvertError if there are none but others, or if a
    file was named.
    """
    known = [file for file in files if file.format != "unknown"]
    for file in files:
        is_in_folder = file.path.startswith(item.rstrip("/") + "/")
        if file.format == "unknown" and not (known and is_in_folder):
            raise ConvertError(
                f"{file.path!r}: its suffix names no format that is known; say how it is read: --as "
                f"text (the file is one text), lines (a text a line) or json (a JSON record a line), "
                f"or leave it out of a folder or glob by --exclude"
            )
    passed.add("of unknown suffix", len(files) - len(known))
    return known


def _read_as(files: list[Input], read_as: str) -> list[Input]:
    """The files, of which plain text and unknown ones have the format that was named."""
    file_format = FORMAT_READ_AS[read_as]
    changed = [
        replace(file, format=file_format) if file.format in ("text", "unknown") else file
        for file in files
    ]
    if changed and all(file.format not in ("text", "unknown") for file in files):
        raise ConfigError(
            f"read_as (--as) is {read_as!r}, but the suffixes of all inputs name another format "
            f"({files[0].path!r}); leave it out"
        )
    return changed


def _listed(inputs: Sequence[str]) -> Iterator[str]:
    for item in inputs:
        if not item.startswith("@") or os.path.exists(item):
            yield item
            continue
        try:
            with open(item[1:], encoding="utf-8") as file:
                for line in file:
                    if line.strip() and not line.startswith("#"):
                        yield line.strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ObjectNotFoundError(f"{item[1:]}: no readable list of files ({error})") from None


def _files_of(
    item: str, storage: StorageConfig, choice: FilePatterns, passed: PassedOver
) -> list[Input]:
    if is_remote(item):
        return _remote(item, storage, choice, passed)
    return _local(item, choice, passed)


def _local(item: str, choice: FilePatterns, passed: PassedOver) -> list[Input]:
    if os.path.isdir(item):
        below = _walk(item, passed)
        return _files(choice.of_folder(below, item, passed), _local_stat, _local_bytes)
    for suffix in ("", ".idx", ".manifest.json"):
        if os.path.isfile(item + suffix):
            return _files([item + suffix], _local_stat, _local_bytes, named=True)
    if os.path.exists(item):
        raise ConvertError(
            f"{item}: is no file (a pipe, or a device), which only `streammega convert` reads, and "
            f"only once"
        )
    there = glob.glob(_pattern(item), recursive=True)
    matches = sorted(path for path in there if os.path.isfile(path))
    if matches:
        return _files(choice.of_matches(matches, passed), _local_stat, _local_bytes)
    raise ObjectNotFoundError(
        f"{item}: no such file, folder or match; check the path, and quote globs"
    )


def _local_stat(path: str) -> tuple[int, str]:
    info = os.stat(path)
    return info.st_size, f"{info.st_size:x}-{info.st_mtime_ns:x}"


def _local_bytes(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _pattern(item: str) -> str:
    """A glob in which the signs of folders that are there are letters."""
    folder = ""
    below = item
    while below:
        name, _, rest = below.partition("/")
        deeper = os.path.join(folder, name) or "/"  # no name stands before the first slash
        if not os.path.isdir(deeper):
            break
        folder = deeper
        below = rest.lstrip("/")
    return os.path.join(glob.escape(folder), below)


def _walk(folder: str, passed: PassedOver) -> list[str]:
    """All files below a folder; folders that are hidden are not looked into, and count as one."""
    found = []
    for root, folders, names in os.walk(folder):
        shown = sorted(name for name in folders if not name.startswith("."))
        passed.add("hidden", len(folders) - len(shown))
        folders[:] = shown  # which os.walk looks into, in this order
        found += [os.path.join(root, name) for name in sorted(names)]
    return found


def _remote(
    item: str, storage: StorageConfig, choice: FilePatterns, passed: PassedOver
) -> list[Input]:
    shown, query = split_query(item)
    try:
        found = _Place.of(item, storage).inputs(choice, passed)
    except FileNotFoundError:
        found = None
    except Exception as error:  # clients raise whatever they like
        raise _failure(shown, error, storage) from None
    if found is not None:
        return found
    mend = "has its signature expired?" if query else "check the URL, and quote globs"
    raise ObjectNotFoundError(f"{shown}: no such object, folder or match; {mend}")


def _failure(shown: str, error: BaseException, storage: StorageConfig) -> BaseException:
    """Our error for one of a driver's, without the queries of URLs."""
    failure = driver_error(shown, error, storage.storage_options)
    failure.args = tuple(without_queries(str(words)) for words in failure.args)
    return failure


@dataclass(frozen=True, kw_only=True)
class _Place:
    """A URL that was given, in its file system. `path`: as that has it; `shown`: the URL without
    its query.
    """

    storage: StorageConfig
    system: Any
    path: str
    shown: str
    query: str

    @classmethod
    def of(cls, item: str, storage: StorageConfig) -> _Place:
        """Nothing is asked of the endpoint yet."""
        system, path = file_system(item, storage)
        shown, query = split_query(item)
        return cls(storage=storage, system=system, path=path, shown=shown, query=query)

    @property
    def scheme(self) -> str:
        """What stands before `://`."""
        return self.shown.partition("://")[0]

    def inputs(self, choice: FilePatterns, passed: PassedOver) -> list[Input] | None:
        """What is there by the very name, which is no pattern then, whatever signs are in it; else
        what matches it, or lies below it. None where nothing does, which is not the same as files
        of which none is chosen.
        """
        endings: tuple[str, ...] = ("", ".idx", ".manifest.json")
        if self.query:  # a signature is that of one object
            endings = ("",)
        for ending in endings:
            if self._is_file(self.path + ending):
                named = [self.shown + ending]
                return _files(named, self._stat, self._read, named=True, query=self.query)
        if self._is_pattern():
            matches = sorted(self._url(name) for name in self.system.glob(self.path))
            if not matches:
                return None
            return _files(choice.of_matches(matches, passed), self._stat, self._read)
        below = []
        for name in sorted(self._url(name) for name in self.system.find(self.path)):
            if not name.endswith((PROBE, CLAIM)):
                below.append(name)
        if not below:
            return None
        chosen = choice.of_folder(below, self._url(self.path), passed)
        return _files(chosen, self._stat, self._read)

    def _is_file(self, path: str) -> bool:
        """Whether there is a file of that name.

        Raises EndpointError where the endpoint cannot be asked: fsspec's own `isfile` says no then.
        """
        if isinstance(self.system, StoreFiles):
            return self.system.isfile(path)

        def look() -> bool:
            try:
                return bool(self.system.info(path)["type"] == "file")
            except Exception as error:
                failure = _failure(self.shown, error, self.storage)
                if isinstance(failure, EndpointError):
                    raise failure from None
                return False

        host = self.shown.split("/")[2]
        endpoint = endpoint_of(self.scheme, host, self.storage.storage_options)
        return RetryPolicy.of(self.storage, endpoint).call(look)

    def _is_pattern(self) -> bool:
        if self.query:
            return False
        # of a URL of the web the path is all of it, and a password may hold any sign
        within = self.path
        if "://" in within:
            _host, _, within = within.partition("://")[2].partition("/")
        has_signs = any(sign in within for sign in SIGNS)
        return has_signs and not self.system.isdir(self.path)

    def _url(self, name: str) -> str:
        """Of a file as the system names it."""
        return name if "://" in name else f"{self.scheme}://{name}"

    def _name(self, url: str) -> str:
        """As the system names it: the web's files by their URLs."""
        if self.scheme in ("http", "https"):
            return f"{url}{self.query}"
        return url.partition("://")[2]

    def _stat(self, url: str) -> tuple[int, str]:
        info = self.system.info(self._name(url))
        version = info.get("ETag") or info.get("etag") or info.get("LastModified") or info["size"]
        return int(info["size"] or 0), str(version)

    def _read(self, url: str) -> bytes:
        return bytes(self.system.cat_file(self._name(url)))


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
        if name != "index.json":
            continue
        folder_format = _index_format(read(path))
        if folder_format is not None:
            size, etag = stat(path)
            inputs.append(Input(path=folder or ".", format=folder_format, size=size, etag=etag))
            taken.add(folder)
    for path in paths:
        folder, _, name = path.rpartition("/")
        if folder in taken or name.endswith(".idx.json"):
            continue
        file_format = _format(path, there, stat, read, named=named)
        if file_format is None:
            continue
        size, etag = stat(path)
        if file_format == "megatron" and path.endswith(".idx"):
            # what is read are the tokens, and a change of either file makes another dataset
            size, etag_of_tokens = _data_beside(path, stat)
            etag = f"{etag}+{etag_of_tokens}"
        inputs.append(Input(path=path, format=file_format, size=size, etag=etag, query=query))
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


def _data_beside(path: str, stat: Stat) -> tuple[int, str]:
    for suffix in SUFFIXES.values():
        try:
            return stat(path.removesuffix(".idx") + suffix)
        except OSError:
            continue
    raise ObjectNotFoundError(
        f"{path}: has no .bin, .bin.zst or .tar beside it; copy both, or leave it out"
    )


def _index_format(data: bytes) -> Format | None:
    """Of a folder with such an index.json; None: it is the index of neither."""
    try:
        index: Any = json.loads(data)
    except ValueError:
        return None
    if not isinstance(index, dict):
        return None
    # our manifests list shards, too
    if isinstance(index.get("shards"), list) and index.get("format") != MANIFEST_FORMAT:
        return "mds"
    if isinstance(index.get("chunks"), list) and "config" in index:
        return "litdata"
    return None


def _is_manifest(data: bytes) -> bool:
    return MANIFEST_FORMAT.encode() in data[:200]
