"""Columns: values that are stored for every token, next to the ids, and travel with them."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from streammega.config.fields import DEFAULT, FIELDS, FIRST, ITEMSIZES, LAST, MIDDLE
from streammega.config.validate import Ge, Le, check_fields, refuse_unknown
from streammega.errors import ConfigError

DTYPES = [name for name in ITEMSIZES if name != "bool"]
"""Those of columns, which are stored little-endian."""
MAX_WIDTH = 1 << 16
"""Most values of a token."""
NAME = re.compile(r"[a-z0-9_]{1,64}")
TAKEN = {
    DEFAULT,
    "ids",
    "valid",
    "has_loss",
    "cu_seqlens_whole",
    "input_ids",
    "shift_labels",
    *FIELDS,
}
"""Names that batches use otherwise."""
STAGES = {"last": [LAST], "both": [FIRST, MIDDLE, LAST]}
"""The pipeline stages that get a column, by the setting."""
LARGEST = {
    "float16": 65504.0, "bfloat16": 3.3895313892515355e38, "float32": 3.4028235e38, "float64": sys.float_info.max,
    "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0,
}  # fmt: skip
"""The largest finite value of each dtype of floats."""


@refuse_unknown
@dataclass(frozen=True)
class Column:
    """What a column is, for a `ColumnWriter`; or how a run reads one, for `DataConfig.columns`.

    Raises ConfigError for a value that the dtype cannot hold.
    """

    dtype: str = ""
    """The dtype of a value: uint8 to uint64, int8 to int64, float16, float32, float64, bfloat16,
    float8_e4m3fn or float8_e5m2. A reader may leave it out; otherwise the stored one must be this.
    """
    width: Annotated[int | None, Ge(1), Le(MAX_WIDTH)] = None
    """Values of a token; a writer's default is 1. What `dtype` says of readers holds here too."""
    fill: float | int | None = None
    """The value of padding, of documents that are excluded, and of tokens that were not written. A
    writer's default is 0; a reader's, what the column was written with.
    """
    align: Literal["labels", "tokens"] | None = None
    """Whose values a batch has: value i is that of the token that is label i ("labels", a writer's
    default), or token i ("tokens"). A reader may leave it out.
    """
    missing: float | int | None = None
    """The value of all tokens of a dataset that has no such column; None: that is an error."""
    stage: Literal["last", "both"] = "last"
    """The pipeline stages that get it: the last one, whose labels it goes with; "both": the first one
    too, and those between.
    """

    def __post_init__(self) -> None:
        check_fields(self, "column.")
        if not self.dtype:
            return
        if self.dtype not in DTYPES:
            raise ConfigError(
                f"column.dtype is {self.dtype!r}; it must be one of {', '.join(DTYPES)}"
            )
        for name in ("fill", "missing"):
            value = getattr(self, name)
            if value is not None:
                check_value(self.dtype, value, f"column.{name}")

    @property
    def itemsize(self) -> int:
        """Bytes of a value."""
        return ITEMSIZES[self.dtype]


def check_value(dtype: str, value: float, name: str) -> None:
    """Raise ConfigError for a number that a dtype cannot hold."""
    if "int" in dtype:
        bits = 8 * ITEMSIZES[dtype]
        low = 0 if dtype[0] == "u" else -(2 ** (bits - 1))
        fits = low <= value < low + 2**bits and value == int(value)
    elif math.inf in (value, -value):
        fits = dtype != "float8_e4m3fn"  # which has no infinity
    else:
        fits = value != value or abs(value) <= LARGEST[dtype]
    if not fits:
        raise ConfigError(f"{name} is {str(value)[:24]}, which {dtype} cannot hold")


def check_name(name: Any, what: str = "columns") -> None:
    """Raise ConfigError for a name that no column may have."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ConfigError(
            f"{what} names {name!r}; a name has up to 64 small letters, digits and _, such as 'teacher_ids'"
        )
    if name in TAKEN:
        raise ConfigError(
            f"{what} names {name!r}, which is a field of batches; choose another name"
        )


def refuse_columns(config: Any, what: str) -> None:
    """Raise ConfigError for a config that reads columns. what: has no place for them, in words."""
    if getattr(config, "columns", ()):
        raise ConfigError(
            f"{what}: leave {', '.join(config.columns)} out of columns, or read them by a StreamLoader"
        )


def read_columns(columns: Any) -> dict[str, Column]:
    """`DataConfig.columns` in its one form: how each is read, by name. Raises ConfigError."""
    if isinstance(columns, str) or not isinstance(columns, Iterable):
        raise ConfigError(
            f"columns is {columns!r}; it takes a list of names, or a Column for each name"
        )
    named = (
        columns.items() if isinstance(columns, Mapping) else ((name, Column()) for name in columns)
    )
    read: dict[str, Column] = {}
    for name, column in named:
        check_name(name)
        if isinstance(column, Mapping):  # a table of TOML
            column = Column(**column)
        if not isinstance(column, Column):
            raise ConfigError(f"columns[{name!r}] is {column!r}; it must be a Column")
        read[name] = column
    return read
