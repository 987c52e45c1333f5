"""Training with the optimizer's state divided over ranks gives what one rank alone gives.

What divides it is made in one place, `sharded_programs.make_sharded`. The tests say nothing of how.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support import sharded_programs as programs
from tests.support.gang import Gang


def fails(reason: str) -> pytest.MarkDecorator:
    """What ShardedOptimizer does wrong; torch's fully_shard will take its place."""
    return pytest.mark.xfail(strict=True, reason=f"ShardedOptimizer {reason}")


@pytest.fixture(scope="module")
def losses_of_uses(
    gang: Gang, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, tuple[float, float]]]:
    return gang.run(2, programs.losses_of_uses, str(tmp_path_factory.mktemp("uses")))


@fails("gathers parameters while the next forward begins, and a module waits for its own alone")
@pytest.mark.parametrize("use", programs.USES)
def test_a_forward_uses_the_stepped_parameters_however_it_uses_them(
    losses_of_uses: list[dict[str, tuple[float, float]]], use: str
) -> None:
    for losses in losses_of_uses:
        loss, alone = losses[use]
        assert loss == pytest.approx(alone, rel=1e-5)


@fails("lets only the whole module's state_dict wait for parameters that are under way")
def test_a_part_of_the_module_is_read_as_it_was_stepped(gang: Gang, tmp_path: Any) -> None:
    assert max(gang.run(2, programs.read_of_a_part, str(tmp_path))) < 1e-6


@fails("does not see what is written to `parameter.data` of narrow parameters")
@pytest.mark.parametrize("how", programs.WRITES)
def test_what_is_written_into_parameters_stays(gang: Gang, how: str) -> None:
    assert gang.run(2, programs.written, how) == [0.0] * 2


@pytest.mark.parametrize(
    ("optimizer", "zeroes", "dtype"),
    [
        ("AdamW", True, torch.float32),
        pytest.param(
            "SGD",
            False,
            torch.float32,
            marks=fails("forgets averaged gradients of the step before"),
        ),
        pytest.param("SGD", True, torch.float64, marks=fails("takes no float64 parameters")),
    ],
)
def test_steps_are_those_of_one_rank(
    gang: Gang, optimizer: str, zeroes: bool, dtype: torch.dtype
) -> None:
    off = 1e-6 if dtype == torch.float32 else 1e-15
    assert max(gang.run(2, programs.steps, optimizer, zeroes, dtype, {"lr": 0.1})) < off


@fails("takes Adafactor, and gives it parts of matrices")
def test_an_optimizer_that_looks_at_whole_matrices_steps_as_on_one_rank_or_is_refused(
    gang: Gang,
) -> None:
    settings = {"lr": 0.1}
    for off in gang.run(
        2, programs.outcome, programs.steps, "Adafactor", True, torch.float32, settings
    ):
        assert isinstance(off, str) or off < 1e-6


@fails("steps by the gradients of one rank where they were not averaged")
def test_no_rank_steps_by_its_own_gradients(gang: Gang) -> None:
    for moved in gang.run(2, programs.outcome, programs.never_averaged):
        assert moved == 0 or isinstance(moved, str)


@fails("steps by gradients of the step before, after zero_grad")
def test_a_step_after_zero_grad_moves_nothing(gang: Gang) -> None:
    assert max(gang.run(2, programs.stepped_without_gradients)) < 1e-6


@fails("leaves no gradients where torch's clip_grad_norm_ looks")
def test_torchs_clip_grad_norm_clips_by_the_norm_of_all_ranks(gang: Gang) -> None:
    for norm, alone, off in gang.run(2, programs.clipped_by_torch):
        assert norm == pytest.approx(alone, rel=1e-5)
        assert off < 1e-6


@fails("loads the settings of any saved group that shares one parameter with its own")
def test_a_state_of_other_groups_is_refused_or_leaves_their_settings(gang: Gang) -> None:
    for decay in gang.run(2, programs.outcome, programs.loaded_into_other_groups):
        assert decay == 0.01 or isinstance(decay, str)


@fails("numbers groups in the order of backward, and torch's optimizers in that of registration")
def test_groups_of_an_optimizer_without_state_keep_their_settings(
    gang: Gang, tmp_path: Any
) -> None:
    assert gang.run(2, programs.groups_without_state, str(tmp_path)) == [[0.01, 0.0]] * 2


@fails("trains no parameters that were frozen when they were wrapped")
def test_parameters_that_are_trained_later_are_stepped_and_saved(gang: Gang) -> None:
    for off, is_saved in gang.run(2, programs.unfrozen_later):
        assert off < 1e-6
        assert is_saved


@fails("makes all parameters contiguous, so convolutions in channels_last slow down")
def test_a_convolution_keeps_its_memory_format_or_is_refused(gang: Gang) -> None:
    for is_kept in gang.run(2, programs.outcome, programs.memory_format_in_a_forward):
        assert is_kept is True or isinstance(is_kept, str)
