"""The columns of inputs: which they have, and that all of them have the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from streammega.config import StorageConfig
from streammega.convert.options import digest_of_json
from streammega.convert.read.source import Input
from streammega.dataset.columns import StoredColumn
from streammega.dataset.manifest import Manifest, columns_at, read_manifest, shards_at
from streammega.dataset.names import MANIFEST, datasets_of, strip_suffix
from streammega.dataset.opening import open_manifests
from streammega.errors import ConvertError, FormatError, ObjectNotFoundError
from streammega.storage.object_ops import read_if_exists


def with_columns(inputs: Sequence[Input], storage: StorageConfig) -> list[Input]:
    """The inputs with the columns that manifests list of their shards. Each object is looked up.

    Raises ConvertError where one lacks a column of another one, or has another of that name;
    ObjectNotFoundError, FormatError for a column that is not that of its shard; StorageError.
    """

    @cache
    def read(url: str) -> Manifest | None:
        """A manifest; None: there is none of ours."""
        try:
            return read_manifest(url, storage)
        except ObjectNotFoundError:
            return None
        except FormatError:
            # Of another program, or a damaged one; columns are not dropped because of that.
            if b'"columns"' in (read_if_exists(url, storage) or b""):
                raise
            return None

    listed: dict[str, Manifest] = {}
    for item in inputs:
        if item.format != "megatron":
            continue
        for url in _manifests_of(item):
            manifest = read(url)
            of_item = None if manifest is None else _part_of(manifest, url, item)
            if of_item is not None and of_item.columns:
                listed[item.path] = of_item
                break
    names = {column.name for manifest in listed.values() for column in manifest.columns}
    opened = open_manifests(list(listed), storage, listed, columns=names)
    columns_of = {path: manifest.columns for path, manifest in zip(listed, opened, strict=True)}
    _check_alike(
        [(item.path.removesuffix(".idx"), columns_of.get(item.path, ())) for item in inputs]
    )
    return [_with_columns(item, columns_of.get(item.path, ())) for item in inputs]


def _manifests_of(item: Input) -> list[str]:
    """The manifests that may list an input: that which was found, or those that its name tells of."""
    if item.path.endswith(MANIFEST):
        return [item.path]
    if item.manifest:
        return [item.manifest]
    return [name + MANIFEST for name in datasets_of(strip_suffix(item.path))]


def _part_of(manifest: Manifest, url: str, item: Input) -> Manifest | None:
    """What a manifest says of the shards of an input, by their full names; None: it lists others."""
    shards = shards_at(manifest, url)
    columns = columns_at(manifest, url)
    if item.path != url:
        own_name = strip_suffix(item.path).rpartition("/")[2]
        names = [shard.name.rpartition("/")[2] for shard in shards]
        numbers = [number for number, name in enumerate(names) if name == own_name]
        if not numbers:
            return None
        shards = [shards[number] for number in numbers]
        columns = tuple(
            column._replace(files=[column.files[number] for number in numbers])
            for column in columns
        )
    return replace(manifest, shards=shards, columns=columns)


def _check_alike(columns_of: Sequence[tuple[str, Sequence[StoredColumn]]]) -> None:
    """Raise ConvertError for inputs, by their paths, that do not have the same columns."""
    first: dict[str, tuple[str, StoredColumn]] = {}
    for path, columns in columns_of:
        first = {column.name: (path, column) for column in columns} | first
    for name, (owner, wanted) in first.items():
        for path, columns in columns_of:
            column = {one.name: one for one in columns}.get(name)
            if column is None:
                raise ConvertError(
                    f"{path}: has no column {name!r}, and {owner} has it; convert them apart, write it "
                    "for both, or leave columns out by --drop-columns"
                )
            if column.kind != wanted.kind:
                raise ConvertError(
                    f"{path}: its column {name!r} is {column.kind}, and that of {owner} is "
                    f"{wanted.kind}; convert them apart, or leave columns out by --drop-columns"
                )


def _with_columns(item: Input, columns: Sequence[StoredColumn]) -> Input:
    """An input with its columns: another version of one of them makes it another input."""
    if not columns:
        return item
    digest = digest_of_json([column.stored() for column in columns])
    return replace(item, columns=tuple(columns), etag=f"{item.etag}+{digest}")
