"""Files next to a dataset that no manifest lists: what killed conversions left, and what was replaced.
They are listed, and removed when asked.
"""

from __future__ import annotations

import difflib
import os
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace

from streammega.config import StorageConfig
from streammega.convert.write.destination import PROBE
from streammega.dataset.columns import JOB, shard_of_column
from streammega.dataset.manifest import Manifest, read_manifest
from streammega.dataset.names import (
    MANIFEST,
    SUFFIXES,
    could_belong_to,
    dataset_of_marked,
    dataset_of_tokenizer,
    split_name,
    tokenizer_name,
    without_number,
)
from streammega.dataset.provenance import ENDING as ORIGINS
from streammega.errors import ConvertError, FormatError, ObjectNotFoundError
from streammega.storage import ObjectInfo, Store, join_url, open_store
from streammega.storage.atomic_file import final_name
from streammega.storage.progress import ProgressObserver

ENDINGS = (*SUFFIXES.values(), ".idx", ORIGINS)


def find_leftovers(prefix: str, storage: StorageConfig | None = None) -> list[ObjectInfo]:
    """Objects with the names of a dataset's shards that its manifest does not list, in name order;
    keys are the store's.

    Those are shards with a mark (see `publish`), tokens of numbered shards without an `.idx`, columns,
    pieces of columns that are being written, copies of tokenizers, temporary files of writers, and
    the probe of a conversion. Plain pairs are no leftovers, for they may be a dataset without a
    manifest, nor is a lone file of the dataset's name, which may be an input. But where the manifest
    lists shards with a mark, these have replaced a pair of its name.

    Raises FormatError for a damaged manifest, which does not say what belongs to it; StorageError.
    """
    storage = storage or StorageConfig()
    folder, stem = _split(prefix)
    store, key = open_store(f"{folder}/", storage)
    # The key of a bucket's root is empty; a slash alone would be another folder.
    below = f"{key.rstrip('/')}/" if key else ""
    # Before the manifest is read: shards that a conversion writes later are not among them.
    there = {info.key.rpartition("/")[2]: info for info in store.list(below, recursive=False)}
    files_of_dataset: set[str] = set()
    lists_marked = has_manifest = False
    try:
        manifest = read_manifest(join_url(folder, f"{stem}{MANIFEST}"), storage)
        has_manifest = True
        endings = (SUFFIXES[manifest.kind], ".idx", ORIGINS)  # type: ignore[index]
        files_of_dataset = {shard.name + ending for shard in manifest.shards for ending in endings}
        files_of_dataset |= _column_files(manifest)
        files_of_dataset.add(tokenizer_name(stem, manifest.tokenizer_label[1]))
        lists_marked = any(dataset_of_marked(shard.name) == stem for shard in manifest.shards)
    except ObjectNotFoundError:
        pass
    except FormatError as error:
        raise FormatError(
            f"{error} (what belongs to the dataset is not known, so nothing is removed)"
        ) from None
    leftovers = []
    for name, info in sorted(there.items()):
        finished = final_name(name)
        own_name = finished or name
        is_shard = _is_shard(own_name, stem, there)
        if own_name == f".{stem}{PROBE}":
            is_leftover = True
        elif dataset_of_tokenizer(own_name) == stem:
            is_leftover = name not in files_of_dataset
        elif finished is not None:
            # A temporary file counts if it was to become one of the dataset's.
            is_leftover = is_shard or finished == f"{stem}{MANIFEST}"
        else:
            is_leftover = is_shard and name not in files_of_dataset
            shard = _shard_of(name)
            has_index = f"{shard}.idx" in there
            if shard_of_column(name) is None and dataset_of_marked(shard) is None:
                is_leftover &= (lists_marked and has_index) if shard == stem else not has_index
        if is_leftover:
            leftovers.append(_with_time(info, store))
    leftovers = _without_columns_of_others(leftovers, folder, stem, there, storage)
    leftovers += _pieces(store, f"{below}{stem}{JOB}")
    if not has_manifest and not leftovers:
        _check_there(prefix, stem, there)
    return leftovers


def _column_files(manifest: Manifest) -> set[str]:
    """The files of the columns that a stored manifest lists."""
    return {file.name for column in manifest.columns for file in column.files if file}


def _without_columns_of_others(
    leftovers: list[ObjectInfo],
    folder: str,
    stem: str,
    there: Collection[str],
    storage: StorageConfig,
) -> list[ObjectInfo]:
    """Without the columns that the manifest of another dataset lists: it may be made of the same
    shards. Raises FormatError for a damaged one.
    """
    if not any(shard_of_column(info.key) for info in leftovers):
        return leftovers
    listed: set[str] = set()
    for name in there:
        if name.endswith(MANIFEST) and name != stem + MANIFEST:
            with suppress(ObjectNotFoundError):
                listed |= _column_files(read_manifest(join_url(folder, name), storage))
    return [info for info in leftovers if info.key.rpartition("/")[2] not in listed]


def _pieces(store: Store, below: str) -> list[ObjectInfo]:
    """The pieces of columns in folders whose names begin so. Each is as new as the newest one in its
    folder: the job that writes them may go on for days, and needs all of them in the end.
    """
    newest: dict[str, float] = {}
    pieces = [_with_time(info, store) for info in store.list(below)]
    for info in pieces:
        folder = info.key.rpartition("/")[0]
        newest[folder] = max(info.modified, newest.get(folder, 0.0))
    return [replace(info, modified=newest[info.key.rpartition("/")[0]]) for info in pieces]


def _with_time(info: ObjectInfo, store: Store) -> ObjectInfo:
    """An object with the time at which it was written, if that is known; a local one's is the file's."""
    path = store.local_path(info.key)
    if path is not None:
        with suppress(OSError):
            return replace(info, modified=os.stat(path).st_mtime)
    return info


def of_age(leftovers: Sequence[ObjectInfo], hours: float) -> list[ObjectInfo]:
    """Those that were written so many hours ago, by the server's clock and this machine's. Of some
    nothing says when: these are as new as can be.
    """
    latest = time.time() - 3600 * hours
    return [info for info in leftovers if not hours or 0 < info.modified <= latest]


def _check_there(prefix: str, stem: str, there: Collection[str]) -> None:
    """Raise ObjectNotFoundError where no file has a name that begins with a dataset's."""
    if any(name.startswith((f"{stem}.", f"{stem}-")) for name in there):
        return
    datasets = {
        name.removesuffix(MANIFEST).removesuffix(".idx")
        for name in there
        if name.endswith((MANIFEST, ".idx"))
    }
    similar = difflib.get_close_matches(stem, datasets, 1)
    hint = f"is {similar[0]} meant?" if similar else "check the name"
    raise ObjectNotFoundError(f"{prefix}: no such dataset, nor what is left of one; {hint}")


def _is_shard(name: str, stem: str, there: Collection[str]) -> bool:
    """Whether a file has a name that those of a dataset's shards have, and is not a file of another
    dataset whose name happens to look so.
    """
    shard = _shard_of(name)
    has_name = name.endswith(ENDINGS) or shard_of_column(name) is not None
    names = {shard, without_number(shard)} - {stem}
    is_of_others = any(f"{name}{MANIFEST}" in there for name in names)
    return has_name and could_belong_to(shard, stem) and not is_of_others


def _shard_of(name: str) -> str:
    """The prefix of the shard that a file is one of."""
    prefix, _ = split_name(name.removesuffix(ORIGINS))
    return shard_of_column(name) or prefix


def remove_leftovers(
    prefix: str,
    leftovers: Sequence[ObjectInfo],
    storage: StorageConfig,
    progress: ProgressObserver,
) -> None:
    """Remove some of what `find_leftovers` found: every `.idx` first.

    Raises ConvertError if the dataset has changed meanwhile.
    """
    now = {info.key for info in find_leftovers(prefix, storage)}
    if any(info.key not in now for info in leftovers):
        raise ConvertError(
            f"{prefix}: the dataset has changed meanwhile; is a conversion to it running? look again"
        )
    folder, stem = _split(prefix)
    store, _ = open_store(join_url(folder, stem), storage)
    progress.begin("removing", len(leftovers), " files")
    # Every `.idx` first: tokens without one are no dataset, whatever interrupts this.
    for info in sorted(leftovers, key=lambda info: not info.key.endswith(".idx")):
        store.delete(info.key)
        progress.advance(1)
    for above in {info.key.rpartition("/")[0] for info in leftovers if JOB in info.key}:
        if store.local_path(above) is not None:
            with suppress(OSError):  # some of its pieces stay
                os.rmdir(above)


def _split(prefix: str) -> tuple[str, str]:
    """The folder of a dataset and its name there."""
    dataset, _ = split_name(prefix.removesuffix(MANIFEST))
    folder, slash, stem = dataset.rpartition("/")
    return (folder if slash else "."), stem
