"""What a rank steps of the parameters: pieces of buckets, and the optimizer that has their
state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from streammega.gradients.buffers import GradSlot


@dataclass(frozen=True)
class Piece:
    """Elements [start, stop) of this rank's part of a parameter, flat: what this rank steps."""

    slot: GradSlot
    start: int
    stop: int
    main: nn.Parameter
    """The elements in fp32, [stop - start]: what the inner optimizer steps."""
    grad: Tensor
    """Their gradients, [stop - start]: a view of the buffer."""
    counts: bool
    """Whether this rank counts them in a norm; False where another has the same."""


class BucketedModel(Protocol):
    """What the state of an optimizer has to know of a model; BucketedDataParallel is one."""

    @property
    def device(self) -> torch.device:
        """Where its parameters are."""

    def is_first_copy(self, slot: GradSlot) -> bool:
        """Whether no tensor-parallel rank before this one has the same elements of a parameter."""


class PiecewiseOptimizer(Protocol):
    """An optimizer of pieces, whose state is saved and loaded; ShardedOptimizer is one."""

    inner: torch.optim.Optimizer
    """torch's, of the pieces' fp32 parameters."""
    pieces: list[Piece]
    offered: dict[int, dict[str, Any]]
    """By the id of a piece, memory for what it has no state of yet, which a checkpoint is
    filling.
    """

    @property
    def make_inner(self) -> Callable[..., torch.optim.Optimizer]:
        """Another inner optimizer of the same settings."""

    @property
    def group_of(self) -> Mapping[int, int]:
        """By the id of a slot, its parameter group."""

    @property
    def models(self) -> Sequence[BucketedModel]:
        """The models that are stepped."""

    @property
    def slots(self) -> Sequence[tuple[BucketedModel, GradSlot]]:
        """All parameters, also those of which this rank has no piece."""

    @property
    def names_of_groups(self) -> list[list[str]]:
        """The parameters of each group, on all ranks."""
