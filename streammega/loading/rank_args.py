"""Which tokens of every sample a reader keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from streammega.order import Extents
from streammega.order.extents import cut_extents
from streammega.order.sharding import zigzag_bounds


@dataclass(frozen=True, kw_only=True)
class KeptColumns:
    """Tokens [start, stop) of every sample, for each of `bounds`: equally long, and each a row of a
    batch. Without bounds a sample is kept whole, as one row.
    """

    bounds: Sequence[tuple[int, int]] = ()

    @property
    def rows_of_sample(self) -> int:
        """Rows of a batch that one sample makes."""
        return max(len(self.bounds), 1)

    def width(self, sample_width: int) -> int:
        """Tokens of a row, of samples of `sample_width` tokens."""
        if not self.bounds:
            return sample_width
        start, stop = self.bounds[0]
        return stop - start

    @property
    def starts(self) -> NDArray[np.int64]:
        """The first token of each part, int64 [rows of a sample]."""
        if not self.bounds:
            return np.zeros(1, np.int64)
        return np.array([start for start, _ in self.bounds], np.int64)

    def cut(self, extents: Extents) -> Extents:
        """The extents of what is kept, each part as a sample of its own."""
        return cut_extents(extents, self.bounds) if self.bounds else extents


WHOLE = KeptColumns()
"""Samples as they are."""


def kept_columns_of(sequence_length: int, cp_rank: int, cp_size: int) -> KeptColumns:
    """What a context-parallel rank keeps of each sample, with the token after each part: its last
    label. Raises ConfigError for a rank that does not exist: it would read others' tokens.
    """
    parts = zigzag_bounds(sequence_length, cp_rank, cp_size)
    if cp_size == 1:
        return WHOLE
    return KeptColumns(bounds=[(start, stop + 1) for start, stop in parts])
