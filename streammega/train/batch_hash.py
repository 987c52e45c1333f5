"""Hashes of global batches: equal exactly when the same tokens came at the same places of the same
samples.

They do not depend on how a batch was cut into ranks, parts, stages and micro-batches, which is what
makes them a proof: the digest of a sample is a sum over its tokens and labels, so each rank adds up
what it was given.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from streammega.kernels.stream import GOLDEN, mix
from streammega.parallel import Ranks
from streammega.parallel.groups import WORLD
from streammega.samples.fields import Batch

Digests = NDArray[np.uint64]
FIELDS = ("tokens", "labels")


def sample_digests(batch: Mapping[str, Tensor], places: Tensor | None = None) -> list[int]:
    """A 64-bit digest of the tokens and labels of each sample, or of the part of them that is
    there; parts add up modulo 2**64.

    places: of the columns in the whole sample, int64 [kept]; None: all of it.
    """
    some_field = next(iter(batch.values()))
    digests: Digests = np.zeros(len(some_field), np.uint64)
    for number, name in enumerate(FIELDS):
        if name in batch:
            digests += _field_digests(batch[name], places, number)
    return [int(digest) for digest in digests]


def _field_digests(values: Tensor, places: Tensor | None, number: int) -> Digests:
    """Of each row the sum of its elements, each mixed with where it stands and in which field."""
    elements = values.cpu().numpy().astype(np.uint64)
    _, width = elements.shape
    columns = np.arange(width) if places is None else places.cpu().numpy()
    # A number of its own for each column of each field.
    number_of_fields = np.uint64(len(FIELDS))
    position = columns.astype(np.uint64) * number_of_fields
    position += np.uint64(number)
    salt = mix(position + GOLDEN)
    mixed: Digests = mix(elements + salt + GOLDEN)
    digests: Digests = mixed.sum(axis=1, dtype=np.uint64)
    return digests


def global_batch_hash(digests: Mapping[int, int]) -> str:
    """The hash of a global batch from {global sample id: digest}, 32 hex digits."""
    pairs: list[tuple[int, int]] = []
    for sample, digest in sorted(digests.items()):
        pairs.append((sample, digest % 2**64))
    little_endian = np.array(pairs, np.uint64).astype("<u8")
    data = little_endian.tobytes()
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def hash_over_ranks(
    batches: Sequence[Batch],
    sample_ids: Sequence[int],
    samples: range,
    bounds: Sequence[tuple[int, int]],
    ranks: Ranks,
    device: torch.device,
) -> str:
    """The hash of the global batch that all ranks together were given. Collective.

    Args:
        batches: the micro-batches of this rank; empty ones on ranks that are given no tokens.
        sample_ids: of the samples in them, in their order.
        samples: ids of the global batch.
        bounds: tokens [start, stop) of each sample that this rank has.
        ranks: of the run.
        device: on which they talk.

    Raises RuntimeError where tensor-parallel ranks were given different tokens.
    """
    places = torch.cat([torch.arange(start, stop) for start, stop in bounds])
    rows: list[int] = []
    for batch in batches:
        if batch:
            rows += sample_digests(batch, places)
    digests = torch.zeros(len(samples), dtype=torch.int64)
    # Pipeline stages without tokens have no rows; all others one for each sample.
    for sample, digest in zip(sample_ids, rows, strict=bool(rows)):
        digests[sample - samples.start] += _as_int64(digest)
    digests = digests.to(device)
    lowest = digests.clone()
    highest = digests.clone()
    ranks.all_reduce(lowest, "tp", dist.ReduceOp.MIN)
    ranks.all_reduce(highest, "tp", dist.ReduceOp.MAX)
    if not torch.equal(lowest, highest):
        raise RuntimeError(
            f"tensor-parallel ranks were given different tokens of samples "
            f"[{samples.start}, {samples.stop})"
        )
    if ranks.at["tp"] > 0:
        # Copies of the same tokens count once.
        digests.zero_()
    ranks.all_reduce(digests, WORLD)
    return global_batch_hash(dict(zip(samples, digests.tolist(), strict=True)))


def _as_int64(digest: int) -> int:
    """The same bits as torch's widest integers have them: torch adds no unsigned ones."""
    return digest - 2**64 if digest >= 2**63 else digest
