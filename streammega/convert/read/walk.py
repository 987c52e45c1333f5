"""Walks folders and globs, on a disk, in a bucket, or in a listing of the web."""

from __future__ import annotations

import heapq
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, TypeAlias

from streammega.config import StorageConfig
from streammega.convert.read.source import GLOB_CHARS
from streammega.errors import AccessDeniedError, EndpointError
from streammega.errors.redaction import split_query
from streammega.storage.backends.local import etag_of
from streammega.storage.etags import version_of_info
from streammega.storage.file_system import StoreFiles, failure_of, file_system
from streammega.storage.open import is_remote, local_path
from streammega.storage.progress import note_part
from streammega.storage.retry import RetryPolicy, endpoint_of

FILE = "file"
FOLDER = "folder"
SPECIAL = "pipes, sockets and devices"
UNLISTED = "folders that cannot be listed"
LOST = "names that lead to no file"
TWICE = "folders that were searched under another name"
MATCHED = "folders that a glob matches (end it in /** to search them)"
TABLE_LOG = "logs of tables"
FOLDERS = (UNLISTED, TWICE, MATCHED)
MARKERS = "objects that mark folders"
TABLE_LOGS = {
    "_delta_log": "Delta Lake",
    ".hoodie": "Hudi",
    "_spark_metadata": "Spark Structured Streaming",
}
"""Folders within a table that say which of its files and rows are left, and the table's format."""


class Row(NamedTuple):
    """One name that was found. kind: FILE, FOLDER, or the reason why it is not read.

    size: bytes, or -1 where a listing does not say it. etag: its version, as `open_file` takes it.
    identity: the same for all names of one
    file. fault: the message, if this is an error.
    """

    path: str
    kind: str
    size: int = -1
    etag: str = ""
    identity: Any = None
    is_link: bool = False
    fault: str = ""


@dataclass(frozen=True, kw_only=True)
class Disk:
    """The file systems of this machine, and a name there."""

    name: str
    root: str
    query: str = ""
    chain: str = ""

    def file(self, path: str) -> Row | None:
        """The file of this very name; None if there is none."""
        try:
            row = _row_of(path, os.stat(path))
        except (OSError, ValueError):
            return None
        return row if row.kind == FILE else None

    def is_folder(self, path: str) -> bool:
        """Whether there is such a folder."""
        return os.path.isdir(path or ".")

    def identity(self, folder: str) -> Any:
        """The same for all names of one folder."""
        try:
            info = os.stat(folder or ".")
        except OSError:  # its listing says why
            return folder
        return info.st_dev, info.st_ino

    def rows(self, folder: str, *, is_deep: bool) -> Iterator[Row]:
        """What is directly in a folder; the folder itself where it cannot be listed."""
        try:
            with os.scandir(folder or ".") as listing:
                entries = sorted(listing, key=lambda entry: entry.name)
        except OSError as error:
            fault = (
                f"{folder!r}: this folder cannot be listed ({error.strerror}); make it readable, "
                f"leave it out by --exclude, or count it by --on-error skip"
            )
            yield Row(folder, UNLISTED, fault=fault)
            return
        for entry in entries:
            path = os.path.join(folder, entry.name)
            is_link = entry.is_symlink()
            try:
                yield _row_of(path, entry.stat(), is_link)
            except OSError as error:
                what = (
                    "this symbolic link leads to no file" if is_link else "its name cannot be read"
                )
                fault = (
                    f"{path!r}: {what} ({error.strerror}); mend or remove it, leave it out by "
                    f"--exclude, or count it by --on-error skip"
                )
                yield Row(path, LOST, fault=fault)

    def read(self, path: str) -> bytes:
        """All bytes of a file."""
        with open(path, "rb") as file:
            return file.read()


def _row_of(path: str, info: os.stat_result, is_link: bool = False) -> Row:
    kind = SPECIAL
    if stat.S_ISREG(info.st_mode):
        kind = FILE
    elif stat.S_ISDIR(info.st_mode):
        kind = FOLDER
    return Row(path, kind, info.st_size, etag_of(info), (info.st_dev, info.st_ino), is_link)


@dataclass(frozen=True, kw_only=True)
class Remote:
    """The file system of a URL, and a name there. chain: what the URL has behind `::`, the file
    system in which this one is; names of files are without it.

    root: the name as the file system spells it.
    """

    name: str
    root: str
    storage: StorageConfig
    system: Any
    scheme: str
    query: str
    chain: str

    def file(self, path: str) -> Row | None:
        """The file of this very name; None if there is none."""
        name = self._name(path)
        if isinstance(self.system, StoreFiles):
            return self._row(path, self.system.info(name)) if self.system.isfile(name) else None
        host = self.name.split("/")[2]
        endpoint = endpoint_of(self.scheme, host, self.storage.storage_options)
        return RetryPolicy.of(self.storage, endpoint).call(lambda: self._file_of_driver(path))

    def _file_of_driver(self, path: str) -> Row | None:
        """Raises EndpointError where the endpoint does not answer: fsspec's own `isfile` says no
        then.
        """
        try:
            row = self._row(path, self.system.info(self._name(path)))
        except Exception as error:  # clients raise whatever they like
            failure = failure_of(self.name, error)
            if isinstance(failure, EndpointError):
                raise failure from None
            return None
        return row if row.kind == FILE else None

    def is_folder(self, path: str) -> bool:
        """Whether there is such a folder."""
        return bool(self.system.isdir(self._name(path)))

    def identity(self, folder: str) -> Any:
        """The same for all names of one folder."""
        return folder

    def rows(self, folder: str, *, is_deep: bool) -> Iterator[Row]:
        """What is directly in a folder; of a bucket all below it, by one listing, if `is_deep`."""
        name = self._name(folder)
        if isinstance(self.system, StoreFiles):
            depth = None if is_deep else 1
            listed: Iterable[Any] = self.system.find(name, depth, detail=True).values()
        else:
            if self.scheme in ("http", "https"):
                name = f"{name.rstrip('/')}/"  # a page without it lists nothing
            # not `find`, which leaves out what cannot be listed
            try:
                listed = self.system.ls(name, detail=True)
            except FileNotFoundError:
                if self.root.startswith(folder):
                    raise
                raise EndpointError(
                    f"{folder!r}: this folder is in a listing, and cannot be listed itself; leave "
                    f"it out by naming others, or try again"
                ) from None
        for info in sorted(listed, key=lambda info: str(info["name"])):
            listed_name = str(info["name"])
            if listed_name.rstrip("/") != name.rstrip("/"):
                path = listed_name if "://" in listed_name else f"{self.scheme}://{listed_name}"
                yield self._row(path, info)

    def read(self, path: str) -> bytes:
        """All bytes of a file."""
        return bytes(self.system.cat_file(self._name(path)))

    def _name(self, path: str) -> str:
        """As the system names it: the web's files by their URLs."""
        if self.scheme in ("http", "https"):
            return f"{path}{self.query}"
        return path.partition("://")[2]

    def _row(self, path: str, info: dict[str, Any]) -> Row:
        if info["type"] == "directory":
            path = path.rstrip("/")
            return Row(path, FOLDER, identity=path)
        if path.endswith("/"):
            return Row(path, MARKERS)
        size = info.get("size")
        size = -1 if size is None else int(size)
        is_store = isinstance(self.system, StoreFiles)
        etag = info["ETag"] if is_store else version_of_info(info)
        return Row(path, FILE, size, etag, f"{path}{self.query}")


Place: TypeAlias = "Disk | Remote"


def open_place(item: str, storage: StorageConfig) -> Place:
    """Where an input is. No request is sent yet."""
    if not is_remote(item):
        name = local_path(item) if "://" in item else item
        return Disk(name=name, root=name)
    system, path = file_system(item, storage)
    shown, query = split_query(item)
    scheme = shown.partition("://")[0]
    chain = ""
    if "::" in shown and "::" not in path:
        shown, mark, rest = shown.partition("::")
        chain = mark + rest
    root = shown if "://" in path else f"{scheme}://{path}"
    return Remote(
        name=shown,
        root=root.rstrip("/"),
        storage=storage,
        system=system,
        scheme=scheme,
        query=query,
        chain=chain,
    )


def split_pattern(place: Place) -> tuple[str, list[str]]:
    """The folder in which a pattern begins, and the pattern's parts; none of a name that is no
    pattern. Signs in the names of folders that are there are letters.
    """
    if place.query:
        return place.root, []
    scheme, mark, rest = place.root.rpartition("://")
    # of a URL, a password before the first slash may hold any sign
    host, slash, below = rest.partition("/") if mark else ("", "", rest)
    folder = scheme + mark + host + slash
    while below:
        name, _, rest = below.partition("/")
        deeper = os.path.join(folder, name) or "/"  # no name is before the first slash
        if set(name) & set(GLOB_CHARS) and not place.is_folder(deeper):
            return folder, [part for part in below.split("/") if part]
        folder = deeper
        below = rest.lstrip("/")
    return folder, []


class Table(NamedTuple):
    """A table, of whose rows only those count that its log says. log, data: folders."""

    format: str
    log: str
    data: str


def table_of(path: str) -> Table | None:
    """The table to whose log a file or folder belongs."""
    above, _, name = path.rpartition("/")
    if above.endswith("/metadata") and name.removesuffix(".gz").endswith(".metadata.json"):
        return Table("Iceberg", above, f"{above.removesuffix('metadata')}data")
    for log, table_format in TABLE_LOGS.items():
        data, is_in_log, _ = f"{path}/".partition(f"/{log}/")
        if is_in_log:
            return Table(table_format, f"{data}/{log}", data)
    return None


def table_above(place: Place, folder: str, known: dict[str, Table | None]) -> Table | None:
    """The table to whose data a folder belongs. known: the answers for other folders."""
    if folder not in known:
        above = os.path.dirname(folder)
        is_top = above in ("", folder) or above.endswith(":")  # of a disk, of a bucket
        known[folder] = _table_at(place, folder)
        if known[folder] is None and not is_top:
            known[folder] = table_above(place, above, known)
    return known[folder]


def _table_at(place: Place, folder: str) -> Table | None:
    """The table whose data begins with a folder."""
    above, _, name = folder.rpartition("/")
    logs = [os.path.join(folder, log) for log in TABLE_LOGS]
    try:
        logs = [log for log in logs if place.is_folder(log)]
        # `data` may be the bucket itself
        if name == "data" and not above.endswith(":/") and place.is_folder(f"{above}/metadata"):
            logs += [row.path for row in place.rows(f"{above}/metadata", is_deep=False)]
    except AccessDeniedError:  # a key to a bucket may be for one of its folders
        return None
    return next(filter(None, map(table_of, logs)), None)


def walk(place: Place, root: str, pattern: Sequence[str] = ()) -> Iterator[Row]:
    """All files below a folder, or those of them that match a pattern; whatever else there is, with
    the reason why it is not read.

    A folder that is hidden is one row, unless the pattern names a hidden one. Each folder is
    searched once, whatever symbolic links lead to it; first by its own name. A table has one more
    row, in its log, whatever the pattern.
    """
    is_deep = not pattern or len(pattern) > 1 or pattern == ["**"]
    folders = [root]
    links: list[str] = []
    searched = set()
    tables = set()
    while folders or links:
        folder = folders.pop() if folders else heapq.heappop(links)
        identity = place.identity(folder)
        if identity in searched:
            yield Row(folder, TWICE)
            continue
        searched.add(identity)
        for row in place.rows(folder, is_deep=is_deep):
            note_part("names found", 1, unit="")
            table = table_of(row.path)
            if table is not None and table not in tables:
                tables.add(table)
                yield Row(row.path, TABLE_LOG)
            parts = path_below(row.path, root).split("/")
            is_hidden = not shows_hidden(pattern) and shows_hidden(parts)
            if row.kind == FOLDER and not is_hidden:
                if pattern and matches(parts, pattern) and not leads_to(parts, pattern):
                    yield Row(row.path, MATCHED)
                elif not pattern or leads_to(parts, pattern):
                    if row.is_link:
                        heapq.heappush(links, row.path)
                    else:
                        folders.append(row.path)
            elif row.kind == UNLISTED or not pattern or matches(parts, pattern):
                yield row


def shows_hidden(parts: Sequence[str]) -> bool:
    """Whether names on a path, or parts of a pattern, begin with a dot."""
    return any(part.startswith(".") for part in parts)


def path_below(path: str, root: str) -> str:
    """A path as seen from a folder above it."""
    return path.removeprefix(root).lstrip("/")


def matches(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    """Whether the names on a path are those of a pattern; `**` is any number of them."""
    if not pattern:
        return not parts
    if pattern[0] == "**":
        return matches(parts, pattern[1:]) or (bool(parts) and matches(parts[1:], pattern))
    return bool(parts) and fnmatchcase(parts[0], pattern[0]) and matches(parts[1:], pattern[1:])


def leads_to(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    """Whether what is below a folder may match a pattern."""
    if not pattern or pattern[0] == "**":
        return bool(pattern)
    if not parts:
        return True
    return fnmatchcase(parts[0], pattern[0]) and leads_to(parts[1:], pattern[1:])
