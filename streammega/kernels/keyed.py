"""Keyed random numbers and permutations: closed forms without a state. The stream order is made of
them.

Orders, shuffles and hashes that are stored depend on their bits: these never change.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from streammega.kernels.jit import kernel

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""2**64 over the golden ratio, odd: the step of SplitMix64.

Multiples of consecutive numbers are far apart.
"""
_FIRST_SHIFT = np.uint64(30)
_FIRST_FACTOR = np.uint64(0xBF58476D1CE4E5B9)
_SECOND_SHIFT = np.uint64(27)
_SECOND_FACTOR = np.uint64(0x94D049BB133111EB)
_LAST_SHIFT = np.uint64(31)
"""The constants of SplitMix64's finaliser."""


def mix(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A bijection of 64 bits: each bit changes half of the result's bits (the finaliser of
    SplitMix64). 0 stays 0.

    The n-th number of SplitMix64 with seed s is mix(s + n * GOLDEN). `value` is not written to.
    """
    value = (value ^ (value >> _FIRST_SHIFT)) * _FIRST_FACTOR
    value = (value ^ (value >> _SECOND_SHIFT)) * _SECOND_FACTOR
    return value ^ (value >> _LAST_SHIFT)


mix_one: Any = numba.njit(inline="always")(mix)
"""`mix` of one uint64, inlined into kernels."""

_TURNS = 6
"""Turns of a Feistel walk."""
_SHUFFLED = 32
"""Permutations of at most so many numbers are shuffles: a walk over so few is measurably uneven."""
_TURN_STEP = np.uint64(0xD1342543DE82EF95)
_TURN_FACTOR = np.uint64(0xBF58476D1CE4E5B9)
"""Odd multipliers: keys of turns that differ in many bits, and upper bits that depend on all."""
_ONE = np.uint64(1)
_WORD = np.uint64(32)


@kernel
def keyed(key, purpose, a, b):
    """A 64-bit key for (key, purpose, a, b)."""
    state = mix_one(np.uint64(key) + np.uint64(purpose) * GOLDEN)
    state = mix_one(state + np.uint64(a) * GOLDEN + _ONE)
    return mix_one(state + np.uint64(b) * GOLDEN + _ONE)


@numba.njit(inline="always")
def _round(key, value, turn):
    """The round function of the Feistel walk: 64 bits, whose upper half is used."""
    bits = (key + np.uint64(turn) * _TURN_STEP) ^ (np.uint64(value) * GOLDEN)
    bits ^= bits >> _WORD
    return bits * _TURN_FACTOR


@numba.njit(inline="always")
def bounded(bits, limit):
    """A number in [0, limit) of 64 random bits: of their upper half, or their remainder where the
    limit has more than 32 bits. Limits up to 2**62.
    """
    if limit <= 0xFFFFFFFF:
        return np.int64(((bits >> _WORD) * np.uint64(limit)) >> _WORD)
    return np.int64(bits % np.uint64(limit))


@numba.njit(inline="always")
def _swapped(value, i, key):
    """Where the i-th swap of a keyed shuffle takes a place."""
    j = bounded(mix_one(key + np.uint64(i)), i + 1)
    if value == i:
        return j
    if value == j:
        return i
    return value


@kernel
def permute(value, size, key):
    """The image of `value` under a keyed permutation of range(size): a Feistel walk on an almost
    square domain.

    The domain has `low_size * high_size` numbers, a few more than `size`: a walk that ends beyond
    `size` goes on from there. A few turns are not random enough on tiny domains: there the value is
    followed through the swaps of a shuffle.
    """
    key = np.uint64(key)
    if size <= _SHUFFLED:
        for i in range(size - 1, 0, -1):
            value = _swapped(value, i, key)
        return value
    low_size = np.int64(np.ceil(np.sqrt(np.float64(size))))
    high_size = (size + low_size - 1) // low_size
    while True:
        low_half = value % low_size
        high_half = value // low_size
        for turn in range(0, _TURNS, 2):
            low_half += bounded(_round(key, high_half, turn), low_size)
            low_half -= low_size if low_half >= low_size else 0
            high_half += bounded(_round(key, low_half, turn + 1), high_size)
            high_half -= high_size if high_half >= high_size else 0
        value = high_half * low_size + low_half
        if value < size:
            return value


@kernel
def permute_back(value, size, key):
    """The inverse of `permute`: the same turns or swaps in reverse."""
    key = np.uint64(key)
    if size <= _SHUFFLED:
        for i in range(1, size):
            value = _swapped(value, i, key)
        return value
    low_size = np.int64(np.ceil(np.sqrt(np.float64(size))))
    high_size = (size + low_size - 1) // low_size
    while True:
        low_half = value % low_size
        high_half = value // low_size
        for back in range(0, _TURNS, 2):
            turn = _TURNS - 2 - back
            high_half -= bounded(_round(key, low_half, turn + 1), high_size)
            high_half += high_size if high_half < 0 else 0
            low_half -= bounded(_round(key, high_half, turn), low_size)
            low_half += low_size if low_half < 0 else 0
        value = high_half * low_size + low_half
        if value < size:
            return value
