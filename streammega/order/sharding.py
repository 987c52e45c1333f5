"""Which samples of the global stream a data-parallel rank takes: the one place that knows this arithmetic.

A micro-step is one micro-batch on every rank: samples [consumed, consumed + micro_batch_size * dp_size).
Whatever the rank count, micro-batch size or accumulation, the micro-steps of a global batch tile it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from streammega.errors import ConfigError, StateError


def check_batch_sizes(global_batch_size: int, micro_batch_size: int, dp_rank: int, dp_size: int) -> None:
    """Raise ConfigError unless micro_batch_size * dp_size divides global_batch_size and the rank exists."""
    for name, value in (
        ("global_batch_size", global_batch_size),
        ("micro_batch_size", micro_batch_size),
        ("dp_size", dp_size),
    ):
        if value < 1:
            raise ConfigError(f"{name} is {value}; it must be at least 1")
    if not 0 <= dp_rank < dp_size:
        raise ConfigError(f"dp_rank {dp_rank} is not in [0, {dp_size})")
    if global_batch_size % (micro_batch_size * dp_size):
        raise ConfigError(
            f"global_batch_size {global_batch_size} is not a multiple of micro_batch_size {micro_batch_size} x dp_size "
            f"{dp_size}; change one of the three"
        )


def check_resume(offset: int, micro_batch_size: int, dp_size: int) -> None:
    """Raise StateError if a global batch of which `offset` samples are consumed cannot be finished by these ranks."""
    if offset % (micro_batch_size * dp_size):
        raise StateError(
            f"the state stops {offset} samples into a global batch, which "
            f"micro_batch_size {micro_batch_size} x dp_size {dp_size} does not divide; resume with the former sizes, or from a "
            f"state saved between global batches"
        )


def rank_samples(
    consumed: int | NDArray[np.int64], micro_batch_size: int, dp_rank: int, dp_size: int, *, contiguous: bool
) -> NDArray[np.int64]:
    """Sample ids of one rank's micro-batch in the micro-step at `consumed`, int64 [..., micro_batch_size].

    `contiguous`: the rank takes its part of the run in one piece, as Megatron's sampler does (the Megatron
    order); else it takes all i with i % dp_size == dp_rank (ranks then own disjoint lanes of a stream).
    """
    start = np.asarray(consumed, np.int64)[..., None]
    if contiguous:
        return start + dp_rank * micro_batch_size + np.arange(micro_batch_size, dtype=np.int64)
    first = start + (dp_rank - start) % dp_size
    return first + dp_size * np.arange(micro_batch_size, dtype=np.int64)
