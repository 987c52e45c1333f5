"""Where samples lie: what every order's `locate` returns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class Extents:
    """Runs of consecutive tokens, one row a run; a sample is its rows end to end.

    Sample i of the call owns rows [row_splits[i], row_splits[i + 1]).

    row_splits int64 [samples + 1]; dataset int32 [rows]; file int32 [rows], within the dataset;
    start and stop int64 [rows], in tokens from the beginning of the file.
    """

    row_splits: NDArray[np.int64]
    dataset: NDArray[np.int32]
    file: NDArray[np.int32]
    start: NDArray[np.int64]
    stop: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.row_splits) - 1
