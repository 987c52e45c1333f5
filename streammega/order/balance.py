"""Which rank takes which samples of a global batch, where they do not all cost the same.

With documents apart, attention costs a sample the sum of its documents' squared lengths, and the
slowest rank sets the pace. The samples of a global batch stay what they are; they are sorted by
cost, and each micro-step takes the next of them, so that what ranks do at the same time costs about
the same. Which samples a micro-step has does not depend on how many ranks share it, so that other
ranks can go on within a global batch.

How even it is, of costs c and their mean over ranks: the micro-batches of a micro-step differ by at
most what its samples do; the dearest ones of all micro-steps add up to at most max(c) - min(c) more
than the mean; and what ranks have in all differs by at most as much. With one sample in a
micro-batch no other order of micro-steps is faster.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from streammega.kernels.balance import deal

Integers = NDArray[np.int64]


def balanced_places(costs: Integers, micro_batch_size: int, dp_size: int) -> Integers:
    """The samples of a global batch as they are read, by their places in it: int64 [micro-steps,
    dp_size, micro_batch_size].

    costs: of each sample, int64 [samples], a multiple of micro_batch_size * dp_size. Equal costs
    are taken in the order of their samples.
    """
    by_cost = np.argsort(-costs, kind="stable")
    micro_steps = len(costs) // (micro_batch_size * dp_size)
    places = np.empty((micro_steps, dp_size, micro_batch_size), np.int64)
    deal(costs, by_cost, dp_size, micro_batch_size, places)
    return places


def pace(costs: Integers) -> int:
    """What a global batch takes where ranks wait for each other in every micro-step: the sum of
    what is dearest in each.

    costs: int64 [micro-steps, dp_size, micro_batch_size].
    """
    return int(costs.sum(axis=2).max(axis=1).sum())


def longest_rank(costs: Integers) -> int:
    """What a global batch takes where ranks wait for each other at its end alone. costs: as of
    `pace`.
    """
    return int(costs.sum(axis=(0, 2)).max())
