"""Local files by mmap: reads are views of the page cache, without a copy."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streammega.errors import AccessDeniedError, ObjectNotFoundError, StorageError
from streammega.storage.atomic_file import create_beside
from streammega.storage.backends.mapping import map_file
from streammega.storage.etags import check_version
from streammega.storage.fd_limit import blame_limit
from streammega.storage.fork_lock import process_lock
from streammega.storage.store import Buffer, Bytes, ObjectInfo, Span, checked, fill

LARGE_BYTES = 256 << 10
"""Writes from this size on go past the buffer: a copy into it would cost more than the call."""
WRITE_BACK_BYTES = 8 << 20
"""After so many bytes the disk is told to begin with them, which it then does beside the writing of
the next ones: `commit` waits for the last of them, not for all. Fewer would cut the disk's requests
up; of many more, too much is left to wait for.
"""


@dataclass(frozen=True, kw_only=True)
class _Mapped:
    """A mapped file: its ETag and place on the disk when it was mapped, and its bytes."""

    etag: str
    place: tuple[int, int]
    view: memoryview


class LocalStore:
    """The local disk. Keys are file paths; implements `storage.store.Store`."""

    def __init__(self) -> None:
        self._maps: dict[str, _Mapped] = {}
        self._lock = process_lock()

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
        return ObjectInfo(key=key, size=stat.st_size, etag=etag_of(stat))

    def read_ranges(
        self, key: str, starts: Sequence[int], stops: Sequence[int], etag: str = ""
    ) -> list[Buffer]:
        """Views of the mapped file; no bytes move until they are used."""
        view = self.view(key, etag)
        bodies = []
        for start, stop in zip(starts, stops, strict=True):
            bodies.append(checked(key, start, stop, view[start:stop]))
        return bodies

    def read_into(
        self, key: str, spans: Sequence[Span], outs: Sequence[Bytes], etag: str = ""
    ) -> None:
        """A copy out of the mapped file."""
        view = self.view(key, etag)
        bodies = [view[start:stop] for start, stop in spans]
        fill(key, spans, bodies, outs)

    def view(self, key: str, etag: str = "") -> memoryview:
        """The whole file, read-only: the one that had `etag` when it was opened, mapped once.

        Without an ETag, as it is now. A file that was renamed over stays what it was, where it is
        mapped already. Raises ObjectChangedError where it is not, so what is mapped is always what
        was opened; ObjectNotFoundError, AccessDeniedError, StorageError.
        """
        # Two threads that map the same file would each check and map it.
        with self._lock:
            mapped = self._maps.get(key)
            if mapped is None or not etag or mapped.etag != etag:
                mapped = _map(key, etag, mapped)
                self._maps[key] = mapped
            return mapped.view

    def unmap(self) -> None:
        """Let go of all files. One is unmapped when nobody uses a view of it any more, and mapped
        again when it is read.
        """
        with self._lock:
            self._maps.clear()

    def list(self, prefix: str, recursive: bool = True) -> list[ObjectInfo]:
        """Files whose path starts with `prefix`: at any depth, or only those with no slash after
        it.
        """
        paths = _files_below(prefix) if recursive else _files_beside(prefix)
        wanted = sorted(path for path in paths if path.startswith(prefix))
        return [self.info(path) for path in wanted]

    def open_writer(self, key: str) -> LocalWriter:
        """A writer into a temporary file beside the target, renamed by `commit`."""
        return LocalWriter(key)

    def create(self, key: str, data: bytes) -> bool:
        """Write a small file where none is, whole; False if one is there. Of several at once one
        does: by a hard link, which alone refuses a name that is taken and never shows half a file.
        """
        writer = LocalWriter(key)
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


def _files_below(prefix: str) -> list[str]:
    root = Path(prefix) if os.path.isdir(prefix) else Path(prefix).parent
    return [str(path) for path in root.rglob("*") if path.is_file()]


def _files_beside(prefix: str) -> list[str]:
    folder = os.path.dirname(prefix) or "."
    try:
        with os.scandir(folder) as entries:
            return [entry.path for entry in entries if entry.is_file()]
    except FileNotFoundError:
        return []


class LocalWriter:
    """Writes beside the target, flushes to disk, then renames: readers see all or nothing."""

    def __init__(self, path: str) -> None:
        self._path = path
        try:
            fd, self._temporary = create_beside(path)
        except OSError as error:
            raise local_error(path, error) from None
        self._file: Any = os.fdopen(fd, "wb", buffering=1 << 20)
        self._size = 0
        self._written_back = 0  # bytes that the disk was told to begin with

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes; a full disk is a StorageError that names the path."""
        try:
            if len(data) < LARGE_BYTES:
                self._file.write(data)
            else:
                self._write_large(memoryview(data).cast("B"))
            self._size += len(data)
            if self._size - self._written_back >= WRITE_BACK_BYTES:
                self._write_back()
        except OSError as error:
            raise local_error(self._path, error) from None

    def _write_large(self, view: memoryview) -> None:
        self._file.flush()
        # A call writes 2 GiB at most.
        while view:
            written = self._file.raw.write(view)
            view = view[written:]

    def _write_back(self) -> None:
        """Have the disk begin with what was written since this was called last."""
        self._file.flush()
        start = self._written_back
        self._written_back = self._size
        self.write_back(start, self._size)

    def reserve(self, size: int) -> int:
        """As of `PlacedWriter`: what is written next lies behind that room."""
        try:
            self._file.flush()
            start = self._size
            self._size += size
            self._written_back = self._size
            self._file.seek(self._size)
            return start
        except OSError as error:
            raise local_error(self._path, error) from None

    def write_at(self, offset: int, data: Bytes) -> None:
        """As of `PlacedWriter`: by several threads at once, if they like."""
        view = data.data
        try:
            while view:
                written = os.pwrite(self._file.fileno(), view, offset)
                view = view[written:]
                offset += written
        except OSError as error:
            raise local_error(self._path, error) from None

    def write_back(self, start: int, stop: int) -> None:
        """Have the disk begin with bytes [start, stop), which are written."""
        # Not on every system, nor of every file; the bytes are safe by `commit` alone.
        with contextlib.suppress(AttributeError, OSError):
            # "Not needed": Linux begins to write what is dirty, and drops what is on the disk
            # already, which just after writing is next to nothing.
            os.posix_fadvise(self._file.fileno(), start, stop - start, os.POSIX_FADV_DONTNEED)

    def commit(self) -> None:
        """Flush, sync and rename."""
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            # While it is open, and so locked: nobody takes it for an orphan.
            os.replace(self._temporary, self._path)
            self._file.close()
        except OSError as error:
            self.abort()
            raise local_error(self._path, error) from None

    def commit_new(self) -> bool:
        """As `commit`, unless something bears the name: then False, and nothing is changed."""
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            os.link(self._temporary, self._path)
        except FileExistsError:
            return False
        except OSError as error:
            raise local_error(self._path, error) from None
        finally:
            self.abort()  # the other name of the file, or all of it
        return True

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


def local_error(path: str, error: OSError) -> StorageError:
    """The streammega error for an OSError on a local path."""
    reason = error.strerror or str(error)
    if isinstance(error, (FileNotFoundError, NotADirectoryError)):
        return ObjectNotFoundError(
            f"{path}: no such file; check the path (a prefix is named without .bin or .idx)"
        )
    if isinstance(error, PermissionError):
        return AccessDeniedError(
            f"{path}: {reason}; check the owner and mode of the file and its folders"
        )
    limit = blame_limit(error)
    if limit:
        return StorageError(f"{path}: {limit}")
    if error.errno == errno.ENOSPC:
        return StorageError(f"{path}: no space left on the device; free some, or write elsewhere")
    return StorageError(f"{path}: {reason}")


def etag_of(stat: os.stat_result) -> str:
    """Size and modification time.

    They change with the bytes, and with nothing else (a mode, a link, another mount).
    """
    return f"{stat.st_size:x}-{stat.st_mtime_ns:x}"


def _map(path: str, etag: str, known: _Mapped | None) -> _Mapped:
    """A file as it is now; `known` where that is the same.

    Raises ObjectChangedError if `etag` is given, and another one's.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise local_error(path, error) from None
    try:
        # Of the very file that is mapped: its name may stand for another one by now.
        stat = os.fstat(fd)
        etag_now = etag_of(stat)
        check_version(path, etag, etag_now)
        place = (stat.st_dev, stat.st_ino)
        if known is not None and known.etag == etag_now and known.place == place:
            return known
        data = map_file(fd, stat.st_size, path)
        return _Mapped(etag=etag_now, place=place, view=memoryview(data))  # type: ignore[arg-type]
    except OSError as error:
        raise local_error(path, error) from None
    finally:
        os.close(fd)
