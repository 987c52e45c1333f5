"""The fields of a rank: from ids in their stored width, on the device that trains, of the tokens
that it keeps in context parallelism.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from streammega.config import FieldsConfig
from streammega.config.fields import FIELDS, Field
from streammega.errors import ConfigError
from streammega.samples.device_fields import NO_ID, DeviceFields
from streammega.samples.field_inputs import (
    Batch,
    FieldInputs,
    Make,
    Samples,
    make_fields,
    makers,
)
from streammega.samples.fields import cu_seqlens
from streammega.samples.host_fields import HostFields
from streammega.samples.rows import KeptParts

Bounds = Sequence[tuple[int, int]]
"""[start, stop) of the parts of a sample that a rank keeps, in tokens."""


class DocumentCounts(NamedTuple):
    """The numbers that set the shapes of a micro-batch's document bounds. The reading rank knows them."""

    max_documents: int
    """Most documents in a sample."""
    max_kept_documents: int
    """Most documents in the parts of a sample that a rank keeps."""
    longest: int
    """Tokens of the longest document of all samples."""


def documents_of(
    ids: Tensor, valid: Tensor, config: FieldsConfig, bounds: Bounds
) -> DocumentCounts:
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
    samples: Samples,
    config: FieldsConfig,
    bounds: Bounds,
    *,
    names: Collection[str] | None = None,
    columns: Mapping[str, Field] = {},
    documents: DocumentCounts | None = None,
    may_pad: bool = True,
) -> Batch:
    """The fields of the tokens that a rank keeps: tokens, labels, loss_mask, position_ids [samples,
    kept], and what the config adds. They are made where the ids are.

    Args:
        samples: "ids" in the stored dtype, [samples, S + 1] or of the kept parts [samples * len(bounds),
            P + 1], the rows of a sample in order. Columns are either, too.
        bounds: [start, stop) of the kept parts; one of [0, S) where everything is kept.
        names: of the fields; None: those of the config. columns: the fields of stored columns.
        documents: the counts of these ids; None: if they are needed, the host waits for the device
            to count documents.
        may_pad: as in DeviceFields.

    Raises ConfigError for parts where a field needs whole samples.
    """
    names = config.field_names if names is None else names
    start, stop = bounds[0]  # parts are of one length
    is_cut = samples.ids.shape[1] == stop - start + 1
    of_whole = [name for name in names if FIELDS[name].needs_whole(config)]
    if len(bounds) == 1:
        of_whole = []  # a part that is the sample
    if of_whole and is_cut:
        raise ConfigError(
            f"{of_whole[0]} needs whole samples: open the loader without cp_rank and cp_size, "
            "or by open_loader"
        )
    of_parts = [name for name in names if name not in of_whole]
    made = _made(
        samples if is_cut else _cut(samples, bounds),
        config if len(bounds) == 1 else replace(config, sequence_length=stop - start),
        makers(of_parts, columns),
        may_pad,
        documents.max_documents if documents and not of_whole else None,
        [start for start, _ in bounds],
    )
    for name, field in made.items():
        # the parts of a sample end to end
        if len(bounds) > 1 and (columns.get(name) or FIELDS[name]).tokens_dim == 1:
            made[name] = field.reshape(-1, len(bounds) * field.shape[1], *field.shape[2:])
    if of_whole:
        max_documents = documents.max_documents if documents else None
        # columns are of parts: a field that is made of them cannot need whole samples
        alone = samples._replace(columns={})
        uncut = _made(alone, config, makers(of_whole), may_pad, max_documents, (0,))
        made |= split_batch(uncut, bounds, documents.max_kept_documents if documents else None)
    order = [kept for name in (*FIELDS, *columns) for kept in (name, f"{name}_whole")]
    return {name: made[name] for name in order if name in made}


def _made(
    samples: Samples,
    config: FieldsConfig,
    wanted: Mapping[str, Make],
    may_pad: bool,
    max_documents: int | None,
    starts: Sequence[int],
) -> Batch:
    if samples.ids.device.type == "cpu":
        inputs: FieldInputs = HostFields(samples, config, wanted, starts=starts)
    else:
        inputs = DeviceFields(
            samples, config, may_pad=may_pad, max_documents=max_documents, starts=starts
        )
    (batch,) = make_fields(inputs, wanted)
    return batch


def _cut(samples: Samples, bounds: Bounds) -> Samples:
    """Whole samples in parts, each with the token after it. Columns may be of parts already."""
    kept = KeptParts(bounds=[(start, stop + 1) for start, stop in bounds])
    ids = kept.cut_rows(samples.ids)
    columns = {
        name: column if len(column) == len(ids) else kept.cut_rows(column)
        for name, column in samples.columns.items()
    }
    starts = torch.tensor([start for start, _ in bounds], device=samples.valid.device)
    valid = (samples.valid[:, None] - starts).clamp(0, ids.shape[1]).flatten()
    return samples._replace(ids=ids, valid=valid, columns=columns)


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
        elif not FIELDS[name].tokens_dim:
            kept[name] = field
        else:
            dim = FIELDS[name].tokens_dim
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
