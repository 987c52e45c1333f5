"""NumPy's legacy `RandomState.shuffle`, bit for bit, in compiled code.

Cost: one Mersenne Twister word per element (about 1.3 with rejections), one random swap. The swap
targets do not depend on the data, so they are drawn a block ahead, without branches, and
prefetched.
"""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

from streammega.kernels.intrinsics import prefetch
from streammega.kernels.jit import kernel

# compiled with intrinsics.py 732f1ead

_STATE_WORDS = 624
"""Words of the Mersenne Twister's state, and of each of its outputs."""
_FAR_WORD = 397
"""Each word is made of itself, the next word, and the word so far after it."""
_UPPER = np.uint32(0x80000000)
_LOWER = np.uint32(0x7FFFFFFF)
_MATRIX = np.uint32(0x9908B0DF)
"""The constants of MT19937."""
_AHEAD = 4096
"""Targets drawn at a time: they stay in a core's own cache."""
_PREFETCH = 96
"""How many swaps ahead a target is prefetched."""
_LARGEST_WORD = 0xFFFFFFFF


class LegacyShuffler:
    """The generator of `numpy.random.RandomState(seed)`, for shuffles only.

    Successive calls to `shuffle` continue the stream, as they do on a RandomState. Seeds are [0,
    2**32).
    """

    def __init__(self, seed: int) -> None:
        _, key, position, _, _ = np.random.RandomState(seed).get_state(legacy=True)
        self._key: NDArray[np.uint32] = np.array(key, np.uint32)
        self._position = np.array([position], np.int64)

    def shuffle(self, values: NDArray[np.generic]) -> None:
        """Shuffle a one-dimensional contiguous array in place."""
        _shuffle(values, self._key, self._position)


@kernel
def _refill(key, words) -> None:
    """The next 624 words of the Mersenne Twister: the new state, and its outputs."""
    kept = _STATE_WORDS - _FAR_WORD
    for i in range(kept):
        _twist(key, i, i + 1, i + _FAR_WORD)
    for i in range(kept, _STATE_WORDS - 1):
        _twist(key, i, i + 1, i - kept)
    _twist(key, _STATE_WORDS - 1, 0, _FAR_WORD - 1)
    _temper(key, words)


@numba.njit(inline="always")
def _twist(key, i, following, far) -> None:
    """Replace word i of the state."""
    y = (key[i] & _UPPER) | (key[following] & _LOWER)
    key[i] = key[far] ^ (y >> np.uint32(1)) ^ (_MATRIX * (y & np.uint32(1)))


@kernel
def _temper(key, words) -> None:
    """The outputs of the state: its words, with their bits mixed."""
    for i in range(_STATE_WORDS):
        y = key[i]
        y ^= y >> np.uint32(11)
        y ^= (y << np.uint32(7)) & np.uint32(0x9D2C5680)
        y ^= (y << np.uint32(15)) & np.uint32(0xEFC60000)
        words[i] = y ^ (y >> np.uint32(18))


@kernel
def _shuffle(values, key, position) -> None:
    """Fisher-Yates from the end; element i swaps with a uniform draw from [0, i] by mask and
    rejection.
    """
    targets = np.empty(_AHEAD + _STATE_WORDS, np.uint32)
    words = np.empty(_STATE_WORDS, np.uint32)
    wide = np.empty(1, np.int64)
    _temper(key, words)
    i = np.int64(len(values) - 1)
    while i > _LARGEST_WORD:  # numpy draws two words for each of these
        _draw_wide(i, key, words, position, wide)
        kept = values[wide[0]]
        values[wide[0]] = values[i]
        values[i] = kept
        i -= 1
    while i >= 1:
        count = _draw(i, targets, key, words, position)
        for k in range(count):
            prefetch(values, np.int64(targets[min(k + _PREFETCH, count - 1)]))
            j = targets[k]
            kept = values[j]
            values[j] = values[i - k]
            values[i - k] = kept
        i -= count


@kernel
def _draw(i, targets, key, words, position):
    """Targets for elements i, i - 1, ... that share a mask; returns how many (at most about
    _AHEAD).
    """
    mask = np.uint32(i)
    for shift in (1, 2, 4, 8, 16):
        mask |= mask >> np.uint32(shift)
    # elements up to half the mask share a smaller one
    max_count = min(np.int64(_AHEAD), i - np.int64(mask >> np.uint32(1)))
    count = np.int64(0)
    while count < max_count:
        if position[0] == _STATE_WORDS:
            _refill(key, words)
            position[0] = 0
        first = position[0]
        stop = min(np.int64(_STATE_WORDS), first + max_count - count)
        for w in range(first, stop):  # without a branch: a rejected draw is overwritten by the next
            target = words[w] & mask
            targets[count] = target
            count += np.int64(np.int64(target) <= i - count)
        position[0] = stop
    return count


@kernel
def _draw_wide(i, key, words, position, out) -> None:
    """One target for an element past 2**32: two words, the first one high."""
    mask = np.uint64(i)
    for shift in (1, 2, 4, 8, 16, 32):
        mask |= mask >> np.uint64(shift)
    while True:
        word = np.uint64(0)
        for _ in range(2):
            if position[0] == _STATE_WORDS:
                _refill(key, words)
                position[0] = 0
            word = (word << np.uint64(32)) | np.uint64(words[position[0]])
            position[0] += 1
        if np.int64(word & mask) <= i:
            out[0] = np.int64(word & mask)
            return
