"""Causal attention over sequences whose tokens are spread over context-parallel ranks in zig-zag parts. Exact.

Every rank gathers the keys and values of all (they are small beside the activations), and its queries, two parts of the sequence,
attend to what comes before them: the two parts of any rank cost the same together. Backward sums what ranks owe to each key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from streammega.order.sharding import zigzag_parts


@dataclass(frozen=True)
class ContextParallel:
    """The group whose ranks hold parts r and 2 * size - 1 - r of each sequence."""

    group: dist.ProcessGroup
    rank: int
    size: int


def attend(q: Tensor, k: Tensor, v: Tensor, document_starts: Tensor | None, context: ContextParallel | None) -> Tensor:
    """Attention of q, k, v [batch, heads, kept, head_dim] to keys at or before each query: [batch, heads, kept, head_dim].

    document_starts: int64 [batch, kept], the position in the whole sequence where each token's document begins; keys before it
    are not attended to. None: one document.
    """
    if context is None and document_starts is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    parts, whole = [(0, q.shape[2])], q.shape[2]
    if context is not None:
        k, v = _GatherSequence.apply(torch.stack((k, v)), context).unbind()  # type: ignore[no-untyped-call]
        whole = k.shape[2]
        part = whole // (2 * context.size)
        parts = [(number * part, (number + 1) * part) for number in zigzag_parts(context.rank, context.size)]
    mixed, at = [], 0
    for start, stop in parts:
        own = slice(at, at + stop - start)
        mask = _mask(start, stop, None if document_starts is None else document_starts[:, own], q.device)
        mixed.append(F.scaled_dot_product_attention(q[:, :, own], k[:, :, :stop], v[:, :, :stop], attn_mask=mask))
        at += stop - start
    return torch.cat(mixed, 2)


def starts_of_documents(cu_seqlens: Tensor, bounds: Sequence[tuple[int, int]]) -> Tensor:
    """Where the document of each kept token begins, int64 [samples, kept], from the bounds of whole samples [samples, n]."""
    kept = torch.cat([torch.arange(start, stop, device=cu_seqlens.device) for start, stop in bounds])
    rows = kept.expand(len(cu_seqlens), -1).contiguous()
    document = torch.searchsorted(cu_seqlens.to(torch.int64).contiguous(), rows, right=True) - 1
    return cu_seqlens.to(torch.int64).gather(1, document)


def _mask(start: int, stop: int, document_starts: Tensor | None, device: torch.device) -> Tensor:
    """bool [stop - start, stop], or [batch, 1, stop - start, stop]: True where a query may see a key."""
    query = torch.arange(start, stop, device=device)[:, None]
    key = torch.arange(stop, device=device)[None]
    mask = key <= query
    if document_starts is not None:
        mask = mask & (key >= document_starts[:, None, :, None])
    return mask


class _GatherSequence(torch.autograd.Function):
    """[..., kept, head_dim] of every rank -> [..., S, head_dim] in the order of the sequence; gradients are summed back."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, context: ContextParallel) -> Tensor:
        ctx.context = context
        local = local.contiguous()
        every = [torch.empty_like(local) for _ in range(context.size)]
        dist.all_gather(every, local, group=context.group)
        return torch.cat(_in_order([tensor.chunk(2, -2) for tensor in every]), -2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        context: ContextParallel = ctx.context
        grad = grad.contiguous()
        dist.all_reduce(grad, group=context.group)
        parts = grad.chunk(2 * context.size, -2)
        first, second = zigzag_parts(context.rank, context.size)
        return torch.cat((parts[first], parts[second]), -2), None


def _in_order(halves: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """The first halves of all ranks upwards, then the second halves downwards."""
    return [first for first, _ in halves] + [second for _, second in reversed(halves)]
