"""Columns whose value at a token is a hash of the token's place, so that a value anywhere tells whether
it is its token's.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streammega import Column, StorageConfig
from streammega.dataset.columns import ColumnFile, StoredColumn, column_name
from streammega.dataset.manifest import Manifest, manifest_url, parse_manifest
from streammega.dataset.opening import open_manifests

MULTIPLIER = 0x9E3779B97F4A7C15
SALT = 1 << 32
"""Tokens between the places of two shards."""


def hashed(place: NDArray[np.int64], column: Column) -> NDArray[np.uint8]:
    """The bytes of the values of tokens at these places, uint8 [..., width * itemsize]: each byte is a hash
    of the place and of its number. place: shard * SALT + token of the shard.
    """
    size = (column.width or 1) * column.itemsize
    number: Any = (place[..., None].astype(np.uint64) << 16) + np.arange(size, dtype=np.uint64)
    mixed = number * np.uint64(MULTIPLIER)
    values: NDArray[np.uint8] = ((mixed ^ (mixed >> 29)) >> 17).astype(np.uint8)
    if column.dtype.startswith(("float", "bfloat")):
        values[..., column.itemsize - 1 :: column.itemsize] &= 0x3F  # neither infinite nor NaN
    return values


def add_column(
    dataset: str | Path, name: str, column: Column, digest: str = "", shards: Sequence[int] = ()
) -> Manifest:
    """Write a column of hashed values for every shard of a local dataset, and its entry in the manifest,
    which a pair gets by it. shards: the numbers that are hashed for its shards; by default 0, 1, ...
    """
    url = manifest_url(str(dataset))
    folder = Path(url).parent
    if Path(url).exists():
        manifest = parse_manifest(Path(url).read_bytes(), url)
    else:
        (opened,) = open_manifests([str(dataset)], StorageConfig())
        names = [
            shard._replace(name=Path(shard.name).name, etag="", index_etag="")
            for shard in opened.shards
        ]
        manifest = replace(opened, shards=names, folder_labels=None, seen_at="")
    files = []
    for number, shard in enumerate(manifest.shards):
        file = column_name(shard.name, name, digest)
        salt = shards[number] if shards else number
        place = salt * SALT + np.arange(shard.tokens)
        (folder / file).write_bytes(hashed(place, column).tobytes())
        files.append(ColumnFile(file))
    stored = StoredColumn(
        name=name,
        dtype=column.dtype,
        width=column.width or 1,
        align=column.align or "labels",
        fill=column.fill or 0,
        files=files,
    )
    others = tuple(other for other in manifest.columns if other.name != name)
    manifest = replace(manifest, columns=(*others, stored))
    Path(url).write_bytes(manifest.to_json())
    return manifest


def change_entry(dataset: str | Path, name: str, values: dict[str, Any]) -> None:
    """Change fields of a column's entry in a manifest."""
    path = Path(manifest_url(str(dataset)))
    stored = json.loads(path.read_text())
    for column in stored["columns"]:
        if column["name"] == name:
            column.update(values)
    path.write_text(json.dumps(stored))
