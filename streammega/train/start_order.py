"""The one order in which the buckets of a process group start their collectives."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

from torch.distributed import ProcessGroup


class Starter(Protocol):
    """A model whose buckets are started in turn."""

    def start_full(self) -> bool:
        """Start the buckets that are full, up to the first that is not; whether all that may start in backward have."""


class StartOrder:
    """The models of a group in the order in which their buckets start: the last made first, as backward comes to it first.

    A collective meets those of other ranks by its place in the group's sequence alone. That place must follow from the program,
    and not from which gradient was ready first: ranks that leave parameters out would else add up gradients of different ones.
    """

    def __init__(self) -> None:
        self._models: list[weakref.ref[Any]] = []

    def add(self, model: Starter) -> None:
        """Put a model before those that were made earlier."""
        self._models = [weakref.ref(model), *(reference for reference in self._models if reference() is not None)]

    def start_full(self) -> None:
        """Start what is full and next."""
        for reference in self._models:
            model = reference()
            if model is not None and not model.start_full():
                return

    def sort(self, models: Sequence[Any]) -> list[Any]:
        """Some models in this order; those of other groups come last, as they were given."""
        place = {id(reference()): number for number, reference in enumerate(self._models)}
        return sorted(models, key=lambda model: place.get(id(model), len(place)))


# Wrappers of one group need not know of each other, so the group itself leads to their order. Weak: it keeps no group alive.
_orders: weakref.WeakKeyDictionary[ProcessGroup, StartOrder] = weakref.WeakKeyDictionary()


def start_order_of(group: ProcessGroup | None) -> StartOrder:
    """The order of a group; one of its own for a model without a group."""
    if group is None:
        return StartOrder()
    return _orders.setdefault(group, StartOrder())
