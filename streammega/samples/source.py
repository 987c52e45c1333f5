"""What every order gives the layers above: samples by global number, their reads,
and an identity.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from streammega.config import DataConfig
from streammega.order import Extents
from streammega.samples.derived_fields import new_memory, sequence_fields
from streammega.samples.excluded import SkippedColumns, SkippedTokens
from streammega.samples.fetch import Ids, fetch_ids, rows_of
from streammega.samples.fields import Batch, fields_of_ids
from streammega.samples.loss_masks import Seams, as_asked, seams_between
from streammega.samples.packed import are_packed
from streammega.samples.token_file import Runs, TokenFile, clear_by_modes, has_modes

OPENERS = 16
"""Pairs of a blend that are opened at once."""


class SampleSource(Protocol):
    """Samples in an order. `files[d]` are the files of dataset d that extents refer to."""

    config: DataConfig

    @property
    def files(self) -> Sequence[Sequence[TokenFile]]:
        """The files of each dataset."""

    @property
    def num_samples(self) -> int | None:
        """How many samples there are; None: the stream has no end."""

    @property
    def skipped(self) -> SkippedTokens | None:
        """The tokens that are not seen; None: all are."""

    def locate(self, sample_ids: NDArray[np.int64]) -> Extents:
        """Where samples lie."""

    def identity(self, consumed: int | None = None) -> dict[str, Any]:
        """What defines the order of the first `consumed` samples (None: all): small, JSON-able,
        without where the data lies.
        """


def read_samples(
    source: SampleSource, sample_ids: NDArray[np.int64]
) -> tuple[Ids, NDArray[np.int64]]:
    """Token ids of samples, [n, S + a] in the widest stored dtype, and how many of
    them each has.
    """
    extents = source.locate(sample_ids)
    return _read(source, extents, _skipped_columns(source, sample_ids, extents))


def sample_fields(
    source: SampleSource, sample_ids: NDArray[np.int64], *, bounds: bool = False
) -> Batch:
    """The fields of samples, as `batch_fields` makes them, with no loss on what the modes of their
    datasets leave out, nor on documents that are skipped; with inter_document_masking also those
    that it makes.
    """
    config = source.config
    extents = source.locate(sample_ids)
    skipped = _skipped_columns(source, sample_ids, extents)
    ids, valid = _read(source, extents, skipped)
    seams = None
    if config.seams != "joined":
        seams = as_asked(seams_of(source, extents), config)
    batch = fields_of_ids(ids, valid, config, bounds=bounds, seams=seams)
    files = all_files(source)
    if config.inter_document_masking:
        size = extents.stop - extents.start
        packed = are_packed(files)
        batch |= sequence_fields(extents.row_splits, size, config, new_memory, packed=packed)
    if config.dataset_ids:
        batch["dataset_id"] = torch.from_numpy(dataset_of_samples(source, extents))
    if has_modes(files):
        loss_mask = batch["loss_mask"].numpy()  # the tensor's memory, written in place
        clear_by_modes(files, runs_of(source, extents, shift=-1), loss_mask)
    if skipped is not None:
        skipped.clear_loss(batch["loss_mask"].numpy())
    return batch


def seams_of(source: SampleSource, extents: Extents) -> Seams:
    """Where samples go over from one run of tokens to another."""
    rows = rows_of(extents)
    return seams_between(
        np.diff(extents.row_splits),
        file_of_rows(source, extents),
        extents.start,
        rows.size,
        rows.column,
    )


def all_files(source: SampleSource) -> list[TokenFile]:
    """The files of all datasets, end to end."""
    return [file for files in source.files for file in files]


def dataset_ids(source: SampleSource) -> NDArray[np.int64]:
    """The "dataset_id" of each dataset, int64 [datasets]: its number, or of what joined a run by
    itself that of the dataset that it was appended to, since it is the same source.
    """
    # orders that nothing joins have no such
    joined_ids: NDArray[np.int64] | None = getattr(source, "joined_ids", None)
    return np.arange(len(source.files)) if joined_ids is None else joined_ids


def dataset_of_samples(source: SampleSource, extents: Extents) -> NDArray[np.int64]:
    """The "dataset_id" of each sample, int64 [samples]: that of its first extent, for all are of
    one dataset.
    """
    return dataset_ids(source)[extents.dataset[extents.row_splits[:-1]]]


def file_of_rows(source: SampleSource, extents: Extents) -> NDArray[np.int64]:
    """The place among all files of the one in which each row lies."""
    files_of_dataset = [len(files) for files in source.files]
    first_file = np.cumsum([0, *files_of_dataset])
    return first_file[extents.dataset].astype(np.int64) + extents.file


def _skipped_columns(
    source: SampleSource, sample_ids: NDArray[np.int64], extents: Extents
) -> SkippedColumns | None:
    """Where samples hold tokens that are not seen; None: nowhere."""
    if source.skipped is None:
        return None
    return source.skipped.columns(runs_of(source, extents), sample_ids)


def _read(
    source: SampleSource, extents: Extents, skipped: SkippedColumns | None
) -> tuple[Ids, NDArray[np.int64]]:
    config = source.config
    width = config.sequence_length + int(config.add_extra_token)
    file_of_row = file_of_rows(source, extents)
    ids, valid = fetch_ids(all_files(source), file_of_row, extents, width, config.storage)
    if skipped is not None:
        assert config.eod_id is not None
        skipped.overwrite(ids, config.eod_id)
    return ids, valid


def runs_of(source: SampleSource, extents: Extents, *, shift: int = 0) -> Runs:
    """Where the tokens of samples lie, `shift` columns further on: their labels one before."""
    rows = rows_of(extents)
    return Runs(
        file=file_of_rows(source, extents),
        start=extents.start,
        size=rows.size,
        sample=rows.sample,
        column=rows.column + shift,
    )
