"""What travels with every token, as a table: a name, a dtype, and where its values come from.

Ids come first, and are gathered from files. A column has a value for each of them, wherever they go:
in ready batches, in messages between ranks and from workers, in context-parallel parts. Fields are made
of columns: see `field_inputs.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from streammega.samples.excluded import ExclusionMask
from streammega.samples.token_file import Runs, TokenFile, clear_by_modes


class GatheredRows(NamedTuple):
    """What columns are made of: files, the runs of tokens that rows consist of, and the tokens of rows
    that are excluded.
    """

    files: Sequence[TokenFile]
    runs: Runs
    excluded: ExclusionMask | None


class Column(NamedTuple):
    """What travels with every token.

    dtype: of a value. fill: the value where a row has no token. is_there: whether the data of a
    SegmentSource has it; batches of other data go without. make: write the values of rows to an array
    [rows, tokens], which is filled.
    """

    dtype: np.dtype[Any]
    fill: Any
    is_there: Callable[[Any], bool]
    make: Callable[[GatheredRows, NDArray[Any]], None]


def _has_loss(rows: GatheredRows, out: NDArray[Any]) -> None:
    clear_by_modes(rows.files, rows.runs, out)
    if rows.excluded is not None:
        rows.excluded.clear(out)


COLUMNS: dict[str, Column] = {
    # whether a token has a loss where it is a label
    "has_loss": Column(np.dtype(np.bool_), True, lambda source: source.masks_loss, _has_loss),
}
