"""Local files by mmap: reads are views of the page cache, without a copy."""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from streammega.errors import AccessDeniedError, ObjectNotFoundError, StorageError
from streammega.storage.base import Buffer, Bytes, ObjectInfo, Span, checked, fill
from streammega.storage.descriptors import blame_limit

LARGE_BYTES = 256 << 10


class LocalStore:
    """The local disk. Keys are file paths; implements `storage.base.Store`."""

    def __init__(self) -> None:
        self._maps: dict[str, memoryview] = {}
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, object]:
        return {}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__init__()  # type: ignore[misc]

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
        return ObjectInfo(key=key, size=stat.st_size, etag=f"{stat.st_size:x}-{stat.st_mtime_ns:x}")

    def read_ranges(self, key: str, starts: Sequence[int], stops: Sequence[int]) -> list[Buffer]:
        """Views of the mapped file; no bytes move until they are used."""
        view = self.view(key)
        return [checked(key, a, b, view[a:b]) for a, b in zip(starts, stops, strict=True)]

    def read_into(self, key: str, spans: Sequence[Span], outs: Sequence[Bytes], etag: str = "") -> None:
        """A copy out of the mapped file."""
        fill(key, spans, [self.view(key)[a:b] for a, b in spans], outs)

    def view(self, key: str) -> memoryview:
        """The whole file as a read-only memoryview of bytes (mapped once per process)."""
        with self._lock:
            if key not in self._maps:
                self._maps[key] = _map_file(key)
            return self._maps[key]

    def list(self, prefix: str) -> list[ObjectInfo]:
        """Files whose path starts with `prefix`, at any depth."""
        root = Path(prefix) if os.path.isdir(prefix) else Path(prefix).parent
        found = (str(path) for path in root.rglob("*") if path.is_file())
        return [self.info(path) for path in sorted(found) if path.startswith(prefix)]

    def open_writer(self, key: str) -> LocalWriter:
        """A writer into a temporary file beside the target, renamed by `commit`."""
        return LocalWriter(key)

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


class LocalWriter:
    """Writes beside the target, flushes to disk, then renames: readers see all or nothing."""

    def __init__(self, path: str) -> None:
        self._path = path
        try:
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            fd, self._temporary = tempfile.mkstemp(
                prefix=f".{os.path.basename(path)}.", suffix=".partial", dir=os.path.dirname(path) or "."
            )
        except OSError as error:
            raise local_error(path, error) from None
        self._file: Any = os.fdopen(fd, "wb", buffering=1 << 20)

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes; a full disk is a StorageError that names the path."""
        try:
            if len(data) < LARGE_BYTES:
                self._file.write(data)
                return
            self._file.flush()  # a large write needs no copy into the buffer
            view = memoryview(data).cast("B")
            while view:
                view = view[self._file.raw.write(view) :]
        except OSError as error:
            raise local_error(self._path, error) from None

    def commit(self) -> None:
        """Flush, sync and rename."""
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            os.chmod(self._temporary, 0o666 & ~_umask())  # mkstemp made it private
            os.replace(self._temporary, self._path)
        except OSError as error:
            self.abort()
            raise local_error(self._path, error) from None

    def abort(self) -> None:
        """Remove the temporary file."""
        try:
            self._file.close()
        except OSError:
            pass
        try:
            os.unlink(self._temporary)
        except OSError:
            pass


_umask_lock = threading.Lock()


def _umask() -> int:
    """That of this process, which can only be read by setting it."""
    with _umask_lock:
        umask = os.umask(0o022)
        os.umask(umask)
        return umask


def local_error(path: str, error: OSError) -> StorageError:
    """The streammega error for an OSError on a local path."""
    reason = error.strerror or str(error)
    if isinstance(error, (FileNotFoundError, NotADirectoryError)):
        return ObjectNotFoundError(f"{path}: no such file; check the path (a prefix is named without .bin or .idx)")
    if isinstance(error, PermissionError):
        return AccessDeniedError(f"{path}: {reason}; check the owner and mode of the file and its folders")
    limit = blame_limit(error)
    if limit:
        return StorageError(f"{path}: {limit}")
    if error.errno == 28:
        return StorageError(f"{path}: no space left on the device; free some, or write elsewhere")
    return StorageError(f"{path}: {reason}")


def _map_file(path: str) -> memoryview:
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                return memoryview(b"")  # an empty file cannot be mapped
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except OSError as error:
        raise local_error(path, error) from None
