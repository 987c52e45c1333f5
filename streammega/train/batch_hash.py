"""Hashes of global batches: equal exactly when the same tokens came at the same places of the same
samples.

They do not depend on how a batch is divided over ranks, stages and micro-batches: the digest of a
sample is a sum over its tokens and labels, to which each rank adds its part.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from streammega.kernels.keyed import GOLDEN, mix
from streammega.parallel import Ranks
from streammega.parallel.groups import WORLD
from streammega.samples.fields import Batch
from streammega.train.config import RunConfig
from streammega.train.splits import open_without_ranks

FIELDS = ("tokens", "labels")


def sample_digests(batch: Mapping[str, Tensor], places: Tensor | None = None) -> NDArray[np.uint64]:
    """A digest of the tokens and labels of each sample, uint64 [samples], or of a part of them. Digests
    of parts add up modulo 2**64.

    places: of the columns in the whole sample, int64 [kept]; None: all of it.
    """
    some_field = next(iter(batch.values()))
    digests = np.zeros(len(some_field), np.uint64)
    for number, name in enumerate(FIELDS):
        if name not in batch:
            continue
        elements = batch[name].cpu().numpy().astype(np.uint64)
        columns = np.arange(elements.shape[1]) if places is None else places.cpu().numpy()
        # Each element is mixed with a number that depends on its column and field.
        position = columns.astype(np.uint64) * np.uint64(len(FIELDS)) + np.uint64(number)
        mixed = mix(elements + mix(position + GOLDEN) + GOLDEN)
        digests += mixed.sum(axis=1, dtype=np.uint64)
    return digests


def global_batch_hash(digests: Mapping[int, int]) -> str:
    """The hash of a global batch from {global sample id: digest}, 32 hex digits."""
    little_endian = np.array(sorted(digests.items()), np.uint64).astype("<u8")
    return hashlib.blake2b(little_endian.tobytes(), digest_size=16).hexdigest()


def hash_over_ranks(
    batches: Sequence[Batch],
    sample_ids: NDArray[np.int64],
    samples: range,
    bounds: Sequence[tuple[int, int]],
    ranks: Ranks,
    device: torch.device,
) -> str:
    """The hash of the global batch that all ranks together received. Collective.

    Args:
        batches: the micro-batches of this rank; empty ones on ranks that receive no tokens.
        sample_ids: of the samples in them, in their order.
        samples: ids of the global batch.
        bounds: tokens [start, stop) of each sample that this rank has.
        ranks: of the run.
        device: on which they talk.

    Raises RuntimeError where tensor-parallel ranks received different tokens.
    """
    places = torch.cat([torch.arange(start, stop) for start, stop in bounds])
    rows = [sample_digests(batch, places) for batch in batches if batch]
    local = np.zeros(len(samples), np.uint64)
    if rows:  # pipeline stages without tokens have none
        local[sample_ids - samples.start] = np.concatenate(rows)
    # As int64 with the same bits: torch does not add unsigned integers.
    digests = torch.from_numpy(local.view(np.int64)).to(device)
    lowest = digests.clone()
    highest = digests.clone()
    ranks.all_reduce(lowest, "tp", dist.ReduceOp.MIN)
    ranks.all_reduce(highest, "tp", dist.ReduceOp.MAX)
    if not torch.equal(lowest, highest):
        raise RuntimeError(
            f"the tensor-parallel ranks {ranks.members('tp')} received different tokens of samples "
            f"[{samples.start}, {samples.stop}); this is a defect of streammega or of the network"
        )
    if ranks.at["tp"] > 0:
        # Copies of the same tokens count once.
        digests.zero_()
    ranks.all_reduce(digests, WORLD)
    of_all = digests.cpu().numpy().view(np.uint64)
    return global_batch_hash(dict(zip(samples, of_all.tolist(), strict=True)))


def loader_hashes(config: RunConfig) -> list[str]:
    """The hashes of all global batches of a run, from a loader without ranks. Those in metrics.jsonl
    must be the same.
    """
    hashes: list[str] = []
    digests: dict[int, int] = {}
    with open_without_ranks(config) as loader:
        dataset = loader.dataset
        for batch in loader:
            consumed = loader.consumed_samples
            sample_ids = dataset.sample_ids(consumed - dataset.step_samples).tolist()
            digests.update(zip(sample_ids, sample_digests(batch).tolist(), strict=True))
            if dataset.steps.schedule.offset_at(consumed) == 0:
                hashes.append(global_batch_hash(digests))
                digests = {}
            if len(hashes) == config.train.train_iters:
                break
    return hashes
