"""Files that appear whole: written under a temporary name in the same folder, then renamed."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import time
from collections.abc import Iterable

from streammega.storage.fork_lock import process_lock

_TEMPORARY = re.compile(r"\..+\.[0-9a-z_]{8,}\.partial")
_UNFINISHED = re.compile(
    r"\.(?P<local>.+)\.[0-9a-f]{12}\.partial|(?P<remote>.+)\.[0-9a-f]{32}\.partial"
)
"""A file of `temporary_name`, or of a driver whose files are renamed."""
ORPHAN_SECONDS = 86400.0
"""Seconds without a write after which a temporary file without a lock is removed.

Its writer may be on another node, whose locks are not visible here.
"""
BUFFER_BYTES = 256 << 10
"""Larger writes go past the buffer: a copy into it would cost more than the call."""
_CANNOT_SYNC = (errno.EINVAL, errno.EBADF, errno.ENOSYS, errno.EOPNOTSUPP, errno.EACCES)
"""Errors of file systems that do not sync folders, and of folders that may not be read."""
_NEW_FILE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_swept: set[str] = set()
"""Folders that this process has swept. A sweep lists the whole folder."""
_lock = process_lock()


class AtomicFile:
    """A file that shows under its name when `commit` has returned. All methods raise OSError.

    Bytes are written to `file`, which has a temporary name in the same folder until then.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.fspath(path)
        fd, self._temporary = create_beside(path)
        self.file = os.fdopen(fd, "wb", buffering=BUFFER_BYTES)

    def commit(self, *, sync: bool = True) -> None:
        """Flush, sync and rename."""
        self._flush(sync)
        # It is still open, and so locked: no other process removes it.
        os.replace(self._temporary, self._path)
        self.file.close()

    def commit_if_absent(self) -> bool:
        """As `commit`, unless something has the name: then False, and nothing is changed.

        By a hard link: that alone refuses a name that is taken and never shows half a file.
        """
        try:
            self._flush(sync=True)
            os.link(self._temporary, self._path)
        except FileExistsError:
            return False
        finally:
            self.abort()  # removes the temporary name, and the file if the link failed
        return True

    def abort(self) -> None:
        """Remove the temporary file. Never raises."""
        with contextlib.suppress(OSError):
            self.file.close()
        with contextlib.suppress(OSError):
            os.unlink(self._temporary)

    def _flush(self, sync: bool) -> None:
        self.file.flush()
        if sync:
            os.fsync(self.file.fileno())


def write_file(
    path: str | os.PathLike[str], chunks: Iterable[bytes | memoryview], *, sync: bool = True
) -> None:
    """Write a file that appears whole, or not at all. Raises OSError."""
    atomic = AtomicFile(path)
    try:
        atomic.file.writelines(chunks)
        atomic.commit(sync=sync)
    except BaseException:
        atomic.abort()
        raise


def sync_folder(path: str | os.PathLike[str]) -> None:
    """Return when the names in a folder are on the disk: after a power failure, what was renamed or
    removed before is so if anything later is there.

    Some network file systems sync no folders, and keep names in order themselves. Raises OSError.
    """
    try:
        fd = os.open(path or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise


def create_beside(path: str | os.PathLike[str]) -> tuple[int, str]:
    """(descriptor, name) of a new, empty file in the folder of `path`, which is made.

    Its mode follows the umask. It is locked while it is open. A temporary file without a lock was
    left by a killed process, and is removed. Raises OSError.
    """
    existing_folder = os.path.dirname(path) or "."
    os.makedirs(existing_folder, exist_ok=True)
    _sweep(existing_folder)
    temporary = temporary_name(path)
    # Not mkstemp: that makes files which only their owner can read, and the umask can only be read
    # by setting it.
    fd = os.open(temporary, _NEW_FILE, 0o666)
    # A file system without locks refuses; there nothing is removed either.
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return fd, temporary


def temporary_name(path: str | os.PathLike[str]) -> str:
    """A name in the folder of `path` that no other file has. Files of such names are removed when
    they are old and without a lock.
    """
    folder, name = os.path.split(os.fspath(path))
    return os.path.join(folder, f".{name}.{secrets.token_hex(6)}.partial")


def final_name(name: str) -> str | None:
    """The final name of a temporary file; None for all other names."""
    match = _UNFINISHED.fullmatch(name)
    return None if match is None else match["local"] or match["remote"]


def _sweep(folder: str) -> None:
    """Remove temporary files that killed processes left in a folder; once in a process."""
    folder = os.path.abspath(folder)
    with _lock:
        if folder in _swept:
            return
        _swept.add(folder)
    now = time.time()
    old_paths = []
    with os.scandir(folder) as files:
        for entry in files:
            with contextlib.suppress(OSError):  # removed meanwhile
                is_temporary = _TEMPORARY.fullmatch(entry.name) is not None
                if (
                    is_temporary
                    and now - entry.stat(follow_symlinks=False).st_mtime > ORPHAN_SECONDS
                ):
                    old_paths.append(entry.path)
    for path in old_paths:
        # It may be gone, belong to another user, or still be written.
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(path)
            finally:
                os.close(fd)
