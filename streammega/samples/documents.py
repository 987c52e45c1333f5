"""Where the documents of stored files begin: known before a token is read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streammega.dataset.index_file import IndexFile
from streammega.errors import FormatError

Integers = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class DocumentBounds:
    """Where the documents of a file lie, by its `.idx`.

    The arrays are opened when they are first needed, in each process by itself: they are maps of
    files, of this node's copy where the `.idx` is remote.
    """

    index: IndexFile

    @property
    def is_open(self) -> bool:
        """Whether its arrays are there."""
        return "arrays" in self.__dict__

    @cached_property
    def arrays(self) -> tuple[Integers, Integers]:
        """(byte offset of each sequence, first sequence of each document).

        Raises FormatError where sequences do not lie in their order, StorageError.
        """
        source = self.index.arrays()
        offsets = source.sequence_offsets.view()
        bounds = source.document_indices.view()
        if (offsets[1:] < offsets[:-1]).any():
            raise FormatError(
                f"{self.index.url}: its sequences lie in no order, so it does not tell where "
                "documents begin; convert it, or set balance_batches=False"
            )
        for array in (offsets, bounds):
            # one kind of argument for the kernel, whether mapped or joined in memory
            array.flags.writeable = False
        return offsets, bounds

    def __getstate__(self) -> dict[str, Any]:
        return {"index": self.index}
