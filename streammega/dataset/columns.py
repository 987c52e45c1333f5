"""Columns as a manifest lists them: values of every token, in an object for each shard.

The object of a shard has `width` values of `dtype` for each of its tokens, in their order, little-endian
and plain, whatever kind the shard is of.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from streammega.config.columns import DTYPES, MAX_WIDTH, NAME, check_value
from streammega.config.fields import ITEMSIZES
from streammega.errors import ConfigError, FormatError

SUFFIX = ".col-"
"""Between the prefix of a shard and the name of a column."""
JOB = f"{SUFFIX}job-"
"""Between the prefix of a dataset and a digest: the folder of the pieces of columns that are being written.
No column has such a name."""
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
        """What it is of, in words: equal for columns that may be read as one. NaN equals itself
        here, and 0 is 0.0.
        """
        fill = self.fill
        if math.isfinite(fill) and fill == int(fill):
            fill = int(fill)
        return f"{self.width} x {self.dtype} aligned to {self.align} and filled with {fill}"

    def token_of(self, value: float) -> NDArray[np.void]:
        """A token whose values are all this one, as it is stored, void [1]."""
        one = stored_value(self.dtype, value)
        return np.frombuffer(one * self.width, f"V{self.token_bytes}")

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


# --- values -----------------------------------------------------------------------------------------


def _float8_tables() -> dict[str, NDArray[np.float32]]:
    """The value of each byte of the dtypes that NumPy does not have."""
    byte = np.arange(256)
    exponent = byte >> 3 & 15
    fraction = (byte & 7) / 8
    value = np.where(exponent, (1 + fraction) * 2.0 ** (exponent - 7), fraction * 2.0**-6)
    value[byte & 127 == 127] = np.nan
    return {
        "float8_e4m3fn": np.where(byte < 128, value, -value).astype(np.float32),
        # The upper half of a float16.
        "float8_e5m2": (byte.astype(np.uint16) << 8).view(np.float16).astype(np.float32),
    }


FLOAT8 = _float8_tables()
"""The values of the bytes of eight-bit floats."""


def stored_value(dtype: str, value: float) -> bytes:
    """A number as it is stored: the nearest one that the dtype has, of two the even one."""
    if dtype not in ("bfloat16", *FLOAT8):
        return np.asarray(value, np.dtype(dtype).newbyteorder("<")).tobytes()
    if dtype == "bfloat16":
        bits = int(np.asarray(value, np.float32).view(np.uint32))
        if not math.isnan(value):  # whose bits could round to another value
            bits += 0x7FFF + (bits >> 16 & 1)
        return (bits >> 16).to_bytes(2, "little")
    table = FLOAT8[dtype]
    if math.isnan(value):
        return b"\x7f"
    with np.errstate(invalid="ignore"):
        away = np.where(table == value, 0, np.abs(table - np.float32(value)))
    byte = np.arange(256)
    has_other_sign = np.signbit(table) != (math.copysign(1, value) < 0)
    return bytes([int(np.lexsort((byte % 2, has_other_sign, away))[0])])
