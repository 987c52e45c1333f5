"""Which keys the queries of a micro-batch see.

Made once for each micro-batch, and used by all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right


@dataclass(frozen=True)
class Packed:
    """Documents of all samples laid end to end, as kernels for sequences of several lengths take
    them.

    Document n has queries [queries[n], queries[n + 1]) and keys [keys[n], keys[n + 1]); its queries
    are the tokens of its last keys. int32 [documents + 1], on the device; and on the host, what no
    document has more of.
    """

    queries: Tensor
    keys: Tensor
    most_queries: int
    most_keys: int


@dataclass(frozen=True)
class Pieces:
    """The same for one call a document: lengths on the host.

    `key_lengths` tile all keys; `seen` are those that have queries.
    """

    query_lengths: list[int] = field(default_factory=list)
    key_lengths: list[int] = field(default_factory=list)
    seen: list[int] = field(default_factory=list)


class Visibility:
    """Queries of the kept parts of each sample see the keys at or before them, of their own
    document.

    Args:
        parts: [start, stop) in the sample of what this rank keeps, all of one length.
        whole: tokens of a sample.
        cu_seqlens: int32 [samples, n], the bounds of each sample's documents from 0 to `whole`,
            filled up with `whole`. None: a sample is one document.
        longest: tokens of the longest document; None: looked up where it is needed, for which a
            device is waited for.
    """

    def __init__(
        self,
        parts: Sequence[tuple[int, int]],
        whole: int,
        cu_seqlens: Tensor | None = None,
        longest: int | None = None,
    ) -> None:
        self.parts = list(parts)
        self.whole = whole
        self.cu_seqlens = cu_seqlens
        self._longest = longest
        self._packed: dict[int, Packed] = {}
        self._pieces: dict[int, Pieces] = {}
        self._triangle: Tensor | None = None

    def lower_right(self, queries: int, keys: int, like: Tensor) -> Tensor:
        """The bias [queries, keys] by which the queries are the tokens of the last of the keys, and
        see no later ones.

        On CUDA torch's own, which is no matrix. Elsewhere one matrix for all layers and lengths, of
        the numbers that kernels add: they would turn a matrix of booleans into these for each
        layer, and keep it for backward.
        """
        if like.is_cuda:
            bias: Tensor = causal_lower_right(queries, keys)
            return bias
        if self._triangle is None or self._triangle.dtype != like.dtype:
            self._triangle = self._make_triangle(like)
        return self._triangle[-queries:, -keys:]

    def _make_triangle(self, like: Tensor) -> Tensor:
        """The largest bias that is asked for: smaller ones are its lower right corner."""
        most_keys = self.whole if self.cu_seqlens is None else self.longest
        longest_part = max(stop - start for start, stop in self.parts)
        last_stop = max(stop for _, stop in self.parts)
        rows = min(most_keys, longest_part)
        columns = min(most_keys, last_stop)
        hidden = torch.full((rows, columns), -torch.inf, dtype=like.dtype, device=like.device)
        return hidden.triu_(columns - rows + 1)

    def packed(self, number: int) -> Packed:
        """The documents of part `number`. Those of which it holds nothing have no queries."""
        if number not in self._packed:
            self._packed[number] = self._pack(number)
        return self._packed[number]

    def _pack(self, number: int) -> Packed:
        assert self.cu_seqlens is not None
        start, stop = self.parts[number]
        # A document that goes on after the part is cut there, so that the part's queries are its
        # last.
        cut = torch.full_like(self.cu_seqlens[:, :1], stop)
        bounds = torch.cat((self.cu_seqlens, cut), 1).sort(1).values
        bounds_in_part = bounds.clamp(start, stop) - start
        return Packed(
            queries=_end_to_end(bounds_in_part, stop - start),
            keys=_end_to_end(bounds, self.whole),
            most_queries=min(self.longest, stop - start),
            most_keys=self.longest,
        )

    def pieces(self, number: int) -> Pieces:
        """The documents of part `number`, those of which it holds something."""
        if number not in self._pieces:
            self._pieces[number] = self._cut(number)
        return self._pieces[number]

    def _cut(self, number: int) -> Pieces:
        part_start, part_stop = self.parts[number]
        pieces = Pieces()
        reached = 0
        for row, bounds in enumerate(self._bounds):
            first_key = row * self.whole
            for start, stop in pairwise(bounds):
                # What is after the part is seen by none of its queries.
                seen_stop = min(stop, part_stop)
                queries = seen_stop - max(start, part_start)
                if queries > 0:
                    reached = _add_piece(
                        pieces, reached, queries, first_key + start, first_key + seen_stop
                    )
        all_keys = len(self._bounds) * self.whole
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
    """Add a document with keys [begin, end); keys before `begin` that were not reached yet are seen
    by none. Returns `end`.
    """
    if begin > reached:
        pieces.key_lengths.append(begin - reached)
    pieces.query_lengths.append(queries)
    pieces.seen.append(len(pieces.key_lengths))
    pieces.key_lengths.append(end - begin)
    return end


def _end_to_end(bounds: Tensor, length: int) -> Tensor:
    """Bounds within samples [samples, n], from 0 to `length`, as those of all samples end to end
    [samples * (n - 1) + 1].
    """
    samples = torch.arange(len(bounds), dtype=bounds.dtype, device=bounds.device)
    start_of_sample = samples[:, None] * length
    # The first bound of each sample is the last of the one before.
    ends = bounds[:, 1:] + start_of_sample
    return torch.cat((bounds.new_zeros(1), ends.flatten()))
