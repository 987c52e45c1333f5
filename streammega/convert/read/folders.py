"""Which files of a folder are inputs: patterns that were asked for, and what lies beside data
without being any.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from streammega.convert.read.suffixes import format_of

LEFTOVERS = (
    "*.origins",
    *("_SUCCESS", "_metadata", "_common_metadata", "_committed_*", "_started_*", "*.crc"),
    *("*.tmp", "*.part", "*.partial", "*.incomplete", "*.crdownload", "*~"),
    *("*.md5", "*.sha1", "*.sha256", "MD5SUMS*", "SHA256SUMS*"),
)
"""What engines that write folders leave in them, downloads that were not finished, checksums:
whatever else is there.
"""
TABLES = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
"""What the datasets library keeps beside Parquet and Arrow files."""
_ABOUT = re.compile(
    r"(readme|licen[sc]e|notice|citation|changelog)(\.(md|txt|rst|html|cff))?", re.I
)
"""What tells people of a dataset: documents only where no file of another format is."""


@dataclass
class PassedOver:
    """Files of folders that are no inputs: how many of each kind."""

    counts: dict[str, int] = field(default_factory=dict)

    def add(self, kind: str, count: int = 1) -> None:
        """Count some."""
        if count:
            self.counts[kind] = self.counts.get(kind, 0) + count

    def as_text(self) -> str:
        """For a message: "2 hidden, 1 like README"; empty if there are none."""
        told = [f"{count:,} {kind}" for kind, count in sorted(self.counts.items())]
        return ", ".join(told)


@dataclass(frozen=True, kw_only=True)
class FilePatterns:
    """Patterns of files: `include` those that are read (empty: all), `exclude` those that are not.

    A pattern with a slash is compared with the path within the folder, one without with the file's
    name.
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    def of_matches(self, paths: Iterable[str], passed: PassedOver) -> list[str]:
        """Of files that a glob matches: they are meant as they are, so that only what was asked for
        is passed over.
        """
        return [path for path in paths if self._wants(path, passed)]

    def of_folder(self, paths: Iterable[str], folder: str, passed: PassedOver) -> list[str]:
        """Of all files below a folder."""
        root = folder.rstrip("/") + "/"
        kept = []
        for path in paths:
            within = path.removeprefix(root)
            if _is_hidden(within):
                passed.add("hidden")
            elif not self._included(within) and _matches(within, LEFTOVERS):
                passed.add("leftovers and checksums")
            elif self._wants(within, passed):
                kept.append(path)
        beside = set()
        for path in _about(kept, root):
            if not self._included(path.removeprefix(root)):
                beside.add(path)
        passed.add("beside the data (README, LICENSE, ...)", len(beside))
        return [path for path in kept if path not in beside]

    def _included(self, path: str) -> bool:
        return bool(self.include) and _matches(path, self.include)

    def _wants(self, path: str, passed: PassedOver) -> bool:
        if _matches(path, self.exclude):
            passed.add("excluded")
            return False
        if self.include and not self._included(path):
            passed.add("not included")
            return False
        return True


def _is_hidden(path: str) -> bool:
    """Whether a file or a folder above it begins with a dot."""
    return path.startswith(".") or "/." in path


def _matches(path: str, patterns: Iterable[str]) -> bool:
    name = os.path.basename(path)
    for pattern in patterns:
        compared = path if "/" in pattern else name
        if fnmatchcase(compared, pattern):
            return True
    return False


def _about(paths: Iterable[str], root: str) -> set[str]:
    """Those of some files that are about data which lies in their folder or below, and none
    themselves.
    """
    above_tables: set[str] = set()
    above_data: set[str] = set()
    of_tables = []
    of_any_data = []
    for path in paths:
        name = os.path.basename(path)
        if name in TABLES:
            of_tables.append(path)
            continue
        if _ABOUT.fullmatch(name):
            of_any_data.append(path)
            continue
        file_format = format_of(path)
        if file_format == "text":  # beside texts alone a README is a document like them
            continue
        folders = list(_folders_above(path, root))
        above_data.update(folders)
        if file_format in ("parquet", "arrow"):
            above_tables.update(folders)
    about = {path for path in of_tables if os.path.dirname(path) in above_tables}
    about.update(path for path in of_any_data if os.path.dirname(path) in above_data)
    return about


def _folders_above(path: str, root: str) -> Iterator[str]:
    """Of a file, the nearest first, up to `root` itself."""
    shortest = len(root.rstrip("/"))
    while len(path) > shortest and "/" in path:
        path, _, _ = path.rpartition("/")
        yield path
