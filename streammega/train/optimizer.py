"""The optimizer of a run: AdamW, with its state on every rank or divided over ranks."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from streammega.gradients.data_parallel import BucketedDataParallel
from streammega.gradients.sharded_optimizer import ShardedOptimizer
from streammega.parallel import Ranks
from streammega.train.config import RunConfig

Optimizer = torch.optim.Optimizer | ShardedOptimizer


def make_optimizer(
    config: RunConfig, ranks: Ranks, chunks: Sequence[nn.Module], wrapped: Sequence[nn.Module]
) -> Optimizer:
    """AdamW over this rank's parameters; vectors are not decayed.

    chunks: the bare stages. wrapped: the same in their data-parallel wrappers.
    """
    train = config.train
    which = config.parallel.optimizer
    settings: dict[str, Any] = {
        "lr": train.lr,
        "betas": (train.beta1, train.beta2),
        "fused": which == "sharded",
    }
    if which == "sharded":
        return _make_sharded(wrapped, train.weight_decay, **settings)
    groups = _groups(chunks, train.weight_decay)
    if which == "zero" and ranks.group("dp-cp") is not None:
        return _make_zero(groups, ranks, **settings)
    return torch.optim.AdamW(groups, **settings)


def _make_sharded(
    wrapped: Sequence[nn.Module], weight_decay: float, **settings: Any
) -> ShardedOptimizer:
    models = [model for model in wrapped if isinstance(model, BucketedDataParallel)]

    def decay(_: str, parameter: nn.Parameter) -> dict[str, float]:
        is_matrix = parameter.dim() > 1
        return {"weight_decay": weight_decay if is_matrix else 0.0}

    return ShardedOptimizer(models, torch.optim.AdamW, settings_of=decay, **settings)


def _groups(chunks: Sequence[nn.Module], weight_decay: float) -> list[dict[str, Any]]:
    """Parameters of all stages, matrices and vectors apart; those that stages share are in once."""
    parameters: dict[int, nn.Parameter] = {}
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameters[id(parameter)] = parameter
    matrices = [parameter for parameter in parameters.values() if parameter.dim() > 1]
    vectors = [parameter for parameter in parameters.values() if parameter.dim() <= 1]
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _make_zero(
    groups: Sequence[Mapping[str, Any]], ranks: Ranks, **settings: Any
) -> torch.optim.Optimizer:
    """torch's ZeroRedundancyOptimizer of AdamW."""
    with warnings.catch_warnings():
        # its package compiles other optimizers when it is imported
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import ZeroRedundancyOptimizer
    # Its constructor takes one group; the others are added.
    first, *others = groups
    zero = ZeroRedundancyOptimizer(
        first["params"],
        torch.optim.AdamW,
        process_group=ranks.group("dp-cp"),
        weight_decay=first["weight_decay"],
        **settings,
    )
    for group in others:
        zero.add_param_group(dict(group))
    return zero
