"""How many tokens samples have, and how many come before one: phases change it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, kw_only=True)
class SampleLengths:
    """starts: (first sample, tokens of each sample from there on), in order, the first at 0."""

    starts: Sequence[tuple[int, int]]

    def tokens_before(self, sample: int) -> int:
        """Tokens of all samples before one."""
        tokens = 0
        for (first, length), (end, _) in pairwise([*self.starts, (sample, 0)]):
            tokens += max(0, min(end, sample) - first) * length
        return tokens

    def sample_at(self, token: int) -> int:
        """The sample that has a token, counted over all samples from 0 on."""
        first, length = self.starts[0]
        before = 0
        for next_first, next_length in self.starts[1:]:
            before_next = self.tokens_before(next_first)
            if before_next > token:
                break
            first, length, before = next_first, next_length, before_next
        return first + (token - before) // length
