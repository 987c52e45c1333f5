"""Where the documents of stored files lie: known before a token is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from streammega.dataset import IndexedDataset
from streammega.dataset.shard import Shard
from streammega.errors import FormatError
from streammega.storage.thread_pool import parallel_map

Integers = NDArray[np.int64]
OPENERS = 32
"""Indices that are opened at once: of a remote dataset each is a download."""


class DocumentArrays(NamedTuple):
    """Of a file: the byte at which each sequence begins, its tokens, and the first sequence of each
    document.
    """

    offsets: Integers
    lengths: NDArray[np.int32]
    bounds: Integers


@dataclass(frozen=True, kw_only=True)
class DocumentBounds:
    """Where the documents of a file lie, by its `.idx`.

    bin_tokens: of the bins that they are packed into; None: they lie end to end. The arrays are
    opened when they are first needed, in each process by itself: they are maps of files, of this
    node's copy where the `.idx` is remote.
    """

    index: IndexedDataset | Shard
    bin_tokens: int | None = None

    @property
    def is_open(self) -> bool:
        """Whether its arrays are there."""
        return "arrays" in self.__dict__

    @cached_property
    def arrays(self) -> DocumentArrays:
        """Raises FormatError where sequences do not lie in their order, StorageError."""
        source: Any = self.index if isinstance(self.index, IndexedDataset) else self.index.arrays()
        offsets = source.sequence_offsets.view()
        lengths = source.sequence_lengths.view()
        bounds = source.document_indices.view()
        if (offsets[1:] < offsets[:-1]).any():
            name = self.index.index_url if isinstance(self.index, Shard) else self.index.prefix
            raise FormatError(
                f"{name}: its sequences lie in no order, so it does not tell where documents "
                "begin; convert it again"
            )
        for array in (offsets, lengths, bounds):
            # one kind of argument for the kernel, whether mapped or joined in memory
            array.flags.writeable = False
        return DocumentArrays(offsets, lengths, bounds)

    def __getstate__(self) -> dict[str, Any]:
        return {"index": self.index, "bin_tokens": self.bin_tokens}


def open_bounds(
    documents_of_file: Sequence[DocumentBounds | None], used: Integers
) -> list[tuple[int, DocumentBounds]]:
    """(number, bounds) of the files used that have any, all of which are open."""
    numbered = []
    for number in np.unique(used).tolist():
        bounds = documents_of_file[number]
        if bounds is not None:
            numbered.append((number, bounds))
    waiting = [bounds for _, bounds in numbered if not bounds.is_open]
    parallel_map(lambda bounds: bounds.arrays, waiting, OPENERS)
    return numbered
