"""Objects of a bucket as fsspec's files, for those who read by fsspec: corpora that are converted."""

from __future__ import annotations

import io
from typing import Any

from fsspec.spec import AbstractFileSystem

from streammega.errors import AccessDeniedError, ObjectNotFoundError
from streammega.storage.object_file import open_object
from streammega.storage.store import ObjectInfo, Store


class StoreFiles(AbstractFileSystem):  # type: ignore[misc]
    """Read-only, by the store that serves the URL: its credentials, retries and ETags.

    Paths are bucket/key; `root` is what the store's keys lack of them: `bucket/`, or nothing. What
    was listed is not asked for again, so one of these is for one look at a bucket.
    """

    protocol = "object"
    cachable = False  # fsspec would keep the first one, with its store, for ever

    def __init__(self, store: Store, root: str) -> None:
        super().__init__()
        self._store = store
        self._root = root
        self._listed: dict[str, ObjectInfo] = {}

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """Of an object, or of a folder: a prefix that objects have. Raises ObjectNotFoundError."""
        key = self._key(path)
        if self.isfile(path):
            return self._described(self._object(key))
        if not self._list(key):
            raise ObjectNotFoundError(f"{self._store.url(key)}: no such object or folder")
        return _folder(f"{self._root}{key}")

    def isfile(self, path: str) -> bool:
        """Whether there is an object of that name. One that is denied is none: some policies deny
        what is not there.

        Raises StorageError where that cannot be told, which fsspec's own would take for no.
        """
        key = self._key(path)
        if not key:
            return False
        try:
            self._object(key)
        except (ObjectNotFoundError, AccessDeniedError):
            return False
        return True

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        """What lies directly in a folder, objects and folders."""
        key = self._key(path)
        prefix = f"{key}/" if key else ""
        found: dict[str, dict[str, Any]] = {}
        for item in self._list(key):
            name, deeper, _rest = item.key.removeprefix(prefix).partition("/")
            full = f"{self._root}{prefix}{name}"
            found[full] = _folder(full) if deeper else self._described(item)
        return list(found.values()) if detail else list(found)

    def find(
        self, path: str, maxdepth: int | None = None, *_: Any, detail: bool = False, **__: Any
    ) -> Any:
        """All objects below a folder, by one listing. maxdepth: 1 for those directly in it."""
        rows = [self._described(item) for item in self._list(self._key(path), maxdepth != 1)]
        if detail:
            return {row["name"]: row for row in rows}
        return [row["name"] for row in rows]

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **_: Any
    ) -> bytes:
        """Bytes [start, end) of an object, or fewer where it ends."""
        with self._open(path) as file:
            file.seek(start or 0)
            return file.read(-1 if end is None else max(0, end - (start or 0)))

    def open_version(self, path: str, etag: str) -> io.BufferedReader:
        """A file to read, of the version that has this ETag ("": of the one that is there now).

        Raises ObjectChangedError, StorageError.
        """
        return open_object(self._store, self._key(path), etag)

    def _open(self, path: str, mode: str = "rb", **_: Any) -> io.BufferedReader:
        if mode != "rb":
            raise ValueError(f"{self._store.url(self._key(path))}: is opened for reading only")
        return self.open_version(path, "")

    def _object(self, key: str) -> ObjectInfo:
        # listings of some stores tell no ETag
        if key in self._listed and self._listed[key].etag:
            return self._listed[key]
        return self._store.info(key)

    def _list(self, folder: str, recursive: bool = True) -> list[ObjectInfo]:
        found = self._store.list(f"{folder}/" if folder else "", recursive)
        self._listed.update((item.key, item) for item in found)
        return found

    def _key(self, path: str) -> str:
        return str(self._strip_protocol(path)).removeprefix(self._root.rstrip("/")).strip("/")

    def _described(self, item: ObjectInfo) -> dict[str, Any]:
        name = f"{self._root}{item.key.lstrip('/')}"
        return {"name": name, "size": item.size, "type": "file", "ETag": item.etag}


def _folder(name: str) -> dict[str, Any]:
    return {"name": name, "size": 0, "type": "directory"}
