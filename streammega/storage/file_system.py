"""Files of any URL, to find and to read: on the disks of this machine, in buckets by our stores (with
their credentials, retries and ETags), and anywhere else by fsspec's drivers.

A file that is another one than was found is an error in all of them.
"""

# ruff: noqa: D102  (methods that override others need no docstrings)
from __future__ import annotations

import io
import os
import stat
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import fsspec.core

from streammega.config import StorageConfig
from streammega.errors import (
    AccessDeniedError,
    EndpointError,
    ObjectChangedError,
    ObjectNotFoundError,
)
from streammega.errors.redaction import split_query, without_queries
from streammega.storage.backends.fsspec import check_version_mark, driver_error, driver_options
from streammega.storage.backends.local import etag_of
from streammega.storage.etags import SIZED, check_version, version_of_info
from streammega.storage.object_file import ObjectReader, open_object
from streammega.storage.object_ops import read_object
from streammega.storage.open import (
    OTHER_NAMES,
    SCHEMES,
    is_in_a_bucket,
    is_remote,
    local_path,
    open_store,
)
from streammega.storage.retry import RetryPolicy, endpoint_of
from streammega.storage.store import ObjectInfo

FILE = "file"
FOLDER = "folder"
SPECIAL = "pipes, sockets and devices"
UNLISTED = "folders that cannot be listed"
LOST = "names that lead to no file"
MARKERS = "objects that mark folders"
_UNCHAINED_SCHEMES = {*SCHEMES, *OTHER_NAMES, "memory", "abfs", "abfss", "hdfs"}
"""Schemes in whose keys `::` is letters, not one file system within another as fsspec has it."""
_HTTP = ("http", "https")
_ENCODED = (".gz", ".tgz", ".zst")
"""Suffixes of compressions that are also encodings of HTTP."""


class Entry(NamedTuple):
    """One name that was found. kind: FILE, FOLDER, or the reason why it is not read.

    size: bytes, or -1 where a listing does not say it. etag: its version, as `open_file` takes it.
    identity: the same for all names of one file. fault: the message, if this is an error.
    """

    path: str
    kind: str
    size: int = -1
    etag: str = ""
    identity: Any = None
    is_link: bool = False
    fault: str = ""


class Place(ABC):
    """Files of one kind, and a name among them. No request is sent before it is asked.

    root: the name, as paths of entries spell it. query: of a URL, which may be a secret and is in no
    path. chain: what a URL has behind `::`, the file system in which this one is; in no path either.
    """

    def __init__(self, root: str, query: str = "", chain: str = "") -> None:
        self.root = root
        self.query = query
        self.chain = chain

    @abstractmethod
    def file(self, path: str) -> Entry | None:
        """The file of this very name; None if there is none."""

    @abstractmethod
    def is_folder(self, path: str) -> bool:
        """Whether there is such a folder."""

    @abstractmethod
    def entries(self, folder: str, *, is_deep: bool) -> Iterator[Entry]:
        """What is directly in a folder; the folder itself where it cannot be listed. Of a bucket all
        files below it, by one listing, if `is_deep`.
        """

    @abstractmethod
    def read(self, path: str) -> bytes:
        """All bytes of a file."""

    @abstractmethod
    def open(self, path: str, etag: str) -> Any:
        """A file to read. Raises ObjectChangedError if it is not the version `etag`; "": any one."""

    @abstractmethod
    def check_read(self, path: str, etag: str) -> None:
        """Raise ObjectChangedError if what was read since `open` may be of another version."""

    def identity(self, folder: str) -> Any:
        """The same for all names of one folder."""
        return folder


class Disk(Place):
    """The file systems of this machine."""

    def file(self, path: str) -> Entry | None:
        try:
            entry = _entry_of(path, os.stat(path))
        except (OSError, ValueError):
            return None
        return entry if entry.kind == FILE else None

    def is_folder(self, path: str) -> bool:
        return os.path.isdir(path or ".")

    def identity(self, folder: str) -> Any:
        try:
            info = os.stat(folder or ".")
        except OSError:  # its listing says why
            return folder
        return info.st_dev, info.st_ino

    def entries(self, folder: str, *, is_deep: bool) -> Iterator[Entry]:
        remedy = "leave it out by --exclude, or count it by --on-error skip"
        try:
            with os.scandir(folder or ".") as listing:
                listed = sorted(listing, key=lambda entry: entry.name)
        except OSError as error:
            reason = f"this folder cannot be listed ({error.strerror}); make it readable"
            yield Entry(folder, UNLISTED, fault=f"{folder!r}: {reason}, {remedy}")
            return
        for entry in listed:
            path = os.path.join(folder, entry.name)
            is_link = entry.is_symlink()
            try:
                yield _entry_of(path, entry.stat(), is_link)
            except OSError as error:
                what = "this symbolic link leads to no file" if is_link else "it cannot be read"
                reason = f"{what} ({error.strerror}); mend or remove it"
                yield Entry(path, LOST, fault=f"{path!r}: {reason}, {remedy}")

    def read(self, path: str) -> bytes:
        with open(path, "rb") as file:
            return file.read()

    def open(self, path: str, etag: str) -> Any:
        self.check_read(path, etag)
        return open(path, "rb")

    def check_read(self, path: str, etag: str) -> None:
        if etag:
            check_version(path, etag, etag_of(os.stat(path)))


def _entry_of(path: str, info: os.stat_result, is_link: bool = False) -> Entry:
    kind = SPECIAL
    if stat.S_ISREG(info.st_mode):
        kind = FILE
    elif stat.S_ISDIR(info.st_mode):
        kind = FOLDER
    return Entry(path, kind, info.st_size, etag_of(info), (info.st_dev, info.st_ino), is_link)


class Bucket(Place):
    """The objects of a store of ours. Each read is compared by its ETag."""

    def __init__(self, url: str, config: StorageConfig) -> None:
        self._store, key = open_store(url, config)
        self._above = url.removesuffix(key)  # what keys of this store lack
        if not self._above.endswith("/"):
            self._above += "/"
        super().__init__((self._above + key).rstrip("/"))
        self._listed: dict[str, ObjectInfo] = {}
        self._listed_keys: list[str] = []
        self._listed_below: str | None = None
        """The prefix of the keys in `_listed_keys`, which are all that it has."""

    def file(self, path: str) -> Entry | None:
        key = self._key(path)
        info = self._listed.get(key)
        # listings of some stores have no ETags
        is_known = self._is_listed(key) if info is None else bool(info.etag)
        try:
            if key and not is_known:
                info = self._store.info(key)
        except (ObjectNotFoundError, AccessDeniedError):
            # some policies deny access to what does not exist
            return None
        return None if info is None else self._entry(info)

    def is_folder(self, path: str) -> bool:
        prefix = f"{self._key(path)}/"
        if not self._is_listed(prefix):
            return bool(self._store.list(prefix))
        first = bisect_left(self._listed_keys, prefix)
        return first < len(self._listed_keys) and self._listed_keys[first].startswith(prefix)

    def entries(self, folder: str, *, is_deep: bool) -> Iterator[Entry]:
        key = self._key(folder)
        prefix = f"{key}/" if key else ""
        infos = self._store.list(prefix, is_deep)
        listed = {info.key.lstrip("/"): info for info in infos}
        self._listed |= listed
        if is_deep:
            self._listed_below = prefix
            self._listed_keys = sorted(listed)
        for info in infos:
            if info.key != prefix:
                yield self._entry(info)

    def read(self, path: str) -> bytes:
        return read_object(self._store, self._key(path))[0]

    def open(self, path: str, etag: str) -> Any:
        info = self._store.info(self._key(path))
        actual = f"{SIZED}{info.size}" if etag.startswith(SIZED) else info.etag
        check_version(self._store.url(info.key), etag, actual)
        return open_object(self._store, info)

    def check_read(self, path: str, etag: str) -> None:
        if etag.startswith(SIZED):
            self.open(path, etag).close()

    def _is_listed(self, key: str) -> bool:
        """Whether the latest listing of all objects below a folder tells what is there."""
        return self._listed_below is not None and key.startswith(self._listed_below)

    def _key(self, path: str) -> str:
        return path[len(self._above) :].strip("/") if path.startswith(self._above) else ""

    def _entry(self, info: ObjectInfo) -> Entry:
        path = self._above + info.key.lstrip("/")
        if path.endswith("/"):
            return Entry(path, MARKERS)
        return Entry(path, FILE, info.size, info.etag, path)


class Driver(Place):
    """The file system of a driver of fsspec."""

    def __init__(self, url: str, config: StorageConfig) -> None:
        self._system, path = open_driver(url, config)
        self._config = config
        shown, query = split_query(url)
        chain = ""
        if "::" in shown and "::" not in path:
            shown, mark, rest = shown.partition("::")
            chain = mark + rest
        self._scheme, _, rest = shown.partition("://")
        self._host = rest.partition("/")[0]
        root = shown if "://" in path else f"{self._scheme}://{path}"
        super().__init__(root.rstrip("/"), query, chain)
        self._folders: dict[str, set[str]] = {}
        """The folders in each one that was listed."""

    def file(self, path: str) -> Entry | None:
        try:
            entry = self._entry(path, self._info(path))
        except EndpointError:
            raise  # `isfile` of fsspec would say no
        except Exception:  # clients raise whatever they like
            return None
        return entry if entry.kind == FILE else None

    def is_folder(self, path: str) -> bool:
        above = os.path.dirname(path)
        if above in self._folders:
            return path in self._folders[above]
        return bool(self._system.isdir(self._name(path)))

    def entries(self, folder: str, *, is_deep: bool) -> Iterator[Entry]:
        name = self._name(folder)
        if self._scheme in _HTTP:
            name = f"{name.rstrip('/')}/"  # a page without it lists nothing
        # not `find`, which leaves out what cannot be listed
        try:
            listed = self._system.ls(name, detail=True)
        except FileNotFoundError:
            if self.root.startswith(folder):
                raise
            raise EndpointError(
                f"{folder!r}: this folder is in a listing, and cannot be listed itself; leave it out "
                f"by naming others, or try again"
            ) from None
        listed = [info for info in listed if str(info["name"]).rstrip("/") != name.rstrip("/")]
        entries = [self._entry(self._path(str(info["name"])), info) for info in listed]
        self._folders[folder] = {entry.path for entry in entries if entry.kind == FOLDER}
        yield from sorted(entries, key=lambda entry: entry.path)

    def read(self, path: str) -> bytes:
        return bytes(self._system.cat_file(self._name(path)))

    def open(self, path: str, etag: str) -> Any:
        self.check_read(path, etag)
        return self._system.open(self._name(path))

    def check_read(self, path: str, etag: str) -> None:
        if etag:
            check_version(path, etag, version_of_info(self._info(path), etag))

    def _info(self, path: str) -> Mapping[str, Any]:
        """What the driver knows of a file, with retries. Raises our errors."""

        def ask() -> Mapping[str, Any]:
            try:
                return self._system.info(self._name(path))  # type: ignore[no-any-return]
            except Exception as error:  # clients raise whatever they like
                raise failure_of(path, error) from None

        endpoint = endpoint_of(self._scheme, self._host, self._config.storage_options)
        return RetryPolicy.of(self._config, endpoint).call(ask)

    def _name(self, path: str) -> str:
        """As the driver names it: the web's files by their URLs."""
        return f"{path}{self.query}" if self._scheme in _HTTP else path.partition("://")[2]

    def _path(self, name: str) -> str:
        return name if "://" in name else f"{self._scheme}://{name}"

    def _entry(self, path: str, info: Mapping[str, Any]) -> Entry:
        if info["type"] == "directory":
            path = path.rstrip("/")
            return Entry(path, FOLDER, identity=path)
        if path.endswith("/"):
            return Entry(path, MARKERS)
        size = info.get("size")
        size = -1 if size is None else int(size)
        return Entry(path, FILE, size, version_of_info(info), f"{path}{self.query}")


def open_place(name: str, config: StorageConfig) -> Place:
    """Where a path or URL leads."""
    if not is_remote(name):
        return Disk(local_path(name) if "://" in name else name)
    return Bucket(name, config) if is_in_a_bucket(name) else Driver(name, config)


def open_driver(url: str, config: StorageConfig) -> tuple[Any, str]:
    """fsspec's file system of a URL, and the path within."""
    scheme, _, path = url.partition("://")
    options = driver_options(scheme, config.for_url(url))
    if not options.get("version_aware"):
        check_version_mark(scheme, path, url)
    if scheme in _HTTP:
        shown, query = split_query(url)
        if query:
            options.setdefault("encoded", True)  # the signature covers the URL as it is spelled
        if shown.lower().endswith(_ENCODED):
            options |= _as_stored(options)
    if "::" in url and scheme in _UNCHAINED_SCHEMES:
        # fsspec would take this name for file systems within each other
        driver = fsspec.get_filesystem_class(scheme)
        options = {**driver._get_kwargs_from_urls(url), **options}
        return driver(**options), driver._strip_protocol(url)
    system, path = fsspec.core.url_to_fs(url, **options)
    return system, path


def _as_stored(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of fsspec's driver of http by which the bytes of an answer stay as they are.

    A server may call the compression of a file, which its name tells, the encoding of its answer.
    It must not add one of its own then: there would be two.
    """
    headers = {"Accept-Encoding": "identity"} | dict(options.get("headers") or {})
    client = {"auto_decompress": False} | dict(options.get("client_kwargs") or {})
    return {"headers": headers, "client_kwargs": client}


@contextmanager
def open_file(
    url: str,
    config: StorageConfig,
    compression: str | None = None,
    etag: str = "",
    note: Callable[[int], None] | None = None,
) -> Iterator[Any]:
    """A file to read. compression: fsspec's name of what it is decompressed by.

    etag: the version to read, as it was when the file was found: it is compared now, and again when
    all was read or reading failed; of a bucket at each read. A driver that keeps listings tells what
    these say. note: called with the number of stored bytes that were just read.

    Raises ObjectChangedError if that version is gone, ObjectNotFoundError and other StorageErrors;
    drivers of fsspec raise their own errors.
    """
    place = open_place(url, config)
    opened = place.open(place.root, etag)
    try:
        with opened as file:
            if note is not None:
                file = CountedFile(file, note)
            if compression is None:
                yield file
            else:
                with fsspec.core.compr[compression](file, mode="rb") as plain:
                    yield plain
    except Exception:
        # It may be broken because it was written over. Of a file that cannot be looked at either,
        # the first error says more.
        try:
            place.check_read(place.root, etag)
        except ObjectChangedError:
            raise
        except Exception:
            pass
        raise
    place.check_read(place.root, etag)


def failure_of(shown: str, error: BaseException) -> BaseException:
    """Our error for one of a driver's, without the queries of URLs."""
    failure = driver_error(shown, error)
    failure.args = tuple(without_queries(str(words)) for words in failure.args)
    return failure


class CountedFile:
    """A file that calls `note` with the number of bytes of each read."""

    def __init__(self, file: Any, note: Callable[[int], None]) -> None:
        self.file = file
        self._note = note

    def read(self, size: int = -1) -> Any:
        """As that of the file."""
        data = self.file.read(size)
        self._note(len(data))
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def expect_end(file: Any, stop: int) -> None:
    """Read no further ahead than this byte: the caller hardly needs what follows.

    Only files of objects read ahead.
    """
    if isinstance(file, CountedFile):
        file = file.file
    if isinstance(file, io.BufferedReader) and isinstance(file.raw, ObjectReader):
        file.raw.expected_end = stop
