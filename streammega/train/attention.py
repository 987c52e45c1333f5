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
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.varlen import varlen_attn

from streammega.order.sharding import zigzag_parts

CAUSAL: dict[str, Any] = (
    {"window_size": (-1, 0)}
    if "window_size" in inspect.signature(varlen_attn).parameters
    else {"is_causal": True}
)
"""The argument of varlen_attn for causal attention, which torch 2.10 has under another name."""
SEQUENCE = -3
"""The dimension of tokens in [..., tokens, heads, head_dim]."""


@dataclass(frozen=True)
class ContextParallel:
    """The group whose ranks hold parts r and 2 * size - 1 - r of each sequence."""

    group: dist.ProcessGroup
    rank: int
    size: int


@dataclass(frozen=True)
class Packed:
    """The documents of all samples end to end, as kernels for sequences of several lengths take them.

    queries, keys: int32 [documents + 1], on the device. Document n has queries [queries[n],
    queries[n + 1]) and keys [keys[n], keys[n + 1]); its queries are the tokens of its last keys.
    most_queries, most_keys: what no document has more of.
    """

    queries: Tensor
    keys: Tensor
    most_queries: int
    most_keys: int


@dataclass(frozen=True)
class Pieces:
    """The same for one call for each document, with lengths on the host.

    key_lengths: of pieces that are all keys together. with_queries: the indices of the pieces that
    have queries.
    """

    query_lengths: list[int] = field(default_factory=list)
    key_lengths: list[int] = field(default_factory=list)
    with_queries: list[int] = field(default_factory=list)


class Visibility:
    """Which keys a query sees: those of its own document, up to its own token.

    Args:
        parts: [start, stop) in the sample of what this rank keeps, all of one length.
        length: tokens of a sample.
        cu_seqlens: int32 [samples, n], the bounds of each sample's documents from 0 to `length`,
            filled up with `length`. None: a sample is one document.
        longest: tokens of the longest document; None: it is read from the device where it is needed,
            and the host waits for that.
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
        self._longest = longest
        self._packed: dict[int, Packed] = {}
        self._pieces: dict[int, Pieces] = {}
        self._triangle: Tensor | None = None

    def lower_right(self, queries: int, keys: int, like: Tensor) -> Tensor:
        """The bias [queries, keys] if the queries are the tokens of the last keys: later keys are hidden.

        On CUDA it is torch's own, which is no matrix. Elsewhere all layers and lengths share one
        matrix of the numbers that kernels add. Kernels would turn a matrix of booleans into such
        numbers in each layer, and keep them for backward.
        """
        if like.is_cuda:
            bias: Tensor = causal_lower_right(queries, keys)
            return bias
        if self._triangle is None or self._triangle.dtype != like.dtype:
            self._triangle = self._make_triangle(like)
        return self._triangle[-queries:, -keys:]

    def _make_triangle(self, like: Tensor) -> Tensor:
        """The largest bias that is needed. Smaller ones are its lower right corner."""
        most_keys = self.length if self.cu_seqlens is None else self.longest
        longest_part = max(stop - start for start, stop in self.parts)
        last_stop = max(stop for _, stop in self.parts)
        rows = min(most_keys, longest_part)
        columns = min(most_keys, last_stop)
        hidden = torch.full((rows, columns), -torch.inf, dtype=like.dtype, device=like.device)
        return hidden.triu_(columns - rows + 1)

    def packed(self, number: int) -> Packed:
        """The documents of part `number`. Those that have no token in it have no queries."""
        if number not in self._packed:
            self._packed[number] = self._pack(number)
        return self._packed[number]

    def _pack(self, number: int) -> Packed:
        assert self.cu_seqlens is not None
        start, stop = self.parts[number]
        # A document that continues after the part is cut there: its last tokens are then in the part.
        cut = torch.full_like(self.cu_seqlens[:, :1], stop)
        bounds = torch.cat((self.cu_seqlens, cut), 1).sort(1).values
        bounds_in_part = bounds.clamp(start, stop) - start
        return Packed(
            queries=_bounds_end_to_end(bounds_in_part, stop - start),
            keys=_bounds_end_to_end(bounds, self.length),
            most_queries=min(self.longest, stop - start),
            most_keys=self.longest,
        )

    def pieces(self, number: int) -> Pieces:
        """The documents that have tokens in part `number`."""
        if number not in self._pieces:
            self._pieces[number] = self._cut(number)
        return self._pieces[number]

    def _cut(self, number: int) -> Pieces:
        part_start, part_stop = self.parts[number]
        pieces = Pieces()
        reached = 0
        for row, bounds in enumerate(self._bounds):
            first_key = row * self.length
            for start, stop in pairwise(bounds):
                # No query of the part sees what comes after the part.
                seen_stop = min(stop, part_stop)
                queries = seen_stop - max(start, part_start)
                if queries > 0:
                    reached = _add_piece(
                        pieces, reached, queries, first_key + start, first_key + seen_stop
                    )
        all_keys = len(self._bounds) * self.length
        pieces.key_lengths.append(all_keys - reached)
        return pieces

    @property
    def longest(self) -> int:
        """Tokens of the longest document."""
        if self._longest is None:
            assert self.cu_seqlens is not None
            self._longest = int(longest_document(self.cu_seqlens))
        return self._longest

    @cached_property
    def _bounds(self) -> list[list[int]]:
        assert self.cu_seqlens is not None
        bounds: list[list[int]] = self.cu_seqlens.tolist()
        return bounds


def longest_document(cu_seqlens: Tensor) -> Tensor:
    """Tokens of the longest document, int32 [] on the device of the bounds [samples, n]."""
    return cu_seqlens.diff(dim=1).max()


def _add_piece(pieces: Pieces, reached: int, queries: int, begin: int, end: int) -> int:
    """Add a document with keys [begin, end). Keys between `reached` and `begin` become a piece without
    queries. Returns `end`.
    """
    if begin > reached:
        pieces.key_lengths.append(begin - reached)
    pieces.query_lengths.append(queries)
    pieces.with_queries.append(len(pieces.key_lengths))
    pieces.key_lengths.append(end - begin)
    return end


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
    context: ContextParallel | None = None,
    *,
    gather_again: bool = True,
) -> Tensor:
    """Attention of q, k, v [batch, kept, heads, head_dim] to the keys that each query sees: [batch,
    kept, heads, head_dim].

    gather_again: keep only this rank's keys and values for backward, and gather the others again.
    False: keep all, for layers whose forward is computed again anyway.
    """
    if context is None:
        return _attend_to_all(q, k, v, visibility)
    local = torch.stack((k, v))
    gathered = _GatherSequence.apply(local, context)  # type: ignore[no-untyped-call]
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
    if _has_packed_kernel(q, k, v):
        packed = visibility.packed(number)
        queries = q.flatten(0, 1)
        keys = k.flatten(0, 1)
        values = v.flatten(0, 1)
        mixed: Any = varlen_attn(
            queries,
            keys,
            values,
            packed.queries,
            packed.keys,
            packed.most_queries,
            packed.most_keys,
            **CAUSAL,
        )
        return cast(Tensor, mixed.view_as(q))
    return _by_document(q, k, v, visibility, number)


def _dense(q: Tensor, k: Tensor, v: Tensor, visibility: Visibility) -> Tensor:
    """Attention within one document, whose last keys are the tokens of the queries; the shape of q."""
    queries = q.shape[1]
    keys = k.shape[1]
    bias = None if queries == keys else visibility.lower_right(queries, keys, q)
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
    pieces = visibility.pieces(number)
    queries = torch.split(q.flatten(0, 1), pieces.query_lengths)
    keys = torch.split(k.flatten(0, 1), pieces.key_lengths)
    values = torch.split(v.flatten(0, 1), pieces.key_lengths)
    mixed: list[Tensor] = []
    for of_document, place in zip(queries, pieces.with_queries, strict=True):
        # Each as a batch of one.
        one = _dense(of_document[None], keys[place][None], values[place][None], visibility)
        mixed.append(one[0])
    return torch.cat(mixed).view_as(q)


def _has_packed_kernel(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether flash attention, the only kernel of varlen_attn, takes these tensors: they must be 16 bits
    wide, on a GPU that has it.
    """
    if not q.is_cuda:
        return False
    parameters: Any = SDPAParams  # its stub lacks the last argument
    no_mask = None
    no_dropout = 0.0
    is_causal = False
    groups_heads = False
    wanted = parameters(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        no_mask,
        no_dropout,
        is_causal,
        groups_heads,
    )
    return can_use_flash_attention(wanted)


class _GatherSequence(torch.autograd.Function):
    """[..., kept, heads, head_dim] of every rank -> [..., S, heads, head_dim] as in the sequence;
    gradients are summed back.
    """

    @staticmethod
    def forward(ctx: Any, local: Tensor, context: ContextParallel) -> Tensor:
        """Gather."""
        ctx.context = context
        return _gather(local, context)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """The gradients of this rank's keys and values, summed over ranks: queries of every rank have
        seen them. gloo reduces for each rank in turn, and sends no less than by an all-reduce.
        """
        context: ContextParallel = ctx.context
        parts = grad.contiguous().chunk(2 * context.size, SEQUENCE)
        of_ranks: list[Tensor] = []
        for rank in range(context.size):
            first, second = zigzag_parts(rank, context.size)
            of_ranks.append(torch.cat((parts[first], parts[second]), SEQUENCE))
        total = torch.empty_like(of_ranks[context.rank])
        dist.reduce_scatter(total, of_ranks, group=context.group)
        return total, None


class _GatherAgain:
    """Hooks for saved tensors: instead of gathered keys and values they save places, and backward
    gathers them again.

    All ranks of the group run the same program, so they gather at the same time. The first use
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
        """A tensor as it is, or its place in the gathered one."""
        if tensor.untyped_storage().data_ptr() != self._address:
            return tensor
        self._saved += 1
        return tensor.size(), tensor.stride(), tensor.storage_offset()

    def unpack(self, packed: Any) -> Tensor:
        """The tensor that was packed."""
        if isinstance(packed, Tensor):
            return packed
        if self._gathered is None:
            self._gathered = _gather(self._local, self._context)
        tensor = self._gathered.as_strided(*packed)
        self._used += 1
        if self._used == self._saved:
            self._gathered = None
            self._used = 0  # a graph that is retained is walked again
        return tensor


def _gather(local: Tensor, context: ContextParallel) -> Tensor:
    """[..., kept, heads, head_dim] of each rank -> [..., S, heads, head_dim] as in the sequence."""
    local = local.contiguous()
    of_ranks = [torch.empty_like(local) for _ in range(context.size)]
    dist.all_gather(of_ranks, local, group=context.group)
    halves = [tensor.chunk(2, SEQUENCE) for tensor in of_ranks]
    return torch.cat(_in_order(halves), SEQUENCE)


def _in_order(halves: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """The first halves of all ranks upwards, then the second halves downwards."""
    return [first for first, _ in halves] + [second for _, second in reversed(halves)]
