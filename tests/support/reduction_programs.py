"""What tests of the gradient reduction run as ranks: uses of it that are unusual, or wrong."""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from streammega import BucketedDataParallel, finish_grad_sync
from streammega.errors import ConfigError, GradientError
from tests.support.cuda_support import FakeCuda, FakeStream
from tests.support.rank_programs import Expert


def _input(rank: int, step: int = 0) -> Tensor:
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(10 * step + rank))


def _pair(
    count: int, bucket_size: int = 1, **options: Any
) -> tuple[list[Expert], list[BucketedDataParallel]]:
    """Models, and copies of them that are wrapped in buckets of one parameter each."""
    torch.manual_seed(4)
    plain = [Expert() for _ in range(count)]
    copies = [Expert() for _ in range(count)]
    for one, other in zip(plain, copies, strict=True):
        other.load_state_dict(one.state_dict())
    return plain, [
        BucketedDataParallel(model, bucket_size=bucket_size, grad_dtype=torch.float64, **options)
        for model in copies
    ]


def _off(plain: nn.Module, wrapped: BucketedDataParallel, divided_by: float) -> float:
    """How far gradients lie from the sum over ranks, divided."""
    worst = 0.0
    for one, other in zip(plain.parameters(), wrapped.module.parameters(), strict=True):
        total = torch.zeros_like(one) if one.grad is None else one.grad.clone()
        dist.all_reduce(total)
        assert other.grad is not None
        worst = max(worst, float((total / divided_by - other.grad).abs().max()))
    return worst


def tokens_where_a_rank_leaves_a_parameter_out(rank: int) -> float:
    """How far gradients normalised by tokens lie from the true ones."""
    (plain,), (ours,) = _pair(1, average=False)
    for model in (plain, ours):
        model(_input(rank), use=rank == 0).square().sum().backward()
    ours.finish_grad_sync(torch.tensor(2.0 + rank))
    return _off(plain, ours, 5.0)


def models_finished_apart(rank: int, together_first: bool) -> list[float] | str:
    """How far gradients of two models of one group lie, of one graph, finished one after the other;
    or the error.

    together_first: a step before in which they are finished in one call.
    """
    plain, ours = _pair(2)
    for step in range(2 if together_first else 1):
        for models in (plain, ours):
            for model in models:
                model.zero_grad()
            sum(
                model(_input(rank, step), use=rank == 0).square().mean() for model in models
            ).backward()
        if together_first and step == 0:
            finish_grad_sync(ours)
            continue
        try:
            for model in ours:
                model.finish_grad_sync()
        except GradientError as error:
            finish_grad_sync(ours)
            return str(error)
    return [_off(one, other, 2.0) for one, other in zip(plain, ours, strict=True)]


def two_groups_of_two(rank: int) -> list[float]:
    """How far gradients of two models in each of two groups lie, all finished in one call and in
    the order they were made.
    """
    torch.manual_seed(4)
    plain = []
    ours = []
    for group in (None, dist.new_group([0, 1])):
        one, other = _pair(2, group=group)
        plain += one
        ours += other
    for step in range(2):
        for models in (plain, ours):
            for model in models:
                model.zero_grad()
            sum(
                model(_input(rank, step), use=rank == 0).square().mean() for model in models
            ).backward()
        finish_grad_sync(ours)
    return [_off(one, other, 2.0) for one, other in zip(plain, ours, strict=True)]


def abandoned(rank: int) -> list[float]:
    """A gradient after a backward that was given up, and another one."""
    torch.manual_seed(0)
    module = nn.Linear(3, 3)
    model = BucketedDataParallel(module)
    with model.no_sync():
        (100 * model(torch.ones(2, 3))).sum().backward()
    model.zero_grad()
    model(torch.ones(2, 3)).sum().backward()
    model.finish_grad_sync()
    assert module.bias.grad is not None
    return module.bias.grad.tolist()


def zeroed_while_reducing(rank: int) -> None:
    model = BucketedDataParallel(nn.Linear(3, 3), bucket_size=1)
    model(torch.ones(2, 3)).sum().backward()
    try:
        model.zero_grad()
    finally:
        model.finish_grad_sync()


def shared_by_two(rank: int) -> None:
    shared = nn.Linear(3, 3)
    models = [
        BucketedDataParallel(nn.Sequential(shared)),
        BucketedDataParallel(nn.Sequential(shared, nn.Linear(3, 3))),
    ]
    sum(model(torch.ones(1, 3)).sum() for model in models).backward()


def split_over_the_group_itself(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    module = parallelize_module(nn.Linear(8, 6), init_device_mesh("cpu", (2,)), ColwiseParallel())
    BucketedDataParallel(module)


def unfrozen_later(rank: int) -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module[0].requires_grad_(False)
    model = BucketedDataParallel(module)
    module[0].requires_grad_(True)
    model(torch.ones(1, 3)).sum().backward()
    model.finish_grad_sync()


def complex_parameters(rank: int) -> None:
    BucketedDataParallel(nn.Linear(2, 2, dtype=torch.complex64))


def checkpointed_twice(rank: int) -> None:
    """A module that is used in two reentrant checkpoints has two gradients in one backward."""
    from torch.utils.checkpoint import checkpoint

    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model = BucketedDataParallel(module, bucket_size=1)
    x = module[0](torch.ones(1, 3))
    for _ in range(2):
        x = checkpoint(module[1], x, use_reentrant=True)
    try:
        x.sum().backward()
    finally:
        model.finish_grad_sync()


def assigned(rank: int) -> None:
    model = BucketedDataParallel(nn.Linear(2, 2))
    model.load_state_dict(model.state_dict(), assign=True)


def message_of(rank: int, use: Callable[[int], None]) -> str:
    """What a wrong use is told."""
    dist.barrier()  # all are connected before one of them ends
    try:
        use(rank)
    except (ConfigError, GradientError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def right_all_the_same(rank: int) -> dict[str, Any]:
    """Gradients of unusual uses that are right."""
    from torch.utils.checkpoint import checkpoint

    found: dict[str, Any] = {}
    embedding = nn.Embedding(4, 1, sparse=True)
    model = BucketedDataParallel(embedding)
    model(torch.tensor([1, 1, 2 + rank])).sum().backward()
    model.finish_grad_sync()
    assert embedding.weight.grad is not None
    found["sparse"] = embedding.weight.grad.flatten().tolist()

    weight = nn.Linear(2, 1, bias=False)
    model = BucketedDataParallel(weight)
    # as schedules do that take the gradients of weights later, and by themselves
    for step in range(2):
        model.zero_grad()
        with model.no_sync():
            model(torch.ones(1, 2)).sum().backward()
        (weight.weight.grad,) = torch.autograd.grad(
            model(torch.ones(1, 2)).sum() * (rank + 1 + step), [weight.weight]
        )
        model.finish_grad_sync()
        found[f"by hand {step}"] = weight.weight.grad.flatten().tolist()

    layer = nn.Linear(1, 1, bias=False)
    nn.init.ones_(layer.weight)
    model = BucketedDataParallel(layer)
    x = torch.ones(1, 1)
    for _ in range(2):
        x = checkpoint(model, x, use_reentrant=False)
    (x.sum() + model(torch.ones(1, 1)).sum()).backward()  # three forwards, one backward
    model.finish_grad_sync()
    assert layer.weight.grad is not None
    found["forwards"] = float(layer.weight.grad)

    heads = [nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)]
    model = BucketedDataParallel(nn.ModuleList(heads))
    for head in heads:  # two losses that share nothing
        head(torch.full((1, 1), rank + 1.0)).sum().backward()
    model.finish_grad_sync()
    found["losses"] = [float(head.weight.grad) for head in heads if head.weight.grad is not None]
    return found


class Heads(nn.Module):
    """Layers of which a forward uses some."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))

    def forward(self, x: Tensor, used: list[int]) -> Tensor:
        """The first is always used."""
        return torch.stack([self.layers[n](x) for n in {0, *used}]).sum(0).square().mean()


def zero(model: nn.Module, how: str) -> None:
    """As a loop does that zeroes in one of the ways there are."""
    if how == "by the optimizer":
        for parameter in model.parameters():
            parameter.grad = None
    elif how != "not":
        model.zero_grad(set_to_none=how == "to none")


def any_use_beside_ddp(rank: int, ways: list[str], steps: int, wide: bool) -> list[str]:
    """Where gradients are others than those of torch's DDP, in steps of some micro-batches, each of
    which uses some layers.

    wide: accumulate in float64, which is close to DDP; else of two ranks, a sum of which is the
    same in any order, to the bit.
    """
    from torch.nn.parallel import DistributedDataParallel

    theirs = DistributedDataParallel(Heads(), find_unused_parameters=True)
    ours = BucketedDataParallel(
        Heads(), bucket_size=12, grad_dtype=torch.float64 if wide else torch.float32
    )
    off = 1e-5 if wide or dist.get_world_size() > 2 else 0.0
    common = random.Random(1)
    own = random.Random(rank)
    wrong = []
    for step in range(steps):
        how = common.choice(ways)
        count = common.randint(1, 3)
        used = [own.sample([1, 2, 3], own.randint(0, 2)) for _ in range(count)]
        for model in (theirs, ours):
            zero(model, how)
            for n in range(count):
                with model.no_sync() if n < count - 1 else contextlib.nullcontext():
                    model(torch.full((2, 3), 1.0 + rank + step + n), used[n]).backward()
        ours.finish_grad_sync()
        for (name, one), other in zip(
            theirs.module.named_parameters(), ours.module.parameters(), strict=True
        ):
            if one.grad is None or other.grad is None:
                same = one.grad is other.grad
            else:
                same = torch.allclose(one.grad, other.grad, rtol=off, atol=off)
            if not same:
                wrong.append(f"step {step}, zeroed {how}, {count} micro-batches: {name}")
    return wrong


def unused(rank: int, frozen: bool) -> tuple[list[bool], float]:
    """Which parameters have moved in three steps of AdamW with decay, and how far from torch's DDP.

    The second is used by no rank, the third by rank 0 only. frozen: the second is, after it was
    wrapped, and used by all.
    """
    from torch.nn.parallel import DistributedDataParallel

    def make() -> nn.ModuleList:
        torch.manual_seed(2)
        return nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = make()

        def forward(self, x: Tensor) -> Tensor:
            used = [0, *([1] if frozen else []), *([2] if rank == 0 else [])]
            return torch.stack([self.layers[n](x) for n in used]).sum()

    theirs = DistributedDataParallel(Sum(), find_unused_parameters=True)
    our_sum: Any = Sum()
    ours = BucketedDataParallel(our_sum)
    settings: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}
    optimizers = [torch.optim.AdamW(model.parameters(), **settings) for model in (theirs, ours)]
    before = [parameter.detach().clone() for parameter in ours.parameters()]
    if frozen:
        our_sum.layers[1].requires_grad_(False)
        theirs = DistributedDataParallel(theirs.module, find_unused_parameters=True)
        theirs.module.layers[1].requires_grad_(False)
        theirs = DistributedDataParallel(theirs.module, find_unused_parameters=True)
    for _ in range(3):
        for model, optimizer in zip((theirs, ours), optimizers, strict=True):
            model.zero_grad()
            model(torch.full((2, 3), rank + 1.0)).backward()
            if model is ours:
                ours.finish_grad_sync()
            optimizer.step()
    moved = [not torch.equal(a, b) for a, b in zip(before, ours.parameters(), strict=True)]
    off = max(
        float((a - b).detach().abs().max())
        for a, b in zip(theirs.parameters(), ours.parameters(), strict=True)
    )
    return moved, off


def sequence_parallel_norm(rank: int) -> tuple[float, list[float]]:
    """A clipped norm and a gradient of a replicated DTensor, of a model given by its ranks."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    from streammega import ParallelLayout, Ranks

    torch.manual_seed(5)
    module = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 6, bias=False))
    ranks = Ranks(ParallelLayout(tp=2))
    group = ranks.group("tp")
    assert group is not None
    mesh = DeviceMesh.from_group(group, "cpu")
    norm = module[0]
    for name, parameter in list(norm.named_parameters()):
        setattr(
            norm, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Replicate()]))
        )
    parallelize_module(module, mesh, {"1": ColwiseParallel(output_layouts=None)})
    model = BucketedDataParallel(module, ranks=ranks, check_gradients=False)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            whole = torch.arange(float(parameter.numel())).view(parameter.shape)
            own = whole.chunk(2)[rank] if name == "1.weight" else whole
            parameter.grad = None
            slot = next(slot for slot in model.reducer.slots() if slot.name == name)
            slot.main_grad.copy_(own)
            slot.count = 1
            assert local.shape == own.shape
    model.finish_grad_sync()
    return float(model.clip_grad_norm_(1.0)), []


def compiled(rank: int, how: str) -> list[float]:
    """How far parameters are from those of an eager model after each of three steps.

    how: the module is compiled before it is wrapped, as a whole graph, in place after it, or with
    its wrapper.
    """
    import warnings

    warnings.simplefilter("ignore")
    whole = how == "whole graph"

    def make(compiles: bool) -> tuple[Any, BucketedDataParallel, Any]:
        torch.manual_seed(6)
        module: Any = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6), nn.LayerNorm(6))
        before = compiles and how in ("before", "whole graph")
        given: Any = module
        if before:
            given = torch.compile(module, backend="aot_eager", fullgraph=whole)
        model = BucketedDataParallel(given, bucket_size=50)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        if compiles and how == "in place":
            module.compile(backend="aot_eager")
        called = (
            torch.compile(model, backend="aot_eager") if compiles and how == "wrapper" else model
        )
        return called, model, optimizer

    sides = [make(compiles) for compiles in (False, True)]
    off = []
    for step in range(3):
        for called, model, optimizer in sides:
            for micro in range(2):
                x = torch.randn(
                    4, 6, generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank)
                )
                if micro == 0:
                    with model.no_sync():
                        called(x).square().mean().backward()
                else:
                    called(x).square().mean().backward()
            model.finish_grad_sync()
            optimizer.step()
            model.zero_grad()
        pairs = zip(*(model.parameters() for _, model, _ in sides), strict=True)
        off.append(max(float((a - b).detach().abs().max()) for a, b in pairs))
    torch._dynamo.reset()
    return off


class _AddsItself(torch.autograd.Function):
    """A linear layer whose backward adds the weight's gradient to its buffer, as
    fused kernels do.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight = weight
        product: Tensor = x @ weight.t()
        return product

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        ctx.weight.main_grad.add_(grad.t() @ x)
        ctx.weight.grad_added_to_main_grad = True
        return grad @ weight, torch.full_like(weight, 1e9)  # of a value that is never looked at


def main_grads(rank: int, micro_batches: int) -> tuple[float, str]:
    """How far a model whose kernels add to the buffers is from one without; what a forgotten
    zero_grad is told.
    """

    class Layers(nn.Module):
        def __init__(self, fused: bool) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.first, self.second, self.fused = (
                nn.Linear(3, 3),
                nn.Linear(3, 3, bias=False),
                fused,
            )

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            return _AddsItself.apply(x, self.second.weight) if self.fused else self.second(x)  # type: ignore[no-any-return]

    models = [BucketedDataParallel(Layers(fused), main_grad=fused) for fused in (False, True)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for step in range(2):
        for model, optimizer in zip(models, optimizers, strict=True):
            model.zero_grad()
            for micro in range(micro_batches):
                x = torch.randn(
                    2, 3, generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank)
                )
                if micro < micro_batches - 1:
                    with model.no_sync():
                        model(x).square().mean().backward()
                else:
                    model(x).square().mean().backward()
            model.finish_grad_sync()
            optimizer.step()
    off = max(
        float((a - b).detach().abs().max())
        for a, b in zip(*(model.parameters() for model in models), strict=True)
    )
    try:
        models[1](torch.ones(1, 3)).sum().backward()
    except GradientError as error:
        return off, str(error)
    return off, ""


def tokens_of_two_groups(rank: int, expert_first: bool) -> tuple[float, float]:
    """Gradients of a layer that all four ranks have and of one that two of them have."""
    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    dense, expert = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    models = [
        BucketedDataParallel(dense, average=False),
        BucketedDataParallel(expert, group=pair, average=False),
    ]
    tokens = rank + 1
    sum(model(torch.full((1, 1), float(tokens))) for model in models).backward()
    finish_grad_sync(models[::-1] if expert_first else models, torch.tensor(tokens))
    assert dense.weight.grad is not None
    assert expert.weight.grad is not None
    return float(dense.weight.grad), float(expert.weight.grad)


def tokens_of_groups_that_overlap(rank: int) -> str:
    """The error of a count of tokens over two groups of which neither has all ranks of the other."""
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    models = [
        BucketedDataParallel(nn.Linear(1, 1), group=group, average=False)
        for group in (rows, columns)
    ]
    sum(model(torch.ones(1, 1)) for model in models).backward()
    try:
        finish_grad_sync(models, torch.tensor(1))
    except ConfigError as error:
        return str(error)
    finally:
        finish_grad_sync(models)
    return ""


def collective_before_the_reduction_ends(rank: int, bucket_size: int) -> tuple[float, float]:
    """How far gradients, and a loss that the program sums after backward, lie from the true ones.
    Rank 1 leaves a parameter out.
    """
    (plain,), (ours,) = _pair(1, bucket_size=bucket_size)
    losses = [model(_input(rank), use=rank == 0).square().mean() for model in (plain, ours)]
    for loss in losses:
        loss.backward()
    summed = losses[1].detach().clone()
    dist.all_reduce(summed)
    ours.finish_grad_sync()
    expected = losses[0].detach().clone()
    dist.all_reduce(expected)
    return _off(plain, ours, 2.0), float((summed - expected).abs())


def wide_gradients(rank: int) -> list[float]:
    """What three ranks make of float64 gradients of 1 + 1e-12: their sum, mean and sum by tokens."""
    found = []
    for average, tokens in ((False, None), (True, None), (False, torch.tensor(1))):
        layer = nn.Linear(1, 1, bias=False, dtype=torch.float64)
        model = BucketedDataParallel(layer, average=average)
        model(torch.full((1, 1), 1 + 1e-12, dtype=torch.float64)).sum().backward()
        model.finish_grad_sync(tokens)
        assert layer.weight.grad is not None
        found.append(float(layer.weight.grad))
    return found


def averaged_and_divided_by_tokens(rank: int) -> None:
    model = BucketedDataParallel(nn.Linear(1, 1))
    with model.no_sync():
        model(torch.ones(1, 1)).sum().backward()
    model.finish_grad_sync(torch.tensor(1))


def another_shape(rank: int) -> None:
    BucketedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3 + rank)))


def frozen_on_one_rank(rank: int) -> None:
    module = nn.Linear(2, 2)
    module.bias.requires_grad_(rank == 0)
    BucketedDataParallel(module)


def another_dtype(rank: int) -> None:
    BucketedDataParallel(nn.Linear(2, 2, dtype=torch.float64 if rank else torch.float32))


def another_memory_layout(rank: int) -> None:
    module = nn.Linear(3, 2, bias=False)
    if rank == 1:
        module.weight = nn.Parameter(torch.empty(3, 2).t())
    BucketedDataParallel(module)


def another_order(rank: int) -> None:
    layers = {"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}
    BucketedDataParallel(nn.ModuleDict(dict(sorted(layers.items(), reverse=rank == 1))))


def a_parameter_more(rank: int) -> None:
    BucketedDataParallel(nn.Linear(2, 2, bias=rank == 1))


def another_buffer(rank: int) -> None:
    module = nn.Linear(2, 2)
    module.register_buffer("mask", torch.ones(2 + rank))
    BucketedDataParallel(module)


def said_of_buffers(rank: int) -> list[str]:
    """What the log says when a module with buffers is wrapped."""
    said: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    handler = Keep()
    logging.getLogger("streammega").addHandler(handler)
    try:
        fixed = nn.Linear(3, 3)
        fixed.register_buffer("mask", torch.ones(3))
        BucketedDataParallel(nn.Sequential(fixed, nn.SyncBatchNorm(3)))
        BucketedDataParallel(nn.Sequential(fixed, nn.BatchNorm1d(3)))
    finally:
        logging.getLogger("streammega").removeHandler(handler)
    return said


def without_elements(rank: int) -> list[float]:
    """A gradient of a module with a bucket of parameters that have no elements."""
    module = nn.ParameterDict({"empty": torch.zeros(0, 3), "one": torch.ones(1)})
    model = BucketedDataParallel(module, bucket_size=1, largest_gradient=10.0)
    (module["empty"].sum() + module["one"].sum()).backward()
    model.finish_grad_sync()
    return [float(module["one"].grad)]


def gradients_of_two_streams(rank: int) -> list[str]:
    """What is ordered where the gradients of one bucket are made on two streams of CUDA."""
    cuda = FakeCuda()
    layers = [nn.Linear(2, 1, bias=False) for _ in range(2)]
    model = BucketedDataParallel(nn.ModuleList(layers))
    model.reducer.device = torch.device("cuda")
    reduce = dist.all_reduce

    def noted(*arguments: Any, **options: Any) -> Any:
        cuda.log.append(f"reduced on {cuda.current.name}")
        return reduce(*arguments, **options)

    for number, layer in enumerate(layers):
        stream = FakeStream(f"branch {number}", cuda.log)
        layer.weight.register_hook(lambda _, stream=stream: setattr(cuda, "current", stream))
    with cuda.used(), mock.patch("torch.distributed.all_reduce", noted):
        x = torch.ones(1, 2)
        layers[1](layers[0](x).expand(1, 2)).sum().backward()
        model.reducer.device = torch.device("cpu")
        model.finish_grad_sync()
    return cuda.log[:2]
