"""Which backend serves a URL."""

from __future__ import annotations

import hashlib
import importlib
import os
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import unquote, urlsplit

import fsspec.core

from streammega.config import StorageConfig
from streammega.errors import ConfigError
from streammega.storage.backends.fsspec_store import FsspecStore
from streammega.storage.backends.local import LocalStore
from streammega.storage.backends.obstore_store import ObstoreStore
from streammega.storage.backends.oss_native import OssNativeStore
from streammega.storage.backends.oss_store import OssStore
from streammega.storage.backends.pread import PreadStore
from streammega.storage.descriptors import raise_limit
from streammega.storage.store import Store, written_whole
from streammega.storage.store_files import StoreFiles

_stores: weakref.WeakValueDictionary[Any, Any] = weakref.WeakValueDictionary()
_lock = threading.Lock()
_registered: dict[str, Callable[[], Store]] = {}
_BUILT_IN = {"mock": "streammega.dataset.mock"}
"""Modules above this layer that register a scheme of ours when they are imported: imported when it
is first asked for.
"""
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
BUCKET_SCHEMES = frozenset({"s3", "s3a", "gs", "gcs", "az", "oss"})
OBSTORE_SCHEMES = BUCKET_SCHEMES | {"http", "https"}


def register_scheme(scheme: str, make: Callable[[], Store]) -> None:
    """Serve URLs of a scheme by a store of one's own; keys are what follows `scheme://`."""
    _registered[scheme] = make


def is_remote(url: str) -> bool:
    """Whether a URL has a scheme other than file://."""
    return "://" in url and not url.startswith(("file://", "local://"))


def open_store(url: str, config: StorageConfig) -> tuple[Store, str]:
    """The store that serves a URL, and the key of the URL within it.

    Nothing is connected yet: clients open at the first read, once per process.
    Raises ConfigError for a URL without a bucket or a transport that cannot serve its scheme.
    """
    raise_limit()  # mapped files and connections each take a descriptor, and 1024 are soon gone
    if not is_remote(url):
        path = unquote(urlsplit(url).path) if "://" in url else url
        local: Store = LocalStore() if config.local == "mmap" else PreadStore(config)
        return local, os.path.abspath(os.path.expanduser(path))
    scheme, _, rest = url.partition("://")
    if scheme in _BUILT_IN and scheme not in _registered:
        importlib.import_module(_BUILT_IN[scheme])
    if scheme in _registered:
        return _registered[scheme](), rest
    scheme = {"s3a": "s3", "gcs": "gs"}.get(scheme.lower(), scheme.lower())
    root, _, key = rest.partition("/")
    if not root and scheme != "memory":
        raise ConfigError(f"{url}: no bucket or host after '{scheme}://'")
    use_obstore = config.transport == "obstore" or (
        config.transport == "auto" and scheme in OBSTORE_SCHEMES
    )
    if not use_obstore:
        store = _shared(OssNativeStore if scheme == "oss" else FsspecStore, scheme, "", config)
        return store, url if scheme in ("http", "https") else rest
    if scheme not in OBSTORE_SCHEMES:
        raise ConfigError(
            f"{url}: transport 'obstore' serves s3, oss, gs, az and http; use 'auto' or 'fsspec' for {scheme}://"
        )
    if scheme in ("http", "https"):
        key = unquote(key)  # which obstore quotes again
    _check_key(url, key)
    return _shared(OssStore if scheme == "oss" else ObstoreStore, scheme, root, config), key


def _check_key(url: str, key: str) -> None:
    """obstore takes keys for paths: it refuses empty and dotted segments, or reads the key without
    them.
    """
    inner = key.removesuffix("/").split("/") if key else []  # a folder's name ends in one
    if any(part in ("", ".", "..") for part in inner) or _CONTROL.search(key):
        raise ConfigError(
            f"{url}: obstore serves no keys with empty segments, those of dots, or control characters ('//', '/./'); write "
            f"the key without them, or set transport='fsspec' if the object is really named so"
        )


def file_system(url: str, config: StorageConfig) -> tuple[Any, str]:
    """fsspec's file system of a URL or path, and the path within: over our store for the schemes of
    object stores, its own driver for all else.
    """
    scheme, _, path = url.partition("://")
    if scheme.lower() in BUCKET_SCHEMES and path:
        store, key = open_store(url, config)
        bucket = path.partition("/")[0]
        # obstore's stores serve one bucket, so that their keys lack its name; those of drivers do not
        return StoreFiles(store, "" if key == path else f"{bucket}/"), path
    options = dict(config.storage_options) if is_remote(url) else {}
    if url.startswith(("http://", "https://")) and "?" in url:
        options.setdefault("encoded", True)  # a signature is of the URL as it is spelt
    if "::" in url and _is_no_chain(url):
        kind = fsspec.get_filesystem_class(url.partition("://")[0] if "://" in url else "file")
        return kind(**{**kind._get_kwargs_from_urls(url), **options}), kind._strip_protocol(url)
    found: tuple[Any, str] = fsspec.core.url_to_fs(url, **options)
    return found


def _is_no_chain(url: str) -> bool:
    """Whether `::` in a URL are letters: of a file's or an object's name, where fsspec would see
    file systems in each other.
    """
    schemes = OBSTORE_SCHEMES | {"memory", "abfs", "abfss", "hdfs"}
    return not is_remote(url) or url.partition("://")[0] in schemes


@contextmanager
def open_file(
    url: str, config: StorageConfig, compression: str | None = None, etag: str = ""
) -> Iterator[Any]:
    """A file to read; `compression` as fsspec has it, "infer" by the suffix.

    etag: of the version that is meant, of an object store. Raises ObjectChangedError if that is not
    there any more, ObjectNotFoundError and so on; drivers of fsspec raise whatever they like.
    """
    system, path = file_system(url, config)
    packed = fsspec.core.get_compression(path, compression)
    opened = (
        system.open_version(path, etag) if isinstance(system, StoreFiles) else system.open(path)
    )
    with opened as file:
        if packed is None:
            yield file
            return
        with fsspec.core.compr[packed](file, mode="rb") as plain:
            yield plain


def _shared(kind: type[Any], scheme: str, root: str, config: StorageConfig) -> Store:
    """One store, with its connections and threads, for all that is open under the same root and
    settings.
    """
    identity = hashlib.blake2b(
        repr((config, sorted(config.storage_options.items(), key=str))).encode()
    ).digest()
    with _lock:
        store = _stores.get((kind, scheme, root, identity))
        if store is None:
            store = kind(scheme, root, config) if root else kind(scheme, config)
            _stores[kind, scheme, root, identity] = store
        found: Store = store
        return found


def join_url(folder: str, name: str) -> str:
    """folder/name for URLs and paths alike."""
    return f"{folder.rstrip('/')}/{name}"


def parent_url(url: str) -> str:
    """The folder of a URL or path."""
    return url.rstrip("/").rpartition("/")[0]


def save_bytes(url: str, data: bytes | memoryview, storage: StorageConfig) -> None:
    """Write an object, at once."""
    store, key = open_store(url, storage)
    with written_whole(store, key) as writer:
        writer.write(data)
