"""Which samples of the global stream a data-parallel rank takes, and which parts of them a
context-parallel rank.

A micro-step is one micro-batch on every rank: samples [consumed, consumed + micro_batch_size *
dp_size). Whatever the rank count, micro-batch size or accumulation, the micro-steps of a global
batch tile it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from streammega.config.validate import whole_number
from streammega.errors import ConfigError, StateError

Integers = NDArray[np.int64]


def check_batch_sizes(
    global_batch_size: int, micro_batch_size: int, dp_rank: int, dp_size: int
) -> None:
    """Raise ConfigError unless micro_batch_size * dp_size divides global_batch_size and the rank
    exists.
    """
    sizes = {
        "global_batch_size": global_batch_size,
        "micro_batch_size": micro_batch_size,
        "dp_size": dp_size,
    }
    for name, value in sizes.items():
        whole_number(name, value, 1)
    if not 0 <= dp_rank < dp_size:
        raise ConfigError(f"dp_rank {dp_rank} is not in [0, {dp_size})")
    if global_batch_size % (micro_batch_size * dp_size):
        raise ConfigError(
            f"global_batch_size {global_batch_size} is not a multiple of micro_batch_size "
            f"{micro_batch_size} x dp_size {dp_size}; change one of the three"
        )


def check_resume(offset: int, micro_batch_size: int, dp_size: int) -> None:
    """Raise StateError if these ranks cannot finish a global batch after its first `offset`
    samples.
    """
    if offset % (micro_batch_size * dp_size):
        raise StateError(
            f"the state stops {offset} samples into a global batch, which "
            f"micro_batch_size {micro_batch_size} x dp_size {dp_size} does not divide; resume with "
            "the former sizes, or from a state saved between global batches"
        )


def rank_samples(
    consumed: int | NDArray[np.int64],
    micro_batch_size: int,
    dp_rank: int,
    dp_size: int,
    *,
    contiguous: bool,
) -> NDArray[np.int64]:
    """Sample ids of one rank's micro-batch in the micro-step at `consumed`, int64 [...,
    micro_batch_size].

    `contiguous`: the rank takes its part of the run in one piece, as Megatron's sampler does (the
    Megatron order); else it takes all i with i % dp_size == dp_rank (ranks then own disjoint lanes
    of a stream).
    """
    start = np.asarray(consumed, np.int64)[..., None]
    if contiguous:
        return start + dp_rank * micro_batch_size + np.arange(micro_batch_size, dtype=np.int64)
    # The first sample from `start` on whose number leaves the remainder dp_rank.
    first = start + (dp_rank - start) % dp_size
    return first + dp_size * np.arange(micro_batch_size, dtype=np.int64)


def rank_of(
    sample: int, batch_start: int, micro_batch_size: int, dp_size: int, *, contiguous: bool
) -> int:
    """The data-parallel rank that reads a sample of the global batch from `batch_start` on: the
    inverse of `rank_samples`.
    """
    if not contiguous:
        return sample % dp_size
    within_micro_step = (sample - batch_start) % (micro_batch_size * dp_size)
    return within_micro_step // micro_batch_size


def zigzag_parts(cp_rank: int, cp_size: int) -> tuple[int, int]:
    """The two of 2 * cp_size equal parts of a sequence that a rank keeps, so that causal attention
    costs all ranks the same.
    """
    return cp_rank, 2 * cp_size - 1 - cp_rank


def zigzag_bounds(length: int, cp_rank: int, cp_size: int) -> list[tuple[int, int]]:
    """[start, stop) of the parts of a sequence that a rank keeps, in their order; a single rank
    keeps all of it.

    Raises ConfigError unless the length is a multiple of 2 * cp_size, and the rank exists.
    """
    if not 0 <= cp_rank < cp_size:
        raise ConfigError(f"cp_rank {cp_rank} is not in [0, {cp_size})")
    if cp_size == 1:
        return [(0, length)]
    if length % (2 * cp_size):
        raise ConfigError(
            f"sequence_length {length} is not a multiple of 2 x cp ({cp_size}); change one of them"
        )
    part = length // (2 * cp_size)
    bounds = []
    for number in zigzag_parts(cp_rank, cp_size):
        start = number * part
        bounds.append((start, start + part))
    return bounds
