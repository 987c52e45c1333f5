"""Walks folders and globs, on a disk, in a bucket, or in a listing of the web."""

from __future__ import annotations

import heapq
import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, TypeAlias

from streammega.config import StorageConfig
from streammega.convert.options import ConvertOptions
from streammega.convert.read.formats import format_of
from streammega.convert.read.source import GLOB_CHARS
from streammega.errors import ConvertError, EndpointError
from streammega.errors.redaction import split_query, without_queries
from streammega.storage.backends.fsspec import driver_error
from streammega.storage.file_system import StoreFiles, file_system
from streammega.storage.open import is_remote, local_path
from streammega.storage.retry import RetryPolicy, endpoint_of

FILE = "file"
FOLDER = "folder"
SPECIAL = "pipes, sockets and devices"
UNLISTED = "folders that cannot be listed"
LOST = "names that lead to no file"
TWICE = "folders that were searched under another name"
MATCHED = "folders that a glob matches (end it in /** to search them)"
FOLDERS = (UNLISTED, TWICE, MATCHED)
MARKERS = "objects that stand for folders"


class Row(NamedTuple):
    """One name that was found. kind: FILE, FOLDER, or the reason why it is not read.

    size: bytes, or -1 where a listing does not say it. identity: the same for all names of one
    file. fault: the message where this is an error unless faults are passed over.
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
                what = "this symbolic link leads to no file" if is_link else "is no readable name"
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
    etag = f"{info.st_size:x}-{info.st_mtime_ns:x}"
    return Row(path, kind, info.st_size, etag, (info.st_dev, info.st_ino), is_link)


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
            failure = failure_of(self.name, error, self.storage)
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
            found = str(info["name"])
            if found.rstrip("/") != name.rstrip("/"):
                path = found if "://" in found else f"{self.scheme}://{found}"
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
        etag = info.get("ETag") or info.get("etag") or info.get("LastModified") or size or ""
        size = -1 if size is None else int(size)
        return Row(path, FILE, size, str(etag), f"{path}{self.query}")


def failure_of(shown: str, error: BaseException, storage: StorageConfig) -> BaseException:
    """Our error for one of a driver's, without the queries of URLs."""
    failure = driver_error(shown, error, storage.storage_options)
    failure.args = tuple(without_queries(str(words)) for words in failure.args)
    return failure


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


def walk(place: Place, root: str, pattern: Sequence[str] = ()) -> Iterator[Row]:
    """All files below a folder, or those of them that match a pattern; whatever else there is, with
    the reason why it is not read.

    A folder that is hidden is one row, unless the pattern names a hidden one. Each folder is
    searched once, whatever symbolic links lead to it; first by its own name.
    """
    is_deep = not pattern or len(pattern) > 1 or pattern == ["**"]
    folders = [root]
    links: list[str] = []
    searched = set()
    while folders or links:
        folder = folders.pop() if folders else heapq.heappop(links)
        identity = place.identity(folder)
        if identity in searched:
            yield Row(folder, TWICE)
            continue
        searched.add(identity)
        for row in place.rows(folder, is_deep=is_deep):
            parts = within(row.path, root).split("/")
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


def within(path: str, root: str) -> str:
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


# --- which files are read


LEFTOVERS = (
    "*.origins",
    *("_SUCCESS", "_metadata", "_common_metadata", "_committed_*", "_started_*", "*.crc"),
    *("*.tmp", "*.part", "*.partial", "*.incomplete", "*.crdownload", "*~"),
    *("*.md5", "*.sha1", "*.sha256", "MD5SUMS*", "SHA256SUMS*"),
)
"""Files that engines leave in the folders they write, unfinished downloads, and checksums."""
HF_DATASET_FILES = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
"""What the datasets library keeps with Parquet and Arrow files."""
_ABOUT = re.compile(
    r"(readme|licen[sc]e|notice|citation|changelog)(\.(md|txt|rst|html|cff))?", re.I
)
"""Files that describe a dataset: documents only where no file of another format is."""
MAX_NAMES = 1000
"""Names of skipped files that are kept for each reason: there may be millions."""


@dataclass
class SkippedFiles:
    """Files that were found and are not read, by reason: how many, and the first names."""

    counts: dict[str, int] = field(default_factory=dict)
    names: dict[str, list[str]] = field(default_factory=dict)
    matched_patterns: set[str] = field(default_factory=set)
    """Of `include` and `exclude`, those that something matched."""

    def add(self, reason: str, *paths: str) -> None:
        """Count some."""
        if paths:
            self.counts[reason] = self.counts.get(reason, 0) + len(paths)
            names = self.names.setdefault(reason, [])
            names += paths[: MAX_NAMES - len(names)]

    def merge(self, other: SkippedFiles) -> None:
        """Count what another has."""
        self.matched_patterns |= other.matched_patterns
        for reason, count in other.counts.items():
            self.add(reason, *other.names[reason])
            self.counts[reason] += count - len(other.names[reason])

    def as_text(self) -> str:
        """For a message: "hidden: 2; like README: 1"; empty if there are none."""
        counted = [f"{reason}: {count:,}" for reason, count in sorted(self.counts.items())]
        return "; ".join(counted)


def chosen_files(
    rows: Iterable[Row],
    root: str,
    pattern: Sequence[str],
    options: ConvertOptions,
    skipped: SkippedFiles,
) -> list[Row]:
    """Of the names below a folder, or of a glob, the files that are read.

    A pattern of the options (`include`, `exclude`) with a slash is compared with the path within
    the folder, one without with the file's name. One of `exclude` may also name a folder above the
    file. What a glob matches is meant as it is: only what is hidden or not chosen by the options is
    skipped.

    Raises ConvertError for what cannot be listed, unless `on_error` is "skip".
    """
    files = []
    hidden: dict[str, None] = {}
    for row in rows:
        path = within(row.path, root)
        included, excluded = _matching_patterns(row, path, pattern, options)
        skipped.matched_patterns |= included | excluded
        hidden_name = _hidden_name(path)
        if hidden_name and not shows_hidden(pattern):
            # of all that is in a hidden folder, once
            hidden[row.path.removesuffix(path) + hidden_name] = None
            continue
        reason = row.kind
        if excluded:
            reason = "excluded"
        elif row.kind in FOLDERS:
            pass
        elif not pattern and not included and _matches(path, LEFTOVERS):
            reason = "leftovers and checksums"
        elif options.include and not included:
            reason = "not included"
        if reason == FILE:
            files.append(row)
            continue
        if reason == row.kind and row.fault and options.on_error == "stop":
            raise ConvertError(row.fault)
        skipped.add(reason, row.path)
    skipped.add("hidden", *hidden)
    if pattern:
        return files
    about = _about([row.path for row in files], root)
    about = {path for path in about if not _matches(within(path, root), options.include)}
    skipped.add("beside the data (README, LICENSE, ...)", *sorted(about))
    return [row for row in files if row.path not in about]


def _matching_patterns(
    row: Row, path: str, pattern: Sequence[str], options: ConvertOptions
) -> tuple[set[str], set[str]]:
    """The patterns of `include`, and those of `exclude`, that a name matches. path: as seen from the
    folder that is searched.
    """
    if not options.include and not options.exclude:
        return set(), set()
    is_folder = row.kind in FOLDERS
    below = f"{path}/" if is_folder else path
    above = row.path.removesuffix(path) if pattern else ""
    ends = [end for end, letter in enumerate(below) if letter == "/"] + [len(below)]
    names = [above + below[:end] for end in ends]
    included = {one for one in options.include if not is_folder and _matches(above + path, (one,))}
    excluded = {one for one in options.exclude if any(_matches(name, (one,)) for name in names)}
    return included, excluded


def _hidden_name(path: str) -> str:
    """The path up to a name that begins with a dot, which is that of a hidden file or folder; ""
    if there is none.
    """
    above, dot, rest = f"/{path}".partition("/.")
    return f"{above}{dot}{rest.partition('/')[0]}".lstrip("/") if dot else ""


def _matches(path: str, patterns: Iterable[str]) -> bool:
    name = os.path.basename(path)
    for pattern in patterns:
        pattern = pattern.rstrip("/")
        if fnmatchcase(path if "/" in pattern else name, pattern):
            return True
    return False


def _about(paths: Iterable[str], root: str) -> set[str]:
    """Files that describe the data in their folder or below, and are not data themselves."""
    data_folders: set[str] = set()
    table_folders: set[str] = set()
    about: list[tuple[str, set[str]]] = []
    for path in paths:
        name = os.path.basename(path)
        file_format = format_of(path)
        if name in HF_DATASET_FILES:
            about.append((path, table_folders))
        elif _ABOUT.fullmatch(name):
            about.append((path, data_folders))
        # beside texts alone a README is a document like them
        elif file_format not in ("text", "unknown"):
            folders = list(_folders_above(path, root))
            data_folders.update(folders)
            if file_format in ("parquet", "arrow"):
                table_folders.update(folders)
    return {path for path, folders in about if os.path.dirname(path) in folders}


def _folders_above(path: str, root: str) -> Iterator[str]:
    """Of a file, the nearest first, up to `root` itself."""
    shortest = len(root.rstrip("/"))
    while len(path) > shortest and "/" in path:
        path, _, _ = path.rpartition("/")
        yield path
