"""Megatron's training and Bridge's, killed and gone on with: the same samples and losses as of a run
that nobody killed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.gang import Gang
from tests.support.megatron_programs import STEPS

KILLS = pytest.mark.parametrize(
    ("order", "killed", "goes_on"),
    [
        ("megatron", 1, 1),
        ("megatron", 2, 2),
        ("megatron", 2, 1),
        pytest.param("stream", 1, 1, marks=pytest.mark.soak),
        pytest.param("stream", 2, 2, marks=pytest.mark.soak),
        ("stream", 2, 1),
    ],
)
"""The order, and the ranks of the run that is killed and of the one that goes on."""


def noted(folder: Path) -> dict[int, dict[str, Any]]:
    """By step: the rows of train and valid of all ranks, in no order, and the loss. Of steps that
    were taken again after a kill, each time the same.
    """
    steps: dict[int, dict[str, Any]] = {}
    for size in (1, 2):
        lines: dict[int, list[Any]] = {}
        for path in sorted(folder.glob(f"noted-*-of-{size}.jsonl")):
            # a step of a run that was killed may be noted again by the one that goes on
            of_rank: dict[int, Any] = {}
            for line in path.read_text().splitlines():
                one = json.loads(line)
                before = of_rank.setdefault(one["step"], one)
                assert (before["train"], before["valid"]) == (one["train"], one["valid"])
            for step, one in of_rank.items():
                lines.setdefault(step, []).append(one)
        for step, ranks in lines.items():
            if len(ranks) < size:  # killed before all of them had noted it
                continue
            whole = {
                "train": sorted(row for one in ranks for row in one["train"]),
                "valid": sorted(row for one in ranks for row in one["valid"]),
                "loss": ranks[0]["loss"],
            }
            before = steps.setdefault(step, whole)
            assert (before["train"], before["valid"]) == (whole["train"], whole["valid"])
    return steps


def check_killed(
    gang: Gang,
    folder: Path,
    killed: int,
    goes_on: int,
    train: Callable[..., None],
    *arguments: Any,
) -> None:
    """train(rank, folder, *arguments) to its end; again, but killed after five steps, and gone on
    with on `goes_on` ranks.
    """
    whole = folder / "whole"
    ended = folder / "ended"
    whole.mkdir()
    ended.mkdir()
    gang.run(killed, train, str(whole), *arguments)
    expected = noted(whole)
    assert sorted(expected) == list(range(STEPS))

    def due() -> bool:
        return len(noted(ended)) >= 5

    assert gang.run_until(due, killed, train, str(ended), *arguments)
    assert 5 <= len(noted(ended)) < STEPS
    gang.run(goes_on, train, str(ended), *arguments)
    found = noted(ended)
    assert sorted(found) == list(range(STEPS))
    for step, one in found.items():
        assert one["train"] == expected[step]["train"]
        assert one["valid"] == expected[step]["valid"]
        assert one["loss"] == pytest.approx(expected[step]["loss"], rel=1e-5)
    assert len({row for one in found.values() for row in map(tuple, one["train"])}) > 80
