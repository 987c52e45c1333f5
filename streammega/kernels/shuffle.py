"""NumPy's legacy `RandomState.shuffle`, bit for bit, in compiled code.

Cost: one Mersenne Twister word per element (about 1.3 with rejections), one random swap. The swap targets do
not depend on the data, so they are drawn a block ahead; the swaps of a block then have nothing to wait for but
memory, and the processor overlaps their misses.
"""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

_STATE_WORDS = 624
_AHEAD = 2048


class LegacyShuffler:
    """The generator of `numpy.random.RandomState(seed)`, for shuffles only.

    Successive calls to `shuffle` continue the stream, as they do on a RandomState. Seeds are [0, 2**32).
    """

    def __init__(self, seed: int) -> None:
        _, key, position, _, _ = np.random.RandomState(seed).get_state(legacy=True)
        self._key: NDArray[np.uint32] = np.array(key, np.uint32)
        self._position = np.array([position], np.int64)

    def shuffle(self, values: NDArray[np.generic]) -> None:
        """Shuffle a one-dimensional contiguous array in place."""
        _shuffle(values, self._key, self._position)


@numba.njit(cache=True, nogil=True)
def _refill(key: NDArray[np.uint32]) -> None:  # pragma: no cover - compiled
    """The next 624 words of the Mersenne Twister's state."""
    upper, lower, matrix = np.uint32(0x80000000), np.uint32(0x7FFFFFFF), np.uint32(0x9908B0DF)
    for i in range(227):
        y = (key[i] & upper) | (key[i + 1] & lower)
        key[i] = key[i + 397] ^ (y >> np.uint32(1)) ^ (matrix * (y & np.uint32(1)))
    for i in range(227, 623):
        y = (key[i] & upper) | (key[i + 1] & lower)
        key[i] = key[i - 227] ^ (y >> np.uint32(1)) ^ (matrix * (y & np.uint32(1)))
    y = (key[623] & upper) | (key[0] & lower)
    key[623] = key[396] ^ (y >> np.uint32(1)) ^ (matrix * (y & np.uint32(1)))


@numba.njit(cache=True, nogil=True, inline="always")
def _tempered(y: np.uint32) -> np.uint32:  # pragma: no cover - compiled
    y ^= y >> np.uint32(11)
    y ^= (y << np.uint32(7)) & np.uint32(0x9D2C5680)
    y ^= (y << np.uint32(15)) & np.uint32(0xEFC60000)
    return np.uint32(y ^ (y >> np.uint32(18)))


@numba.njit(cache=True, nogil=True)
def _next_word(key: NDArray[np.uint32], position: NDArray[np.int64]) -> np.uint32:  # pragma: no cover - compiled
    if position[0] == _STATE_WORDS:
        _refill(key)
        position[0] = 0
    word = _tempered(key[position[0]])
    position[0] += 1
    return word


@numba.njit(cache=True, nogil=True)
def _shuffle(values: NDArray[np.generic], key: NDArray[np.uint32], position: NDArray[np.int64]) -> None:  # pragma: no cover
    """Fisher-Yates from the end; element i swaps with a uniform draw from [0, i] by mask and rejection."""
    targets = np.empty(_AHEAD, np.int64)
    i = len(values) - 1
    while i >= 1:
        count = min(i, _AHEAD)
        for k in range(count):
            targets[k] = _draw(i - k, key, position)
        for k in range(count):
            j = targets[k]
            kept = values[j]
            values[j] = values[i - k]
            values[i - k] = kept
        i -= count


@numba.njit(cache=True, nogil=True)
def _draw(limit: int, key: NDArray[np.uint32], position: NDArray[np.int64]) -> int:  # pragma: no cover - compiled
    """Uniform in [0, limit]: words masked to the bits of `limit`, until one is not above it."""
    mask = np.uint64(limit)
    for shift in (1, 2, 4, 8, 16, 32):
        mask |= mask >> np.uint64(shift)
    while True:
        word = np.uint64(_next_word(key, position))
        if limit > 0xFFFFFFFF:
            word = (word << np.uint64(32)) | np.uint64(_next_word(key, position))
        value = np.int64(word & mask)
        if value <= limit:
            return value  # type: ignore[return-value]
