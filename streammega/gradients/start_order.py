"""The one order in which the buckets of a process group start their collectives."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch.distributed as dist
from torch.distributed import ProcessGroup

from streammega.errors import GradientError


class Starter(Protocol):
    """A model whose buckets are started in turn."""

    def start_full(self) -> bool:
        """Start the buckets that are full, up to the first that is not; whether all that may start
        in backward have.
        """

    @property
    def has_begun(self) -> bool:
        """Whether it has gradients of a step that is not finished."""


Model = TypeVar("Model", bound=Starter)


class StartOrder:
    """The models of a group in the order in which their buckets start: the last made first, as
    backward comes to it first.

    A collective meets those of other ranks by its place in the group's sequence alone. That place
    must follow from the program, and not from which gradient was ready first: ranks that leave
    parameters out would else add up gradients of different ones.

    Buckets of several models start during backward only where the program finished all of these
    models together the step before. Which of them it will finish, and in which order, is otherwise
    not known before it does.

    `group`: of the same ranks as the program's, for buckets alone. How many of these have started
    when backward returns differs from rank to rank: a collective of the program's after it would
    meet another rank's bucket. None: this rank is alone.
    """

    def __init__(self, program_group: ProcessGroup | None) -> None:
        self.group = None if program_group is None else _make_same(program_group)
        self._models: list[weakref.ref[Starter]] = []
        self._together: weakref.WeakSet[Any] = weakref.WeakSet()

    def add(self, model: Starter) -> None:
        """Put a model before those that were made earlier."""
        alive = [reference for reference in self._models if reference() is not None]
        self._models = [weakref.ref(model), *alive]

    def start_full(self) -> None:
        """Start what is full and next."""
        if not self._starts_in_backward():
            return
        for model in self._alive():
            all_started = model.start_full()
            if not all_started:
                return  # those after it wait for their turn

    def finish(self, models: Sequence[Starter]) -> None:
        """Note which models are finished together.

        Raises GradientError where collectives of another may have begun.
        """
        finished = {id(model) for model in models}
        others = [model for model in self._alive() if id(model) not in finished]
        if self._starts_in_backward() and any(model.has_begun for model in others):
            raise GradientError(
                "another model of this process group has begun to reduce its gradients, and would "
                "be mixed up with this one: call streammega.finish_grad_sync([first, second]) with "
                "all models of a group, or give each a group of its own"
            )
        self._together = weakref.WeakSet(models)

    def sort(self, models: Sequence[Model]) -> list[Model]:
        """Some models of the group in this order."""
        place = {id(model): number for number, model in enumerate(self._alive())}
        return sorted(models, key=lambda model: place[id(model)])

    def _starts_in_backward(self) -> bool:
        models = list(self._alive())
        return len(models) == 1 or all(model in self._together for model in models)

    def _alive(self) -> Iterator[Starter]:
        """The models that there are still; this keeps none of them."""
        for reference in self._models:
            model = reference()
            if model is not None:
                yield model


# Wrappers of one group need not know of each other, so the group itself leads to their order. Weak:
# it keeps no group alive.
_orders: weakref.WeakKeyDictionary[ProcessGroup, StartOrder] = weakref.WeakKeyDictionary()


def start_order_of(group: ProcessGroup | None) -> StartOrder:
    """The order of a group; one of its own for a model without a group."""
    if group is None:
        return StartOrder(None)
    if group not in _orders:
        _orders[group] = StartOrder(group)
    return _orders[group]


def _make_same(group: ProcessGroup) -> ProcessGroup:
    """Another process group of the same ranks, backends and timeout. Its ranks call this together;
    ranks of other groups need not.
    """
    backend = group._get_backend(group._device_types[0])
    timeout: timedelta | None = None
    # a backend need not say its timeout
    with contextlib.suppress(AttributeError, RuntimeError):
        timeout = backend.options._timeout
    made = dist.new_group(
        dist.get_process_group_ranks(group),
        timeout=timeout,
        backend=dist.get_backend_config(group),
        use_local_synchronization=True,
        group_desc="gradients",
    )
    assert isinstance(made, ProcessGroup)
    return made
