"""The inputs of a conversion: names of files, folders, globs, lists and URLs become inputs, each in a
format. Every file that is found is read, is part of what is read, or is counted with the reason why
it is left out.

A name leads to entries (`_walk`). The options choose some of them (`_choose`), and `_Group` makes
inputs of these: some files belong together.
"""

from __future__ import annotations

import heapq
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from streammega.config import StorageConfig
from streammega.config.validate import parse_json
from streammega.convert.options import ConvertOptions, digest_of_json
from streammega.convert.read.compression import format_suffix
from streammega.convert.read.formats import format_of
from streammega.convert.read.source import GLOB_CHARS, Input
from streammega.dataset.columns import JOB, shard_of_column
from streammega.dataset.manifest import FORMAT as MANIFEST_FORMAT
from streammega.dataset.names import (
    MANIFEST,
    SUFFIXES,
    could_belong_to,
    dataset_of_marked,
    dataset_of_tokenizer,
    strip_suffix,
)
from streammega.dataset.provenance import ENDING as ORIGINS
from streammega.errors import (
    AccessDeniedError,
    ConfigError,
    ConvertError,
    ObjectNotFoundError,
    StreammegaError,
)
from streammega.errors.logs import get_logger
from streammega.errors.redaction import redact_urls, split_query
from streammega.storage.etags import SIZED
from streammega.storage.file_system import (
    FILE,
    FOLDER,
    MARKERS,
    UNLISTED,
    Driver,
    Entry,
    Place,
    failure_of,
    open_place,
)
from streammega.storage.open import escapes_folder, is_remote, resolved
from streammega.storage.progress import note_part

log = get_logger(__name__)

Inputs = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""Names of inputs. A single one needs no list."""
TWICE = "folders that were searched under another name"
MATCHED = "folders that a glob matches (end it in /** to search them)"
FOLDERS = (UNLISTED, TWICE, MATCHED)
"""Kinds of entries that are no files, so that no pattern of files leaves them out."""
EXCLUDED = "excluded"
HIDDEN = "hidden"
NOT_INCLUDED = "not included"
NOT_OF_SPLIT = "not of split"
OWN_OUTPUT = "of this conversion's own output"
REPEATED = "other names of files that are read"
UNKNOWN = "of unknown suffix"
NOT_IN_INDEX = "next to shards whose index does not name them"
DATASETS = "streammega datasets among files of other formats"
ALLOWED = (EXCLUDED, NOT_INCLUDED, NOT_OF_SPLIT, OWN_OUTPUT, REPEATED, TWICE, MARKERS)
"""Reasons that `strict` allows: an option names what is left out, or nothing is lost."""
TABLE_LOGS = {
    "_delta_log": "Delta Lake",
    ".hoodie": "Hudi",
    "_spark_metadata": "Spark Structured Streaming",
}
"""Folders within a table that say which of its files and rows are left, and the table's format."""
HIVE_TRANSACTION = re.compile(
    r"base_\d{7,}(_v\d+)?|(delete_)?delta_\d{7,}_\d{7,}(_\d{4,})?(_v\d+)?"
)
"""Folders of a table of Hive. Later ones replace or delete rows of earlier ones."""
UNCOMMITTED = "_temporary"
"""The folder in which Spark keeps what a job has not committed."""
LITDATA_CHUNK = re.compile(r"chunk-\d+-\d+(\.\w+)?\.bin")
"""Names of litdata's chunks, which would pass for raw ids."""
ALL_SPLITS = "all"
_WORD = "(?<![a-z])(?:{})(?![a-z])"
SPLITS = re.compile(
    _WORD.format(
        "(?P<train>train(?:ing)?)|(?P<validation>valid(?:ation)?|val|dev)"
        "|(?P<test>test(?:ing)?|eval(?:uation)?)"
    ),
    re.IGNORECASE,
)
"""The words by which the datasets library knows splits in names."""
WARNED_SHARE = 0.1
"""The share of unknown suffixes, among all files that are found, from which on a warning tells."""
MAX_NAMES = 1000
"""Names that are kept for each reason: there may be millions."""
SHOWN_NAMES = 3
"""Names, or suffixes, in a message."""


@dataclass
class SkippedFiles:
    """Files that were found and are not read, by reason: how many, and the first names."""

    counts: dict[str, int] = field(default_factory=dict)
    names: dict[str, list[str]] = field(default_factory=dict)
    matched_patterns: set[str] = field(default_factory=set)
    """Patterns of `include` and `exclude` that matched something."""

    def add(self, reason: str, *paths: str) -> None:
        """Count some."""
        if paths:
            self.counts[reason] = self.counts.get(reason, 0) + len(paths)
            names = self.names.setdefault(reason, [])
            names += paths[: MAX_NAMES - len(names)]

    def as_lines(self, *, without: Sequence[str] = ()) -> list[str]:
        """Each reason with its count and first names, such as "hidden: 2 ('.a', '.b')"."""
        lines = []
        for reason, count in sorted(self.counts.items()):
            if not reason.startswith(tuple(without)):
                names = list(map(repr, self.names[reason][:SHOWN_NAMES]))
                names += ["..."] if count > len(names) else []
                lines.append(f"{reason}: {count:,} ({', '.join(names)})")
        return lines


class OwnOutput(NamedTuple):
    """What a conversion writes, and so does not read. prefix: the dataset's; work_dir: the URL of
    its work folder.
    """

    prefix: str
    work_dir: str


def find_inputs(
    inputs: Inputs,
    storage: StorageConfig | None = None,
    options: ConvertOptions | None = None,
    skipped: SkippedFiles | None = None,
    own_output: OwnOutput | None = None,
) -> list[Input]:
    """Input files in a fixed order: as named, globs and folders in the order of the names of their
    files, `@list` files line by line. A file with several names is read once, by its first.

    What is there by the very name is taken before that is read as a glob. What is left out is
    counted in `skipped`.

    Raises ObjectNotFoundError for an input that is not there; ConvertError for a folder without
    files, for what cannot be listed (unless `on_error` is "skip"), for a named file whose suffix
    names no format, for files of several splits (unless `hf_split` names one), and for what is left
    out (if `strict`); ConfigError for no inputs.
    """
    options = options or ConvertOptions()
    if skipped is None:
        skipped = SkippedFiles()
    search = _Search(storage or StorageConfig(), options, skipped, own_output)
    files: list[Input] = []
    for name in expand_lists(input_names(inputs)):
        with _plain_errors(name):
            files += search.inputs_of(name)
    if not files:
        raise ConfigError(
            "no inputs are named; name files or folders (a list of them may be empty)"
        )
    unmatched = {*options.include, *options.exclude} - skipped.matched_patterns
    if unmatched:
        log.warning(
            "no name in a folder or of a glob matches %s (--include, --exclude); is it mistyped?",
            " or ".join(map(repr, sorted(unmatched))),
        )
    _warn_of_unknown(len(files), skipped)
    files = _keep_split(_drop_repeats(files, skipped), options.hf_split, skipped)
    left_out = skipped.as_lines(without=ALLOWED) if options.strict else []
    if left_out:
        raise ConvertError(
            f"strict (--strict): files are left out: {'; '.join(left_out)}; name what is not wanted "
            f"by --exclude, or take it by --include"
        )
    return files


def _warn_of_unknown(num_read: int, skipped: SkippedFiles) -> None:
    """Warn where a large share of the files has unknown suffixes: they may be what was meant."""
    num_unknown = skipped.counts.get(UNKNOWN, 0)
    num_files = num_read + num_unknown
    if num_unknown and num_unknown >= WARNED_SHARE * num_files:
        suffixes = Counter(format_suffix(name) for name in skipped.names[UNKNOWN])
        log.warning(
            "%d of %d files are left out, since their suffixes (%s) name no format: take them as texts "
            "by --include '*.SUFFIX', rename them, or leave them out by --exclude",
            num_unknown,
            num_files,
            ", ".join(repr(suffix) for suffix, _ in suffixes.most_common(SHOWN_NAMES)),
        )


def describe_inputs(inputs: Sequence[Input]) -> list[dict[str, Any]]:
    """Path, format and bytes of each, for reports."""
    return [
        {"path": redact_urls(item.path), "format": item.format, "bytes": item.size}
        for item in inputs
    ]


def input_names(inputs: Inputs) -> list[str]:
    """Inputs as strings: without this, a single string would be read as a list of characters."""
    names = [inputs] if isinstance(inputs, str | os.PathLike) else inputs
    return [os.fspath(name) for name in names]


def expand_lists(inputs: Sequence[str]) -> Iterator[str]:
    """Inputs, with the lines of each `@list` in its place."""
    for item in inputs:
        if not item.startswith("@") or os.path.exists(item):
            yield item
            continue
        try:
            with open(item[1:], encoding="utf-8-sig") as file:
                for line in file:
                    if line.strip() and not line.startswith("#"):
                        yield line.strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ObjectNotFoundError(
                f"{item[1:]}: the list cannot be read ({error}); check its name"
            ) from None


# --- names and entries ----------------------------------------------------------------------------


@dataclass
class _Search:
    """What all names of a conversion are searched with."""

    storage: StorageConfig
    options: ConvertOptions
    skipped: SkippedFiles
    own_output: OwnOutput | None
    no_tables: set[str] = field(default_factory=set)
    """Folders that are within no table."""

    def inputs_of(self, name: str) -> list[Input]:
        """The inputs that one name leads to."""
        place = open_place(name, self.storage)
        # a signature is that of one object
        for ending in ("",) if place.query else ("", ".idx", MANIFEST):
            entry = None if name.endswith("/") else place.file(place.root + ending)
            if entry is not None:
                files = _Group({entry.path: entry}, place, self).inputs()
                if not isinstance(place, Driver):  # which may send a request for each folder above
                    self._refuse_tables(files, place)
                return files
        if not is_remote(name) and os.path.exists(place.root) and not place.is_folder(place.root):
            raise ConvertError(
                f"{name}: is a pipe or a device, which only `streammega convert` reads; name it "
                f"itself, not in a list"
            )
        root, pattern = _split_pattern(place)
        if not is_remote(name) and not place.is_folder(root):
            raise _not_found(name)
        entries = sorted(_walk(place, root, pattern or ["**"]), key=lambda entry: entry.path)
        if not entries and (pattern or is_remote(name)):
            raise _not_found(name)
        paths = frozenset(entry.path for entry in entries)
        chosen = self._choose(entries, paths, root, pattern)
        files = _Group(chosen, place, self, root, paths, is_whole=not pattern).inputs()
        self._refuse_tables(files, place, root if isinstance(place, Driver) else "")
        # among files of other formats, a dataset was perhaps made of them
        if any(item.format != "megatron" for item in files):
            datasets = [item for item in files if item.manifest]
            files = _drop(files, datasets, DATASETS, self.skipped)
        if not files:
            reasons = "; ".join(self.skipped.as_lines())
            reasons = f" that can be read; left out: {reasons}" if reasons else ""
            raise ConvertError(f"{split_query(name)[0]}: holds no files{reasons}")
        return files

    def _choose(
        self, entries: Sequence[Entry], paths: Set[str], root: str, pattern: Sequence[str]
    ) -> dict[str, Entry]:
        """The files that are read, by their paths, out of the entries below a folder or of a glob.

        Raises ConvertError for what cannot be listed, unless `on_error` is "skip".
        """
        files = {}
        hidden_paths: set[str] = set()
        options = self.options
        for entry in entries:
            path = entry.path
            below = _below(path, root)
            parts = below.split("/")
            is_file = entry.kind not in FOLDERS
            included = _matching(options.include, below, path) if is_file else []
            excluded = _excluding(options.exclude, below if is_file else f"{below}/", path)
            self.skipped.matched_patterns.update(included, excluded)
            hidden = 0 if _hidden_part(pattern) else _hidden_part(parts)
            reason = entry.kind
            if self.own_output is not None and _is_own(path, paths, self.own_output):
                reason = OWN_OUTPUT
            elif excluded:
                reason = EXCLUDED
            elif hidden:
                reason = HIDDEN
                path = path.removesuffix(below) + "/".join(parts[:hidden])
                if path in hidden_paths:  # of all that is in a hidden folder, once
                    continue
                hidden_paths.add(path)
            elif options.include and not included and is_file:
                reason = NOT_INCLUDED
            elif entry.fault and options.on_error == "stop":
                raise ConvertError(entry.fault)
            if reason == FILE:
                files[path] = entry
            else:
                self.skipped.add(reason, path)
        return files

    def _refuse_tables(self, files: Sequence[Input], place: Place, top: str = "") -> None:
        """Raise ConvertError for a file of a table: rows that were deleted are in it too. top: the last
        folder, upwards, that may be of one.
        """
        paths = [item.path for item in files if item.format == "parquet"]
        folders = sorted({os.path.dirname(resolved(path)) for path in paths})
        while folders:
            folder = folders.pop()
            if folder in self.no_tables:
                continue
            log = _log_in(place, folder)
            if log:
                above, _, name = log.rpartition("/")
                formats = TABLE_LOGS | {"metadata": "Iceberg", "snapshot": "Paimon"}
                raise ConvertError(
                    f"{above}: is a table of {formats.get(name, 'Hive')} by its {name}, so its files "
                    f"may hold rows that were deleted or replaced; export the rows that are left to "
                    f"Parquet, and convert these"
                )
            self.no_tables.add(folder)
            above = os.path.dirname(folder)
            if folder != top and above not in ("", folder) and not above.endswith(":"):
                folders.append(above)


def _log_in(place: Place, folder: str) -> str:
    """The log of the table whose data begins with a folder; "" without one."""
    above, _, name = folder.rpartition("/")
    if HIVE_TRANSACTION.fullmatch(name):
        return folder
    metadata = f"{above}/metadata"
    snapshots = os.path.join(folder, "snapshot")
    try:
        for log in (os.path.join(folder, log) for log in TABLE_LOGS):
            if place.is_folder(log):
                return log
        # `data` may be the bucket itself
        if name == "data" and not above.endswith(":/") and place.is_folder(metadata):
            names = [entry.path for entry in place.entries(metadata, is_deep=False)]
            if any(name.removesuffix(".gz").endswith(".metadata.json") for name in names):
                return metadata
        if place.is_folder(snapshots):
            names = [
                os.path.basename(entry.path) for entry in place.entries(snapshots, is_deep=False)
            ]
            if any(re.fullmatch(r"snapshot-\d+|LATEST", name) for name in names):
                return snapshots
    except AccessDeniedError:  # a key to a bucket may be for one of its folders
        pass
    return ""


@contextmanager
def _plain_errors(item: str) -> Iterator[None]:
    """Errors of clients become ours."""
    try:
        yield
    except StreammegaError:
        raise
    except Exception as error:  # clients raise whatever they like
        failure = failure_of(split_query(item)[0], error)
        is_missing = isinstance(failure, ObjectNotFoundError)
        raise (_not_found(item) if is_missing else failure) from None


def _not_found(item: str) -> ObjectNotFoundError:
    shown, query = split_query(item)
    kind, where = ("object", "URL") if is_remote(item) else ("file", "path")
    message = f"{shown}: no such {kind}, folder or match; "
    message += "has its signature expired?" if query else f"check the {where}, and quote globs"
    if "{" in shown:
        message += ", but no braces: the shell expands them, here they are plain text"
    return ObjectNotFoundError(message)


def _split_pattern(place: Place) -> tuple[str, list[str]]:
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
    return place.root, []


def _walk(place: Place, root: str, pattern: Sequence[str]) -> Iterator[Entry]:
    """All files below a folder that match a pattern; whatever else does, with the reason why it is
    not read.

    A folder that is hidden is one entry, unless the pattern names a hidden one. Each folder is
    searched once, whatever symbolic links lead to it; first by its own name.
    """
    is_deep = len(pattern) > 1 or pattern == ["**"]
    folders = [root]
    links: list[str] = []
    searched = set()
    while folders or links:
        folder = folders.pop() if folders else heapq.heappop(links)
        identity = place.identity(folder)
        if identity in searched:
            yield Entry(folder, TWICE)
            continue
        searched.add(identity)
        for entry in place.entries(folder, is_deep=is_deep):
            note_part("names found", 1, unit="")
            parts = _below(entry.path, root).split("/")
            used = _used_parts(parts, pattern)
            is_match = len(pattern) in used
            if entry.kind != FOLDER or (_hidden_part(parts) and not _hidden_part(pattern)):
                if is_match or entry.kind == UNLISTED:
                    yield entry
            elif not used - {len(pattern)}:  # nothing below it can match
                if is_match:
                    yield Entry(entry.path, MATCHED)
            elif entry.is_link:
                heapq.heappush(links, entry.path)
            else:
                folders.append(entry.path)


def _used_parts(parts: Sequence[str], pattern: Sequence[str]) -> set[int]:
    """How many parts of a pattern the names on a path may have used up: all of them, if it matches;
    none, if nothing below it can match. `**` is any number of names.
    """
    used = {0}
    for name in (None, *parts):
        if name is not None:
            used = {
                number + (pattern[number] != "**")
                for number in used
                if number < len(pattern) and fnmatchcase(name, pattern[number])
            }
        for number, part in enumerate(pattern):
            if number in used and part == "**":
                used.add(number + 1)
    return used


def _below(path: str, root: str) -> str:
    """A path as seen from a folder above it."""
    return path.removeprefix(root).lstrip("/")


def _hidden_part(parts: Sequence[str]) -> int:
    """The number, from 1, of the first name on a path that hides what is below it; 0 without one:
    such names begin with a dot, or are of unfinished work (of Spark, and of our columns).
    """
    for number, part in enumerate(parts, 1):
        if part.startswith(".") or part == UNCOMMITTED or JOB in part:
            return number
    return 0


# --- which of them are read -----------------------------------------------------------------------


def _matching(patterns: Sequence[str], below: str, path: str) -> list[str]:
    """The patterns of the options that match a name: one with a slash its path, within the folder
    that is searched or as a whole, one without its last part.
    """
    matching = []
    for pattern in patterns:
        plain = pattern.rstrip("/")
        spellings = (below, path) if "/" in plain else (os.path.basename(path),)
        if any(fnmatchcase(spelling, plain) for spelling in spellings):
            matching.append(pattern)
    return matching


def _excluding(patterns: Sequence[str], below: str, path: str) -> list[str]:
    """The patterns that match a path, or a folder above it within the folder that is searched. below:
    the path within that, with a slash behind a folder.
    """
    above = path.removesuffix(below.rstrip("/"))
    ends = [end for end, sign in enumerate(below) if sign == "/"] + [len(below)] if patterns else []
    return [one for end in ends for one in _matching(patterns, below[:end], above + below[:end])]


def _is_own(path: str, paths: Set[str], own_output: OwnOutput) -> bool:
    """Whether a file is of the output or of the work folder. paths: all that are there."""
    work_dir = own_output.work_dir.rstrip("/")
    may_be_in_it = f"/{work_dir.rpartition('/')[2]}/" in path
    if may_be_in_it and resolved(path).startswith(f"{resolved(work_dir)}/"):
        return True
    folder, _, stem = own_output.prefix.rpartition("/")
    above, _, name = path.rpartition("/")
    if not name.startswith(stem) or resolved(above or ".") != resolved(folder or "."):
        return False
    shard = _shard_of(path)
    # a .tar or .bin without its .idx, or with another ending, does not belong to it
    is_shard = f"{shard}.idx" in paths and could_belong_to(shard.rpartition("/")[2], stem)
    return is_shard or name == stem + MANIFEST or dataset_of_tokenizer(name) == stem


def _drop(
    inputs: list[Input], others: list[Input], reason: str, skipped: SkippedFiles
) -> list[Input]:
    """All but the others, which are counted with the files that belong to them."""
    for item in others:
        skipped.add(reason, item.path, *item.parts)
    left_out = set(map(id, others))
    return [item for item in inputs if id(item) not in left_out]


def _drop_repeats(inputs: list[Input], skipped: SkippedFiles) -> list[Input]:
    """All but the later names of one file, and folders all of whose shards another's index names."""
    first: dict[Any, Input] = {}
    repeated = [item for item in inputs if first.setdefault(item.identity, item) is not item]
    named: set[str] = set()
    folders = [item for item in first.values() if item.format in ("mds", "litdata")]
    for item in sorted(folders, key=lambda item: -len(item.parts)):
        shards = set(map(resolved, item.parts[1:]))
        if shards and shards <= named:
            repeated.append(item)
        named |= shards
    return _drop(inputs, repeated, REPEATED, skipped)


def _keep_split(inputs: list[Input], wanted: str | None, skipped: SkippedFiles) -> list[Input]:
    """The inputs of the split that is wanted. Raises ConvertError if it has none, and for inputs of
    several splits if none is named.
    """
    if wanted == ALL_SPLITS:
        return inputs
    # letter by letter, as `commonpath` cannot compare URLs
    common = os.path.commonprefix([item.path for item in inputs]).rpartition("/")[0]  # noqa: RUF071
    splits = {
        item.split or _split_of(_below(item.path, common)): item.path for item in inputs[::-1]
    }
    there = "; ".join(f"{split}: {path!r}" for split, path in sorted(splits.items()) if split)
    if wanted is None:
        if len(splits.keys() - {""}) > 1:
            raise ConvertError(
                f"the inputs are of several splits ({there}); convert one of them by --hf-split "
                f"NAME, choose files by --include GLOB, or take all by --hf-split {ALL_SPLITS}"
            )
        return inputs
    above = common.rpartition("/")[0]
    is_listed = any(item.split == wanted for item in inputs)

    def is_wanted(item: Input) -> bool:
        """Whether an input is of the wanted split: by the list of its writer, else by its name."""
        if item.split and is_listed:
            return item.split == wanted
        name = item.split or _below(item.path, above)
        if SPLITS.fullmatch(wanted):
            return _split_of(name) == _split_of(wanted)
        return re.search(_WORD.format(re.escape(wanted)), name, re.IGNORECASE) is not None

    others = [item for item in inputs if not is_wanted(item)]
    kept = _drop(inputs, others, f"{NOT_OF_SPLIT} {wanted}", skipped)
    if not kept:
        raise ConvertError(
            f"no input is of split {wanted!r} (--hf-split); there are: {there or 'no splits'}"
        )
    return kept


def _split_of(path: str) -> str:
    """The split that the last name on a path says that says one; "": there is none."""
    for name in reversed(path.split("/")):
        splits = {str(match.lastgroup) for match in SPLITS.finditer(name)}
        if len(splits) == 1:
            return splits.pop()
    return ""


# --- files that belong together -------------------------------------------------------------------


class _Index(NamedTuple):
    """What an index says of the folder in which it is. format: of the files. names: of those that are
    read. others: of files that hold the same, or that belong to the index.
    """

    format: str
    names: list[str]
    others: list[str]


@dataclass
class _Group:
    """Files that were found. Each becomes an input, or a part of one, or is left out.

    entries: those that are not part of an input yet, by their paths. root: the folder that was
    searched, and paths: all that were found there; None where a file is named itself, and so is an
    error if it is left out. is_whole: no others are there.
    """

    entries: dict[str, Entry]
    place: Place
    search: _Search
    root: str = ""
    paths: frozenset[str] | None = None
    is_whole: bool = False
    manifest_of: dict[str, str] = field(default_factory=dict)
    """The manifest of each prefix of a shard that one lists."""
    copies: dict[str, list[str]] = field(default_factory=dict)
    """Copies of tokenizers that no input has yet, by the manifests of their datasets."""
    splits: dict[str, str] = field(default_factory=dict)
    """The splits that folders are by the list of the library that wrote them."""

    def inputs(self) -> list[Input]:
        """All inputs, by the order of their paths."""
        inputs = self._indexed()
        manifests = self._take_manifests()
        inputs += self._pairs(manifests)
        for path, entry in self.entries.items():
            file_format = "megatron" if path in manifests else self._format_of(path)
            if file_format:
                inputs.append(self._input(entry, file_format))
            else:
                self._leave_out(UNKNOWN, path)
        if self.paths is not None:
            copies = [path for paths in self.copies.values() for path in paths]
            reason = "manifests and tokenizers without their shards"
            self.search.skipped.add(reason, *sorted(manifests), *sorted(copies))
        return sorted(inputs, key=lambda item: item.path)

    def _format_of(self, path: str) -> str:
        """A file's format; "": none is known. One of an unknown suffix is a text if a pattern of
        `include` spells this: `*.md`, not `data/*`, which chooses files and says nothing of them.
        """
        file_format = format_of(path)
        if file_format == "raw" and LITDATA_CHUNK.fullmatch(os.path.basename(path)):
            raise ConvertError(
                f"{path}: is a chunk of litdata by its name, not raw ids; name its folder, whose "
                f"index.json says how it is read (without one litdata did not finish it)"
            )
        if not file_format:
            patterns = [one for one in self.search.options.include if one.endswith(_ending(path))]
            matching = _matching(patterns, _below(path, self.root), path)
            self.search.skipped.matched_patterns.update(matching)
            file_format = "text" if matching else ""
        return file_format

    def _leave_out(self, reason: str, *paths: str) -> None:
        """Count files; one that is named itself is an error."""
        if self.paths is None and paths:
            remedy = "name its folder, or move it elsewhere"
            if reason == UNKNOWN:
                pattern = f"*{_ending(paths[0])}"
                remedy = (
                    f"name it .txt (the file is one text) or .jsonl (a JSON record a line) for "
                    f"instance, or take such files as texts by --include {pattern!r}"
                )
            raise ConvertError(f"{paths[0]!r}: is {reason}; {remedy}")
        self.search.skipped.add(reason, *paths)

    def _input(self, entry: Entry, file_format: str, path: str = "") -> Input:
        entry = self._looked_up(entry)
        return Input(
            path=(path or entry.path) + self.place.chain,
            format=file_format,
            size=entry.size,
            etag=entry.etag,
            query=self.place.query,
            identity=entry.identity,
            split=self.splits.get(os.path.dirname(entry.path), ""),
        )

    def _looked_up(self, entry: Entry) -> Entry:
        """The entry with its size and version, which some listings do not say."""
        if entry.size < 0 or not entry.etag:
            entry = self.place.file(entry.path) or entry
        size = max(0, entry.size)
        return entry._replace(size=size, etag=entry.etag or f"{SIZED}{size}")

    def _entry_of(self, path: str) -> Entry | None:
        """The file of a name that was found, or that is there without having been found."""
        is_known = self.is_whole and path not in (self.paths or ())
        return self.entries.get(path) or (None if is_known else self.place.file(path))

    def _json_of(self, path: str) -> dict[str, Any]:
        """The object in a file; empty without one."""
        try:
            content = parse_json(self.place.read(path)) if self._entry_of(path) else {}
        except ValueError:  # of another program
            content = {}
        return content if isinstance(content, dict) else {}

    # folders whose writer lists their files

    def _indexed(self) -> list[Input]:
        """Inputs that indices list. Other files next to these are left out."""
        inputs: list[Input] = []
        by_folder: dict[str, list[str]] = {}
        for path in self.entries:
            by_folder.setdefault(os.path.dirname(path), []).append(path)
        for folder in sorted(by_folder, key=len):  # those above come first
            index_path, index = self._index_in(folder, by_folder[folder])
            if index is None:
                continue
            files = {_joined(folder, name): name for name in index.names}
            if index.format in ("mds", "litdata"):
                inputs.append(self._folder_input(folder, index_path, index.format, files))
            else:
                inputs += self._listed_files(index_path, index.format, files)
            named = {index_path, *files, *(_joined(folder, name) for name in index.others)}
            for held in sorted({folder, *map(os.path.dirname, files)}):
                paths = [path for path in by_folder.get(held, ()) if path in self.entries]
                self._leave_out(NOT_IN_INDEX, *(path for path in paths if path not in named))
                for path in paths:
                    del self.entries[path]
        return inputs

    def _index_in(self, folder: str, paths: Sequence[str]) -> tuple[str, _Index | None]:
        """The path of a folder's index, and what it says. paths: of files in the folder.

        Raises ConvertError for a list that cannot be followed.
        """
        index_path = os.path.join(folder, "index.json")
        if index_path in self.entries:
            return index_path, _index_of_loader(self._json_of(index_path))
        index_path = os.path.join(folder, "state.json")
        if not any(path.endswith(".arrow") and path in self.entries for path in paths):
            return index_path, None
        state = self._json_of(index_path)
        if state.get("_indices_data_files"):
            raise ConvertError(
                f"{folder}: a list of indices chooses its rows, as old versions of datasets saved "
                f"them; load it by load_from_disk, and save it again"
            )
        info_path = os.path.join(folder, "dataset_info.json")
        try:
            names = [str(file["filename"]) for file in state["_data_files"]]
        except (TypeError, KeyError):  # there is none, or it is of another program
            if "features" not in self._json_of(info_path):
                return index_path, None
            # the library's own cache has no list, and names what `map` made by its fingerprint
            names = list(map(os.path.basename, paths))
            names = [name for name in names if name.endswith(".arrow") and name[:6] != "cache-"]
        above, name = os.path.split(folder)
        list_path = os.path.join(above, "dataset_dict.json")
        splits = self._json_of(list_path).get("splits")
        if isinstance(splits, list):
            self.entries.pop(list_path, None)
            self.splits[folder] = name
            names = names if name in splits else []  # an earlier save may have had it
        return index_path, _Index("arrow", names, [os.path.basename(info_path)])

    def _folder_input(
        self, folder: str, index_path: str, file_format: str, files: dict[str, str]
    ) -> Input:
        """A folder of MDS or litdata. files: names in the index, by their paths."""
        item = self._input(self.entries[index_path], file_format, folder or ".")
        versions = {}
        for path, name in {index_path: "index.json", **files}.items():
            entry = self._entry_of(path)
            if entry is not None:
                versions[name] = self._looked_up(entry).etag
        etag = digest_of_json(versions)
        return replace(item, parts=(index_path, *files), versions=versions, etag=etag)

    def _listed_files(
        self, index_path: str, file_format: str, files: dict[str, str]
    ) -> Iterator[Input]:
        """The files that an index names, but those that options leave out. Of an index that was not
        found itself, those that were found. Raises ConvertError for one outside of its folder,
        ObjectNotFoundError for one that is not there.
        """
        for path, name in files.items():
            if escapes_folder(name):
                raise ConvertError(
                    f"{index_path}: names {name!r}, which is outside of the folder; who made it?"
                )
            is_wanted = index_path in self.entries and path not in (self.paths or ())
            entry = self._entry_of(path) if is_wanted else self.entries.get(path)
            if entry is not None:
                yield self._input(entry, file_format)
            elif is_wanted:
                raise ObjectNotFoundError(
                    f"{path}: is not there, and {index_path} lists it; copy the folder again"
                )

    # datasets of ours

    def _take_manifests(self) -> set[str]:
        """The manifests of ours. In a folder, where their shards are there too, they and the copies of
        tokenizers are no inputs.
        """
        paths = dict.fromkeys(path for path in self.entries if path.endswith(MANIFEST))
        if self.paths is not None:
            for path in [path for path in self.entries if dataset_of_tokenizer(path)]:
                manifest = f"{dataset_of_tokenizer(path)}{MANIFEST}"
                self.copies.setdefault(manifest, []).append(path)
                del self.entries[path]
            # options may have left out those of shards with a mark
            owners = map(dataset_of_marked, map(_shard_of, self.entries))
            paths |= dict.fromkeys(owner + MANIFEST for owner in owners if owner)
        manifests = set()
        for path in paths:
            data = self.place.read(path) if self._entry_of(path) else b""
            if MANIFEST_FORMAT.encode() not in data[:200]:
                continue
            # the reader of a damaged one will say so
            with suppress(ValueError, TypeError, KeyError):
                shards: Any = parse_json(data)["shards"]
                names = [_joined(os.path.dirname(path), str(shard["name"])) for shard in shards]
                self.manifest_of |= dict.fromkeys(names, path)
            if path in self.entries:
                manifests.add(path)
                if self.paths is not None:
                    del self.entries[path]
        return manifests

    def _pairs(self, manifests: set[str]) -> list[Input]:
        """Each .idx with its tokens, and what belongs to them. manifests: those that no input has yet."""
        files_of: dict[str, list[str]] = {}
        for path in self.entries:
            if shard := _shard_of(path):
                files_of.setdefault(shard, []).append(path)
        pairs = []
        for shard, files in files_of.items():
            index = self._entry_of(f"{shard}.idx")
            is_listed = not dataset_of_marked(shard) or shard in self.manifest_of
            if self.paths is not None and not is_listed:
                # of a conversion that was killed, or of a dataset that was replaced
                self._leave_out("shards that no manifest lists", *files)
            elif index is None:
                continue
            else:
                pairs.append(self._pair(shard, index, files, manifests))
            for path in files:
                del self.entries[path]
        return pairs

    def _pair(self, shard: str, index: Entry, files: list[str], manifests: set[str]) -> Input:
        there = [self._entry_of(shard + suffix) for suffix in SUFFIXES.values()]
        tokens = next((entry for entry in there if entry is not None), None)
        if tokens is None:
            raise ObjectNotFoundError(
                f"{index.path}: has no .bin, .bin.zst or .tar next to it; copy both, or leave it out"
            )
        # of a folder, the .idx names both
        path = index.path if index.path in files else tokens.path
        manifest = self.manifest_of.get(shard, "")
        parts = [file for file in files if file != path]
        if manifest in manifests:
            manifests.discard(manifest)
            parts += [manifest, *self.copies.pop(manifest, ())]
        # what is read are the tokens, and a change of either file makes another dataset
        index, tokens = self._looked_up(index), self._looked_up(tokens)
        return replace(
            self._input(tokens, "megatron", path),
            etag=f"{index.etag}+{tokens.etag}",
            identity=(index.identity, tokens.identity),
            parts=tuple(parts),
            manifest=manifest,
        )


def _ending(path: str) -> str:
    """The last suffix of a name, or all of one without a suffix."""
    name = os.path.basename(path)
    return os.path.splitext(name)[1] or name


def _shard_of(path: str) -> str:
    """The prefix of the shard to which a file belongs by its name; "" for all others."""
    prefix = shard_of_column(path) or strip_suffix(path.removesuffix(ORIGINS))
    return "" if prefix == path else prefix


def _joined(folder: str, name: str) -> str:
    """The path of a file that an index in a folder names."""
    return os.path.join(folder, os.path.normpath(name))


def _index_of_loader(index: dict[str, Any]) -> _Index | None:
    """The content of an index.json of MDS or litdata; None: it is of another program."""
    shards, chunks = index.get("shards"), index.get("chunks")
    try:
        # our manifests list shards, too
        if isinstance(shards, list) and index.get("format") != MANIFEST_FORMAT:
            raw = [str((shard.get("raw_data") or {}).get("basename")) for shard in shards]
            packed = [str((shard.get("zip_data") or {}).get("basename")) for shard in shards]
            stored = [one if two == "None" else two for one, two in zip(raw, packed, strict=True)]
            return _Index("mds", stored, raw)
        if isinstance(chunks, list) and "config" in index:
            # litdata can index Parquet files as they are
            is_parquet = index["config"].get("item_loader") == "ParquetLoader"
            names = [str(chunk.get("filename")) for chunk in chunks]
            return _Index("parquet" if is_parquet else "litdata", names, [])
    except AttributeError:
        pass  # a list or text where both have an object
    return None
