"""Megatron's blend of several datasets: how many samples are asked of each, and which sample comes
from where.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from streammega.errors import ConfigError
from streammega.kernels.blending import blend_exhaustive, blend_weighted

BlendIndices = tuple[NDArray[np.int16], NDArray[np.int64]]


def normalized(weights: Sequence[float]) -> list[float]:
    """Weights divided by their NumPy sum, as Megatron does (the rounding is part of the order)."""
    array = np.array(weights, np.float64)
    return [float(weight) for weight in array / np.sum(array)]


def samples_asked(weights: Sequence[float], size: int, surplus: float) -> list[int]:
    """Samples to build of each dataset for a blend of `size`: ceil(ceil(size * w) * (1 + surplus)),
    w normalised.
    """
    return [math.ceil(math.ceil(size * weight) * (1 + surplus)) for weight in weights]


def blend_indices(
    weights: Sequence[float], size: int | None, lengths: Sequence[int]
) -> BlendIndices:
    """(dataset_index int16, dataset_sample_index int64) of a blend.

    `weights` with a `size`: as `normalized` gives them (once more would round again). Without:
    sizes of the datasets, all of whose samples are taken. Raises ConfigError when the blend takes
    more of a dataset than its length.
    """
    if size is None:
        indices = blend_exhaustive(np.array(weights, np.int64))
    else:
        indices = blend_weighted(np.array(weights, np.float64), size)
    taken = np.bincount(indices[0], minlength=len(weights))
    for number, (wanted, has) in enumerate(zip(taken.tolist(), lengths, strict=True)):
        if wanted > has:
            raise ConfigError(
                f"the blend takes {wanted} samples of dataset {number}, which has {has}; raise surplus, ask for "
                f"fewer samples, or give the dataset a lower weight"
            )
    return indices
