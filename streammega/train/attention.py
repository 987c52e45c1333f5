"""Causal attention over documents, and over sequences whose tokens are spread over context-parallel
ranks. Exact.

Every rank gathers the keys and values of all ranks. Its queries are two parts of the sequence in
zig-zag: the two parts of any rank cost the same together. Between forward and backward a layer keeps
only the keys and values of its own rank. Backward gathers the others again (a ring would send them
again too). A reduce-scatter then gives each rank the gradients of its own keys and values.

Kernels get no attention mask, except on the CPU for parts of one document, where all layers share one.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.varlen import varlen_attn

from streammega.errors.cached_property import cached_property

CAUSAL: dict[str, Any] = (
    {"window_size": (-1, 0)}
    if "window_size" in inspect.signature(varlen_attn).parameters
    else {"is_causal": True}
)
"""The argument of varlen_attn for causal attention. torch 2.10 calls it is_causal."""
SEQUENCE = -3
"""The dimension of tokens in [..., tokens, heads, head_dim]."""


@dataclass(frozen=True)
class ContextParallel:
    """The group whose ranks hold parts r and 2 * size - 1 - r of each sequence."""

    group: dist.ProcessGroup | None
    rank: int
    size: int


ALONE = ContextParallel(None, rank=0, size=1)
"""A rank that holds whole sequences."""


class Packed(NamedTuple):
    """The documents of all samples end to end: what varlen_attn takes after queries, keys and values.

    cu_seq_q, cu_seq_k: int32 [documents + 1], on the device. Document n has queries [cu_seq_q[n],
    cu_seq_q[n + 1]) and keys [cu_seq_k[n], cu_seq_k[n + 1]); its queries are the tokens of its last
    keys. max_q, max_k: no document has more queries or keys.
    """

    cu_seq_q: Tensor
    cu_seq_k: Tensor
    max_q: int
    max_k: int


class Visibility:
    """Which keys a query sees: those of its own document, up to its own token.

    Args:
        parts: [start, stop) in the sample of what this rank keeps, all of one length.
        length: tokens of a sample.
        cu_seqlens: int32 [samples, n], the bounds of each sample's documents from 0 to `length`,
            filled up with `length`. None: a sample is one document.
        longest: at least the tokens of the longest document; None: it is read from the device where
            it is needed, and the host waits for that.
    """

    def __init__(
        self,
        parts: Sequence[tuple[int, int]],
        length: int,
        cu_seqlens: Tensor | None = None,
        longest: int | None = None,
    ) -> None:
        self.parts = list(parts)
        self.length = length
        self.cu_seqlens = cu_seqlens
        if longest is not None:
            self.longest = longest
        self._largest_bias: Tensor | None = None

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest document."""
        assert self.cu_seqlens is not None
        return int(self.cu_seqlens.diff(dim=1).max())

    @cached_property
    def packed(self) -> list[Packed]:
        """The documents of each part. Those without a token in it have no queries."""
        assert self.cu_seqlens is not None
        packed: list[Packed] = []
        for start, stop in self.parts:
            # A document that continues after the part is cut there: its last tokens are then in the part.
            cut = torch.full_like(self.cu_seqlens[:, :1], stop)
            bounds = torch.cat((self.cu_seqlens, cut), 1).sort(1).values
            bounds_in_part = bounds.clamp(start, stop) - start
            packed.append(
                Packed(
                    cu_seq_q=_bounds_end_to_end(bounds_in_part, stop - start),
                    cu_seq_k=_bounds_end_to_end(bounds, self.length),
                    max_q=min(self.longest, stop - start),
                    max_k=self.longest,
                )
            )
        return packed

    @cached_property
    def pieces(self) -> list[list[tuple[int, int]]]:
        """For each part (queries, keys) of consecutive pieces, which are all queries of the part and
        all keys, of all samples end to end. A piece is a document, or has keys that no query sees.
        """
        assert self.cu_seqlens is not None
        bounds_of_samples: list[list[int]] = self.cu_seqlens.tolist()
        pieces: list[list[tuple[int, int]]] = []
        for part_start, part_stop in self.parts:
            of_part: list[tuple[int, int]] = []
            for bounds in bounds_of_samples:
                # Documents with tokens in the part are neighbours. No query sees the keys before them,
                # nor those after the part.
                documents = [
                    (start, min(stop, part_stop))
                    for start, stop in pairwise(bounds)
                    if max(start, part_start) < min(stop, part_stop)
                ]
                of_part.append((0, documents[0][0]))
                for start, stop in documents:
                    of_part.append((stop - max(start, part_start), stop - start))
                of_part.append((0, self.length - part_stop))
            pieces.append(of_part)
        return pieces

    def causal_bias(self, queries: int, keys: int, like: Tensor) -> Tensor:
        """The bias [queries, keys] that hides later keys, for queries that are the tokens of the last
        keys.

        On CUDA it is torch's own, which is no matrix. Elsewhere it is a view of one matrix of 0 and
        -inf, in the dtype of `like`, that all layers share. Of a matrix of booleans each layer would
        make such numbers, and keep them for backward.
        """
        if like.is_cuda:
            bias: Tensor = causal_lower_right(queries, keys)
            return bias
        if self._largest_bias is None:
            # A call is for one part of one document: for its queries in the part, and its keys up to
            # the end of the part.
            max_document = self.length if self.cu_seqlens is None else self.longest
            rows = min(max_document, max(stop - start for start, stop in self.parts))
            columns = min(max_document, max(stop for _, stop in self.parts))
            hidden = torch.full((rows, columns), -torch.inf, dtype=like.dtype, device=like.device)
            # Row i is the token of column i + columns - rows: what is right of it stays hidden.
            self._largest_bias = hidden.triu_(columns - rows + 1)
        # The last row and column are the same token in every size. So a smaller bias is a corner.
        return self._largest_bias[-queries:, -keys:]


def _bounds_end_to_end(bounds: Tensor, length: int) -> Tensor:
    """Bounds of all samples end to end [samples * (n - 1) + 1], from bounds within each sample
    [samples, n], which go from 0 to `length`.
    """
    samples = torch.arange(len(bounds), dtype=bounds.dtype, device=bounds.device)
    start_of_sample = samples[:, None] * length
    # The first bound of each sample is the last of the one before.
    ends = bounds[:, 1:] + start_of_sample
    return torch.cat((bounds.new_zeros(1), ends.flatten()))


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visibility: Visibility,
    context: ContextParallel = ALONE,
    *,
    gather_again: bool = True,
) -> Tensor:
    """Attention of q, k, v [batch, kept, heads, head_dim] to the keys that each query sees: [batch,
    kept, heads, head_dim].

    gather_again: keep only this rank's keys and values for backward, and gather the others again.
    False: keep all, for layers whose forward is computed again anyway.
    """
    if context.size == 1:
        return _attend_to_all(q, k, v, visibility)
    local = torch.stack((k, v))
    gathered = _in_order(_AllGather.apply(local, context))  # type: ignore[no-untyped-call]
    again = _GatherAgain(local.detach(), context, gathered)
    hooks = saved_tensors_hooks(again.pack, again.unpack) if gather_again else nullcontext()
    with hooks:
        return _attend_to_all(q, gathered[0], gathered[1], visibility)


def _attend_to_all(q: Tensor, k: Tensor, v: Tensor, visibility: Visibility) -> Tensor:
    """Attention of this rank's queries to keys and values of whole samples [batch, length, heads,
    head_dim].
    """
    # All parts are as long as the first.
    start, stop = visibility.parts[0]
    parts = torch.split(q, stop - start, 1)
    mixed = [_attend_part(part, k, v, visibility, number) for number, part in enumerate(parts)]
    return mixed[0] if len(mixed) == 1 else torch.cat(mixed, 1)


def _attend_part(q: Tensor, k: Tensor, v: Tensor, visibility: Visibility, number: int) -> Tensor:
    if visibility.cu_seqlens is None:
        _, stop = visibility.parts[number]
        return _dense(q, k[:, :stop], v[:, :stop], visibility)
    if not _has_packed_kernel(q, k, v):
        return _by_document(q, k, v, visibility, number)
    packed = visibility.packed[number]
    mixed: Any = varlen_attn(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), *packed, **CAUSAL)
    return cast(Tensor, mixed.view_as(q))


def _dense(q: Tensor, k: Tensor, v: Tensor, visibility: Visibility) -> Tensor:
    """Attention within one document, whose last keys are the tokens of the queries; the shape of q."""
    queries = q.shape[1]
    keys = k.shape[1]
    bias = None if queries == keys else visibility.causal_bias(queries, keys, q)
    mixed = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=bias,
        is_causal=bias is None,
    )
    return mixed.transpose(1, 2)


def _by_document(q: Tensor, k: Tensor, v: Tensor, visibility: Visibility, number: int) -> Tensor:
    """One call for each document, where there is no kernel for several at once.

    Time of forward and backward on two cores, compared with one mask for all pairs: the same for
    samples of 256 tokens, half for 1024, a seventh for 2048.
    """
    query_lengths, key_lengths = map(list, zip(*visibility.pieces[number], strict=True))
    queries = torch.split(q.flatten(0, 1), query_lengths)
    keys = torch.split(k.flatten(0, 1), key_lengths)
    values = torch.split(v.flatten(0, 1), key_lengths)
    # Each as a batch of one.
    mixed = [
        _dense(one_q[None], one_k[None], one_v[None], visibility)[0]
        for one_q, one_k, one_v in zip(queries, keys, values, strict=True)
        if len(one_q)
    ]
    return torch.cat(mixed).view_as(q)


def _has_packed_kernel(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether flash attention, the only kernel of varlen_attn, takes these tensors: they must be 16 bits
    wide, on a GPU that has it.
    """
    if not q.is_cuda:
        return False
    tensors = [tensor.transpose(1, 2) for tensor in (q, k, v)]
    parameters: Any = SDPAParams  # its stub lacks the last argument
    # No mask, no dropout, not causal, no grouped heads.
    return can_use_flash_attention(parameters(*tensors, None, 0.0, False, False))


class _AllGather(torch.autograd.Function):
    """A tensor of every rank, from that of this rank."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, context: ContextParallel) -> tuple[Tensor, ...]:
        ctx.context = context
        return _all_gather(local, context)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """The gradient of this rank's tensor, summed over ranks: all of them have used it. gloo reduces
        for each rank in turn, and sends no less than by an all-reduce.
        """
        context: ContextParallel = ctx.context
        of_ranks = [grad.contiguous() for grad in grads]
        total = torch.empty_like(of_ranks[context.rank])
        dist.reduce_scatter(total, of_ranks, group=context.group)
        return total, None


class _GatherAgain:
    """Hooks for saved tensors. Of a view of the gathered keys and values they save its place alone, and
    backward gathers them again.

    All ranks of the group run the same program, so they gather at the same time. The first `unpack`
    gathers, and the last one frees.
    """

    def __init__(self, local: Tensor, context: ContextParallel, gathered: Tensor) -> None:
        self._local = local
        self._context = context
        self._address = gathered.untyped_storage().data_ptr()
        self._gathered: Tensor | None = None
        self._saved = 0
        self._used = 0

    def pack(self, tensor: Tensor) -> Any:
        """The place of a view of the gathered tensor; another tensor as it is."""
        if tensor.untyped_storage().data_ptr() != self._address:
            return tensor
        self._saved += 1
        return tensor.size(), tensor.stride(), tensor.storage_offset()

    def unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        if self._gathered is None:
            self._gathered = _in_order(_all_gather(self._local, self._context))
        tensor = self._gathered.as_strided(*packed)
        self._used += 1
        if self._used == self._saved:
            self._gathered = None
            self._used = 0  # a graph that is retained is walked again
        return tensor


def _all_gather(local: Tensor, context: ContextParallel) -> tuple[Tensor, ...]:
    local = local.contiguous()
    of_ranks = [torch.empty_like(local) for _ in range(context.size)]
    dist.all_gather(of_ranks, local, group=context.group)
    return tuple(of_ranks)


def _in_order(of_ranks: Sequence[Tensor]) -> Tensor:
    """[..., kept, heads, head_dim] of each rank -> [..., S, heads, head_dim] as in the sequence."""
    halves = [tensor.chunk(2, SEQUENCE) for tensor in of_ranks]
    # Zig-zag: the first halves of all ranks upwards, then the second halves downwards.
    in_order = [first for first, _ in halves] + [second for _, second in reversed(halves)]
    return torch.cat(in_order, SEQUENCE)
