"""Which store serves a URL: one for all that is open in a bucket, by the same settings."""

from __future__ import annotations

import hashlib
import importlib
import os
import re
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple
from urllib.parse import unquote

from streammega.config import StorageConfig
from streammega.config.validate import settings_of, with_home
from streammega.errors import ConfigError
from streammega.errors.logs import get_logger
from streammega.storage.backends.fsspec import FsspecStore
from streammega.storage.backends.local import LocalStore, PreadStore, is_mapped
from streammega.storage.backends.obstore import ObstoreStore, obstore_is_lost
from streammega.storage.backends.oss import OssS3fsStore, OssStore
from streammega.storage.backends.remote import RemoteStore
from streammega.storage.fork_lock import process_lock
from streammega.storage.store import Store, WrapperStore

log = get_logger(__name__)

_stores: weakref.WeakValueDictionary[Any, Any] = weakref.WeakValueDictionary()
_lock = process_lock()
_latest_digest: tuple[StorageConfig | None, dict[Any, Any], bytes] = (None, {}, b"")
"""(config, environment, digest of both) of the store that was opened last."""
_registered: dict[str, Callable[[], Store]] = {}
_CLIENT_SETTINGS = [
    item.name
    for item in settings_of(StorageConfig)
    if item.name not in ("storage_options", "cache_dir", "cache_max_bytes")
]
"""Settings by which stores are told apart, besides the options. No store knows of a cache."""
_LAZY_SCHEMES = {"mock": "streammega.dataset.mock"}
"""Schemes whose module registers itself, and is imported when one is first used.

This layer imports nothing above it.
"""
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


class Scheme(NamedTuple):
    """How URLs of a scheme are served.

    store: the class that serves one bucket or host. driver: the class for `transport="fsspec"`.
    environment: prefixes of the variables that their clients read. serves_forks: whether the driver
    reads for a store in a forked child, for it takes the same options. is_bucket: whether it can be
    listed and written.
    """

    store: type[RemoteStore]
    driver: type[RemoteStore]
    environment: tuple[str, ...]
    serves_forks: bool
    is_bucket: bool = True


_GOOGLE = ("GOOGLE_", "GCS", "GCE_METADATA_", "GCLOUD_", "CLOUDSDK_", "STORAGE_EMULATOR_")
SCHEMES = {
    "s3": Scheme(ObstoreStore, FsspecStore, ("AWS_",), serves_forks=True),
    "oss": Scheme(OssStore, OssS3fsStore, ("OSS_", "ALIBABA_CLOUD_"), serves_forks=True),
    "gs": Scheme(ObstoreStore, FsspecStore, _GOOGLE, serves_forks=False),
    "az": Scheme(ObstoreStore, FsspecStore, ("AZURE_", "IDENTITY_", "MSI_"), serves_forks=False),
    "http": Scheme(ObstoreStore, FsspecStore, (), serves_forks=True, is_bucket=False),
    "https": Scheme(ObstoreStore, FsspecStore, (), serves_forks=True, is_bucket=False),
}
"""Every scheme that has a store of its own, by obstore. `FsspecStore` serves all others."""
OTHER_NAMES = {"s3a": "s3", "gcs": "gs"}
_CLIENT_ENVIRONMENT = (
    *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"),
    "HOME",  # whose .aws, .azure and so on are read
    *(prefix for known in SCHEMES.values() for prefix in known.environment),
)
"""Prefixes of environment variables that clients read.

A store is shared only between openings for which these are equal. Otherwise a program that changes
them would still write to the earlier endpoint or account.
"""


def register_scheme(scheme: str, make: Callable[[], Store]) -> None:
    """Serve URLs of a scheme by the store that `make` returns. Keys are what follows `scheme://`."""
    _registered[scheme_of(f"{scheme}://")] = make


def is_remote(url: str) -> bool:
    """Whether a URL has a scheme other than file:// and local://."""
    return "://" in url and not url.startswith(("file://", "local://"))


def scheme_of(url: str) -> str:
    """The scheme of a URL, under its usual name; "" for a local path, `file://` or `-` (stdin)."""
    if not is_remote(url):
        return ""
    scheme = url.partition("://")[0].lower()
    return OTHER_NAMES.get(scheme, scheme)


def is_in_a_bucket(url: str) -> bool:
    """Whether a store of ours lists and reads a URL, and not a file system of fsspec."""
    scheme = scheme_of(url)
    return scheme in _registered or (scheme in SCHEMES and SCHEMES[scheme].is_bucket)


def is_of_this_process(url: str) -> bool:
    """Whether no other process can open a URL: its store was registered here, or is memory."""
    return scheme_of(url) in ("memory", *_registered)


def local_path(url: str) -> str:
    """The absolute path of a local name or file:// URL. `~` is the home folder.

    Raises ConfigError for a URL with a host, for one that lacks a slash, as `s3:/bucket`, and for a name
    that no file can have.
    """
    path = url
    scheme, _, rest = url.partition(":/")
    if not rest.startswith("/") and (scheme in SCHEMES or scheme in OTHER_NAMES):
        raise ConfigError(
            f"{url}: a URL has two slashes after its scheme: {scheme}://{rest}; a local file of this "
            f"name is ./{url}"
        )
    if "://" in url:
        host, slash, below = url.partition("://")[2].partition("/")
        if host not in ("", "localhost"):
            raise ConfigError(
                f"{url}: names the host {host!r}, and a local file has none; write its path after "
                f"three slashes: file:///{host}/..."
            )
        path = unquote(slash + below)
    try:
        is_name = b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        is_name = False
    if not is_name:
        raise ConfigError(f"{url!a}: no file has such a name; check the path")
    return os.path.abspath(with_home(path))


def resolved(url: str) -> str:
    """One name for all names of a local file or folder: its real path. A URL stays as it is."""
    return url if is_remote(url) else os.path.realpath(local_path(url))


def open_store(url: str, config: StorageConfig) -> tuple[Store, str]:
    """The store that serves a URL, and the key of the URL within it.

    Nothing is connected yet: clients open at the first read, once per process.
    Raises ConfigError for a URL without a bucket or a transport that cannot serve its scheme.
    """
    config = config.for_url(url)
    if not is_remote(url):
        path = local_path(url)
        return (LocalStore if is_mapped(path, config) else PreadStore)(config), path
    scheme = scheme_of(url)
    rest = url.partition("://")[2]
    if scheme in _LAZY_SCHEMES and scheme not in _registered:
        importlib.import_module(_LAZY_SCHEMES[scheme])
    if scheme in _registered:
        return _registered[scheme](), rest
    root, _, key = rest.partition("/")
    # A name that begins with a point is a suffix that was appended to "s3://".
    if (not root or root.startswith(".")) and scheme != "memory":
        raise ConfigError(f"{url}: no bucket or host after '{scheme}://'")
    is_http = scheme in ("http", "https")
    if _by_obstore(scheme, config):
        if scheme not in SCHEMES:
            raise ConfigError(
                f"{url}: transport 'obstore' serves {', '.join(SCHEMES)}; use 'auto' or 'fsspec' "
                f"for {scheme}://"
            )
        if is_http:
            key = unquote(key)  # which obstore quotes again
        _check_key(url, key)
    elif _driver_of(scheme) is FsspecStore:  # which serves all buckets
        root = ""
        key = url if is_http else rest
    return _shared(scheme, root, config), key


def _make_store(scheme: str, root: str, config: StorageConfig) -> Store:
    """Make a store. root: the bucket or host; empty where the driver serves all of them."""
    if _by_obstore(scheme, config):
        return BucketStore(SCHEMES[scheme].store(scheme, root, config))
    return _driver_of(scheme)(scheme, root, config)


class BucketStore(WrapperStore):
    """One bucket or host: by obstore, and in a forked child, where obstore would hang, by fsspec."""

    def __init__(self, inner: RemoteStore) -> None:
        super().__init__(inner)
        self._first = inner
        self._driver: Store | None = None
        self._lock = process_lock()  # guards `_driver`: one client for all threads

    def __repr__(self) -> str:
        return repr(self._first)

    def __reduce__(self) -> tuple[Any, ...]:
        return BucketStore, (self._first,)

    @property
    def inner(self) -> Store:
        """The store that serves this process. Raises ConfigError where none can."""
        if not obstore_is_lost():
            return self._first
        with self._lock:
            if self._driver is None:
                self._driver = self._open_driver()
            return self._driver

    def _open_driver(self) -> Store:
        scheme, root, config = self._first.arguments
        known = SCHEMES[scheme]
        if not known.serves_forks:
            raise ConfigError(
                f"{self._first.url('')}: this process was forked from one that had used obstore, which "
                f"no fork survives; start workers by multiprocessing_context='spawn' or 'forkserver', "
                f"set transport='fsspec', or use StreamLoader, which needs no workers"
            )
        log.info("%s: a forked process reads by fsspec, not by obstore", self._first.url(""))
        return known.driver(scheme, root, config)


def _driver_of(scheme: str) -> type[RemoteStore]:
    return SCHEMES[scheme].driver if scheme in SCHEMES else FsspecStore


def _by_obstore(scheme: str, config: StorageConfig) -> bool:
    if config.transport == "auto":
        return scheme in SCHEMES
    return config.transport == "obstore"


def _check_key(url: str, key: str) -> None:
    """Raise ConfigError for a key that obstore would change.

    obstore treats keys as paths: it refuses empty and dotted segments, or removes them.
    """
    # The key of a folder ends in a slash.
    segments = key.removesuffix("/").split("/") if key else []
    not_a_name = any(segment in ("", ".", "..") for segment in segments)
    if not_a_name or _CONTROL.search(key):
        raise ConfigError(
            f"{url}: obstore serves no keys with empty segments, those of dots, or control "
            f"characters ('//', '/./'); write the key without them, or set transport='fsspec' if "
            f"the object is really named so"
        )


def _shared(scheme: str, root: str, config: StorageConfig) -> Store:
    """One store, with its connections and threads, for all that is open under the same root and
    settings.
    """
    identity = (scheme, root, settings_digest(config))
    # Two threads that open the same at once must get one store.
    with _lock:
        shared: Store | None = _stores.get(identity)
        if shared is None:
            shared = _make_store(scheme, root, config)
            _stores[identity] = shared
        return shared


def settings_digest(config: StorageConfig) -> bytes:
    """A digest of the settings, and of what clients read of the environment. Both may hold secrets.

    The latest digest is kept, for thousands of shards are opened one after the other.
    """
    global _latest_digest
    # Two dictionaries are compared in two microseconds. A single look through the methods of
    # os.environ takes one.
    environment = getattr(os.environ, "_data", os.environ)
    latest_config, latest_environment, digest = _latest_digest
    if latest_config is not config or latest_environment != environment:
        latest_environment = dict(environment)
        variables = ((os.fsdecode(name), value) for name, value in latest_environment.items())
        read = sorted(pair for pair in variables if pair[0].upper().startswith(_CLIENT_ENVIRONMENT))
        options = sorted(config.storage_options.items(), key=str)
        others = [getattr(config, name) for name in _CLIENT_SETTINGS]
        digest = hashlib.blake2b(repr((others, config.tuning, options, read)).encode()).digest()
        _latest_digest = (config, latest_environment, digest)
    return digest


def join_url(folder: str, name: str) -> str:
    """folder/name for URLs and paths alike."""
    return f"{folder.rstrip('/')}/{name}"


def escapes_folder(name: str) -> bool:
    """Whether `join_url(folder, name)` may lead out of the folder; %2F is a slash in some URLs."""
    return name.startswith("/") or ".." in unquote(name).split("/")


def is_hidden_member(name: str) -> bool:
    """Whether a member of an archive is no document of it: it or a folder above begins with a dot, or
    is in a folder of attributes of macOS, or in a note of webdataset.
    """
    parts = [part for part in name.split("/") if part not in ("", ".", "..")]
    is_note = bool(parts) and re.fullmatch("__MACOSX|__.*__", parts[0]) is not None
    return is_note or any(part.startswith(".") for part in parts)


def parent_url(url: str) -> str:
    """The folder of a URL or path."""
    return url.rstrip("/").rpartition("/")[0]


def save_bytes(url: str, data: bytes | memoryview, storage: StorageConfig) -> None:
    """Write an object, at once."""
    store, key = open_store(url, storage)
    store.put(key, data)
