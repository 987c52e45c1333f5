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
    # NumPy's sum is pairwise: added one after the other, some weights round differently.
    shares = array / np.sum(array)
    return [float(share) for share in shares]


def samples_asked(weights: Sequence[float], size: int, surplus: float) -> list[int]:
    """Samples to build of each dataset for a blend of `size`: ceil(ceil(size * w) * (1 + surplus)),
    w normalised.
    """
    asked = []
    for weight in weights:
        drawn = math.ceil(size * weight)
        # Rounded up twice, as Megatron does: one more sample is another order.
        asked.append(math.ceil(drawn * (1 + surplus)))
    return asked


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
    dataset_index, _ = indices
    taken = np.bincount(dataset_index, minlength=len(weights)).tolist()
    for number, (wanted, length) in enumerate(zip(taken, lengths, strict=True)):
        if wanted > length:
            raise ConfigError(
                f"the blend takes {wanted} samples of dataset {number}, which has {length}; raise "
                "surplus, ask for fewer samples, or give the dataset a lower weight"
            )
    return indices
