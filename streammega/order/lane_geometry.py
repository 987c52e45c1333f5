"""The sizes of a stream: of each dataset its samples, blocks and runs, and of its parts where these
begin. Computed once, of the token counts of files alone; the kernels read them as arrays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from streammega.errors import ConfigError

Integers = NDArray[np.int64]


# Of thousands, each would take two to three times as long if it were frozen.
@dataclass(kw_only=True, slots=True)
class FilePart:
    """Consecutive tokens [start, start + tokens) of a file."""

    file: int
    start: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class StreamDataset:
    """One dataset of the stream: its parts in order, and the bytes of a token.

    is_packed: samples are the bins of its files, with no token after them.
    """

    parts: Sequence[FilePart]
    itemsize: int
    is_packed: bool = False


@dataclass(frozen=True, kw_only=True)
class StreamGeometry:
    """The sizes that the kernels read, of all datasets end to end; int64 each.

    Parts too short for one sample are left out.
    """

    lanes: int
    """Of the order."""
    sizes: Integers
    """[datasets]: samples in one epoch."""
    blocks: Integers
    """[datasets]: samples of a block."""
    groups: Integers
    """[datasets]: lanes that share a run."""
    first_parts: Integers
    """[datasets + 1]: of the parts of all datasets, the first of each."""
    files: Integers
    """[parts]: the file, within its dataset."""
    starts: Integers
    """[parts]: the token of the file at which it starts."""
    slacks: Integers
    """[parts]: tokens that no whole sample takes: how far an epoch may shift the others."""
    before: Integers
    """[parts]: samples of its dataset before it."""
    ends: Integers
    """[parts]: the same with its own."""

    @property
    def num_runs(self) -> Integers:
        """Runs of each dataset: as many as lanes where there are blocks enough, else a divisor;
        int64 [datasets].
        """
        runs: Integers = self.lanes // self.groups
        return runs

    def epochs_of_draws(self, draws: Integers, dataset: int) -> Integers:
        """The epoch of each lane's draw of that number from a dataset, since it began anew and
        without what former epochs had left; int64 [lanes].
        """
        group = int(self.groups[dataset])
        lane = np.arange(self.lanes)
        run_length = self._run_lengths(dataset)[lane // group]
        epochs: Integers = (draws * group + lane % group) // run_length
        return epochs

    def _run_lengths(self, dataset: int) -> Integers:
        """Samples of each run of a dataset, int64 [runs]: as `run_bounds` of the kernels, the lanes
        of a run have its samples in equal shares.
        """
        size = int(self.sizes[dataset])
        first_lanes = np.arange(0, self.lanes + 1, int(self.groups[dataset]))
        starts = first_lanes * (size // self.lanes) + np.minimum(size % self.lanes, first_lanes)
        lengths: Integers = np.diff(starts)
        return lengths


def samples_of(tokens: int, sequence_length: int, extra: int) -> int:
    """Samples that a part of so many tokens has in every epoch."""
    return max(0, (tokens - extra) // sequence_length)


def dataset_samples(dataset: StreamDataset, sequence_length: int, extra: int) -> int:
    """Samples of a dataset in one epoch."""
    return sum(samples_of(part.tokens, sequence_length, extra) for part in dataset.parts)


def geometry_of(
    datasets: Sequence[StreamDataset], *, length: int, extra: int, lanes: int, block_bytes: int
) -> StreamGeometry:
    """The sizes of datasets in samples of `length` tokens and `extra` behind them, dealt to lanes.

    Raises ConfigError if one of them holds no sample. Cost: a few passes over all parts at once,
    for there may be many datasets of one part, and many parts of one dataset.
    """
    tokens = _of_parts(datasets, "tokens")
    samples = np.maximum(tokens - extra, 0) // length
    held = np.flatnonzero(samples)
    dataset_of_part = np.repeat(np.arange(len(datasets)), [len(item.parts) for item in datasets])
    num_parts = np.bincount(dataset_of_part[held], minlength=len(datasets))
    first_parts = np.append(0, np.cumsum(num_parts))
    ends_of_all = np.append(0, np.cumsum(samples[held]))
    before_dataset = ends_of_all[first_parts]
    sizes = np.diff(before_dataset)
    if not sizes.all():
        raise _no_sample(int(np.argmin(sizes)), datasets, length, extra)
    ends = ends_of_all[1:] - np.repeat(before_dataset[:-1], num_parts)
    blocks = [max(1, block_bytes // (length * dataset.itemsize)) for dataset in datasets]
    return StreamGeometry(
        lanes=lanes,
        sizes=sizes,
        blocks=np.array(blocks, np.int64),
        groups=_groups(sizes, blocks, lanes),
        first_parts=first_parts,
        files=_of_parts(datasets, "file")[held],
        starts=_of_parts(datasets, "start")[held],
        slacks=(tokens - extra - samples * length)[held],
        before=ends - samples[held],
        ends=ends,
    )


def _of_parts(datasets: Sequence[StreamDataset], field: str) -> Integers:
    """A field of all parts, those of all datasets end to end."""
    value = attrgetter(field)
    return np.array([value(part) for dataset in datasets for part in dataset.parts], np.int64)


def _no_sample(
    number: int, datasets: Sequence[StreamDataset], length: int, extra: int
) -> ConfigError:
    longest = max((part.tokens for part in datasets[number].parts), default=0)
    return ConfigError(
        f"dataset {number} of the blend holds no sample: its longest file has {longest} tokens, a "
        f"sample needs {length} + {extra}; lower sequence_length, or give it more data"
    )


def _groups(sizes: Integers, blocks: Sequence[int], lanes: int) -> Integers:
    """Lanes that share a run of each dataset, int64 [datasets]."""
    groups = []
    for size, block in zip(sizes.tolist(), blocks, strict=True):
        num_blocks = -(-size // block)
        groups.append(lanes // _num_runs(size, num_blocks, lanes))
    return np.array(groups, np.int64)


def _num_runs(size: int, blocks: int, lanes: int) -> int:
    """As many runs as lanes, or the largest divisor of the lanes that leaves every run a block; one
    when samples are few.
    """
    if size < lanes:
        return 1
    return max(runs for runs in _divisors(lanes) if runs <= max(1, blocks))


def _divisors(number: int) -> list[int]:
    """All of them, in no order; a square's root twice."""
    divisors = []
    for small in range(1, math.isqrt(number) + 1):
        if number % small == 0:
            divisors.append(small)
            divisors.append(number // small)
    return divisors
