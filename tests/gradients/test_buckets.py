"""Gradient buckets: the rules of their layout, and that they compute what torch's own do."""

from __future__ import annotations

import contextlib
import math
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from streammega import BucketedDataParallel, ParallelLayout, Ranks
from streammega.errors import ConfigError, GradientError
from streammega.gradients.buffers import default_bucket_size, local_grad, make_buckets
from streammega.gradients.collectives import inverse_of_tokens
from streammega.train.optimizer import LossScale
from tests.support.gang import on_ranks


class Net(torch.nn.Module):
    """A small model with a parameter that is not used every time, and one that is used twice."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(50, width)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(3))
        self.rarely = torch.nn.Linear(width, width)
        self.norm = torch.nn.LayerNorm(width)

    def forward(self, ids: torch.Tensor, rarely: bool = False) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        if rarely:
            x = x + self.rarely(x)
        return torch.nn.functional.linear(self.norm(x), self.embedding.weight)


def make_net(dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(3)
    return Net().to(dtype)


def ids_of(rank: int, step: int, micro: int) -> torch.Tensor:
    return torch.randint(
        0, 50, (4, 6), generator=torch.Generator().manual_seed(100 * rank + 10 * step + micro)
    )


def loss_of(model: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    logits = model(ids[:, :-1], **options)
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


def assert_same_gradients(ours: torch.nn.Module, theirs: torch.nn.Module) -> None:
    """To the bit; None for None."""
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None)
        assert a.grad is None or b.grad is None or torch.equal(a.grad, b.grad)


@given(
    kinds=st.lists(
        st.tuples(st.integers(0, 500), st.booleans(), st.booleans()), min_size=1, max_size=30
    ),
    bucket_size=st.integers(1, 2000),
)
def test_buckets_follow_the_rules(kinds: list[tuple[int, bool, bool]], bucket_size: int) -> None:
    """kinds: of each parameter the elements, whether it is narrow, and whether it is tied."""
    module = torch.nn.ParameterDict()
    for number, (size, is_narrow, _) in enumerate(kinds):
        module[str(number)] = torch.empty(size, dtype=torch.bfloat16 if is_narrow else None)
    tied = [str(number) for number, (_, _, is_tied) in enumerate(kinds) if is_tied]
    buckets = make_buckets(module, bucket_size, None, tied=tied)
    untied = [bucket for bucket in buckets if not bucket.is_tied]
    assert [bucket.is_tied for bucket in buckets] == sorted(bucket.is_tied for bucket in buckets)
    for is_tied in (False, True):
        for is_narrow in (False, True):
            names = [
                slot.name
                for bucket in buckets
                if bucket.is_tied == is_tied
                for slot in bucket.slots
                if (slot.parameter.dtype == torch.bfloat16) == is_narrow
            ]
            kind = (is_narrow, is_tied)
            of_kind = [str(n) for n in range(len(kinds)) if kinds[n][1:] == kind]
            assert names == (of_kind if is_tied else of_kind[::-1]), "tied ones in their own order"
    for bucket in buckets:
        assert bucket.grads.dtype == torch.float32
        assert not bucket.is_full
        assert len({(slot.parameter.dtype, slot.name in tied) for slot in bucket.slots}) == 1
        grads = torch.arange(float(bucket.grads.numel()))
        bucket.grads.copy_(grads)
        assert torch.equal(torch.cat([slot.main_grad for slot in bucket.slots]), grads)
    last_filled = [min(int(slot.name) for slot in bucket.slots) for bucket in untied]
    assert last_filled == sorted(last_filled, reverse=True), "full one after the other in backward"
    for is_narrow in (False, True):
        alike = [b for b in untied if (b.slots[0].parameter.dtype == torch.bfloat16) == is_narrow]
        sizes = [[slot.main_grad.numel() for slot in bucket.slots] for bucket in alike]
        assert all(sum(of_bucket) >= bucket_size for of_bucket in sizes[:-1])
        assert all(sum(of_bucket[:-1]) < bucket_size for of_bucket in sizes), (
            "the crossing parameter is the last"
        )


@pytest.mark.parametrize(("dp", "elements"), [(1, 40_000_000), (64, 64_000_000)])
def test_buckets_are_larger_with_many_ranks(dp: int, elements: int) -> None:
    assert default_bucket_size(dp) == elements


@on_ranks(2)
def test_a_gradient_that_is_not_summed_yet_is_divided_like_its_parameter(rank: int) -> None:
    """As that of an embedding whose rows are split over ranks."""
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(8.0).reshape(4, 2)
    parameter = distribute_tensor(torch.zeros(4, 2), mesh, [Shard(0)])
    grad = DTensor.from_local(whole, mesh, [Partial()])
    assert torch.equal(local_grad(parameter, grad), 2 * whole[2 * rank : 2 * rank + 2])


@pytest.mark.guarantee("bucketeddataparallel-ddp-gradients", "gradients-torch-ddp")
@pytest.mark.parametrize(
    ("micro_batches", "bucket_size", "overlap"), [(1, 1000, True), (3, 1, True), (2, 10**9, False)]
)
@on_ranks(2)
def test_gradients_are_those_of_torchs_ddp_to_the_bit(
    rank: int, micro_batches: int, bucket_size: int, overlap: bool
) -> None:
    """Two ranks: a sum of two is the same in any order."""
    theirs = DistributedDataParallel(make_net(), find_unused_parameters=True)
    ours = BucketedDataParallel(make_net(), bucket_size=bucket_size, overlap=overlap)
    for step in range(2):
        for model in (theirs, ours):
            model.zero_grad()
            for micro in range(micro_batches):
                last = micro == micro_batches - 1
                with contextlib.nullcontext() if last else model.no_sync():
                    loss = loss_of(model, ids_of(rank, step, micro), rarely=step == 1)
                    (loss / micro_batches).backward()
        ours.finish_grad_sync()
        assert_same_gradients(ours.module, theirs.module)
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.1)
        assert torch.isclose(norm, ours.clip_grad_norm_(0.1), rtol=1e-6)
        for a, b in zip(theirs.module.parameters(), ours.module.parameters(), strict=True):
            if a.grad is not None and b.grad is not None:
                assert torch.allclose(a.grad, b.grad, rtol=1e-6)
    dist.barrier()


@pytest.mark.guarantee("bucketeddataparallel-ddp-gradients")
def test_fp32_accumulation_of_bf16_gradients_is_better() -> None:
    exact = make_net().double()
    exact.load_state_dict(
        {name: value.double() for name, value in make_net(torch.bfloat16).state_dict().items()}
    )
    narrow = make_net(torch.bfloat16)
    wide = BucketedDataParallel(make_net(torch.bfloat16))
    for micro in range(256):
        ids = ids_of(0, 0, micro)
        logits = exact(ids[:, :-1])
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
        loss_of(narrow, ids).backward()
        with wide.no_sync():
            loss_of(wide, ids).backward()
    wide.finish_grad_sync()

    def error(grads: dict[str, Any]) -> float:
        truth = {name: p.grad for name, p in exact.named_parameters() if p.grad is not None}
        off = sum((grads[name].double() - value).square().sum() for name, value in truth.items())
        return float((off / sum(value.square().sum() for value in truth.values())) ** 0.5)

    of_ours = error({slot.name: slot.main_grad for slot in wide.reducer.slots})
    of_torch = error({name: parameter.grad for name, parameter in narrow.named_parameters()})
    assert of_ours < of_torch / 4, "what is left is the error of each bf16 gradient by itself"


@pytest.mark.guarantee("gradient-finite-large", "14-buckets-start", "bad-gradient-ends")
@pytest.mark.parametrize("value", [math.nan, math.inf])
@on_ranks(2)
def test_bad_gradients_end_the_step_on_every_rank_and_name_their_bucket(
    rank: int, value: float
) -> None:
    """The gradient of one layer is `value` somewhere on rank 1."""
    net: Any = make_net()
    model = BucketedDataParallel(net, bucket_size=700)
    handle = net.layers[1].weight.register_hook(
        lambda grad: grad.index_fill(0, torch.tensor([2]), value) if rank == 1 else grad
    )
    loss_of(model, ids_of(rank, 0, 0)).backward()
    message = "rank 1: a gradient of bucket 1, of layers.1.bias to layers.0.weight, is not finite"
    with pytest.raises(GradientError, match=re.escape(message)):
        model.finish_grad_sync()
    assert all(parameter.grad is None for parameter in model.parameters()), (
        "nothing is left to step with"
    )
    handle.remove()
    loss_of(model, ids_of(rank, 1, 0)).backward()
    model.finish_grad_sync()
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert all(grad.isfinite().all() for grad in grads), "the next step is sound again"


@pytest.mark.guarantee("gradient-finite-large")
@on_ranks(2)
def test_a_finite_gradient_whose_square_is_not_is_no_error(rank: int) -> None:
    module = torch.nn.Linear(4, 1, bias=False)
    model = BucketedDataParallel(module)
    model(torch.full((1, 4), 1e25)).sum().backward()
    model.finish_grad_sync()
    assert module.weight.grad is not None
    assert module.weight.grad.isfinite().all()


@pytest.mark.guarantee("bad-gradient-ends")
@on_ranks(2)
def test_a_bad_shared_gradient_is_named_where_it_came_from(rank: int) -> None:
    """Two pipeline stages share an embedding, of which the second makes something not finite."""
    stage = torch.nn.ModuleDict(
        {"own": torch.nn.Linear(4, 4), "shared": torch.nn.Linear(4, 4, bias=False)}
    )
    model = BucketedDataParallel(stage, ranks=Ranks(ParallelLayout(pp=2)), tied=["shared.weight"])
    shared = stage["shared"](torch.ones(1, 4)) * (float("nan") if rank == 1 else 1.0)
    (shared + stage["own"](torch.ones(1, 4))).sum().backward()
    named = ", of shared.weight," if rank == 1 else ""
    message = f"rank 1: a gradient of bucket 1{named} is not finite"
    with pytest.raises(GradientError, match=re.escape(message)):
        model.finish_grad_sync()


class Tied(torch.nn.Module):
    """Parameters by name, whose gradients are their values of `slopes`."""

    def __init__(self, slopes: dict[str, float]) -> None:
        super().__init__()
        for name in slopes:
            self.register_parameter(name, torch.nn.Parameter(torch.ones(2)))
        self.slopes = slopes

    def forward(self) -> torch.Tensor:
        trained = [(n, p) for n, p in self.named_parameters() if p.requires_grad]
        return torch.stack([p.sum() * self.slopes[name] for name, p in trained]).sum()


@pytest.mark.guarantee("gradients-torch-ddp", "uses-would-give")
@on_ranks(2)
def test_tied_parameters_meet_by_their_order_in_tied(rank: int) -> None:
    """Stages may register them in another order, and call them otherwise."""
    slopes = {"embedding": 1.0, "positions": 2.0}
    of_rank = slopes if rank == 0 else dict(reversed(slopes.items()))
    ranks = Ranks(ParallelLayout(pp=2))
    model = BucketedDataParallel(Tied(of_rank), ranks=ranks, tied=["embedding", "positions"])
    model().backward()
    model.finish_grad_sync()
    grads = {
        name: p.grad.tolist() for name, p in model.module.named_parameters() if p.grad is not None
    }
    assert grads == {"embedding": [2.0, 2.0], "positions": [4.0, 4.0]}
    for wrong in (["embeding"], "embedding"):
        with pytest.raises(ConfigError, match=r"tied names 'e\w*', and the module has no such"):
            BucketedDataParallel(Tied(of_rank), ranks=ranks, tied=wrong)
    with pytest.raises(ConfigError, match="tied is a set, which has no order"):
        BucketedDataParallel(Tied(of_rank), ranks=ranks, tied={"embedding", "positions"})  # type: ignore[arg-type]


@pytest.mark.guarantee("gradients-torch-ddp")
@on_ranks(2)
def test_a_tied_parameter_that_is_frozen_later_has_no_gradient(rank: int) -> None:
    ranks = Ranks(ParallelLayout(pp=2))
    model = BucketedDataParallel(
        Tied({"embedding": 1.0, "own": 1.0}), ranks=ranks, tied=["embedding"]
    )
    embedding = model.module.get_parameter("embedding")
    embedding.requires_grad_(False)
    model().backward()
    model.finish_grad_sync()
    assert embedding.grad is None, "AdamW would decay it"


@pytest.mark.guarantee("norms-count-element")
@on_ranks(2)
def test_layers_of_megatron_count_with_all_their_parts(rank: int) -> None:
    model = BucketedDataParallel(
        Tied({"part": 1.0, "copy": 1.0}), ranks=Ranks(ParallelLayout(tp=2))
    )
    model.module.get_parameter("part").tensor_model_parallel = True  # type: ignore[attr-defined]
    model().backward()
    model.finish_grad_sync()
    assert float(model.clip_grad_norm_(1e9)) == pytest.approx(math.sqrt(2 + 2 + 2))


@pytest.mark.guarantee("norms-count-element")
@on_ranks(2)
def test_split_parameters_are_clipped_by_the_norm_of_all_their_parts(rank: int) -> None:
    def make() -> torch.nn.Sequential:
        torch.manual_seed(5)
        return torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Linear(8, 6, bias=False))

    x = torch.arange(16.0).view(2, 8)
    weights = torch.arange(6.0).add(1)
    whole = make()
    (whole(x) * weights).square().sum().backward()
    expected = torch.nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
    module = make()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    parallelize_module(module, mesh, {"1": ColwiseParallel(output_layouts=None)})
    alone = [dist.new_group([number]) for number in range(2)][rank]
    model = BucketedDataParallel(module, group=alone, check_gradients=False)
    (model(x) * weights.chunk(2)[rank]).square().sum().backward()
    model.finish_grad_sync()
    norm = model.clip_grad_norm_(1.0)
    mains = {slot.name: slot.main_grad for slot in model.reducer.slots}
    assert float(norm) == pytest.approx(float(expected), rel=1e-5)
    torch.testing.assert_close(mains["0.weight"], whole[0].weight.grad, rtol=1e-4, atol=1e-7)


def test_float64_gradients_are_clipped_by_their_norm() -> None:
    torch.manual_seed(5)
    wide = torch.nn.Linear(3, 2, dtype=torch.float64)
    narrow = torch.nn.Linear(2, 2)
    model = BucketedDataParallel(torch.nn.ModuleList([wide, narrow]))
    hidden = wide(torch.arange(6.0, dtype=torch.float64).view(2, 3))
    narrow(hidden.float()).square().sum().backward()
    model.finish_grad_sync()
    before = [
        parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None
    ]
    expected = torch.cat([grad.double().flatten() for grad in before]).norm()
    assert float(model.clip_grad_norm_(0.5)) == pytest.approx(float(expected), rel=1e-6)
    after = [parameter.grad for parameter in model.parameters()]
    torch.testing.assert_close(after, [grad * (0.5 / expected).to(grad.dtype) for grad in before])


@on_ranks(2)
def test_all_ranks_begin_with_the_weights_and_buffers_of_the_first(rank: int) -> None:
    torch.manual_seed(rank)
    linear = torch.nn.Linear(3, 3)
    norm = torch.nn.BatchNorm1d(3)
    assert norm.running_mean is not None
    norm.running_mean += rank
    BucketedDataParallel(torch.nn.Sequential(linear, norm))
    torch.manual_seed(0)
    assert torch.equal(linear.weight, torch.nn.Linear(3, 3).weight)
    assert norm.running_mean.tolist() == [0.0] * 3


@pytest.mark.guarantee("bucketeddataparallel-ddp-gradients", "16-losses-sums")
@pytest.mark.parametrize("tokens", [[3, 1], [0, 0]])
@on_ranks(2)
def test_per_token_gradients_are_divided_by_the_tokens_of_all_ranks(
    rank: int, tokens: list[int]
) -> None:
    """By one at least."""
    linear = torch.nn.Linear(2, 1, bias=False)
    model = BucketedDataParallel(linear, average=False)
    (model(torch.ones(1, 2)).sum() * tokens[rank]).backward()
    model.finish_grad_sync(torch.tensor(tokens[rank]))
    assert linear.weight.grad is not None
    assert linear.weight.grad.tolist() == [[min(sum(tokens), 1.0)] * 2]


@on_ranks(2)
def test_a_loss_scale_falls_together_and_rises_after_good_steps(rank: int) -> None:
    """In four steps, of which the second overflows on rank 0 only."""
    net: Any = make_net()
    fully_shard(net, mp_policy=MixedPrecisionPolicy(torch.float16, torch.float32))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    scale = LossScale(1024.0, interval=2)
    seen = []
    for step in range(4):
        before = net.norm.weight.to_local().clone()
        loss = loss_of(net, ids_of(rank, step, 0)) * scale.value
        (loss * float("inf") if step == 1 and rank == 0 else loss).backward()
        found = [parameter.grad for parameter in net.parameters()]
        grads = [grad.to_local() for grad in found if grad is not None]
        good = scale.unscale(grads, torch.device("cpu"))
        if good:
            optimizer.step()
        optimizer.zero_grad()
        seen.append((good, scale.value, not torch.equal(before, net.norm.weight.to_local())))
    assert seen == [
        (True, 1024.0, True),
        (False, 512.0, False),
        (True, 512.0, True),
        (True, 1024.0, True),
    ]


def test_a_loss_scale_doubles_after_a_thousand_good_steps() -> None:
    scale = LossScale()
    for _ in range(1000):
        assert scale.value == 2**16
        assert scale.unscale([], torch.device("cpu"))
    assert scale.value == 2**17


@pytest.mark.parametrize(("dtype", "value"), [(torch.float16, 6e4), (torch.float32, 1e38)], ids=str)
def test_finite_gradients_whose_norm_overflows_are_good(dtype: torch.dtype, value: float) -> None:
    scale = LossScale(2.0)
    grads = [torch.full((4,), value, dtype=dtype), torch.ones(2), torch.empty(0)]
    assert scale.unscale(grads, torch.device("cpu"))
    assert float(grads[0][0]) == pytest.approx(value / 2, rel=1e-3)


@pytest.mark.guarantee("run-diverged-ends")
def test_a_loss_scale_that_cannot_fall_further_ends_the_run() -> None:
    scale = LossScale(2.0)

    def is_good(gradient: float) -> bool:
        return scale.unscale([torch.tensor([1.0, gradient])], torch.device("cpu"))

    assert not is_good(math.inf)
    assert scale.value == 1.0
    assert is_good(1.0)
    with pytest.raises(GradientError, match="not finite at the least loss scale, 1"):
        is_good(math.inf)


def test_backward_passes_that_are_expected_add_up_until_the_last() -> None:
    ours = BucketedDataParallel(make_net())
    theirs = make_net()
    with ours.expect(3):
        for micro in range(3):
            for model in (ours, theirs):
                loss_of(model, ids_of(0, 0, micro)).backward()
    ours.finish_grad_sync()
    assert_same_gradients(ours.module, theirs)


@pytest.mark.guarantee("gradients-not-zeroed")
def test_a_backward_that_was_not_zeroed_adds_up_as_in_torch() -> None:
    ours = BucketedDataParallel(make_net())
    theirs = make_net()
    for step in range(2):
        ids = torch.arange(24).view(4, 6) + step
        for model in (ours, theirs):
            logits = model(ids[:, :-1])
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
        ours.finish_grad_sync()
    assert_same_gradients(ours.module, theirs)


def test_a_parameter_that_was_unused_has_its_gradient_in_the_next_step() -> None:
    """Also without checks, where the host reads nothing of a step that uses all parameters."""
    ours = BucketedDataParallel(make_net(), check_gradients=False)
    theirs = make_net()
    for step in range(2):
        for model in (ours, theirs):
            model.zero_grad()
            loss_of(model, ids_of(0, step, 0), rarely=step == 1).backward()
        ours.finish_grad_sync()
        assert_same_gradients(ours.module, theirs)


def test_tokens_that_were_counted_on_the_host_are_divided_by_on_the_device() -> None:
    """On `meta` for want of a second device here: NCCL sums nothing of the host's."""
    for tokens in (torch.tensor(3), torch.tensor(3.0, dtype=torch.float64)):
        inverse = inverse_of_tokens(tokens, [], torch.device("meta"))
        assert (inverse.device.type, inverse.dtype) == ("meta", torch.float64)


def test_gradients_are_where_the_parameters_that_are_trained_are() -> None:
    """The first parameter is frozen, and on another device: `meta`, for want of a second one here."""
    frozen = torch.nn.Linear(4, 4, device="meta").requires_grad_(False)
    trained = torch.nn.Linear(4, 4)
    model = BucketedDataParallel(torch.nn.ModuleList([frozen, trained]), average=False)
    trained(torch.ones(1, 4)).sum().backward()
    model.finish_grad_sync(torch.tensor(2))
    assert trained.bias.grad is not None
    assert trained.bias.grad.tolist() == [0.5] * 4


def test_a_state_that_lacks_a_parameter_is_refused_as_by_the_module() -> None:
    model = BucketedDataParallel(make_net())
    state = model.state_dict()
    del state["norm.bias"]
    with pytest.raises(RuntimeError, match=r"Missing key.*norm\.bias"):
        model.load_state_dict(state)
    model.load_state_dict(state, strict=False)
