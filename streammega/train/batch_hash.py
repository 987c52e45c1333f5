"""Hashes of global batches: equal exactly when the same tokens came in the same samples.

They do not depend on how a batch was cut into ranks and micro-batches, which is what makes them a proof of elasticity.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor


def sample_digests(batch: Mapping[str, Tensor]) -> list[int]:
    """A 63-bit digest of the tokens and labels of each sample."""
    both = torch.stack((batch["tokens"], batch["labels"]), dim=1).cpu().numpy().astype("<i8")
    return [int.from_bytes(hashlib.blake2b(row.tobytes(), digest_size=8).digest(), "little") >> 1 for row in both]


def global_batch_hash(digests: Mapping[int, int]) -> str:
    """The hash of a global batch from {global sample id: digest}, 32 hex digits."""
    pairs = np.array(sorted(digests.items()), "<i8")
    return hashlib.blake2b(pairs.tobytes(), digest_size=16).hexdigest()
