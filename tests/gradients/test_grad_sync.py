"""The reduction of gradients in unusual uses: right as torch's DDP is right, or an error before a
wrong number is used.
"""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from streammega import BucketedDataParallel
from tests.support import reduction_programs as programs
from tests.support.gang import Gang


@pytest.mark.guarantee("collectives-meet-other")
def test_tokens_are_counted_after_the_buckets_whichever_parameters_a_rank_used(gang: Gang) -> None:
    assert max(gang.run(2, programs.tokens_where_a_rank_leaves_a_parameter_out)) < 1e-6


@pytest.mark.guarantee("collectives-meet-other")
def test_models_of_one_group_may_be_finished_one_by_one(gang: Gang) -> None:
    for differences in gang.run(2, programs.models_finished_apart, False):
        assert max(differences) < 1e-12


@pytest.mark.guarantee("uses-would-give")
def test_models_that_were_finished_together_and_are_not_any_more_are_an_error(gang: Gang) -> None:
    for message in gang.run(2, programs.models_finished_apart, True):
        assert "finish_grad_sync([first, second])" in message


@pytest.mark.guarantee("collectives-meet-other")
def test_models_of_two_groups_are_finished_in_one_call(gang: Gang) -> None:
    for differences in gang.run(2, programs.two_groups_of_two):
        assert max(differences) < 1e-12


@pytest.mark.guarantee("tokens-models-several")
@pytest.mark.parametrize("expert_first", [False, True])
def test_tokens_of_models_of_two_groups_are_those_of_the_larger_one(
    gang: Gang, expert_first: bool
) -> None:
    for number, grads in enumerate(gang.run(4, programs.tokens_of_two_groups, expert_first)):
        assert grads == pytest.approx((1.0, 0.3 if number < 2 else 0.7))


@pytest.mark.guarantee("tokens-models-several")
def test_tokens_of_groups_that_overlap_are_not_counted(gang: Gang) -> None:
    for message in gang.run(4, programs.tokens_of_groups_that_overlap):
        assert "in one group that has all ranks of the others" in message


@pytest.mark.guarantee("meet-collective-program")
@pytest.mark.parametrize("bucket_size", [1, 10**6])
def test_a_collective_of_the_programs_after_backward_meets_no_bucket(
    gang: Gang, bucket_size: int
) -> None:
    for off in gang.run(2, programs.collective_before_the_reduction_ends, bucket_size):
        assert max(off) < 1e-12


@pytest.mark.guarantee("float64-gradients-keep")
def test_wide_gradients_keep_their_precision(gang: Gang) -> None:
    for found in gang.run(3, programs.wide_gradients):
        assert found == pytest.approx([3 + 3e-12, 1 + 1e-12, 1 + 1e-12], rel=1e-15)


def test_statistics_that_each_rank_keeps_for_itself_are_named_when_wrapped(gang: Gang) -> None:
    for said in gang.run(2, programs.said_of_buffers):
        assert len(said) == 1
        assert "1.running_mean" in said[0]
        assert "SyncBatchNorm" in said[0]


@pytest.mark.parametrize("size", [1, 2])
def test_parameters_without_elements_are_looked_at_too(gang: Gang, size: int) -> None:
    assert gang.run(size, programs.without_elements) == [[1.0]] * size


@pytest.mark.guarantee("float64-gradients-keep")
def test_a_module_that_is_wrapped_again_keeps_no_former_buffer() -> None:
    module = nn.Linear(3, 3)
    buffers = []
    for _ in range(3):
        model = BucketedDataParallel(module)
        buffers += [weakref.ref(slot.main_grad) for slot in model.reducer.slots()]
        model(torch.ones(1, 3)).sum().backward()
        model.finish_grad_sync()
        model.zero_grad()
        del model
        gc.collect()
    assert [buffer() for buffer in buffers] == [None] * 6
    module(torch.ones(1, 3)).sum().backward()
    assert module.bias.grad is not None, "nothing takes it any more"


def test_a_bucket_waits_for_all_streams_that_made_its_gradients(gang: Gang) -> None:
    for log in gang.run(2, programs.gradients_of_two_streams):
        assert log == ["branch 0 waits for branch 1", "reduced on branch 0"]


@pytest.mark.guarantee("abandoned-backward-added")
def test_what_an_abandoned_backward_added_goes_with_zero_grad(gang: Gang) -> None:
    assert gang.run(2, programs.abandoned) == [pytest.approx([2.0] * 3)] * 2


@pytest.mark.guarantee("uses-would-give")
@pytest.mark.parametrize(
    ("use", "message"),
    [
        (programs.zeroed_while_reducing, "GradientError: zero_grad was called while"),
        (programs.shared_by_two, "another BucketedDataParallel has the parameter"),
        (
            programs.split_over_the_group_itself,
            "ConfigError: the module's DTensors are split over ranks [0, 1]",
        ),
        (programs.unfrozen_later, "ConfigError: 0.weight was frozen when it was wrapped"),
        (programs.complex_parameters, "ConfigError: weight is complex"),
        (programs.checkpointed_twice, "use_reentrant=False"),
        (programs.assigned, "ConfigError: load_state_dict(assign=True)"),
        (programs.averaged_and_divided_by_tokens, "ConfigError: finish_grad_sync(num_tokens)"),
        (
            programs.another_shape,
            "rank 0 has 1.weight: torch.float32 [3, 2], trained; "
            "rank 1 has 1.weight: torch.float32 [4, 2], trained",
        ),
        (
            programs.frozen_on_one_rank,
            "rank 0 has bias: torch.float32 [2], trained; "
            "rank 1 has bias: torch.float32 [2], frozen",
        ),
        (
            programs.another_dtype,
            "rank 0 has weight: torch.float32 [2, 2], trained; rank 1 has weight: torch.float64",
        ),
        (
            programs.another_memory_layout,
            "rank 0 has weight: torch.float32 [2, 3], trained; "
            "rank 1 has weight: torch.float32 [2, 3] with strides [1, 2], trained",
        ),
        (
            programs.another_order,
            "rank 0 has a.weight: torch.float32 [2, 2], trained; rank 1 has b.weight",
        ),
        (programs.a_parameter_more, "rank 0 has nothing; rank 1 has bias: torch.float32 [2]"),
        (
            programs.another_buffer,
            "rank 0 has buffer mask: torch.float32 [2]; rank 1 has buffer mask: torch.float32 [3]",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_uses_that_would_give_wrong_gradients_are_errors(
    gang: Gang, use: Callable[[int], Any], message: str
) -> None:
    for told in gang.run(2, programs.message_of, use):
        assert message in told


def test_unusual_uses_that_are_right_have_right_gradients(gang: Gang) -> None:
    for found in gang.run(2, programs.right_all_the_same):
        assert found["sparse"] == [0.0, 2.0, 0.5, 0.5]
        assert found["by hand 0"] == [2.5, 2.5]
        assert found["by hand 1"] == [3.5, 3.5]
        assert found["forwards"] == 3.0
        assert found["losses"] == [1.5, 1.5]


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
    assert gang.run(size, programs.any_use_beside_ddp, ways, 24, wide) == [[]] * size


@pytest.mark.guarantee("gradients-torch-ddp")
@pytest.mark.parametrize("frozen", [False, True])
def test_what_no_rank_used_is_left_alone_as_by_torchs_ddp(gang: Gang, frozen: bool) -> None:
    for moved, off in gang.run(2, programs.unused, frozen):
        assert moved == [True, True, False, False, True, True]
        assert off < 1e-6


@pytest.mark.guarantee("norms-count-element")
def test_a_replicated_dtensor_counts_once_in_a_norm(gang: Gang) -> None:
    expected = math.sqrt(2 * sum(n * n for n in range(8)) + sum(n * n for n in range(48)))
    for norm, _ in gang.run(2, programs.sequence_parallel_norm):
        assert norm == pytest.approx(expected, rel=1e-6)


@pytest.mark.guarantee("kernels-may-add")
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_kernels_that_add_to_main_grad_give_the_same_steps(gang: Gang, micro_batches: int) -> None:
    for off, message in gang.run(2, programs.main_grads, micro_batches):
        assert off < 1e-6
        assert "zero_grad()" in message


@pytest.mark.guarantee("compiled-models-step")
@pytest.mark.parametrize("how", ["before", "whole graph", "in place", "wrapper"])
def test_compiled_models_step_as_eager_ones(gang: Gang, how: str) -> None:
    for off in gang.run(2, programs.compiled, how):
        assert off == [0.0] * 3
