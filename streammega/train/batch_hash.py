"""Hashes of global batches: equal exactly when the same tokens came at the same places of the same
samples.

They do not depend on how a batch was cut into ranks, parts, stages and micro-batches, which is what
makes them a proof: the digest of a sample is a sum over its tokens and labels, so each rank adds up
what it was given.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from streammega.kernels.mix import GOLDEN, mix

Digests = NDArray[np.uint64]
FIELDS = ("tokens", "labels")


def sample_digests(batch: Mapping[str, Tensor], places: Tensor | None = None) -> list[int]:
    """A 64-bit digest of the tokens and labels of each sample, or of the part of them that is
    there; parts add up modulo 2**64.

    places: of the columns in the whole sample, int64 [kept]; None: all of it.
    """
    total: Digests = np.zeros(len(next(iter(batch.values()))), np.uint64)
    for number, name in enumerate(FIELDS):
        if name in batch:
            values = batch[name].cpu().numpy().astype(np.uint64)
            at = np.arange(values.shape[1]) if places is None else places.cpu().numpy()
            column = at.astype(np.uint64) * np.uint64(2) + np.uint64(number)
            total += mix(values + mix(column + GOLDEN) + GOLDEN).sum(axis=1, dtype=np.uint64)
    return [int(value) for value in total]


def global_batch_hash(digests: Mapping[int, int]) -> str:
    """The hash of a global batch from {global sample id: digest}, 32 hex digits."""
    pairs = np.array(
        [[sample, digest % 2**64] for sample, digest in sorted(digests.items())], np.uint64
    )
    return hashlib.blake2b(pairs.astype("<u8").tobytes(), digest_size=16).hexdigest()
