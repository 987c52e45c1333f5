"""The trainer's model: what is computed again, what is split over ranks, and how it begins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.gang import Gang
from tests.model_programs import steps_of

TOML = """
[data]
blend = ["mock://random"]
sequence_length = 64
[model]
vocab_size = 101
dim = 16
layers = 4
heads = 2
[train]
iters = 1
micro_batch_size = 2
global_batch_size = 8
out_dir = "{folder}/run"
[parallel]
bucket_size = 3000
"""
DOCUMENTS = [[0, 5, 30, 64], [0, 13, 64, 64]]


@pytest.fixture
def run_file(tmp_path: Path) -> str:
    (tmp_path / "run.toml").write_text(TOML.format(folder=tmp_path))
    return str(tmp_path / "run.toml")


def assert_same(got: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Losses and gradients are the same to the bit."""
    assert got["loss"] == wanted["loss"]
    assert got["grads"].keys() == wanted["grads"].keys()
    for name, grad in wanted["grads"].items():
        assert np.array_equal(got["grads"][name], grad), name


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["one", "several"])
def test_activations_that_are_computed_again_change_no_bit_and_are_not_kept(run_file: str, documents: Any) -> None:
    kept = {setting: steps_of(0, run_file, [f"train.recompute={setting}"], documents) for setting in ("none", "2", "full", "9")}
    for other in kept.values():
        assert_same(other, kept["none"])
    bytes_of = {setting: sum(result["saved"]) for setting, result in kept.items()}
    assert bytes_of["9"] == bytes_of["full"]
    assert bytes_of["none"] - bytes_of["2"] == pytest.approx((bytes_of["none"] - bytes_of["full"]) / 2, rel=0.1)
    assert bytes_of["full"] < bytes_of["none"] / 3


@pytest.mark.parametrize(
    "layout",
    [["parallel.tp=2"], ["parallel.cp=2", "parallel.optimizer=sharded"], ["parallel.pp=2"]],
    ids=["tp", "cp", "pp"],
)
def test_they_are_computed_again_on_any_layout(gang: Gang, run_file: str, layout: list[str]) -> None:
    for documents in (None, DOCUMENTS):
        kept, again = (gang.run(2, steps_of, run_file, [*layout, *own], documents) for own in ([], ["train.recompute=full"]))
        for one, other in zip(kept, again, strict=True):
            assert_same(other, one)
        assert sum(again[0]["saved"]) < sum(kept[0]["saved"]) / 2
