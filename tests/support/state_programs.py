"""What tests of the sharded optimizer's state run as ranks."""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from streammega import BucketedDataParallel, ShardedOptimizer
from streammega.errors import StateError

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "foreach": False}),
    "AdamW fused": (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    "AdamW foreach": (torch.optim.AdamW, {"lr": 0.01, "foreach": True}),
    "AdamW amsgrad": (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}),
    "SGD": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.01}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.05, "initial_accumulator_value": 0.1}),
}


class Odd(nn.Module):
    """Parameters of odd shapes, of none to three dimensions, and one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.cube = nn.Parameter(torch.randn(3, 5, 7))
        self.layer = nn.Linear(7, 11)
        self.scale = nn.Parameter(torch.ones(()))
        self.unused = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.einsum("bi,oki->bk", x, self.cube) @ self.cube.sum(0) * self.scale
        y: Tensor = self.layer(x)
        return y


def _decay(name: str, parameter: Tensor) -> dict[str, float]:
    return {"weight_decay": 0.1 if parameter.dim() > 1 else 0.0}


class Run:
    """A model and its optimizer, whose steps are the same on any number of ranks: all get the same
    batch.
    """

    def __init__(self, kind: str, sharded: bool, dtype: torch.dtype = torch.float32) -> None:
        make, settings = OPTIMIZERS[kind]
        self.model = BucketedDataParallel(Odd().to(dtype), sharded=sharded, bucket_size=60)
        self.dtype = dtype
        if sharded:
            self.optimizer: Any = ShardedOptimizer(self.model, make, settings_of=_decay, **settings)
        else:
            self.optimizer = make(self._groups(), **settings)

    def _groups(self) -> list[dict[str, Any]]:
        """Parameters by their weight decay, as torch's optimizers take them."""
        groups: list[dict[str, Any]] = []
        for decay in ({"weight_decay": 0.1}, {"weight_decay": 0.0}):
            parameters = []
            for name, parameter in self.model.module.named_parameters():
                if _decay(name, parameter) == decay:
                    parameters.append(parameter)
            groups.append({"params": parameters, **decay})
        return groups

    def steps(self, first: int, last: int) -> list[list[float]]:
        for step in range(first, last):
            of_step = torch.Generator().manual_seed(step)  # the same batch on each rank
            x = torch.randn(4, 7, generator=of_step).to(self.dtype)
            for group in self.optimizer.param_groups:
                group["lr"] = 0.002 * (step + 1)
            self.model(x).float().square().mean().backward()
            self.model.finish_grad_sync()
            self.optimizer.step()
            self.optimizer.zero_grad()
        if isinstance(self.optimizer, ShardedOptimizer):
            self.optimizer.finish_param_sync()
        return [
            parameter.detach().float().flatten().tolist() for parameter in self.model.parameters()
        ]

    def save(self, folder: str) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of one process by itself
            dcp.save(self._state(), checkpoint_id=folder, no_dist=not dist.is_initialized())

    def load(self, folder: str, partial: bool = False) -> None:
        state = self._state()
        planner = dcp.DefaultLoadPlanner(allow_partial_load=partial)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(
                state, checkpoint_id=folder, planner=planner, no_dist=not dist.is_initialized()
            )
            if not isinstance(self.optimizer, ShardedOptimizer):
                from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

                set_optimizer_state_dict(self.model.module, self.optimizer, state["optimizer"])

    def _state(self) -> dict[str, Any]:
        if isinstance(self.optimizer, ShardedOptimizer):
            return {"model": self.model, "optimizer": self.optimizer}
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        return {
            "model": self.model,
            "optimizer": get_optimizer_state_dict(self.model.module, self.optimizer),
        }


def uninterrupted(rank: int, kind: str, dtype: torch.dtype) -> list[list[float]]:
    return Run(kind, sharded=True, dtype=dtype).steps(0, 6)


def save_after(
    rank: int, kind: str, sharded: bool, dtype: torch.dtype, folder: str, steps: int
) -> None:
    run = Run(kind, sharded, dtype)
    run.steps(0, steps)
    run.save(folder)


def go_on(
    rank: int,
    kind: str,
    sharded: bool,
    dtype: torch.dtype,
    folder: str,
    steps: int,
    partial: bool = False,
) -> list[list[float]]:
    """Parameters after the sixth step of a run that another one began; of another implementation,
    and other settings before.
    """
    run = Run(kind, sharded, dtype)
    for group in run.optimizer.param_groups:
        group["lr"] = 123.0
    run.load(folder, partial)
    if sharded:
        _check_settings(run.optimizer, kind, steps)
    return run.steps(steps, 6)


def _check_settings(optimizer: ShardedOptimizer, kind: str, steps: int) -> None:
    """Which kernels compute is this run's; rates and decays are those that were saved."""
    _, settings = OPTIMIZERS[kind]
    groups = optimizer.param_groups
    for group in groups:
        for flag in ("fused", "foreach"):
            assert flag not in group or group[flag] == settings.get(flag)
    assert steps == 0 or groups[0]["lr"] == 0.002 * steps
    decays = {}
    for group, names in zip(groups, optimizer.names_of_groups, strict=True):
        for name in names:
            decays[name] = group["weight_decay"]
    assert decays["cube"] == 0.1
    assert decays["scale"] == 0.0


def narrow_from_wide(rank: int, folder: str) -> list[float]:
    """How far fp32 main parameters are from those of the model, of a bf16 run that loads a
    replicated fp32 one.
    """
    run = Run("AdamW", True, torch.bfloat16)
    run.load(folder, partial=True)
    wide = Run("AdamW", False)
    wide.steps(0, 3)
    theirs = dict(wide.model.module.named_parameters())
    worst = 0.0
    for piece in run.optimizer.pieces:
        whole = theirs[piece.slot.name].detach().flatten()
        part = whole[piece.start : piece.stop].bfloat16().float()
        off = (part - piece.main.detach()).abs()
        worst = max(worst, float(off.max()))
    return [worst]


def loaded_into_the_model(rank: int, how: str) -> list[float]:
    """Some bf16 parameters after a step of no learning rate, which were loaded or written after the
    optimizer was made.
    """
    module = nn.Linear(4, 4).to(torch.bfloat16)
    model = BucketedDataParallel(module, sharded=True)
    optimizer = ShardedOptimizer(model, torch.optim.SGD, lr=0.0)
    sevens = {name: torch.full_like(value, 7.0) for name, value in module.state_dict().items()}
    if how == "wrapper":
        model.load_state_dict(sevens)
    elif how == "module":
        module.load_state_dict(sevens)
    else:
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.fill_(7.0)
    model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
    model.finish_grad_sync()
    optimizer.step()
    state = module.state_dict()
    values: list[float] = state["weight"].flatten().tolist() + state["bias"].tolist()
    return values


def main_parameters_keep_their_tails(rank: int) -> float:
    """How far main parameters move when what they are rounded to is written into the model."""
    run = Run("AdamW", True, torch.bfloat16)
    run.steps(0, 2)
    before = [piece.main.detach().clone() for piece in run.optimizer.pieces]
    rounded = {name: value.clone() for name, value in run.model.state_dict().items()}
    run.model.load_state_dict(rounded)
    run.optimizer._take_written()
    furthest = 0.0
    for main_before, piece in zip(before, run.optimizer.pieces, strict=True):
        moved = (main_before - piece.main.detach()).abs()
        furthest = max(furthest, float(moved.max()))
    return furthest


def by_torch_save(rank: int, folder: str) -> str:
    """Save this rank's parts to a file, load them; on other ranks that is refused."""
    run = Run("AdamW", True)
    path = os.path.join(folder, f"{rank}.pt")
    if not os.path.exists(path):
        run.steps(0, 2)
        torch.save({"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}, path)
        expected = run.steps(2, 4)
        run = Run("AdamW", True)
        state = torch.load(path, weights_only=False)
        run.model.load_state_dict(state["model"])
        run.optimizer.load_state_dict(state["optimizer"])
        return "same" if run.steps(2, 4) == expected else "other"
    try:
        run.optimizer.load_state_dict(torch.load(path, weights_only=False)["optimizer"])
    except StateError as error:
        return str(error)
    return ""


def asynchronous(rank: int, folder: str) -> list[list[float]]:
    """Save in the background, train on meanwhile, and go on from what was saved."""
    run = Run("AdamW fused", True, torch.bfloat16)
    run.steps(0, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # of its own, or messages of saving would meet those of training
        group = dist.new_group(backend="gloo")
        pending: Any = dcp.async_save(run._state(), checkpoint_id=folder, process_group=group)
    run.steps(3, 6)
    pending.result()
    again = Run("AdamW fused", True, torch.bfloat16)
    again.load(folder)
    return again.steps(3, 6)
