"""SplitMix64, once: for kernels one value at a time, for NumPy a whole array."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""2**64 over the golden ratio, odd: what SplitMix64 steps by.

Numbers that follow each other lie far apart as its multiples.
"""
_FIRST_SHIFT = np.uint64(30)
_FIRST_FACTOR = np.uint64(0xBF58476D1CE4E5B9)
_SECOND_SHIFT = np.uint64(27)
_SECOND_FACTOR = np.uint64(0x94D049BB133111EB)
_LAST_SHIFT = np.uint64(31)
"""The constants of SplitMix64's finaliser."""


def mix(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A bijection of 64 bits, each of which changes half of the result's (the finaliser of
    SplitMix64); 0 stays 0.

    Orders, shuffles and hashes that are stored are made of it: its bits never change. The n-th
    number of SplitMix64 seeded with s is mix(s + n * GOLDEN). No place is written to, so that an
    array of the caller's stays what it is.
    """
    value = (value ^ (value >> _FIRST_SHIFT)) * _FIRST_FACTOR
    value = (value ^ (value >> _SECOND_SHIFT)) * _SECOND_FACTOR
    return value ^ (value >> _LAST_SHIFT)


mix_one: Any = numba.njit(inline="always")(mix)
"""`mix` of one uint64, for kernels: they take its code into theirs, so it is neither called nor
compiled by itself.
"""
