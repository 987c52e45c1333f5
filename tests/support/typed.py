"""What tests take out of values that may be one of several things: which it is, is asserted."""

from __future__ import annotations

from typing import Any

import numpy as np

from streammega import DataConfig, GPTDataset, IndexedDataset


def first_prefix(config: DataConfig) -> str:
    """The prefix of a blend without weights, or the first of several."""
    assert isinstance(config.blend, list)
    prefix = config.blend[0]
    assert isinstance(prefix, str)
    return prefix


def map_style(dataset: Any) -> GPTDataset:
    """One split, of one prefix, of what build_datasets returns."""
    assert isinstance(dataset, GPTDataset)
    return dataset


def tokens(dataset: IndexedDataset, number: int) -> np.ndarray:
    """A sequence of a dataset without modes."""
    sequence = dataset[number]
    assert isinstance(sequence, np.ndarray)
    return sequence


def all_tokens(dataset: IndexedDataset) -> list[np.ndarray]:
    """Every sequence of a dataset without modes."""
    sequences = []
    for sequence in dataset[:]:
        assert isinstance(sequence, np.ndarray)
        sequences.append(sequence)
    return sequences
