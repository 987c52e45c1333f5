"""The sharded optimizer's state in loops of one's own: saved and loaded by torch's distributed
checkpoints, on any ranks.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support import state_programs as programs
from tests.support.gang import Gang


def assert_close(got: list[list[float]], expected: list[list[float]], off: float = 1e-5) -> None:
    for ours, theirs in zip(got, expected, strict=True):
        assert ours == pytest.approx(theirs, abs=off)


@pytest.mark.guarantee("optimizer-state-goes")
@pytest.mark.parametrize("kind", programs.OPTIMIZERS)
def test_a_state_goes_on_with_other_ranks_and_between_sharded_and_replicated(
    gang: Gang, tmp_path: Path, kind: str
) -> None:
    """Each link loads what the one before saved; NAdam's and SGD's fresh states are made anew."""
    wide = torch.float32
    expected = gang.run(1, programs.uninterrupted, kind, wide)[0]
    first, second, third = (str(tmp_path / name) for name in ("first", "second", "third"))
    gang.run(2, programs.save_after, kind, True, wide, first, 3)
    for got in gang.run(3, programs.go_on, kind, True, wide, first, 3):
        assert_close(got, expected)
    for got in gang.run(1, programs.go_on, kind, False, wide, first, 3):
        assert_close(got, expected)
    gang.run(1, programs.save_after, kind, False, wide, second, 3)
    # torch keeps nothing of what it never stepped
    for got in gang.run(2, programs.go_on, kind, True, wide, second, 3, True):
        assert_close(got, expected)
    gang.run(3, programs.save_after, kind, True, wide, third, 0)
    for got in gang.run(2, programs.go_on, kind, True, wide, third, 0):
        assert_close(got, expected)


@pytest.mark.guarantee("optimizer-state-goes")
def test_narrow_parameters_go_on_with_their_main_parameters_to_the_bit(
    gang: Gang, tmp_path: Path
) -> None:
    narrow = torch.bfloat16
    expected = gang.run(2, programs.uninterrupted, "AdamW fused", narrow)
    gang.run(2, programs.save_after, "AdamW fused", True, narrow, str(tmp_path), 3)
    assert gang.run(2, programs.go_on, "AdamW fused", True, narrow, str(tmp_path), 3) == expected
    for got in gang.run(3, programs.go_on, "AdamW fused", True, narrow, str(tmp_path), 3):
        assert_close(got, expected[0], off=0.02)


@pytest.mark.guarantee("optimizer-state-goes")
def test_a_fused_step_goes_on_in_an_unfused_optimizer_and_back(gang: Gang, tmp_path: Path) -> None:
    wide = torch.float32
    expected = gang.run(1, programs.uninterrupted, "AdamW", wide)[0]
    for number, (saves, loads) in enumerate(
        [("AdamW fused", "AdamW"), ("AdamW", "AdamW fused"), ("AdamW foreach", "AdamW fused")]
    ):
        folder = str(tmp_path / str(number))
        gang.run(2, programs.save_after, saves, True, wide, folder, 3)
        for got in gang.run(2, programs.go_on, loads, True, wide, folder, 3):
            assert_close(got, expected)


@pytest.mark.guarantee("loaded-model-after")
def test_main_parameters_are_taken_from_the_model_where_a_checkpoint_has_none(
    gang: Gang, tmp_path: Path
) -> None:
    gang.run(1, programs.save_after, "AdamW", False, torch.float32, str(tmp_path), 3)
    assert gang.run(2, programs.narrow_from_wide, str(tmp_path)) == [[0.0]] * 2


@pytest.mark.guarantee("loaded-model-after")
@pytest.mark.parametrize("how", ["wrapper", "module", "in place"])
def test_what_is_loaded_into_a_narrow_model_after_its_optimizer_was_made_counts(
    gang: Gang, how: str
) -> None:
    for size in (1, 2):
        assert gang.run(size, programs.loaded_into_the_model, how) == [[7.0] * 20] * size


@pytest.mark.guarantee("loaded-model-after")
def test_main_parameters_whose_rounding_is_loaded_keep_their_precision(gang: Gang) -> None:
    assert gang.run(2, programs.main_parameters_keep_their_tails) == [0.0, 0.0]


def test_parts_of_one_rank_are_kept_by_torch_save_and_refused_by_other_ranks(
    gang: Gang, tmp_path: Path
) -> None:
    assert gang.run(2, programs.by_torch_save, str(tmp_path)) == ["same", "same"]
    assert "torch.distributed.checkpoint" in gang.run(1, programs.by_torch_save, str(tmp_path))[0]


@pytest.mark.guarantee("optimizer-state-goes")
def test_a_state_is_saved_in_the_background(gang: Gang, tmp_path: Path) -> None:
    expected = gang.run(2, programs.uninterrupted, "AdamW fused", torch.bfloat16)
    assert gang.run(2, programs.asynchronous, str(tmp_path)) == expected
