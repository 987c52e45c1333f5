"""Training with the optimizer's state divided over ranks by torch's fully_shard gives what one rank
alone gives, or an error.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support import sharded_programs as programs
from tests.support.gang import Gang


@pytest.fixture(scope="module")
def losses_of_uses(
    gang: Gang, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, tuple[float, float]]]:
    return gang.run(2, programs.losses_of_uses, str(tmp_path_factory.mktemp("uses")))


@pytest.mark.guarantee("sharded-trains-as-one")
@pytest.mark.parametrize("use", programs.USES)
def test_a_forward_uses_the_stepped_parameters_however_it_uses_them(
    losses_of_uses: list[dict[str, tuple[float, float]]], use: str
) -> None:
    for losses in losses_of_uses:
        loss, alone = losses[use]
        assert loss == pytest.approx(alone, rel=1e-5)


def test_a_part_of_the_module_is_read_as_it_was_stepped(gang: Gang, tmp_path: Any) -> None:
    assert max(gang.run(2, programs.read_of_a_part, str(tmp_path))) < 1e-6


@pytest.mark.guarantee("sharded-trains-as-one")
@pytest.mark.parametrize("how", programs.WRITES)
def test_what_is_written_into_parameters_stays(gang: Gang, how: str) -> None:
    assert gang.run(2, programs.written, how) == [0.0] * 2


@pytest.mark.guarantee("sharded-trains-as-one")
@pytest.mark.parametrize(
    ("optimizer", "zeroes", "dtype"),
    [
        ("AdamW", True, torch.float32),
        ("SGD", False, torch.float32),
        ("SGD", True, torch.float64),
    ],
)
def test_steps_are_those_of_one_rank(
    gang: Gang, optimizer: str, zeroes: bool, dtype: torch.dtype
) -> None:
    off = 1e-6 if dtype == torch.float32 else 1e-15
    assert max(gang.run(2, programs.steps, optimizer, zeroes, dtype, {"lr": 0.1})) < off


@pytest.mark.guarantee("sharded-trains-as-one")
def test_an_optimizer_that_looks_at_whole_matrices_steps_as_on_one_rank_or_is_refused(
    gang: Gang,
) -> None:
    settings = {"lr": 0.1}
    for off in gang.run(
        2, programs.outcome, programs.steps, "Adafactor", True, torch.float32, settings
    ):
        assert isinstance(off, str) or off < 1e-6


def test_no_rank_steps_by_its_own_gradients(gang: Gang) -> None:
    for moved in gang.run(2, programs.outcome, programs.never_averaged):
        assert moved == 0 or isinstance(moved, str)


def test_a_step_after_zero_grad_moves_nothing(gang: Gang) -> None:
    assert max(gang.run(2, programs.stepped_without_gradients)) < 1e-6


@pytest.mark.guarantee("sharded-clips")
def test_torchs_clip_grad_norm_clips_by_the_norm_of_all_ranks(gang: Gang) -> None:
    for norm, alone, off in gang.run(2, programs.clipped_by_torch):
        assert norm == pytest.approx(alone, rel=1e-5)
        assert off < 1e-6


@pytest.mark.xfail(
    strict=True,
    reason="torch's set_optimizer_state_dict takes the settings of any saved group that shares one "
    "parameter; docs/training.md says to set them again",
)
def test_a_state_of_other_groups_is_refused_or_leaves_their_settings(gang: Gang) -> None:
    for decay in gang.run(2, programs.outcome, programs.loaded_into_other_groups):
        assert decay == 0.01 or isinstance(decay, str)


def test_groups_of_an_optimizer_without_state_keep_their_settings(
    gang: Gang, tmp_path: Any
) -> None:
    assert gang.run(2, programs.groups_without_state, str(tmp_path)) == [[0.01, 0.0]] * 2


def test_parameters_that_are_trained_later_are_stepped_and_saved(gang: Gang) -> None:
    for off, is_saved in gang.run(2, programs.unfrozen_later):
        assert off < 1e-6
        assert is_saved


@pytest.mark.guarantee("sharded-trains-as-one")
def test_a_convolution_keeps_its_memory_format_or_is_refused(gang: Gang) -> None:
    for is_kept in gang.run(2, programs.outcome, programs.memory_format_in_a_forward):
        assert is_kept is True or isinstance(is_kept, str)
