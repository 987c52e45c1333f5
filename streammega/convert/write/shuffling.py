"""The shuffle of documents: each has a key, and they are sorted by it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from streammega.convert.documents import Tokens, bounds_of
from streammega.errors import ConvertError
from streammega.kernels.mix import GOLDEN, mix
from streammega.kernels.plan import copy_bytes
from streammega.storage.store import address_of

_NOTHING = np.empty(0, np.uint8)


def shuffle_keys(seed: int, unit: int, numbers: NDArray[np.int64]) -> NDArray[np.uint64]:
    """A keyed hash of each document, by which documents are sorted: SplitMix64 rounds over (seed,
    unit, document).
    """
    units = np.full(len(numbers), unit, np.uint64)
    with np.errstate(over="ignore"):
        state = np.full(len(numbers), seed, np.uint64)
        for word in (units, numbers.astype(np.uint64)):
            state = mix(state + GOLDEN + word)
    return state


def permuted(batch: Tokens, order: NDArray[np.int64]) -> Tokens:
    """The documents in another order."""
    tokens = np.ascontiguousarray(batch.tokens)
    sizes = batch.document_tokens * tokens.itemsize
    bounds = bounds_of(sizes)
    total = int(bounds[-1])
    # Addresses go to a kernel, which looks no further.
    if total != tokens.nbytes or len(order) != len(sizes):
        raise ConvertError(f"documents of {total} bytes are to be cut out of {tokens.nbytes}")
    starts = bounds[:-1]
    new_sizes = sizes[order]
    new_starts = bounds_of(new_sizes)[:-1]
    new_tokens = np.empty_like(tokens)
    source = address_of(tokens.view(np.uint8))
    target = address_of(new_tokens.view(np.uint8))
    copy_bytes(_NOTHING, source + starts[order], new_sizes, target + new_starts)
    num_sequences = batch.documents[order]
    first_sequences = bounds_of(batch.documents)[:-1]
    sequences = ragged(first_sequences[order], num_sequences)
    return Tokens(
        tokens=new_tokens,
        lengths=batch.lengths[sequences],
        documents=num_sequences,
        modes=None if batch.modes is None else batch.modes[sequences],
        origins=None if batch.origins is None else batch.origins.take(order),
    )


def ragged(starts: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """starts[0], starts[0] + 1, ... (counts[0] of them), then those of starts[1], and so on."""
    bounds = bounds_of(counts)
    total = int(bounds[-1])
    # What a number of the result is more than its place in it.
    shifts = starts - bounds[:-1]
    return np.repeat(shifts, counts) + np.arange(total)
