"""How the epochs of datasets are cut into samples, blocks and runs: records for the kernels,
computed once from the token counts of files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from streammega.errors import ConfigError
from streammega.errors.cached_property import cached_property
from streammega.kernels.stream import DATASET, PART

Integers = NDArray[np.int64]
Records = NDArray[np.void]


# Not frozen: there are thousands, and a frozen one takes two to three times as long to make.
@dataclass(kw_only=True, slots=True)
class FilePart:
    """Consecutive tokens [start, start + tokens) of a file."""

    file: int
    start: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class StreamDataset:
    """One dataset of the stream.

    itemsize: bytes of a token. is_packed: its samples are bins, with no token after them. name: for
    messages.
    """

    parts: Sequence[FilePart]
    itemsize: int
    is_packed: bool = False
    name: str = field(default="", compare=False)

    @cached_property
    def tokens(self) -> int:
        """Tokens of all parts."""
        return sum(part.tokens for part in self.parts)


MIN_RUN_SAMPLES = 32
"""The fewest samples of a run of its own for each lane: the uses of samples differ by a 32nd at most."""


class EpochLayout(NamedTuple):
    """Records for kernels/stream.py. Parts too short for one sample are left out.

    datasets: DATASET [datasets]. parts: PART [parts], those of all datasets end to end.
    """

    datasets: Records
    parts: Records

    def of_dataset(self, place: int) -> EpochLayout:
        """The layout of one of its datasets alone."""
        dataset = self.datasets[place : place + 1].copy()
        first, end = int(dataset["first_part"][0]), int(dataset["end_part"][0])
        dataset["first_part"] = 0
        dataset["end_part"] = end - first
        return EpochLayout(dataset, self.parts[first:end])

    def joined(self, other: EpochLayout) -> EpochLayout:
        """The datasets of this layout, then those of another."""
        datasets = other.datasets.copy()
        datasets["first_part"] += len(self.parts)
        datasets["end_part"] += len(self.parts)
        return EpochLayout(
            np.concatenate((self.datasets, datasets)), np.concatenate((self.parts, other.parts))
        )

    def epochs_of_draws(self, draws: Integers, place: int) -> Integers:
        """The epoch of each lane's draw from a dataset; epochs and draws count from 0, without a
        remainder. draws: one of each lane. int64 [lanes].
        """
        lanes = int(self.datasets["lanes"][place])
        group = int(self.datasets["group"][place])
        size = int(self.datasets["size"][place])
        lane = np.arange(lanes)
        # As in the kernels: the first lanes have the longer runs.
        run_length = size if group > 1 else size // lanes + (lane < size % lanes)
        epochs: Integers = (draws * group + lane % group) // run_length
        return epochs

    def epochs_begun(self, draws: Integers, place: int) -> int:
        """How many epochs of a dataset have begun when each lane has made `draws`, int64 [lanes]."""
        epochs = self.epochs_of_draws(draws - 1, place)
        return int(np.where(draws > 0, epochs, -1).max()) + 1


def samples_of(tokens: int, sequence_length: int, extra: int) -> int:
    """Samples of a part in one epoch."""
    return max(0, (tokens - extra) // sequence_length)


def dataset_samples(dataset: StreamDataset, sequence_length: int, extra: int) -> int:
    """Samples of a dataset in one epoch."""
    return sum(samples_of(part.tokens, sequence_length, extra) for part in dataset.parts)


def epoch_layout(
    datasets: Sequence[StreamDataset],
    numbers: Integers,
    *,
    key: np.uint64,
    length: int,
    extra: int,
    lanes: int,
    shuffle_block_bytes: int,
) -> EpochLayout:
    """The layout of datasets in samples of `length` tokens and `extra` after them. Draws begin with
    epoch 0.

    Raises ConfigError if a dataset holds no sample. Cost: a few numpy operations on all parts at
    once: there may be many datasets of one part, and many parts of one dataset.
    """
    tokens = _column(datasets, "tokens")
    samples = np.maximum(tokens - extra, 0) // length
    kept = np.flatnonzero(samples)
    dataset_of_part = np.repeat(np.arange(len(datasets)), [len(item.parts) for item in datasets])
    num_parts = np.bincount(dataset_of_part[kept], minlength=len(datasets))
    ends_of_parts = np.cumsum(num_parts)
    ends_of_all = np.append(0, np.cumsum(samples[kept]))
    before_dataset = ends_of_all[np.append(0, ends_of_parts)]
    sizes = np.diff(before_dataset)
    if not sizes.all():
        number = int(np.argmin(sizes))
        longest = max((part.tokens for part in datasets[number].parts), default=0)
        name = datasets[number].name or f"dataset {number} of the blend"
        raise ConfigError(
            f"{name} holds no sample: its longest file has {longest} tokens, a "
            f"sample needs {length} + {extra}; lower sequence_length, or give it more data"
        )
    itemsizes = np.array([dataset.itemsize for dataset in datasets], np.int64)
    largest_blocks = np.maximum(shuffle_block_bytes // (length * itemsizes), 1)
    # A run for each lane, of at least one block. Runs differ by one sample and are drawn equally often:
    # where they would be short, all lanes share one, of single samples, which is a full shuffle.
    samples_of_run = sizes // lanes
    has_one_run = samples_of_run < MIN_RUN_SAMPLES
    rows = np.zeros(len(datasets), DATASET)
    rows["key"] = key
    rows["lanes"] = lanes
    rows["number"] = numbers
    rows["size"] = sizes
    rows["block"] = np.where(has_one_run, 1, np.minimum(largest_blocks, samples_of_run))
    rows["group"] = np.where(has_one_run, lanes, 1)
    rows["length"] = length
    rows["first_part"] = ends_of_parts - num_parts
    rows["end_part"] = ends_of_parts
    parts = np.zeros(len(kept), PART)
    parts["file"] = _column(datasets, "file")[kept]
    parts["start"] = _column(datasets, "start")[kept]
    parts["slack"] = (tokens - extra - samples * length)[kept]
    parts["end"] = ends_of_all[1:] - np.repeat(before_dataset[:-1], num_parts)
    parts["before"] = parts["end"] - samples[kept]
    return EpochLayout(rows, parts)


def _column(datasets: Sequence[StreamDataset], field: str) -> Integers:
    """A field of all parts, those of all datasets end to end."""
    value = attrgetter(field)
    return np.array([value(part) for dataset in datasets for part in dataset.parts], np.int64)
