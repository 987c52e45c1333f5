"""Sums, norms and clipping over groups of ranks."""

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


def reduce_all(tensor: Tensor, group: Group) -> Work:
    """Start to sum a tensor over a group, in place."""
    return dist.all_reduce(tensor, group=group, async_op=True)  # type: ignore[no-any-return]


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


def inverse_of_tokens(
    num_tokens: Tensor, groups: Iterable[Group | None], device: torch.device
) -> Tensor:
    """1 / the sum of num_tokens over all ranks of `groups`, one after the other, which is taken as
    at least 1; float64 [], as the widest gradients.
    """
    tokens = num_tokens.detach().to(device, torch.float64, copy=True)
    for group in groups:
        if group is not None:
            dist.all_reduce(tokens, group=group)
    # a step without a token to learn from has no gradient, rather than NaN
    return 1.0 / tokens.clamp(min=1.0)


def clip(tensors: Sequence[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale tensors so that a total norm beyond max_norm becomes max_norm; a norm that is not
    finite is left to the caller.
    """
    if tensors and 0 < max_norm < math.inf:
        # Clamped rather than compared: the host would wait for the device to know the norm. 1e-6 is
        # torch's own, against a norm of zero.
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(list(tensors), factor)
