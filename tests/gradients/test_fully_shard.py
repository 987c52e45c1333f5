"""Loops of one's own whose model and optimizer torch's fully_shard divides: what docs/loops.md
says of them, and their states on any ranks.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from streammega import BucketedDataParallel
from tests.support.gang import Gang, on_ranks

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "foreach": False}),
    "AdamW fused": (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    "AdamW amsgrad": (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}),
    "SGD": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.05, "initial_accumulator_value": 0.1}),
}
NARROW = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
"""Computes in bf16; parameters and sums of gradients are fp32."""
HALF = 2
STEPS = 4


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
            self.backward(torch.randn(4, 7, generator=of_step), is_last=False)
            self.backward(torch.randn(4, 7, generator=of_step), is_last=True)
            nn.utils.clip_grad_norm_(self.module.parameters(), 0.5)
            self.optimizer.step()
            self.optimizer.zero_grad()
        wholes = [
            parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            for parameter in self.module.parameters()
        ]
        return [whole.flatten().tolist() for whole in wholes]

    def backward(self, x: Tensor, *, is_last: bool) -> None:
        """Add the gradients of a micro-batch."""
        if self.replicated is None:
            self.module.set_requires_gradient_sync(is_last)
            self.module(x).float().square().mean().backward()
            return
        with contextlib.nullcontext() if is_last else self.replicated.no_sync():
            self.replicated(x).square().mean().backward()
        if is_last:
            self.replicated.finish_grad_sync()

    def save(self, folder: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of one process by itself
            dcp.save(self.state(), checkpoint_id=folder, no_dist=not dist.is_initialized())

    def load(self, folder: Path) -> None:
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
    return Run(kind, sharded, narrow).steps(0, STEPS)


def save_half(rank: int, kind: str, sharded: bool, folder: Path, narrow: bool = False) -> None:
    run = Run(kind, sharded, narrow)
    run.steps(0, HALF)
    run.save(folder)


def go_on(
    rank: int, kind: str, sharded: bool, folder: Path, narrow: bool = False
) -> list[list[float]]:
    """Parameters at the end of a run that another one began, with other rates before."""
    run = Run(kind, sharded, narrow)
    for group in run.optimizer.param_groups:
        group["lr"] = 123.0
    run.load(folder)
    assert {group["lr"] for group in run.optimizer.param_groups} == {0.002 * HALF}
    return run.steps(HALF, STEPS)


@pytest.mark.guarantee("optimizer-state-goes", "sharded-trains-as-one")
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_state_goes_on_with_other_ranks_and_between_sharded_and_replicated(
    gang: Gang, tmp_path: Path, kind: str
) -> None:
    """Each link loads what the one before saved. All clip by the same norm."""
    (expected,) = gang.run(1, uninterrupted, kind, False)
    first, second = tmp_path / "first", tmp_path / "second"
    gang.run(2, save_half, kind, True, first)
    ends = gang.run(3, go_on, kind, True, first) + gang.run(2, go_on, kind, False, first)
    gang.run(1, save_half, kind, False, second)
    for end in ends + gang.run(2, go_on, kind, True, second):
        for ours, theirs in zip(end, expected, strict=True):
            assert ours == pytest.approx(theirs, abs=1e-5)


@pytest.mark.guarantee("optimizer-state-goes")
def test_a_run_that_computes_in_bf16_goes_on_with_its_fp32_parameters_to_the_bit(
    gang: Gang, tmp_path: Path
) -> None:
    expected = gang.run(2, uninterrupted, "AdamW fused", True, True)
    gang.run(2, save_half, "AdamW fused", True, tmp_path, True)
    assert gang.run(2, go_on, "AdamW fused", True, tmp_path, True) == expected


@pytest.mark.guarantee("optimizer-state-goes")
@on_ranks(2)
def test_a_state_is_saved_in_the_background(rank: int, tmp_path: Path) -> None:
    """Training goes on meanwhile."""
    run = Run("AdamW fused", True, narrow=True)
    run.steps(0, HALF)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # of its own, or messages of saving would meet those of training
        group = dist.new_group(backend="gloo")
        pending: Any = dcp.async_save(run.state(), checkpoint_id=tmp_path, process_group=group)
    expected = run.steps(HALF, STEPS)
    pending.result()
    again = Run("AdamW fused", True, narrow=True)
    again.load(tmp_path)
    assert again.steps(HALF, STEPS) == expected


@pytest.mark.guarantee("sharded-clips")
@on_ranks(2)
def test_gradients_are_clipped_by_the_norm_of_the_mean_over_ranks(rank: int) -> None:
    """Of other data on each rank, as by one rank alone that has the data of both."""
    run = Run("SGD", True)
    batches = [torch.randn(4, 7, generator=torch.Generator().manual_seed(n)) for n in range(2)]
    run.backward(batches[rank], is_last=True)
    alone = Odd()
    alone(torch.cat(batches)).square().mean().backward()
    expected = nn.utils.clip_grad_norm_(alone.parameters(), 0.01)
    norm = nn.utils.clip_grad_norm_(run.module.parameters(), 0.01)
    assert isinstance(norm, DTensor)
    assert float(norm.full_tensor()) == pytest.approx(float(expected), rel=1e-5)
    for ours, theirs in zip(run.module.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, rtol=0, atol=1e-6)


@pytest.mark.guarantee("sharded-clips")
@on_ranks(2)
def test_a_gradient_that_is_not_finite_on_one_rank_is_an_error_on_all(rank: int) -> None:
    run = Run("SGD", True)
    run.backward(torch.full((4, 7), float("nan") if rank == 1 else 1.0), is_last=True)
    with pytest.raises(RuntimeError, match="non-finite"):
        nn.utils.clip_grad_norm_(run.module.parameters(), 0.5, error_if_nonfinite=True)


def shard_a_scalar() -> None:
    module = nn.Module()
    module.scale = nn.Parameter(torch.ones(()))
    fully_shard(module)


def shard_a_convolution() -> None:
    convolution: Any = nn.Conv2d(4, 4, 3)
    fully_shard(convolution.to(memory_format=torch.channels_last))


def step_by_adafactor() -> None:
    module: Any = fully_shard(nn.Linear(8, 8))
    module(torch.ones(1, 8)).sum().backward()
    torch.optim.Adafactor(module.parameters()).step()


REFUSED: dict[str, tuple[Callable[[], None], str]] = {
    "scalar": (shard_a_scalar, "scalar"),
    "channels_last": (shard_a_convolution, "contiguous"),
    "Adafactor": (step_by_adafactor, "placement"),
}


@pytest.mark.guarantee("sharded-trains-as-one")
@pytest.mark.parametrize("what", REFUSED)
@on_ranks(2)
def test_what_cannot_be_divided_is_refused(rank: int, what: str) -> None:
    call, message = REFUSED[what]
    with pytest.raises((ValueError, RuntimeError, NotImplementedError), match=message):
        call()


@pytest.mark.xfail(
    strict=True,
    reason="torch's set_optimizer_state_dict takes the settings of any saved group that shares one "
    "parameter; tools/examples/fully_shard.py says to set them again",
)
@on_ranks(1)
def test_a_state_of_other_groups_is_refused_or_leaves_their_settings(rank: int) -> None:
    module = nn.Linear(8, 8)
    module(torch.ones(1, 8)).sum().backward()
    groups: Any = [{"params": [module.weight], "weight_decay": 0.1}, {"params": [module.bias]}]
    saved = torch.optim.AdamW(groups)
    saved.step()
    loaded = torch.optim.AdamW(module.parameters(), weight_decay=0.5)
    set_optimizer_state_dict(module, loaded, get_optimizer_state_dict(module, saved))
    assert loaded.param_groups[0]["weight_decay"] == 0.5
