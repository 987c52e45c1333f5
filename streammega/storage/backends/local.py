"""Local files: mapped, so that reads are views of the page cache, or read by `pread`.

Files are mapped by the C library, without keeping a descriptor. Python's `mmap` keeps one for each
file, so a dataset of a thousand shards would reach the usual `ulimit -n`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import mmap
import os
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from streammega.config import StorageConfig
from streammega.errors import (
    AccessDeniedError,
    ObjectNotFoundError,
    StorageError,
    UnsupportedOperation,
)
from streammega.errors.logs import get_logger
from streammega.kernels.addresses import check_room
from streammega.storage.atomic_file import BUFFER_BYTES, AtomicFile, sync_folder
from streammega.storage.etags import check_version
from streammega.storage.fd_limit import explain_fd_limit
from streammega.storage.fork_lock import process_lock
from streammega.storage.http_errors import truncated
from streammega.storage.retry import RetryPolicy
from streammega.storage.store import (
    Buffer,
    Bytes,
    ObjectInfo,
    ObjectWriter,
    Span,
    Store,
    as_bytes,
    check_length,
)

log = get_logger(__name__)

Result = TypeVar("Result")
WRITE_BACK_BYTES = 8 << 20
"""Bytes after which the system is asked to write them to the disk, while the next ones are produced.
So `commit` waits for the last of them only. Fewer would make small writes; with many more, `commit`
waits longer.
"""
COPY_BYTES = 1 << 20
"""Bytes that are copied at a time. They stay in the processor's cache while they are hashed."""
FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Errors of a write that waits for space."""
TRANSIENT_ERRNOS = frozenset(
    {
        errno.EIO,
        errno.ESTALE,
        errno.ETIMEDOUT,
        errno.EAGAIN,
        errno.ENOTCONN,
        errno.EHOSTDOWN,
        errno.ECONNRESET,
    }
)
"""Errors of a file server, after which another try may succeed."""
NO_HARD_LINK = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV})
"""Errors of `os.link` where a file system has no hard links. File systems differ."""
MOUNTINFO = "/proc/self/mountinfo"
NETWORK_DISKS = (
    *("nfs", "cifs", "smb", "fuse", "lustre", "gpfs", "ceph", "9p", "beegfs", "afs", "glusterfs"),
    *("virtiofs", "panfs", "pvfs2"),
    "autofs",  # mounts one of these at the first look
)
"""Beginnings of the names of file systems that other machines or programs serve."""
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,  # off_t
)
_libc.munmap.restype = ctypes.c_int
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_FAILED = ctypes.c_void_p(-1).value


@dataclass(frozen=True, kw_only=True)
class _Mapped:
    """A mapped file: its ETag, device and inode when it was mapped, and its bytes."""

    etag: str
    place: tuple[int, int]
    view: memoryview


class FileSystem(NamedTuple):
    """Where a path is mounted. kind: the name of the file system, or "unknown"."""

    mount: str
    kind: str

    @property
    def is_remote(self) -> bool:
        """Whether another machine or program serves it, and may fail."""
        return self.kind.startswith(NETWORK_DISKS)


@cache
def mounts_of(mountinfo: str) -> dict[str, str]:
    """The file system of each mount point of this process, the one on top where there are several.

    It is read once: thousands of shards are opened one after the other.
    """
    try:
        lines = os.fsdecode(Path(mountinfo).read_bytes()).split("\n")
    except OSError:
        return {}
    kinds = {}
    for line in lines:
        mounted, dash, file_system = line.partition(" - ")
        if dash:
            # A blank in a name is \040 there.
            name = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), mounted.split(" ")[4])
            kinds[name] = file_system.split(" ")[0]
    return kinds


def file_system_of(path: str) -> FileSystem:
    """The file system of the real path: that of the longest mount point above it."""
    kinds = mounts_of(MOUNTINFO)
    folder = os.path.realpath(path)
    while folder not in kinds and folder != os.path.dirname(folder):
        folder = os.path.dirname(folder)
    return FileSystem(folder, kinds.get(folder, "unknown"))


def is_mapped(path: str, config: StorageConfig) -> bool:
    """Whether a local file is mapped, and not read by `pread`."""
    local_io = config.tuning.local_io
    if local_io is not None:
        return local_io == "mmap"
    file_system = file_system_of(path)
    _say_how_read(file_system)
    return not file_system.is_remote


@cache
def _say_how_read(file_system: FileSystem) -> None:
    """Once for each mount point."""
    way = "read by pread" if file_system.is_remote else "mapped"
    log.debug("%s (%s): its files are %s", *file_system, way)


class LocalStore(Store):
    """The local disk, mapped. Keys are absolute file paths."""

    def __init__(self, config: StorageConfig | None = None) -> None:
        self._config = config or StorageConfig()
        self._maps: dict[str, _Mapped] = {}
        self._lock = process_lock()

    def __getstate__(self) -> dict[str, object]:
        return {"config": self._config}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    @property
    def is_local(self) -> bool:
        """Files are mapped."""
        return True

    @property
    def _policy(self) -> RetryPolicy:
        # Not kept: thousands of shards have a store each, and the collector looks at every object.
        return RetryPolicy.of(self._config)

    def local_path(self, key: str) -> str | None:
        """The key itself."""
        return key

    def url(self, key: str) -> str:
        """The path itself."""
        return key

    def info(self, key: str) -> ObjectInfo:
        """Size, and an ETag made of size and modification time."""
        try:
            stat = os.stat(key)
        except OSError as error:
            raise local_error(key, error) from None
        if not os.path.isfile(key):
            raise ObjectNotFoundError(f"{key}: is a folder, not a file")
        return ObjectInfo(key=key, size=stat.st_size, etag=etag_of(stat))

    def fetch(self, key: str, spans: Sequence[Span], etag: str = "") -> list[Buffer]:
        """Views of the mapped file. Bytes are read when they are used."""
        view = self.view(key, etag)
        return [check_length(key, (start, stop), view[start:stop]) for start, stop in spans]

    def view(self, key: str, etag: str = "") -> memoryview:
        """The whole file, read-only: the version with `etag`, or without one the current version.

        A version that is mapped already stays readable after the file was replaced. Raises
        ObjectChangedError if another version would have to be mapped; ObjectNotFoundError,
        AccessDeniedError, StorageError.
        """
        # Otherwise two threads would both map the same file.
        with self._lock:
            mapped = self._maps.get(key)
            if mapped is None or not etag or mapped.etag != etag:
                mapped = _map(key, etag, mapped)
                self._maps[key] = mapped
            return mapped.view

    def unmap(self) -> None:
        """Unmap all files, each when its last view is gone. They are mapped again when they are read."""
        with self._lock:
            self._maps.clear()

    def list(self, prefix: str, recursive: bool = True) -> list[ObjectInfo]:
        """Files whose path starts with `prefix`: at any depth, or only those without a slash after it.

        Links to folders are not followed.
        """
        listed = []
        for path in sorted(_paths_with(prefix, recursive)):
            with contextlib.suppress(ObjectNotFoundError):  # removed meanwhile, or no file
                listed.append(self.info(path))
        return listed

    def open_writer(self, key: str) -> LocalWriter:
        """A writer of a temporary file in the same folder, which `commit` renames."""
        return LocalWriter(key, self._policy)

    def put(
        self, key: str, data: bytes | memoryview, *, if_absent: bool = False, if_match: str = ""
    ) -> bool:
        """With if_absent, one of several concurrent calls succeeds."""
        if not if_absent:
            return super().put(key, data, if_match=if_match)
        writer = LocalWriter(key, self._policy)
        try:
            writer.write(data)
            return writer.commit_new()
        except BaseException:
            writer.abort()
            raise

    def delete(self, key: str) -> None:
        """Remove the file if it is there."""
        with self._lock:
            self._maps.pop(key, None)
        try:
            os.unlink(key)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise local_error(key, error) from None


class PreadStore(LocalStore):
    """The local disk, read by `pread`.

    For file systems that may fail: NFS, FUSE, a faulty disk. An I/O error of a mapped file ends the
    process (SIGBUS). Here it is an ordinary error, which is retried like those of the network. Every
    read opens the file, compares its ETag, and closes it.
    """

    @property
    def is_local(self) -> bool:
        """False: reads are made ahead and retried, like those of the network."""
        return False

    def local_path(self, key: str) -> str | None:
        """None: others would read the file without retries."""
        return None

    def fetch(self, key: str, spans: Sequence[Span], etag: str = "") -> list[Buffer]:
        """Copies of the bytes."""
        # A span that ends before it begins is refused below, with an error that names the object.
        outs = [np.empty(max(0, stop - start), np.uint8) for start, stop in spans]
        self.fetch_into(key, spans, outs, etag)
        return [out.data for out in outs]

    def fetch_into(
        self, key: str, spans: Sequence[Span], outs: Iterable[Bytes], etag: str = ""
    ) -> None:
        """Reads straight into `outs`, one after the other."""
        with _opened(key, etag) as (fd, stat):
            for (start, stop), out in zip(spans, outs, strict=True):
                if not 0 <= start <= stop <= stat.st_size:
                    raise truncated(key, f"bytes [{start}, {stop}) of {stat.st_size}")
                check_room(out, stop - start)
                _read(fd, key, start, out)

    def read(self, key: str, spans: Sequence[Span], etag: str = "") -> list[Buffer]:
        """Transient errors of file servers are retried."""
        return self._policy.call(lambda: self.fetch(key, spans, etag))


def _read(fd: int, path: str, start: int, out: Bytes) -> None:
    """Fill `out`."""
    filled = 0
    # One call reads at most 2 GiB, and less after a signal.
    while filled < len(out):
        rest = out[filled:]
        got = os.preadv(fd, [rest], start + filled)  # type: ignore[list-item]
        if not got:
            raise truncated(path, f"bytes from {start + filled} on, while they were read")
        filled += got


def _paths_with(prefix: str, recursive: bool) -> Iterator[str]:
    """All paths that begin with a prefix, but for those of folders."""

    def refuse(error: OSError) -> None:
        if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
            raise local_error(error.filename or prefix, error) from None

    for folder, folders, names in os.walk(os.path.dirname(prefix), onerror=refuse):
        paths = [os.path.join(folder, name) for name in names]
        yield from (path for path in paths if path.startswith(prefix))
        # Only these are walked through next.
        folders[:] = [
            name
            for name in folders
            if recursive and os.path.join(folder, name, "").startswith(prefix)
        ]


def with_space(step: Callable[[], Result], path: str, policy: RetryPolicy) -> Result:
    """`step()`, again while the disk is full: it goes on where it was. Raises StorageError."""
    try:
        return step()
    except OSError as error:
        if error.errno not in FULL_ERRNOS:
            raise local_error(path, error) from None

    def attempt() -> Result:
        try:
            return step()
        except OSError as error:
            ours = local_error(path, error)
            # Of other errors the second try may hide what was lost.
            ours.transient = error.errno in FULL_ERRNOS
            raise ours from None

    return policy.call(attempt)


class LocalWriter(ObjectWriter):
    """Writes a temporary file, flushes it to the disk, and renames it: readers see all or nothing.

    While the disk is full it waits for space, as `policy` says.
    """

    can_write_at = True

    def __init__(self, path: str, policy: RetryPolicy) -> None:
        self._path = path
        self._policy = policy
        self._atomic = with_space(lambda: AtomicFile(path), path, policy)
        self._file: Any = self._atomic.file
        self._size = 0
        self._written_back = 0  # bytes whose writing to the disk was requested

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes. Where the disk stays full, the StorageError names the path."""
        view = as_bytes(data)
        self._size += len(view)

        def write_rest() -> None:
            nonlocal view
            # A buffered write of more than the buffer does not say how much it wrote before an error.
            if len(view) > BUFFER_BYTES:
                self._file.flush()
                while view:
                    view = view[self._file.raw.write(view) :]
            self._file.write(view)
            view = view[len(view) :]
            if self._size - self._written_back >= WRITE_BACK_BYTES:
                self._file.flush()

        with_space(write_rest, self._path, self._policy)
        if self._size - self._written_back >= WRITE_BACK_BYTES:
            start, self._written_back = self._written_back, self._size
            self.write_back(start, self._size)

    def reserve(self, size: int) -> int:
        """The next `write` continues after the reserved bytes."""
        with_space(self._file.flush, self._path, self._policy)
        start = self._size
        self._size += size
        self._written_back = self._size
        self._file.seek(self._size)
        return start

    def write_at(self, offset: int, data: Bytes) -> None:
        """Several threads may call this at once."""
        view = data.data

        def write_rest() -> None:
            nonlocal view, offset
            while view:
                written = os.pwrite(self._file.fileno(), view, offset)
                view = view[written:]
                offset += written

        with_space(write_rest, self._path, self._policy)

    def write_back(self, start: int, stop: int) -> None:
        """Ask the system to write bytes [start, stop) to the disk."""
        # Not every system and file supports it. `commit` alone makes the bytes safe.
        with contextlib.suppress(AttributeError, OSError):
            # Linux begins to write dirty pages. It drops clean ones, but there are hardly any.
            os.posix_fadvise(self._file.fileno(), start, stop - start, os.POSIX_FADV_DONTNEED)

    def commit(self) -> None:
        """Flush, sync, rename, and sync the name."""
        try:
            # Not the sync: what it could not write may be gone, and a second one would not say so.
            with_space(self._file.flush, self._path, self._policy)
            self._atomic.commit()
            sync_folder(os.path.dirname(self._path))
        except OSError as error:
            self.abort()
            raise local_error(self._path, error) from None

    def commit_new(self) -> bool:
        """As `commit`, unless the file exists: then False, and nothing is changed.

        In every case, errors included, the temporary file is gone afterwards: nothing can be tried
        with it again. Raises UnsupportedOperation for a file system without hard links.
        """
        try:
            with_space(self._file.flush, self._path, self._policy)
            is_new = self._atomic.commit_if_absent()
            sync_folder(os.path.dirname(self._path))
            return is_new
        except OSError as error:
            if error.errno in NO_HARD_LINK:
                raise UnsupportedOperation(
                    f"{self._path}: its file system has no hard links, so a file cannot be created "
                    f"on the condition that there is none"
                ) from None
            raise local_error(self._path, error) from None

    def abort(self) -> None:
        """Remove the temporary file."""
        self._atomic.abort()


def local_error(path: str, error: OSError) -> StorageError:
    """Our error for an OSError on a local path, and whether a retry may help."""
    # Some of our errors are OSErrors too.
    if isinstance(error, StorageError):
        return error
    reason = error.strerror or str(error)
    if isinstance(error, (FileNotFoundError, NotADirectoryError)):
        return ObjectNotFoundError(
            f"{path}: no such file; check the path (a prefix is named without .bin or .idx)"
        )
    if isinstance(error, PermissionError):
        return AccessDeniedError(
            f"{path}: {reason}; check the owner and mode of the file and its folders"
        )
    limit = explain_fd_limit(error)
    if limit:
        return StorageError(f"{path}: {limit}")
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageError(f"{path}: no space left on the device; free some, or write elsewhere")
    storage_error = StorageError(f"{path}: {reason}")
    storage_error.transient = error.errno in TRANSIENT_ERRNOS
    return storage_error


def etag_of(stat: os.stat_result) -> str:
    """Size and modification time: they change with the bytes, and not with mode, link or mount."""
    return f"{stat.st_size:x}-{stat.st_mtime_ns:x}"


def _map(path: str, etag: str, known: _Mapped | None) -> _Mapped:
    """A mapping of a file as it is now: `known`, if that is the same file.

    Raises ObjectChangedError if `etag` is given, and another one's.
    """
    with _opened(path, etag) as (fd, stat):
        etag_now = etag_of(stat)
        place = (stat.st_dev, stat.st_ino)
        if known is not None and known.etag == etag_now and known.place == place:
            return known
        data = map_file(fd, stat.st_size, path)
        return _Mapped(etag=etag_now, place=place, view=memoryview(data))  # type: ignore[arg-type]


@contextmanager
def _opened(path: str, etag: str) -> Iterator[tuple[int, os.stat_result]]:
    """The descriptor and status of a file of this version. OSErrors of the block become our errors.

    Raises ObjectChangedError for another version.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            # Not by name, which may be another file by now.
            stat = os.fstat(fd)
            check_version(path, etag, etag_of(stat))
            yield fd, stat
        finally:
            os.close(fd)
    except OSError as error:
        raise local_error(path, error) from None


class _Mapping:
    """A mapped range, to which arrays refer. It is unmapped when the last array is gone."""

    __slots__ = ("__array_interface__", "__weakref__")

    def __init__(self, address: int, size: int) -> None:
        self.__array_interface__: dict[str, Any] = {
            "data": (address, True),
            "shape": (size,),
            "typestr": "|u1",
            "version": 3,
        }
        unmap = weakref.finalize(self, _libc.munmap, address, size)
        # At exit other threads may still copy from it.
        unmap.atexit = False


def map_file(fd: int, size: int, path: str | os.PathLike[str]) -> NDArray[np.uint8]:
    """The first `size` bytes of an open file, read-only, uint8 [size].

    The descriptor may be closed at once. The bytes stay mapped while this array or a view of it
    exists, even if the file is removed or replaced. If a mapped file is *shortened*, the next access
    ends the process (SIGBUS).

    path: for messages. Raises OSError if the file has fewer bytes, or cannot be mapped.
    """
    file_size = os.fstat(fd).st_size
    if file_size < size:
        reason = f"has {file_size} bytes, not the {size} that it should have"
        raise OSError(errno.EIO, reason, os.fspath(path))
    # The kernel cannot map an empty range.
    if size == 0:
        return np.empty(0, np.uint8)
    address = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
    if address == _FAILED:
        number = ctypes.get_errno()
        reason = os.strerror(number)
        if number == errno.ENOMEM:
            reason = f"cannot be mapped: {reason}. {_map_limit()}"
        raise OSError(number, reason, os.fspath(path))
    return np.asarray(_Mapping(address, size))


def _map_limit() -> str:
    """How many ranges a process may map, and what to do. A shard takes two."""
    limit = "some"
    with contextlib.suppress(OSError):
        limit = Path("/proc/sys/vm/max_map_count").read_text().strip()
    return (
        f"The kernel allows {limit} maps a process (vm.max_map_count): raise it by sysctl, or merge shards "
        "into larger ones by 'streammega convert'"
    )


@dataclass(frozen=True, kw_only=True)
class FileRange:
    """Bytes [start, stop) of a local file. etag: of the version that was opened; empty: any."""

    path: str
    start: int
    stop: int
    etag: str = ""

    @property
    def size(self) -> int:
        """Bytes."""
        return self.stop - self.start

    def part(self, low: int, high: int) -> FileRange:
        """Bytes [low, high) of it, counted from its start."""
        return replace(self, start=self.start + low, stop=self.start + high)


def read_files(ranges: Iterable[FileRange], buffer: Bytes) -> Iterator[Bytes]:
    """The bytes of ranges, one after the other, as views of `buffer`. Each overwrites the one before,
    and all but the last of a range fill the buffer.

    Raises ObjectChangedError for another version of a file, ShortReadError for one that is too
    short, StorageError.
    """
    # Adjacent ranges of one file need one opening.
    for (path, etag), of_file in itertools.groupby(
        ranges, lambda wanted: (wanted.path, wanted.etag)
    ):
        with _opened(path, etag) as (fd, _):
            for wanted in of_file:
                for place in range(wanted.start, wanted.stop, len(buffer)):
                    data = buffer[: wanted.stop - place]
                    _read(fd, path, place, data)
                    yield data


def copy_buffer(size: int = COPY_BYTES) -> Bytes:
    """A buffer for `read_files`, of at most `size` bytes. Of no bytes it is one: ranges of none, as of
    an empty sequence, are read by its steps too.
    """
    return np.empty(min(max(size, 1), COPY_BYTES), np.uint8)
