"""Where the checkpoints of a run lie, and how they appear there whole: a folder on a disk, or a prefix of an object store.

    on disk     step-00000100/            the files and position.json; written as step-00000100.partial, then renamed
    elsewhere   step-00000100.json        the position, and the name of the folder of the files
                step-00000100/3f09c1a2/   the files

No object store can rename a folder. There the small object is what makes a checkpoint: it is written when all files
are there, replaced at once where the step had one, and removed before them. Every save writes to a folder of a new
name, so that nothing which an earlier save left behind, or still sends, gets among its files.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from streammega.config import StorageConfig
from streammega.errors import ObjectNotFoundError, StorageError
from streammega.storage import Store, join_url, open_store
from streammega.storage.pread import PreadStore
from streammega.storage.threads import each
from streammega.storage.urls import is_remote
from streammega.train.checkpoint_files import DamagedError, Files
from streammega.train.checkpoint_hold import Hold, hold_file, hold_object

log = logging.getLogger(__name__)

_NAME = re.compile(r"step-(\d{8})")
_FILES = re.compile(r"step-\d{8}(/[0-9a-f]{8})?")
_SET_ASIDE = re.compile(r"step-\d{8}\.(rewound|damaged)(-\d+)?")


@dataclass(frozen=True, kw_only=True)
class Found:
    """A checkpoint: its step, the name of the folder of its files, and what was written beside the tensors."""

    step: int
    name: str
    position: dict[str, Any]


class Place(Protocol):
    """Checkpoints by step. Methods are called on the first rank alone, but for `draft` and `sees`."""

    url: str
    on_disk: bool

    def prepare(self) -> None:
        """At the start of a run: finish or undo what a kill left half done."""

    def steps(self) -> list[int]:
        """Of whole checkpoints, rising."""

    def find(self, step: int) -> Found:
        """A whole checkpoint. Raises DamagedError."""

    def begin(self, step: int) -> str:
        """Make room for a checkpoint that is to be written; the name of its draft."""

    def draft(self, name: str) -> Files:
        """Where the files of a draft, or of a checkpoint that was found, lie."""

    def publish(self, step: int, name: str, position: Mapping[str, Any]) -> None:
        """Make a draft, whose files are all there, the checkpoint of its step."""

    def remove(self, step: int) -> None:
        """A checkpoint that is not wanted any more. Raises StorageError or OSError; it is gone from `steps` nevertheless."""

    def set_aside(self, step: int, why: str) -> str:
        """Take a checkpoint out of `steps` and keep it, under another name, which is returned."""

    def clean_aside(self, keep: int) -> None:
        """Remove what was set aside, but for the last `keep` of them."""

    def hold(self) -> Hold:
        """Keep other jobs out. Raises ConfigError where one is at work."""

    def leave_sign(self, name: str) -> None:
        """Write a small file."""

    def sees(self, name: str) -> bool:
        """Whether such a file is there."""

    def remove_sign(self, name: str) -> None:
        """Remove it."""


def open_place(out_dir: str, storage: StorageConfig) -> Place:
    """The checkpoints of a run in `out_dir`/checkpoints. Raises ConfigError for a URL that cannot work."""
    url = join_url(out_dir, "checkpoints")
    if is_remote(out_dir):
        store, key = open_store(url, storage)
        return Bucket(store, key)
    _, path = open_store(url, storage)
    return Folder(Path(path), storage)


class Folder:
    """Checkpoints in a folder of a disk that all ranks share. Implements `Place`."""

    on_disk = True

    def __init__(self, path: Path, storage: StorageConfig | None = None) -> None:
        self.path, self.url = path, str(path)
        # By reads: an I/O error under a map, of NFS for instance, would end the process.
        self._store = PreadStore(storage or StorageConfig())

    def prepare(self) -> None:
        """A step that was being replaced gets its old checkpoint back, unless the new one is there."""
        self.path.mkdir(parents=True, exist_ok=True)
        for old in self.path.glob("step-*.replaced*"):
            if old.with_suffix("").exists():
                _remove_tree(old)
            else:
                os.replace(old, old.with_suffix(""))

    def steps(self) -> list[int]:
        """Of the folders that bear a final name."""
        return [int(path.name.removeprefix("step-")) for path in checkpoints(self.path)]

    def find(self, step: int) -> Found:
        """By its position.json."""
        files = self.draft(_folder(step))
        url = files.url("position.json")
        return Found(step=step, name=_folder(step), position=_position(_parsed(files.read("position.json"), url), url))

    def begin(self, step: int) -> str:
        """Remove what runs left that were killed while they saved."""
        name = f"{_folder(step)}.partial"
        for pattern in ("step-*.partial", "step-*.removed*"):
            for stale in self.path.glob(pattern):
                if stale.name != name:
                    _remove_tree(stale)
        if (self.path / name).exists():
            shutil.rmtree(self.path / name)
        (self.path / name).mkdir(parents=True)
        return name

    def draft(self, name: str) -> Files:
        """A folder in the folder."""
        return Files(store=self._store, prefix=str(self.path / name))

    def publish(self, step: int, name: str, position: Mapping[str, Any]) -> None:
        """Rename. Of a step that is there already, the old folder is kept beside it until the new one bears its name."""
        draft, final = self.path / name, self.path / _folder(step)
        with open(draft / "position.json", "w", encoding="utf-8") as file:
            json.dump(position, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        _sync_folder(draft)
        old = self._free(f"{_folder(step)}.replaced")
        if final.exists():
            os.replace(final, old)
        os.replace(draft, final)
        _sync_folder(self.path)
        if old.exists():
            _remove_tree(old)

    def remove(self, step: int) -> None:
        """Rename, then remove: what bears a final name stays whole, whatever happens meanwhile."""
        removed = self._free(f"{_folder(step)}.removed")
        os.replace(self.path / _folder(step), removed)
        shutil.rmtree(removed)

    def set_aside(self, step: int, why: str) -> str:
        """Rename; a name that is taken gets a number."""
        aside = self._free(f"{_folder(step)}.{why}")
        os.replace(self.path / _folder(step), aside)
        os.utime(aside)  # when it was set aside, for clean_aside
        return str(aside)

    def clean_aside(self, keep: int) -> None:
        """By the time of their folders."""
        aside = [path for path in self.path.iterdir() if _SET_ASIDE.fullmatch(path.name)]
        for path in sorted(aside, key=lambda path: path.stat().st_mtime)[:-keep]:
            _remove_tree(path)

    def leave_sign(self, name: str) -> None:
        """A file."""
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / name).write_text("seen by all ranks\n", encoding="utf-8")

    def sees(self, name: str) -> bool:
        """Whether the file is there."""
        return (self.path / name).exists()

    def remove_sign(self, name: str) -> None:
        """The file goes."""
        (self.path / name).unlink(missing_ok=True)

    def hold(self) -> Hold:
        """By a lock of the kernel's on a file beside the checkpoints."""
        return hold_file(self.path.parent / ".lock")

    def _free(self, name: str) -> Path:
        return self.path / _free_name(name, {path.name for path in self.path.iterdir()})


class Bucket:
    """Checkpoints under a prefix of an object store. Implements `Place`."""

    on_disk = False

    def __init__(self, store: Store, prefix: str) -> None:
        self._store, self._prefix = store, prefix
        self.url = store.url(prefix)

    def prepare(self) -> None:
        """Nothing is ever half done: the small object is there or not."""

    def steps(self) -> list[int]:
        """Of the small objects."""
        return sorted(int(name.removeprefix("step-")) for name in self._records() if _NAME.fullmatch(name))

    def find(self, step: int) -> Found:
        """By its small object."""
        record = self._record(_folder(step))
        return Found(step=step, name=record["files"], position=_position(record.get("position"), self._url(_folder(step))))

    def begin(self, step: int) -> str:
        """A new name. Files that no small object names are of saves that were killed, or of checkpoints that are gone."""
        try:
            self._remove_orphans()
        except (StorageError, DamagedError) as error:
            log.warning("%s: what killed saves left there could not be removed: %s", self.url, error)
        return f"{_folder(step)}/{secrets.token_hex(4)}"

    def draft(self, name: str) -> Files:
        """A prefix below the prefix."""
        return Files(store=self._store, prefix=f"{self._prefix}/{name}")

    def publish(self, step: int, name: str, position: Mapping[str, Any]) -> None:
        """Write the small object."""
        record = {"version": 1, "step": step, "files": name, "position": dict(position)}
        self._put(f"{_folder(step)}.json", json.dumps(record, indent=1).encode())

    def remove(self, step: int) -> None:
        """The small object first: without it there is no checkpoint."""
        self._remove(_folder(step))

    def set_aside(self, step: int, why: str) -> str:
        """Another small object names the files; then the first one goes."""
        name = _free_name(f"{_folder(step)}.{why}", set(self._records()))
        try:
            record = self._record(_folder(step))
        except DamagedError:
            record = {"version": 1, "step": step, "files": _folder(step)}  # all that were ever written for the step
        self._put(f"{name}.json", json.dumps(record | {"set_aside": time.time()}, indent=1).encode())
        self._store.delete(f"{self._prefix}/{_folder(step)}.json")
        return self._url(name)

    def clean_aside(self, keep: int) -> None:
        """By the times in their small objects."""
        aside = [name for name in self._records() if _SET_ASIDE.fullmatch(name)]
        times = {name: float(self._record(name).get("set_aside", 0.0)) for name in aside}
        for name in sorted(aside, key=lambda name: times[name])[:-keep]:
            self._remove(name)

    def leave_sign(self, name: str) -> None:
        """An object."""
        self._put(name, b"seen by all ranks\n")

    def sees(self, name: str) -> bool:
        """Whether the object is there."""
        try:
            self._store.info(f"{self._prefix}/{name}")
        except ObjectNotFoundError:
            return False
        return True

    def remove_sign(self, name: str) -> None:
        """The object goes."""
        self._store.delete(f"{self._prefix}/{name}")

    def hold(self) -> Hold:
        """By a small object beside the checkpoints that is renewed all the time."""
        return hold_object(self._store, f"{self._prefix.rpartition('/')[0]}/lock.json".lstrip("/"))

    def _records(self) -> list[str]:
        """Names of all small objects, without their suffix."""
        listed = self._store.list(f"{self._prefix}/step-", recursive=False)
        names = [item.key.rpartition("/")[2] for item in listed]
        return [name.removesuffix(".json") for name in names if name.endswith(".json")]

    def _url(self, name: str) -> str:
        return self._store.url(f"{self._prefix}/{name}.json")

    def _record(self, name: str) -> dict[str, Any]:
        record = _parsed(Files(store=self._store, prefix=self._prefix).read(f"{name}.json"), self._url(name))
        folder = record.get("files") if isinstance(record, dict) else None
        # What it names is removed with it: it must be a folder of ours.
        if not isinstance(folder, str) or not _FILES.fullmatch(folder):
            raise DamagedError(f"{self._url(name)}: names {folder!r} as the folder of its files")
        return dict(record)

    def _put(self, name: str, data: bytes) -> None:
        writer = self._store.open_writer(f"{self._prefix}/{name}")
        try:
            writer.write(data)
            writer.commit()
        except BaseException:
            writer.abort()
            raise

    def _remove(self, name: str) -> None:
        folder = self._record(name)["files"]
        self._store.delete(f"{self._prefix}/{name}.json")
        self._delete([item.key for item in self._store.list(f"{self._prefix}/{folder}/")])

    def _remove_orphans(self) -> None:
        kept = [f"/{self._record(name)['files']}/" for name in self._records()]
        stored = [item.key for item in self._store.list(f"{self._prefix}/step-") if not item.key.endswith(".json")]
        self._delete([key for key in stored if not any(folder in key for folder in kept)])

    def _delete(self, keys: list[str]) -> None:
        """As many files as the run that wrote them had ranks: some at a time."""
        if keys:
            each(self._store.delete, keys, 16)


def checkpoints(folder: Path) -> list[Path]:
    """Whole checkpoints of a folder on a disk, oldest first."""
    return sorted(path for path in folder.glob("step-*") if _NAME.fullmatch(path.name))


def _folder(step: int) -> str:
    return f"step-{step:08d}"


def _free_name(name: str, taken: set[str]) -> str:
    numbered = (f"{name}-{number}" for number in range(2, 10**6))
    return name if name not in taken else next(other for other in numbered if other not in taken)


def _parsed(text: bytes, url: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise DamagedError(f"{url}: cannot be read ({error})") from None


def _position(position: Any, url: str) -> dict[str, Any]:
    try:
        return dict(position) | {"step": int(position["step"]), "data": dict(position["data"])}
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedError(f"{url}: holds no position of a run ({error})") from None


def _remove_tree(path: Path) -> None:
    """What nobody needs any more: one that cannot be removed is no reason to end a run, and is tried again at later saves."""
    try:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    except OSError as error:
        log.warning("%s: cannot be removed (%s); it is not used any more, remove it by hand", path, error.strerror or error)


def _sync_folder(path: Path) -> None:
    """The names in a folder reach the disk as well as the files do."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:  # some network file systems sync no folders
        log.debug("%s: cannot be synced: %s", path, error)
    finally:
        os.close(fd)
