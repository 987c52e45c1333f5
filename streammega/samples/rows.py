"""Where the rows of extents lie in their samples."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from streammega.order import Extents

Integers = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class SampleRows:
    """In tokens, int64: size, sample and column [rows]: how long a row is, which sample it belongs
    to, and which token of that it begins at; valid [samples]: how many tokens each sample has.
    """

    size: Integers
    sample: Integers
    column: Integers
    valid: Integers


def rows_of(extents: Extents) -> SampleRows:
    """The rows of samples, which lie end to end in each. Cost: a few passes over the rows."""
    size = extents.stop - extents.start
    # one more than there are rows: the last is the end of the last sample
    tokens_before_row = np.zeros(len(size) + 1, np.int64)
    np.cumsum(size, out=tokens_before_row[1:])
    tokens_before_sample = tokens_before_row[extents.row_splits]
    sample = np.repeat(np.arange(len(extents)), np.diff(extents.row_splits))
    return SampleRows(
        size=size,
        sample=sample,
        column=tokens_before_row[:-1] - tokens_before_sample[sample],
        valid=np.diff(tokens_before_sample),
    )
