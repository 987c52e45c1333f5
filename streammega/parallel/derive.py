"""The fields of a rank: from ids in their stored width, on the device that trains, of the tokens
that it keeps.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from streammega.config import DataConfig
from streammega.errors import ConfigError
from streammega.parallel.context import Bounds, split_batch, split_cu_seqlens
from streammega.samples.derived_fields import torch_dtype, with_ends
from streammega.samples.fields import Batch, cu_seqlens, fields_of_ids
from streammega.samples.fields_torch import NO_ID, device_fields
from streammega.samples.loss_masks import Seams

__all__ = ["device_fields", "needs_whole_samples", "rank_fields", "torch_dtype"]


def needs_whole_samples(config: DataConfig) -> bool:
    """Whether some field of a part depends on tokens before it: then every context-parallel rank
    reads whole samples.
    """
    return config.reset_position_ids or config.reset_attention_mask or config.create_attention_mask


class DocumentCounts(NamedTuple):
    """What shapes of a micro-batch's document bounds depend on: known where its ids are read."""

    most: int
    """Documents of the sample that has most."""
    most_kept: int
    """Documents within what a rank keeps of a sample, of the sample that has most there."""
    longest: int
    """Tokens of the longest document of all samples."""


def documents_of(
    ids: Tensor, valid: Tensor, config: DataConfig, bounds: Bounds, seams: Seams | None = None
) -> DocumentCounts:
    """The same numbers as those of the bounds that a device makes of ids [samples, S + 1], on the
    host.
    """
    length = config.sequence_length
    tokens = ids[:, :length].numpy().astype(np.int64)
    if int(valid.min()) < length:
        # what lies after the valid ids is padding, whatever was stored there
        is_padding = np.arange(length) >= valid.numpy()[:, None]
        tokens[is_padding] = config.effective_pad_id
    eod_id = NO_ID if config.eod_id is None else config.eod_id
    whole = cu_seqlens(with_ends(tokens, eod_id, seams), eod_id)
    kept = whole
    if len(bounds) > 1:
        kept = split_cu_seqlens(whole, bounds)
    document_lengths = whole.diff(dim=1)
    return DocumentCounts(
        most=whole.shape[1] - 1,
        most_kept=kept.shape[1] - 1,
        longest=int(document_lengths.max()),
    )


def rank_fields(
    ids: Tensor,
    valid: Tensor,
    config: DataConfig,
    bounds: Bounds,
    *,
    parts: bool,
    documents: DocumentCounts | None = None,
    learned: Tensor | None = None,
    seams: Seams | None = None,
) -> Batch:
    """tokens, labels, loss_mask, position_ids [samples, kept], and what the config adds, of the
    tokens that a rank keeps.

    Args:
        ids: in the stored dtype, [samples, S + 1]; or with `parts` [samples * len(bounds), P + 1],
            the rows of a sample in order.
        valid: int64 [rows of ids], how many ids of a row are not padding.
        bounds: [start, stop) of the kept parts; one of [0, S) where everything is kept.
        parts: the rows are the parts, already.
        documents: of these ids; None: where they are needed, the host waits for the device to count
            them.
        learned: bool, of each of `ids`: there is no loss where a label is not learned; None: all
            are.
        seams: of the whole samples, that have no loss on the label over them.
    """
    if parts:
        of_parts = None if seams is None else _in_parts(seams, bounds)
        return _fields_of_parts(ids, valid, config, bounds, learned, of_parts)
    batch = _fields(ids, valid, config, documents, learned, seams)
    if len(bounds) == 1:
        return batch
    most_kept = None if documents is None else documents.most_kept
    return split_batch(batch, bounds, most_kept)


def _in_parts(seams: Seams, bounds: Bounds) -> Seams | None:
    """Seams of samples as those of their parts, each of which is a row: in the part that has the
    label. None: no part has any.
    """
    rows = []
    columns = []
    for number, (start, stop) in enumerate(bounds):
        label = seams.label_column
        in_part = np.flatnonzero((label >= start) & (label < stop))
        rows.append(seams.sample[in_part] * len(bounds) + number)
        columns.append(seams.column[in_part] - start)
    row = np.concatenate(rows)
    if not len(row):
        return None
    return Seams(sample=row, column=np.concatenate(columns), apart=seams.apart)


def _fields_of_parts(
    ids: Tensor,
    valid: Tensor,
    config: DataConfig,
    bounds: Bounds,
    learned: Tensor | None,
    seams: Seams | None,
) -> Batch:
    """The fields of rows that are parts of samples; those of a sample are laid end to end. seams:
    of the parts.
    """
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
    batch = _fields(ids, valid, part_config, None, learned, seams)
    kept: Batch = {}
    for name in ("tokens", "labels", "loss_mask"):
        kept[name] = batch[name].reshape(samples, kept_length)
    # but for positions, which count from the start of the sample and not of the part
    positions = [torch.arange(start, stop, device=ids.device) for start, stop in bounds]
    kept["position_ids"] = torch.cat(positions).repeat(samples, 1)
    return kept


def _fields(
    ids: Tensor,
    valid: Tensor,
    config: DataConfig,
    documents: DocumentCounts | None,
    learned: Tensor | None,
    seams: Seams | None,
) -> Batch:
    """The fields of samples, made where their ids are."""
    if ids.device.type == "cpu":
        batch = fields_of_ids(ids, valid, config, bounds=True, seams=seams)
    else:
        most = None if documents is None else documents.most
        batch = device_fields(ids, valid, config, most=most, seams=seams)
    if learned is not None:
        learned_labels = learned[:, 1:]
        batch["loss_mask"] = batch["loss_mask"] * learned_labels
    return batch
