"""Megatron's blend of several GPT datasets."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.utils.data
from numpy.typing import NDArray

from streammega.config import MAX_DATASETS, DataConfig
from streammega.config.validate import plain
from streammega.dataset import cached_arrays
from streammega.dataset.local_cache import ArrayKind, corrupt_cache_error
from streammega.errors import ConfigError
from streammega.errors.cached_property import cached_property
from streammega.order import Extents
from streammega.order.epoch_layout import Records
from streammega.order.extents import merge_extents
from streammega.order.megatron import blend_indices, normalized
from streammega.order.stream_order import USAGE
from streammega.samples.fields import Batch
from streammega.samples.gather import read_fields
from streammega.samples.gpt import GPTDataset, order_dir, remove_loss, shared_folder
from streammega.samples.source import SegmentSource, Span

BLEND_NAMES = ("dataset_index", "dataset_sample_index")
"""Megatron's names of the arrays, and those of the cached files."""
OF_ONE_DATASET = ("dataset", "sequences", "num_samples")
"""Entries of a dataset's identity that a blend leaves out."""
KEY_DIGITS = 12
"""Digits of a dataset's key in the identity of a blend: states stay small."""


class BlendedDataset(SegmentSource, torch.utils.data.Dataset[Batch]):
    """Samples of several datasets in Megatron's order: sample k is sample dataset_sample_index[k]
    of dataset_index[k].

    `blended[k]` has the fields of a GPTDataset and "dataset_id", an int64 scalar.

    Args:
        datasets: of one config and split; a blend of blends is refused.
        weights: relative; with `size` None, the lengths of the datasets.
        size: samples of the blend; None: every sample of every dataset once.

    Raises ConfigError if the blend takes more of a dataset than it has, naming it and both numbers.
    """

    def __init__(
        self, datasets: Sequence[GPTDataset], weights: Sequence[float], size: int | None
    ) -> None:
        weights, size = plain(weights), plain(size)
        _check_blend(datasets, weights, size)
        self.datasets = list(datasets)
        self.size = size
        self.weights = list(weights) if size is None else normalized(weights)
        self.config: DataConfig = datasets[0].config
        self.split = datasets[0].split
        self.files = [dataset.files[0] for dataset in datasets]
        self.prefixes = [dataset.indexed.name for dataset in datasets]
        self.shares = normalized(self.weights)
        self.tokens_per_epoch = [dataset.shape.tokens_per_epoch for dataset in datasets]
        _ = self._indices  # now: raises for a blend that takes too much of a dataset
        _ = self.stored_columns  # now: raises where datasets differ

    def __len__(self) -> int:
        return len(self.dataset_index)

    def __getitem__(self, index: int | None) -> Batch:
        number = 0 if index is None else index
        if number < 0:
            number += len(self)
        if not 0 <= number < len(self):
            raise IndexError(f"sample {index} of {len(self)} in the {self.split} blend")
        dataset = self.dataset_index[number : number + 1].astype(np.int64)
        sample = self.dataset_sample_index[number : number + 1]
        self._check(dataset, sample)
        dataset_id = int(dataset[0])
        if self.excluded is None:
            fields = self.datasets[dataset_id][int(sample[0])]
        else:
            # documents are excluded by the samples of the blend
            batch = read_fields(self, np.array([number], np.int64))
            fields = {name: field[0] for name, field in batch.items()}
        if index is None:
            remove_loss(fields)
        fields["dataset_id"] = torch.tensor(dataset_id)
        return fields

    @property
    def dataset_index(self) -> NDArray[np.int16]:
        """Which dataset each sample comes from, int16 [samples]."""
        return self._indices[0]

    @property
    def dataset_sample_index(self) -> NDArray[np.int64]:
        """Which sample of that dataset it is, int64 [samples]."""
        return self._indices[1]

    @property
    def num_samples(self) -> int:
        """Samples of the blend."""
        return len(self)

    def locate(self, sample_ids: NDArray[np.int64]) -> Extents:
        """The token runs of samples, int64 [n], each in [0, len(self))."""
        dataset = np.asarray(self.dataset_index[sample_ids], np.int64)
        sample = np.asarray(self.dataset_sample_index[sample_ids])
        self._check(dataset, sample)
        parts = []
        for number in np.unique(dataset).tolist():
            of_dataset = np.flatnonzero(dataset == number)
            extents = self.datasets[number].locate(sample[of_dataset])
            numbers = np.full(len(extents.file), number, np.int32)
            parts.append((of_dataset, replace(extents, dataset=numbers)))
        return merge_extents(parts)

    def _check(self, dataset: NDArray[np.int64], sample: NDArray[np.int64]) -> None:
        """Raise CacheError if the cached indices name samples that do not exist: their files may be
        damaged.
        """
        if not len(dataset):
            return
        dataset_file, sample_file = self.index_files()
        # whatever came from a file is looked at before it is used as a place
        num_datasets = len(self.datasets)
        if dataset.min() < 0 or dataset.max() >= num_datasets:
            raise corrupt_cache_error(
                f"{dataset_file}: names a dataset that is not one of the {num_datasets}"
            )
        past_the_end = sample >= self._lengths[dataset]
        if sample.min() < 0 or past_the_end.any():
            raise corrupt_cache_error(f"{sample_file}: names a sample that its dataset has not")

    @cached_property
    def _lengths(self) -> NDArray[np.int64]:
        """Samples of each dataset."""
        return np.array([len(dataset) for dataset in self.datasets], np.int64)

    def identity(self, consumed: int | None = None) -> dict[str, Any]:
        """The scalars that define the order, and a digest and weight of each dataset."""
        first = self.datasets[0].order_identity()
        shared = {name: value for name, value in first.items() if name not in OF_ONE_DATASET}
        parts = [
            f"{dataset.identity_key(dataset.key)[:KEY_DIGITS]}*{weight:.8g}"
            for dataset, weight in zip(self.datasets, self.weights, strict=True)
        ]
        return shared | {
            "num_samples": len(self),
            "exhaustive": self.size is None,
            "datasets": parts,
        }

    def usage(self, spans: Sequence[Span]) -> Records:
        """Counted over the dataset index."""
        usage = np.zeros(len(self.datasets), USAGE)
        for start, stop in spans:
            drawn = self.dataset_index[start:stop]
            usage["samples"] += np.bincount(drawn, minlength=len(self.datasets))
        return usage

    def index_files(self) -> list[Path]:
        """The cached files of the two indices."""
        folder = order_dir(self.config)
        return [folder / f"{self._key}-{name}.npy" for name in BLEND_NAMES]

    @property
    def _key(self) -> str:
        """What the names of the cached files begin with."""
        description = json.dumps([self.weights, self.size, self._lengths.tolist()])
        digest = hashlib.blake2b(description.encode(), digest_size=16).hexdigest()
        return f"{digest}-BlendedDataset-{self.split}"

    @cached_property
    def _indices(self) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
        """dataset_index and dataset_sample_index: of the cache, or built now."""
        lengths = self._lengths.tolist()
        samples = sum(lengths) if self.size is None else self.size
        kinds: dict[str, ArrayKind] = {
            "dataset_index": ((np.int16,), (samples,)),
            "dataset_sample_index": ((np.int64,), (samples,)),
        }

        def build() -> dict[str, NDArray[Any]]:
            indices = blend_indices(self.weights, self.size, lengths)
            return dict(zip(BLEND_NAMES, indices, strict=True))

        arrays: dict[str, Any] = cached_arrays(
            order_dir(self.config), self._key, kinds, build, shared_folder(self.config)
        )
        return arrays["dataset_index"], arrays["dataset_sample_index"]

    def __getstate__(self) -> dict[str, Any]:
        """Without the indices: each process maps the cached files by itself."""
        return {name: value for name, value in self.__dict__.items() if name != "_indices"}


def _check_blend(
    datasets: Sequence[GPTDataset], weights: Sequence[float], size: int | None
) -> None:
    """Raise ConfigError for what makes no blend."""
    if not datasets or len(datasets) != len(weights):
        raise ConfigError(
            f"a blend needs as many weights as datasets, got {len(weights)} for {len(datasets)}"
        )
    if len(datasets) > MAX_DATASETS:
        raise ConfigError(f"the blend has {len(datasets)} datasets; there may be {MAX_DATASETS}")
    for dataset in datasets:
        if not isinstance(dataset, GPTDataset):
            raise ConfigError(
                f"a blend is made of GPT datasets, not of {type(dataset).__name__}: "
                "blends of blends have no order"
            )
    if size is not None:
        return
    lengths = [len(dataset) for dataset in datasets]
    if [int(weight) for weight in weights] != lengths:
        raise ConfigError(
            "a blend without a size takes every sample once: its weights are the lengths of its "
            "datasets"
        )
