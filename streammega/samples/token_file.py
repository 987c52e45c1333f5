"""A stored file of tokens as samples read it, and which of its tokens are to be learned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streammega.kernels.batch import clear_unlearned
from streammega.samples.documents import DocumentBounds
from streammega.samples.modes import TokenModes
from streammega.storage import Store
from streammega.storage.http_errors import truncated


# Of thousands, each would take two to three times as long if it were frozen.
@dataclass(kw_only=True, slots=True)
class TokenFile:
    """One stored file of tokens: `num_tokens` of `dtype`, little-endian, from its first byte on.

    `etag`: that of the object when it was opened; empty: unknown. `modes`: of its sequences, where
    they make the loss mask. `documents`: where they begin, where somebody asks for it. `content`: the
    digest of its dataset, the same for all files of that.
    """

    store: Store
    key: str
    dtype: np.dtype[Any]
    num_tokens: int
    etag: str = ""
    modes: TokenModes | None = None
    documents: DocumentBounds | None = None
    content: str = ""

    @property
    def url(self) -> str:
        """For messages."""
        return self.store.url(self.key)

    def check_bytes(self, size: int) -> None:
        """Raise ShortReadError if `size` bytes do not hold all tokens: addresses in them go to
        kernels, which look no further.
        """
        if size < self.num_tokens * self.dtype.itemsize:
            raise truncated(self.url, f"{size} bytes, opened with {self.num_tokens} tokens")


@dataclass(frozen=True, kw_only=True)
class Runs:
    """Where the tokens of samples lie: token `start` of a file and on goes to `column` of a sample
    and on; int64 [runs] each.
    """

    file: NDArray[np.int64]
    start: NDArray[np.int64]
    size: NDArray[np.int64]
    sample: NDArray[np.int64]
    column: NDArray[np.int64]


def has_modes(files: Sequence[TokenFile]) -> bool:
    """Whether any of the files makes a loss mask."""
    return any(file.modes is not None for file in files)


def clear_by_modes(files: Sequence[TokenFile], runs: Runs, out: NDArray[Any]) -> None:
    """Write 0 to out [samples, width] for every token that is not learned; those of files without
    modes are.
    """
    for number in np.unique(runs.file):
        file = files[number]
        if file.modes is None:
            continue
        # one file at a time: each has arrays of its own
        of_file = np.flatnonzero(runs.file == number)
        offsets, modes = file.modes.arrays
        clear_unlearned(
            offsets, modes, file.modes.learned, file.dtype.itemsize,
            runs.start[of_file], runs.size[of_file], runs.sample[of_file], runs.column[of_file],
            out,
        )  # fmt: skip
