"""The inputs of a conversion: names of files, folders, globs, lists and URLs become inputs, each in a
format. Every file that is found is read, is part of what is read, or is counted with the reason why
it is left out.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from streammega.config import StorageConfig
from streammega.config.validate import parse_json
from streammega.convert.options import ConvertOptions
from streammega.convert.read.formats import FORMAT_READ_AS, format_of
from streammega.convert.read.selection import (
    OwnOutput,
    SkippedFiles,
    choose_files,
    drop_inputs,
    drop_own_output,
    drop_repeats,
    keep_known_formats,
    keep_one_split,
)
from streammega.convert.read.source import Input
from streammega.convert.read.walk import (
    Place,
    Row,
    failure_of,
    open_place,
    split_pattern,
    walk,
)
from streammega.dataset.manifest import FORMAT as MANIFEST_FORMAT
from streammega.dataset.names import MANIFEST, SUFFIXES, strip_suffix
from streammega.errors import (
    AccessDeniedError,
    ConfigError,
    ConvertError,
    ObjectNotFoundError,
    StreammegaError,
)
from streammega.errors.redaction import redact_urls, split_query
from streammega.storage.open import is_remote

log = logging.getLogger(__name__)

Inputs = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""Names of inputs. A single one needs no list."""
DATASETS = "streammega datasets among files of other formats"
NOT_IN_INDEX = "next to shards whose index does not name them"


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
    files, for what cannot be listed (unless `on_error` is "skip"), for a file whose suffix names no
    format (unless `read_as` says it), and for files of several splits (unless `hf_split` names
    one); ConfigError for no inputs, and for a `read_as` without a file.
    """
    storage = storage or StorageConfig()
    options = options or ConvertOptions()
    if skipped is None:
        skipped = SkippedFiles()
    files: list[Input] = []
    for item in expand_lists(input_names(inputs)):
        with _plain_errors(item, storage):
            files += _inputs_of(item, storage, options, skipped, own_output)
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
    files = drop_repeats(files, skipped)
    files = keep_one_split(files, options.hf_split, skipped)
    read_as = FORMAT_READ_AS.get(options.read_as or "")
    of_plain_suffix = [item for item in files if format_of(item.path) in ("text", "unknown")]
    if read_as is not None and not any(item.format == read_as for item in of_plain_suffix):
        raise ConfigError(
            f"read_as (--as) is {options.read_as!r}, but the suffixes of all inputs name another "
            f"format ({files[0].path!r}); leave it out"
        )
    return files


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


@contextmanager
def _plain_errors(item: str, storage: StorageConfig) -> Iterator[None]:
    """Errors of disks and clients become ours, without secrets."""
    shown, _query = split_query(item)
    try:
        yield
    except StreammegaError:
        raise
    except OSError as error:
        if is_remote(item):
            failure = failure_of(shown, error, storage)
            is_missing = isinstance(failure, ObjectNotFoundError)
            raise (_not_found(item) if is_missing else failure) from None
        if isinstance(error, PermissionError):
            message = f"{error.filename or item}: permission denied; make it readable"
            raise AccessDeniedError(message) from None
        raise ConvertError(
            f"{error.filename or item}: cannot be read ({error.strerror or error})"
        ) from None
    except Exception as error:  # clients raise whatever they like
        raise failure_of(shown, error, storage) from None


def _not_found(item: str) -> ObjectNotFoundError:
    shown, query = split_query(item)
    if query:
        return ObjectNotFoundError(
            f"{shown}: no such object, folder or match; has its signature expired?"
        )
    kind, where = ("object", "URL") if is_remote(item) else ("file", "path")
    message = f"{shown}: no such {kind}, folder or match; check the {where}, and quote globs"
    if "{" in shown:
        message += ", but no braces: the shell expands them, here they are plain text"
    return ObjectNotFoundError(message)


def _inputs_of(
    item: str,
    storage: StorageConfig,
    options: ConvertOptions,
    skipped: SkippedFiles,
    own_output: OwnOutput | None,
) -> list[Input]:
    """The inputs that one name leads to."""
    place = open_place(item, storage)
    # a signature is that of one object
    endings = ("",) if place.query else ("", ".idx", MANIFEST)
    for ending in endings:
        row = None if item.endswith("/") else place.file(place.name + ending)
        if row is not None:
            return keep_known_formats(_Files([row], place).inputs(), options.read_as, None)
    if not is_remote(item) and os.path.exists(place.name) and not place.is_folder(place.name):
        raise ConvertError(
            f"{item}: is a pipe or a device, which only `streammega convert` reads; name it itself, "
            f"not in a list"
        )
    folder, pattern = split_pattern(place)
    root = folder if pattern else place.root
    if not is_remote(item) and not place.is_folder(root):
        raise _not_found(item)
    rows = sorted(walk(place, root, pattern), key=lambda row: row.path)
    if not rows and (pattern or is_remote(item)):
        raise _not_found(item)
    left_out = SkippedFiles()
    known = None if pattern else {row.path for row in rows}
    rows = drop_own_output(rows, own_output, left_out)
    rows = choose_files(rows, root, pattern, options, left_out)
    files = _Files(rows, place, left_out, known).inputs()
    files = keep_known_formats(files, options.read_as, None if pattern else left_out)
    # among files of other formats, a dataset was perhaps made of them
    datasets = [item for item in files if item.is_dataset]
    if any(item.format != "megatron" for item in files):
        files = drop_inputs(files, datasets, DATASETS, left_out)
    skipped.merge(left_out)
    if not files:
        shown, _query = split_query(item)
        others = left_out.as_text()
        reasons = f" that can be read; left out: {others}" if others else ""
        raise ConvertError(f"{shown}: holds no files{reasons}")
    return files


class _Files:
    """Files that were found. Each becomes an input, or a part of one, or is left out.

    skipped: of what was found below a folder or by a pattern; None where a file is named itself.
    known: all paths of the folder; None where others may be there.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        place: Place,
        skipped: SkippedFiles | None = None,
        known: Collection[str] | None = None,
    ) -> None:
        self._place = place
        self._skipped = skipped
        self._known = known
        self._rows = {row.path: row for row in rows}
        """Those that are not part of an input yet."""

    def inputs(self) -> list[Input]:
        """All inputs, by the order of their paths."""
        inputs = self._folders_of_loaders()
        manifest_of, manifests = self._manifests()
        for path, row in list(self._rows.items()):
            if path not in self._rows:  # a part of an earlier one
                continue
            item = self._pair(row)
            if item is None:
                item = self._input(row, "megatron" if path in manifests else format_of(path))
            manifest = manifest_of.get(strip_suffix(path))
            if manifest is not None and item.format == "megatron":
                parts = (manifest,) if manifest in manifests else ()
                manifests.discard(manifest)
                item = replace(item, is_dataset=True, parts=item.parts + parts)
            inputs.append(item)
        if self._skipped is not None:
            self._skipped.add("manifests without their shards", *sorted(manifests))
        return sorted(inputs, key=lambda item: item.path)

    def _input(self, row: Row, file_format: str, path: str | None = None) -> Input:
        row = self._with_size(row)
        return Input(
            path=(row.path if path is None else path) + self._place.chain,
            format=file_format,
            size=row.size,
            etag=row.etag,
            query=self._place.query,
            identity=row.identity,
        )

    def _with_size(self, row: Row) -> Row:
        if row.size < 0:  # its listing did not say
            row = self._place.file(row.path) or row
        return row._replace(size=max(0, row.size))

    def _folders_of_loaders(self) -> list[Input]:
        """Folders of MDS and litdata."""
        folders = []
        paths_of_folder: dict[str, list[str]] = {}
        for path in self._rows:
            paths_of_folder.setdefault(path.rpartition("/")[0], []).append(path)
        for folder, paths in paths_of_folder.items():
            index_path = os.path.join(folder, "index.json")
            index = _loader_index(self._place.read(index_path)) if index_path in paths else None
            if index is None:
                continue
            file_format, shards = index
            item = self._input(self._rows[index_path], file_format, folder or ".")
            names = {"index.json", *shards}
            parts = tuple(path for path in paths if os.path.basename(path) in names)
            folders.append(replace(item, parts=parts))
            for path in paths:
                del self._rows[path]
                if path not in parts and self._skipped is not None:
                    self._skipped.add(NOT_IN_INDEX, path)
        return folders

    def _manifests(self) -> tuple[dict[str, str], set[str]]:
        """The manifest of each prefix of a shard that one lists, and all manifests of ours."""
        manifest_of = {}
        manifests = set()
        for path in list(self._rows):
            data = self._place.read(path) if path.endswith(MANIFEST) else b""
            if MANIFEST_FORMAT.encode() not in data[:200]:
                continue
            manifests.add(path)
            if self._skipped is not None:  # in a folder its shards are there too
                del self._rows[path]
            folder = path.rpartition("/")[0]
            for name in _shard_names(data):
                manifest_of[os.path.join(folder, name)] = path
        return manifest_of, manifests

    def _pair(self, row: Row) -> Input | None:
        """An .idx with its tokens; None if the file is neither."""
        prefix = strip_suffix(row.path)
        index_path = f"{prefix}.idx"
        index = None if prefix == row.path else self._row_of(index_path)
        if index is None:
            return None
        there = [self._row_of(prefix + suffix) for suffix in SUFFIXES.values()]
        tokens = next((row for row in there if row is not None), None)
        if tokens is None:
            raise ObjectNotFoundError(
                f"{index_path}: has no .bin, .bin.zst or .tar next to it; copy both, or leave it out"
            )
        # of a folder, the .idx names both
        path = index_path if index_path in self._rows else row.path
        files = [index_path, *(prefix + suffix for suffix in SUFFIXES.values())]
        parts = [file for file in files if self._rows.pop(file, None) is not None and file != path]
        # what is read are the tokens, and a change of either file makes another dataset
        index, tokens = self._with_size(index), self._with_size(tokens)
        return replace(
            self._input(tokens, "megatron", path),
            etag=f"{index.etag}+{tokens.etag}",
            identity=(index.identity, tokens.identity),
            parts=tuple(parts),
        )

    def _row_of(self, path: str) -> Row | None:
        """The file of a name that was found, or that is there without having been found."""
        if path in self._rows:
            return self._rows[path]
        if self._known is not None and path not in self._known:
            return None
        return self._place.file(path)


def _loader_index(data: bytes) -> tuple[str, set[str]] | None:
    """The format of a folder with such an index.json, and the files that it names; None: it is the
    index of neither.
    """
    try:
        index: Any = parse_json(data)
        shards, chunks = index.get("shards"), index.get("chunks")
        # our manifests list shards, too
        if isinstance(shards, list) and index.get("format") != MANIFEST_FORMAT:
            files = [shard.get(name) or {} for shard in shards for name in ("raw_data", "zip_data")]
            return "mds", {str(file.get("basename")) for file in files}
        if isinstance(chunks, list) and "config" in index:
            return "litdata", {str(chunk.get("filename")) for chunk in chunks}
    except (ValueError, AttributeError):
        pass  # no JSON, or a list or text where both have an object
    return None


def _shard_names(data: bytes) -> list[str]:
    """The shards that a manifest lists; none of one that is damaged, which its reader will say."""
    try:
        manifest: Any = parse_json(data)
        return [str(shard["name"]) for shard in manifest["shards"]]
    except (ValueError, TypeError, KeyError):
        return []
