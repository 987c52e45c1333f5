"""The fields of a rank: from ids in their stored width, on the device that trains, of the tokens
that it keeps in context parallelism.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from streammega.config import DataConfig
from streammega.errors import ConfigError
from streammega.samples.fields import Batch, cu_seqlens, fields_of_ids
from streammega.samples.fields_torch import NO_ID, device_fields

Bounds = Sequence[tuple[int, int]]
"""[start, stop) of the parts of a sample that a rank keeps, in tokens."""


def needs_whole_samples(config: DataConfig) -> bool:
    """Whether some field of a part depends on tokens before it: then every context-parallel rank
    reads whole samples.
    """
    return config.reset_position_ids or config.reset_attention_mask or config.create_attention_mask


class DocumentCounts(NamedTuple):
    """The numbers that set the shapes of a micro-batch's document bounds. The reading rank knows them."""

    max_documents: int
    """Most documents in a sample."""
    max_kept_documents: int
    """Most documents in the parts of a sample that a rank keeps."""
    longest: int
    """Tokens of the longest document of all samples."""


def documents_of(ids: Tensor, valid: Tensor, config: DataConfig, bounds: Bounds) -> DocumentCounts:
    """Count, on the host, the documents in ids [samples, S + 1] as the device will count them."""
    length = config.sequence_length
    tokens = ids[:, :length].numpy().astype(np.int64)
    if int(valid.min()) < length:
        # all ids after the valid ones are padding, whatever value is stored there
        is_padding = np.arange(length) >= valid.numpy()[:, None]
        tokens[is_padding] = config.effective_pad_id
    eod_id = NO_ID if config.eod_id is None else config.eod_id
    of_samples = cu_seqlens(tokens, eod_id)
    of_parts = of_samples if len(bounds) == 1 else split_cu_seqlens(of_samples, bounds)
    longest = int(of_samples.diff(dim=1).max())
    return DocumentCounts(of_samples.shape[1] - 1, of_parts.shape[1] - 1, longest)


def rank_fields(
    ids: Tensor,
    valid: Tensor,
    config: DataConfig,
    bounds: Bounds,
    *,
    parts: bool,
    names: Sequence[str] | None = None,
    documents: DocumentCounts | None = None,
    may_pad: bool = True,
    learned: Tensor | None = None,
) -> Batch:
    """The fields of the tokens that a rank keeps: tokens, labels, loss_mask, position_ids [samples,
    kept], and what the config adds.

    Args:
        ids: in the stored dtype, [samples, S + 1]; or with `parts` [samples * len(bounds), P + 1],
            the rows of a sample in order.
        valid: integers [rows of ids], how many ids of a row are not padding.
        bounds: [start, stop) of the kept parts; one of [0, S) where everything is kept.
        parts: the rows are the parts, already.
        names: of the fields; None: those of the config.
        documents: the counts of these ids; None: if they are needed, the host waits for the device
            to count documents.
        may_pad: as in device_fields.
        learned: bool for each of `ids`; a label that is not learned has no loss. None: all have.
    """
    names = config.field_names if names is None else names
    if parts:
        return _fields_of_parts(ids, valid, config, bounds, names, may_pad, learned)
    batch = _fields(ids, valid, config, names, documents, may_pad, learned)
    if len(bounds) == 1:
        return batch
    return split_batch(batch, bounds, documents.max_kept_documents if documents else None)


def _fields_of_parts(
    ids: Tensor,
    valid: Tensor,
    config: DataConfig,
    bounds: Bounds,
    names: Sequence[str],
    may_pad: bool,
    learned: Tensor | None,
) -> Batch:
    """The fields of rows that are parts of samples. The parts of a sample are laid end to end."""
    if needs_whole_samples(config):
        raise ConfigError(
            "document bounds need whole samples: open the loader without cp_rank and cp_size, "
            "or by open_loader"
        )
    part_start, part_stop = bounds[0]  # parts are of one length
    part_length = part_stop - part_start
    kept_length = len(bounds) * part_length
    samples = len(ids) // len(bounds)
    # made as if each part were a sample: without documents no token depends on those before it
    part_config = replace(config, sequence_length=part_length)
    batch = _fields(ids, valid, part_config, names, None, may_pad, learned)
    kept = {name: field.reshape(samples, kept_length) for name, field in batch.items()}
    if "position_ids" in names:
        # they count from the start of the sample and not of the part
        positions = [torch.arange(start, stop, device=ids.device) for start, stop in bounds]
        kept["position_ids"] = torch.cat(positions).repeat(samples, 1)
    return kept


def _fields(
    ids: Tensor,
    valid: Tensor,
    config: DataConfig,
    names: Sequence[str],
    documents: DocumentCounts | None,
    may_pad: bool,
    learned: Tensor | None,
) -> Batch:
    """The fields of samples, made where their ids are."""
    if ids.device.type == "cpu":
        batch = fields_of_ids(ids, valid, config, names=names)
    else:
        max_documents = documents.max_documents if documents else None
        batch = device_fields(
            ids, valid, config, names, may_pad=may_pad, max_documents=max_documents
        )
    if learned is not None and "loss_mask" in names:
        batch["loss_mask"] = batch["loss_mask"] * learned[:, 1:]
    return batch


def split_batch(batch: Batch, parts: Bounds, max_documents: int | None = None) -> Batch:
    """The parts [start, stop) of every field of whole samples, end to end in their order.

    tokens, labels, loss_mask, position_ids: [samples, S] -> [samples, kept]; attention_mask:
    [samples, 1, S, S] -> [samples, 1, kept, S]: keys stay whole. cu_seqlens becomes that of the
    kept tokens, cut where the parts meet too; "cu_seqlens_whole" is what it was, for attention to
    keys of other ranks. max_documents: as in split_cu_seqlens.
    """
    kept: Batch = {}
    for name, field in batch.items():
        if name == "cu_seqlens":
            kept["cu_seqlens"] = split_cu_seqlens(field, parts, max_documents)
            kept["cu_seqlens_whole"] = field
        else:
            dim = 2 if name == "attention_mask" else 1
            cuts = [field.narrow(dim, start, stop - start) for start, stop in parts]
            kept[name] = torch.cat(cuts, dim)
    return kept


def split_cu_seqlens(cu_seqlens: Tensor, parts: Bounds, max_documents: int | None = None) -> Tensor:
    """Bounds of the documents within the kept parts laid end to end, int32 [samples, n].

    Each row is filled up with the number of kept tokens.

    First every bound moves to its place among the kept tokens; a bound outside of all parts moves to
    the nearest end of each part. Then ends of parts that bound no document are dropped, and of equal
    bounds one stays. All rows are computed at once: a loop would launch a kernel for each.

    Args:
        cu_seqlens: int32 [samples, m], rising from 0 to S.
        parts: [start, stop) of each kept part of a sample, in their order. The border between two
            parts bounds a document, unless the parts are neighbours in the sample.
        max_documents: most documents in a row, which is n - 1; None: the host waits for the device to
            count them.
    """
    kept_length = sum(stop - start for start, stop in parts)
    bounds = _shift_to_parts(cu_seqlens, parts)
    bounds = _drop_part_boundaries(bounds, cu_seqlens, parts, kept_length)
    bounds = _each_once(bounds, kept_length)
    if max_documents is None:
        max_documents = int((bounds < kept_length).sum(1).max())
    return bounds[:, : max_documents + 1].contiguous()


def _shift_to_parts(cu_seqlens: Tensor, parts: Bounds) -> Tensor:
    """Every bound clamped to each of the parts, counted from the first kept token.

    Returns [samples, m * parts]. A bound before a part moves to its start, one after it to its end.
    """
    shifted = []
    kept_before = 0
    for start, stop in parts:
        within_part = cu_seqlens.clamp(start, stop) - start
        shifted.append(within_part + kept_before)
        kept_before += stop - start
    return torch.cat(shifted, 1)


def _drop_part_boundaries(
    bounds: Tensor, cu_seqlens: Tensor, parts: Bounds, kept_length: int
) -> Tensor:
    """Replace borders between neighbouring parts at which no document begins by the kept length.

    `_shift_to_parts` leaves a bound at every border: it moves later bounds to the end of the first part,
    and earlier ones to the start of the second.
    """
    border = 0
    for (start, stop), (next_start, _) in pairwise(parts):
        border += stop - start
        if next_start == stop:
            document_begins = (cu_seqlens == next_start).any(1, keepdim=True)
            bounds = bounds.masked_fill((bounds == border) & ~document_begins, kept_length)
    return bounds


def _each_once(bounds: Tensor, kept_length: int) -> Tensor:
    """Rising rows in which each bound stands once, filled up with the kept length."""
    rising = bounds.sort(1).values
    # Sorted, equal ones are neighbours; all but the first become the greatest value there is, and
    # the second sort moves them behind all others.
    repeated = rising[:, 1:] == rising[:, :-1]
    rising[:, 1:] = rising[:, 1:].masked_fill(repeated, kept_length)
    return rising.sort(1).values
