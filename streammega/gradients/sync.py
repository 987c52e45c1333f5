"""The end of a step's backward: what is left starts, all wait, gradients are looked at and given to
optimizers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from streammega.gradients.checks import raise_if_bad
from streammega.gradients.reducer import GradReducer


class ReducedModel(Protocol):
    """What the end of a step needs of a model; BucketedDataParallel is one."""

    reducer: GradReducer

    def inverse_of_tokens(self, num_tokens: Tensor) -> Tensor:
        """1 / the tokens of the step over all ranks, float32 []."""


@torch.no_grad()
def finish_grad_sync(models: Sequence[ReducedModel], num_tokens: Tensor | None = None) -> None:
    """`finish_grad_sync` of several models that this rank holds, such as virtual pipeline stages.

    Together, since a stage that shares a parameter with another rank's may be the first here and
    the last there, and since the collectives of one group have one order. Whatever else is summed
    over the group comes after its buckets: how many of those started in backward differs from rank
    to rank.
    """
    reducers = _in_start_order([model.reducer for model in models])
    for reducer in reducers:
        reducer.complete()
    for reducer in reducers:
        reducer.starts.add_tied()
    for reducer in reducers:
        reducer.starts.start_rest()
    # Last on all ranks of a group, whose collectives have one order.
    for reducer in reducers:
        reducer.starts.start_tied()
    reports = [reducer.report() for reducer in reducers]
    factor = None if num_tokens is None else models[0].inverse_of_tokens(num_tokens)
    for reducer in reducers:
        reducer.wait()
    raise_if_bad(reports)
    for reducer in reducers:
        reducer.hand_over(factor)


def _in_start_order(reducers: Sequence[GradReducer]) -> list[GradReducer]:
    """Those of one group after those of another, each group's in its order.

    Raises GradientError where one is missing.
    """
    orders = {id(reducer.order): reducer.order for reducer in reducers}
    ordered: list[GradReducer] = []
    for order in orders.values():
        of_group = [reducer for reducer in reducers if reducer.order is order]
        order.finish(of_group)
        ordered += order.sort(of_group)
    return ordered
