"""Objects of an `oss://` bucket as fsspec's files, for those who read by fsspec: corpora that are
converted.
"""

from __future__ import annotations

from typing import Any

from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from streammega.errors import ObjectNotFoundError
from streammega.storage.store import ObjectInfo, Store

READ_AHEAD = 8 << 20
"""Bytes asked for at a time by whoever reads on."""


class OssFiles(AbstractFileSystem):  # type: ignore[misc]
    """Read-only, by the store that serves the URL: its credentials, retries and ETags. Paths are
    bucket/key.

    `root` is what the store's keys lack of a path: `bucket/`, or nothing.
    """

    protocol = "oss"
    cachable = False  # fsspec would keep the first one, with its store, for ever

    def __init__(self, store: Store, root: str) -> None:
        super().__init__()
        self._store = store
        self._root = root

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """Of an object, or of a folder: a prefix that objects have. Raises ObjectNotFoundError."""
        key = self._key(path)
        if key:
            try:
                return self._described(self._store.info(key))
            except ObjectNotFoundError:
                pass
        if not self._store.list(f"{key}/" if key else ""):
            raise ObjectNotFoundError(f"oss://{self._root}{key}: no such object or folder")
        return {"name": f"{self._root}{key}", "size": 0, "type": "directory"}

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        """What lies directly in a folder, objects and folders."""
        key = self._key(path)
        prefix = f"{key}/" if key else ""
        found: dict[str, dict[str, Any]] = {}
        for item in self._store.list(prefix):
            name, deeper, _rest = item.key[len(prefix) :].partition("/")
            full = f"{self._root}{prefix}{name}"
            found[full] = (
                {"name": full, "size": 0, "type": "directory"} if deeper else self._described(item)
            )
        return list(found.values()) if detail else list(found)

    def find(self, path: str, *_: Any, detail: bool = False, **__: Any) -> Any:
        """All objects below a folder, by one listing."""
        key = self._key(path)
        rows = [self._described(item) for item in self._store.list(f"{key}/" if key else "")]
        return {row["name"]: row for row in rows} if detail else [row["name"] for row in rows]

    def _open(self, path: str, mode: str = "rb", **_: Any) -> OssFile:
        return OssFile(self, path, mode, block_size=READ_AHEAD)

    def read(self, path: str, start: int, stop: int, etag: str) -> bytes:
        """Bytes [start, stop) of the object that has this ETag."""
        return bytes(self._store.read_ranges(self._key(path), [start], [stop], etag)[0])

    def _key(self, path: str) -> str:
        return str(self._strip_protocol(path)).removeprefix(self._root.rstrip("/")).strip("/")

    def _described(self, item: ObjectInfo) -> dict[str, Any]:
        return {
            "name": f"{self._root}{item.key}",
            "size": item.size,
            "type": "file",
            "ETag": item.etag,
        }


class OssFile(AbstractBufferedFile):  # type: ignore[misc]
    """An object opened for reading."""

    def _fetch_range(self, start: int, end: int) -> bytes:
        return bytes(self.fs.read(self.path, start, end, self.details["ETag"]))
