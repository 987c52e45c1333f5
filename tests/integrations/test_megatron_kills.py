"""Megatron's own training, killed and gone on with: the same samples and losses as of a run that
nobody killed, on as many ranks or fewer.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.integrations.test_megatron_provider import arguments, write_datasets
from tests.support.gang import Gang
from tests.support.megatron_programs import STEPS, train

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("megatron.training.training", reason="needs megatron-core 0.17 or newer")

OF_A_STEP = ("save_params_interval", "save_activations_interval", "save_wgrads_interval")
OF_A_STEP_TOO = ("save_dgrads_interval", "save_tokens_per_expert_interval")


def run_arguments(**given: Any) -> Any:
    """What Megatron's step and iterators ask of its arguments."""
    defaults: dict[str, Any] = {
        "train_iters": STEPS,
        "train_samples": None,
        "eval_interval": 3,
        "eval_iters": 1,
        "start_eval_at_iter": None,
        "eval_micro_batch_size": 2,
        "eval_global_batch_size": 4,
        "perform_rl_step": False,
        "create_attention_mask_in_dataloader": True,
        "seq_length": 12,
        "decoder_seq_length": None,
        "reuse_grad_buf_for_mxfp8_param_ag": False,
        "empty_unused_memory_level": 0,
        "vision_pretraining": False,
        "barrier_with_L1_time": False,
        "qk_clip": False,
        "log_max_attention_logit": False,
        "log_num_zeros_in_grad": False,
        "gtp_weight_remat_size": 1,
        **dict.fromkeys((*OF_A_STEP, *OF_A_STEP_TOO)),
    }
    return arguments(**(defaults | given))


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


@pytest.mark.parametrize(
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
def test_a_killed_run_goes_on_exactly(
    gang: Gang, tmp_path: Path, order: str, killed: int, goes_on: int
) -> None:
    prefixes = write_datasets(tmp_path, np.random.default_rng(0), 2)
    given = {"data_path": prefixes, "data_cache_path": str(tmp_path / "idx")}
    whole = tmp_path / "whole"
    ended = tmp_path / "ended"
    whole.mkdir()
    ended.mkdir()
    gang.run(killed, train, str(whole), given, order, run_arguments)
    expected = noted(whole)
    assert sorted(expected) == list(range(STEPS))

    def due() -> bool:
        return len(noted(ended)) >= 5

    assert gang.run_until(due, killed, train, str(ended), given, order, run_arguments)
    assert 5 <= len(noted(ended)) < STEPS
    gang.run(goes_on, train, str(ended), given, order, run_arguments)
    found = noted(ended)
    assert sorted(found) == list(range(STEPS))
    for step, one in found.items():
        assert one["train"] == expected[step]["train"]
        assert one["valid"] == expected[step]["valid"]
        assert one["loss"] == pytest.approx(expected[step]["loss"], rel=1e-5)
    assert len({row for one in found.values() for row in map(tuple, one["train"])}) > 80
