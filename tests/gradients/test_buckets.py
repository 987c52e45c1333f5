"""Gradient buckets: the rules of their layout, and that they compute what torch's own do."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streammega import BucketedDataParallel
from streammega.errors import ConfigError, GradientError
from streammega.gradients.buckets import default_bucket_size, plan_buckets
from streammega.gradients.loss_scale import LossScale
from streammega.train.checkpoints.state import scalar_devices
from tests.support.gang import Gang
from tests.support.rank_programs import (
    bad_gradient,
    bad_shared_gradient,
    bf16_accumulation,
    clipped_tensor_parallel,
    first_weights,
    fp16_steps,
    grads_beside_ddp,
    make_net,
    per_token,
    second_backward,
    two_buffers,
)


@given(
    sizes=st.lists(st.integers(1, 500), min_size=1, max_size=30),
    bucket_size=st.integers(1, 2000),
    data=st.data(),
)
def test_buckets_follow_the_rules(sizes: list[int], bucket_size: int, data: Any) -> None:
    waiting = data.draw(st.sets(st.integers(0, len(sizes) - 1), max_size=2))
    buckets = plan_buckets(sizes, bucket_size, waiting=waiting)
    slots = [slot for bucket in buckets for slot in bucket.slots]
    backwards = list(range(len(sizes)))[::-1]
    order = [n for n in backwards if n not in waiting] + [n for n in backwards if n in waiting]
    assert [slot.parameter for slot in slots] == order, (
        "reverse registration order, those that wait last"
    )
    assert [bucket.start for bucket in buckets] == [0, *(bucket.stop for bucket in buckets[:-1])]
    end = 0
    for slot in slots:
        assert slot.stop - slot.start == sizes[slot.parameter]
        assert slot.start == end
        end = slot.stop
    for bucket in buckets:
        own = [slot.parameter in waiting for slot in bucket.slots]
        assert set(own) == {bucket.waits}
        held = bucket.slots[-1].stop - bucket.start
        if bucket not in (
            buckets[-1],
            *(b for b in buckets[:-1] if buckets[buckets.index(b) + 1].waits),
        ):
            assert held >= bucket_size
        if len(bucket.slots) > 1 and not bucket.waits:
            assert bucket.slots[-2].stop - bucket.start < bucket_size, (
                "the crossing parameter is the last"
            )
    assert default_bucket_size(1) == 40_000_000
    assert default_bucket_size(64) == 64_000_000


@pytest.mark.guarantee("bucketeddataparallel-ddp-gradients", "gradients-torch-ddp")
@pytest.mark.parametrize(
    ("micro_batches", "bucket_size", "overlap"), [(1, 1000, True), (3, 1, True), (2, 10**9, False)]
)
def test_gradients_are_those_of_torchs_ddp_to_the_bit(
    gang: Gang, micro_batches: int, bucket_size: int, overlap: bool
) -> None:
    """Two ranks: a sum of two is the same in any order."""
    assert gang.run(2, grads_beside_ddp, micro_batches, bucket_size, overlap) == [True, True]


@pytest.mark.guarantee("bucketeddataparallel-ddp-gradients")
def test_fp32_accumulation_of_bf16_gradients_is_better(gang: Gang) -> None:
    narrow, wide = gang.run(1, bf16_accumulation, 256)[0]
    assert wide < narrow / 4, "what is left is the error of each bf16 gradient by itself"


@pytest.mark.guarantee("gradient-finite-large", "14-buckets-start", "bad-gradient-ends")
@pytest.mark.parametrize(
    ("value", "limit", "at_once", "message"),
    [
        (
            math.nan,
            None,
            True,
            r"rank 1: the gradient of layers\.1\.weight is not finite in 24 of 576",
        ),
        (math.inf, None, True, r"layers\.1\.weight is not finite"),
        (1e6, 1e3, True, r"layers\.1\.weight has an element of 5e\+05, more than 1000"),
        (-1e6, 1e3, True, r"layers\.1\.weight has an element of 5e\+05, more than 1000"),
        (math.nan, None, False, r"rank 1: the gradient of layers\.1\.weight is not finite"),
        (
            math.inf,
            1e3,
            False,
            r"rank 1: the gradient of layers\.1\.weight is not finite, or has an element above 1000",
        ),
        (-1e6, 1e3, False, r"layers\.1\.weight is not finite, or has an element above 1000"),
    ],
)
def test_bad_gradients_end_the_step_on_every_rank_and_name_their_parameter(
    gang: Gang, value: float, limit: float | None, at_once: bool, message: str
) -> None:
    good, bad = gang.run(2, bad_gradient, value, limit, at_once)
    assert re.search(message, bad), bad
    assert re.search(r"rank 1 got a bad gradient", good), good


@pytest.mark.guarantee("bad-gradient-ends")
@pytest.mark.parametrize("at_once", [True, False])
def test_a_bad_shared_gradient_is_named_where_it_came_from(gang: Gang, at_once: bool) -> None:
    first, last = gang.run(2, bad_shared_gradient, at_once)
    assert "rank 1: the gradient of shared.weight is not finite" in last
    assert (
        "rank 0: the gradient of shared.weight, with what another stage added, is not finite"
        in first
    )


@pytest.mark.guarantee("uses-would-give")
@pytest.mark.parametrize("retained", [False, True])
def test_a_second_backward_after_the_reduction_began_is_an_error_not_a_wrong_gradient(
    gang: Gang, retained: bool
) -> None:
    """Accumulating without no_sync, or two losses of one forward."""
    for message in gang.run(2, second_backward, retained):
        assert "no_sync" in message


@pytest.mark.guarantee("14-buckets-start", "collectives-meet-other")
@pytest.mark.parametrize("chunks", [1, 2])
def test_buckets_of_several_buffers_and_models_start_in_one_order(gang: Gang, chunks: int) -> None:
    for differences in gang.run(2, two_buffers, chunks):
        assert len(differences) == 3 * chunks
        assert max(differences) < 1e-6


@pytest.mark.guarantee("norms-count-element")
def test_split_parameters_are_clipped_by_the_norm_of_all_their_parts(gang: Gang) -> None:
    torch.manual_seed(5)
    norm_layer = torch.nn.LayerNorm(8)
    whole = torch.nn.Sequential(norm_layer, torch.nn.Linear(8, 6, bias=False))
    (whole(torch.arange(16.0).view(2, 8)) * torch.arange(6.0).add(1)).square().sum().backward()
    expected = torch.nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
    gradient = norm_layer.weight.grad
    assert gradient is not None
    for norm, replicated in gang.run(2, clipped_tensor_parallel):
        assert norm == pytest.approx(float(expected), rel=1e-5)
        assert replicated == pytest.approx(gradient.tolist(), rel=1e-4, abs=1e-7)


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


def test_all_ranks_begin_with_the_weights_of_the_first(gang: Gang) -> None:
    first, second = gang.run(2, first_weights)
    assert first == second


@pytest.mark.guarantee("bucketeddataparallel-ddp-gradients", "16-losses-sums")
def test_per_token_gradients_are_divided_by_the_tokens_of_all_ranks(gang: Gang) -> None:
    assert gang.run(2, per_token, [3, 1]) == [[1.0, 1.0]] * 2
    assert gang.run(2, per_token, [0, 0]) == [[0.0, 0.0]] * 2, "at least one token"


def test_a_loss_scale_falls_together_and_rises_after_good_steps(gang: Gang) -> None:
    for seen in gang.run(2, fp16_steps):
        assert seen == [
            (True, 1024.0, True),
            (False, 512.0, False),
            (True, 512.0, True),
            (True, 1024.0, True),
        ]


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


@pytest.mark.guarantee("gradients-nobody-zeroed")
def test_a_backward_that_was_not_zeroed_adds_up_as_in_torch() -> None:
    ours = BucketedDataParallel(make_net())
    theirs = make_net()
    for step in range(2):
        ids = torch.arange(24).view(4, 6) + step
        for model in (ours, theirs):
            logits = model(ids[:, :-1])
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
        ours.finish_grad_sync()
    for a, b in zip(ours.module.parameters(), theirs.parameters(), strict=True):
        if b.grad is None or a.grad is None:
            assert a.grad is b.grad
            continue
        assert torch.equal(a.grad, b.grad)


@pytest.mark.parametrize(
    ("settings", "device"),
    [({"capturable": True}, "meta"), ({"foreach": True}, "cpu"), ({"capturable": False}, "cpu")],
)
def test_a_loaded_step_lies_where_the_optimizer_reads_it(
    settings: dict[str, bool], device: str
) -> None:
    """On `meta` for want of a second device here: a fused kernel reads the step by its address on
    the parameter's.
    """
    parameter = torch.nn.Parameter(torch.empty(4, device="meta"))
    optimizer = torch.optim.AdamW([{"params": [parameter], **settings}])
    assert scalar_devices(optimizer) == {id(parameter): torch.device(device)}


def test_tokens_that_were_counted_on_the_host_are_divided_by_on_the_device() -> None:
    """On `meta` for want of a second device here: NCCL sums nothing of the host's."""
    model = BucketedDataParallel(torch.nn.Linear(4, 4, device="meta"))
    for tokens in (torch.tensor(3), torch.tensor(3.0, dtype=torch.float64)):
        inverse = model.inverse_of_tokens(tokens)
        assert (inverse.device.type, inverse.dtype) == ("meta", torch.float64)


def test_wrong_uses_are_named() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        BucketedDataParallel(make_net(), bucket_size=0)
    with pytest.raises(ConfigError, match="no parameters"):
        BucketedDataParallel(torch.nn.ReLU())
