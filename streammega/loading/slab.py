"""A slab: micro-batches that were gathered together, and the dicts that are made of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from streammega.config import FieldsConfig
from streammega.samples.derived_fields import Allocate, causal_mask, plain_mask, plain_positions
from streammega.samples.fields import Batch

PLAIN_BYTES = 1 << 20
"""Bytes of plain masks or positions that are written together: so few that they stay in caches when
used again, and no fewer, as memory for them costs half as much as writing them does.
"""
PLAIN_BATCHES = 64
"""Most micro-batches they are written for: of short sequences those bytes hold thousands, and
making so many tensors delays the first batch by tens of milliseconds.
"""
_LATER_FIELDS = (
    "loss_mask",
    "position_ids",
    "cu_seqlens",
    "max_seqlen",
    "attention_mask",
    "dataset_id",
)
"""What follows tokens and labels, in the order of a batch that is read on its own: it tells nothing
of which fields were plain, for programs take a batch apart by `batch.values()`.
"""
_MASK_ITEMSIZE = torch.float32.itemsize
_POSITION_ITEMSIZE = torch.int64.itemsize


@dataclass(frozen=True, kw_only=True)
class Slab:
    """Gathered micro-batches: their positions, and their fields.

    fields: by name, [micro-batches, ...] in memory of the slab's own: no two micro-batches share an
    element. cu_seqlens: of each micro-batch, where the config asks for them; their widths differ.
    """

    consumed: list[int]
    fields: dict[str, torch.Tensor]
    cu_seqlens: list[torch.Tensor] | None = None

    def batches(self) -> deque[tuple[int, Batch]]:
        """(consumed, batch) of each micro-batch, in order."""
        names = list(self.fields)
        columns = [field.unbind() for field in self.fields.values()]
        if self.cu_seqlens is not None:
            names.append("cu_seqlens")
            columns.append(tuple(self.cu_seqlens))
        batches: deque[tuple[int, Batch]] = deque()
        for consumed, *fields in zip(self.consumed, *columns, strict=True):
            batches.append((consumed, dict(zip(names, fields, strict=True))))
        return batches


class Finisher:
    """Adds to batches what need not be gathered, when they are handed out: until then it would only
    take memory.

    Each batch gets masks and positions of its own, though they are mostly alike: a batch is its
    caller's, to write to as well.
    """

    def __init__(self, config: FieldsConfig, micro_batch_size: int, allocate: Allocate) -> None:
        self._shape = (micro_batch_size, config.sequence_length)
        self._allocate = allocate
        self._masks: deque[torch.Tensor] = deque()
        self._positions: deque[torch.Tensor] = deque()
        self._attention = config.create_attention_mask

    def complete(self, batch: Batch) -> None:
        """Add loss_mask and position_ids, where they are plain, and the attention mask, where the
        config asks for one; bring all fields into their order.
        """
        if "loss_mask" not in batch:
            batch["loss_mask"] = self._next(self._masks, plain_mask, _MASK_ITEMSIZE)
        if "position_ids" not in batch:
            batch["position_ids"] = self._next(self._positions, plain_positions, _POSITION_ITEMSIZE)
        if self._attention:
            samples, length = self._shape
            documents = batch.get("cu_seqlens")
            batch["attention_mask"] = causal_mask(samples, length, documents, self._allocate)
        for name in _LATER_FIELDS:
            if name in batch:
                batch[name] = batch.pop(name)

    def _next(
        self, stock: deque[torch.Tensor], make: Callable[..., torch.Tensor], itemsize: int
    ) -> torch.Tensor:
        """The next of a stock, which is filled up by `make` when it is empty."""
        if not stock:
            samples, length = self._shape
            fitting = PLAIN_BYTES // (itemsize * samples * length)
            batches = min(PLAIN_BATCHES, max(1, fitting))
            stock.extend(make((batches, samples, length), self._allocate).unbind())
        return stock.popleft()
