"""The shuffle of documents: each has a key, and they are sorted by it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from streammega.convert.documents import Tokens
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
    first_sequences = np.cumsum(batch.documents) - batch.documents
    sequences = ragged(first_sequences[order], batch.documents[order])
    source = np.ascontiguousarray(batch.tokens)
    sizes = batch.document_tokens * source.itemsize
    starts = np.cumsum(sizes) - sizes
    # Addresses go to a kernel, which looks no further.
    total = int(sizes.sum())
    if total != source.nbytes or len(order) != len(sizes):
        raise ConvertError(f"documents of {total} bytes are to be cut out of {source.nbytes}")
    tokens = np.empty_like(source)
    new_sizes = sizes[order]
    new_starts = np.cumsum(new_sizes) - new_sizes
    source_address = address_of(source.view(np.uint8))
    target_address = address_of(tokens.view(np.uint8))
    copy_bytes(_NOTHING, source_address + starts[order], new_sizes, target_address + new_starts)
    return Tokens(
        tokens=tokens,
        lengths=batch.lengths[sequences],
        documents=batch.documents[order],
        modes=None if batch.modes is None else batch.modes[sequences],
    )


def ragged(starts: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """starts[0], starts[0] + 1, ... (counts[0] of them), then those of starts[1], and so on."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    # What each number of the result is more than its place in it.
    shifts = starts - (ends - counts)
    return np.repeat(shifts, counts) + np.arange(total)
