"""Which dataset a lane draws from, by the weights of a blend; how often, in closed form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from streammega.kernels.stream import FRACTION_BITS, count_draws

Integers = NDArray[np.int64]


class BlendTree(NamedTuple):
    """What decides which dataset a lane draws from, as the kernels take it."""

    key: np.uint64
    """Of the order."""
    lanes: int
    segment: int
    """The number of the first segment in keys: those of the phases before have the smaller ones."""
    rows: Integers
    """[segments]: the first row of each segment of the blend schedule."""
    fractions: NDArray[np.uint64]
    """[segments, nodes]: of the draws at a node, how many go left, in 2**-44ths."""
    bases: Integers
    """[segments, lanes, datasets]: draws of a lane from a dataset before the segment, less its share
    of the remainder of former epochs.
    """


@dataclass(frozen=True, kw_only=True)
class LaneDraws:
    """The draws of lanes in one segment. key: of the order. segment: its number in keys. weights: of
    every dataset.
    """

    key: np.uint64
    lanes: int
    segment: int
    weights: Sequence[float]

    @cached_property
    def fractions(self) -> NDArray[np.uint64]:
        """How draws are shared out: see `tree_fractions`."""
        return tree_fractions(self.weights)

    def of_rows(self, rows: int) -> Integers:
        """What the first rows take from each dataset in each lane, [lanes, datasets]."""
        draws = np.zeros((self.lanes, len(self.weights)), np.int64)
        count_draws(
            rows, self.lanes, self.segment, self.fractions, len(self.weights), self.key, draws
        )
        return draws

    def tree(self, first: Integers) -> BlendTree:
        """The tree of lanes that had drawn `first` [lanes, datasets] before the segment."""
        return BlendTree(
            self.key,
            self.lanes,
            self.segment,
            np.zeros(1, np.int64),
            self.fractions[np.newaxis],
            first[np.newaxis],
        )


def tree_fractions(weights: Sequence[float]) -> NDArray[np.uint64]:
    """The fraction that goes left at each node of a balanced tree over the datasets, in 2**-44ths;
    uint64 [nodes].

    Node 1 is the root and covers all datasets; node n covers [low, high), its children 2n and 2n +
    1 the halves.
    """
    num_leaves = 1 << (max(1, len(weights)) - 1).bit_length()
    fractions = np.zeros(num_leaves + 1, np.uint64)
    largest = max(weights)
    # Integers: sums of them do not depend on their order. Divided first: a weight near the largest
    # float, times 2**80, is none.
    exact = [int(weight / largest * 2.0**80) for weight in weights]
    root = (1, 0, len(weights))
    nodes = [root]
    while nodes:
        node, low, high = nodes.pop()
        if high - low < 2:
            continue
        middle = (low + high) // 2
        left = sum(exact[low:middle])
        both = left + sum(exact[middle:high])
        if both:  # below a node of no weight nothing is ever drawn
            fractions[node] = ((left << FRACTION_BITS) + both // 2) // both  # rounded
        nodes.append((2 * node, low, middle))
        nodes.append((2 * node + 1, middle, high))
    return fractions
