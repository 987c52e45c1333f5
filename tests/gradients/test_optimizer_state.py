"""Training loops of one's own whose state is divided by fully_shard: saved and loaded by torch's
distributed checkpoints, on any ranks.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import state_programs as programs
from tests.support.gang import Gang


def assert_close(got: list[list[float]], expected: list[list[float]]) -> None:
    for ours, theirs in zip(got, expected, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)


@pytest.mark.guarantee("optimizer-state-goes")
@pytest.mark.parametrize("kind", programs.OPTIMIZERS)
def test_a_state_goes_on_with_other_ranks_and_between_sharded_and_replicated(
    gang: Gang, tmp_path: Path, kind: str
) -> None:
    """Each link loads what the one before saved. All clip by the same norm."""
    expected = gang.run(1, programs.uninterrupted, kind, False)[0]
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    gang.run(2, programs.save_after, kind, True, first, 3)
    for got in gang.run(3, programs.go_on, kind, True, first, 3):
        assert_close(got, expected)
    for got in gang.run(2, programs.go_on, kind, False, first, 3):
        assert_close(got, expected)
    gang.run(1, programs.save_after, kind, False, second, 3)
    for got in gang.run(2, programs.go_on, kind, True, second, 3):
        assert_close(got, expected)


@pytest.mark.guarantee("optimizer-state-goes")
def test_a_run_that_computes_in_bf16_goes_on_with_its_fp32_parameters_to_the_bit(
    gang: Gang, tmp_path: Path
) -> None:
    expected = gang.run(2, programs.uninterrupted, "AdamW fused", True, True)
    gang.run(2, programs.save_after, "AdamW fused", True, str(tmp_path), 3, True)
    assert gang.run(2, programs.go_on, "AdamW fused", True, str(tmp_path), 3, True) == expected


@pytest.mark.guarantee("optimizer-state-goes")
def test_a_state_is_saved_in_the_background(gang: Gang, tmp_path: Path) -> None:
    expected = gang.run(2, programs.uninterrupted, "AdamW fused", True, True)
    assert gang.run(2, programs.asynchronous, str(tmp_path)) == expected


@pytest.mark.guarantee("sharded-clips")
def test_a_gradient_that_is_not_finite_on_one_rank_is_an_error_on_all(gang: Gang) -> None:
    for message in gang.run(2, programs.bad_on_one_rank):
        assert "non-finite" in message


@pytest.mark.guarantee("sharded-trains-as-one")
def test_a_parameter_without_dimensions_is_refused(gang: Gang) -> None:
    for message in gang.run(2, programs.refused_scalar):
        assert "scalar" in message
