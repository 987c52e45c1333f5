"""The trainer's model: what is computed again, what is split over ranks, and how it begins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streammega import ParallelLayout
from streammega.errors import ConfigError
from streammega.train.config import load_run
from streammega.train.stages import check_layout
from tests.support.builders import write_run_file
from tests.support.gang import Gang
from tests.support.model_programs import divided_loss, first_weights, memory_of_a_stage, steps_of

DOCUMENTS = [[0, 5, 30, 64], [0, 13, 64, 64]]


def write_run(folder: Path) -> str:
    return write_run_file(
        folder,
        data={"blend": ["mock://random"], "sequence_length": 64, "split": "1,0,0"},
        model={"vocab_size": 101, "layers": 4},
        train={"train_iters": 1, "device": None, "log_batch_hash": None},
        parallel={"bucket_size": 3000},
    )


@pytest.fixture
def run_file(tmp_path: Path) -> str:
    return write_run(tmp_path)


def assert_same(got: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Losses and gradients are the same to the bit."""
    assert got["loss"] == wanted["loss"]
    assert got["grads"].keys() == wanted["grads"].keys()
    for name, grad in wanted["grads"].items():
        assert np.array_equal(got["grads"][name], grad), name


@pytest.mark.guarantee("train-recompute-changes")
@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["one", "several"])
def test_activations_that_are_computed_again_change_no_bit_and_are_not_kept(
    run_file: str, documents: Any
) -> None:
    kept = {
        setting: steps_of(0, run_file, [f"train.recompute={setting}"], documents)
        for setting in ("none", "full")
    }
    assert_same(kept["full"], kept["none"])
    bytes_of = {setting: sum(result["saved"]) for setting, result in kept.items()}
    assert bytes_of["full"] < bytes_of["none"] / 3


@pytest.mark.guarantee("train-recompute-changes")
@pytest.mark.parametrize(
    "layout",
    [["parallel.tp=2"], ["parallel.cp=2", "parallel.optimizer=sharded"], ["parallel.pp=2"]],
    ids=["tp", "cp", "pp"],
)
def test_they_are_computed_again_on_any_layout(
    gang: Gang, run_file: str, layout: list[str]
) -> None:
    kept, again = (
        gang.run(2, steps_of, run_file, [*layout, *own], DOCUMENTS)
        for own in ([], ["train.recompute=full"])
    )
    for one, other in zip(kept, again, strict=True):
        assert_same(other, one)
    assert sum(again[0]["saved"]) < sum(kept[0]["saved"]) / 2


@pytest.mark.guarantee("tensor-parallel-ranks")
def test_the_loss_over_a_divided_vocabulary_is_that_of_the_whole(gang: Gang) -> None:
    """Rows of all sizes, targets in every part, some ignored; a vocabulary that does not divide by
    the ranks.
    """
    for worst_loss, worst_grad, same in gang.run(3, divided_loss, 3):
        assert worst_loss < 1e-6
        assert worst_grad < 1e-7
        assert same


@pytest.mark.guarantee("tensor-parallel-ranks")
def test_tensor_parallel_ranks_hold_no_whole_logits(gang: Gang, run_file: str) -> None:
    whole = 2 * 64 * 101 * 4
    for sequence_parallel in ("true", "false"):
        overrides = ["parallel.tp=2", f"parallel.sequence_parallel={sequence_parallel}"]
        for result in gang.run(2, steps_of, run_file, overrides, None, 1):
            assert max(result["saved"]) < whole


@pytest.mark.guarantee("tensor-parallel-ranks")
@pytest.mark.parametrize(
    "overrides", [[], ["parallel.optimizer=sharded"]], ids=["replicated", "sharded"]
)
def test_a_divided_sequence_between_layers_gives_the_same_losses_and_gradients(
    gang: Gang, run_file: str, overrides: list[str]
) -> None:
    alone = steps_of(0, run_file, [], DOCUMENTS)
    saved = []
    for sequence_parallel in ("true", "false"):
        settings = ["parallel.tp=2", f"parallel.sequence_parallel={sequence_parallel}", *overrides]
        results = gang.run(2, steps_of, run_file, settings, DOCUMENTS)
        saved.append(sum(results[0]["saved"]))
        for result in results:
            assert result["loss"] == pytest.approx(alone["loss"], rel=1e-6)
            assert result["norm"] == pytest.approx(alone["norm"], rel=1e-5)
            for name, grad in result["grads"].items():
                np.testing.assert_allclose(
                    grad, alone["grads"][name], atol=1e-7, rtol=1e-4, err_msg=name
                )
    # what is normed is gathered for the matrix products, and kept for them
    assert saved[0] < 0.9 * saved[1]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["model.vocab_size=5", "parallel.tp=4"],
            "model.vocab_size 5 in parts of 2 leaves some of parallel.tp 4 ranks without any",
        ),
        (
            ["data.sequence_length=63"],
            r"parallel.tp 4 does not divide the 63 tokens .* set parallel.sequence_parallel=false",
        ),
        (["model.heads=2"], "model.heads 2 do not divide over parallel.tp 4"),
        (
            ["model.heads=6", "model.dim=24"],
            r"model.dim 24 makes feed-forward layers 64 wide, which parallel.tp 3 does not divide",
        ),
    ],
)
def test_sizes_that_do_not_divide_over_tensor_parallel_ranks_are_named(
    run_file: str, overrides: list[str], message: str
) -> None:
    config = load_run(run_file, ["model.heads=4", "model.dim=16", *overrides])
    tp = 4 if "parallel.tp 4" in message else 3
    with pytest.raises(ConfigError, match=message):
        check_layout(config, ParallelLayout(tp=tp))


@pytest.mark.guarantee("rank-makes-own")
@pytest.mark.parametrize(
    ("size", "overrides"),
    [
        (1, []),
        (2, ["parallel.pp=2", "parallel.virtual_pipeline_stages=2"]),
        (2, ["parallel.tp=2", "parallel.optimizer=sharded", "train.dtype=bfloat16"]),
        (4, ["parallel.tp=2", "parallel.pp=2"]),
    ],
    ids=["alone", "virtual-stages", "tp-bf16", "tp-pp"],
)
def test_first_weights_are_those_of_one_rank_alone(
    gang: Gang, run_file: str, size: int, overrides: list[str]
) -> None:
    assert all(gang.run(size, first_weights, run_file, overrides))


@pytest.mark.guarantee("rank-makes-own")
def test_a_rank_makes_its_own_part_of_the_model_and_never_the_whole(
    gang: Gang, run_file: str
) -> None:
    sizes = ["model.dim=512", "model.layers=8", "model.vocab_size=8192"]
    ((height, own, whole),) = gang.run(1, memory_of_a_stage, run_file, sizes)
    assert whole > 100_000_000
    embedding = 8192 * 512 * 4
    assert height < own + 2 * embedding
    assert height < 0.7 * whole
