"""Context parallelism: the parts of a batch that a rank keeps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from streammega.samples.fields import Batch

Bounds = Sequence[tuple[int, int]]


def split_batch(batch: Batch, bounds: Bounds, most: int | None = None) -> Batch:
    """The parts [start, stop) of every field of whole samples, in their order. most: as in
    split_cu_seqlens.

    tokens, labels, loss_mask, position_ids: [samples, S] -> [samples, kept]; attention_mask:
    [samples, 1, S, S] -> [samples, 1, kept, S]: keys stay whole. cu_seqlens becomes that of the
    kept tokens, cut where the parts meet too; "cu_seqlens_whole" is what it was, for attention to
    keys of other ranks.
    """
    kept: Batch = {}
    for name, field in batch.items():
        if name == "cu_seqlens":
            kept["cu_seqlens"] = split_cu_seqlens(field, bounds, most)
            kept["cu_seqlens_whole"] = field
        else:
            dim = 2 if name == "attention_mask" else 1
            kept[name] = torch.cat(
                [field.narrow(dim, start, stop - start) for start, stop in bounds], dim
            )
    return kept


def split_cu_seqlens(cu_seqlens: Tensor, bounds: Bounds, most: int | None = None) -> Tensor:
    """Bounds of the documents within the kept parts laid end to end, int32 [samples, n], rows
    filled up with their length.

    cu_seqlens: int32 [samples, m], rising from 0 to S. The seam between two parts bounds a
    document, unless they are neighbours. most: documents of the row that has most, n - 1; None:
    asked of the device, which the host then waits for.
    """
    rows = _bounds_within(cu_seqlens, bounds)
    kept = sum(stop - start for start, stop in bounds)
    for start, seam in _joins(bounds):
        # Both neighbours were clamped to the seam, as if a document began there; where none does,
        # the seam is none of its bounds.
        begins = (cu_seqlens == start).any(1, keepdim=True)
        rows = rows.masked_fill((rows == seam) & ~begins, kept)
    rows = rows.sort(1).values
    # Documents outside of a part were clamped to its ends: of equal bounds the first stays, the
    # others move behind all others.
    repeated = rows[:, 1:] == rows[:, :-1]
    rows[:, 1:] = rows[:, 1:].masked_fill(repeated, kept)
    rows = rows.sort(1).values
    if most is None:
        most = int((rows < kept).sum(1).max())
    return rows[:, : most + 1].contiguous()


def _bounds_within(cu_seqlens: Tensor, bounds: Bounds) -> Tensor:
    """Every bound as each of the parts sees it, counted from the first kept token, [samples, m *
    parts].
    """
    seen = []
    before = 0
    for start, stop in bounds:
        seen.append(cu_seqlens.clamp(start, stop) - start + before)
        before += stop - start
    return torch.cat(seen, 1)


def _joins(bounds: Bounds) -> list[tuple[int, int]]:
    """(place in the whole sample, place among the kept tokens) of each seam between parts that are
    neighbours.
    """
    joins = []
    seam = 0
    for (start, stop), (following, _) in pairwise(bounds):
        seam += stop - start
        if following == stop:
            joins.append((following, seam))
    return joins
