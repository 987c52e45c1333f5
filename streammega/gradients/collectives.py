"""Sharded collectives in place, each by what its backend does fastest, and norms over groups."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup


class Work(Protocol):
    """Something under way."""

    def wait(self) -> object:
        """Return when it is done (on NCCL: when the current stream will wait for it)."""


class Works:
    """Several that are waited for together."""

    def __init__(self, works: Iterable[Work | None]) -> None:
        self._works = [work for work in works if work is not None]

    def wait(self) -> None:
        """Return when all are done."""
        for work in self._works:
            work.wait()


def reduce_all(tensor: Tensor, group: Group) -> Work:
    """Start to sum a tensor over a group, in place."""
    return dist.all_reduce(tensor, group=group, async_op=True)  # type: ignore[no-any-return]


def reduce_to_shards(tensor: Tensor, group: Group) -> Work:
    """Start to sum a tensor over a group, in place; only the part of this rank, of as many equal
    ones, is then valid.

    gloo has no reduce-scatter of its own: summing all of it in place takes half the time of its
    stand-in.
    """
    if dist.get_backend(group) == "gloo":
        return reduce_all(tensor, group)
    shards = tensor.chunk(group.size())
    part_of_rank = shards[group.rank()]
    # renamed by torch: earlier releases know the second name only
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    work: Work = reduce_scatter(part_of_rank, tensor, group=group, async_op=True)
    return work


def gather_shards(tensor: Tensor, group: Group) -> Work:
    """Start to fill a tensor from its parts, of which every rank has its own, in place.

    gloo's all-gather copies everything twice more; a broadcast of each part takes a quarter of its
    time.
    """
    shards = tensor.chunk(group.size())
    if dist.get_backend(group) == "gloo":
        ranks = dist.get_process_group_ranks(group)
        return Works(
            dist.broadcast(shard, owner, group=group, async_op=True)
            for shard, owner in zip(shards, ranks, strict=True)
        )
    part_of_rank = shards[group.rank()]
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work: Work = all_gather(tensor, part_of_rank, group=group, async_op=True)
    return work


def total_norm(
    once: Sequence[Tensor], groups: Iterable[Group | None], device: torch.device
) -> Tensor:
    """The 2-norm of tensors over all ranks of `groups`, one after the other, float32 [].

    `once`: what no other rank counts.
    """
    squares = torch.zeros((), dtype=torch.float32, device=device)
    if once:
        # in float32 at least: squares of narrow elements would overflow in their own dtype
        norms: list[Tensor] = []
        for tensor in once:
            wide = torch.promote_types(tensor.dtype, torch.float32)
            norms.append(torch.linalg.vector_norm(tensor, dtype=wide).float())
        squares = torch.stack(norms).square().sum()
    # squares add up over ranks, norms do not; a rank without any takes part with zero
    for group in groups:
        if group is not None:
            dist.all_reduce(squares, group=group)
    return squares.sqrt()


def clip(tensors: Sequence[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale tensors so that a total norm beyond max_norm becomes max_norm; a norm that is not
    finite is left to the caller.
    """
    if tensors and 0 < max_norm < math.inf:
        # Clamped rather than compared: the host would wait for the device to know the norm. 1e-6 is
        # torch's own, against a norm of zero.
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(list(tensors), factor)
