"""Local copies of small remote files (`.idx`) and of built arrays: atomic, locked, one per node.

A copy is keyed by URL, ETag and size, so a changed object is fetched again and its old copy removed.
Copies and arrays end with a checksum, which is compared when they are opened: a damaged one is
fetched or built again. If several processes need one, one of them downloads or builds it, and the
others wait.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import DTypeLike, NDArray

from streammega.config import StorageConfig
from streammega.config.validate import user_caches
from streammega.errors import CacheError, ObjectNotFoundError
from streammega.errors.logs import get_logger
from streammega.storage import ObjectInfo, Store, join_url, open_store
from streammega.storage.atomic_file import write_file
from streammega.storage.backends.local import map_file
from streammega.storage.cache.cache_folder import check_owner
from streammega.storage.etags import warn_unversioned
from streammega.storage.progress import note_part, observer
from streammega.storage.store import atomic_writer

log = get_logger(__name__)

DOWNLOAD_BYTES = 64 << 20
"""What a download or an upload holds in memory at once."""
FAST_WINDOW, SLOW_WINDOW = 1.0, 4.0
"""Seconds of a download's window, below and above which the next one is larger or smaller."""
PARTS = ("idx", "order", "convert")
"""The folders of a cache, but for the page cache's."""
COPIES = "copies of index files"
"""What is shown of downloads."""
LINE_EVERY = 30.0
"""Seconds between two lines that say how far a download is."""
CHECKSUM_BYTES = 8
"""Bytes of the checksum (xxh3) at the end of every kept copy and array. np.load ignores it."""
MAX_HEADER_BYTES = 10 + 65_535
"""The largest header of a `.npy` of version 1.0."""


def default_cache_dir() -> Path:
    """$XDG_CACHE_HOME/streammega, or ~/.cache/streammega; for a user without a home one in the
    temporary folder. Raises CacheError where that is another user's.
    """
    return user_caches() / "streammega"


def cache_folder(storage: StorageConfig) -> Path:
    """The folder that `cache_dir` names, or else `default_cache_dir()`. Raises CacheError for one that
    a stranger may have made.
    """
    folder = Path(storage.cache_dir) if storage.cache_dir else default_cache_dir()
    for part in PARTS:
        check_owner((folder / part).absolute())
    return folder


def map_local_copy(store: Store, info: ObjectInfo, cache_dir: Path, part_bytes: int) -> memoryview:
    """The bytes of a remote object: its local copy, mapped, which at most one process of this node
    downloads. A damaged copy is downloaded again.

    An object without an ETag is read into memory, because a copy could be of another version.
    Raises CacheError where the cache cannot hold the copy, StorageError where the object cannot be
    read.
    """
    if not info.etag:
        warn_unversioned(store.url(info.key))
        return memoryview(b"".join(_download(store, info, part_bytes)))
    path = cached_copy(store, info, cache_dir)
    digest_of_url = digest_of(store.url(info.key))
    downloads = []

    def download() -> Iterator[memoryview]:
        downloads.append(path)
        return _download(store, info, part_bytes)

    data = map_kept_file(path, path.parent / f"{digest_of_url}.lock", download, info.size)
    if downloads:
        _remove_previous_copy(path, path.parent / f"{digest_of_url}.latest")
    return data


def _remove_previous_copy(path: Path, latest: Path) -> None:
    """Remove the copy of an object's previous version. latest: a file that names the newest copy.

    To list the folder for each of its files would take quadratic time.
    """
    previous = _read_name(latest)
    # In a sticky folder `latest` may be another user's file. The new copy is good nevertheless.
    with suppress(CacheError):
        write_atomically(latest, [path.name.encode()], len(path.name))
        if previous and previous != path.name:
            _remove(path.parent / previous)


def map_kept_file(
    path: Path,
    lock: Path,
    make: Callable[[], Iterable[bytes | memoryview]],
    expected_bytes: int = 0,
) -> memoryview:
    """The bytes of a file of this node's cache, mapped. Where it is missing or damaged, one of the
    processes that share the lock makes it of the chunks of `make`.

    Raises CacheError where the cache cannot hold it, and what `make` raises.
    """
    data = _sound_bytes(path)
    if data is None:
        with node_lock(lock):
            data = _sound_bytes(path)  # another process may have had the lock before this one
            if data is None:
                _warn_of_damage([path])
                write_atomically(path, _with_checksum(make()), expected_bytes)
                data = _sound_bytes(path)
    if data is None:
        raise CacheError(f"{path}: is damaged as soon as it is written; check the disk")
    return memoryview(data)  # type: ignore[arg-type]


def _with_checksum(chunks: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    """The chunks of a kept file, and then their checksum."""
    checksum = xxhash.xxh3_64()
    for chunk in chunks:
        checksum.update(chunk)
        yield chunk
    yield checksum.digest()


def _sound_bytes(path: Path) -> NDArray[np.uint8] | None:
    """The bytes of a kept file without their checksum, mapped without a descriptor.

    None: there is no file, or the checksum is not that of its bytes.
    """
    try:
        with open(path, "rb") as file:
            stored = map_file(file.fileno(), os.fstat(file.fileno()).st_size, path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise cache_error(path, error, 0) from None
    data = stored[:-CHECKSUM_BYTES]
    if xxhash.xxh3_64_digest(data.data) == stored[-CHECKSUM_BYTES:].tobytes():
        return data
    return None


def _warn_of_damage(paths: Iterable[Path]) -> None:
    """Name the files that are there and damaged."""
    for path in paths:
        if path.exists() and _sound_bytes(path) is None:
            log.warning("%s: is damaged, and is fetched or built again; check the disk", path)


def cached_copy(store: Store, info: ObjectInfo, cache_dir: Path) -> Path:
    """The path of the local copy of an object, if there is one."""
    digest_of_url = digest_of(store.url(info.key))
    digest_of_version = digest_of(f"{info.etag}:{info.size}")
    return cache_dir / "idx" / f"{digest_of_url}-{digest_of_version}.idx"


_COPY_NAME = re.compile(r"[0-9a-f]{32}-[0-9a-f]{32}\.idx")


def remove_stale(folder: Path, key_of_dataset: str, key: str) -> None:
    """Remove the files of keys that begin with `key_of_dataset`, but for those of `key`. A process
    that has mapped one keeps its bytes.
    """
    for path in folder.glob(f"{key_of_dataset}*"):
        if not path.name.startswith(key):
            _remove(path)


def _remove(path: Path) -> None:
    """Remove a file. In a sticky folder another user's file stays."""
    with suppress(OSError):
        path.unlink()


def _read_name(path: Path) -> str:
    """The name of a copy that `path` holds, or nothing: a power failure may have damaged it."""
    try:
        name = path.read_text(encoding="ascii")
    except (OSError, ValueError):
        return ""
    return name if _COPY_NAME.fullmatch(name) else ""


def _download(store: Store, info: ObjectInfo, part_bytes: int) -> Iterator[memoryview]:
    """The object's bytes in order, a window of concurrent parts at a time. A long download logs how
    far it is unless that is observed, and takes small windows where storage is slow.
    """
    note_part(COPIES, 0, info.size)
    began = last_line = now = time.monotonic()
    window_bytes = max(DOWNLOAD_BYTES // 8, part_bytes)
    window_start = 0
    while window_start < info.size:
        if window_start and now - last_line >= LINE_EVERY and observer() is None:
            last_line = now
            seconds_left = (now - began) * (info.size - window_start) / window_start
            log.warning(
                "%s: %.0f of %.0f MB are copied to this node; about %.0f s are left",
                store.url(info.key),
                window_start / 1e6,
                info.size / 1e6,
                seconds_left,
            )
        window_stop = min(window_start + window_bytes, info.size)
        starts = list(range(window_start, window_stop, part_bytes))
        stops = [min(start + part_bytes, window_stop) for start in starts]
        yield from store.read(info.key, list(zip(starts, stops, strict=True)), info.etag)
        note_part(COPIES, window_stop - window_start)
        window_start = window_stop
        seconds = time.monotonic() - now
        now += seconds
        if seconds < FAST_WINDOW:
            window_bytes = max(min(2 * window_bytes, DOWNLOAD_BYTES), part_bytes)
        elif seconds > SLOW_WINDOW:
            window_bytes = max(window_bytes // 2, part_bytes)


ArrayKind = tuple[tuple[DTypeLike, ...], tuple["int | None", ...]]
"""What a cached array must be: the dtypes it may have, and its shape. None in it is any number."""


def cached_arrays(
    folder: Path,
    key: str,
    kinds: Mapping[str, ArrayKind],
    build: Callable[[], Mapping[str, NDArray[Any]]],
    published: SharedFolder | None = None,
) -> dict[str, NDArray[np.generic]]:
    """Arrays `<key>-<name>.npy`, mapped read-only. Where one is missing or damaged, one process of
    the node builds them all, or downloads them if `published` has them all.

    Each file is written under a temporary name and renamed, so a killed build leaves no file that
    is used later. Raises CacheError for a file that holds another kind of array, and for published
    files that are damaged.
    """
    paths = {name: folder / f"{key}-{name}.npy" for name in kinds}
    kept = _all_sound(paths)
    if kept is None:
        with node_lock(folder / f"{key}.lock"):
            # The process that had the lock before may have built them.
            kept = _all_sound(paths)
            if kept is None:
                _warn_of_damage(paths.values())
                if not _download_all(published, paths):
                    arrays = build()
                    for name, path in paths.items():
                        array = arrays[name]
                        write_atomically(path, _with_checksum(_npy_bytes(array)), array.nbytes)
                kept = _all_sound(paths)
    if kept is None:
        raise corrupt_cache_error(
            f"{folder / key}-*.npy: their checksums are not those of their bytes"
        )
    return {name: _array_of(kept[name], path, kinds[name]) for name, path in paths.items()}


def _all_sound(paths: Mapping[str, Path]) -> dict[str, NDArray[np.uint8]] | None:
    sound = {}
    for name, path in paths.items():
        data = _sound_bytes(path)
        if data is None:
            return None
        sound[name] = data
    return sound


@dataclass(frozen=True, kw_only=True)
class SharedFolder:
    """A folder of built arrays that all nodes can read. storage: the run's settings."""

    url: str
    storage: StorageConfig

    def publish(self, path: Path) -> None:
        """Upload one cached array under its own name, at once."""
        store, key = open_store(join_url(self.url, path.name), self.storage)
        with atomic_writer(store, key) as writer, open(path, "rb") as file:
            while chunk := file.read(DOWNLOAD_BYTES):
                writer.write(chunk)


def _download_all(published: SharedFolder | None, paths: Mapping[str, Path]) -> bool:
    """Download all arrays from the shared folder; False, and no download, where one is missing."""
    if published is None:
        return False
    published_files = []
    for path in paths.values():
        store, key = open_store(join_url(published.url, path.name), published.storage)
        try:
            info = store.info(key)
        except ObjectNotFoundError:
            return False
        published_files.append((path, store, info))
    for path, store, info in published_files:
        chunks = _download(store, info, published.storage.tuning.max_request_bytes)
        write_atomically(path, chunks, info.size)
    return True


def _array_of(data: NDArray[np.uint8], path: Path, kind: ArrayKind) -> NDArray[np.generic]:
    """The array of a `.npy`. Raises CacheError for another kind of array."""
    try:
        head = io.BytesIO(data[:MAX_HEADER_BYTES].tobytes())
        version = np.lib.format.read_magic(head)
        if version != (1, 0):
            raise ValueError(f"its version is {version}, not that which this library writes")
        shape, by_columns, dtype = np.lib.format.read_array_header_1_0(head)
    except Exception as error:  # numpy reads a header as Python: whatever that raises
        raise corrupt_cache_error(f"{path}: is no readable array ({error})") from None
    body = data[head.tell() :]
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes != len(body):
        raise corrupt_cache_error(
            f"{path}: is no readable array (it holds {len(body)} bytes, not {num_bytes})"
        )
    dtypes, expected = kind
    known_dtypes = [np.dtype(known) for known in dtypes]
    if by_columns or dtype not in known_dtypes or not _fits(shape, expected):
        raise corrupt_cache_error(
            f"{path}: is {dtype} {list(shape)}, not {known_dtypes[-1]} {list(expected)}"
        )
    # Users recognise mapped arrays by this type. np.load would keep a descriptor open for each.
    return body.view(dtype).reshape(shape).view(np.memmap)


def _fits(shape: tuple[int, ...], expected: tuple[int | None, ...]) -> bool:
    """Whether a shape is the expected one. None in that is any number."""
    if len(shape) != len(expected):
        return False
    return all(wanted in (None, size) for size, wanted in zip(shape, expected, strict=True))


def corrupt_cache_error(what: str) -> CacheError:
    """For a cached array that is not what was built."""
    return CacheError(
        f"{what}; remove the file and start again (if it came from index_publish_url, publish it "
        "again)"
    )


def _npy_bytes(array: NDArray[Any]) -> Iterator[memoryview]:
    """The bytes of a `.npy`, in chunks."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": array.dtype.str, "fortran_order": False, "shape": array.shape}
    )
    yield memoryview(header.getvalue())
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    for start in range(0, flat.size, DOWNLOAD_BYTES):
        yield flat[start : start + DOWNLOAD_BYTES].data


def write_atomically(path: Path, chunks: Iterable[bytes | memoryview], expected_bytes: int) -> None:
    """Write to a temporary file in the same folder, sync it, rename it.

    Raises CacheError on a full disk.
    """
    try:
        write_file(path, chunks)
    except OSError as error:
        raise cache_error(path, error, expected_bytes) from None


@contextmanager
def node_lock(path: Path, kind: int = fcntl.LOCK_EX) -> Iterator[None]:
    """Hold an advisory file lock that all processes of this node share. The kernel frees it when the
    process dies. kind: as for flock. Raises CacheError.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = _open_lock(path)
    except OSError as error:
        raise cache_error(path, error, 0) from None
    try:
        try:
            fcntl.flock(fd, kind)
        except OSError as error:
            raise CacheError(
                f"{path}: {error.strerror}: its file system has no file locks; set cache_dir "
                "to a local disk"
            ) from None
        yield
    finally:
        # A process that was forked meanwhile has the descriptor too, and would keep the lock.
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)


def _open_lock(path: Path) -> int:
    """Open the file of a lock, or make it as the umask says. Another user's file need only be
    readable.
    """
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except PermissionError:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def cache_error(path: Path, error: OSError, wanted: int) -> CacheError:
    """A CacheError that says what to do. wanted: bytes that should be written, if known."""
    reason = error.strerror or str(error)
    if error.errno in (errno.EACCES, errno.EPERM):
        return CacheError(
            f"{path}: {reason}; the cache belongs to another user or is read-only: make the folder "
            "writable for all of its users, or set cache_dir to another folder (commands: "
            "XDG_CACHE_HOME)"
        )
    room = ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT) and wanted:
        room = f" ({wanted:,} bytes wanted)"
    return CacheError(
        f"{path}: {reason}{room}; free space there, or set cache_dir to a disk with room "
        f"(commands: XDG_CACHE_HOME)"
    )


def digest_of(text: str) -> str:
    """A digest of a URL or a version, for names of files."""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
