"""Where samples are stored: what `locate` of every order returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class Extents:
    """Runs of consecutive tokens, one row a run; a sample is its rows end to end.

    Sample i of the call owns rows [row_splits[i], row_splits[i + 1]).

    row_splits int64 [samples + 1]; dataset int32 [rows]; file int32 [rows], within the dataset;
    start and stop int64 [rows], in tokens from the beginning of the file.
    """

    row_splits: NDArray[np.int64]
    dataset: NDArray[np.int32]
    file: NDArray[np.int32]
    start: NDArray[np.int64]
    stop: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.row_splits) - 1

    @property
    def dataset_of_sample(self) -> NDArray[np.int64]:
        """The dataset of each sample, int64 [samples], which is the same in all its rows; any for a sample
        of a damaged index that has no row.
        """
        return np.append(self.dataset, 0)[self.row_splits[:-1]].astype(np.int64)


def without_tokens(num_samples: int) -> Extents:
    """Samples that have no row."""
    nowhere = np.empty(0, np.int64)
    numbers = np.empty(0, np.int32)
    splits = np.zeros(num_samples + 1, np.int64)
    return Extents(row_splits=splits, dataset=numbers, file=numbers, start=nowhere, stop=nowhere)


def cut_extents(extents: Extents, bounds: Sequence[tuple[int, int]]) -> Extents:
    """Parts of samples, as samples of their own: for each sample and each of `bounds` its tokens
    [start, stop).

    A part is shorter, or empty, where its sample ends before the bound. Cost: a few numpy
    operations on the rows for each bound.
    """
    sizes = extents.stop - extents.start
    num_rows = np.diff(extents.row_splits)
    sample_of_row = np.repeat(np.arange(len(extents)), num_rows)
    tokens_before = np.cumsum(sizes) - sizes
    first_row_of_sample = extents.row_splits[:-1]
    first_row = first_row_of_sample[sample_of_row]
    sample_start = tokens_before - tokens_before[first_row]  # where in its sample a row begins
    # for one bound after the other; sorted by part at the end
    rows = []
    parts = []
    starts = []
    stops = []
    for number, (low, high) in enumerate(bounds):
        begin = np.maximum(low - sample_start, 0)
        end = np.minimum(high - sample_start, sizes)
        taken = np.flatnonzero(end > begin)
        row_start = extents.start[taken]
        rows.append(taken)
        parts.append(sample_of_row[taken] * len(bounds) + number)
        starts.append(row_start + begin[taken])
        stops.append(row_start + end[taken])
    part = np.concatenate(parts)
    # Stable: the rows of a part stay in the order in which their tokens follow each other.
    by_part = np.argsort(part, kind="stable")
    row = np.concatenate(rows)[by_part]
    part_numbers = np.arange(len(extents) * len(bounds) + 1)
    row_splits = np.searchsorted(part[by_part], part_numbers)
    return Extents(
        row_splits=row_splits.astype(np.int64),
        dataset=extents.dataset[row],
        file=extents.file[row],
        start=np.concatenate(starts)[by_part],
        stop=np.concatenate(stops)[by_part],
    )


def merge_extents(parts: Sequence[tuple[NDArray[np.int64], Extents]]) -> Extents:
    """One Extents from several. parts: (places of the samples among all, int64; their extents)."""
    num_samples = sum(len(samples) for samples, _ in parts)
    rows_of_sample = np.zeros(num_samples, np.int64)
    for samples, extents in parts:
        rows_of_sample[samples] = np.diff(extents.row_splits)
    row_splits = np.zeros(num_samples + 1, np.int64)
    np.cumsum(rows_of_sample, out=row_splits[1:])
    rows = row_splits[-1]
    dataset = np.empty(rows, np.int32)
    file = np.empty(rows, np.int32)
    start = np.empty(rows, np.int64)
    stop = np.empty(rows, np.int64)
    for samples, extents in parts:
        # by how much the rows of each of its samples move
        shift = row_splits[samples] - extents.row_splits[:-1]
        shift_of_row = np.repeat(shift, rows_of_sample[samples])
        place = shift_of_row + np.arange(len(shift_of_row))
        dataset[place] = extents.dataset
        file[place] = extents.file
        start[place] = extents.start
        stop[place] = extents.stop
    return Extents(row_splits=row_splits, dataset=dataset, file=file, start=start, stop=stop)
