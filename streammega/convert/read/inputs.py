"""The inputs of a conversion: names of files, folders, globs, lists and URLs become inputs, each in a
format. Every file that is found is read, is part of what is read, or is counted with the reason why
it is left out.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

from streammega.config import StorageConfig
from streammega.config.validate import parse_json
from streammega.convert.options import ConvertOptions, digest_of_json
from streammega.convert.read.compression import format_suffix
from streammega.convert.read.formats import format_of
from streammega.convert.read.selection import (
    UNKNOWN,
    OwnOutput,
    SkippedFiles,
    choose_files,
    drop_inputs,
    drop_own_output,
    drop_repeats,
    folders_between,
    keep_known_formats,
    keep_one_split,
)
from streammega.convert.read.source import Input
from streammega.convert.read.walk import (
    TABLE_LOG,
    Place,
    Row,
    Table,
    open_place,
    split_pattern,
    table_above,
    table_of,
    walk,
)
from streammega.dataset.columns import shard_of_column
from streammega.dataset.manifest import FORMAT as MANIFEST_FORMAT
from streammega.dataset.names import MANIFEST, SUFFIXES, dataset_of_marked, strip_suffix
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
from streammega.storage.file_system import failure_of
from streammega.storage.open import escapes_folder, is_in_a_bucket, is_remote

log = get_logger(__name__)

Inputs = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""Names of inputs. A single one needs no list."""
DATASETS = "streammega datasets among files of other formats"
LITDATA_CHUNK = re.compile(r"chunk-\d+-\d+(\.\w+)?\.bin")
"""Names of litdata's chunks, which would pass for raw ids."""
WARNED_SHARE = 0.1
"""The share of unknown suffixes, among all files that are found, from which on a warning tells."""
SHOWN_SUFFIXES = 5
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
    format, and for files of several splits (unless `hf_split` names one); ConfigError for no
    inputs.
    """
    storage = storage or StorageConfig()
    options = options or ConvertOptions()
    if skipped is None:
        skipped = SkippedFiles()
    files: list[Input] = []
    named: dict[str, list[Input]] = {}
    """Arrow files that are named themselves, by their folders."""
    tables: dict[str, Table | None] = {}
    for item in expand_lists(input_names(inputs)):
        with _plain_errors(item):
            of_item = _inputs_of(item, storage, options, skipped, own_output, tables)
        files += of_item
        if of_item[0].path == item and of_item[0].format == "arrow":
            named.setdefault(os.path.dirname(item), []).append(of_item[0])
    for folder, items in named.items():
        with _plain_errors(folder):
            files = drop_inputs(files, _unlisted(folder, items, storage), NOT_IN_INDEX, skipped)
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
    files = drop_repeats(files, skipped)
    return keep_one_split(files, options.hf_split, skipped)


def _warn_of_unknown(num_read: int, skipped: SkippedFiles) -> None:
    """Warn where a large share of the files has unknown suffixes: they may be what was meant."""
    num_unknown = skipped.counts.get(UNKNOWN, 0)
    if not num_unknown or num_unknown < WARNED_SHARE * (num_read + num_unknown):
        return
    suffixes = Counter(format_suffix(name) for name in skipped.names[UNKNOWN])
    shown = ", ".join(repr(suffix) for suffix, _ in suffixes.most_common(SHOWN_SUFFIXES))
    log.warning(
        "%d of %d files are left out, since their suffixes (%s) name no format: give them others, or "
        "leave them out by --exclude",
        num_unknown,
        num_read + num_unknown,
        shown,
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


@contextmanager
def _plain_errors(item: str) -> Iterator[None]:
    """Errors of disks and clients become ours."""
    shown, _query = split_query(item)
    try:
        yield
    except StreammegaError:
        raise
    except OSError as error:
        if is_remote(item):
            failure = failure_of(shown, error)
            is_missing = isinstance(failure, ObjectNotFoundError)
            raise (_not_found(item) if is_missing else failure) from None
        if isinstance(error, PermissionError):
            message = f"{error.filename or item}: permission denied; make it readable"
            raise AccessDeniedError(message) from None
        raise ConvertError(
            f"{error.filename or item}: cannot be read ({error.strerror or error})"
        ) from None
    except Exception as error:  # clients raise whatever they like
        raise failure_of(shown, error) from None


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
    tables: dict[str, Table | None],
) -> list[Input]:
    """The inputs that one name leads to. tables: those to which folders belong, as far as known."""
    place = open_place(item, storage)
    # a signature is that of one object
    endings = ("",) if place.query else ("", ".idx", MANIFEST)
    for ending in endings:
        row = None if item.endswith("/") else place.file(place.name + ending)
        if row is not None:
            files = keep_known_formats(_Files([row], place).inputs(), None)
            _refuse_tables(files, place, os.path.dirname(row.path), tables)
            return files
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
    logs = [row.path for row in rows if row.kind == TABLE_LOG]
    rows = [row for row in rows if row.kind != TABLE_LOG]
    known = None if pattern else {row.path for row in rows}
    rows = drop_own_output(rows, own_output, left_out)
    rows = choose_files(rows, root, pattern, options, left_out)
    files = _Files(rows, place, left_out, known).inputs()
    _refuse_tables(files, place, root, tables, [table for log in logs if (table := table_of(log))])
    files = keep_known_formats(files, None if pattern else left_out)
    # among files of other formats, a dataset was perhaps made of them
    datasets = [item for item in files if item.manifest]
    if any(item.format != "megatron" for item in files):
        files = drop_inputs(files, datasets, DATASETS, left_out)
    skipped.merge(left_out)
    if not files:
        shown, _query = split_query(item)
        others = left_out.as_text()
        reasons = f" that can be read; left out: {others}" if others else ""
        raise ConvertError(f"{shown}: holds no files{reasons}")
    return files


def _unlisted(folder: str, items: Sequence[Input], storage: StorageConfig) -> list[Input]:
    """Those of some named files that the list in their folder does not name, where it names others of
    them: a shell names all that is there. One that is named alone is meant.
    """
    paths = [item.path for item in items]
    if len(items) == 1:
        return []
    listed = _Files([], open_place(f"{folder}/", storage)).listed_in(folder, paths)
    if listed is None or listed.isdisjoint(paths):
        return []
    return [item for item in items if item.path not in listed]


def _refuse_tables(
    files: list[Input],
    place: Place,
    root: str,
    known: dict[str, Table | None],
    below: Sequence[Table] = (),
) -> None:
    """Raise ConvertError for a file of a table: rows that were deleted are in it too.

    root: the folder that was searched. known: the tables to which folders belong. below: the tables
    that were found in it.
    """
    for item in files:
        table = next((one for one in below if item.path.startswith(f"{one.data}/")), None)
        if table is None and item.format == "parquet":
            if not is_remote(item.path):
                table = table_above(place, os.path.dirname(os.path.realpath(item.path)), known)
            elif is_in_a_bucket(item.path):  # what is below the root was listed
                table = table_above(place, root, known)
        if table is not None:
            folder, _, log = table.log.rpartition("/")
            raise ConvertError(
                f"{folder}: is a table of {table.format} by its {log}, so its files may hold rows that "
                f"were deleted or replaced; export the rows that are left to Parquet, and convert these"
            )


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
        self._columns: dict[str, list[str]] = {}
        """The files of columns of shards that are there too, by the prefixes of these."""
        self._splits: dict[str, str] = {}
        """The splits that folders are by the list of the library that wrote them."""

    def inputs(self) -> list[Input]:
        """All inputs, by the order of their paths."""
        self._take_columns()
        inputs = self._folders_of_loaders()
        if self._skipped is not None:
            self._keep_listed()
        manifest_of, manifests = self._manifests()
        if self._skipped is not None:
            self._leave_unlisted_out(self._skipped, manifest_of)
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
                item = replace(item, manifest=manifest, parts=item.parts + parts)
            inputs.append(item)
        if self._skipped is not None:
            self._skipped.add("manifests without their shards", *sorted(manifests))
            unread = [path for paths in self._columns.values() for path in paths]
            self._skipped.add("columns without their shards", *sorted(unread))
        return sorted(inputs, key=lambda item: item.path)

    def _take_columns(self) -> None:
        """Take the files of columns out: they belong to the shards whose prefixes they have."""
        for path in list(self._rows):
            prefix = shard_of_column(path)
            if prefix is not None and f"{prefix}.idx" in self._rows:
                del self._rows[path]
                self._columns.setdefault(prefix, []).append(path)

    def _input(self, row: Row, file_format: str, path: str | None = None) -> Input:
        if file_format == "raw" and LITDATA_CHUNK.fullmatch(os.path.basename(row.path)):
            raise ConvertError(
                f"{row.path}: is a chunk of litdata by its name, not raw ids; name its folder, whose "
                f"index.json says how it is read (without one litdata did not finish it)"
            )
        row = self._looked_up(row)
        return Input(
            path=(row.path if path is None else path) + self._place.chain,
            format=file_format,
            size=row.size,
            etag=row.etag,
            query=self._place.query,
            identity=row.identity,
            split=self._splits.get(row.path.rpartition("/")[0], ""),
        )

    def _looked_up(self, row: Row) -> Row:
        """The row with its size and version, which some listings do not say."""
        if row.size < 0 or not row.etag:
            row = self._place.file(row.path) or row
        size = max(0, row.size)
        return row._replace(size=size, etag=row.etag or f"{SIZED}{size}")

    def _folders_of_loaders(self) -> list[Input]:
        """Folders of MDS and litdata, and Parquet files that litdata lists. An index that names shards
        of folders below counts alone: their own indices say the same again.
        """
        folders: list[Input] = []
        paths_of_folder = self._paths_of_folder()
        for folder in sorted(paths_of_folder, key=len):  # those above come first
            index_path = os.path.join(folder, "index.json")
            if index_path not in self._rows:
                continue
            index = _loader_index(self._place.read(index_path))
            if index is None:
                continue
            shards = [_below(folder, name) for name in index.shards]
            if index.format == "parquet":
                folders += self._listed_tables(index_path, index.shards)
            else:
                item = self._input(self._rows[index_path], index.format, folder or ".")
                parts = (index_path, *shards)
                rows = map(self._row_of, parts)
                names = ("index.json", *index.shards)
                versions = {
                    name: self._looked_up(row).etag
                    for name, row in zip(names, rows, strict=True)
                    if row
                }
                etag = digest_of_json(versions)
                folders.append(replace(item, parts=parts, versions=versions, etag=etag))
            named = {index_path, *shards, *(_below(folder, name) for name in index.other_forms)}
            for held in sorted(folders_between(folder, shards)):
                paths = [path for path in paths_of_folder.get(held, ()) if path in self._rows]
                self._leave_out([path for path in paths if path not in named])
                for path in named.intersection(paths):
                    del self._rows[path]
        return folders

    def _listed_tables(self, index_path: str, names: Sequence[str]) -> Iterator[Input]:
        """The Parquet files that an index names. Raises ConvertError for one outside of its folder,
        ObjectNotFoundError for one that is not there.
        """
        for name in names:
            if escapes_folder(name):
                raise ConvertError(
                    f"{index_path}: names {name!r}, which is outside of the folder; who made it?"
                )
            path = _below(os.path.dirname(index_path), name)
            row = self._row_of(path)
            if row is None:
                raise ObjectNotFoundError(
                    f"{path}: is not there, and {index_path} lists it; copy the folder again"
                )
            yield self._input(row, "parquet")

    def _keep_listed(self) -> None:
        """Keep the files and splits that the datasets library lists, where its `save_to_disk` wrote.

        A split may be of an earlier save. Raises ObjectNotFoundError for a listed file that is not
        there.
        """
        for folder, paths in self._paths_of_folder().items():
            if not any(format_of(path) == "arrow" for path in paths):
                continue
            above, _, name = folder.rpartition("/")
            splits = self._json_of(above, "dataset_dict.json").get("splits")
            listed = self.listed_in(folder, paths)
            if isinstance(splits, list):
                self._splits[folder] = name
                listed = listed if name in splits else set()
            if listed is None:
                continue
            missing = [] if self._known is None else sorted(listed.difference(self._known))
            if missing:
                raise ObjectNotFoundError(
                    f"{missing[0]}: is not there, and the state.json next to it lists it; copy the "
                    f"folder again"
                )
            self._leave_out([path for path in paths if path not in listed])

    def listed_in(self, folder: str, paths: Sequence[str]) -> set[str] | None:
        """The files of a folder that the datasets library wrote by itself, and not by `map`; None: it
        is no folder of that library. paths: of files in it.

        Raises ConvertError for a list that cannot be followed.
        """
        state = self._json_of(folder, "state.json")
        if state.get("_indices_data_files"):
            raise ConvertError(
                f"{folder}: a list of indices chooses its rows, as old versions of datasets saved "
                f"them; load it by load_from_disk, and save it again"
            )
        try:
            return {_below(folder, str(file["filename"])) for file in state["_data_files"]}
        except (TypeError, KeyError):
            pass  # there is none, or it is of another program
        if "features" not in self._json_of(folder, "dataset_info.json"):
            return None
        # the library's own cache has no list, and names what `map` made by its fingerprint
        return {path for path in paths if not os.path.basename(path).startswith("cache-")}

    def _paths_of_folder(self) -> dict[str, list[str]]:
        """The files that are no part of an input yet, by their folders."""
        paths_of_folder: dict[str, list[str]] = {}
        for path in self._rows:
            paths_of_folder.setdefault(path.rpartition("/")[0], []).append(path)
        return paths_of_folder

    def _leave_out(self, paths: Sequence[str]) -> None:
        """Files that the list of their folder does not name."""
        for path in paths:
            del self._rows[path]
        if self._skipped is not None:
            self._skipped.add(NOT_IN_INDEX, *paths)

    def _json_of(self, folder: str, name: str) -> dict[str, Any]:
        """The object in a file of a folder; empty without one."""
        row = self._row_of(os.path.join(folder, name))
        try:
            content = {} if row is None else parse_json(self._place.read(row.path))
        except ValueError:  # of another program
            content = {}
        return content if isinstance(content, dict) else {}

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

    def _leave_unlisted_out(self, skipped: SkippedFiles, listed: Collection[str]) -> None:
        """Leave out shards with a mark that no manifest lists: of a conversion that was killed, or of
        a dataset that was replaced. listed: prefixes of shards, by the manifests that were found.
        """
        by_others: dict[str, list[str]] = {}
        for path in list(self._rows):
            prefix = strip_suffix(path)
            owner = dataset_of_marked(prefix)
            if prefix == path or owner is None or prefix in listed:
                continue
            if owner not in by_others:
                # Its manifest may be there without having been found, by the patterns of the options.
                manifest = self._row_of(owner + MANIFEST)
                by_others[owner] = _shard_names(self._place.read(manifest.path)) if manifest else []
            if os.path.basename(prefix) not in by_others[owner]:
                del self._rows[path]
                skipped.add("shards that no manifest lists", path)

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
        parts += self._columns.pop(prefix, [])
        # what is read are the tokens, and a change of either file makes another dataset
        index, tokens = self._looked_up(index), self._looked_up(tokens)
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


class _LoaderIndex(NamedTuple):
    """An index of MDS or litdata. format: of what it names. shards: names of the files that are read; other_forms: those of
    files that hold the same, as decompressed shards do.
    """

    format: str
    shards: list[str]
    other_forms: list[str]


def _loader_index(data: bytes) -> _LoaderIndex | None:
    """The content of a folder's index.json; None: it is of another program."""
    try:
        index: Any = parse_json(data)
        shards, chunks = index.get("shards"), index.get("chunks")
        # our manifests list shards, too
        if isinstance(shards, list) and index.get("format") != MANIFEST_FORMAT:
            raw = [str((shard.get("raw_data") or {}).get("basename")) for shard in shards]
            packed = [str((shard.get("zip_data") or {}).get("basename")) for shard in shards]
            stored = [one if two == "None" else two for one, two in zip(raw, packed, strict=True)]
            return _LoaderIndex("mds", stored, raw)
        if isinstance(chunks, list) and "config" in index:
            # litdata can index Parquet files as they are
            is_parquet = index["config"].get("item_loader") == "ParquetLoader"
            names = [str(chunk.get("filename")) for chunk in chunks]
            return _LoaderIndex("parquet" if is_parquet else "litdata", names, [])
    except (ValueError, AttributeError):
        pass  # no JSON, or a list or text where both have an object
    return None


def _below(folder: str, name: str) -> str:
    """The path of a file that an index in a folder names."""
    return os.path.join(folder, os.path.normpath(name))


def _shard_names(data: bytes) -> list[str]:
    """The shards that a manifest lists; none of one that is damaged, which its reader will say."""
    try:
        manifest: Any = parse_json(data)
        return [str(shard["name"]) for shard in manifest["shards"]]
    except (ValueError, TypeError, KeyError):
        return []
