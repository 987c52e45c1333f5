"""Micro-batches of a step through the stages of all pipeline ranks, by torch's schedules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from streammega.parallel import Ranks
from streammega.train.config import RunConfig
from streammega.train.inputs import StageInputs
from streammega.train.losses import StepLosses
from streammega.train.stages import Stages, vocab_part


class Pipeline:
    """Runs micro-batches through the stages of all pipeline ranks. Collective over them."""

    def __init__(
        self, stages: Stages, config: RunConfig, ranks: Ranks, device: torch.device
    ) -> None:
        self._stages = stages
        self._config = config
        self._ranks = ranks
        self._device = device
        self._schedule: Any = None
        self._schedule_key = (0, 0)
        self._losses: StepLosses | None = None

    def run(
        self, inputs_of_step: Sequence[StageInputs], length: int, losses: StepLosses, *, train: bool
    ) -> None:
        """Forward of all micro-batches, and with `train` backward. `losses` keeps the losses of all
        samples, which have `length` tokens.

        torch's schedule takes the micro-batches as one batch, and cuts it again.
        """
        key = (len(inputs_of_step), length)
        if key != self._schedule_key:
            # A ramp-up changes the number of micro-batches, a phase the length. torch's stages keep
            # memory for both, so only one schedule is kept.
            self._schedule = self._make_schedule(*key)
            self._schedule_key = key
        self._losses = losses
        arguments: list[Tensor] = []
        if self._stages.has_first:
            tokens = [inputs.tokens for inputs in inputs_of_step if inputs.tokens is not None]
            arguments = [torch.cat(tokens)]
        options: dict[str, Any] = {}
        if self._stages.has_last:
            targets = [inputs.target for inputs in inputs_of_step if inputs.target is not None]
            options["target"] = torch.cat(targets)
        keywords = _concatenate([inputs.keywords for inputs in inputs_of_step], length)
        run = self._schedule.step if train else self._schedule.eval
        # The logits of all micro-batches together are large, and only their losses are wanted.
        run(*arguments, **options, **keywords, return_outputs=False)

    def _make_schedule(self, num_micro_batches: int, length: int) -> Any:
        """torch's schedule for so many micro-batches of samples of `length` tokens.

        A schedule for another placement of stages changes three places: this one, `make_stages`, which
        gives rank r the stages r, r + pp, ..., and `check_layout`, which knows the numbers of
        micro-batches that fit. BucketedDataParallel counts one gradient of each parameter a
        micro-batch by its hook, which schedules that split the backward (zero bubble) do not call.
        """
        stages: Any = self._make_stages(length)
        # Gradients are sums over all micro-batches. torch would divide them by their number.
        options: dict[str, Any] = {"loss_fn": self._loss, "scale_grads": False}
        if len(stages) > 1:
            return ScheduleInterleaved1F1B(stages, num_micro_batches, **options)
        return Schedule1F1B(stages[0], num_micro_batches, **options)

    def _loss(self, logits: Tensor, target: Tensor) -> Tensor:
        """A schedule is used for many steps, and each step has losses of its own."""
        assert self._losses is not None
        return self._losses(logits, target)

    def _make_stages(self, length: int) -> list[PipelineStage]:
        """Stages with known shapes of inputs and outputs, so that torch need not find them by a run."""
        config = self._config
        layout = self._ranks.layout
        dtype: torch.dtype = getattr(torch, config.train.dtype)
        rows = config.train.micro_batch_size
        kept = length // layout.cp
        between = kept // layout.tp if config.parallel.sequence_parallel else kept
        part = vocab_part(config.model.vocab_size, self._ranks)
        entries = config.model.vocab_size if part is None else part.size
        with torch.device("meta"):
            tokens = torch.empty(rows, kept, dtype=torch.int64)
            activations = torch.empty(
                rows, between, config.model.dim, dtype=dtype, requires_grad=True
            )
            logits = torch.empty(rows, kept, entries, dtype=dtype)
        num_stages = self._stages.num_stages
        return [
            PipelineStage(
                chunk,
                stage,
                num_stages,
                self._device,
                input_args=(tokens if stage == 0 else activations,),
                output_args=(logits if stage == num_stages - 1 else activations,),
                group=self._ranks.group("pp"),
            )
            for chunk, stage in zip(self._stages.chunks, self._stages.ids, strict=True)
        ]


def _concatenate(keywords_of_step: Sequence[dict[str, Any]], length: int) -> dict[str, Any]:
    """The keywords of GPT.forward for all micro-batches in one."""
    keywords = dict(keywords_of_step[0])
    for name in keywords:
        values = [keywords[name] for keywords in keywords_of_step]
        if name == "longest":
            keywords[name] = max(values)
            continue
        # Rows of cu_seqlens differ in length: they are filled up with their last bound.
        width = max(value.shape[1] for value in values)
        filled = [F.pad(value, (0, width - value.shape[1]), value=length) for value in values]
        keywords[name] = torch.cat(filled)
    return keywords
