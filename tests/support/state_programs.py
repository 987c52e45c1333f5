"""What tests of a state that is divided by fully_shard run as ranks: a loop of one's own, which
saves and loads by torch.distributed.checkpoint.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from streammega import BucketedDataParallel
from tests.support.sharded_programs import whole

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "foreach": False}),
    "AdamW fused": (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    "AdamW amsgrad": (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}),
    "SGD": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.05, "initial_accumulator_value": 0.1}),
}
NARROW = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
"""Computes in bf16; parameters and sums of gradients are fp32."""


class Odd(nn.Module):
    """Parameters of odd shapes, of one to three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.cube = nn.Parameter(torch.randn(3, 5, 7))
        self.layer = nn.Linear(7, 11)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.einsum("bi,oki->bk", x, self.cube) @ self.cube.sum(0) * self.scale
        y: Tensor = self.layer(x)
        return y


class Run:
    """A model and its optimizer, whose steps are the same on any number of ranks: all get the same
    batch.
    """

    def __init__(self, kind: str, sharded: bool, narrow: bool = False) -> None:
        make, settings = OPTIMIZERS[kind]
        self.module: Any = Odd()
        self.replicated: BucketedDataParallel | None = None
        if sharded:
            policy = NARROW if narrow else MixedPrecisionPolicy()
            fully_shard(self.module.layer, mp_policy=policy)
            fully_shard(self.module, mp_policy=policy)
        else:
            self.replicated = BucketedDataParallel(self.module)
        parameters = list(self.module.parameters())
        matrices = [parameter for parameter in parameters if parameter.dim() > 1]
        vectors = [parameter for parameter in parameters if parameter.dim() == 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors}]
        self.optimizer = make(groups, **settings)

    def steps(self, first: int, last: int) -> list[list[float]]:
        """The whole parameters after steps of two micro-batches each, with clipped gradients."""
        for step in range(first, last):
            of_step = torch.Generator().manual_seed(step)  # the same batch on each rank
            for group in self.optimizer.param_groups:
                group["lr"] = 0.002 * (step + 1)
            self._backward(torch.randn(4, 7, generator=of_step), is_last=False)
            self._backward(torch.randn(4, 7, generator=of_step), is_last=True)
            nn.utils.clip_grad_norm_(self.module.parameters(), 0.5)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return [whole(parameter).flatten().tolist() for parameter in self.module.parameters()]

    def _backward(self, x: Tensor, *, is_last: bool) -> None:
        if self.replicated is None:
            self.module.set_requires_gradient_sync(is_last)
            self.module(x).float().square().mean().backward()
            return
        self.replicated.reducer.sync = is_last
        self.replicated(x).square().mean().backward()
        if is_last:
            self.replicated.finish_grad_sync()

    def save(self, folder: str) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of one process by itself
            dcp.save(self.state(), checkpoint_id=folder, no_dist=not dist.is_initialized())

    def load(self, folder: str) -> None:
        state = self.state()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(state, checkpoint_id=folder, no_dist=not dist.is_initialized())
        set_state_dict(
            self.module,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.module, self.optimizer)
        return {"model": model, "optimizer": optimizer}


def uninterrupted(
    rank: int, kind: str, sharded: bool = True, narrow: bool = False
) -> list[list[float]]:
    return Run(kind, sharded, narrow).steps(0, 6)


def save_after(
    rank: int, kind: str, sharded: bool, folder: str, steps: int, narrow: bool = False
) -> None:
    run = Run(kind, sharded, narrow)
    run.steps(0, steps)
    run.save(folder)


def go_on(
    rank: int, kind: str, sharded: bool, folder: str, steps: int, narrow: bool = False
) -> list[list[float]]:
    """Parameters after the sixth step of a run that another one began, with other rates before."""
    run = Run(kind, sharded, narrow)
    for group in run.optimizer.param_groups:
        group["lr"] = 123.0
    run.load(folder)
    assert {group["lr"] for group in run.optimizer.param_groups} == {0.002 * steps}
    return run.steps(steps, 6)


def asynchronous(rank: int, folder: str) -> list[list[float]]:
    """Save in the background, train on meanwhile, and go on from what was saved."""
    run = Run("AdamW fused", True, narrow=True)
    run.steps(0, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # of its own, or messages of saving would meet those of training
        group = dist.new_group(backend="gloo")
        pending: Any = dcp.async_save(run.state(), checkpoint_id=folder, process_group=group)
    run.steps(3, 6)
    pending.result()
    again = Run("AdamW fused", True, narrow=True)
    again.load(folder)
    return again.steps(3, 6)


def bad_on_one_rank(rank: int) -> str:
    """The error of a norm over gradients of which one rank has one that is not finite."""
    run = Run("SGD", True)
    run._backward(torch.full((4, 7), float("nan") if rank == 1 else 1.0), is_last=True)
    try:
        nn.utils.clip_grad_norm_(run.module.parameters(), 0.5, error_if_nonfinite=True)
    except RuntimeError as error:
        return str(error)
    return ""


def refused_scalar(rank: int) -> str:
    """The error of a parameter without dimensions, which has no rows to divide."""
    module = nn.Module()
    module.scale = nn.Parameter(torch.ones(()))
    try:
        fully_shard(module)
    except ValueError as error:
        return str(error)
    return ""
