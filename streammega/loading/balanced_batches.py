"""The samples of global batches, dealt out so that they cost all ranks the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streammega.order.balance import balanced_places
from streammega.samples.attention_costs import attention_costs
from streammega.samples.phases import source_at
from streammega.samples.source import SampleSource

Integers = NDArray[np.int64]
KEPT_BATCHES = 8
"""Global batches that are remembered: plans go over them in their order, and the caller asks again
for the one that it is in.
"""


@dataclass(frozen=True, kw_only=True)
class BalancedBatches:
    """Which samples every micro-batch of a global batch has: a pure function of their numbers and
    of the lengths of documents.
    """

    samples: SampleSource
    micro_batch_size: int
    dp_size: int

    def sample_ids(self, first: int, size: int) -> Integers:
        """Global sample ids of the batch [first, first + size), int64 [micro-steps, dp_size,
        micro_batch_size].
        """
        return self._kept(first, size)

    @cached_property
    def _kept(self) -> Callable[[int, int], Integers]:
        # of a function, not of a method: what is kept would hold its owner, and all open files
        deal = partial(_dealt, self.samples, self.micro_batch_size, self.dp_size)
        return lru_cache(KEPT_BATCHES)(deal)

    def __getstate__(self) -> dict[str, Any]:
        """Without what is remembered: each process finds it out by itself."""
        return {name: value for name, value in self.__dict__.items() if name != "_kept"}


def _dealt(
    samples: SampleSource, micro_batch_size: int, dp_size: int, first: int, size: int
) -> Integers:
    """`BalancedBatches.sample_ids`, worked out."""
    sample_ids = np.arange(first, first + size, dtype=np.int64)
    costs = attention_costs(source_at(samples, first), sample_ids)
    return first + balanced_places(costs, micro_batch_size, dp_size)
