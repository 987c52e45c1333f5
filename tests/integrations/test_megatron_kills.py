"""Megatron's own training, killed and gone on with: the same samples and losses as of a run that
nobody killed, on as many ranks or fewer.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.integrations.test_megatron_provider import arguments, write_datasets
from tests.support.gang import Gang
from tests.support.megatron_kills import KILLS, check_killed
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


@pytest.mark.guarantee("megatron-own-training")
@KILLS
def test_a_killed_run_goes_on_exactly(
    gang: Gang, tmp_path: Path, order: str, killed: int, goes_on: int
) -> None:
    prefixes = write_datasets(tmp_path, np.random.default_rng(0), 2)
    given = {"data_path": prefixes, "data_cache_path": str(tmp_path / "idx")}
    check_killed(gang, tmp_path, killed, goes_on, train, given, order, run_arguments)
