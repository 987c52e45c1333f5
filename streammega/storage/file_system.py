"""Files of any URL to read: corpora that are converted, and folders of them.

Buckets are read by our stores, with their credentials, retries and ETags, behind fsspec's
interface. All else is read by fsspec's own drivers. A file that is another one than was found is an
error in all of them.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import fsspec.core
from fsspec.spec import AbstractFileSystem

from streammega.config import StorageConfig
from streammega.errors import AccessDeniedError, ObjectNotFoundError
from streammega.errors.redaction import split_query, without_queries
from streammega.storage.backends.fsspec import check_version_mark, driver_error, driver_options
from streammega.storage.backends.local import etag_of
from streammega.storage.etags import SIZED, check_version, version_of_info
from streammega.storage.object_file import ObjectReader, open_object
from streammega.storage.open import OTHER_NAMES, SCHEMES, is_in_a_bucket, is_remote, open_store
from streammega.storage.retry import RetryPolicy, endpoint_of
from streammega.storage.store import ObjectInfo, Store

_UNCHAINED_SCHEMES = {*SCHEMES, *OTHER_NAMES, "memory", "abfs", "abfss", "hdfs"}
"""Schemes in whose keys `::` is letters, not one file system within another as fsspec has it."""

_ENCODED = (".gz", ".tgz", ".zst")
"""Suffixes of compressions that are also encodings of HTTP."""


def file_system(url: str, config: StorageConfig) -> tuple[Any, str]:
    """fsspec's file system of a URL or path, and the path within.

    Over our store for the schemes of object stores, its own driver for all else.
    """
    scheme, _, path = url.partition("://")
    if is_in_a_bucket(url) and path:
        store, key = open_store(url, config)
        # Keys of obstore's stores lack the bucket, for each serves one. Keys of drivers have it.
        bucket, _, _ = path.partition("/")
        root = "" if key == path else f"{bucket}/"
        return StoreFiles(store, root), path
    options = driver_options(scheme, config.for_url(url)) if is_remote(url) else {}
    if not options.get("version_aware"):
        check_version_mark(scheme, path, url)
    if url.startswith(("http://", "https://")) and "?" in url:
        options.setdefault("encoded", True)  # the signature covers the URL as it is spelled
    if scheme in ("http", "https") and split_query(url)[0].lower().endswith(_ENCODED):
        options |= _as_stored(options)
    if "::" in url and (not is_remote(url) or scheme in _UNCHAINED_SCHEMES):
        # fsspec would take this name for file systems within each other.
        driver = fsspec.get_filesystem_class(scheme if "://" in url else "file")
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
    """A file to read; `compression` as fsspec has it, "infer" by the suffix.

    etag: the version to read, as it was when the file was found: it is compared now, and again when
    all was read or reading failed. A driver that keeps listings tells what these say. note: called
    with the number of stored bytes that were just read.

    Raises ObjectChangedError if that version is gone, ObjectNotFoundError and other StorageErrors;
    drivers of fsspec raise their own errors.
    """
    system, path = file_system(url, config)
    packed = fsspec.core.get_compression(path, compression)
    shown, _ = split_query(url)
    is_store = isinstance(system, StoreFiles)
    # Each read of an object with an ETag is compared by itself.
    is_compared = not etag or (is_store and not etag.startswith(SIZED))
    if is_store:
        opened = system.open_version(path, etag)
    else:
        if not is_compared:
            check_version(shown, etag, _version_now(system, path, url, etag, config))
        opened = system.open(path)
    try:
        with opened as file:
            if note is not None:
                file = CountedFile(file, note)
            if packed is None:
                yield file
            else:
                with fsspec.core.compr[packed](file, mode="rb") as plain:
                    yield plain
    except Exception:
        # It may be broken because it was written over. Of a file that cannot be looked at either,
        # the first error says more.
        actual = etag
        if not is_compared and not is_store:
            with suppress(Exception):
                actual = _version_of(system, path, url, etag)
        check_version(shown, etag, actual)
        raise
    if not is_compared:
        check_version(shown, etag, _version_now(system, path, url, etag, config))


def _version_now(system: Any, path: str, url: str, like: str, config: StorageConfig) -> str:
    """The version of a file as it is now, of the kind of another one; an endpoint is waited for."""
    if not is_remote(url):
        return _version_of(system, path, url, like)
    shown, _ = split_query(url)

    def look() -> str:
        try:
            return _version_of(system, path, url, like)
        except Exception as error:  # clients raise whatever they like
            raise failure_of(shown, error) from None

    scheme, _, rest = shown.partition("://")
    endpoint = endpoint_of(scheme, rest.partition("/")[0], config.storage_options)
    return RetryPolicy.of(config, endpoint).call(look)


def _version_of(system: Any, path: str, url: str, like: str) -> str:
    return version_of_info(system.info(path), like) if is_remote(url) else etag_of(os.stat(path))


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


class StoreFiles(AbstractFileSystem):  # type: ignore[misc]
    """The objects of a bucket as a read-only file system of fsspec, read by our store.

    Paths are bucket/key. root: the part of paths that the store's keys lack, `bucket/` or nothing.
    Listings are remembered, so make a new one to see later changes.
    """

    protocol = "object"
    cachable = False  # fsspec would keep the first instance, with its store, for ever

    def __init__(self, store: Store, root: str) -> None:
        super().__init__()
        self._store = store
        self._root = root
        self._listed: dict[str, ObjectInfo] = {}

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """An object, or a folder, which is a prefix of objects. Raises ObjectNotFoundError."""
        key = self._key(path)
        item = self._find(key)
        if item is not None:
            return self._described(item)
        if not self._list(key):
            raise ObjectNotFoundError(f"{self._store.url(key)}: no such object or folder")
        return _folder(f"{self._root}{key}")

    def isfile(self, path: str) -> bool:
        """Whether there is an object of that name. Raises StorageError, which fsspec's own method would
        take for no.
        """
        return self._find(self._key(path)) is not None

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        """The objects and folders directly in a folder."""
        key = self._key(path)
        prefix = f"{key}/" if key else ""
        entries: dict[str, dict[str, Any]] = {}
        for item in self._list(key):
            name, deeper, _rest = item.key.removeprefix(prefix).partition("/")
            full = f"{self._root}{prefix}{name}"
            entries[full] = _folder(full) if deeper else self._described(item)
        return list(entries.values()) if detail else list(entries)

    def find(
        self, path: str, maxdepth: int | None = None, *_: Any, detail: bool = False, **__: Any
    ) -> Any:
        """All objects below a folder, by one listing. maxdepth: 1 for those directly in it."""
        rows = [self._described(item) for item in self._list(self._key(path), maxdepth != 1)]
        if detail:
            return {row["name"]: row for row in rows}
        return [row["name"] for row in rows]

    def open_version(self, path: str, etag: str) -> io.BufferedReader:
        """A file to read, of this version ("": of the one that is there now).

        Raises ObjectChangedError, StorageError.
        """
        info = self._store.info(self._key(path))
        actual = f"{SIZED}{info.size}" if etag.startswith(SIZED) else info.etag
        check_version(self._store.url(info.key), etag, actual)
        return open_object(self._store, info)

    def _open(self, path: str, mode: str = "rb", **_: Any) -> io.BufferedReader:
        if mode != "rb":
            raise ValueError(f"{self._store.url(self._key(path))}: is opened for reading only")
        return self.open_version(path, "")

    def _find(self, key: str) -> ObjectInfo | None:
        """The object of a key; None if there is none.

        Access denied means that there is none: some policies deny access to what does not exist.
        """
        # Listings of some stores have no ETags.
        if key in self._listed and self._listed[key].etag:
            return self._listed[key]
        try:
            return self._store.info(key) if key else None
        except (ObjectNotFoundError, AccessDeniedError):
            return None

    def _list(self, folder: str, recursive: bool = True) -> list[ObjectInfo]:
        infos = self._store.list(f"{folder}/" if folder else "", recursive)
        self._listed.update((info.key, info) for info in infos)
        return infos

    def _key(self, path: str) -> str:
        return str(self._strip_protocol(path)).removeprefix(self._root.rstrip("/")).strip("/")

    def _described(self, item: ObjectInfo) -> dict[str, Any]:
        name = f"{self._root}{item.key.lstrip('/')}"
        return {"name": name, "size": item.size, "type": "file", "ETag": item.etag}


def _folder(name: str) -> dict[str, Any]:
    return {"name": name, "size": 0, "type": "directory"}
