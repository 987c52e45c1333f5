"""Training with the optimizer's state divided over ranks, and the same training by one rank alone.

`make_sharded` is all that knows how state is divided: whatever divides it must pass the same tests.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional

Settings = Callable[[str, nn.Parameter], dict[str, Any]]
LATE = timedelta(seconds=1)
"""How long the first rank waits before it steps, for what the others do then."""


class Sharded:
    """Training with state that is divided over all ranks.

    model: what is called, and has the parameters. optimizer: has torch's methods.
    """

    def __init__(
        self, module: nn.Module, optimizer: Any, settings_of: Settings | None, settings: Any
    ) -> None:
        # torch warns of views, which nothing here changes in place
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        for child in module.children():
            fully_shard(child)
        self.model: Any = fully_shard(module)
        groups: dict[str, dict[str, Any]] = {}
        for name, parameter in module.named_parameters():
            own = settings_of(name, parameter) if settings_of else {}
            groups.setdefault(repr(own), {"params": [], **own})["params"].append(parameter)
        self.optimizer: Any = optimizer(list(groups.values()), **settings)

    def backward(self, loss: Tensor, *, is_last: bool = True) -> None:
        """Add the gradients of a micro-batch. Those of a step are averaged over ranks in its last."""
        self.model.set_requires_gradient_sync(is_last)
        loss.backward()

    def state(self) -> dict[str, Any]:
        """The optimizer's, in the form of torch's get_optimizer_state_dict."""
        return get_optimizer_state_dict(self.model, self.optimizer)

    def load(self, state: dict[str, Any]) -> None:
        """Take a state of the optimizer over."""
        set_optimizer_state_dict(self.model, self.optimizer, state)


def make_sharded(
    module: nn.Module, optimizer: Any, settings_of: Settings | None = None, **settings: Any
) -> Sharded:
    """A module that is trained with state divided over all ranks.

    settings_of: of a parameter; those of equal settings form a group.
    """
    return Sharded(module, optimizer, settings_of, settings)


class Alone:
    """The same training by one rank that has the data of all."""

    def __init__(self, module: nn.Module, optimizer: Any, **settings: Any) -> None:
        self.model = module
        self.optimizer = optimizer(module.parameters(), **settings)

    def backward(self, step: int) -> list[float]:
        """Add the gradients of the mean over ranks; the loss of each rank."""
        ranks = range(dist.get_world_size())
        # one forward, for modules that change in each
        output = self.model(torch.cat([_input(self.model, rank, step) for rank in ranks]))
        losses = output.square().flatten(1).mean(1).view(len(ranks), -1).mean(1)
        losses.mean().backward()
        values: list[float] = losses.tolist()
        return values


def _input(model: nn.Module, rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(3, 4, 8, generator=generator).to(next(model.parameters()).dtype)


def _loss(model: nn.Module, rank: int, step: int) -> Tensor:
    loss: Tensor = model(_input(model, rank, step)).square().mean()
    return loss


def _net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).to(dtype)


def whole(tensor: Any) -> Tensor:
    """All of a tensor of which ranks have parts."""
    whole: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach()


def _off(training: Sharded, alone: Alone) -> float:
    """How far the weights are from those of one rank alone."""
    expected = alone.model.state_dict()
    worst = 0.0
    for name, tensor in training.model.state_dict().items():
        worst = max(worst, float((whole(tensor) - expected[name]).abs().max()))
    return worst


def _decay(name: str, parameter: nn.Parameter) -> dict[str, float]:
    return {"weight_decay": 0.01 if parameter.dim() > 1 else 0.0}


@contextlib.contextmanager
def _first_rank_late(folder: str, name: str) -> Iterator[None]:
    """The first rank, which has the first part of all that is divided, begins the block when
    another has ended it, or after LATE.
    """
    store = dist.FileStore(f"{folder}/late", dist.get_world_size())
    if dist.get_rank() == 0:
        with contextlib.suppress(RuntimeError):
            store.wait([name], LATE)
    yield
    store.set(name, "ended")


# What uses its parameters in another way than by calling the module that has them.


class _Attention(nn.MultiheadAttention):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        output: Tensor = super().forward(x, x, x, need_weights=False)[0]
        return output


class _List(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = torch.tanh(x @ self.weights[0]) @ self.weights[1]
        return output


class _Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.child.weight, self.child.bias)


def _attention(layer: nn.Module, attention: nn.MultiheadAttention) -> nn.Module:
    """A layer of which only this is trained: nothing else waits for parameters before it."""
    layer.requires_grad_(False)
    attention.out_proj.requires_grad_(True)
    return layer


def _attention_alone() -> nn.Module:
    layer = _Attention(8, 2, batch_first=True)
    return _attention(layer, layer)


def _encoder_layer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True)
    return _attention(layer, layer.self_attn)


USES: dict[str, Callable[[], nn.Module]] = {
    "attention": _attention_alone,
    "encoder layer": _encoder_layer,
    "parameter list": _List,
    "child's weight": _Functional,
    "weight norm": lambda: nn.utils.weight_norm(nn.Linear(8, 8)),
    "spectral norm": lambda: nn.utils.spectral_norm(nn.Linear(8, 8)),
}


def _with_use(name: str) -> nn.Module:
    torch.manual_seed(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some are deprecated
        return nn.Sequential(USES[name]())


def losses_of_uses(rank: int, folder: str) -> dict[str, tuple[float, float]]:
    """By the use of parameters, the loss after a step, and the same by one rank alone."""
    losses: dict[str, tuple[float, float]] = {}
    for name in USES:
        alone = Alone(_with_use(name), torch.optim.SGD, lr=0.5)
        training = make_sharded(_with_use(name), torch.optim.SGD, lr=0.5)
        training.backward(_loss(training.model, rank, 0))
        alone.backward(step=0)
        alone.optimizer.step()
        with _first_rank_late(folder, name):
            training.optimizer.step()
            loss = _loss(training.model, rank, 1).item()
        losses[name] = loss, alone.backward(step=1)[rank]
        training.model.state_dict()  # waits for what the next step would wait for
    return losses


def read_of_a_part(rank: int, folder: str) -> float:
    """How far a submodule's state_dict is from that of one rank alone, after a step."""
    training = make_sharded(_net(), torch.optim.SGD, lr=0.5)
    alone = Alone(_net(), torch.optim.SGD, lr=0.5)
    alone.backward(step=0)
    alone.optimizer.step()
    training.backward(_loss(training.model, rank, 0))
    with _first_rank_late(folder, "part"):
        training.optimizer.step()
        last = [module for module in training.model.modules() if isinstance(module, nn.Linear)][-1]
        read = {name: tensor.detach().clone() for name, tensor in last.state_dict().items()}
    assert isinstance(alone.model, nn.Sequential)
    worst = 0.0
    for name, tensor in alone.model[-1].state_dict().items():
        worst = max(worst, float((whole(read[name]) - tensor).abs().max()))
    return worst


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "fill": lambda data: data.fill_(7.0),
    "clamp": lambda data: data.clamp_(-0.01, 0.01),
    "copy": lambda data: data.copy_(data * 0.5),
}


def written(rank: int, how: str) -> float:
    """How far narrow weights that were written to are from that after a step of no size."""
    training = make_sharded(_net(torch.bfloat16), torch.optim.SGD, lr=0.0)
    for parameter in training.model.parameters():
        WRITES[how](parameter.data)
    expected = [whole(parameter).clone() for parameter in training.model.parameters()]
    training.backward(_loss(training.model, rank, 0))
    training.optimizer.step()
    weights = training.model.state_dict().values()
    return max(float((whole(a) - b).abs().max()) for a, b in zip(weights, expected, strict=True))


def steps(
    rank: int, optimizer: str, zeroes: bool, dtype: torch.dtype, settings: dict[str, Any]
) -> float:
    """How far weights are from those of one rank alone, after some steps."""
    kind = getattr(torch.optim, optimizer)
    training = make_sharded(_net(dtype), kind, **settings)
    alone = Alone(_net(dtype), kind, **settings)
    for step in range(4):
        training.backward(_loss(training.model, rank, step))
        alone.backward(step)
        for one in (training.optimizer, alone.optimizer):
            one.step()
            if zeroes:
                one.zero_grad()
    return _off(training, alone)


def never_averaged(rank: int) -> float:
    """How far weights moved by a step of gradients that were not averaged over ranks."""
    training = make_sharded(_net(), torch.optim.SGD, lr=1.0)
    training.backward(_loss(training.model, rank, 0), is_last=False)
    training.optimizer.step()
    return _off(training, Alone(_net(), torch.optim.SGD))


def stepped_without_gradients(rank: int) -> float:
    """How far weights moved by a step after zero_grad."""
    training = make_sharded(_net(), torch.optim.SGD, lr=1.0)
    alone = Alone(_net(), torch.optim.SGD, lr=1.0)
    training.backward(_loss(training.model, rank, 0))
    alone.backward(step=0)
    for one in (training.optimizer, alone.optimizer):
        one.step()
        one.zero_grad()
        one.step()
    return _off(training, alone)


def clipped_by_torch(rank: int) -> tuple[float, float, float]:
    """(norm by torch's clip_grad_norm_, that of one rank alone, how far the weights are)."""
    training = make_sharded(_net(), torch.optim.SGD, lr=1.0)
    alone = Alone(_net(), torch.optim.SGD, lr=1.0)
    training.backward(_loss(training.model, rank, 0))
    alone.backward(step=0)
    norms = []
    for one in (training, alone):
        norms.append(float(whole(nn.utils.clip_grad_norm_(one.model.parameters(), 0.01))))
        one.optimizer.step()
    return norms[0], norms[1], _off(training, alone)


def loaded_into_other_groups(rank: int) -> float:
    """The weight decay of the only group that a state of two groups was loaded into."""
    saved = make_sharded(_net(), torch.optim.AdamW, _decay)
    saved.backward(_loss(saved.model, rank, 0))
    saved.optimizer.step()
    training = make_sharded(_net(), torch.optim.AdamW, weight_decay=0.01)
    training.load(saved.state())
    (group,) = training.optimizer.param_groups
    return float(group["weight_decay"])


def groups_without_state(rank: int, folder: str) -> list[float]:
    """The weight decay of matrices and of biases that a torch optimizer loads from a checkpoint."""
    training = make_sharded(_net(), torch.optim.SGD, _decay)
    training.backward(_loss(training.model, rank, 0))
    training.optimizer.step()
    dcp.save({"optimizer": training.state()}, checkpoint_id=folder)
    module = _net()
    parameters = list(module.parameters())
    matrices = [parameter for parameter in parameters if parameter.dim() > 1]
    biases = [parameter for parameter in parameters if parameter.dim() == 1]
    optimizer = torch.optim.SGD([{"params": matrices}, {"params": biases}], weight_decay=9.0)
    state = {"optimizer": get_optimizer_state_dict(module, optimizer)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of one process by itself
        dcp.load(state, checkpoint_id=folder, no_dist=True)
    set_optimizer_state_dict(module, optimizer, state["optimizer"])
    return [group["weight_decay"] for group in optimizer.param_groups]


def unfrozen_later(rank: int) -> tuple[float, bool]:
    """How far weights are from those of one rank alone where a layer is trained from the second
    step on; whether the optimizer's state has that layer.
    """
    modules = [_net(), _net()]
    for module in modules:
        module[-1].requires_grad_(False)
    alone = Alone(modules[0], torch.optim.SGD, lr=0.5, momentum=0.9)
    training = make_sharded(modules[1], torch.optim.SGD, lr=0.5, momentum=0.9)
    for step in range(3):
        if step == 1:
            for module in modules:
                module[-1].requires_grad_(True)
        training.backward(_loss(training.model, rank, step))
        alone.backward(step)
        for one in (training.optimizer, alone.optimizer):
            one.step()
            one.zero_grad()
    return _off(training, alone), "2.weight" in training.state()["state"]


def memory_format_in_a_forward(rank: int) -> bool:
    """Whether a convolution's weight is laid out as it was made."""
    seen: list[bool] = []
    convolution = nn.Conv2d(4, 4, 3)
    module: Any = nn.Sequential(convolution)
    module.to(memory_format=torch.channels_last)
    convolution.register_forward_pre_hook(
        lambda own, _: seen.append(own.weight.is_contiguous(memory_format=torch.channels_last))
    )
    training = make_sharded(module, torch.optim.SGD)
    training.model(torch.ones(1, 4, 5, 5))
    return seen[0]


def outcome(rank: int, program: Callable[..., Any], *arguments: Any) -> Any:
    """What a program gives, or the error by which it is refused."""
    try:
        return program(rank, *arguments)
    except Exception as error:  # of the library that divides state, whichever that is
        return f"{type(error).__name__}: {error}"
