"""A micro-batch as one message of bytes: ids in their stored width, and what is known of each row.

[0, ids_stop)                  the ids, [rows, width] in their stored dtype
[valid_start, learned_start)   how many ids of each row are not padding, int32 [rows]
[learned_start, size)          whether a loss is taken on each id, bool [rows, width]; only
                               where the data says so
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

VALID_BYTES = 4
"""Of an int32. torch views bytes as int32 only where they begin on a multiple of it."""


@dataclass(frozen=True, kw_only=True)
class MessageFormat:
    """Where the values of a micro-batch lie in its message: the same on all ranks of a group."""

    rows: int
    width: int
    """Ids of a row."""
    ids_dtype: torch.dtype
    has_learned: bool

    @cached_property
    def ids_stop(self) -> int:
        """Bytes of the ids."""
        return self.rows * self.width * self.ids_dtype.itemsize

    @cached_property
    def valid_start(self) -> int:
        """The first multiple of VALID_BYTES after the ids: of 16 bits, their number may be odd."""
        return -(-self.ids_stop // VALID_BYTES) * VALID_BYTES

    @cached_property
    def learned_start(self) -> int:
        """Where the counts end."""
        return self.valid_start + VALID_BYTES * self.rows

    @cached_property
    def size(self) -> int:
        """Bytes of the message."""
        learned_bytes = self.rows * self.width if self.has_learned else 0
        return self.learned_start + learned_bytes

    def pack(self, message: Tensor, ids: Tensor, valid: Tensor, learned: Tensor | None) -> None:
        """Write ids [rows, width], valid [rows] and, where the data has it, learned [rows, width]
        into a message, uint8 [size].
        """
        self._ids(message).copy_(ids)
        self._valid(message).copy_(valid)
        if self.has_learned:
            assert learned is not None
            self._learned(message).copy_(learned)

    def unpack(self, message: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """(ids, valid as int64, learned) of a message; ids and learned are views of it."""
        valid = self._valid(message).to(torch.int64)
        learned = self._learned(message) if self.has_learned else None
        return self._ids(message), valid, learned

    def _ids(self, message: Tensor) -> Tensor:
        return message[: self.ids_stop].view(self.ids_dtype).view(self.rows, self.width)

    def _valid(self, message: Tensor) -> Tensor:
        return message[self.valid_start : self.learned_start].view(torch.int32)

    def _learned(self, message: Tensor) -> Tensor:
        return message[self.learned_start :].view(torch.bool).view(self.rows, self.width)
