"""Keys, and what is drawn by them: numbers below a limit, and permutations.

Cost: a key is three rounds of a mixer; a place of a permutation, a short Feistel walk.
"""

from __future__ import annotations

import numba
import numpy as np

from streammega.kernels.jit import kernel
from streammega.kernels.mix import GOLDEN, mix_one

# What is below makes orders that checkpoints count in: no constant here ever changes.

_TURNS = 6
"""Turns of a Feistel walk."""
_SHUFFLED = 32
"""Permutations of up to so many are followed shuffles: a walk over so few is measurably uneven."""
_TURN_STEP = np.uint64(0xD1342543DE82EF95)
_TURN_FACTOR = np.uint64(0xBF58476D1CE4E5B9)
"""Odd multipliers: keys of turns that differ in many bits, and upper bits that depend on all."""
_ONE = np.uint64(1)
_WORD = np.uint64(32)

# What a keyed draw is for, so that no two uses share a stream.
BLOCKS = 1
PIECES = 2
ROTATIONS = 3
PHASES = 4
NODES = 5


@kernel
def keyed(key, purpose, a, b):
    """A 64-bit key for (key, purpose, a, b)."""
    state = mix_one(np.uint64(key) + np.uint64(purpose) * GOLDEN)
    state = mix_one(state + np.uint64(a) * GOLDEN + _ONE)
    return mix_one(state + np.uint64(b) * GOLDEN + _ONE)


@numba.njit(inline="always")
def _round(key, value, turn):
    """The round function of the Feistel walk: 64 bits of which the upper half is used."""
    bits = (key + np.uint64(turn) * _TURN_STEP) ^ (np.uint64(value) * GOLDEN)
    bits ^= bits >> _WORD
    return bits * _TURN_FACTOR


@numba.njit(inline="always")
def below(bits, limit):
    """64 random bits scaled to [0, limit), for limits up to 2**62, by their upper halves."""
    if limit <= 0xFFFFFFFF:
        return np.int64(((bits >> _WORD) * np.uint64(limit)) >> _WORD)
    return np.int64(bits % np.uint64(limit))


@numba.njit(inline="always")
def _swapped(value, i, key):
    """Where the i-th swap of a keyed shuffle takes a place."""
    j = below(mix_one(key + np.uint64(i)), i + 1)
    if value == i:
        return j
    if value == j:
        return i
    return value


@kernel
def permute(value, size, key):
    """The image of `value` under a keyed permutation of range(size): a Feistel walk on an almost
    square domain.

    The domain has `right_size * left_size` numbers, a few more than `size`: a walk that ends beyond
    goes on from there, as often as need be. Few turns are not random enough on tiny domains: there
    the place is followed through the swaps of a shuffle.
    """
    key = np.uint64(key)
    if size <= _SHUFFLED:
        for i in range(size - 1, 0, -1):
            value = _swapped(value, i, key)
        return value
    left_size = np.int64(np.ceil(np.sqrt(np.float64(size))))
    right_size = (size + left_size - 1) // left_size
    while True:
        left = value % left_size
        right = value // left_size
        for turn in range(0, _TURNS, 2):
            left += below(_round(key, right, turn), left_size)
            left -= left_size if left >= left_size else 0
            right += below(_round(key, left, turn + 1), right_size)
            right -= right_size if right >= right_size else 0
        value = right * left_size + left
        if value < size:
            return value


@kernel
def permute_back(value, size, key):
    """The inverse of `permute`: the same turns, or swaps, backwards."""
    key = np.uint64(key)
    if size <= _SHUFFLED:
        for i in range(1, size):
            value = _swapped(value, i, key)
        return value
    left_size = np.int64(np.ceil(np.sqrt(np.float64(size))))
    right_size = (size + left_size - 1) // left_size
    while True:
        left = value % left_size
        right = value // left_size
        for back in range(0, _TURNS, 2):
            turn = _TURNS - 2 - back
            right -= below(_round(key, left, turn + 1), right_size)
            right += right_size if right < 0 else 0
            left -= below(_round(key, right, turn), left_size)
            left += left_size if left < 0 else 0
        value = right * left_size + left
        if value < size:
            return value
