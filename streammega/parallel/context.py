"""Context parallelism: the parts of a batch that a rank keeps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from streammega.samples.fields import Batch

Bounds = Sequence[tuple[int, int]]


def split_batch(batch: Batch, bounds: Bounds, most: int | None = None) -> Batch:
    """The parts [start, stop) of every field of whole samples, in their order. most: as in split_cu_seqlens.

    tokens, labels, loss_mask, position_ids: [samples, S] -> [samples, kept]; attention_mask: [samples, 1, S, S] -> [samples, 1,
    kept, S]: keys stay whole. cu_seqlens becomes that of the kept tokens, cut where the parts meet too;
    "cu_seqlens_whole" is what it was, for attention to keys of other ranks.
    """
    kept: Batch = {}
    for name, field in batch.items():
        if name == "cu_seqlens":
            kept["cu_seqlens"], kept["cu_seqlens_whole"] = split_cu_seqlens(field, bounds, most), field
        else:
            dim = 2 if name == "attention_mask" else 1
            kept[name] = torch.cat([field.narrow(dim, start, stop - start) for start, stop in bounds], dim)
    return kept


def split_cu_seqlens(cu_seqlens: Tensor, bounds: Bounds, most: int | None = None) -> Tensor:
    """Bounds of the documents within the kept parts laid end to end, int32 [samples, n], rows filled up with their length.

    cu_seqlens: int32 [samples, m], rising from 0 to S. The seam between two parts bounds a document, unless they are neighbours.
    most: documents of the row that has most, n - 1; None: asked of the device, which the host then waits for.
    """
    pieces, offset = [], 0
    for start, stop in bounds:
        pieces.append(cu_seqlens.clamp(start, stop) - start + offset)
        offset += stop - start
    rows = torch.cat(pieces, 1)
    for (_, stop), (start, _), seam in zip(bounds, bounds[1:], _seams(bounds), strict=False):
        if stop == start:  # neighbours: the seam is a bound only if a document begins there
            begins = (cu_seqlens == start).any(1, keepdim=True)
            rows = torch.where((rows == seam) & ~begins, torch.full_like(rows, offset), rows)
    rows = rows.sort(1).values
    repeated = rows[:, 1:] == rows[:, :-1]
    rows[:, 1:] = rows[:, 1:].masked_fill(repeated, offset)
    rows = rows.sort(1).values
    if most is None:
        most = int((rows < offset).sum(1).max())
    return rows[:, : most + 1].contiguous()


def _seams(bounds: Bounds) -> list[int]:
    seams, at = [], 0
    for start, stop in bounds[:-1]:
        at += stop - start
        seams.append(at)
    return seams
