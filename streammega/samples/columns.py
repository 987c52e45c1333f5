"""What travels with every token, as a table: a name, a dtype, and where its values come from.

Ids come first, and are gathered from files. A column has a value for each of them, wherever they go:
in ready batches, in messages between ranks and from workers, in context-parallel parts. It is made of the
rows of samples (`COLUMNS`), or stored next to the ids and gathered as these are (`StoredFile`). Fields are
made of columns: see `field_inputs.py`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from streammega.config import Column, DataConfig
from streammega.config.columns import STAGES, check_value
from streammega.config.fields import Field
from streammega.dataset.columns import StoredColumn, column_named
from streammega.dataset.manifest import Manifest
from streammega.errors import ConfigError
from streammega.errors.logs import get_logger
from streammega.samples.excluded import ExclusionMask
from streammega.samples.token_file import Runs, StoredFile, TokenFile, clear_by_modes
from streammega.storage import ObjectInfo, open_store
from streammega.storage.derived_stores import ConcatStore
from streammega.storage.warn_once import warn_once

log = get_logger(__name__)

NOWHERE = "no dataset has a column %s: all its values are %s, which columns names as missing"


class GatheredRows(NamedTuple):
    """What columns are made of: files, the runs of tokens that rows consist of, and the tokens of rows
    that are excluded.
    """

    files: Sequence[TokenFile]
    runs: Runs
    excluded: ExclusionMask | None


class TokenColumn(NamedTuple):
    """What travels with every token.

    dtype: of a value. fill: the value where a row has no token. is_there: whether the data of a
    SegmentSource has it; batches of other data go without. make: write the values of rows to an array
    [rows, tokens], which is filled; None: they are stored. width: values of a token; more than 1 are a
    dimension of their own. missing: the value of tokens of files that have no such column.
    """

    dtype: torch.dtype
    fill: Any
    is_there: Callable[[Any], bool]
    make: Callable[[GatheredRows, NDArray[Any]], None] | None = None
    width: int = 1
    missing: Any = None

    @property
    def token_bytes(self) -> int:
        """Bytes of the values of a token."""
        return self.width * self.dtype.itemsize

    @property
    def token_shape(self) -> tuple[int, ...]:
        """The shape of the values of a token."""
        return (self.width,) if self.width > 1 else ()


def _masks_loss(source: Any) -> bool:
    masks: bool = source.masks_loss
    return masks


def _always(_: Any) -> bool:
    return True


def _has_loss(rows: GatheredRows, out: NDArray[Any]) -> None:
    clear_by_modes(rows.files, rows.runs, out)
    if rows.excluded is not None:
        rows.excluded.clear(out)


COLUMNS: dict[str, TokenColumn] = {
    # whether a token has a loss where it is a label
    "has_loss": TokenColumn(torch.bool, True, _masks_loss, _has_loss),
}


# --- stored columns ---------------------------------------------------------------------------------


def open_columns(
    name: str, manifest: Manifest, config: DataConfig
) -> Sequence[Mapping[str, StoredFile]]:
    """The files of the columns that a config reads, by their names, of each shard of a dataset.

    Raises ConfigError for a dataset that has no such column, or another one than the config says;
    FormatError where only some of its shards have it.
    """
    of_shards: list[dict[str, StoredFile]] = [{} for _ in manifest.shards]
    for wanted, read in config.column_settings.items():
        stored = column_named(manifest.columns, wanted, name)
        if stored is None:
            if read.missing is None:
                raise ConfigError(
                    f"{name}: has no column {wanted!r}; write it (and pin the blend again, where it is "
                    f"pinned), or name its tokens' value: columns={{{wanted!r}: Column(missing=...)}}"
                )
            continue
        _check_as_read(name, stored, read)
        column = stored._replace(files=())
        for shard, of_shard, file in zip(manifest.shards, of_shards, stored.files, strict=True):
            assert file is not None
            store, key = open_store(file.name, config.storage)
            tokens = TokenFile(
                store=store,
                key=key,
                dtype=np.dtype(f"V{stored.token_bytes}"),
                num_tokens=shard.tokens,
                etag=file.etag,
            )
            of_shard[wanted] = StoredFile(column, tokens)
    return of_shards


def _check_as_read(dataset: str, stored: StoredColumn, read: Column) -> None:
    """Raise ConfigError where a column is not what the config says."""
    for what in ("dtype", "width", "align"):
        wanted = getattr(read, what)
        actual = getattr(stored, what)
        if wanted and wanted != actual:
            raise ConfigError(
                f"{dataset}: column {stored.name!r} has {what} {actual}, and columns of the config says "
                f"{wanted}; leave it out there, or write the column again"
            )
    for what in ("fill", "missing"):
        value = getattr(read, what)
        if value is not None:
            check_value(stored.dtype, value, f"columns[{stored.name!r}].{what}")


def joined(of_shards: Sequence[Mapping[str, StoredFile]], name: str) -> Mapping[str, StoredFile]:
    """The columns of shards that are read as one file, end to end. name: of their dataset."""
    if len(of_shards) == 1:
        return of_shards[0]
    together = {}
    for column, first in of_shards[0].items():
        parts = [of_shard[column].tokens for of_shard in of_shards]
        opened = [
            (part.store, ObjectInfo(key=part.key, size=part.num_bytes, etag=part.etag))
            for part in parts
        ]
        key = f"{name}.col-{column}"
        store = ConcatStore(opened, key)
        tokens = replace(
            first.tokens,
            store=store,
            key=key,
            num_tokens=sum(part.num_tokens for part in parts),
            etag=store.info(key).etag,
        )
        together[column] = StoredFile(first.column, tokens)
    return together


def stored_columns(
    config: DataConfig, prefixes: Sequence[str], files: Sequence[Sequence[TokenFile]]
) -> dict[str, StoredColumn]:
    """The columns that a config reads, as all of its datasets have them.

    prefixes, files: of each dataset. Raises ConfigError where datasets differ, or none has a column.
    """
    agreed: dict[str, StoredColumn] = {}
    origins: dict[str, str] = {}
    for prefix, of_dataset in zip(prefixes, files, strict=True):
        for name, (column, _) in of_dataset[0].columns.items():
            read = config.column_settings[name]
            if read.fill is not None:
                column = column._replace(fill=read.fill)
            other = agreed.setdefault(name, column)
            origins.setdefault(name, prefix)
            if column.kind != other.kind:
                raise ConfigError(
                    f"column {name!r} is {other.kind} in {origins[name]}, and {column.kind} in "
                    f"{prefix}; write one of them again"
                )
    for name, read in config.column_settings.items():
        if name in agreed:
            continue
        if not read.dtype:
            raise ConfigError(
                f"no dataset has a column {name!r}; leave it out of columns, or name its dtype and width too"
            )
        warn_once(log, name, NOWHERE, name, read.missing)
        agreed[name] = StoredColumn(
            name, read.dtype, read.width or 1, read.align or "labels", read.fill or 0, ()
        )
    return {name: agreed[name] for name in config.columns}


def as_token_column(stored: StoredColumn, read: Column) -> TokenColumn:
    """A stored column as batches have it."""
    return TokenColumn(
        dtype=getattr(torch, stored.dtype),
        fill=stored.fill,
        is_there=_always,
        width=stored.width,
        missing=read.missing,
    )


@dataclass(frozen=True)
class ColumnField:
    """Makes the field of a stored column, in any process."""

    column: str
    align: str

    def __call__(self, made: Any) -> torch.Tensor:
        """The field of some `FieldInputs`."""
        values: torch.Tensor = made.values_of(self.column, self.align)
        return values


def field_of(stored: StoredColumn, read: Column) -> Field:
    """The field that has a stored column."""
    return Field(
        about="",
        make=ColumnField(stored.name, stored.align),
        dtype=stored.dtype,
        stages=STAGES[read.stage],
        columns=[stored.name],
        size=partial(operator.mul, stored.width),
    )


def files_of(name: str, files: Sequence[Sequence[TokenFile]]) -> list[list[TokenFile]]:
    """The files of a stored column in place of those of ids. Where one has none, its tokens have no bytes."""
    return [
        [
            file.columns[name].tokens if name in file.columns else replace(file, dtype=NO_BYTES)
            for file in of_dataset
        ]
        for of_dataset in files
    ]


NO_BYTES = np.dtype("V0")
"""The dtype of tokens of a file without a column."""
