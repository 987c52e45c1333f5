"""Columns as a manifest lists them: values of every token, in an object for each shard.

The object of a shard has `width` values of `dtype` for each of its tokens, in their order, little-endian
and plain, whatever kind the shard is of.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from streammega.config.columns import DTYPES, MAX_WIDTH, NAME, check_value
from streammega.config.fields import ITEMSIZES
from streammega.errors import ConfigError, FormatError

SUFFIX = ".col-"
"""Between the prefix of a shard and the name of a column."""
ALIGNED = ("labels", "tokens")
_IN_FILE = re.compile(r"\.col-(?P<column>[a-z0-9_]{1,64})(\.[0-9a-f]+)?$")


class ColumnFile(NamedTuple):
    """The object of one shard. name: its URL; in a stored manifest without the folder of that. etag: of
    the folder where the manifest was written, as of shards. checksums: xxh3-128 of each 64 MiB.
    """

    name: str
    etag: str = ""
    checksums: Sequence[str] = ()


class StoredColumn(NamedTuple):
    """A column of a dataset.

    align: whether batches have the values of their labels ("labels") or of their tokens ("tokens"). fill:
    the value of what is no token. files: of each shard, in their order; None: the shard has none, as in a
    folder of several datasets.
    """

    name: str
    dtype: str
    width: int
    align: str
    fill: float | int
    files: Sequence[ColumnFile | None]

    @property
    def token_bytes(self) -> int:
        """Bytes of a token."""
        return self.width * ITEMSIZES[self.dtype]

    @property
    def kind(self) -> str:
        """All but its files, for a comparison: NaN equals itself here."""
        return json.dumps(self._replace(files=()).stored())

    def stored(self) -> dict[str, Any]:
        """Its fields as values of JSON, which has no infinite numbers: these are text."""
        fill = self.fill if math.isfinite(self.fill) else str(self.fill)
        files = [None if file is None else _stored_file(file) for file in self.files]
        return {**self._asdict(), "fill": fill, "files": files}


def column_name(shard: str, column: str, digest: str = "") -> str:
    """The name of the object of a shard. digest: of the job that wrote it."""
    return f"{shard}{SUFFIX}{column}" + (f".{digest}" if digest else "")


def shard_of_column(name: str) -> str | None:
    """The prefix of the shard to which an object belongs by its name; None for what is no column."""
    match = _IN_FILE.search(name)
    return name[: match.start()] if match else None


def column_of(stored: Mapping[str, Any]) -> StoredColumn:
    """The column that `StoredColumn.stored` gave. Raises ValueError, TypeError."""
    values = dict(stored)
    if values.get("fill") in ("inf", "-inf", "nan"):
        values["fill"] = float(values["fill"])
    files = [None if file is None else _file_of(file) for file in values.get("files", ())]
    column = StoredColumn(**{**values, "files": files})
    is_sound = (
        isinstance(column.name, str)
        and NAME.fullmatch(column.name)
        and column.dtype in DTYPES
        and type(column.width) is int
        and 1 <= column.width <= MAX_WIDTH
        and column.align in ALIGNED
        and type(column.fill) in (int, float)
    )
    if not is_sound:
        raise ValueError(f"its column {str(column.name)!r} has a type that no column has")
    try:
        check_value(column.dtype, column.fill, "fill")
    except (ConfigError, OverflowError) as error:
        raise ValueError(f"its column {column.name!r}: {error}") from None
    return column


def _stored_file(file: ColumnFile) -> dict[str, Any]:
    return {name: value for name, value in file._asdict().items() if value}


def _file_of(stored: Mapping[str, Any]) -> ColumnFile:
    file = ColumnFile(**stored)
    checksums = file.checksums
    are_texts = isinstance(checksums, list | tuple) and all(
        isinstance(one, str) for one in checksums
    )
    if not (isinstance(file.name, str) and isinstance(file.etag, str) and are_texts and file.name):
        raise ValueError("a file of a column has no name, or another type")
    return file._replace(checksums=tuple(checksums))


def missing_column(url: str, column: str) -> str:
    """The message for an object of a column that is not there."""
    return (
        f"{url}: no such object, which column {column!r} needs; copy it with its dataset, or write the "
        "column again"
    )


def check_column_size(url: str, size: int, tokens: int, column: StoredColumn) -> None:
    """Raise FormatError for an object that has not the values of all tokens of its shard."""
    wanted = tokens * column.token_bytes
    if size != wanted:
        raise FormatError(
            f"{url}: has {size:,} bytes, and {tokens:,} tokens with {column.token_bytes} bytes each need "
            f"{wanted:,}; copy it again, or write the column again"
        )


def column_named(columns: Sequence[StoredColumn], name: str, dataset: str) -> StoredColumn | None:
    """The column of a dataset; None where it has no such one.

    dataset: for messages. Raises FormatError where only some of its shards have it.
    """
    for column in columns:
        if column.name != name:
            continue
        missing = [number for number, file in enumerate(column.files) if file is None]
        if missing:
            raise FormatError(
                f"{dataset}: {len(missing)} of its {len(column.files)} shards have no column {name!r}, or "
                "another one of that name; write it for the others too, or make a blend of them"
            )
        return column
    return None
