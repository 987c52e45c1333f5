"""Seams: where a sample of the stream order goes over from one run of tokens to another.

Samples are single runs, but for some of those that phases of another length make of what epochs
have left (`order/rests.py`). Known of the order alone, on every rank and before a token is read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from streammega.config import DataConfig

Integers = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Seams:
    """Token `column` of sample `sample` is the first of another run; int64 [seams] each, sample by
    sample. As a label it stands one column before, and continues nothing.

    apart: documents end there too.
    """

    sample: Integers
    column: Integers
    apart: bool = False

    def __len__(self) -> int:
        return len(self.sample)

    @property
    def label_column(self) -> Integers:
        """Where that token is the label, int64 [seams]."""
        return self.column - 1


NO_SEAMS = Seams(sample=np.empty(0, np.int64), column=np.empty(0, np.int64))
"""Those of samples that are a run each."""


def seams_between(
    rows_of_sample: Integers, file: Integers, start: Integers, size: Integers, column: Integers
) -> Seams:
    """The seams between rows of samples: where a row does not go on in its file where the one before
    has ended.

    rows_of_sample: int64 [samples]; of each row its file, first token and tokens, and the column of
    its sample at which it begins.
    """
    goes_on = np.zeros(len(file), np.bool_)
    goes_on[1:] = (file[1:] == file[:-1]) & (start[1:] == start[:-1] + size[:-1])
    seams = np.flatnonzero((column > 0) & ~goes_on)
    sample = np.repeat(np.arange(len(rows_of_sample)), rows_of_sample)
    return Seams(sample=sample[seams], column=column[seams])


def as_asked(seams: Seams, config: DataConfig) -> Seams | None:
    """Seams as the fields of a config are to have them; None: as there were none."""
    if not len(seams) or config.seams == "joined":
        return None
    return replace(seams, apart=config.seams == "apart")
