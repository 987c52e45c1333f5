"""Which files of a folder are inputs: patterns that were asked for, what is beside data without
being any, and which split a name says.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache

from streammega.convert.options import ConvertOptions
from streammega.convert.read.suffixes import format_of
from streammega.convert.read.walk import FILE, FOLDERS, Row, shows_hidden, within
from streammega.errors import ConvertError

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


SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""The words by which the datasets library knows splits in names."""
MOST_NAMES = 1000
"""Of files that are left out, for each reason: there may be millions."""


@dataclass
class PassedOver:
    """What was found and is not read, by its reason: how many, and the first names."""

    counts: dict[str, int] = field(default_factory=dict)
    names: dict[str, list[str]] = field(default_factory=dict)

    def add(self, reason: str, *paths: str) -> None:
        """Count some."""
        if paths:
            self.counts[reason] = self.counts.get(reason, 0) + len(paths)
            names = self.names.setdefault(reason, [])
            names += paths[: MOST_NAMES - len(names)]

    def merge(self, other: PassedOver) -> None:
        """Count what another has."""
        for reason, count in other.counts.items():
            self.add(reason, *other.names[reason])
            self.counts[reason] += count - len(other.names[reason])

    def as_text(self) -> str:
        """For a message: "hidden: 2; like README: 1"; empty if there are none."""
        counted = [f"{reason}: {count:,}" for reason, count in sorted(self.counts.items())]
        return "; ".join(counted)


def chosen(
    rows: Iterable[Row],
    root: str,
    pattern: Sequence[str],
    options: ConvertOptions,
    passed: PassedOver,
) -> list[Row]:
    """Of what is below a folder, or matches a pattern, the files that are read.

    A pattern of the options (`include`, `exclude`) with a slash is compared with the path within
    the folder, one without with the file's name. One of `exclude` may also name a folder above the
    file. What a glob matches is meant as it is: of that only what is hidden, or was not asked for,
    is left out.

    Raises ConvertError for what cannot be listed, unless faults are passed over.
    """
    kept = []
    hidden: dict[str, None] = {}
    for row in rows:
        path = within(row.path, root)
        if _hidden_name(path) and not shows_hidden(pattern):
            # of all that is in a hidden folder, once
            hidden[row.path.removesuffix(path) + _hidden_name(path)] = None
        elif row.kind in FOLDERS:
            if _is_excluded(f"{row.path}/", f"{path}/", pattern, options):
                passed.add("excluded", row.path)
            else:
                _count(row, options, passed)
        elif not pattern and not _included(path, options) and _matches(path, LEFTOVERS):
            passed.add("leftovers and checksums", row.path)
        elif _is_excluded(row.path, path, pattern, options):
            passed.add("excluded", row.path)
        elif options.include and not _included(row.path if pattern else path, options):
            passed.add("not included", row.path)
        elif row.kind != FILE:
            _count(row, options, passed)
        else:
            kept.append(row)
    passed.add("hidden", *hidden)
    if pattern:
        return kept
    beside = set()
    for path in _about([row.path for row in kept], root):
        if not _included(within(path, root), options):
            beside.add(path)
    passed.add("beside the data (README, LICENSE, ...)", *sorted(beside))
    return [row for row in kept if row.path not in beside]


def _count(row: Row, options: ConvertOptions, passed: PassedOver) -> None:
    if row.fault and options.on_error == "stop":
        raise ConvertError(row.fault)
    passed.add(row.kind, row.path)


def _is_excluded(path: str, below: str, pattern: Sequence[str], options: ConvertOptions) -> bool:
    """Whether a file is excluded, or a folder above it. below: its path as seen from the root."""
    above = path.removesuffix(below) if pattern else ""
    ends = [end for end, letter in enumerate(below) if letter == "/"] + [len(below)]
    return any(_matches(above + below[:end], options.exclude) for end in ends)


def _included(path: str, options: ConvertOptions) -> bool:
    return bool(options.include) and _matches(path, options.include)


def splits_of(path: str) -> Iterator[tuple[int, str]]:
    """The splits that names on a path say, each with the place where its name begins."""
    start = 0
    for name in path.split("/"):
        split = _split_of(name)
        if split is not None:
            yield start, split
        start += len(name) + 1


@lru_cache(maxsize=1 << 16)
def _split_of(name: str) -> str | None:
    splits = [split for split, words in SPLITS.items() if _has_word(name, words)]
    return splits[0] if len(splits) == 1 else None


def is_of_split(path: str, wanted: str) -> bool:
    """Whether the last name on a path that says a split says this one. A split of another name than
    those in SPLITS may be said anywhere.
    """
    for split, words in SPLITS.items():
        if wanted.lower() in words:
            said = [name for _, name in splits_of(path)]
            return said[-1:] == [split]
    return _has_word(path, (wanted,))


def _has_word(path: str, words: Iterable[str]) -> bool:
    any_word = "|".join(map(re.escape, words))
    return re.search(rf"(?<![a-z])(?:{any_word})(?![a-z])", path, re.I) is not None


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
        if file_format in (
            "text",
            "unknown",
        ):  # beside texts alone a README is a document like them
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
