"""Context parallelism: the parts of a batch that a rank keeps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from streammega.samples.fields import Batch

Bounds = Sequence[tuple[int, int]]
"""[start, stop) of the parts of a sample that a rank keeps, in tokens."""


def split_batch(batch: Batch, parts: Bounds, most: int | None = None) -> Batch:
    """The parts [start, stop) of every field of whole samples, end to end in their order.

    tokens, labels, loss_mask, position_ids: [samples, S] -> [samples, kept]; attention_mask:
    [samples, 1, S, S] -> [samples, 1, kept, S]: keys stay whole. cu_seqlens becomes that of the
    kept tokens, cut where the parts meet too; "cu_seqlens_whole" is what it was, for attention to
    keys of other ranks. most: as in split_cu_seqlens.
    """
    kept: Batch = {}
    for name, field in batch.items():
        if name == "cu_seqlens":
            kept["cu_seqlens"] = split_cu_seqlens(field, parts, most)
            kept["cu_seqlens_whole"] = field
        else:
            dim = 2 if name == "attention_mask" else 1
            cuts = [field.narrow(dim, start, stop - start) for start, stop in parts]
            kept[name] = torch.cat(cuts, dim)
    return kept


def split_cu_seqlens(cu_seqlens: Tensor, parts: Bounds, most: int | None = None) -> Tensor:
    """Bounds of the documents within the kept parts laid end to end, int32 [samples, n], rows
    filled up with their length.

    Three steps: every bound is moved to where it lies among the kept tokens, one of a document that
    no part has to the end of a part next to it; ends of parts that bound no document are struck
    out; of equal bounds one stays. All rows at once, since on a device a loop over rows or bounds
    would be a kernel for each.

    Args:
        cu_seqlens: int32 [samples, m], rising from 0 to S.
        parts: [start, stop) of each kept part of a sample, in their order. The seam between two
            parts bounds a document, unless the parts are neighbours in the sample.
        most: documents of the row that has most, n - 1; None: asked of the device, which the host
            then waits for.
    """
    kept_length = sum(stop - start for start, stop in parts)
    bounds = _moved_to_parts(cu_seqlens, parts)
    bounds = _without_false_seams(bounds, cu_seqlens, parts, kept_length)
    bounds = _each_once(bounds, kept_length)
    if most is None:
        documents = (bounds < kept_length).sum(1)
        most = int(documents.max())
    return bounds[:, : most + 1].contiguous()


def _moved_to_parts(cu_seqlens: Tensor, parts: Bounds) -> Tensor:
    """Every bound as each of the parts sees it, counted from the first kept token, [samples, m *
    parts].

    What lies before a part is moved to its start, and what lies after it to its end.
    """
    seen = []
    kept_before = 0
    for start, stop in parts:
        within_part = cu_seqlens.clamp(start, stop) - start
        seen.append(within_part + kept_before)
        kept_before += stop - start
    return torch.cat(seen, 1)


def _without_false_seams(
    bounds: Tensor, cu_seqlens: Tensor, parts: Bounds, kept_length: int
) -> Tensor:
    """Bounds among the kept tokens without the seams of neighbours at which no document begins:
    those become the kept length.

    Both neighbours see bounds there in any case: one those after its end, the other those before
    its start.
    """
    seam = 0
    for (start, stop), (next_start, _) in pairwise(parts):
        seam += stop - start
        if next_start == stop:
            document_begins = (cu_seqlens == next_start).any(1, keepdim=True)
            bounds = bounds.masked_fill((bounds == seam) & ~document_begins, kept_length)
    return bounds


def _each_once(bounds: Tensor, kept_length: int) -> Tensor:
    """Rising rows in which each bound stands once, filled up with the kept length."""
    rising = bounds.sort(1).values
    # Sorted, equal ones are neighbours; all but the first become the greatest value there is, and
    # the second sort moves them behind all others.
    repeated = rising[:, 1:] == rising[:, :-1]
    rising[:, 1:] = rising[:, 1:].masked_fill(repeated, kept_length)
    return rising.sort(1).values
