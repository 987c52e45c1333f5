"""A disk that is recorded, and what a crash may leave of it; a disk that fails at one operation.

`Recorder` replaces the functions of `os` that change files below a folder. One run is recorded. From
the record, `states_after` makes what a dead process or a power failure may leave after each
operation: data and names that were not synced may be lost, cut, filled with zeros, or persisted in
another order. That is how CrashMonkey, ALICE and SQLite's test VFS do it.

A name is synced by `fsync` of its folder, data by `fsync` of the file. A rename is atomic.
"""

from __future__ import annotations

import builtins
import errno
import fcntl
import hashlib
import io
import os
import shutil
import stat
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

POLICIES = ("died", "torn", "lost", "emptied", "zeroed", "cut", "nameless", "reordered")
"""What is left of operations that were not synced.

| policy | data | names |
|---|---|---|
| died | all | all: the process died, the machine did not |
| torn | all, half of the last write | all |
| lost | none | none |
| emptied | none | all |
| zeroed | zeros of the right length | all |
| cut | the first half | all |
| nameless | all | none |
| reordered | of each file the last write only | of each folder the last change only |
"""
LYING_POLICIES = ("emptied", "zeroed", "cut")
"""Those of a disk that does nothing when it is told to sync."""
WRITES = os.O_WRONLY | os.O_RDWR


@dataclass(eq=False)
class File:
    """A file, with the bytes and the time of modification that it had at the start."""

    data: bytes = b""
    time: int = 0


@dataclass
class Change:
    """One operation. name: "write", "fsync", "create", "rename", "link", "unlink", "mkdir", "rmdir",
    or of a bucket "put", "delete".

    paths: within the folder. file: what is written, created or synced.
    """

    name: str
    paths: tuple[str, ...] = ()
    file: File | None = None
    offset: int = 0
    data: bytes = b""
    time: int = 0
    etag: str = ""

    def __str__(self) -> str:
        return f"{self.name} {' '.join(self.paths)} {len(self.data) or ''}".strip()


OF_BUCKETS = ("put", "delete")
NAMES = ("create", "rename", "link", "unlink", "mkdir", "rmdir")


DISK_FAULTS = ("EIO", "ENOSPC", "full", "short")
"""EIO or ENOSPC of one operation; ENOSPC of all from there on; half a write, then ENOSPC."""
BUCKET_FAULTS = ("refused", "unheard", "denied")
"""An error of one request, which did nothing; which was done; and the answer to a write that was
done that its condition did not hold.
"""


class Recorder:
    """Records what changes below a folder, and in a bucket that reports to `note`.

    fault: (number of the operation, its kind). All others succeed.
    """

    def __init__(self, root: Path, fault: tuple[int, str] | None = None) -> None:
        self.root = os.path.realpath(root)
        self.changes: list[Change] = []
        self.initial = read_tree(Path(root))
        self.fault = fault
        self.count = 0
        self.can_fail: list[tuple[str, ...]] = []
        """How each operation could have failed."""
        self._real: dict[str, Any] = {}
        self._files: dict[int, File] = {}
        self._lock = threading.RLock()
        for path, file in self.initial.items():
            self._files[os.stat(os.path.join(self.root, path)).st_ino] = file

    # --- faults ---

    def begin(self, kinds: tuple[str, ...]) -> str:
        """Count an operation that can fail in these ways; how it fails, or nothing."""
        number = self.count
        self.count += 1
        self.can_fail.append(kinds)
        if self.fault is None or self.fault[1] not in kinds:
            return ""
        at, kind = self.fault
        return kind if number == at or (kind == "full" and number > at) else ""

    def _check(self, path: str, *, takes_space: bool, is_write: bool = False) -> str:
        kinds = ("EIO", "ENOSPC", "full") if takes_space else ("EIO",)
        kind = self.begin((*kinds, "short") if is_write else kinds)
        if kind in ("ENOSPC", "full"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        if kind == "EIO":
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return kind

    # --- what is recorded ---

    @contextmanager
    def recording(self) -> Iterator[Recorder]:
        """Within this, functions of `os` and `open` are recorded."""
        real_open = builtins.open

        def open_file(
            file: Any, mode: str = "r", buffering: int = -1, *rest: Any, **named: Any
        ) -> Any:
            is_path = isinstance(file, (str, os.PathLike))
            if not set(mode) & set("wax+") or (is_path and self._inside(file) is None):
                return real_open(file, mode, buffering, *rest, **named)
            if is_path:
                flags = os.O_RDWR if "+" in mode else os.O_WRONLY
                flags |= {"w": os.O_CREAT | os.O_TRUNC, "a": os.O_CREAT | os.O_APPEND,
                          "x": os.O_CREAT | os.O_EXCL, "r": 0}[mode[0]]  # fmt: skip
                file = self._open(file, flags | os.O_CLOEXEC, 0o666)
            return self._fdopen(file, mode, buffering, *rest, **named)

        replaced = {
            "open": self._open, "fdopen": self._fdopen, "write": self._write_end,
            "pwrite": self._write, "fsync": self._fsync, "fdatasync": self._fsync,
            "rename": self._rename, "replace": self._rename, "link": self._link,
            "unlink": self._unlink, "remove": self._unlink, "mkdir": self._mkdir,
            "rmdir": self._rmdir, "ftruncate": self._ftruncate, "truncate": self._ftruncate,
            "utime": self._utime,
        }  # fmt: skip
        self._real = {name: getattr(os, name) for name in replaced}
        with ExitStack() as stack:
            for name, function in replaced.items():
                stack.enter_context(mock.patch.object(os, name, function))
            stack.enter_context(mock.patch.object(builtins, "open", open_file))
            stack.enter_context(mock.patch.object(io, "open", open_file))
            yield self

    def note(self, change: Change) -> None:
        """Add a change to the record."""
        with self._lock:
            self.changes.append(change)

    def _inside(self, path: Any, folder: int | None = None) -> str | None:
        """A path within the folder; None for others."""
        if isinstance(path, int):
            path = os.readlink(f"/proc/self/fd/{path}")
        name = os.fsdecode(path)
        if folder is not None:
            name = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), name)
        name = os.path.abspath(name)
        parent = os.path.realpath(os.path.dirname(name))
        name = os.path.join(parent, os.path.basename(name))
        return name[len(self.root) + 1 :] if name.startswith(f"{self.root}/") else None

    def _file_of(self, descriptor: int) -> File | None:
        return self._files.get(os.fstat(descriptor).st_ino)

    def _open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        name = self._inside(path, dir_fd)
        if name is None or not flags & (WRITES | os.O_CREAT):
            return int(self._real["open"](path, flags, mode, dir_fd=dir_fd))
        with self._lock:
            is_new = not os.path.lexists(os.path.join(self.root, name))
            if is_new and flags & os.O_CREAT:
                self._check(os.fsdecode(path), takes_space=True)
            descriptor: int = self._real["open"](path, flags, mode, dir_fd=dir_fd)
            status = os.fstat(descriptor)
            if is_new:
                file = File(time=status.st_mtime_ns)
                self._files[status.st_ino] = file
                self.note(Change("create", (name,), file, time=status.st_mtime_ns))
            elif flags & os.O_TRUNC:
                self._truncated(descriptor, 0)
            return descriptor

    def _fdopen(
        self, descriptor: int, mode: str = "r", buffering: int = -1, *rest: Any, **named: Any
    ) -> Any:
        if not set(mode) & set("wax+") or self._inside(descriptor) is None:
            return self._real["fdopen"](descriptor, mode, buffering, *rest, **named)
        recorder = self

        class Raw(io.FileIO):
            def write(self, data: Any) -> int:
                return recorder._write_end(self.fileno(), data)

        raw = Raw(
            descriptor, mode.replace("b", "").replace("t", ""), closefd=named.pop("closefd", True)
        )
        if buffering == 0:
            return raw
        size = buffering if buffering > 1 else io.DEFAULT_BUFFER_SIZE
        kind: Any = io.BufferedRandom if "+" in mode else io.BufferedWriter
        buffered = kind(raw, size)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, *rest, **named)

    def _write_end(self, descriptor: int, data: Any) -> int:
        """Write at the place of the descriptor."""
        if self._file_of(descriptor) is None:
            return int(self._real["write"](descriptor, data))
        with self._lock:
            offset = os.lseek(descriptor, 0, os.SEEK_CUR)
            if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_APPEND:
                offset = os.fstat(descriptor).st_size
            written = self._write(descriptor, data, offset)
            os.lseek(descriptor, offset + written, os.SEEK_SET)
            return written

    def _write(self, descriptor: int, data: Any, offset: int) -> int:
        file = self._file_of(descriptor)
        if file is None:
            return int(self._real["pwrite"](descriptor, data, offset))
        with self._lock:
            stored = bytes(data)
            path = os.readlink(f"/proc/self/fd/{descriptor}")
            is_short = self._check(path, takes_space=True, is_write=True) == "short"
            if is_short and len(stored) > 1:
                stored = stored[: len(stored) // 2]
                # What is left of it does not fit.
                assert self.fault is not None
                self.fault = (self.count, "ENOSPC")
            written: int = self._real["pwrite"](descriptor, stored, offset)
            time = os.fstat(descriptor).st_mtime_ns
            name = self._inside(descriptor) or path
            self.note(Change("write", (name,), file, offset, stored[:written], time))
            return written

    def _truncated(self, descriptor: int, size: int) -> None:
        file = self._file_of(descriptor)
        if file is not None:
            time = os.fstat(descriptor).st_mtime_ns
            self.note(Change("truncate", (self._inside(descriptor) or "",), file, size, time=time))

    def _ftruncate(self, target: Any, size: int) -> None:
        descriptor = target if isinstance(target, int) else self._real["open"](target, os.O_RDWR)
        with self._lock:
            self._real["ftruncate"](descriptor, size)
            self._truncated(descriptor, size)
        if not isinstance(target, int):
            os.close(descriptor)

    def _fsync(self, descriptor: int) -> None:
        path = self._inside(descriptor)
        is_root = os.readlink(f"/proc/self/fd/{descriptor}") == self.root
        if path is None and not is_root:
            return
        with self._lock:
            self._check(path or "", takes_space=False)
            # The number of a file that was removed may be a folder's now.
            is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
            file = None if is_folder else self._file_of(descriptor)
            self.note(Change("fsync", (path or "",), file))

    def _utime(self, path: Any, *rest: Any, **named: Any) -> None:
        self._real["utime"](path, *rest, **named)
        if self._inside(path) is not None:
            status = os.stat(path)
            file = self._files.get(status.st_ino)
            if file is not None:
                self.note(
                    Change("utime", (self._inside(path) or "",), file, time=status.st_mtime_ns)
                )

    def _rename(self, source: Any, target: Any, **folders: Any) -> None:
        self._change_names(
            "rename", "replace", [source, target], [folders.get("src_dir_fd"), folders.get("dst_dir_fd")], **folders
        )  # fmt: skip

    def _link(self, source: Any, target: Any, **named: Any) -> None:
        self._change_names("link", "link", [source, target], [None, None], **named)

    def _unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._change_names("unlink", "unlink", [path], [dir_fd], dir_fd=dir_fd)

    def _mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        self._change_names("mkdir", "mkdir", [path], [dir_fd], mode=mode, dir_fd=dir_fd)

    def _rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._change_names("rmdir", "rmdir", [path], [dir_fd], dir_fd=dir_fd)

    def _change_names(
        self, name: str, real: str, paths: list[Any], folders: list[int | None], **named: Any
    ) -> None:
        inside = [self._inside(path, folder) for path, folder in zip(paths, folders, strict=True)]
        within = [path for path in inside if path is not None]
        with self._lock:
            if len(within) == len(paths):
                self._check(os.fsdecode(paths[-1]), takes_space=name not in ("unlink", "rmdir"))
            self._real[real](*paths, **named)
            if len(within) == len(paths):
                self.note(Change(name, tuple(within)))


# --- what a crash leaves ---


def read_tree(root: Path) -> dict[str, File]:
    """All files below a folder, by path; all of them synced."""
    by_inode: dict[int, File] = {}
    found: dict[str, File] = {}
    for folder, _, names in os.walk(root):
        for name in names:
            path = os.path.join(folder, name)
            status = os.stat(path)
            if status.st_ino not in by_inode:
                data = Path(path).read_bytes()
                by_inode[status.st_ino] = File(data, status.st_mtime_ns)
            found[os.path.relpath(path, root)] = by_inode[status.st_ino]
    return found


Tree = dict[str, "tuple[bytes, int, int]"]
"""(bytes, time of modification, number of the file: links have the same) by path."""


@dataclass
class _Content:
    """The bytes of a file while changes are applied. last: the write that came last, if unsynced."""

    data: bytearray
    time: int
    synced: bytes
    synced_time: int
    last: tuple[int, bytes] | None = None

    def write(self, offset: int, stored: bytes) -> None:
        if len(self.data) < offset:
            self.data.extend(bytes(offset - len(self.data)))
        self.data[offset : offset + len(stored)] = stored
        self.last = (offset, stored)

    def sync(self) -> None:
        self.synced = bytes(self.data)
        self.synced_time = self.time
        self.last = None

    def left(self, policy: str) -> tuple[bytes, int]:
        """(bytes, time of modification) after a crash."""
        data = bytes(self.data)
        if self.last is None and data == self.synced:
            return data, self.time
        synced = self.synced
        if policy in ("lost", "emptied"):
            return synced, self.synced_time
        if policy == "cut":
            return synced + data[len(synced) : (len(synced) + len(data)) // 2], self.time
        if policy in ("zeroed", "reordered"):
            left = bytearray(synced[: len(data)] + bytes(max(0, len(data) - len(synced))))
            if policy == "reordered" and self.last is not None:
                offset, stored = self.last
                left[offset : offset + len(stored)] = stored
            return bytes(left), self.time
        return data, self.time


def state_after(recorder: Recorder, count: int, policy: str, *, lies: bool = False) -> Tree:
    """What is on the disk after `count` changes and a crash.

    lies: `fsync` has done nothing.
    """
    changes = [change for change in recorder.changes[:count] if change.name not in OF_BUCKETS]
    contents: dict[int, _Content] = {}

    def of(file: File) -> _Content:
        if id(file) not in contents:
            contents[id(file)] = _Content(
                bytearray(file.data), file.time, bytes(file.data), file.time
            )
        return contents[id(file)]

    synced_folders: dict[str, int] = {}
    for number, change in enumerate(changes):
        if change.name == "fsync":
            if lies:
                continue
            if change.file is None:
                synced_folders[change.paths[0]] = number
            else:
                of(change.file).sync()
        elif change.file is not None and change.name not in NAMES:
            content = of(change.file)
            content.time = change.time
            if change.name == "write":
                is_torn = policy == "torn" and number == len(changes) - 1
                content.write(change.offset, change.data[: len(change.data) // (1 + is_torn)])
            elif change.name == "truncate":
                del content.data[change.offset :]
                content.write(change.offset, b"")
    names = dict(recorder.initial)
    whole = dict(recorder.initial)
    """Names without a crash."""
    for number in range(len(changes)):
        if changes[number].name in NAMES:
            if is_persisted(changes, number, synced_folders, policy):
                apply(names, whole, changes[number])
            apply(whole, whole, changes[number])
    tree: Tree = {}
    for path, file in names.items():
        tree[path] = (*of(file).left(policy), id(file))
    return tree


def is_persisted(
    changes: list[Change], number: int, synced_folders: dict[str, int], policy: str
) -> bool:
    """Whether a change of names outlives a crash."""
    if policy not in ("lost", "nameless", "reordered"):
        return True
    folders = {os.path.dirname(path) for path in changes[number].paths}
    if any(synced_folders.get(folder, -1) > number for folder in folders):
        return True
    if policy != "reordered":
        return False
    later = (change for change in changes[number + 1 :] if change.name in NAMES)
    return not any(folders & {os.path.dirname(path) for path in change.paths} for change in later)


def apply(names: dict[str, File], whole: dict[str, File], change: Change) -> None:
    """Apply a change to `names`. whole: all names before it, whichever of them were persisted."""
    if change.name == "create":
        assert change.file is not None
        names[change.paths[0]] = change.file
    elif change.name == "unlink":
        names.pop(change.paths[0], None)
    elif change.name in ("link", "rename"):
        source, target = change.paths
        if source in whole:
            file = whole[source]
            if change.name == "rename":
                names.pop(source, None)
            names[target] = file
        else:  # a folder
            for path in [path for path in names if path.startswith(f"{source}/")]:
                names[target + path[len(source) :]] = names.pop(path)


def write_tree(root: Path, tree: Tree) -> None:
    """Make a folder hold these files and no others."""
    for path in root.iterdir():
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    written: dict[int, Path] = {}
    for name, (data, time, number) in tree.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if number in written:
            os.link(written[number], path)
            continue
        path.write_bytes(data)
        os.utime(path, ns=(time, time))
        written[number] = path


def digest_of(tree: Tree) -> str:
    """A digest of names and bytes, by which equal states are found."""
    digest = hashlib.blake2b()
    for name in sorted(tree):
        data, time, number = tree[name]
        first = min(other for other in tree if tree[other][2] == number)
        digest.update(f"{name} {len(data)} {time} {first}\n".encode())
        digest.update(data)
    return digest.hexdigest()
