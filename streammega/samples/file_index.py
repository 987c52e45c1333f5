"""What the `.idx` of a stored file says of its tokens, known before a token is read: where
documents begin, and which mode each sequence has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from streammega.config import StorageConfig
from streammega.dataset import IndexedDataset
from streammega.dataset.manifest import Shard
from streammega.dataset.shard import index_arrays
from streammega.errors import FormatError
from streammega.errors.cached_property import cached_property

Integers = NDArray[np.int64]


class FileIndexArrays(NamedTuple):
    """offsets, lengths, modes [sequences]: first byte, tokens and mode; modes: None without modes.
    bounds [documents + 1]: the first sequence of each document.
    """

    offsets: Integers
    lengths: NDArray[np.int32]
    modes: NDArray[np.int8] | None
    bounds: Integers


@dataclass(frozen=True, kw_only=True)
class FileIndex:
    """The `.idx` of a file.

    Each process opens the arrays when it first needs them. They are maps of files: of this node's
    copy if the `.idx` is remote.
    """

    source: IndexedDataset | tuple[Shard, StorageConfig]

    @property
    def is_open(self) -> bool:
        """Whether its arrays are there."""
        return "arrays" in self.__dict__

    @cached_property
    def arrays(self) -> FileIndexArrays:
        """Raises FormatError if sequences are not in ascending order, StorageError."""
        source = self.source
        opened: Any = source if isinstance(source, IndexedDataset) else index_arrays(*source)
        offsets = _frozen(opened.sequence_offsets)
        if (offsets[1:] < offsets[:-1]).any():
            name = source.prefix if isinstance(source, IndexedDataset) else source[0].index_url
            raise FormatError(
                f"{name}: its sequences are not in ascending order, so tokens cannot be assigned to documents and "
                "modes; convert it again, or set mask_loss_by_mode=False"
            )
        modes = opened.sequence_modes
        return FileIndexArrays(
            offsets=offsets,
            lengths=_frozen(opened.sequence_lengths),
            modes=None if modes is None else _frozen(modes),
            bounds=_frozen(opened.document_indices),
        )

    def __getstate__(self) -> dict[str, Any]:
        return {"source": self.source}


def _frozen(array: NDArray[Any]) -> NDArray[Any]:
    """A view that kernels take as one kind of argument, whether mapped or joined in memory."""
    view = array.view()
    view.flags.writeable = False
    return view
