"""Process groups for buckets, and sums, norms and clipping over groups of ranks."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Iterable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, distributed_c10d

_bucket_groups: weakref.WeakKeyDictionary[ProcessGroup, ProcessGroup] = weakref.WeakKeyDictionary()


def bucket_group(group: ProcessGroup, device: torch.device) -> ProcessGroup:
    """A process group of the same ranks, backends and timeout, for buckets alone.

    When backward returns, ranks may have started different numbers of buckets. In one group, another
    collective of the program would then meet a bucket of another rank. All ranks of `group` call
    this together; other ranks need not. device: of tensors for collectives of `group`.
    """
    same_ranks = _bucket_groups.get(group)
    if same_ranks is not None:
        return same_ranks
    _make_as_many_groups(group, device)
    backend = group._get_backend(group._device_types[0])
    timeout: timedelta | None = None
    # some backends do not have it
    with contextlib.suppress(AttributeError, RuntimeError):
        timeout = backend.options._timeout
    same_ranks = dist.new_group(
        dist.get_process_group_ranks(group),
        timeout=timeout,
        backend=dist.get_backend_config(group),
        use_local_synchronization=True,
        group_desc="gradients",
    )
    assert isinstance(same_ranks, ProcessGroup)
    _bucket_groups[group] = same_ranks
    return same_ranks


def _make_as_many_groups(group: ProcessGroup, device: torch.device) -> None:
    """Bring all ranks of a group to the same number of process groups: torch makes the name of a new
    group, under which its ranks meet, from that number.
    """
    names = distributed_c10d._world.pg_names
    max_groups = torch.tensor(len(names), device=device)
    dist.all_reduce(max_groups, op=dist.ReduceOp.MAX, group=group)
    for _ in range(len(names), int(max_groups)):
        dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)


def total_norm(
    tensors: Sequence[Tensor], groups: Iterable[ProcessGroup | None], device: torch.device
) -> Tensor:
    """The 2-norm of tensors over all ranks of `groups`, one group after the other, float32 [].

    tensors: those that no other rank counts.
    """
    squares = torch.zeros((), dtype=torch.float32, device=device)
    if tensors:
        # in float32 at least: squares of narrow elements would overflow in their own dtype
        norms: list[Tensor] = []
        for tensor in tensors:
            wide = torch.promote_types(tensor.dtype, torch.float32)
            norms.append(torch.linalg.vector_norm(tensor, dtype=wide).float())
        squares = torch.stack(norms).square().sum()
    # squares add up over ranks, norms do not; a rank without tensors adds zero
    for group in groups:
        if group is not None:
            dist.all_reduce(squares, group=group)
    return squares.sqrt()


def inverse_of_tokens(
    num_tokens: Tensor, groups: Iterable[ProcessGroup | None], device: torch.device
) -> Tensor:
    """1 / the sum of num_tokens over all ranks of `groups`, one group after the other; at most 1.
    float64 [], like the widest gradients.
    """
    tokens = num_tokens.detach().to(device, torch.float64, copy=True)
    for group in groups:
        if group is not None:
            dist.all_reduce(tokens, group=group)
    # a step without unmasked tokens has zero gradients, and not NaN
    return 1.0 / tokens.clamp(min=1.0)


def clip(tensors: Sequence[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale tensors so that a total norm above max_norm becomes max_norm. The caller checks whether the
    norm is finite.
    """
    if tensors and 0 < max_norm < math.inf:
        # Clamped, not compared: for that the host would wait for the device. 1e-6 is against a norm of
        # zero, as in torch.
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(list(tensors), factor)
