"""The reduction of gradients in unusual uses: right as torch's DDP is right, or an error before a
wrong number is used.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import math
import random
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from streammega import BucketedDataParallel, ParallelLayout, Ranks
from streammega.errors import ConfigError, GradientError
from tests.support.cuda_support import FakeCuda, FakeStream
from tests.support.gang import Gang, on_ranks


class Expert(nn.Module):
    """Parameters of two dtypes, so two buffers of gradients, and one that only some ranks use."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(16, 16, bias=False)
        self.b = nn.Linear(16, 16, bias=False, dtype=torch.float64)
        self.expert = nn.Linear(16, 16, bias=False, dtype=torch.float64)

    def forward(self, x: Tensor, use: bool) -> Tensor:
        y = self.b(self.a(x).double())
        chosen: Tensor = self.expert(y) if use else y
        return chosen


def random_input(rank: int, step: int = 0, shape: Sequence[int] = (4, 16)) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(10 * step + rank))


def make_pair(
    count: int = 1, bucket_size: int = 1, **options: Any
) -> tuple[nn.ModuleList, BucketedDataParallel]:
    """Some modules, and copies of them that are wrapped as one, in buckets of one parameter each."""
    torch.manual_seed(4)
    plain = nn.ModuleList(Expert() for _ in range(count))
    copies = copy.deepcopy(plain)
    wrapped = BucketedDataParallel(
        copies, bucket_size=bucket_size, grad_dtype=torch.float64, **options
    )
    return plain, wrapped


def backward_of_both(
    plain: Sequence[nn.ModuleList], ours: Sequence[BucketedDataParallel], rank: int, step: int = 0
) -> None:
    """One graph of all modules, of which rank 1 leaves a parameter of each out."""
    for model in (*plain, *ours):
        model.zero_grad()
    x = random_input(rank, step)
    for modules in (plain, [wrapped.module for wrapped in ours]):
        outputs = [module(x, use=rank == 0) for stages in modules for module in stages.children()]
        sum(output.square().mean() for output in outputs).backward()


def check_sums(plain: nn.Module, ours: BucketedDataParallel, divided_by: float = 2.0) -> None:
    """Gradients are the sum over ranks, divided."""
    for one, other in zip(plain.parameters(), ours.module.parameters(), strict=True):
        total = torch.zeros_like(one) if one.grad is None else one.grad.clone()
        dist.all_reduce(total)
        assert other.grad is not None
        off = 1e-6 if total.dtype == torch.float32 else 1e-12
        torch.testing.assert_close(other.grad, total / divided_by, rtol=0, atol=off)


@pytest.mark.guarantee("collectives-meet-other")
@on_ranks(2)
def test_tokens_are_counted_after_the_buckets_whichever_parameters_a_rank_used(rank: int) -> None:
    plain, ours = make_pair(average=False)
    for model in (plain, ours.module):
        module = next(model.children())
        module(random_input(rank), use=rank == 0).square().sum().backward()
    ours.finish_grad_sync(torch.tensor(2.0 + rank))
    check_sums(plain, ours, 5.0)


@pytest.mark.guarantee("collectives-meet-other")
@on_ranks(2)
def test_models_of_one_group_that_do_not_overlap_may_be_finished_one_by_one(rank: int) -> None:
    plain, ours = zip(*[make_pair(overlap=False) for _ in range(2)], strict=True)
    backward_of_both(plain, ours, rank)
    for model in ours:
        model.finish_grad_sync()
    for one, other in zip(plain, ours, strict=True):
        check_sums(one, other)


@pytest.mark.guarantee("uses-would-give")
@on_ranks(2)
def test_a_second_model_of_a_group_that_reduces_gradients_is_an_error(rank: int) -> None:
    """Until the first is finished."""
    (one, first), (other, second) = make_pair(), make_pair()
    backward_of_both([one], [first], rank)
    with pytest.raises(GradientError, match=r"as an nn\.ModuleList"):
        second.finish_grad_sync()
    with pytest.raises(GradientError, match=r"as an nn\.ModuleList"):
        backward_of_both([other], [second], rank)
    first.finish_grad_sync()
    check_sums(one, first)
    backward_of_both([other], [second], rank)
    second.finish_grad_sync()
    check_sums(other, second)


@pytest.mark.guarantee("collectives-meet-other", "14-buckets-start")
@pytest.mark.parametrize("modules", [1, 2])
@pytest.mark.parametrize("groups", [1, 2])
@on_ranks(2)
def test_models_of_several_groups_are_finished_one_by_one(
    rank: int, modules: int, groups: int
) -> None:
    """Of one or two modules each."""
    pairs = [make_pair(modules, group=group) for group in (None, dist.new_group([0, 1]))[:groups]]
    plain, ours = zip(*pairs, strict=True)
    for step in range(2):
        backward_of_both(plain, ours, rank, step)
        for model in ours:
            model.finish_grad_sync()
    for one, other in zip(plain, ours, strict=True):
        check_sums(one, other)


@on_ranks(3)
def test_gradients_are_reduced_over_ranks_that_are_in_other_groups_too(rank: int) -> None:
    """In more of them than others: torch names a new group by their number."""
    dist.new_group([0])
    dist.new_group([0, 1])
    layer = nn.Linear(1, 1, bias=False)
    model = BucketedDataParallel(layer, average=False)
    model(torch.full((1, 1), rank + 1.0)).sum().backward()
    model.finish_grad_sync()
    assert float(layer.weight.grad or 0) == 6.0


@pytest.mark.guarantee("meet-collective-program")
@pytest.mark.parametrize("bucket_size", [1, 10**6])
@on_ranks(2)
def test_a_collective_of_the_programs_after_backward_meets_no_bucket(
    rank: int, bucket_size: int
) -> None:
    plain, ours = make_pair(bucket_size=bucket_size)
    losses = [
        next(model.children())(random_input(rank), use=rank == 0).square().mean()
        for model in (plain, ours.module)
    ]
    for loss in losses:
        loss.backward()
    summed = losses[1].detach().clone()
    dist.all_reduce(summed)
    ours.finish_grad_sync()
    expected = losses[0].detach().clone()
    dist.all_reduce(expected)
    check_sums(plain, ours)
    assert torch.equal(summed, expected)


@pytest.mark.guarantee("float64-gradients-keep")
@on_ranks(3)
def test_wide_gradients_keep_their_precision(rank: int) -> None:
    """Of three ranks' 1 + 1e-12: their sum, mean and sum by tokens."""
    found = []
    for average, tokens in ((False, None), (True, None), (False, torch.tensor(1))):
        layer = nn.Linear(1, 1, bias=False, dtype=torch.float64)
        model = BucketedDataParallel(layer, average=average)
        model(torch.full((1, 1), 1 + 1e-12, dtype=torch.float64)).sum().backward()
        model.finish_grad_sync(tokens)
        found.append(float(layer.weight.grad or 0))
    assert found == pytest.approx([3 + 3e-12, 1 + 1e-12, 1 + 1e-12], rel=1e-15)


@on_ranks(2)
def test_statistics_that_each_rank_keeps_for_itself_are_named_when_wrapped(rank: int) -> None:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("streammega").addHandler(handler)
    try:
        fixed = nn.Linear(3, 3)
        fixed.register_buffer("mask", torch.ones(3))
        BucketedDataParallel(nn.Sequential(fixed, nn.SyncBatchNorm(3)))
        assert messages == []
        BucketedDataParallel(nn.Sequential(fixed, nn.BatchNorm1d(3)))
    finally:
        logging.getLogger("streammega").removeHandler(handler)
    (message,) = messages
    assert "1.running_mean" in message
    assert "SyncBatchNorm" in message


@on_ranks(2)
def test_parameters_without_elements_are_looked_at_too(rank: int) -> None:
    module = nn.ParameterDict({"empty": torch.zeros(0, 3), "one": torch.ones(1)})
    model = BucketedDataParallel(module, bucket_size=1)
    (module["empty"].sum() + module["one"].sum()).backward()
    model.finish_grad_sync()
    assert float(module["one"].grad) == 1.0


@pytest.mark.guarantee("float64-gradients-keep")
def test_a_module_that_is_wrapped_again_keeps_no_former_buffer() -> None:
    module = nn.Linear(3, 3)
    buffers = []
    for _ in range(3):
        model = BucketedDataParallel(module)
        buffers += [weakref.ref(slot.main_grad) for slot in model.reducer.slots]
        model(torch.ones(1, 3)).sum().backward()
        model.finish_grad_sync()
        model.zero_grad()
        del model
        gc.collect()
    assert [buffer() for buffer in buffers] == [None] * 6
    module(torch.ones(1, 3)).sum().backward()
    assert module.bias.grad is not None, "nothing takes it any more"


@on_ranks(2)
def test_a_bucket_waits_for_all_streams_that_made_its_gradients(rank: int) -> None:
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
        layers[1](layers[0](torch.ones(1, 2)).expand(1, 2)).sum().backward()
        model.reducer.device = torch.device("cpu")
        model.finish_grad_sync()
    assert cuda.log[:2] == ["branch 0 waits for branch 1", "reduced on branch 0"]


@pytest.mark.guarantee("abandoned-backward-added")
@on_ranks(2)
def test_what_an_abandoned_backward_added_goes_with_zero_grad(rank: int) -> None:
    module = nn.Linear(3, 3)
    model = BucketedDataParallel(module)
    with model.no_sync():
        (100 * model(torch.ones(2, 3))).sum().backward()
    model.zero_grad()
    model(torch.ones(2, 3)).sum().backward()
    model.finish_grad_sync()
    torch.testing.assert_close(module.bias.grad, torch.full((3,), 2.0))


# What is refused.


def zeroed_while_reducing() -> None:
    model = BucketedDataParallel(nn.Linear(3, 3), bucket_size=1)
    model(torch.ones(2, 3)).sum().backward()
    try:
        model.zero_grad()
    finally:
        model.finish_grad_sync()


def shared_by_two() -> None:
    shared = nn.Linear(3, 3)
    modules = [nn.Sequential(shared), nn.Sequential(shared, nn.Linear(3, 3))]
    groups = [None, dist.new_group([0, 1])]
    models = [
        BucketedDataParallel(module, group=group)
        for module, group in zip(modules, groups, strict=True)
    ]
    sum(model(torch.ones(1, 3)).sum() for model in models).backward()


def split_over_the_group_itself() -> None:
    mesh = init_device_mesh("cpu", (2,))
    BucketedDataParallel(parallelize_module(nn.Linear(8, 6), mesh, ColwiseParallel()))


def unfrozen_later() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module[0].requires_grad_(False)
    model = BucketedDataParallel(module)
    module[0].requires_grad_(True)
    model(torch.ones(1, 3)).sum().backward()
    model.finish_grad_sync()


def checkpointed_twice() -> None:
    """A module that is used in two reentrant checkpoints has two gradients in one backward."""
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model = BucketedDataParallel(module, bucket_size=1)
    x = module[0](torch.ones(1, 3))
    for _ in range(2):
        x = checkpoint(module[1], x, use_reentrant=True)
    try:
        x.sum().backward()
    finally:
        model.finish_grad_sync()


def assigned() -> None:
    model = BucketedDataParallel(nn.Linear(2, 2))
    model.load_state_dict(model.state_dict(), assign=True)


def averaged_and_divided_by_tokens() -> None:
    model = BucketedDataParallel(nn.Linear(1, 1))
    with model.no_sync():
        model(torch.ones(1, 1)).sum().backward()
    model.finish_grad_sync(torch.tensor(1))


def accumulated_without_no_sync(loss: int = 1) -> None:
    """Two forwards with a backward each, or two losses of one forward."""
    model = BucketedDataParallel(nn.Linear(3, 3), bucket_size=1)
    outputs = [model(torch.ones(1, 3)).sum() for _ in range(2)]
    try:
        outputs[0].backward(retain_graph=True)
        outputs[loss].backward()
    finally:
        model.finish_grad_sync()


WRONG_USES: dict[str, tuple[Callable[[], Any], str]] = {
    "zeroed while reducing": (zeroed_while_reducing, "zero_grad was called while"),
    "shared by two": (shared_by_two, "another BucketedDataParallel has the parameter"),
    "split over the group": (
        split_over_the_group_itself,
        "the module's DTensors are split over ranks [0, 1]",
    ),
    "unfrozen later": (unfrozen_later, "0.weight was frozen when it was wrapped"),
    "checkpointed twice": (checkpointed_twice, "use_reentrant=False"),
    "assigned": (assigned, "load_state_dict(assign=True)"),
    "averaged and divided": (averaged_and_divided_by_tokens, "finish_grad_sync(num_tokens)"),
    "two backwards": (accumulated_without_no_sync, "no_sync"),
    "backward twice": (lambda: accumulated_without_no_sync(loss=0), "no_sync"),
    "no bucket": (lambda: BucketedDataParallel(nn.Linear(2, 2), bucket_size=0), "at least 1"),
    "no parameters": (lambda: BucketedDataParallel(nn.ReLU()), "no parameters"),
}


@pytest.mark.guarantee("uses-would-give")
@pytest.mark.parametrize("use", WRONG_USES)
@on_ranks(2)
def test_uses_that_would_give_wrong_gradients_are_errors(rank: int, use: str) -> None:
    call, message = WRONG_USES[use]
    dist.barrier()  # all are connected before one of them ends
    with pytest.raises((ConfigError, GradientError)) as error:
        call()
    assert message in str(error.value)


def frozen_on_one_rank(rank: int) -> nn.Module:
    module = nn.Linear(2, 2)
    module.bias.requires_grad_(rank == 0)
    return module


def with_buffer(rank: int) -> nn.Module:
    module = nn.Linear(2, 2)
    module.register_buffer("mask", torch.ones(2 + rank))
    return module


DIFFERENT_ON_RANKS: dict[str, tuple[Callable[[int], nn.Module], str, str]] = {
    "shape": (
        lambda rank: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3 + rank)),
        "1.weight: torch.float32 [3, 2], trained",
        "1.weight: torch.float32 [4, 2], trained",
    ),
    "frozen": (
        frozen_on_one_rank,
        "bias: torch.float32 [2], trained",
        "bias: torch.float32 [2], frozen",
    ),
    "dtype": (
        lambda rank: nn.Linear(2, 2, dtype=torch.float64 if rank else torch.float32),
        "weight: torch.float32 [2, 2], trained",
        "weight: torch.float64",
    ),
    "order": (
        lambda rank: nn.ModuleDict({name: nn.Linear(2, 2) for name in ("ab", "ba")[rank]}),
        "a.weight: torch.float32 [2, 2], trained",
        "b.weight",
    ),
    "number": (
        lambda rank: nn.Linear(2, 2, bias=rank == 1),
        "nothing",
        "bias: torch.float32 [2]",
    ),
    "buffer": (with_buffer, "buffer mask: torch.float32 [2]", "buffer mask: torch.float32 [3]"),
}


@pytest.mark.guarantee("uses-would-give")
@pytest.mark.parametrize("what", DIFFERENT_ON_RANKS)
@on_ranks(2)
def test_models_that_differ_on_ranks_are_errors_that_say_how(rank: int, what: str) -> None:
    make, first, second = DIFFERENT_ON_RANKS[what]
    dist.barrier()
    with pytest.raises((ConfigError, GradientError)) as error:
        BucketedDataParallel(make(rank))
    assert f"rank 0 has {first}; rank 1 has {second}" in str(error.value)


# Unusual uses that are right.


@on_ranks(2)
def test_ranks_may_hold_a_parameter_in_different_orders_of_memory(rank: int) -> None:
    module = nn.Linear(3, 2, bias=False)
    values = torch.arange(6.0).view(2, 3)
    module.weight = nn.Parameter(torch.zeros(3, 2).t() if rank == 1 else values.clone())
    model = BucketedDataParallel(module)
    assert torch.equal(module.weight, values)
    (model(torch.arange(3.0)) * torch.tensor([1.0, 10.0])).sum().backward()
    model.finish_grad_sync()
    assert module.weight.grad is not None
    assert module.weight.grad.tolist() == [[0.0, 1.0, 2.0], [0.0, 10.0, 20.0]]


@on_ranks(2)
def test_sparse_gradients_are_averaged(rank: int) -> None:
    embedding = nn.Embedding(4, 1, sparse=True)
    model = BucketedDataParallel(embedding)
    model(torch.tensor([1, 1, 2 + rank])).sum().backward()
    model.finish_grad_sync()
    assert embedding.weight.grad is not None
    assert embedding.weight.grad.flatten().tolist() == [0.0, 2.0, 0.5, 0.5]


@on_ranks(2)
def test_gradients_that_a_schedule_assigns_by_itself_are_averaged(rank: int) -> None:
    layer = nn.Linear(2, 1, bias=False)
    model = BucketedDataParallel(layer)
    for step in range(2):
        model.zero_grad()
        with model.no_sync():
            model(torch.ones(1, 2)).sum().backward()
        loss = model(torch.ones(1, 2)).sum() * (rank + 1 + step)
        (layer.weight.grad,) = torch.autograd.grad(loss, [layer.weight])
        model.finish_grad_sync()
        assert layer.weight.grad.flatten().tolist() == [2.5 + step] * 2


@on_ranks(2)
def test_several_forwards_of_one_backward_and_losses_that_share_nothing_add_up(rank: int) -> None:
    layer = nn.Linear(1, 1, bias=False)
    nn.init.ones_(layer.weight)
    model = BucketedDataParallel(layer)
    x = torch.ones(1, 1)
    for _ in range(2):
        x = checkpoint(model, x, use_reentrant=False)
    (x.sum() + model(torch.ones(1, 1)).sum()).backward()
    model.finish_grad_sync()
    assert float(layer.weight.grad or 0) == 3.0
    heads = [nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)]
    model = BucketedDataParallel(nn.ModuleList(heads))
    for head in heads:
        head(torch.full((1, 1), rank + 1.0)).sum().backward()
    model.finish_grad_sync()
    assert [float(head.weight.grad or 0) for head in heads] == [1.5, 1.5]


class Heads(nn.Module):
    """Layers of which a forward uses some; the first always."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))

    def forward(self, x: Tensor, used: list[int]) -> Tensor:
        return torch.stack([self.layers[n](x) for n in {0, *used}]).sum(0).square().mean()


def zero(model: nn.Module, how: str) -> None:
    """As a loop does that zeroes in one of the ways there are."""
    if how == "by the optimizer":
        for parameter in model.parameters():
            parameter.grad = None
    elif how != "not":
        model.zero_grad(set_to_none=how == "to none")


def compare_with_ddp(rank: int, ways: list[str], wide: bool) -> None:
    """Steps of some micro-batches, each of which uses some layers.

    wide: accumulate in float64, which is close to DDP; else of two ranks, a sum of which is the
    same in any order, to the bit.
    """
    theirs = DistributedDataParallel(Heads(), find_unused_parameters=True)
    dtype = torch.float64 if wide else torch.float32
    ours = BucketedDataParallel(Heads(), bucket_size=12, grad_dtype=dtype)
    off = 1e-5 if wide or dist.get_world_size() > 2 else 0.0
    common = random.Random(1)
    own = random.Random(rank)
    for step in range(12):
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
            where = f"step {step}, zeroed {how}, {count} micro-batches: {name}"
            assert (one.grad is None) == (other.grad is None), where
            if one.grad is not None and other.grad is not None:
                assert torch.allclose(one.grad, other.grad, rtol=off, atol=off), where


@pytest.mark.guarantee("gradients-torch-ddp")
@pytest.mark.parametrize(("size", "wide"), [(2, False), (2, True), (3, False)])
@pytest.mark.parametrize(
    "ways",
    [["to none", "by the optimizer"], ["to none", "not"], ["to zero", "not"]],
    ids=" or ".join,
)
def test_gradients_are_torchs_whatever_is_used_and_however_they_are_zeroed(
    gang: Gang, ways: list[str], size: int, wide: bool
) -> None:
    gang.run(size, compare_with_ddp, ways, wide)


class Partial(nn.Module):
    """Three layers: the second is used by no rank, the third by rank 0 only."""

    def __init__(self, used: list[int]) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        self.used = used

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.layers[n](x) for n in self.used]).sum()


@pytest.mark.guarantee("gradients-torch-ddp")
@pytest.mark.parametrize("frozen", [False, True])
@on_ranks(2)
def test_what_no_rank_used_is_left_alone_as_by_torchs_ddp(rank: int, frozen: bool) -> None:
    """In three steps of AdamW with decay. frozen: the second layer is, after it was wrapped, and is
    used by all.
    """
    used = [0, *([1] if frozen else []), *([2] if rank == 0 else [])]
    module = Partial(used)
    ours = BucketedDataParallel(module)
    reference = Partial(used)
    if frozen:
        for one in (module, reference):
            one.layers[1].requires_grad_(False)
    theirs = DistributedDataParallel(reference, find_unused_parameters=True)
    optimizers = [
        torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1) for model in (theirs, ours)
    ]
    before = [parameter.detach().clone() for parameter in ours.parameters()]
    for _ in range(3):
        for model, optimizer in zip((theirs, ours), optimizers, strict=True):
            model.zero_grad()
            model(torch.full((2, 3), rank + 1.0)).backward()
            if model is ours:
                ours.finish_grad_sync()
            optimizer.step()
    moved = [not torch.equal(a, b) for a, b in zip(before, ours.parameters(), strict=True)]
    assert moved == [True, True, False, False, True, True]
    for a, b in zip(theirs.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def test_what_is_frozen_after_a_step_loses_its_gradient() -> None:
    """So optimizers leave it alone, though gradients are not zeroed."""
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model = BucketedDataParallel(module)
    for is_trained in (True, False):
        module[0].requires_grad_(is_trained)
        model(torch.ones(1, 3)).sum().backward()
        model.finish_grad_sync()
        assert (module[0].bias.grad is not None) == is_trained
        assert module[1].bias.grad is not None


@on_ranks(2)
def test_an_average_of_float16_does_not_overflow_as_the_sum_would(rank: int) -> None:
    layer = nn.Linear(1, 1, bias=False, dtype=torch.float16)
    model = BucketedDataParallel(layer, grad_dtype=torch.float16)
    model(torch.full((1, 1), 4e4, dtype=torch.float16)).sum().backward()
    model.finish_grad_sync()
    assert float(layer.weight.grad or 0) == 4e4


@pytest.mark.guarantee("norms-count-element")
@on_ranks(2)
def test_a_replicated_dtensor_counts_once_in_a_norm(rank: int) -> None:
    """Of a model given by its ranks, whose second layer they divide."""
    norm = nn.LayerNorm(8)
    module = nn.Sequential(norm, nn.Linear(8, 6, bias=False))
    ranks = Ranks(ParallelLayout(tp=2))
    group = ranks.group("tp")
    assert group is not None
    mesh = DeviceMesh.from_group(group, "cpu")
    for name, parameter in list(norm.named_parameters()):
        replicated = distribute_tensor(parameter.detach(), mesh, [Replicate()])
        setattr(norm, name, nn.Parameter(replicated))
    parallelize_module(module, mesh, {"1": ColwiseParallel(output_layouts=None)})
    model = BucketedDataParallel(module, ranks=ranks, check_gradients=False)
    slots = {slot.name: slot for slot in model.reducer.slots}
    for name, parameter in module.named_parameters():
        whole = torch.arange(float(parameter.numel())).view(parameter.shape)
        slots[name].main_grad.copy_(whole.chunk(2)[rank] if name == "1.weight" else whole)
        slots[name].count = 1
    model.finish_grad_sync()
    expected = math.sqrt(2 * sum(n * n for n in range(8)) + sum(n * n for n in range(48)))
    assert float(model.clip_grad_norm_(1.0)) == pytest.approx(expected, rel=1e-6)


def accumulate(
    call: Callable[[Tensor], Tensor],
    model: BucketedDataParallel,
    micro_batches: int,
    shape: tuple[int, int],
    seed: int,
) -> None:
    """Gradients of a step of so many micro-batches."""
    for micro in range(micro_batches):
        with model.no_sync() if micro < micro_batches - 1 else contextlib.nullcontext():
            call(random_input(seed + micro, shape=shape)).square().mean().backward()
    model.finish_grad_sync()


class AddsItself(torch.autograd.Function):
    """A linear layer whose backward adds the weight's gradient to its buffer, as fused kernels do."""

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


class Fused(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        product: Tensor = AddsItself.apply(x, self.weight)
        return product


@pytest.mark.guarantee("kernels-may-add")
@pytest.mark.parametrize("micro_batches", [1, 3])
@on_ranks(2)
def test_kernels_that_add_to_main_grad_give_the_same_steps(rank: int, micro_batches: int) -> None:
    models = []
    for kind in (nn.Linear, Fused):
        torch.manual_seed(1)
        module = nn.Sequential(nn.Linear(3, 3), kind(3, 3, bias=False))
        models.append(BucketedDataParallel(module, main_grad=kind is Fused))
    for step in range(2):
        for model in models:
            model.zero_grad()
            accumulate(model, model, micro_batches, (2, 3), 100 * step + 10 * rank)
            torch.optim.SGD(model.parameters(), lr=0.1).step()
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
    with pytest.raises(GradientError, match=r"zero_grad\(\)"):
        models[1](torch.ones(1, 3)).sum().backward()


@pytest.mark.guarantee("compiled-models-step")
@pytest.mark.parametrize("how", ["before", "whole graph", "in place", "wrapper"])
@on_ranks(2)
def test_compiled_models_step_as_eager_ones(rank: int, how: str) -> None:
    """The module is compiled before it is wrapped, as a whole graph, in place after it, or with its
    wrapper.
    """
    warnings.simplefilter("ignore")
    calls: list[Any] = []
    models = []
    for compiles in (False, True):
        torch.manual_seed(6)
        module: Any = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6), nn.LayerNorm(6))
        if compiles and how in ("before", "whole graph"):
            module = torch.compile(module, backend="aot_eager", fullgraph=how == "whole graph")
        model = BucketedDataParallel(module, bucket_size=50)
        if compiles and how == "in place":
            module.compile(backend="aot_eager")
        is_compiled = compiles and how == "wrapper"
        calls.append(torch.compile(model, backend="aot_eager") if is_compiled else model)
        models.append(model)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in models]
    for step in range(3):
        for call, model, optimizer in zip(calls, models, optimizers, strict=True):
            accumulate(call, model, 2, (4, 6), 100 * step + 10 * rank)
            optimizer.step()
            model.zero_grad()
        for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
            assert torch.equal(a, b)
    torch._dynamo.reset()
