"""Whether ranks train the same run on the same data: digests of settings and data at the start, and
hashes of global batches.

A different copy of the data on one node would make another order. Hashes are equal exactly when the
same tokens came at the same places of the same samples. They do not depend on how a batch is divided
over ranks, stages and micro-batches: the digest of a sample is a sum over its tokens and labels, to
which each rank adds its part.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

import streammega
from streammega.errors import ConfigError
from streammega.kernels.keyed import GOLDEN, mix
from streammega.parallel import Ranks
from streammega.parallel.groups import WORLD, has_cpu_backend
from streammega.samples.fields import Batch
from streammega.train.config import RunConfig

MAX_RANKS = 8
"""Ranks that a message names."""
PLACES = {
    "storage",
    "storage_by_prefix",
    "index_publish_url",
    "out_dir",
    "resume_from",
    "blend",
    "blend_per_split",
    "validation",
    "phases",
    "exclude_documents",
    "_manifests",
}
"""Settings that say where data is. They may differ from node to node; its content may not."""


def settings_of(config: RunConfig) -> str:
    """What the settings of all ranks must have in common, with the versions that read them."""
    sections: list[Any] = [config.data, config.model, config.train, config.parallel]
    sections += config.data.phases
    values = [
        [getattr(section, item.name) for item in fields(section) if item.name not in PLACES]
        for section in sections
    ]
    return repr((streammega.__version__, torch.__version__, values))


def check_ranks_agree(what: str, value: str, ranks: Ranks, device: torch.device) -> None:
    """Compare the digest of a text over all ranks; collective.

    Raises ConfigError on every rank where they differ, which names the ranks and `what` it is.
    """
    group = ranks.group(WORLD)
    if group is None:
        return
    digest = hashlib.blake2b(value.encode(), digest_size=16).digest()
    # A bytearray: torch warns of memory that cannot be written to.
    local = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
    local = local.to("cpu" if has_cpu_backend(group) else device)
    digests = [torch.empty_like(local) for _ in range(group.size())]
    dist.all_gather(digests, local, group=group)
    others = [rank for rank, other in enumerate(digests) if not torch.equal(other, digests[0])]
    if others:
        raise ConfigError(
            f"ranks do not train the same run: rank 0 has other {what} than {name_ranks(others)}; "
            f"give all of them the same command, run file, data and versions"
        )


def name_ranks(ranks: Sequence[int]) -> str:
    """The first ranks by number, and how many more there are."""
    names = ", ".join(str(rank) for rank in ranks[:MAX_RANKS])
    if len(ranks) > MAX_RANKS:
        names += f" and {len(ranks) - MAX_RANKS} more"
    return f"rank {names}" if len(ranks) == 1 else f"ranks {names}"


HASHED_FIELDS = ("tokens", "labels")


def sample_digests(batch: Mapping[str, Tensor], places: Tensor | None = None) -> NDArray[np.uint64]:
    """A digest of the tokens and labels of each sample, uint64 [samples], or of a part of them. Digests
    of parts add up modulo 2**64.

    places: of the columns in the whole sample, int64 [kept]; None: all of it.
    """
    some_field = next(iter(batch.values()))
    digests = np.zeros(len(some_field), np.uint64)
    for number, name in enumerate(HASHED_FIELDS):
        if name not in batch:
            continue
        elements = batch[name].cpu().numpy().astype(np.uint64)
        columns = np.arange(elements.shape[1]) if places is None else places.cpu().numpy()
        # Each element is mixed with a number that depends on its column and field.
        position = columns.astype(np.uint64) * np.uint64(len(HASHED_FIELDS)) + np.uint64(number)
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
