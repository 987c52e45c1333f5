"""Which of the files that were found are read. What is left out is counted with its reason.

Files are chosen by their names (`choose_files`), then the inputs that are made of them: in a known
format, once each, of one split.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import NamedTuple

from streammega.convert.options import ConvertOptions
from streammega.convert.read.formats import format_of
from streammega.convert.read.source import Input
from streammega.convert.read.walk import FILE, FOLDERS, Row, path_below, shows_hidden
from streammega.dataset.columns import JOB, shard_of_column
from streammega.dataset.names import MANIFEST, could_belong_to, strip_suffix
from streammega.dataset.provenance import ENDING as ORIGINS
from streammega.errors import ConvertError
from streammega.storage.open import resolved

LEFTOVERS = (
    *("*.origins", f"*{JOB}*/*"),
    *("_SUCCESS", "_metadata", "_common_metadata", "_committed_*", "_started_*", "*.crc"),
    *("_temporary/*", "*/_temporary/*"),
    *("*.tmp", "*.part", "*.partial", "*.incomplete", "*.crdownload", "*~"),
    *("*.md5", "*.sha1", "*.sha256", "MD5SUMS*", "SHA256SUMS*"),
)
"""Files that engines leave in the folders they write, unfinished downloads and columns, checksums."""
HF_DATASET_FILES = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
"""What the datasets library keeps with Parquet and Arrow files."""
_ABOUT = re.compile(
    r"(readme|licen[sc]e|notice|citation|changelog)(\.(md|txt|rst|html|cff))?", re.I
)
"""Files that describe a dataset: documents only where no file of another format is."""
MAX_NAMES = 1000
"""Names of skipped files that are kept for each reason: there may be millions."""
OWN_OUTPUT = "of this conversion's own output"
UNKNOWN = "of unknown suffix"
REPEATED = "other names of files that are read"
ALL_SPLITS = "all"
SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""The words by which the datasets library knows splits in names."""


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

    def merge(self, other: SkippedFiles) -> None:
        """Count what another has."""
        self.matched_patterns |= other.matched_patterns
        for reason, count in other.counts.items():
            self.add(reason, *other.names[reason])
            self.counts[reason] += count - len(other.names[reason])

    def as_text(self) -> str:
        """Counts for a message, such as "hidden: 2; like README: 1"."""
        counted = [f"{reason}: {count:,}" for reason, count in sorted(self.counts.items())]
        return "; ".join(counted)


class OwnOutput(NamedTuple):
    """What a conversion writes, and so does not read. prefix: the dataset's; work_dir: the URL of
    its work folder.
    """

    prefix: str
    work_dir: str


def drop_own_output(
    rows: list[Row], own_output: OwnOutput | None, skipped: SkippedFiles
) -> list[Row]:
    """All but the files of the output, and of the work folder."""
    if own_output is None:
        return rows
    paths = {row.path for row in rows}
    own_paths = dict.fromkeys(row.path for row in rows if _is_own(row.path, paths, own_output))
    skipped.add(OWN_OUTPUT, *own_paths)
    return [row for row in rows if row.path not in own_paths]


def _is_own(path: str, paths: Collection[str], own_output: OwnOutput) -> bool:
    work_dir = own_output.work_dir.rstrip("/")
    may_be_in_it = f"/{work_dir.rpartition('/')[2]}/" in path
    if may_be_in_it and resolved(path).startswith(f"{resolved(work_dir)}/"):
        return True
    folder, _, stem = own_output.prefix.rpartition("/")
    above, _, name = path.rpartition("/")
    if not name.startswith(stem) or resolved(above or ".") != resolved(folder or "."):
        return False
    prefix = strip_suffix(name.removesuffix(ORIGINS).removesuffix(MANIFEST))
    prefix = shard_of_column(name) or prefix
    # a .tar or .bin without its .idx, or with another ending, does not belong to it
    has_index = f"{path.removesuffix(name)}{prefix}.idx" in paths
    is_shard = prefix != name and has_index and could_belong_to(prefix, stem)
    return is_shard or name == stem + MANIFEST


def choose_files(
    rows: Iterable[Row],
    root: str,
    pattern: Sequence[str],
    options: ConvertOptions,
    skipped: SkippedFiles,
) -> list[Row]:
    """The files that are read, out of the names below a folder or of a glob.

    A pattern of the options (`include`, `exclude`) with a slash is compared with the path within
    the folder, one without with the file's name. One of `exclude` may also name a folder above the
    file. What a glob matches is meant as it is: only what is hidden or not chosen by the options is
    skipped.

    Raises ConvertError for what cannot be listed, unless `on_error` is "skip".
    """
    files = []
    hidden: dict[str, None] = {}
    for row in rows:
        path = path_below(row.path, root)
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
    about = {path for path in about if not _matches(path_below(path, root), options.include)}
    skipped.add("next to the data (README, LICENSE, ...)", *sorted(about))
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
        # among texts alone a README is a document like them
        elif file_format not in ("text", "unknown"):
            folders = list(_folders_above(path, root))
            data_folders.update(folders)
            if file_format in ("parquet", "arrow"):
                table_folders.update(folders)
    return {path for path, folders in about if os.path.dirname(path) in folders}


def _folders_above(path: str, root: str) -> Iterator[str]:
    """Folders above a file, the nearest first, up to `root` itself."""
    shortest = len(root.rstrip("/"))
    while len(path) > shortest and "/" in path:
        path, _, _ = path.rpartition("/")
        yield path


def drop_inputs(
    inputs: list[Input], others: list[Input], reason: str, skipped: SkippedFiles | None
) -> list[Input]:
    """All but the others, which are counted with the files that belong to them."""
    for item in others:
        if skipped is not None:
            skipped.add(reason, item.path, *item.parts)
    left_out = set(map(id, others))
    return [item for item in inputs if id(item) not in left_out]


def keep_known_formats(inputs: list[Input], skipped: SkippedFiles | None) -> list[Input]:
    """The inputs whose suffixes say their formats. Others are counted in `skipped` if inputs of
    known formats are there, else they are an error.
    """
    unknown = [item for item in inputs if item.format == "unknown"]
    if unknown and (skipped is None or len(unknown) == len(inputs)):
        raise ConvertError(
            f"{unknown[0].path!r}: its suffix names no format that is known; give it another name, "
            f".txt (the file is one text) or .jsonl (a JSON record a line) for instance, or leave it "
            f"out of a folder or glob by --exclude"
        )
    return drop_inputs(inputs, unknown, UNKNOWN, skipped)


def drop_repeats(inputs: list[Input], skipped: SkippedFiles) -> list[Input]:
    """All but the later names of one file, and folders whose shards another's index names."""
    first = {}
    for item in reversed(inputs):
        first[item.identity] = item
    own_folders = {
        resolved(item.path): item for item in first.values() if item.format in ("mds", "litdata")
    }
    repeated = {id(item): item for item in inputs if first[item.identity] is not item}
    for item in own_folders.values():
        index_path, *shards = item.parts
        for folder in folders_between(os.path.dirname(index_path), shards):
            below = own_folders.get(resolved(folder), item)
            repeated |= {} if below is item else {id(below): below}
    return drop_inputs(inputs, list(repeated.values()), REPEATED, skipped)


def folders_between(folder: str, paths: Iterable[str]) -> set[str]:
    """A folder, and all those on the way from it to files below."""
    folders = {folder}
    for above in set(map(os.path.dirname, paths)):
        while above not in folders and above.startswith(folder):
            folders.add(above)
            above = os.path.dirname(above)
    return folders


def keep_one_split(inputs: list[Input], wanted: str | None, skipped: SkippedFiles) -> list[Input]:
    """The inputs of the split that is wanted. Raises ConvertError if it has none, and for inputs of
    several splits if none is named.
    """
    if wanted == ALL_SPLITS:
        return inputs
    paths = [item.path for item in inputs]
    # letter by letter, as `commonpath` cannot compare URLs
    common = os.path.commonprefix(paths).rpartition("/")[0]  # noqa: RUF071
    groups = _splits_below(common, inputs)
    examples = {split: item.path for group in groups for split, item in group.items()}
    there = "; ".join(f"{split}: {path!r}" for split, path in sorted(examples.items()))
    if wanted is None:
        if groups:
            raise ConvertError(
                f"the inputs are of several splits ({there}); convert one of them by --hf-split "
                f"NAME, choose files by --include GLOB, or take all by --hf-split {ALL_SPLITS}"
            )
        return inputs
    above = common.rpartition("/")[0]
    is_listed = any(item.split == wanted for item in inputs)

    def is_wanted(item: Input) -> bool:
        if item.split and is_listed:
            return item.split == wanted
        return is_of_split(item.split or path_below(item.path, above), wanted)

    others = [item for item in inputs if not is_wanted(item)]
    kept = drop_inputs(inputs, others, f"not of split {wanted}", skipped)
    if not kept:
        raise ConvertError(
            f"no input is of split {wanted!r} (--hf-split); there are: {there or 'no splits'}"
        )
    return kept


def _splits_below(root: str, inputs: list[Input]) -> list[dict[str, Input]]:
    """For each folder whose names say several splits, an input of each split. Texts must be in one
    folder; other files may be anywhere.
    """
    splits_of_folder: dict[str, dict[str, Input]] = {}
    for item in inputs:
        if item.split:
            splits_of_folder.setdefault("/", {}).setdefault(item.split, item)
            continue
        path = path_below(item.path, root)
        for start, split in splits_of(path):
            folder = path[:start] if item.format == "text" else "/"
            splits_of_folder.setdefault(folder, {}).setdefault(split, item)
    groups = []
    for folder, group in splits_of_folder.items():
        # folders of programs have a `dev` and a `test`, too
        if len(group) > 1 and ("train" in group or folder == "/"):
            groups.append(group)
    return groups


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
            splits = [name for _, name in splits_of(path)]
            return splits[-1:] == [split]
    return _has_word(path, (wanted,))


def _has_word(path: str, words: Iterable[str]) -> bool:
    any_word = "|".join(map(re.escape, words))
    return re.search(rf"(?<![a-z])(?:{any_word})(?![a-z])", path, re.I) is not None
