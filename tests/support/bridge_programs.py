"""Megatron-Bridge's own dataset setup, callbacks, training step and counts on CPU ranks, around the
schedule and GPT model of megatron-core.
"""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from streammega import DataConfig
from tests.support.bridge_contract import training
from tests.support.megatron_programs import (
    EVAL_INTERVAL,
    SAVE_INTERVAL,
    STEP_SECONDS,
    STEPS,
    NoTimer,
    Optimizer,
    Schedule,
    a_process_group,
    forward_step,
    gpt_model,
    note,
)

MICRO_BATCH = 2
GLOBAL_BATCH = 8


def run_config(dataset: Any) -> Any:
    """What Bridge's functions ask of its ConfigContainer."""
    train = SimpleNamespace(
        train_samples=None,
        train_iters=STEPS,
        global_batch_size=GLOBAL_BATCH,
        micro_batch_size=MICRO_BATCH,
        eval_interval=EVAL_INTERVAL,
        eval_iters=1,
        exit_signal=None,
        exit_signal_handler_for_dataloader=False,
        skip_train=False,
        empty_unused_memory_level=0,
    )
    optimizer = SimpleNamespace(
        reuse_grad_buf_for_mxfp8_param_ag=False,
        barrier_with_L1_time=False,
        log_num_zeros_in_grad=False,
    )
    return SimpleNamespace(
        dataset=dataset,
        train=train,
        optimizer=optimizer,
        ddp=SimpleNamespace(overlap_param_gather=False),
        dist=SimpleNamespace(use_decentralized_pg=True),
        model=SimpleNamespace(virtual_pipeline_model_parallel_size=None),
        data_parallel_size=dist.get_world_size(),
    )


def train(rank: int, folder: str, config: DataConfig) -> None:
    """Train to the end, from the newest checkpoint of the folder on. Every rank notes the rows that
    it was given in each step, and the loss.
    """
    with a_process_group():
        from megatron.core import num_microbatches_calculator as calculator
        from megatron.core import parallel_state
        from megatron.core import rerun_state_machine as rerun

        parallel_state.initialize_model_parallel()
        calculator.init_num_microbatches_calculator(
            rank, None, GLOBAL_BATCH, MICRO_BATCH, dist.get_world_size()
        )
        rerun.initialize_rerun_state_machine()
        try:
            _train(rank, Path(folder), config)
        finally:
            rerun.destroy_rerun_state_machine()
            calculator.destroy_num_microbatches_calculator()
            parallel_state.destroy_model_parallel()


def _train(rank: int, folder: Path, config: DataConfig) -> None:
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.process_groups_config import ProcessGroupCollection

    bridge = training()
    from streammega.integrations import megatron_bridge

    dataset, callback = megatron_bridge.stream_dataset(config, micro_batch_size=MICRO_BATCH)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    run = run_config(dataset)
    model = gpt_model(config.sequence_length)
    model.config.seq_length = config.sequence_length
    optimizer = Optimizer(model)
    counts = bridge.TrainState()
    state = SimpleNamespace(cfg=run, train_state=counts, timers=lambda *names, **options: NoTimer())
    load(folder, counts, model)
    train_data, valid_data, _ = bridge.setup_data_iterators(
        run,
        counts,
        1,
        bridge.get_dataset_provider(dataset),
        parallel_state.get_data_parallel_group(),
    )
    callbacks = bridge.CallbackManager()
    callbacks.add([callback])
    assert bridge.should_fire(callbacks, "on_train_start")
    callbacks.fire("on_train_start", bridge.CallbackContext(state=state, model=[model]))
    while counts.step < STEPS:
        began = time.monotonic()
        noted: dict[str, Any] = {"step": counts.step, "train": [], "valid": []}
        loss, *_ = bridge.train_step(
            partial(forward_step, rows=noted["train"]),
            train_data,
            [model],
            optimizer,
            Schedule(),
            state,
            groups,
            get_forward_backward_func(),
        )
        noted["loss"] = float(loss["lm loss"])
        counts.step += 1
        counts.consumed_train_samples += GLOBAL_BATCH
        if counts.step % EVAL_INTERVAL == 0:
            for _ in range(GLOBAL_BATCH // (MICRO_BATCH * dist.get_world_size())):
                noted["valid"] += next(valid_data)["tokens"].tolist()
            counts.consumed_valid_samples += GLOBAL_BATCH
        note(folder, rank, noted)
        if counts.step % SAVE_INTERVAL == 0:
            dist.barrier()
            if rank == 0:
                save(folder, counts, model)
        time.sleep(max(0.0, began + STEP_SECONDS - time.monotonic()))


def save(folder: Path, counts: Any, model: Any) -> None:
    """What Bridge's checkpoints hold of a run's data: its counts, as it writes them."""
    torch.save({"model": model.state_dict(), "train_state": counts.state_dict()}, folder / "new.pt")
    os.replace(folder / "new.pt", folder / "newest.pt")


def load(folder: Path, counts: Any, model: Any) -> None:
    """Of the newest checkpoint, if there is one."""
    path = folder / "newest.pt"
    if path.exists():
        saved = torch.load(path, weights_only=False)
        model.load_state_dict(saved["model"])
        counts.load_state_dict(saved["train_state"])
