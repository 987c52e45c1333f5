"""Configs for torchtitan's `--module`, as a user would write them beside their run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torchtitan.models.llama3.config_registry import llama3_debugmodel

from streammega.integrations.torchtitan import StreamDataLoader

GLOBAL_BATCH = 8
ROWS = 2
LENGTH = 16


def tiny() -> Any:
    """The smallest model of torchtitan's, on short sequences."""
    config = llama3_debugmodel()
    config.dataloader = StreamDataLoader.Config(
        global_batch_size=GLOBAL_BATCH, settings={"shuffle_lanes": 16}
    )
    # every rank has the model whole: it is not run, and dividing it asks for newer torches
    config.model_spec = replace(config.model_spec, parallelize_fn=lambda model, **given: model)
    training = config.training
    training.disable_cuda_graphs = True
    if hasattr(training, "seq_len"):
        training.seq_len = LENGTH
        training.local_batch_size = ROWS
        training.global_batch_size = GLOBAL_BATCH
    else:
        training.max_context_length = LENGTH
        training.num_tokens_per_microbatch_per_dp_rank = ROWS * LENGTH
        training.num_tokens_per_train_step = GLOBAL_BATCH * LENGTH
    config.checkpoint.enable = True
    config.checkpoint.interval = 2
    return config
