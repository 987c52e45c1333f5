"""Megatron's own training on CPU ranks: its iterators, training step, schedule and GPT model, with a
plain optimizer, and checkpoints that hold what Megatron's hold of the data: counts of samples.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

VOCABULARY = 64
STEPS = 12
EVAL_INTERVAL = 3
SAVE_INTERVAL = 2
STEP_SECONDS = 0.05
"""A step takes at least so long, so that a run can be killed in the middle."""


@contextlib.contextmanager
def without_cuda() -> Iterator[None]:
    """What Megatron puts on "cuda" lies on the CPU."""
    makers = ("tensor", "zeros", "ones", "empty")
    real = {name: getattr(torch, name) for name in makers}

    def on_cpu(make: Callable[..., torch.Tensor], *values: Any, **options: Any) -> torch.Tensor:
        if options.get("device") is not None:
            options["device"] = "cpu"
        return make(*values, **options)

    from megatron.core import tensor_parallel

    tracker = tensor_parallel.get_cuda_rng_tracker
    current_device = torch.cuda.current_device
    for name, make in real.items():
        setattr(torch, name, partial(on_cpu, make))
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    tensor_parallel.get_cuda_rng_tracker = NoTracker
    try:
        yield
    finally:
        torch.cuda.current_device = current_device
        tensor_parallel.get_cuda_rng_tracker = tracker
        for name, make in real.items():
            setattr(torch, name, make)


class NoTracker:
    """Of random states on CUDA: there are none."""

    def fork(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


class Optimizer:
    """Of the model of one rank, what Megatron's step asks of an optimizer: gradients are summed over
    the ranks.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def step(self) -> tuple[bool, float, int]:
        for parameter in self._model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
        self.optimizer.step()
        return True, 0.0, 0


class Schedule:
    """Of the learning rate: it stays."""

    def step(self, increment: int) -> None:
        pass


def gpt_model(sequence_length: int) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    torch.manual_seed(7)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        use_cpu_initialization=True,
        pipeline_dtype=torch.float32,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        calculate_per_token_loss=True,
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(normalization="LayerNorm"),
        vocab_size=VOCABULARY,
        max_sequence_length=sequence_length,
    )
    model.zero_grad_buffer = lambda: None
    return model


def train(
    rank: int, folder: str, given: dict[str, Any], order: str, make_arguments: Callable[..., Any]
) -> None:
    """Train to the end, from the newest checkpoint of the folder on. Every rank notes the rows that
    it was given in each step, and the loss.
    """
    with a_process_group():
        _train(rank, Path(folder), make_arguments(**given), order)


def _train(rank: int, folder: Path, args: Any, order: str) -> None:
    from megatron.core import parallel_state
    from megatron.core.num_microbatches_calculator import (
        destroy_num_microbatches_calculator,
        init_num_microbatches_calculator,
    )
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.rerun_state_machine import (
        destroy_rerun_state_machine,
        initialize_rerun_state_machine,
    )
    from megatron.training import global_vars, training

    from streammega.integrations.megatron import datasets_provider
    from tests.integrations.test_megatron_provider import tokenizer

    world_size = dist.get_world_size()
    args.data_parallel_size = world_size
    parallel_state.initialize_model_parallel()
    init_num_microbatches_calculator(
        rank, None, args.global_batch_size, args.micro_batch_size, world_size
    )
    destroy_rerun_state_machine()  # another test of this process may have left one
    initialize_rerun_state_machine()
    try:
        model = gpt_model(args.seq_length)
        optimizer = Optimizer(model)
        load(folder, args, model)
        global_vars._GLOBAL_ARGS = args
        global_vars._GLOBAL_TOKENIZER = tokenizer()
        global_vars._GLOBAL_TIMERS = lambda *names, **options: NoTimer()
        train_data, valid_data, _ = training.build_train_valid_test_data_iterators(
            datasets_provider(order=order)  # type: ignore[arg-type]
        )
        rows: list[Any] = []
        step = partial(forward_step, rows=rows)
        while args.iteration < args.train_iters:
            began = time.monotonic()
            rows.clear()
            loss, *_ = training.train_step(
                step,
                train_data,
                [model],
                optimizer,
                Schedule(),
                model.config,
                get_forward_backward_func(),
                iteration=args.iteration,
            )
            noted: dict[str, Any] = {"step": args.iteration, "train": list(rows), "valid": []}
            noted["loss"] = float(loss["lm loss"])
            args.iteration += 1
            args.consumed_train_samples += args.global_batch_size
            if args.iteration % EVAL_INTERVAL == 0:
                for _ in range(
                    args.eval_global_batch_size // (args.eval_micro_batch_size * world_size)
                ):
                    noted["valid"] += next(valid_data)["tokens"].tolist()
                args.consumed_valid_samples += args.eval_global_batch_size
            note(folder, rank, noted)
            if args.iteration % SAVE_INTERVAL == 0:
                dist.barrier()
                if rank == 0:
                    save(folder, args, model)
            time.sleep(max(0.0, began + STEP_SECONDS - time.monotonic()))
    finally:
        destroy_rerun_state_machine()
        destroy_num_microbatches_calculator()
        parallel_state.destroy_model_parallel()


def note(folder: Path, rank: int, noted: dict[str, Any]) -> None:
    """Write down what a rank was given in a step."""
    with (folder / f"noted-{rank}-of-{dist.get_world_size()}.jsonl").open("a") as file:
        file.write(json.dumps(noted) + "\n")


@contextlib.contextmanager
def a_process_group() -> Iterator[None]:
    """Without CUDA, and of one process where a test has no other ranks."""
    warnings.simplefilter("ignore")
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with without_cuda():
        yield


class NoTimer:
    """One of Megatron's timers, that times nothing."""

    def start(self, **options: Any) -> None:
        pass

    def stop(self) -> None:
        pass


def forward_step(data_iterator: Any, model: Any, *, rows: list[Any]) -> Any:
    """As that of Megatron's GPT, of a batch that is read from its iterator."""
    batch = next(data_iterator)
    rows += batch["tokens"].tolist()
    losses = model(
        batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"]
    )

    return losses, partial(loss_of, batch["loss_mask"])


def loss_of(loss_mask: torch.Tensor, output: torch.Tensor) -> Any:
    """As that of Megatron's GPT."""
    mask = loss_mask.view(-1)
    loss = (output.view(-1) * mask).sum()
    tokens = mask.sum().to(torch.int)
    return loss, tokens, {"lm loss": torch.stack([loss.detach(), tokens])}


KEPT = ("iteration", "consumed_train_samples", "consumed_valid_samples")
"""Of Megatron's arguments, which its checkpoints hold."""


def save(folder: Path, args: Any, model: Any) -> None:
    state = {"model": model.state_dict(), "args": {name: getattr(args, name) for name in KEPT}}
    torch.save(state, folder / "new.pt")
    os.replace(folder / "new.pt", folder / "newest.pt")


def load(folder: Path, args: Any, model: Any) -> None:
    path = folder / "newest.pt"
    if path.exists():
        state = torch.load(path, weights_only=False)
        model.load_state_dict(state["model"])
        for name, value in state["args"].items():
            setattr(args, name, value)
