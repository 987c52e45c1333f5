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
from streammega.samples.fields import Batch, fields_of_ids
from streammega.samples.packed import are_packed
from streammega.samples.read import Ids, fetch_ids
from streammega.samples.rows import rows_of
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
    return _read(source, source.locate(sample_ids))


def sample_fields(
    source: SampleSource, sample_ids: NDArray[np.int64], *, bounds: bool = False
) -> Batch:
    """The fields of samples, as `batch_fields` makes them, with no loss on what the modes of their
    datasets leave out; with inter_document_masking also those that it makes.
    """
    config = source.config
    extents = source.locate(sample_ids)
    ids, valid = _read(source, extents)
    batch = fields_of_ids(ids, valid, config, bounds=bounds)
    files = all_files(source)
    if config.inter_document_masking:
        size = extents.stop - extents.start
        packed = are_packed(files)
        batch |= sequence_fields(extents.row_splits, size, config, new_memory, packed=packed)
    if config.dataset_ids:
        batch["dataset_id"] = torch.from_numpy(dataset_of_samples(extents))
    if has_modes(files):
        loss_mask = batch["loss_mask"].numpy()  # the tensor's memory, written in place
        clear_by_modes(files, _runs_of_labels(source, extents), loss_mask)
    return batch


def all_files(source: SampleSource) -> list[TokenFile]:
    """The files of all datasets, end to end."""
    return [file for files in source.files for file in files]


def dataset_of_samples(extents: Extents) -> NDArray[np.int64]:
    """Which dataset each sample is of, int64 [samples]: that of its first extent, for all are of
    one.
    """
    return extents.dataset[extents.row_splits[:-1]].astype(np.int64)


def file_of_rows(source: SampleSource, extents: Extents) -> NDArray[np.int64]:
    """The place among all files of the one in which each row lies."""
    files_of_dataset = [len(files) for files in source.files]
    first_file = np.cumsum([0, *files_of_dataset])
    return first_file[extents.dataset].astype(np.int64) + extents.file


def _read(source: SampleSource, extents: Extents) -> tuple[Ids, NDArray[np.int64]]:
    config = source.config
    width = config.sequence_length + int(config.add_extra_token)
    file_of_row = file_of_rows(source, extents)
    return fetch_ids(all_files(source), file_of_row, extents, width, config.storage)


def _runs_of_labels(source: SampleSource, extents: Extents) -> Runs:
    """Where the labels of samples lie: each one column before its token."""
    rows = rows_of(extents)
    return Runs(
        file=file_of_rows(source, extents),
        start=extents.start,
        size=rows.size,
        sample=rows.sample,
        column=rows.column - 1,
    )
