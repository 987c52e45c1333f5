"""The one SplitMix64: its published numbers, for arrays and inside of kernels, and what is made of
it.
"""

from __future__ import annotations

import numba
import numpy as np

from streammega.convert.write.document_order import shuffle_keys
from streammega.kernels.keyed import GOLDEN, mix, mix_one

OF_SEED_0 = [
    0xE220A8397B1DCDAF,
    0x6E789E6AA1B965F4,
    0x06C45D188009454F,
    0xF88BB8A8724C81EC,
    0x1B39896A51A8749B,
]
"""The first five numbers of SplitMix64 seeded with 0, as java.util.SplittableRandom gives them."""


@numba.njit
def first_numbers(count):  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    numbers = np.empty(count, np.uint64)
    for n in range(count):
        numbers[n] = mix_one(np.uint64(n + 1) * GOLDEN)
    return numbers


def test_it_is_splitmix64_for_arrays_and_in_kernels() -> None:
    states = np.arange(1, 6, dtype=np.uint64) * GOLDEN
    before = states.copy()
    assert mix(states).tolist() == OF_SEED_0
    assert np.array_equal(states, before), "the caller's array stays what it is"
    assert first_numbers(5).tolist() == OF_SEED_0


def test_the_keys_by_which_convert_shuffles_documents_are_pinned() -> None:
    assert int(shuffle_keys(5, 1, np.arange(3))[2]) == 0x4237A47555758E0F
